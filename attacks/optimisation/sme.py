"""SME: explain many local steps by one gradient, taken at a point between where they began and where they ended.

Source   Zhu, Yao, Blaschko, ICML 2023, "Surrogate model extension": the point is learned. With `point = start` it is the old
         surrogate that takes the whole update for one big gradient; with `middle`, a fixed half of the way.
Needs    architecture, learning rate and number of steps, shape of the inputs, the client's own messages; weights on the wire.
Solves   min over x, y, hidden items, a in (0, 1)  1 - cos(grad CE(w_a; x, y), seen) + tv TV(x),  w_a = (1 - a) begun + a ended,
         CE the mean over all images and `seen` the part of the change that weights amount to
Method   Adam on the sign of the pixel gradient, as in Inverting Gradients; a = sigmoid of an unknown that starts at 0.
Limits   One step and `point = start`: the very objective of Inverting Gradients. No step is unrolled, so hundreds cost no more
         than one; the price is that minibatches, terms of the loss that are not cross entropy, and phases in which only a part
         moves are not simulated. Items that are not sent are taken not to have moved.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from pflsec.attacks import objectives
from pflsec.attacks.gradients import mean_gradient
from pflsec.attacks.matching import MatchingConfig, match
from pflsec.attacks.minimise import DECAY, Plan
from pflsec.attacks.priors import total_variation
from pflsec.attacks.problem import COTANGENT, gaussian_inputs
from pflsec.core.attack import Attack, Reconstruction
from pflsec.core.config import above, at_least, option
from pflsec.core.errors import NotApplicable
from pflsec.core.items import Items
from pflsec.core.knowledge import Knows
from pflsec.wire.capture import Capture

PLACE = "surrogate.place"
"""Name of the unknown whose sigmoid is the share of the way."""
Share = Callable[[Items], Tensor | float]


class SMEConfig(MatchingConfig):
    iterations: int = at_least(1, default=1000, about="Adam steps", code=1000)
    point: Literal["learned", "start", "middle"] = option(
        default="learned",
        about="where the gradient is taken: at a share of the way that is learned with the image, where local work began "
        "(one big gradient), or half-way",
        paper="learned",
    )
    tv: float = at_least(0, default=1e-6, about="weight of total variation", code=0.01)
    lr: float = above(0, default=0.1, about="Adam step size on pixels and labels", code=1.0)
    state_lr: float = above(0, default=0.02, about="Adam step size on the point and on the client's private items")
    tolerance: float = at_least(0, default=1e-7, about="stop when the cosine distance is below")


class SME(Attack[SMEConfig]):
    key = "sme"
    Config = SMEConfig
    needs: ClassVar = frozenset({Knows.ARCH, Knows.INPUT, Knows.UPLINK, Knows.HYPER})

    def reconstruct(self, cap: Capture, rng: torch.Generator) -> Reconstruction:
        cfg = self.cfg
        if cfg.hidden == COTANGENT:
            raise NotApplicable(
                "a cotangent stands in for a hidden head in one local step, not at a point between two models"
            )
        learned = cfg.point == "learned"
        return match(
            as_one_gradient(cap, SHARES[cfg.point]),
            cfg,
            rng,
            distance=objectives.cosine,
            draw=gaussian_inputs,
            plans=[
                Plan("adam", cfg.iterations, cfg.lr, cfg.tolerance, signed=True, decay_at=DECAY, state_lr=cfg.state_lr)
            ],
            prior=(lambda x: cfg.tv * total_variation(x)) if cfg.tv else None,
            unknowns={PLACE: torch.zeros(())} if learned else None,
        )


def as_one_gradient(cap: Capture, share: Share) -> Capture:
    """Return the capture as if its client had made one step on all images, at `share` of the way from begun to ended.

    share  from the private items, the unknown point among them, to a number in [0, 1]
    Raises NotApplicable where no weights are sent, or no whole network is trained.
    """
    sent = [name for name in cap.target if name in cap.net.shapes and name not in cap.net.buffers]
    if not sent:
        raise NotApplicable("no weights are sent: there is no direction in which a model moved")
    record = replace(cap.record, epochs=1, batch_size=cap.count)

    def gradient(x: Tensor, y: Tensor, state: Items) -> Items:
        with cap.net.training():
            return mean_gradient(cap.net, between(cap, state, share(state)), sent, x, y)

    return replace(cap, record=record, target={name: cap.target[name] for name in sent}, replay_fn=gradient)


def between(cap: Capture, state: Items, share: Tensor | float) -> Items:
    """Return the network at a share of the way from where local work began to where it ended, float64."""
    begun = cap.began(state)
    if isinstance(share, float) and share == 0:
        return begun
    ended = cap.ended(state)
    return {
        k: torch.lerp(v, ended[k], torch.as_tensor(share, dtype=v.dtype)) if v.is_floating_point() else v
        for k, v in begun.items()
    }


SHARES: dict[str, Share] = {
    "learned": lambda state: torch.sigmoid(state[PLACE]) if PLACE in state else 0.5,
    "start": lambda state: 0.0,
    "middle": lambda state: 0.5,
}
