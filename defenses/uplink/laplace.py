"""Laplace noise: every coordinate of a client's change gets an independent Laplace draw.

Source   Zhu et al., NeurIPS 2019, arXiv 1906.08935, section 5.1 (noisy gradients).
Seam     uplink
Claims   none. Without a bound on the change no amount of noise is a guarantee.
Knob     scale
Limits   scale = 0: the identity, bit for bit. The standard deviation is scale * sqrt(2). Weights, control variates,
         prototypes, logits and statistics are noised; counts, label sets, masks and scalars go out as they are. An attacker
         who knows of it matches as before.
"""

import torch
from torch import Tensor

from pflsec.core.config import Config, at_least, option
from pflsec.core.defense import Defense
from pflsec.core.items import Items
from pflsec.defenses.vectors import noised


class LaplaceConfig(Config):
    scale: float = at_least(
        0, default=0.01, about="scale b of the density exp(-|x|/b)/2b in a coordinate of the change"
    )
    relative: bool = option(default=False, about="scale in units of the change's root mean square")


class Laplace(Defense[LaplaceConfig]):
    key, seam = "laplace", "uplink"
    Config = LaplaceConfig

    def protect(self, message: Items, reference: Items, rng: torch.Generator) -> Items:
        def draw(v: Tensor) -> Tensor:
            one, other = torch.empty(2, *v.shape, dtype=v.dtype).exponential_(generator=rng)
            return one - other  # of two exponential draws: a Laplace draw

        return noised(message, reference, self.cfg.scale, self.cfg.relative, draw)
