"""DLG: find the image and label whose gradient is the one that was seen.

Source   Zhu, Liu, Han, NeurIPS 2019, arXiv 1906.08935; with a line search and restarts, which it needs to be dependable.
Needs    architecture, learning rate and number of steps, shape of the inputs, the client's own messages.
Solves   min over x, y, hidden items  |S(x, softmax y) - seen|^2 / |seen|^2, S the client's own code on a guess
Method   LBFGS with strong Wolfe line search, images from U(0, 1), soft labels optimised with the image; where it stalls,
         signed Adam, then LBFGS again.
Limits   As published, without the line search: `dlg-classic`. Batches above a few images are hard.
"""

from typing import ClassVar

import torch

from pflsec.attacks import objectives
from pflsec.attacks.matching import MatchingConfig, match
from pflsec.attacks.minimise import Plan, with_rescue
from pflsec.attacks.problem import Labels, uniform_pixels
from pflsec.core.attack import Attack, Reconstruction
from pflsec.core.config import above, at_least, option
from pflsec.core.knowledge import Knows
from pflsec.wire.capture import Capture


class DLGConfig(MatchingConfig):
    iterations: int = at_least(1, default=30, about="LBFGS rounds of up to 20 inner iterations", paper=1200, code=300)
    restarts: int | None = at_least(1, default=8, about="attempts from new starts; the best objective wins", paper=1)
    labels: Labels = option(default="optimise", about="soft labels are optimised with the image", paper="optimise")
    lr: float = above(0, default=1.0, about="LBFGS step size", paper=1.0)
    rescue: int = at_least(0, default=400, about="Adam steps where LBFGS stalls (ReLU, max-pooling); then LBFGS again")
    tolerance: float = at_least(0, default=1e-7, about="stop when the relative squared distance is below")


class DLG(Attack[DLGConfig]):
    key = "dlg"
    Config = DLGConfig
    needs: ClassVar = frozenset({Knows.ARCH, Knows.INPUT, Knows.UPLINK, Knows.HYPER})

    def reconstruct(self, cap: Capture, rng: torch.Generator) -> Reconstruction:
        plan = Plan("lbfgs", self.cfg.iterations, self.cfg.lr, self.cfg.tolerance)
        plans = with_rescue(plan, self.cfg.rescue)
        return match(cap, self.cfg, rng, distance=objectives.relative_squared, draw=uniform_pixels, plans=plans)
