"""Labels that can be read off the wire without any search."""

import torch
from torch import Tensor

from pflsec.wire.capture import Capture


def from_label_set(cap: Capture, rng: torch.Generator) -> Tensor | None:
    """Return labels int64 [B] from a label set on the wire, or None without one.

    Every class of the set is used once; where the batch is larger, the repeats are drawn at random.
    """
    held = cap.held_classes
    if held is None or not len(held):
        return None
    extra = max(0, cap.count - len(held))
    repeats = held[torch.randint(len(held), (extra,), generator=rng)]
    return torch.cat([held, repeats])[: cap.count].sort().values


def from_label_counts(cap: Capture) -> Tensor | None:
    """Return labels int64 [B] from a label histogram that is granted or on the wire, or None without one."""
    counts = cap.label_counts
    if counts is None or int(counts.sum()) != cap.count:
        return None
    return torch.repeat_interleave(torch.arange(len(counts)), counts)


def of_one_image(cap: Capture) -> Tensor | None:
    """Return the label of a batch of one, int64 [1], from the gradient of the last linear layer; None if it is not sent.

    Under cross entropy that layer's bias has gradient softmax - onehot: negative for the label alone (Zhao et al. 2020).
    Without a bias, the label's weight row points away from every other row. Two rows always point away from each other:
    there the label's is the negative one, provided that features are >= 0, as after ReLU.
    """
    if cap.count != 1 or cap.last_layer is None:
        return None
    bias, weight = (cap.target.get(f"{cap.last_layer}.{name}") for name in ("bias", "weight"))
    if bias is not None:
        return bias.argmin()[None]
    if weight is None:
        return None
    if len(weight) == 2:
        return weight.sum(1).argmin()[None] if bool((weight <= 0).all(1).any()) else None
    agreement = weight @ weight.T
    against = (agreement - torch.diag(agreement.diagonal())).sum(1)
    return against.argmin()[None]
