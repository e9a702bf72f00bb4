"""Signs: of each coordinate of a client's change the sign is sent, and of each item its mean size.

Source   Bernstein et al., ICML 2018, arXiv 1802.04434; the mean size as in Karimireddy et al., ICML 2019, arXiv 1901.09847.
Seam     uplink
Claims   none. One bit of every coordinate is still many bits.
Knob     feedback
Limits   A change of one size in all coordinates of an item: the identity up to rounding. Prototypes, logits and statistics
         like weights; counts, label sets, masks and scalars go out as they are. Uploads are averaged by the method, without
         a majority vote. With feedback the client adds to its next change what the signs have left out of this one, as
         prune does. Bytes on the wire: a bit a coordinate, and the size. An attacker who knows of it sends its guess through
         a smooth sign, and does not know what was added.
"""

import torch
from torch import Tensor

from pflsec.core.change import change, moved
from pflsec.core.config import Config, option
from pflsec.core.defense import Coding, Defense
from pflsec.core.items import Items

SOFTNESS = 0.1  # of an item's root mean square: coordinates below it count less than their sign
TINY = 1e-30
SCALE = 32  # bits of an item's mean size


class SignConfig(Config):
    feedback: bool = option(
        default=False, about="error feedback: what is left out of a change is added to the client's next one"
    )


class Sign(Defense[SignConfig]):
    key, seam = "sign", "uplink"
    Config = SignConfig

    def protect(self, message: Items, reference: Items, rng: torch.Generator) -> Items:
        step = {k: v for k, v in change(message, reference).items() if v.numel()}
        return moved(message, reference, {k: v.abs().mean() * v.sign() for k, v in step.items()})

    def coding(self, before: Coding) -> Coding:
        return Coding(bits=1, scale=SCALE, sparse=True)  # zero has no sign

    def adapt(self, guess: Items, seen: Items) -> Items:
        sizes = {k: v.abs().mean() for k, v in seen.items() if v.numel()}
        return guess | {k: sizes[k].to(v.dtype) * soft_sign(v) for k, v in guess.items() if k in sizes}


def soft_sign(value: Tensor) -> Tensor:
    """Return v / (|v| + s), s a share of the item's root mean square: near the sign, with a slope that is nowhere zero."""
    return value / (value.abs() + SOFTNESS * (value.square().mean() + TINY).sqrt())
