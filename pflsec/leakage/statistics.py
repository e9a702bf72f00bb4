"""Intervals for leakage numbers, from the core: reports use the same ones and may not import this package."""

from pflsec.core.statistics import (
    FEWEST,
    ONE_CLUSTER,
    RESAMPLES,
    TOO_FEW,
    cluster_bootstrap,
    paired_difference,
    summary,
    verdict,
    wilson,
)

__all__ = [
    "FEWEST",
    "ONE_CLUSTER",
    "RESAMPLES",
    "TOO_FEW",
    "cluster_bootstrap",
    "paired_difference",
    "summary",
    "verdict",
    "wilson",
]
