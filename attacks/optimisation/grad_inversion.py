"""GradInversion: match the gradient by several descents at once, held together by their mean and by BatchNorm's statistics.

Source   Yin et al., CVPR 2021, arXiv 2104.07586 ("See through gradients").
Needs    architecture, learning rate and number of steps, shape of the inputs, the client's own messages.
Solves   min over x_1..x_G, hidden items  sum_g |S(x_g, y) - seen|^2 / |seen|^2 + tv TV(x_g) + l2 |x_g|^2 + bn R_BN(x_g)
         + pull |x_g - mean x|^2, x in the box of valid pixels; the member that matches best is returned
Method   Adam with warm-up, its step falling along a cosine, and noise on the pixel gradient (Langevin); labels by rule.
Limits   A run costs G times as much (`group`). The mean is the plain one: images are not registered to each other. R_BN
         stands where running statistics are on the wire or public; else it is left out, and the row says so.
"""

from typing import ClassVar

import torch
from torch import Tensor

from pflsec.attacks import objectives
from pflsec.attacks.matching import MatchingConfig, match
from pflsec.attacks.minimise import Plan
from pflsec.attacks.priors import batchnorm, total_variation
from pflsec.attacks.problem import gaussian_inputs
from pflsec.core.attack import Attack, Reconstruction
from pflsec.core.config import above, at_least
from pflsec.core.knowledge import Knows
from pflsec.wire.capture import Capture


class GradInversionConfig(MatchingConfig):
    iterations: int = at_least(1, default=1000, about="Adam steps", paper=20000)
    restarts: int | None = at_least(1, default=1, about="attempts, each of a whole group; the best objective wins")
    group: int = at_least(1, default=2, about="descents that run as one; the cost grows with it")
    tv: float = at_least(0, default=1e-4, about="weight of total variation", paper=1e-4)
    l2: float = at_least(0, default=1e-6, about="weight of the images' squared norm", paper=1e-6)
    bn: float = at_least(
        0, default=1.0, about="weight of moved running statistics: 0.1 over the usual momentum 0.1", paper=1.0
    )
    pull: float = at_least(0, default=0.01, about="weight of the squared distance from the group's mean", paper=0.01)
    langevin: float = at_least(0, default=0.01, about="noise on the pixel gradient", paper=0.2, breaching=0.01)
    lr: float = above(0, default=0.1, about="Adam step size on pixels and labels", paper=0.1)
    warm_up: int = at_least(0, default=50, about="steps in which the step size grows", paper=50)
    state_lr: float = above(0, default=0.02, about="Adam step size on the client's private items, or on the cotangent")
    tolerance: float = at_least(0, default=1e-7, about="stop when the relative squared distance is below")


class GradInversion(Attack[GradInversionConfig]):
    key = "grad-inversion"
    Config = GradInversionConfig
    needs: ClassVar = frozenset({Knows.ARCH, Knows.INPUT, Knows.UPLINK, Knows.HYPER})

    def reconstruct(self, cap: Capture, rng: torch.Generator) -> Reconstruction:
        cfg = self.cfg
        apart, note = batchnorm(cap, rng) if cfg.bn else (None, "")

        def prior(x: Tensor) -> Tensor:
            usual = cfg.tv * total_variation(x) + cfg.l2 * x.square().sum()
            return usual if apart is None else usual + cfg.bn * apart(x)

        plan = Plan(
            "adam",
            cfg.iterations,
            cfg.lr,
            cfg.tolerance,
            cosine=True,
            warm_up=cfg.warm_up,
            langevin=cfg.langevin,
            state_lr=cfg.state_lr,
        )
        return match(
            cap,
            cfg,
            rng,
            distance=objectives.relative_squared,
            draw=gaussian_inputs,
            plans=[plan],
            prior=prior,
            group=cfg.group,
            pull=cfg.pull,
            note=note,
        )
