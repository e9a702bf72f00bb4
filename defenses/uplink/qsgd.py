"""QSGD: each coordinate of a client's change is rounded at random to one of a few levels, without bias.

Source   Alistarh et al., NeurIPS 2017, arXiv 1610.02132, section 3.1, eq. 3.
Seam     uplink
Claims   none. The rounding is random, but not private.
Knob     bits
Limits   bits = 32: the identity, bit for bit. Each item is quantised by its own norm; prototypes, logits and statistics like
         weights; counts, label sets, masks and scalars go out as they are. Bytes on the wire: bits a coordinate, and the
         norm. An attacker who knows of it matches as before: what was sent is right on average.
"""

from dataclasses import replace

import torch
from torch import Tensor

from pflsec.core.change import change, moved
from pflsec.core.config import Config, between
from pflsec.core.defense import Coding, Defense
from pflsec.core.items import Items

WHOLE = 32  # bits of a number that is sent as it is
SCALE = 32  # bits of an item's norm


class QSGDConfig(Config):
    bits: int = between(
        2, WHOLE, default=8, about="bits of a coordinate: its sign, and 2^(bits - 1) - 1 levels above zero"
    )


class QSGD(Defense[QSGDConfig]):
    key, seam = "qsgd", "uplink"
    Config = QSGDConfig

    def protect(self, message: Items, reference: Items, rng: torch.Generator) -> Items:
        if self.cfg.bits == WHOLE:
            return message
        levels = 2 ** (self.cfg.bits - 1) - 1
        return moved(message, reference, {k: quantised(v, levels, rng) for k, v in change(message, reference).items()})

    def coding(self, before: Coding) -> Coding:
        return before if self.cfg.bits == WHOLE else replace(before, bits=self.cfg.bits, scale=SCALE)


def quantised(value: Tensor, levels: int, rng: torch.Generator) -> Tensor:
    """Return |v| sign(v_i) xi_i: xi_i is one of the two multiples of 1/levels next to |v_i|/|v|, on average that itself."""
    size = value.double().norm()
    draw = torch.rand(value.shape, generator=rng, dtype=torch.float64)
    if not size:
        return torch.zeros_like(value)
    place = value.double().abs() / size * levels
    low = place.floor()
    return (size * value.sign() * (low + (draw < place - low)) / levels).to(value.dtype)
