"""Intervals against scipy, their coverage by simulation, and the clusters' effect."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from pflsec.leakage.statistics import cluster_bootstrap, paired_difference, summary, verdict, wilson


@pytest.mark.parametrize(("k", "n"), [(0, 1), (1, 1), (0, 20), (3, 20), (10, 20), (20, 20), (499, 1000)])
@pytest.mark.parametrize("level", [0.9, 0.95, 0.99])
def test_wilson_equals_scipys(k, n, level):
    expected = binomtest(k, n).proportion_ci(level, method="wilson")
    assert wilson(k, n, level) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_wilson_by_hand():
    """8 of 10 with z = 1.959964: (0.49016, 0.94332)."""
    assert wilson(8, 10) == pytest.approx((0.490162, 0.943318), abs=1e-6)


@given(st.integers(0, 50), st.integers(0, 50))
def test_wilson_lies_in_the_unit_interval_and_holds_the_rate(k, more):
    low, high = wilson(k, k + more)
    assert 0 <= low <= high <= 1
    if k + more:
        assert low <= k / (k + more) <= high


@pytest.mark.parametrize(("k", "n", "level"), [(3, 2, 0.95), (-1, 2, 0.95), (1, 2, 1.0), (1, 2, 0.0)])
def test_wilson_refuses_what_is_no_rate(k, n, level):
    with pytest.raises(ValueError, match="no interval"):
        wilson(k, n, level)


def test_bootstrap_is_deterministic_and_leaves_the_global_randomness_alone():
    values, clusters = np.random.default_rng(0).random(40), [i % 8 for i in range(40)]
    np.random.seed(5)
    untouched = np.random.random()
    np.random.seed(5)
    before = torch.get_rng_state()
    first = cluster_bootstrap(values, clusters, seed=3)
    assert np.random.random() == untouched
    assert torch.equal(before, torch.get_rng_state())
    assert first == cluster_bootstrap(values, clusters, seed=3)
    assert first != cluster_bootstrap(values, clusters, seed=4)


def test_bootstrap_does_not_depend_on_the_order_of_rows():
    rng = np.random.default_rng(0)
    values, clusters = rng.random(30), [f"c{i % 6}" for i in range(30)]
    order = rng.permutation(30)
    shuffled = cluster_bootstrap(values[order], [clusters[i] for i in order], seed=1)
    assert shuffled == pytest.approx(cluster_bootstrap(values, clusters, seed=1), abs=1e-12)


def test_bootstrap_covers_the_mean_about_as_often_as_it_says():
    """25 clients of 2 victims with a client effect: nominal 95%; percentile intervals run a little short."""
    rng = np.random.default_rng(11)
    clients = np.repeat(np.arange(25), 2)
    covered = 0
    for trial in range(200):
        values = rng.normal(size=25)[clients] + 0.3 * rng.normal(size=50)
        low, high = cluster_bootstrap(values, clusters=clients.tolist(), resamples=300, seed=trial)
        covered += low <= 0 <= high
    assert 175 <= covered <= 199


def test_clusters_widen_the_interval():
    """Ten equal victims in each client hold no more news than one."""
    rng = np.random.default_rng(2)
    effect = rng.normal(size=12)
    values, clusters = np.repeat(effect, 10), np.repeat(np.arange(12), 10).tolist()
    low, high = cluster_bootstrap(values, clusters)
    naive_low, naive_high = cluster_bootstrap(values, list(range(120)))
    assert high - low > 2.5 * (naive_high - naive_low)
    single = cluster_bootstrap(effect, list(range(12)))
    assert (low, high) == pytest.approx(single, abs=0.15)


def test_seeds_are_drawn_before_clients():
    """All variation is between 3 seeds: their 30 clients must not pass for independent."""
    seeds, clients = np.repeat([0, 1, 2], 10), np.tile(np.arange(10), 3)
    values = np.array([0.0, 1.0, 2.0])[seeds]
    nested = cluster_bootstrap(values, list(zip(seeds.tolist(), clients.tolist(), strict=True)))
    flat = cluster_bootstrap(values, [f"{s}/{c}" for s, c in zip(seeds, clients, strict=True)])
    assert nested == (0.0, 2.0)
    assert flat[1] - flat[0] < 1


def test_bootstrap_takes_other_statistics():
    values = [1.0] * 9 + [1000.0]
    assert cluster_bootstrap(values, list(range(10)), np.median) == (1.0, 1.0)
    assert cluster_bootstrap(values, list(range(10)))[1] > 100


@pytest.mark.parametrize(
    ("values", "clusters", "why"),
    [
        ([1.0, 2.0], [0, 0], "at least 2 clusters"),
        ([1.0, np.inf], [0, 1], "not finite"),
        ([1.0, None], [0, 1], "missing"),
        ([1.0, 2.0, 3.0], [0, 1], "one cluster per victim"),
        ([1.0, 2.0], [0, (0, 1)], "all tuples of one length"),
    ],
)
def test_bootstrap_refuses_what_has_no_interval(values, clusters, why):
    with pytest.raises(ValueError, match=why):
        cluster_bootstrap(values, clusters)


def test_summary():
    values, clusters = [1.0, 2.0, 3.0, 4.0, 10.0], [0, 0, 1, 1, 2]
    result = summary(values, clusters)
    assert (result["n"], result["mean"], result["median"], result["max"]) == (5, 4.0, 3.0, 10.0)
    assert result["ci"] == cluster_bootstrap(values, clusters)
    assert summary(values[:4], clusters[:4])["ci"] == "n too small"
    assert summary(values, [7] * 5)["ci"] == "one client only"
    empty = summary([], [])
    assert (empty["n"], empty["mean"], empty["max"], empty["ci"]) == (0, None, None, "n too small")


def test_paired_difference_sees_what_unpaired_numbers_hide():
    """Victims differ by tens of dB, the methods by 1 dB on each: only pairing shows it."""
    rng = np.random.default_rng(4)
    b = rng.uniform(5, 60, size=30)
    a, clients = b + 1 + 0.1 * rng.normal(size=30), [i % 10 for i in range(30)]
    result = paired_difference(a.tolist(), b.tolist(), clients)
    assert result["mean"] == pytest.approx(1.0, abs=0.1)
    assert result["verdict"] == "higher"
    assert paired_difference(b.tolist(), a.tolist(), clients)["verdict"] == "lower"
    low, high = summary(a, clients)["ci"]
    assert low < b.mean() < high


def test_a_difference_near_zero_is_called_so():
    rng = np.random.default_rng(6)
    noise = rng.normal(size=1000)
    noise += -0.001 - noise.mean()
    result = paired_difference(noise.tolist(), [0.0] * 1000, list(range(1000)))
    assert result["mean"] == pytest.approx(-0.001)
    assert result["verdict"] == "not distinguishable from 0"
    assert paired_difference([1.0, 2.0], [0.0, 0.0], [0, 1])["verdict"] == "n too small"
    assert verdict((0.0, 1.0)) == "not distinguishable from 0"


def test_pairs_must_be_complete():
    with pytest.raises(ValueError, match="one cluster per victim"):
        paired_difference([1.0, 2.0], [1.0], [0, 1])
