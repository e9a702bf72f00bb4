"""What an input defense feeds the steps of one client's local work with."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pflsec.core.defense import InputDefense, Mixture


@dataclass(frozen=True, eq=False)
class Feed:
    """An input defense at work on a client's rows.

    x, y   all of the client's training rows: inputs [n, ...] and probabilities [n, classes]
    rows   int64, which of them the local work is on, in its order: all, or a victim batch
    among  int64, sorted: which of them may be mixed in
    log    (phase, mixture) of every step, where somebody wants to know
    """

    defense: InputDefense[Any]
    x: Tensor
    y: Tensor
    rows: Tensor
    among: Tensor
    rng: np.random.Generator
    log: list[tuple[str, Mixture]] | None = None

    def batch(self, places: Tensor, phase: str) -> tuple[Tensor, Tensor]:
        """Return what a step trains on in place of these rows of the work, int64 [B]: x [B, ...], y [B, classes]."""
        made = self.defense.mixed(self.rows[places], self.among, self.x, self.y, self.rng)
        if self.log is not None:
            self.log.append((phase, made))
        return made.x, made.y

    def part(self, places: Tensor) -> "Feed":
        """Return the feed of work on a part of the rows: the others are not mixed in either."""
        kept = self.rows[places]
        left_out = torch.isin(self.among, self.rows) & ~torch.isin(self.among, kept)
        return replace(self, rows=kept, among=self.among[~left_out])
