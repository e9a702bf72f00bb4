"""Half precision: each coordinate of a client's change is rounded to 16 bits.

Source   IEEE 754 binary16; as a defense in Zhu et al., NeurIPS 2019, arXiv 1906.08935, section 5.1, which it does not stop.
Seam     uplink
Claims   none.
Knob     none
Limits   A change that half precision holds: the identity up to rounding. Beyond 65504 the largest number is sent, below 6e-8
         zero. Prototypes, logits and statistics like weights; counts, label sets, masks and scalars go out as they are.
         Bytes on the wire: 2 a coordinate. An attacker who knows of it matches as before.
"""

from dataclasses import replace

import torch

from pflsec.core.change import change, moved
from pflsec.core.config import Config
from pflsec.core.defense import Coding, Defense
from pflsec.core.items import Items

BITS = 16
LARGEST = torch.finfo(torch.float16).max


class HalfConfig(Config):
    """No settings."""


class Half(Defense[HalfConfig]):
    key, seam = "fp16", "uplink"
    Config = HalfConfig

    def protect(self, message: Items, reference: Items, rng: torch.Generator) -> Items:
        step = change(message, reference)
        halves = {k: v.clamp(-LARGEST, LARGEST).to(torch.float16).to(v.dtype) for k, v in step.items()}
        return moved(message, reference, halves)

    def coding(self, before: Coding) -> Coding:
        return replace(before, bits=min(before.bits or BITS, BITS))
