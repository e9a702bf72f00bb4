"""Clipping: a client's whole change is shortened to a bound.

Source   McMahan et al., ICLR 2018, arXiv 1710.06963, section 2, the clipping alone.
Seam     uplink
Claims   none. It bounds how far one client can move the server; without noise it hides nothing.
Knob     bound
Limits   A bound above the change's norm: the identity, bit for bit. All vectors of a message are one: weights, control
         variates, prototypes, logits and statistics together. Counts, label sets, masks and scalars go out as they are.
         Direction is kept, so a cosine attack loses nothing; an attacker who knows of it clips its replay.
"""

import torch

from pflsec.core.config import Config, above
from pflsec.core.defense import Coding, Defense
from pflsec.core.items import Items
from pflsec.defenses.vectors import clipped, shortened


class ClipConfig(Config):
    bound: float = above(0, default=1.0, about="norm to which the change is shortened")


class Clip(Defense[ClipConfig]):
    key, seam = "clip", "uplink"
    Config = ClipConfig

    def protect(self, message: Items, reference: Items, rng: torch.Generator) -> Items:
        return clipped(message, reference, self.cfg.bound)

    def coding(self, before: Coding) -> Coding:
        return Coding(sparse=before.sparse)

    def adapt(self, guess: Items, seen: Items) -> Items:
        return shortened(guess, self.cfg.bound)
