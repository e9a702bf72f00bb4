"""What a method may ask of a network: a pure function of its items, cut into body and head."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from pflsec.core.items import Items


class Net(Protocol):
    """A network as a function of named parameters: body (x to features) and head (features to logits).

    Parameters are named `body.*` and `head.*`; together they are all parameters, and no name stands in both.
    """

    shapes: Mapping[str, tuple[int, ...]]
    """Shape of every parameter by name, in the order of the forward pass."""
    classes: int
    feature_dim: int

    def features(self, items: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return the body's output, [B, feature_dim]. Reads the items `body.*`."""
        ...

    def head(self, items: Mapping[str, Tensor], z: Tensor) -> Tensor:
        """Return the logits [B, classes] of features z [B, feature_dim]. Reads the items `head.*`."""
        ...

    def logits(self, items: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return the logits [B, classes] of inputs x [B, C, H, W]."""
        ...

    def fresh(self, *key: int | str) -> Items:
        """Return newly drawn parameters from the stream with this key."""
        ...
