"""Tensor files: safetensors only, read as untrusted."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from pflsec.core.errors import RunError
from pflsec.core.files import write_bytes
from pflsec.core.items import Items


def to_bytes(items: Mapping[str, Tensor]) -> bytes:
    """Return items as a safetensors file's bytes. Shapes, dtypes and order are kept; 0-d, bool and empty items are fine.

    The format sorts tensors its own way, and sums over items depend on their order to the last bit: it goes in the header.
    """
    tensors = {k: v.detach().contiguous().cpu().clone() for k, v in items.items()}
    return save(tensors, metadata={"order": json.dumps(list(items))})


def write_items(path: Path, items: Mapping[str, Tensor]) -> str:
    """Write items atomically; return the SHA-256 of the file in hexadecimal."""
    data = to_bytes(items)
    write_bytes(path, data)
    return hashlib.sha256(data).hexdigest()


def read_items(path: Path, what: str, sha256: str | None = None) -> Items:
    """Return the items of a file; RunError if it is missing, damaged, or does not have the given hash."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise RunError(f"{what} is missing: {path} does not exist.") from None
    except OSError as error:
        raise RunError(f"{what} cannot be read: {path}: {error.strerror}.") from error
    if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
        raise RunError(f"{what} is damaged: {path} does not have the content that was written (hash differs).")
    try:
        items = load(data)
        return {name: items.pop(name) for name in _order(data) if name in items} | items
    except (SafetensorError, ValueError, TypeError, AttributeError) as error:
        raise RunError(f"{what} is damaged or is no safetensors file: {path} ({error}).") from error


def _order(data: bytes) -> list[str]:
    """Return the names in the order in which they were written; empty for files of other writers."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    return json.loads(header.get("__metadata__", {}).get("order", "[]"))
