"""A defense: a pure transformation of messages at one of the three seams of the channel."""

from typing import ClassVar, Generic, Literal, TypeVar

import torch

from pflsec.core.config import Config
from pflsec.core.items import Items

C = TypeVar("C", bound=Config)
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
