"""Cases T12: what is said of a number."""

import numpy as np
import pytest

from pflsec.core.statistics import paired_difference


@pytest.mark.parametrize(("mean", "verdict"), [(-0.001, "not distinguishable from 0"), (-0.1, "lower")])
def test_u131_a_negative_advantage_is_told_from_none_by_its_interval(mean: float, verdict: str):
    """1000 victims of 50 clients, advantages of standard deviation 0.1 about their mean."""
    draws = np.random.default_rng(0).standard_normal(1000)
    advantage = mean + 0.1 * (draws - draws.mean()) / draws.std()
    found = paired_difference(advantage, np.zeros(1000), [i % 50 for i in range(1000)])
    assert found["mean"] == pytest.approx(mean)
    assert found["verdict"] == verdict
    low, high = found["ci"]
    assert (low <= 0 <= high) == (verdict != "lower")
