"""Class means of features: how they are made, laid out as a table, and used to predict."""

import torch
from torch import Tensor

TINY = 1e-30


def class_means(sums: Tensor, counts: Tensor) -> Tensor:
    """Return the mean of each class, [C, k], from its sum [C, k] and count [C]; zero where there is no row."""
    return sums / torch.where(counts > 0, counts, 1)[:, None]


def clipped(rows: Tensor, bound: float) -> Tensor:
    """Return rows [n, k], each times min(1, bound / its norm); differentiable, a row of zeros too."""
    sizes = (rows.double().square().sum(1, keepdim=True) + TINY).sqrt()
    return rows * (bound / sizes).clamp(max=1).to(rows.dtype)


def as_table(rows: Tensor, present: Tensor) -> Tensor:
    """Return the rows of the classes that are present [C] as a table of all, [C, ...], zero elsewhere."""
    table = rows.new_zeros(len(present), *rows.shape[1:])
    table[present] = rows
    return table


def nearest(z: Tensor, table: Tensor, allowed: Tensor) -> Tensor:
    """Return class scores [B, C] of features [B, d]: minus the distance to each class's row of the table [C, d], and minus
    infinity for classes that are not allowed [C]."""
    # By differences: the faster formula through inner products loses near ties, and would depend on the batch size.
    distance = torch.cdist(z, table, compute_mode="donot_use_mm_for_euclid_dist")
    return torch.where(allowed, -distance, -torch.inf)
