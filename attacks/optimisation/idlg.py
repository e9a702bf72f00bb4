"""iDLG: read the labels off the last layer's gradient first, then find the images as DLG does.

Source   Zhao, Mopuri, Bilen 2020, arXiv 2001.02610.
Needs    what DLG needs; the rules need the last layer on the wire, and of a batch its bias.
Solves   min over x, hidden items  |S(x, y) - seen|^2 / |seen|^2 with y restored: of one image by the sign, of a batch by counts
Method   LBFGS with strong Wolfe line search, images from U(0, 1); where it stalls, signed Adam, then LBFGS again.
Limits   Where the last layer is not sent, labels are optimised as in DLG, and the row says so.
"""

from typing import ClassVar

import torch

from pflsec.attacks import objectives
from pflsec.attacks.matching import MatchingConfig, match
from pflsec.attacks.minimise import Plan, with_rescue
from pflsec.attacks.problem import uniform_pixels
from pflsec.core.attack import Attack, Reconstruction
from pflsec.core.config import above, at_least
from pflsec.core.knowledge import Knows
from pflsec.wire.capture import Capture


class IDLGConfig(MatchingConfig):
    iterations: int = at_least(1, default=30, about="LBFGS rounds of up to 20 inner iterations", code=300)
    restarts: int | None = at_least(1, default=8, about="attempts from new starts; the best objective wins", paper=1)
    lr: float = above(0, default=1.0, about="LBFGS step size", paper=1.0)
    rescue: int = at_least(0, default=400, about="Adam steps where LBFGS stalls (ReLU, max-pooling); then LBFGS again")
    tolerance: float = at_least(0, default=1e-7, about="stop when the relative squared distance is below")


class IDLG(Attack[IDLGConfig]):
    key = "idlg"
    Config = IDLGConfig
    needs: ClassVar = frozenset({Knows.ARCH, Knows.INPUT, Knows.UPLINK, Knows.HYPER})

    def reconstruct(self, cap: Capture, rng: torch.Generator) -> Reconstruction:
        plan = Plan("lbfgs", self.cfg.iterations, self.cfg.lr, self.cfg.tolerance)
        plans = with_rescue(plan, self.cfg.rescue)
        return match(cap, self.cfg, rng, distance=objectives.relative_squared, draw=uniform_pixels, plans=plans)
