"""Privacy accounting with Opacus's accountants. An account is a list of (noise multiplier, sample rate, steps)."""

import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal

import numpy as np
from scipy.special import gammaln, logsumexp

from pflsec.core.defense import Spend
from pflsec.core.errors import ConfigError, PrivacyError, first_line

Method = Literal["rdp", "prv"]
Account = tuple[Spend, ...]

LEAST, MOST = 0.01, 1e6
"""Noise multipliers that are considered for a budget."""
CLOSE = 1.005
"""A noise multiplier is found up to this factor."""
HIGH = tuple(int(64 * 1.2**k) for k in range(42))
"""Orders beyond those of Opacus, up to 1e5: a small epsilon has its best one there."""


def epsilon(account: Sequence[Spend], delta: float, method: Method = "rdp") -> float:
    """Return the epsilon that an account amounts to at this delta, composed over all its steps; reading changes nothing.

    rdp is a valid upper bound and fast; prv is slow, and the smaller of rdp's and a tighter one that is exact to 0.01. Infinite
    where a step had no noise. Raises PrivacyError where prv has no answer.
    """
    merged = _merged(account)
    if not merged:
        return 0.0
    if any(sigma == 0 for sigma, _, _ in merged):
        return float("inf")
    quick = _rdp(merged, delta)
    return min(quick, _prv(merged, delta)) if method == "prv" else quick


def noise_for(
    target: float, delta: float, sample_rate: float, steps: int, beside: Account = (), who: str = "dp-sgd"
) -> float:
    """Return the least noise multiplier with which so many steps stay within the target epsilon by rdp, up to `CLOSE`.

    beside  what else stands on the account
    who     key of the defense, for messages
    Raises ConfigError when no noise is enough.
    """
    if (taken := epsilon(beside, delta)) >= target:
        raise ConfigError(
            f"{who}: what a client releases beside its steps takes epsilon {taken:.3g} of its budget of {target:g}. Raise "
            "epsilon, or dp-release's noise_multiplier, or lower rounds."
        )

    def within(sigma: float) -> bool:
        return epsilon([*beside, (sigma, sample_rate, steps)], delta) <= target

    high = 1.0
    while not within(high) and high < MOST:
        high *= 2
    if not within(high):
        raise ConfigError(
            f"{who}: epsilon {target:g} cannot be kept over {steps} steps at sample rate {sample_rate:.3g} by any noise "
            f"multiplier up to {high:g}. Raise epsilon, or lower rounds or epochs."
        )
    low = high / 2
    while low > LEAST and within(low):
        low, high = low / 2, low
    while high / low > CLOSE and high > LEAST:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if within(middle) else (middle, high)
    return high


@cache
def _rdp(account: Account, delta: float) -> float:
    """Return epsilon by Renyi divergences: they add up over steps, so that one of each kind is all that is computed."""
    from opacus.accountants import RDPAccountant

    usual = tuple(RDPAccountant.DEFAULT_ALPHAS)
    found, order = _best(account, usual, delta)
    return found if order < usual[-1] else min(found, _best(account, HIGH, delta)[0])


def _best(account: Account, orders: tuple[float, ...], delta: float) -> tuple[float, float]:
    """Return the least epsilon over these orders, and its order."""
    from opacus.accountants.analysis.rdp import get_privacy_spent

    total = sum(steps * _one_step(sigma, rate, orders) for sigma, rate, steps in account)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a hint at orders at the edge of the grid: the bound is valid all the same
        found, order = get_privacy_spent(orders=list(orders), rdp=total, delta=delta)
    return max(0.0, float(found)), float(order)


@cache
def _one_step(sigma: float, rate: float, orders: tuple[float, ...]) -> Any:
    """Return the Renyi divergence of one step at these orders, as an array."""
    from opacus.accountants.analysis.rdp import compute_rdp

    if orders is HIGH and rate < 1:
        return np.array([divergence(sigma, rate, order) for order in orders])
    return compute_rdp(q=rate, noise_multiplier=sigma, steps=1, orders=list(orders))


def divergence(sigma: float, rate: float, order: float) -> float:
    """Return the Renyi divergence of one step with subsampling at a whole order, which may be large: the binomial sum of
    Mironov, Talwar, Zhang 2019, arXiv 1908.10530, section 3.3, in logarithms (Opacus's overflows beyond order 1000)."""
    k = np.arange(order + 1)
    chosen = gammaln(order + 1) - gammaln(k + 1) - gammaln(order - k + 1)
    log_a = logsumexp(chosen + k * np.log(rate) + (order - k) * np.log1p(-rate) + k * (k - 1) / (2 * sigma**2))
    return max(0.0, float(log_a)) / (order - 1)


@cache
def _prv(account: Account, delta: float) -> float:
    from opacus.accountants import PRVAccountant

    accountant = PRVAccountant()
    accountant.history = list(account)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return float(accountant.get_epsilon(delta=delta))
    except (ValueError, RuntimeError, ArithmeticError, MemoryError, IndexError) as error:
        raise PrivacyError(
            f"the accountant prv has no epsilon for {sum(n for *_, n in account)} steps at delta {delta:g} "
            f"({first_line(error)}). Use accountant=rdp."
        ) from error


def _merged(account: Sequence[Spend]) -> Account:
    """Return the account with equal mechanisms added up, in the order in which they first appear."""
    totals: dict[tuple[float, float], int] = {}
    for sigma, rate, steps in account:
        totals[sigma, rate] = totals.get((sigma, rate), 0) + steps
    return tuple((sigma, rate, steps) for (sigma, rate), steps in totals.items() if steps)
