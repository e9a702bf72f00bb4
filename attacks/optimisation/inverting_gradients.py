"""Inverting Gradients: match the direction of the gradient, and prefer smooth images.

Source   Geiping, Bauermeister, Droege, Moeller, NeurIPS 2020, arXiv 2003.14053.
Needs    architecture, learning rate and number of steps, shape of the inputs, the client's own messages.
Solves   min over x, hidden items  1 - cos(S(x, y), seen) + tv TV(x), x in the box of valid pixels
Method   Adam on the sign of the pixel gradient, learning rate cut by 10 at 3/8, 5/8 and 7/8, N(0, 1) start.
Limits   tv = 0: the cosine alone. Labels: by rule where the last layer is sent, else optimised. Of a batch, four attempts;
         one that lies far behind the best at a quarter of its steps is given up.
"""

from typing import ClassVar

import torch

from pflsec.attacks import objectives
from pflsec.attacks.matching import MatchingConfig, match
from pflsec.attacks.minimise import DECAY, Plan
from pflsec.attacks.priors import total_variation
from pflsec.attacks.problem import gaussian_inputs
from pflsec.core.attack import Attack, Reconstruction
from pflsec.core.config import above, at_least, option
from pflsec.core.knowledge import Knows
from pflsec.wire.capture import Capture


class InvertingGradientsConfig(MatchingConfig):
    iterations: int = at_least(1, default=1000, about="Adam steps", paper=4800)
    tv: float = at_least(0, default=1e-6, about="weight of total variation", untrained=1e-6, trained=0.1)
    lr: float = above(0, default=0.1, about="Adam step size on pixels and labels", paper=0.1)
    state_lr: float = above(0, default=0.02, about="Adam step size on the client's private items, or on the cotangent")
    signed: bool = option(default=True, about="use the sign of the pixel gradient", paper=True)
    tolerance: float = at_least(0, default=1e-7, about="stop when the cosine distance is below")


class InvertingGradients(Attack[InvertingGradientsConfig]):
    key, aliases = "inverting-gradients", ("ig",)
    Config = InvertingGradientsConfig
    needs: ClassVar = frozenset({Knows.ARCH, Knows.INPUT, Knows.UPLINK, Knows.HYPER})

    def reconstruct(self, cap: Capture, rng: torch.Generator) -> Reconstruction:
        cfg = self.cfg
        plan = Plan(
            "adam",
            cfg.iterations,
            cfg.lr,
            cfg.tolerance,
            signed=cfg.signed,
            decay_at=DECAY,
            state_lr=cfg.state_lr,
        )
        return match(
            cap,
            cfg,
            rng,
            distance=objectives.cosine,
            draw=gaussian_inputs,
            plans=[plan],
            prior=(lambda x: cfg.tv * total_variation(x)) if cfg.tv else None,
        )
