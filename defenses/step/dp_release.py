"""DP-release: what a client says of its classes (prototypes, mean outputs, counts) is summed over clipped rows and noised.

Source   The Gaussian mechanism: Dwork, Roth 2014, doi 10.1561/0400000042, appendix A; accounting by Opacus, sample rate 1.
Seam     step, beside dp-sgd
Claims   formal, with dp-sgd: each release is one step on its account of single records (add or remove one). None by itself,
         and it is refused so: what is released has passed a model that was fitted to the same records.
Knob     noise_multiplier
Limits   noise_multiplier = 0 and a bound above the length of every row: the class sums and counts themselves, bit for bit.
         Sums and counts together are one release: a record adds a vector of length at most bound to the one and 1 to the
         other, so each gets noise of sqrt(2) times the multiplier (counts alone: 1). Sample counts are taken as public.
         Classes whose noised count is small are left out, others may be named that the client lacks. An attacker who knows
         of it clips the rows in its replay.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from pflsec.core.config import Config, above, at_least
from pflsec.core.defense import Guard, ReleaseDefense, Spend
from pflsec.core.items import Items
from pflsec.core.local import LossPerExample
from pflsec.core.prototypes import clipped
from pflsec.core.streams import stream

LEAST = 0.5  # of a row: what is counted and not noised has at least one


class DPReleaseConfig(Config):
    noise_multiplier: float = at_least(
        0, default=10.0, about="standard deviation of a release's noise over what one record adds to it"
    )
    bound: float = above(0, default=1.0, about="norm to which the vector of each record is clipped")
    threshold: float = at_least(
        0, default=2.0, about="classes with a smaller noised count are left out: in standard deviations of its noise"
    )


class DPRelease(ReleaseDefense[DPReleaseConfig]):
    key = "dp-release"
    Config = DPReleaseConfig

    @property
    def sigma(self) -> float:
        return self.cfg.noise_multiplier

    @property
    def bound(self) -> float:
        return self.cfg.bound

    def over(self, guard: Guard, *key: int | str) -> "ReleaseGuard":
        return ReleaseGuard(self.cfg, guard, key)


class ReleaseGuard:
    """Protects the class sums of one local work; its steps are another guard's (see pflsec.core.defense.Guard)."""

    def __init__(self, cfg: DPReleaseConfig, steps: Guard, key: tuple[int | str, ...]):
        self.cfg, self.steps, self.key = cfg, steps, key
        self.released = 0

    @property
    def spent(self) -> list[Spend]:
        own = [(self.cfg.noise_multiplier, 1.0, self.released)] if self.released else []
        return [*self.steps.spent, *own]

    def rows(self, epochs: int) -> Iterator[Tensor]:
        return self.steps.rows(epochs)

    def gradient(self, on: LossPerExample, params: Items, x: Tensor, y: Tensor) -> list[Tensor]:
        return self.steps.gradient(on, params, x, y)

    def class_sums(self, rows: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return the noised sums [C, k] and counts [C]; classes that are left out have zeros. What follows the noise costs
        no privacy."""
        cfg, rng = self.cfg, stream("release", *self.key, self.released)
        std = cfg.noise_multiplier * math.sqrt(2 if rows.shape[1] else 1)
        sums, counts = target.T @ clipped(rows, cfg.bound), target.sum(0)
        if std:
            sums = sums + std * cfg.bound * torch.randn(sums.shape, generator=rng, dtype=sums.dtype)
            counts = counts + std * torch.randn(counts.shape, generator=rng, dtype=counts.dtype)
        self.released += 1
        named = counts > max(LEAST, cfg.threshold * std)
        return torch.where(named[:, None], sums, 0), torch.where(named, counts.clamp(min=1), 0)
