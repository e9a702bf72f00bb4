"""Intervals for leakage numbers. The unit is a victim batch; units of one client are not independent.

Restarts and images of one batch are never units: give one value per victim.
"""

from collections.abc import Callable, Hashable, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np

from pflsec.core.streams import numpy_stream

Values = Sequence[float] | np.ndarray
Statistic = Callable[[np.ndarray], Any]

FEWEST = 5  # units; below that an interval would be a decoration
TOO_FEW = "n too small"
ONE_CLUSTER = "one client only"
RESAMPLES = 2000


def wilson(successes: float, n: int, level: float = 0.95) -> tuple[float, float]:
    """Return the Wilson score interval of a success rate, within [0, 1]; (0, 1) when n is 0.

    Wilson, JASA 1927. Raises ValueError unless 0 <= successes <= n and 0 < level < 1.
    """
    if not 0 <= successes <= n or not 0 < level < 1:
        raise ValueError(f"no interval for {successes} successes of {n} at level {level}")
    if n == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + level / 2)
    rate = successes / n
    centre = (rate + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * (rate * (1 - rate) / n + z * z / (4 * n * n)) ** 0.5
    low = 0.0 if successes == 0 else centre - half  # exact ends; rounding would leave 1e-17
    return low, 1.0 if successes == n else centre + half


def cluster_bootstrap(
    values: Values,
    clusters: Sequence[Hashable],
    statistic: Statistic = np.mean,
    resamples: int = RESAMPLES,
    seed: int = 0,
    *,
    level: float = 0.95,
) -> tuple[float, float]:
    """Return the percentile bootstrap interval of a statistic, whole clusters being drawn with replacement.

    values [n] and clusters [n] go together. A cluster is a client; with several training seeds give tuples
    (seed, client): seeds are drawn first, then clients within them. The result depends on neither the order
    of the rows nor any global random state. Efron & Tibshirani 1993, section 13.3; clusters: Davison &
    Hinkley 1997, 3.8. Raises ValueError for lengths that differ, values that are not finite (use
    psnr_capped), or fewer than 2 clusters.
    """
    array = _finite(values, clusters)
    if len(set(clusters)) < 2:
        raise ValueError("a clustered interval needs at least 2 clusters: within one nothing is independent")
    keys = [key if isinstance(key, tuple) else (key,) for key in clusters]
    if len({len(key) for key in keys}) > 1:
        raise ValueError("clusters must be all single names, or all tuples of one length")
    tree = _tree(sorted(zip(keys, array.tolist(), strict=True), key=repr))
    rng = numpy_stream(seed, "bootstrap")
    draws = [float(statistic(np.array(_resample(tree, rng)))) for _ in range(resamples)]
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def summary(values: Values, clusters: Sequence[Hashable], seed: int = 0) -> dict[str, Any]:
    """Return n, mean, median, max and ci: the mean's 95% interval (low, high), or why there is none."""
    array = _finite(values, clusters)
    result = {"n": len(array), "mean": None, "median": None, "max": None, "ci": TOO_FEW}
    if len(array):
        result |= {"mean": float(array.mean()), "median": float(np.median(array)), "max": float(array.max())}
    if len(array) >= FEWEST:
        several = len(set(clusters)) > 1
        result["ci"] = cluster_bootstrap(values, clusters, seed=seed) if several else ONE_CLUSTER
    return result


def paired_difference(a: Values, b: Values, clusters: Sequence[Hashable], seed: int = 0) -> dict[str, Any]:
    """Return the summary of a - b, victim by victim, and its verdict.

    a [n] and b [n] hold one metric of the same victims in the same order; "higher" means a above b.
    """
    first, second = _finite(a, clusters), _finite(b, clusters)
    result = summary((first - second).tolist(), clusters, seed)
    return result | {"verdict": verdict(result["ci"])}


def verdict(ci: tuple[float, float] | str) -> str:
    """Return "higher" or "lower" than 0, "not distinguishable from 0", or why there is no interval."""
    if isinstance(ci, str):
        return ci
    low, high = ci
    return "higher" if low > 0 else "lower" if high < 0 else "not distinguishable from 0"


def _finite(values: Values, clusters: Sequence[Hashable]) -> np.ndarray:
    array = np.asarray(values, dtype=np.float64)
    if array.shape != (len(clusters),):
        raise ValueError(f"one value and one cluster per victim: got {array.shape} and {len(clusters)}")
    if not np.isfinite(array).all():
        raise ValueError("a value is missing or not finite; count such victims apart, and use psnr_capped")
    return array


def _tree(rows: list[tuple[tuple[Hashable, ...], float]]) -> list[Any]:
    """Return nested lists, one level for each part of the keys, with the values as leaves."""
    if not rows[0][0]:
        return [value for _, value in rows]
    groups: dict[Hashable, list[tuple[tuple[Hashable, ...], float]]] = {}
    for key, value in rows:
        groups.setdefault(key[0], []).append((key[1:], value))
    return [_tree(group) for group in groups.values()]


def _resample(tree: list[Any], rng: np.random.Generator) -> list[float]:
    """Return the values of groups drawn with replacement at every level; the lowest groups are kept whole."""
    if not isinstance(tree[0], list):
        return tree
    return [value for i in rng.integers(len(tree), size=len(tree)) for value in _resample(tree[i], rng)]
