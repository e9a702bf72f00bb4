"""DLG as published: no line search, no restarts, no bounds. For comparison with the literature; `dlg` is dependable.

Source   Zhu, Liu, Han, NeurIPS 2019, arXiv 1906.08935, and its authors' code.
Needs    architecture, learning rate and number of steps, shape of the inputs, the client's own messages.
Solves   min over x, y, hidden items  |S(x, softmax y) - seen|^2, S the client's own code on a guess
Method   LBFGS with step 1, images with pixels from N(0, 1), soft labels from N(0, 1) optimised with the image.
Limits   Often leaves the basin at once, which is reported as `diverged`; suits smooth networks alone.
"""

from typing import ClassVar

import torch

from pflsec.attacks import objectives
from pflsec.attacks.matching import MatchingConfig, match
from pflsec.attacks.minimise import Plan
from pflsec.attacks.problem import Labels, gaussian_pixels
from pflsec.core.attack import Attack, Reconstruction
from pflsec.core.config import above, at_least, option
from pflsec.core.knowledge import Knows
from pflsec.wire.capture import Capture


class DLGClassicConfig(MatchingConfig):
    iterations: int = at_least(1, default=300, about="LBFGS rounds of up to 20 inner iterations", paper=1200, code=300)
    restarts: int | None = at_least(1, default=1, about="attempts from new starts; the best objective wins", paper=1)
    labels: Labels = option(default="optimise", about="soft labels are optimised with the image", paper="optimise")
    lr: float = above(0, default=1.0, about="LBFGS step size", paper=1.0)
    tolerance: float = at_least(0, default=1e-6, about="stop when the squared distance is below", idlg=1e-6)


class DLGClassic(Attack[DLGClassicConfig]):
    key = "dlg-classic"
    Config = DLGClassicConfig
    needs: ClassVar = frozenset({Knows.ARCH, Knows.INPUT, Knows.UPLINK, Knows.HYPER})

    def reconstruct(self, cap: Capture, rng: torch.Generator) -> Reconstruction:
        plan = Plan("lbfgs", self.cfg.iterations, self.cfg.lr, self.cfg.tolerance, line_search=False, scale=1.0)
        return match(cap, self.cfg, rng, distance=objectives.squared, draw=gaussian_pixels, plans=[plan])
