"""Metrics of recovered labels, as multisets: the order in which an attack lists them means nothing."""

from collections import Counter
from collections.abc import Iterable


def overlap(true: Iterable[int], found: Iterable[int]) -> float:
    """Return sum_c min(n_c, n'_c) / B, the share of the batch's labels that were recovered, in [0, 1].

    A list longer than the batch is divided by its own length instead: guessing every class must not pay.
    Raises ValueError when there is no true label.
    """
    a, b = Counter(true), Counter(found)
    if not a:
        raise ValueError("the overlap of labels needs at least one true label")
    return (a & b).total() / max(a.total(), b.total())


def exact(true: Iterable[int], found: Iterable[int]) -> bool:
    """Return whether the labels are the same, with the same counts."""
    return Counter(true) == Counter(found)
