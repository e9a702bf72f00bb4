"""Epsilon and the noise for it, beside accountants of other making, at budgets of every size."""

import math

import numpy as np
import pytest
from opacus.accountants.analysis.rdp import compute_rdp
from scipy.optimize import brentq
from scipy.stats import norm

from pflsec.core.errors import ConfigError, PrivacyError
from pflsec.defenses import accounting
from pflsec.runtime.defending import parse_defense

DELTA = 1e-5
EXTREME = [(1e-3, 0.05, 100), (1e-3, 1.0, 10), (1e6, 0.05, 100), (1e6, 1.0, 1)]


def renyi(sigma: float, rate: float, order: float) -> float:
    """Return the divergence of (1 - q) N(0, s^2) + q N(1, s^2) from N(0, s^2), by quadrature."""
    x = np.linspace(-12 * sigma - 2, 12 * sigma + order + 2, 8_001)
    ratio = np.log1p(-rate + rate * np.exp(np.minimum((2 * x - 1) / (2 * sigma**2), 700)))
    inside = norm.logpdf(x, scale=sigma) + order * ratio
    return (np.log(np.trapezoid(np.exp(inside - inside.max()), x)) + inside.max()) / (order - 1)


def by_quadrature(sigma: float, rate: float, steps: int) -> float:
    """Return the least epsilon over orders by Balle et al. 2020, theorem 21: D - (ln d + ln a)/(a - 1) + ln((a - 1)/a)."""
    orders = np.concatenate([np.arange(1.2, 10, 0.4), np.arange(10, 64, 3.0)])
    return min(
        steps * renyi(sigma, rate, a) - (math.log(DELTA) + math.log(a)) / (a - 1) + math.log((a - 1) / a)
        for a in orders
    )


def exact(sigma: float, steps: int) -> float:
    """Return epsilon of so many Gaussian mechanisms: Balle, Wang 2018, theorem 8, with mu = sqrt(steps)/sigma."""
    mu = math.sqrt(steps) / sigma

    def missing(epsilon: float) -> float:
        high, low = norm.cdf(mu / 2 - epsilon / mu), norm.cdf(-mu / 2 - epsilon / mu)
        return float(high - math.exp(epsilon) * low - DELTA)

    return float(brentq(missing, 1e-6, 200))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sigma", "rate", "steps"), [(1.0, 1 / 198, 19700), (0.8, 0.02, 500), (2.0, 0.1, 1000), (5.0, 1.0, 50)]
)
def test_epsilon_is_that_of_the_divergence_taken_by_quadrature(sigma: float, rate: float, steps: int):
    found = accounting.epsilon([(sigma, rate, steps)], DELTA)
    assert found == pytest.approx(by_quadrature(sigma, rate, steps), rel=0.01)


@pytest.mark.parametrize(("sigma", "steps"), [(5.0, 25), (2.0, 10)])
def test_without_sampling_prv_is_exact_and_rdp_a_bound_of_it(sigma: float, steps: int):
    """prv is right up to an absolute error of 0.01."""
    account = [(sigma, 1.0, steps)]
    true = exact(sigma, steps)
    assert accounting.epsilon(account, DELTA, "prv") == pytest.approx(true, rel=0.01)
    assert true <= accounting.epsilon(account, DELTA) <= 1.1 * true


@pytest.mark.parametrize(("sigma", "rate"), [(1.0, 0.01), (5.0, 0.3)])
def test_the_divergence_at_whole_orders_is_that_of_opacus(sigma: float, rate: float):
    orders = [2.0, 7.0, 63.0, 200.0]
    found = [accounting.divergence(sigma, rate, order) for order in orders]
    assert found == pytest.approx(compute_rdp(q=rate, noise_multiplier=sigma, steps=1, orders=orders), rel=1e-6)


def test_a_small_epsilon_is_found_at_high_orders():
    """Opacus's orders end at 63, below which no noise gives less than 0.1 at this delta; the exact value is 0.0044."""
    account = [(1000.0, 1.0, 1)]
    assert exact(1000.0, 1) <= accounting.epsilon(account, DELTA) <= 1.25 * exact(1000.0, 1) < 0.006


@pytest.mark.parametrize(("target", "rate", "steps"), [*EXTREME, (1.0, 0.05, 100)])
def test_the_noise_for_a_budget_never_overspends_it(target: float, rate: float, steps: int):
    sigma = accounting.noise_for(target, DELTA, rate, steps)
    assert accounting.epsilon([(sigma, rate, steps)], DELTA) <= target
    if sigma > 2 * accounting.LEAST:  # less noise is not looked for
        assert accounting.epsilon([(sigma / 1.02, rate, steps)], DELTA) > target


def test_a_budget_that_no_noise_keeps_is_refused():
    with pytest.raises(ConfigError, match=r"epsilon 1e-06 cannot be kept over 10000000 steps at sample rate 1"):
        accounting.noise_for(1e-6, 1e-12, 1.0, 10_000_000)
    assert accounting.noise_for(5.0, DELTA, 0.1, 10, ((3.0, 1.0, 5),)) > accounting.noise_for(5.0, DELTA, 0.1, 10)


def test_noise_is_found_and_budgets_are_kept_by_rdp_whatever_is_stated(monkeypatch: pytest.MonkeyPatch):
    def asked(*_: object) -> float:
        raise AssertionError("prv takes seconds a value")

    monkeypatch.setattr(accounting, "_prv", asked)
    for text in ("dp-sgd:epsilon=2,accountant=prv", "dp-fedavg:epsilon=2,accountant=prv"):
        made = parse_defense(text)
        assert made.bound([(1.0, 0.1, 10)], 100) == accounting.epsilon([(1.0, 0.1, 10)], 1e-5)  # type: ignore[attr-defined]
    assert parse_defense("dp-sgd:epsilon=2,accountant=prv").noise_multiplier(100, 0.1, 10) > 0  # type: ignore[attr-defined]
    assert parse_defense("dp-fedavg:epsilon=2,accountant=prv").planned(100, 0.1, 10).sigma > 0  # type: ignore[attr-defined]


def test_prv_is_never_above_rdp_and_says_where_it_has_no_answer(monkeypatch: pytest.MonkeyPatch):
    tiny = [(5000.0, 0.01, 100)]
    assert accounting.epsilon(tiny, DELTA, "prv") == accounting.epsilon(tiny, DELTA) < 0.01
    from opacus.accountants import PRVAccountant

    def fails(*_: object, **__: object) -> float:
        raise ValueError("the grid is too large\nmore")

    monkeypatch.setattr(PRVAccountant, "get_epsilon", fails)
    with pytest.raises(PrivacyError, match=r"prv has no epsilon for 3 steps .*too large\). Use accountant=rdp"):
        accounting.epsilon([(1.23, 0.1, 3)], DELTA, "prv")
