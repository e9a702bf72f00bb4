"""Items seen as one vector."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from pflsec.core.change import change, moved
from pflsec.core.items import Items


def length(items: Mapping[str, Tensor]) -> Tensor:
    """Return the Euclidean norm of all items as one vector, 0-d, summed in float64; 0 without items. Differentiable away
    from 0, where its slope is 0."""
    parts = [v.double().square().sum() for v in items.values()]
    total = torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64)
    return torch.where(total > 0, total, 1).sqrt() * (total > 0)


def root_mean_square(items: Mapping[str, Tensor]) -> float:
    """Return the root of the mean square of all numbers; 0 without any."""
    count = sum(v.numel() for v in items.values())
    return float(length(items)) / count**0.5 if count else 0.0


def shortened(items: Mapping[str, Tensor], bound: float) -> Items:
    """Return items * min(1, bound / |items|), all of them one vector; the items themselves where they are within the bound."""
    size = length(items)
    if float(size.detach()) <= bound:
        return dict(items)
    return {k: v * (bound / size).to(v.dtype) for k, v in items.items()}


def clipped(message: Items, reference: Items, bound: float) -> Items:
    """Return a message with its change from the reference shortened to the bound; the message itself where that is within it."""
    step = change(message, reference)
    return message if float(length(step)) <= bound else moved(message, reference, shortened(step, bound))


def noised(message: Items, reference: Items, size: float, relative: bool, draw: Callable[[Tensor], Tensor]) -> Items:
    """Return a message with size * draw(item) added to every item that has a reference; the message itself at size 0.

    relative  size counts in units of the change's root mean square
    draw      noise of unit size in the shape of an item
    """
    size *= root_mean_square(change(message, reference)) if relative else 1.0
    return message | {k: message[k] + size * draw(v) for k, v in reference.items()} if size else message
