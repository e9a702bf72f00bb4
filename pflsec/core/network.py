"""What a method may ask of a network: a pure function of its items, cut into body and head."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor, nn

from pflsec.core.items import Items

Statistics = dict[int, tuple[Tensor, Tensor]]
"""New running statistics by the identity of the tensor that was read in the forward pass: (that tensor, the new one)."""

Reads = dict[int, tuple[Tensor, list[Tensor]]]
"""Inputs of a linear layer by the identity of the weight that it had: (that weight, the input of every pass with it)."""


class Net(Protocol):
    """A network as a function of named items: body (x to features) and head (features to logits).

    Items are named `body.*` and `head.*`; together they are all parameters and buffers, and no name stands in both.
    Buffers are the running statistics of BatchNorm layers. They are values like the others, but no gradient moves them.
    """

    shapes: Mapping[str, tuple[int, ...]]
    """Shape of every parameter and buffer by name, in the order of the forward pass."""
    buffers: frozenset[str]
    """Names of the buffers."""
    norms: frozenset[str]
    """Names of all parameters and buffers of BatchNorm layers."""
    sample_norms: frozenset[str]
    """Names of all parameters of layers that normalise each example on its own (GroupNorm, LayerNorm)."""
    embeddings: frozenset[str]
    """Names of the tables of embedding layers: a row for each word."""
    inserted: nn.Module | None
    """The layer that a defense has put between body and head, where one has."""
    classes: int
    feature_dim: int

    def features(self, items: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return the body's output, [B, feature_dim]. Reads the items `body.*`."""
        ...

    def head(self, items: Mapping[str, Tensor], z: Tensor) -> Tensor:
        """Return the logits [B, classes] of features z [B, feature_dim]. Reads the items `head.*`."""
        ...

    def logits(self, items: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return the logits [B, classes] of inputs x [B, C, H, W], or tokens [B, T]."""
        ...

    def linear_inputs(self, items: Mapping[str, Tensor], x: Tensor) -> Mapping[str, Tensor]:
        """Return what each linear layer reads for inputs x, [B, n], by the prefix of its parameters, in the order of the
        forward pass. Layers that read more than one vector an input are left out."""
        ...

    @property
    def last_layer(self) -> str | None:
        """Prefix of the final linear layer's parameters, or None if the network ends otherwise."""
        ...

    def reading(self, layer: str) -> AbstractContextManager[Reads]:
        """Return the context of forward passes in which what a linear layer reads, by the prefix of its parameters, is found in
        what it yields: as long as the method runs the network, and whatever it names its items."""
        ...

    def fresh(self, *key: int | str) -> Items:
        """Return newly drawn parameters, and buffers as they begin, from the stream with this key."""
        ...

    def training(self) -> AbstractContextManager[Statistics]:
        """Return the context of a training step's forward passes. BatchNorm layers normalise by the batch in it, and their
        new running statistics are found in what it yields; outside they read the running ones."""
        ...


def buffer_in(net: Net, name: str) -> str | None:
    """Return the buffer of the network that an item holds, under whatever prefix, or None.

    "personal.body.bn.running_mean" holds "body.bn.running_mean".
    """
    if not net.buffers:
        return None
    words = name.split(".")
    return next((tail for i in range(len(words)) if (tail := ".".join(words[i:])) in net.buffers), None)
