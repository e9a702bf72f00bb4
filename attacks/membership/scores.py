"""Membership: score given images by how well what was sent fits them, to tell those of the batch from others.

Source   Nasr, Shokri, Houmansadr, S&P 2019, arXiv 1812.00910 (gradients); Yeom et al., CSF 2018, arXiv 1709.01604 (losses).
Needs    candidates, some of them from the batch; architecture, learning rate and number of steps, the client's own messages.
Solves   nothing: four numbers for each candidate z with label y, the higher, the more it looks like a member
Method   alignment  cos(grad CE(begun; z, y), seen), over the weights that are sent
         loss_drop  CE(begun; z, y) - CE(ended; z, y)
         prototype  -|f(z) - c_y|, f the extractor with which local work ended and c_y the prototype that was sent for the class
         replay     -|S(z) - seen|, the row of its class in what the client's own code sends (prototypes or logits) for z alone
Limits   A statistic applies where its items are on the wire, and all private items on which it depends are known or granted.
         A number says how far members and others can be told apart by it; other statistics, or shadow models, may do better.
"""

import math
from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from pflsec.attacks.gradients import mean_gradient
from pflsec.attacks.objectives import cosine
from pflsec.attacks.problem import reached_by
from pflsec.core.attack import Attack, Reconstruction
from pflsec.core.config import Config
from pflsec.core.errors import NotApplicable
from pflsec.core.items import Items
from pflsec.core.knowledge import Knows
from pflsec.wire.capture import MOST_STEPS, Capture

Statistic = Callable[[Capture, Items, Tensor, Tensor], Tensor]
"""(capture, private items, images [n, C, H, W], labels [n]) -> scores [n], differentiable in the private items."""


class MembershipConfig(Config):
    pass


class Membership(Attack[MembershipConfig]):
    key = "membership"
    Config = MembershipConfig
    needs: ClassVar = frozenset({Knows.ARCH, Knows.INPUT, Knows.UPLINK, Knows.HYPER, Knows.CANDIDATES})

    def reconstruct(self, cap: Capture, rng: torch.Generator) -> Reconstruction:
        if cap.candidates is None:
            raise NotApplicable("there are no candidates: no image from outside the batch is of its classes")
        x, y = cap.candidates
        x = x.double() if x.is_floating_point() else x  # tokens stay what they are
        given = (cap.known or {}) | (cap.state or {})
        state = cap.newcomer(rng) | given
        scores, reasons, used = {}, [], set[str]()
        for name, statistic in STATISTICS.items():
            try:
                needed = reached_by(state, lambda items, of=statistic: [of(cap, items, x[:1], y[:1])])
                if hidden := needed - given.keys():
                    parts = ", ".join(sorted({name.partition(".")[0] for name in hidden}))
                    raise NotApplicable(f"it depends on private items that the adversary does not have ({parts})")
                scores[name] = statistic(cap, state, x, y).detach().nan_to_num(nan=-math.inf)
                used |= needed
            except NotApplicable as reason:
                reasons.append(f"{name}: {reason}")
        if not scores:
            raise NotApplicable("; ".join(reasons))
        treated = "none" if not used else "oracle" if cap.state else "log"
        return Reconstruction(None, None, math.nan, "converged", 0, 0, labels="none", hidden=treated, membership=scores)


def alignment(cap: Capture, state: Items, x: Tensor, y: Tensor) -> Tensor:
    """Return the cosine between each image's gradient where local work began and the change of the weights."""
    begun = cap.began(state)
    sent = {k: v for k, v in cap.target.items() if k in begun and k not in cap.net.buffers}
    if not sent:
        raise NotApplicable("no weights are sent")
    distance = cosine(sent)
    each = [mean_gradient(cap.net, begun, sent, image[None], label[None]) for image, label in zip(x, y, strict=True)]
    return torch.stack([1 - distance(gradient) for gradient in each])


def loss_drop(cap: Capture, state: Items, x: Tensor, y: Tensor) -> Tensor:
    """Return by how much each image's cross entropy fell in local work."""
    if not any(name in cap.net.shapes and name not in cap.net.buffers for name in cap.target):
        raise NotApplicable("no weights are sent")
    before, after = (
        F.cross_entropy(cap.net.logits(items, x), y, reduction="none") for items in (cap.began(state), cap.ended(state))
    )
    return before - after


def prototype(cap: Capture, state: Items, x: Tensor, y: Tensor) -> Tensor:
    """Return minus the distance of each image's features from the prototype of its class."""
    seen = cap.only("prototypes").target
    if not seen:
        raise NotApplicable("no prototypes are sent")
    z = cap.net.features(cap.ended(state), x)
    return torch.stack(
        [-_distance(_of_class(cap, seen, c), dict.fromkeys(seen, f)) for f, c in zip(z, y.tolist(), strict=True)]
    )


def replay(cap: Capture, state: Items, x: Tensor, y: Tensor) -> Tensor:
    """Return minus the distance of what the client would have sent of each class, had it held this image alone."""
    if cap.record.epochs > MOST_STEPS:
        raise NotApplicable(f"local work has {cap.record.epochs} epochs; unrolling stops at {MOST_STEPS}")
    seen = cap.only("prototypes", "logits")
    if not seen.target:
        raise NotApplicable("neither prototypes nor logits are sent")
    scores = []
    for image, label in zip(x, y, strict=True):
        alone = seen.replay(image[None], label[None], state)
        own = {k: v[0] if len(v) == 1 else v[label] for k, v in alone.items()}
        scores.append(-_distance(_of_class(cap, seen.target, int(label)), own))
    return torch.stack(scores)


def _of_class(cap: Capture, tables: Items, label: int) -> Items | None:
    """Return each table's row of a class, or None where none was sent for it."""
    held = cap.held_classes
    if held is None:
        return {k: v[label] for k, v in tables.items()}
    place = (held == label).nonzero().flatten().tolist()
    return {k: v[place[0]] for k, v in tables.items()} if place else None


def _distance(sent: Items | None, found: Items) -> Tensor:
    """Return how far two rows are apart; infinitely where none was sent."""
    if sent is None:
        return torch.tensor(math.inf, dtype=torch.float64)
    return torch.stack([(found[k] - v).square().sum() for k, v in sent.items()]).sum().sqrt()


STATISTICS: dict[str, Statistic] = {
    "alignment": alignment,
    "loss_drop": loss_drop,
    "prototype": prototype,
    "replay": replay,
}
