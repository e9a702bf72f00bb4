"""Who takes part in a round, and whose upload is lost."""

from collections.abc import Sequence

import numpy as np

from pflsec.core.streams import numpy_stream


def size(clients: int, participation: float) -> int:
    """Return the size of a cohort."""
    return max(1, round(participation * clients))


def rate(sampling: str, clients: int, participation: float) -> float:
    """Return a client's chance to be in a cohort; under `poisson` sampling that is the participation itself."""
    return participation if sampling == "poisson" else size(clients, participation) / clients


def by_chance(secret: int, t: int, clients: int, participation: float) -> list[int]:
    """Return a cohort that every client joins by chance on its own, sorted; possibly nobody. `secret` keeps it unknown."""
    return [int(c) for c in np.flatnonzero(numpy_stream("dp", secret, "cohort", t).random(clients) < participation)]


def draw(seed: int, t: int, clients: int, participation: float, weights: Sequence[float] | None = None) -> list[int]:
    """Return the cohort of round t, sorted: max(1, round(participation * clients)) clients without replacement.

    weights  each client's chance up to scale; None: equal chances
    """
    count = size(clients, participation)
    if count == clients:
        return list(range(clients))
    chances = None if weights is None else np.asarray(weights, float) / np.sum(weights)
    chosen = numpy_stream(seed, "cohort", t).choice(clients, size=count, replace=False, p=chances)
    return sorted(int(c) for c in chosen)


def lost(seed: int, t: int, cohort: Sequence[int], drop_rate: float) -> set[int]:
    """Return the clients of the cohort whose upload never arrives: round(drop_rate * size) of them."""
    count = round(drop_rate * len(cohort))
    return {int(c) for c in numpy_stream(seed, "drop", t).choice(cohort, size=count, replace=False)}
