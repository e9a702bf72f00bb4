"""Matching distances between what a guess would have sent and what was sent.

Each is computed from the difference itself, so that float32 resolves the last part of a descent, and so is its slope: one pass
over the difference, where a graph of products would make several.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pflsec.core.items import Items, same_names

Objective = Callable[[Items], Tensor]
"""(what the guess would have sent) -> 0-d, to be minimised."""

EPS = 1e-30
FAINT = 1e-8  # of all squares: an item with less of them counts as if it had so much


def _squared_norm(tensors: Sequence[Tensor]) -> float:
    """Return |tensors|^2 as one vector."""
    return sum(float(torch.dot(v.flatten(), v.flatten())) for v in tensors)


class _Squared(torch.autograd.Function):
    """|guess - seen|^2 over all items."""

    @staticmethod
    def forward(ctx: Any, seen: Sequence[Tensor], *guess: Tensor) -> Tensor:  # type: ignore[override]
        apart = [g - s for g, s in zip(guess, seen, strict=True)]
        ctx.save_for_backward(*apart)
        return torch.tensor(_squared_norm(apart), dtype=torch.float64)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return None, *(d * (2 * float(slope)) for d in ctx.saved_tensors)


class _Angle(torch.autograd.Function):
    """1 - cos(guess, unit) = |guess / |guess| - unit|^2 / 2 over all items, given -unit of length 1."""

    @staticmethod
    def forward(ctx: Any, opposite: Sequence[Tensor], *guess: Tensor) -> Tensor:  # type: ignore[override]
        length = max(whole := _squared_norm(guess), EPS) ** 0.5
        apart = [torch.add(o, g, alpha=1 / length) for o, g in zip(opposite, guess, strict=True)]
        # The second part is zero but for a guess of hardly any length, whose direction says nothing: 1 in all.
        value = (_squared_norm(apart) + 1 - min(1.0, whole / EPS)) / 2 if math.isfinite(whole) else math.nan
        ctx.save_for_backward(*guess, *apart)
        ctx.length, ctx.value = length, value
        return torch.tensor(value, dtype=torch.float64)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        half, shrink, size = len(ctx.saved_tensors) // 2, -ctx.value / ctx.length, float(slope) / ctx.length
        guess, apart = ctx.saved_tensors[:half], ctx.saved_tensors[half:]
        return None, *(torch.add(d, g, alpha=shrink).mul_(size) for g, d in zip(guess, apart, strict=True))


def _compared(how: type[torch.autograd.Function], seen: Mapping[str, Tensor]) -> Objective:
    """Return (what the guess would have sent) -> how(what was seen, that), in the arithmetic of the guess."""
    names = tuple(seen)

    @cache
    def cast(dtype: torch.dtype) -> list[Tensor]:
        return [v.to(dtype) for v in seen.values()]

    def distance(guess: Items) -> Tensor:
        same_names(guess, seen)
        return how.apply(cast(guess[names[0]].dtype), *(guess[k] for k in names))

    return distance


def relative_squared(seen: Mapping[str, Tensor]) -> Objective:
    """Return |guess - seen|^2 / |seen|^2. The scale makes one tolerance fit trained and untrained networks."""
    difference, size = squared(seen), max(_squared_norm([v.double() for v in seen.values()]), EPS)
    return lambda guess: difference(guess) / size


def squared_and_absolute(seen: Mapping[str, Tensor], alpha: float) -> Objective:
    """Return the mean over all items of |guess - seen|^2 / |seen|^2 + alpha |guess - seen|_1 / |seen|_1 (after Deng et al. 2021,
    eq. 4): each layer counts alike, however small its gradient, unless it is hardly any."""
    same = {k: v.double() for k, v in seen.items()}
    least = FAINT * max(_squared_norm(list(same.values())), EPS)
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
    return _compared(_Squared, seen)


def cosine(seen: Mapping[str, Tensor]) -> Objective:
    """Return 1 - cos(guess, seen) over all items as one vector (Geiping et al. 2020, eq. 4)."""
    exact = {k: v.double() for k, v in seen.items()}
    whole = _squared_norm(list(exact.values()))
    if whole < EPS:  # nothing that was seen has a direction: every guess is as far from it
        apart = squared(seen)
        return lambda guess: 1 + 0 * apart(guess)
    return _compared(_Angle, {k: v / -(whole**0.5) for k, v in exact.items()})
