"""Matching distances between what a guess would have sent and what was sent. All sums are taken in float64."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from pflsec.core.items import Items, same_names

Objective = Callable[[Items], Tensor]
"""(what the guess would have sent) -> 0-d, to be minimised."""

EPS = 1e-30


def _sums(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return <a, b>, |a|^2, |b|^2 over all items as one vector. float32 sums hide the last part of a descent."""
    same_names(a, b)
    pairs = [(a[k].double(), b[k].double()) for k in b]
    return (
        torch.stack([(x * y).sum() for x, y in pairs]).sum(),
        torch.stack([x.square().sum() for x, _ in pairs]).sum(),
        torch.stack([y.square().sum() for _, y in pairs]).sum(),
    )


def relative_squared(seen: Mapping[str, Tensor]) -> Objective:
    """Return |guess - seen|^2 / |seen|^2. The scale makes one tolerance fit trained and untrained networks."""
    same = {k: v.double() for k, v in seen.items()}
    size = torch.stack([v.square().sum() for v in same.values()]).sum().clamp(min=EPS)

    def distance(guess: Items) -> Tensor:
        same_names(guess, same)
        return torch.stack([(guess[k].double() - v).square().sum() for k, v in same.items()]).sum() / size

    return distance


def squared(seen: Mapping[str, Tensor]) -> Objective:
    """Return |guess - seen|^2, the plain sum of DLG (Zhu et al. 2019, eq. 4)."""
    same = {k: v.double() for k, v in seen.items()}

    def distance(guess: Items) -> Tensor:
        same_names(guess, same)
        return torch.stack([(guess[k].double() - v).square().sum() for k, v in same.items()]).sum()

    return distance


def cosine(seen: Mapping[str, Tensor]) -> Objective:
    """Return 1 - cos(guess, seen) over all items as one vector (Geiping et al. 2020, eq. 4)."""
    same = {k: v.double() for k, v in seen.items()}

    def distance(guess: Items) -> Tensor:
        inner, left, right = _sums(guess, same)
        return 1 - inner / (left * right).clamp(min=EPS).sqrt()

    return distance
