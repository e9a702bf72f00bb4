"""Labels that can be read off the wire without any search."""

import torch
from torch import Tensor

from pflsec.core.errors import NotApplicable
from pflsec.core.items import Items
from pflsec.wire.capture import Capture

ROUNDING = 1e-3  # images; float32 weights leave far less


def granted(cap: Capture) -> Tensor:
    """Return the labels that the adversary is granted (see Capture.labels). Raises NotApplicable without any."""
    if cap.labels is None:
        lost = ", or the vault does not hold those that were trained with" if cap.soft_labels else ""
        raise NotApplicable(f"the labels are not granted to this adversary{lost}")
    return cap.labels


def from_wire(cap: Capture, rng: torch.Generator) -> tuple[Tensor | None, str]:
    """Return labels int64 [B] that are granted as counts or read off a histogram or a label set on the wire, and which of
    these it was: counts or wire; (None, "none") without any."""
    if (found := from_label_counts(cap)) is not None:
        return found, "wire" if cap.counts is None else "counts"
    found = from_label_set(cap, rng)
    return found, "none" if found is None else "wire"


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
    return listed(counts)


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


def of_counts(cap: Capture, guesses: Tensor, state: Items) -> Tensor | None:
    """Return how many images of each class are in the batch, int64 [classes], from the last linear layer's bias; None if it
    is not sent or does not tell.

    guesses  what the batch might be, such as noise, [guesses, B, C, H, W]

    The bias has gradient r_c = pbar_c - n_c / B, with pbar the mean prediction and n_c the counts (Geng et al. 2021). The
    guesses tell pbar, and how steeply r falls in the labels: replays of the client's own code, so that other losses and
    several steps are treated alike. As pbar >= 0, no n_c is below -B r_c, however little the guesses resemble the batch.
    """
    name, classes, count = f"{cap.last_layer}.bias", cap.input.classes, cap.count
    seen = cap.target.get(name)
    if seen is None or seen.shape != (classes,):
        return None
    flat, first = torch.full((classes,), 1 / classes, dtype=guesses.dtype), torch.eye(classes, dtype=guesses.dtype)[0]
    alike, one = (
        torch.stack(
            [cap.replay(x, labels.expand(count, classes), state)[name].detach().double() for x in guesses]
        ).mean(0)
        for labels in (flat, first)
    )
    slope = float((alike - one)[0] / (1 - 1 / classes))
    if not slope > 0:
        return None
    parts = count * (1 / classes + (alike - seen.double()) / slope)
    least = (-count * seen.double() / slope - ROUNDING).ceil().clamp(min=0)
    return whole(parts, count, least.long())


def whole(parts: Tensor, count: int, least: Tensor) -> Tensor:
    """Return whole numbers of sum `count`, by largest remainder from the parts [C], none below `least` where these have no
    larger sum themselves; int64 [C]."""
    if least.sum() > count:
        parts, least = least, torch.zeros_like(least)
    left, open_parts = count - int(least.sum()), (parts - least).clamp(min=0)
    if not open_parts.sum() > 0:
        open_parts = torch.ones_like(open_parts)
    shares = open_parts.double() * (left / float(open_parts.sum()))
    found = shares.floor()
    found[(shares - found).argsort(descending=True, stable=True)[: left - int(found.sum())]] += 1
    return least + found.long()


def hard(y: Tensor) -> Tensor:
    """Return labels int64 [B] of labels [B], or of probabilities or logits [B, classes]."""
    return y.argmax(1) if y.is_floating_point() else y


def listed(counts: Tensor) -> Tensor:
    """Return labels int64 [B], sorted, of which there are so many of each class."""
    return torch.repeat_interleave(torch.arange(len(counts)), counts)
