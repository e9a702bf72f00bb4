"""Attacks of a stranger's package: one with hardly a setting, one that has nothing to work on, one that breaks."""

from typing import ClassVar, Literal

import torch

from pflsec.core.attack import Attack, Reconstruction
from pflsec.core.config import Config, between, option
from pflsec.core.errors import NotApplicable
from pflsec.core.knowledge import Knows
from pflsec.wire.capture import Capture


class FlatConfig(Config):
    """Settings of Flat: no iterations, no restarts, no hidden; labels by rule alone."""

    tint: float = between(0, 1, default=0.5, about="the value of every pixel")
    labels: Literal["restore", "known"] = option(default="restore")


class Flat(Attack[FlatConfig]):
    """The same value everywhere."""

    key = "flat"
    Config = FlatConfig
    needs: ClassVar = frozenset({Knows.INPUT, Knows.UPLINK})

    def reconstruct(self, cap: Capture, rng: torch.Generator) -> Reconstruction:
        x = cap.input.normalise(torch.full((cap.count, *cap.input.shape), self.cfg.tint))
        return Reconstruction(x, None, 0.0, "converged", 0, 1, self.cfg.labels, "none")


class Idle(Attack[Config]):
    """Nothing to work on, ever."""

    key = "idle"
    needs: ClassVar = frozenset({Knows.UPLINK})

    def reconstruct(self, cap: Capture, rng: torch.Generator) -> Reconstruction:
        raise NotApplicable("there are no words in pictures")


class Broken(Attack[Config]):
    """A fault in the attack's own code."""

    key = "broken"
    needs: ClassVar = frozenset({Knows.UPLINK})

    def reconstruct(self, cap: Capture, rng: torch.Generator) -> Reconstruction:
        raise IndexError("list index out of range")
