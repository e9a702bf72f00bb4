"""Networks by name."""

from pflsec.core import registry
from pflsec.models.network import Network


def build(
    name: str, shape: tuple[int, int, int], classes: int, split: str | None = None, *, frozen: bool = False
) -> Network:
    """Return the network called `name` ("auto": cnn) for inputs of this shape, cut at `split` (None: its last layer).

    frozen  the running statistics of BatchNorm layers are constants
    """
    make = registry.load("models", "cnn" if name == "auto" else name)
    return Network(lambda: make(shape, classes), shape, classes, split, frozen=frozen)
