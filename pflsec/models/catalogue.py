"""Networks by name."""

import inspect

from pflsec.core import registry
from pflsec.core.errors import ModelError
from pflsec.models.network import Network


def resolved(name: str, vocabulary: int | None) -> str:
    """Return the name of the network that `auto` means for images (cnn) or texts (bag); other names are left alone."""
    return name if name != "auto" else "cnn" if vocabulary is None else "bag"


def build(
    name: str,
    shape: tuple[int, ...],
    classes: int,
    split: str | None = None,
    *,
    frozen: bool = False,
    vocabulary: int | None = None,
) -> Network:
    """Return the network called `name` (or "auto") for inputs of this shape, cut at `split` (None: its last layer).

    frozen      the running statistics of BatchNorm layers are constants
    vocabulary  number of words where inputs are texts; such networks are made by functions of (shape, classes, vocabulary)
    Raises ModelError for a network of images where inputs are texts, and the other way round.
    """
    name = resolved(name, vocabulary)
    make = registry.load("models", name)
    reads_text = "vocabulary" in inspect.signature(make).parameters
    if reads_text != (vocabulary is not None):
        reads, given, other = ("texts", "images", "cnn") if reads_text else ("images", "texts", "bag")
        raise ModelError(
            f"model '{name}' reads {reads}, but the data are {given}; use --model auto, or one such as {other}."
        )
    if vocabulary is not None:
        return Network(
            lambda: make(shape, classes, vocabulary), shape, classes, split, frozen=frozen, vocabulary=vocabulary
        )
    return Network(lambda: make(shape, classes), shape, classes, split, frozen=frozen)
