"""Adam as a pure function of items, for servers that train something of their own."""

from collections.abc import Mapping

import torch
from torch import Tensor

from pflsec.core.items import Items, combine, prefixed, without_prefix

BETAS, EPS = (0.9, 0.999), 1e-8


def begin(params: Mapping[str, Tensor]) -> Items:
    """Return the memory of an optimiser that has not made a step."""
    zeros = {k: torch.zeros_like(v) for k, v in params.items()}
    return {"steps": torch.tensor(0)} | prefixed("mean", zeros) | prefixed("square", zeros)


def step(
    params: Items, memory: Items, gradients: Items, *, lr: float, weight_decay: float = 0.0
) -> tuple[Items, Items]:
    """Return parameters and memory after one step (Kingma and Ba 2015); the decay is added to the gradient."""
    count = int(memory["steps"]) + 1
    g = combine(lambda g, p: g + weight_decay * p, gradients, params)
    mean = combine(lambda m, g: torch.lerp(m, g, 1 - BETAS[0]), without_prefix("mean", memory), g)
    square = combine(lambda s, g: torch.lerp(s, g * g, 1 - BETAS[1]), without_prefix("square", memory), g)
    size = lr / (1 - BETAS[0] ** count)
    scale = (1 - BETAS[1] ** count) ** 0.5
    moved = combine(lambda p, m, s: p - size * m / (s.sqrt() / scale + EPS), params, mean, square)
    return moved, {"steps": torch.tensor(count)} | prefixed("mean", mean) | prefixed("square", square)
