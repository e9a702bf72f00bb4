"""Privacy accounting with Opacus's accountants. An account is a list of (noise multiplier, sample rate, steps)."""

import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal

from pflsec.core.defense import Spend
from pflsec.core.errors import ConfigError

Method = Literal["rdp", "prv"]


def epsilon(account: Sequence[Spend], delta: float, method: Method = "rdp") -> float:
    """Return the epsilon that an account amounts to at this delta, composed over all its steps; reading changes nothing.

    rdp is a valid upper bound and fast; prv is tighter and slow. Infinite where a step had no noise.
    """
    merged = _merged(account)
    if not merged:
        return 0.0
    if any(sigma == 0 for sigma, _, _ in merged):
        return float("inf")
    from opacus.accountants import PRVAccountant, RDPAccountant
    from opacus.accountants.analysis.rdp import get_privacy_spent

    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # Opacus hints at orders at the edge of its grid: the bound is valid all the same
        if method == "prv":
            accountant = PRVAccountant()
            accountant.history = merged
            return float(accountant.get_epsilon(delta=delta))
        # Renyi divergences add up over steps, so that one step of each kind is all that must be computed.
        total = sum(steps * _one_step(sigma, rate) for sigma, rate, steps in merged)
        found, _ = get_privacy_spent(orders=RDPAccountant.DEFAULT_ALPHAS, rdp=total, delta=delta)
        return float(found)


@cache
def _one_step(sigma: float, rate: float) -> Any:
    """Return the Renyi divergence of one step at Opacus's orders, as an array."""
    from opacus.accountants import RDPAccountant
    from opacus.accountants.analysis.rdp import compute_rdp

    return compute_rdp(q=rate, noise_multiplier=sigma, steps=1, orders=RDPAccountant.DEFAULT_ALPHAS)


@cache
def noise_for(
    target: float, delta: float, sample_rate: float, steps: int, method: Method = "rdp", who: str = "dp-sgd"
) -> float:
    """Return the least noise multiplier with which so many steps stay within the target epsilon, to 1 %.

    who  key of the defense, for messages
    Raises ConfigError when no noise that Opacus considers is enough.
    """
    from opacus.accountants.utils import get_noise_multiplier

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return float(
                get_noise_multiplier(
                    target_epsilon=target,
                    target_delta=delta,
                    sample_rate=sample_rate,
                    steps=steps,
                    accountant=method,
                    epsilon_tolerance=min(0.01, target / 100),
                )
            )
        except ValueError as error:
            raise ConfigError(
                f"{who}: epsilon {target:g} cannot be kept over {steps} steps at sample rate {sample_rate:.3g} ({error}). "
                "Raise epsilon, or lower rounds or epochs."
            ) from error


def _merged(account: Sequence[Spend]) -> list[Spend]:
    """Return the account with equal mechanisms added up, in the order in which they first appear."""
    totals: dict[tuple[float, float], int] = {}
    for sigma, rate, steps in account:
        totals[sigma, rate] = totals.get((sigma, rate), 0) + steps
    return [(sigma, rate, steps) for (sigma, rate), steps in totals.items() if steps]
