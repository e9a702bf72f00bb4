"""What a planted bug is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from pflsec.core.algorithm import Algorithm
from pflsec.core.items import Items
from pflsec.core.local import Penalty

Check = Callable[[type[Algorithm[Any]]], None]
Patch = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Mutant:
    """A planted bug, and the check that catches it."""

    bug: str
    original: type[Algorithm[Any]]
    check: Check
    mutant: type[Algorithm[Any]] | None = None
    patch: Patch | None = None

    def __str__(self) -> str:
        return f"{self.original.key}: {self.bug}"


def unsquared(mu: float, anchor: Items) -> Penalty:
    """Return the penalty mu/2 * |params - anchor|: the norm where its square belongs."""

    def penalty(params: Items, rng: torch.Generator) -> Tensor:
        return mu / 2 * (torch.stack([(p - anchor[k]).square().sum() for k, p in params.items()]).sum() + 1e-30).sqrt()

    return penalty
