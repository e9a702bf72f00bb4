"""The gradient that one step on some images would follow, differentiable in everything."""

from collections.abc import Collection

import torch
import torch.nn.functional as F
from torch import Tensor

from pflsec.core.items import Items, arithmetic, cast
from pflsec.core.network import Net


def mean_gradient(net: Net, items: Items, names: Collection[str], x: Tensor, y: Tensor) -> Items:
    """Return the gradient of the mean cross entropy in the items of these names.

    x [B, C, H, W], or tokens [B, T]; y int64 [B] or probabilities [B, classes]. Stands in no context: see Net.training.
    """
    seen = cast(items, arithmetic(x))
    held = {k: v.view_as(v) if v.requires_grad else v.detach().requires_grad_(k in names) for k, v in seen.items()}
    loss = F.cross_entropy(net.logits(held, x), y)
    found = torch.autograd.grad(loss, [held[k] for k in names], create_graph=True, allow_unused=True)
    return {k: torch.zeros_like(held[k]) if g is None else g for k, g in zip(names, found, strict=True)}
