"""Gaussian noise: every coordinate of a client's change gets an independent normal draw.

Source   Zhu et al., NeurIPS 2019, arXiv 1906.08935, section 5.1 (noisy gradients).
Seam     uplink
Claims   none. Without a bound on the change no amount of noise is a guarantee; dp-sgd and dp-fedavg give one.
Knob     std
Limits   std = 0: the identity, bit for bit. Weights, control variates, prototypes, logits and statistics are noised; counts,
         label sets, masks and scalars go out as they are. The change is that of weights, so a std on gradients is to be
         multiplied by the learning rate, or use relative. Draws come from the run's seed: for measurements, not for use.
         An attacker who knows of it matches as before: the best guess is still the one nearest to what was sent.
"""

import torch
from torch import Tensor

from pflsec.core.config import Config, at_least, option
from pflsec.core.defense import Defense
from pflsec.core.items import Items
from pflsec.defenses.vectors import noised


class GaussianConfig(Config):
    std: float = at_least(0, default=0.01, about="standard deviation of the noise in a coordinate of the change")
    relative: bool = option(
        default=False, about="std in units of the change's root mean square: at 1 noise and change are equally long"
    )


class Gaussian(Defense[GaussianConfig]):
    key, seam = "gaussian", "uplink"
    Config = GaussianConfig

    def protect(self, message: Items, reference: Items, rng: torch.Generator) -> Items:
        def draw(v: Tensor) -> Tensor:
            return torch.randn(v.shape, generator=rng, dtype=v.dtype)

        return noised(message, reference, self.cfg.std, self.cfg.relative, draw)
