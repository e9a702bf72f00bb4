"""Modern: Inverting Gradients with what later work added, and with the features that a linear layer gives away.

Source   the preset of that name in breaching (Geiping et al. 2020 with later changes), written anew from its description.
Needs    architecture, learning rate and number of steps, shape of the inputs, the client's own messages.
Solves   min over x, hidden items  1 - cos(S(x, y), seen) + tv TV(x) + features |f(x) - f|^2, x in the box of valid pixels
Method   TV isotropic, over the channels and the differences of each two; f: what the first linear layer on the wire read,
         by `analytic.linear.single_input`; start: a random 4x4 pattern, tiled; Adam on the soft sign of the pixel gradient,
         with warm-up, its step falling along a cosine.
Limits   f is known for one image and one step only, or where the layer reads the image itself, and only where the adversary
         has all that comes before the layer; else that term is left out and the row says so. The published preset takes
         the last layer's f: the first one tells more, and is there where a head is hidden.
"""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from pflsec.attacks import objectives
from pflsec.attacks.analytic.linear import linear_layers, single_input
from pflsec.attacks.matching import MatchingConfig, match
from pflsec.attacks.minimise import Plan
from pflsec.attacks.priors import isotropic_variation, known_start
from pflsec.attacks.problem import tiled_pattern
from pflsec.core.attack import Attack, Reconstruction
from pflsec.core.config import above, at_least
from pflsec.core.items import cast
from pflsec.core.knowledge import Knows
from pflsec.wire.capture import Capture


class ModernConfig(MatchingConfig):
    iterations: int = at_least(1, default=1000, about="Adam steps", breaching=24000)
    tv: float = at_least(0, default=1e-3, about="weight of total variation", breaching=0.1)
    features: float = at_least(0, default=0.1, about="weight of the features that a linear layer read", breaching=0.1)
    lr: float = above(0, default=0.1, about="Adam step size on pixels and labels", breaching=0.1)
    warm_up: int = at_least(0, default=50, about="steps in which the step size grows", breaching=50)
    state_lr: float = above(0, default=0.02, about="Adam step size on the client's private items, or on the cotangent")
    tolerance: float = at_least(0, default=1e-7, about="stop when the cosine distance is below")


class Modern(Attack[ModernConfig]):
    key = "modern"
    Config = ModernConfig
    needs: ClassVar = frozenset({Knows.ARCH, Knows.INPUT, Knows.UPLINK, Knows.HYPER})

    def reconstruct(self, cap: Capture, rng: torch.Generator) -> Reconstruction:
        cfg = self.cfg
        away = feature_distance(cap, rng) if cfg.features else None
        plan = Plan(
            "adam",
            cfg.iterations,
            cfg.lr,
            cfg.tolerance,
            soft_sign=True,
            cosine=True,
            warm_up=cfg.warm_up,
            state_lr=cfg.state_lr,
        )

        def prior(x: Tensor) -> Tensor:
            smooth = cfg.tv * isotropic_variation(x)
            return smooth if away is None else smooth + cfg.features * away(x)

        note = "" if away or not cfg.features else "no features are known: that term is left out"
        return match(
            cap, cfg, rng, distance=objectives.cosine, draw=tiled_pattern, plans=[plan], prior=prior, note=note
        )


def feature_distance(cap: Capture, rng: torch.Generator) -> Callable[[Tensor], Tensor] | None:
    """Return the squared distance of what the first biased linear layer on the wire reads for an image [1, C, H, W] from
    what it read for the client's; None where that is not known."""
    if cap.count != 1:
        return None
    for layer, reads_image in linear_layers(cap).items():
        bias = cap.target.get(f"{layer}.bias")
        if bias is None or f"{layer}.weight" not in cap.target or not bias.any():
            continue
        if cap.record.steps > 1 and not reads_image:
            return None
        items, read = known_start(cap, rng, lambda net, items, x, layer=layer: net.linear_inputs(items, x)[layer]), None
        if items is None:
            continue
        read = single_input(cap, layer)
        return lambda x: (cap.net.linear_inputs(cast(items, x.dtype), x)[layer] - read.to(x.dtype)).square().sum()
    return None
