"""Matrices by their leading singular values, as a wire format that is differentiable in what was compressed."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pflsec.core.items import Items

DENSE = -1
"""In place of a rank: sent as it is."""


def pack(items: Mapping[str, Tensor], energy: float) -> Items:
    """Return `update` [n], all numbers in a row, and `ranks` [items], one for each item.

    An item of two or more dimensions is a matrix [first, all others], sent as U, S, V (see `leading`) where that is fewer
    numbers than it has; all else is sent as it is.
    """
    parts, ranks = [torch.zeros(0, dtype=next(iter(items.values())).dtype)], []
    for value in items.values():
        matrix = value.reshape(value.shape[0], -1) if value.dim() > 1 else value
        factors = leading(matrix, energy) if matrix.dim() > 1 and torch.isfinite(matrix).all() else (value,)
        fewer = sum(f.numel() for f in factors) < value.numel()
        ranks.append(factors[0].shape[1] if fewer else DENSE)
        parts += [f.flatten() for f in factors] if fewer else [value.flatten()]
    return {"update": torch.cat(parts), "ranks": torch.tensor(ranks)}


def unpack(packed: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> Items:
    """Return the items that were packed, in these shapes."""
    found, numbers, at = {}, packed["update"], 0
    for (name, shape), k in zip(shapes.items(), packed["ranks"].tolist(), strict=True):
        size = torch.Size(shape).numel()
        if k == DENSE:
            found[name] = numbers[at : at + size].reshape(shape)
            at += size
            continue
        rows, columns = shape[0], size // shape[0]
        u, s, v = numbers[at : at + k * (rows + 1 + columns)].split([k * rows, k, k * columns])
        found[name] = (u.reshape(rows, k) * s @ v.reshape(k, columns)).reshape(shape)
        at += k * (rows + 1 + columns)
    return found


def leading(matrix: Tensor, energy: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return U [m, k], S [k], V [k, n] with U diag(S) V near the matrix [m, n]: the fewest singular values, at least one,
    whose squares make up this share of all. Of a zero matrix k = 0.

    In each column of U the largest entry is positive, so that the factors are unique where the values are. Where two of
    them that are kept coincide, the slope of one vector into the other is left out.
    """
    return Leading.apply(matrix, energy)


def rank(values: Tensor, energy: float) -> int:
    """Return how many of these singular values (falling) make up this share of the sum of their squares."""
    if not len(values) or not values[0] > 0:
        return 0
    power = (values / values[0]).square().cumsum(0)
    return int((power < energy * power[-1]).sum()) + 1


class Leading(torch.autograd.Function):
    """torch's derivative of all singular vectors is not finite where values coincide, as the many zeros of a gradient of few
    samples do. That of the leading ones needs only gaps between a kept value and the others."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, energy: float) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        u, s, v = torch.linalg.svd(matrix, full_matrices=False)
        sign = u.gather(0, u.abs().argmax(0, keepdim=True)).sign()
        u, v, k = u * sign, v * sign.T, rank(s, energy)
        ctx.save_for_backward(u, s, v)
        return u[:, :k].clone(), s[:k].clone(), v[:k].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_u: Tensor, to_s: Tensor, to_v: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """With dC = U^T dA V: U^T dU = F (dC S + S dC^T), V^T dV = F (S dC + dC^T S) element by element, with
        F_ij = 1/(s_j^2 - s_i^2), and outside of U and V dU = dA V / S, dV = dA^T U / S."""
        u, s, v = ctx.saved_tensors
        k = len(to_s)
        a, b = u.T @ to_u, v @ to_v.T
        gap = s[:k].square() - s.square()[:, None]
        near = gap.abs() <= torch.finfo(s.dtype).eps * s[:1].square()
        f = torch.where(near, 0, 1 / torch.where(near, 1, gap))
        columns, rows = f * (a * s[:k] + b * s[:, None]), (f * (a * s[:, None] + b * s[:k])).T
        columns[range(k), range(k)] += to_s
        from_u = u @ columns + (to_u - u @ a) / s[:k]
        from_v = rows @ v + (to_v - b.T @ v) / s[:k, None]
        return from_u @ v[:k] + u[:, :k] @ from_v, None
