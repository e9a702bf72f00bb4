"""A defense: a pure transformation of messages at one of the three seams of the channel."""

from collections.abc import Iterator, Sequence
from typing import ClassVar, Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from pflsec.core.config import Config
from pflsec.core.items import Items
from pflsec.core.local import LossPerExample

C = TypeVar("C", bound=Config)

Spend = tuple[float, float, int]
"""Noisy steps of one kind: (noise multiplier, sample rate, number of steps)."""


class Guard(Protocol):
    """What a defense of the step seam puts between one client's data and its parameters, for one local work.

    While there is one, data are reached through `ctx.fit` and `ctx.step` alone: raw passes are refused.
    """

    spent: list[Spend]

    def rows(self, epochs: int) -> Iterator[Tensor]:
        """Yield the rows of the data that each step uses, int64; possibly none."""
        ...

    def gradient(self, on: LossPerExample, params: Items, x: Tensor, y: Tensor) -> list[Tensor]:
        """Return the protected mean gradient, one tensor a parameter; x and y may have no rows."""
        ...


Settings = Config  # in the class below, Config names the attribute


class Defense(Generic[C]):
    """Base of every defense. One file, one subclass and its Config.

    seam  step: inside local training, at each gradient; uplink: on what a client sends, on the client; aggregate: on what
          the server makes of the accepted uploads
    """

    key: ClassVar[str]
    seam: ClassVar[Literal["step", "uplink", "aggregate"]]
    Config: ClassVar[type[Settings]] = Settings

    def __init__(self, cfg: C):
        self.cfg = cfg

    def protect(self, message: Items, reference: Items, rng: torch.Generator) -> Items:
        """Return the protected message. `reference` is the downlink (uplink seam) or the server's items (aggregate seam)."""
        raise TypeError(f"{type(self).__name__} does not define protect(); every uplink or aggregate defense must.")


class StepDefense(Defense[C]):
    """Base of defenses inside local training that keep a privacy account.

    A client has `samples` records and takes noisy steps with a noise multiplier, each record taking part by chance with the
    sample rate; its account is the list of those steps.
    """

    seam = "step"

    @property
    def budget(self) -> float | None:
        """The epsilon that a client may spend over the whole run; None: no limit."""
        raise TypeError(f"{type(self).__name__} does not define budget.")

    def delta(self, samples: int) -> float:
        """Return the delta at which a client's epsilon is stated."""
        raise TypeError(f"{type(self).__name__} does not define delta().")

    def epsilon(self, account: Sequence[Spend], samples: int) -> float:
        """Return the epsilon that an account amounts to. Reading it changes nothing."""
        raise TypeError(f"{type(self).__name__} does not define epsilon().")

    def noise_multiplier(self, samples: int, rate: float, steps: int) -> float:
        """Return the noise multiplier for so many planned steps."""
        raise TypeError(f"{type(self).__name__} does not define noise_multiplier().")

    def guard(self, samples: int, batch_size: int, noise_multiplier: float, *key: int | str) -> Guard:
        """Return the guard of one local work; `key` names its noise."""
        raise TypeError(f"{type(self).__name__} does not define guard().")

    def claim(self) -> str:
        """Return what is guaranteed, in a few words."""
        raise TypeError(f"{type(self).__name__} does not define claim().")
