"""Matching distances between what a guess would have sent and what was sent. All sums are taken in float64."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from pflsec.core.items import Items, same_names

Objective = Callable[[Items], Tensor]
"""(what the guess would have sent) -> 0-d, to be minimised."""

EPS = 1e-30
FAINT = 1e-8  # of all squares: an item with less of them counts as if it had so much


def _squared_norm(items: Mapping[str, Tensor]) -> Tensor:
    """Return |items|^2 as one vector, but at least EPS. float32 sums would hide the last part of a descent."""
    if not items:
        return torch.tensor(EPS, dtype=torch.float64)
    return torch.stack([_dot(v.double(), v.double()) for v in items.values()]).sum().clamp(min=EPS)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner product of two tensors as vectors, 0-d; no product is written out, here or in the gradient."""
    return torch.dot(a.flatten(), b.flatten())


def relative_squared(seen: Mapping[str, Tensor]) -> Objective:
    """Return |guess - seen|^2 / |seen|^2. The scale makes one tolerance fit trained and untrained networks."""
    difference, size = squared(seen), _squared_norm(seen)
    return lambda guess: difference(guess) / size


def squared_and_absolute(seen: Mapping[str, Tensor], alpha: float) -> Objective:
    """Return the mean over all items of |guess - seen|^2 / |seen|^2 + alpha |guess - seen|_1 / |seen|_1 (after Deng et al. 2021,
    eq. 4): each layer counts alike, however small its gradient, unless it is hardly any."""
    same = {k: v.double() for k, v in seen.items()}
    least = FAINT * _squared_norm(same)
    squares = {k: v.square().sum().clamp(min=least) for k, v in same.items()}
    sizes = {k: torch.maximum(v.abs().sum(), squares[k].sqrt()) for k, v in same.items()}

    def distance(guess: Items) -> Tensor:
        same_names(guess, same)
        apart = {k: guess[k].double() - v for k, v in same.items()}
        parts = [d.square().sum() / squares[k] + alpha * d.abs().sum() / sizes[k] for k, d in apart.items()]
        return torch.stack(parts).mean()

    return distance


def squared(seen: Mapping[str, Tensor]) -> Objective:
    """Return |guess - seen|^2, the plain sum of DLG (Zhu et al. 2019, eq. 4)."""
    same = {k: v.double() for k, v in seen.items()}

    def distance(guess: Items) -> Tensor:
        same_names(guess, same)
        apart = [guess[k].double() - v for k, v in same.items()]
        return torch.stack([_dot(d, d) for d in apart]).sum()

    return distance


def cosine(seen: Mapping[str, Tensor]) -> Objective:
    """Return 1 - cos(guess, seen) over all items as one vector (Geiping et al. 2020, eq. 4)."""
    size = _squared_norm(seen).sqrt()
    unit = {k: v.double() / size for k, v in seen.items()}

    def distance(guess: Items) -> Tensor:
        same_names(guess, unit)
        exact = {k: guess[k].double() for k in unit}
        inner = torch.stack([_dot(exact[k], v) for k, v in unit.items()]).sum()
        return 1 - inner / _squared_norm(exact).sqrt()

    return distance
