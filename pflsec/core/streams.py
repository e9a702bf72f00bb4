"""Named random streams: every draw comes from a stream keyed by words, so no draw ever shifts another.

A stream is a pure function of its key: the result does not depend on the executor, on the number of workers, or on the
order in which clients are visited.
"""

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy
    import torch


def seed_of(*key: int | str) -> int:
    """Return the 63-bit seed of the stream with this key, e.g. seed_of(0, "local", 3, 7)."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in key)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def seed_from(items: "Mapping[str, torch.Tensor]") -> int:
    """Return the 63-bit seed that the names and values of these items determine: a server that draws, and is a pure
    function of items, gets its seed from the public draw of the network."""
    digest = hashlib.sha256()
    for name in sorted(items):
        digest.update(name.encode() + b"\x1f")
        digest.update(items[name].detach().cpu().contiguous().numpy().tobytes())
    return int.from_bytes(digest.digest()[:8], "big") >> 1


def stream(*key: int | str) -> "torch.Generator":
    """Return a fresh torch generator (CPU) for this key."""
    import torch

    return torch.Generator().manual_seed(seed_of(*key))


def numpy_stream(*key: int | str) -> "numpy.random.Generator":
    """Return a fresh numpy generator for this key."""
    import numpy

    return numpy.random.default_rng(seed_of(*key))
