"""Feature inversion: find the images whose prototypes or mean predictions are those that were sent.

Source   Mahendran & Vedaldi, CVPR 2015, arXiv 1412.0035 (features to images), on what prototype and distillation methods send.
Needs    an extractor that the adversary really has; learning rate and number of steps, the client's own messages.
Solves   min over x  |S(x, y) - seen|^2 / |seen|^2 + tv TV(x),  S the client's own code on a guess, of which only prototypes
         and logits are kept
Method   Adam on the pixels, unsigned, from N(0, 1), several restarts. Classes and their counts are read off the wire.
Limits   A prototype of one image shows as much of it as the extractor keeps; of several, something like their mean. Where the
         extractor stays private the problem cannot be posed: a wrong one explains every prototype by some other picture, so
         private items are neither guessed nor sought. The labels that the wire gives away are then all that is returned.
"""

import math
from typing import ClassVar

import torch

from pflsec.attacks import label_rules, objectives
from pflsec.attacks.matching import MatchingConfig, match
from pflsec.attacks.minimise import DECAY, Plan
from pflsec.attacks.priors import total_variation
from pflsec.attacks.problem import COTANGENT, Problem, gaussian_inputs
from pflsec.core.attack import Attack, Reconstruction
from pflsec.core.config import above, at_least
from pflsec.core.errors import NotApplicable
from pflsec.core.knowledge import Knows
from pflsec.wire.capture import Capture

KINDS = "prototypes", "logits"


class FeatureInversionConfig(MatchingConfig):
    iterations: int = at_least(1, default=2000, about="Adam steps")
    restarts: int | None = at_least(1, default=4, about="attempts from new starts; the best objective wins")
    tv: float = at_least(0, default=1e-4, about="weight of total variation")
    lr: float = above(0, default=0.05, about="Adam step size on pixels")
    tolerance: float = at_least(0, default=1e-7, about="stop when the relative squared distance is below")


class FeatureInversion(Attack[FeatureInversionConfig]):
    key = "feature-inversion"
    Config = FeatureInversionConfig
    needs: ClassVar = frozenset({Knows.ARCH, Knows.INPUT, Knows.UPLINK, Knows.HYPER})

    def reconstruct(self, cap: Capture, rng: torch.Generator) -> Reconstruction:
        cfg, seen = self.cfg, cap.only(*KINDS)
        if not seen.target:
            raise NotApplicable("neither prototypes nor logits are sent")
        try:
            return match(
                seen,
                cfg,
                rng,
                distance=objectives.relative_squared,
                draw=gaussian_inputs,
                plans=[Plan("adam", cfg.iterations, cfg.lr, cfg.tolerance, decay_at=DECAY)],
                prior=(lambda x: cfg.tv * total_variation(x)) if cfg.tv else None,
                poses=with_a_known_extractor,
            )
        except NotApplicable as reason:
            return labels_alone(cap, rng, str(reason))


def with_a_known_extractor(problem: Problem) -> list[Problem]:
    """Return the problem as it stands. Raises NotApplicable where private items that make the features are not known."""
    if problem.hidden == COTANGENT:
        raise NotApplicable("a cotangent stands in for a hidden head; features depend on the body")
    if problem.hidden in ("joint", "guess"):
        parts = ", ".join(sorted({name.partition(".")[0] for name in problem.secret}))
        raise NotApplicable(
            f"what is sent was made with private items that the adversary does not have ({parts}), so no image can be told from "
            "it; --knowledge oracle grants them"
        )
    return [problem]


def labels_alone(cap: Capture, rng: torch.Generator, reason: str) -> Reconstruction:
    """Return the labels that the wire gives away, without images. Raises NotApplicable where there are none either."""
    found, how = label_rules.from_wire(cap, rng)
    if found is None:
        raise NotApplicable(reason)
    note = f"labels only: {reason}"
    return Reconstruction(None, found, math.nan, "converged", 0, 0, labels=how, hidden="none", note=note)
