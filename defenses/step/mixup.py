"""mixup: every step trains on weighted means of the client's own images, and on the same means of their labels.

Source   Zhang et al., ICLR 2018, arXiv 1710.09412: against overfitting. As a defense: Huang et al., ICML 2020, arXiv 2010.02772.
Seam     step, without an account
Claims   none. The message gives the mixed image away like any other. Mixed images can be taken apart: where an image is mixed
         anew often enough, all of its mixtures together tell it (Carlini et al., IEEE S&P 2021, arXiv 2011.05315).
Knob     images, alpha
Limits   images = 1: the identity, bit for bit. Each image of a batch is mixed with others drawn from all of the client's
         training images, never with itself, with weights of its own, anew at every step. (The paper mixes a batch with itself
         in another order, one pair of weights for all of it: a batch of one image would then stay as it is.) A client with
         fewer images than are asked for mixes all that it has; one with a single image trains on it as it is. What a client
         says of its labels alone (counts, label sets) stays as it is. Texts cannot be mixed. An attacker who knows of it
         optimises soft labels instead of restoring one class. Attackers replay one batch for all steps of an exchange, so that
         an upload of several steps, each on other mixtures, fits none of their guesses: no privacy, but a gap of the attack. So
         it is where a loss looks at a client's label counts, of which a probe has those of its own few images (fedlc, fedrod,
         gpfl). The rows say how far off that is.
"""

import numpy as np
import torch
from torch import Tensor

from pflsec.core.config import Config, above, at_least
from pflsec.core.defense import InputDefense, Mixture


class MixupConfig(Config):
    images: int = at_least(1, default=2, about="images of the client in one mixed image; 1: none is mixed")
    alpha: float = above(
        0,
        default=1.0,
        about="their weights follow Dirichlet(alpha, ..., alpha), of two Beta(alpha, alpha); large: near equal",
    )


class Mixup(InputDefense[MixupConfig]):
    key = "mixup"
    Config = MixupConfig

    @property
    def idle(self) -> bool:
        return self.cfg.images == 1

    def mixed(self, rows: Tensor, among: Tensor, x: Tensor, y: Tensor, rng: np.random.Generator) -> Mixture:
        parts = with_partners(rows, among, min(self.cfg.images, len(among)), rng)
        drawn = rng.dirichlet([self.cfg.alpha] * parts.shape[1], len(rows))
        weights = torch.from_numpy(drawn).to(x.dtype)
        return Mixture(blended(x, parts, weights), blended(y, parts, weights), parts, weights)


def with_partners(rows: Tensor, among: Tensor, count: int, rng: np.random.Generator) -> Tensor:
    """Return int64 [B, count]: each of the rows [B], and count - 1 others from `among` (sorted, the rows with them), all distinct
    and each set of them as likely as any other."""
    taken = torch.searchsorted(among, rows)[:, None]
    for chosen in range(1, count):
        place = torch.from_numpy(rng.integers(len(among) - chosen, size=len(rows)))
        for other in taken.sort(1).values.T:  # a place among those left becomes one among all
            place = place + (place >= other)
        taken = torch.cat([taken, place[:, None]], 1)
    return among[taken]


def blended(values: Tensor, parts: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sums [B, ...] of these rows [n, ...]; parts and weights [B, k]."""
    shape = [*weights.shape, *(1 for _ in values.shape[1:])]
    return (weights.to(values.dtype).reshape(shape) * values[parts]).sum(1)
