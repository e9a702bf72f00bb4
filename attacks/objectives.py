"""Matching distances between what a guess would have sent and what was sent. All sums are taken in float64."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from pflsec.core.items import Items, same_names

Objective = Callable[[Items], Tensor]
"""(what the guess would have sent) -> 0-d, to be minimised."""

EPS = 1e-30


def _squared_norm(items: Mapping[str, Tensor]) -> Tensor:
    """Return |items|^2 as one vector, but at least EPS. float32 sums would hide the last part of a descent."""
    if not items:
        return torch.tensor(EPS, dtype=torch.float64)
    return torch.stack([v.double().square().sum() for v in items.values()]).sum().clamp(min=EPS)


def relative_squared(seen: Mapping[str, Tensor]) -> Objective:
    """Return |guess - seen|^2 / |seen|^2. The scale makes one tolerance fit trained and untrained networks."""
    difference, size = squared(seen), _squared_norm(seen)
    return lambda guess: difference(guess) / size


def squared(seen: Mapping[str, Tensor]) -> Objective:
    """Return |guess - seen|^2, the plain sum of DLG (Zhu et al. 2019, eq. 4)."""
    same = {k: v.double() for k, v in seen.items()}

    def distance(guess: Items) -> Tensor:
        same_names(guess, same)
        return torch.stack([(guess[k].double() - v).square().sum() for k, v in same.items()]).sum()

    return distance


def cosine(seen: Mapping[str, Tensor]) -> Objective:
    """Return 1 - cos(guess, seen) over all items as one vector (Geiping et al. 2020, eq. 4)."""
    size = _squared_norm(seen).sqrt()
    unit = {k: v.double() / size for k, v in seen.items()}

    def distance(guess: Items) -> Tensor:
        same_names(guess, unit)
        inner = torch.stack([(guess[k].double() * v).sum() for k, v in unit.items()]).sum()
        return 1 - inner / _squared_norm(guess).sqrt()

    return distance
