"""The wire contract: which items a method sends in each direction, of which kind and shape."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from pflsec.core.errors import WireError
from pflsec.core.network import Net, buffer_in

Direction = Literal["down", "up"]

KINDS = (
    "weights",
    "weights-delta",
    "gradient",
    "control variate",
    "prototypes",
    "logits",
    "label set",
    "mask",
    "statistics",
    "counts",
    "generator",
    "buffers",
    "scalar",
)
DECLARATION = re.compile(r"(?P<kind>[a-z -]+?)(?: \[(?P<shape>[^\]]*)\])?")


@dataclass(frozen=True)
class Contract:
    """What may cross the wire, as a method declares it.

    A key is an item's name, or `part.*` / `prefix.part.*` / `prefix.*` for the network's parameters of a part (or all of
    them), under a prefix. A trailing '?' marks an item that some configurations send and others do not.
    A value is a kind, and for items that are no parameters a shape: `prototypes [held, d]`. C is the number of classes,
    d the feature dimension; any other letter stands for one size throughout a message. Parameters of several models in one
    item: `weights [m, ...]`, where the dots stand for the parameter's own shape.

    Running statistics that a pattern lets through are of the kind `buffers`, whatever the pattern says.
    omit  items of the network for which no pattern stands: they stay where they are
    """

    method: str
    down: Mapping[str, str]
    up: Mapping[str, str]
    net: Net
    omit: frozenset[str] = frozenset()
    _tables: dict[str, dict[str, str]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, text in (*self.down.items(), *self.up.items()):
            match = DECLARATION.fullmatch(text)
            if match is None or match["kind"] not in KINDS:
                raise WireError(f"{self.method} declares '{name}' as '{text}'; the kinds are: {', '.join(KINDS)}.")

    def items(self, direction: Direction) -> dict[str, str]:
        """Return {item name: declaration} with the patterns spelled out for this network."""
        if direction not in self._tables:
            declared = self.down if direction == "down" else self.up
            self._tables[direction] = {
                n: "buffers" if key.endswith((".*", ".*?")) and buffer_in(self.net, n) else text
                for key, text in declared.items()
                for n in self.names(key)
            }
        return self._tables[direction]

    def kind(self, direction: Direction, name: str) -> str:
        """Return the kind of an item."""
        return kind_of(self.items(direction)[name])

    def check(self, direction: Direction, message: Mapping[str, Tensor], where: str) -> None:
        """Raise WireError unless the message holds the declared items, all of them, in the declared shapes."""
        declared = self.items(direction)
        patterns = self.down if direction == "down" else self.up
        optional = {name for key in patterns if key.endswith("?") for name in self.names(key)}
        verb = "sent" if direction == "up" else "was sent"
        for name in message:
            if name not in declared:
                allowed = ", ".join(patterns) or "nothing"
                raise WireError(
                    f"{where}: {self.method} {verb} the item '{name}' {list(message[name].shape)}; its contract allows "
                    f"{allowed}. Declare it in `{direction}`, or keep personal items in Done.state."
                )
        missing = sorted(set(declared) - set(message) - optional)
        if missing:
            raise WireError(f"{where}: {self.method} {verb} a message without {', '.join(missing)}, which it declares.")
        sizes: dict[str, int] = {"C": self.net.classes, "d": self.net.feature_dim}
        for name, value in message.items():
            self._check_shape(name, declared[name], value, sizes, where)

    def names(self, key: str) -> list[str]:
        """Return the items that a declared key stands for in this network."""
        key = key.rstrip("?")
        if not key.endswith(".*"):
            return [key]
        path = key[:-2].split(".")
        part = path[-1] if path[-1] in ("body", "head") else None
        prefix = ".".join(path[:-1] if part else path)
        names = [n for n in self.net.shapes if n not in self.omit and (part is None or n.startswith(part + "."))]
        return [f"{prefix}.{n}" if prefix else n for n in names]

    def _check_shape(self, name: str, text: str, value: Tensor, sizes: dict[str, int], where: str) -> None:
        match = DECLARATION.fullmatch(text)
        assert match is not None  # checked when the contract was made
        ends = [p for p in self.net.shapes if name == p or name.endswith("." + p)]
        parameter = max(ends, key=len, default=None)  # a body may hold a module called body, or head
        own = list(self.net.shapes[parameter]) if parameter else []
        if match["shape"] is None:
            expected = own
        else:
            letters = [s.strip() for s in match["shape"].split(",") if s.strip()]
            tail = own if letters[-1:] == ["..."] else []
            letters = letters[:-1] if letters[-1:] == ["..."] else letters
            if len(letters) + len(tail) != value.dim():
                raise WireError(
                    f"{where}: item '{name}' has shape {list(value.shape)}; its contract says [{match['shape']}]."
                )
            expected = [
                int(s) if s.isdigit() else sizes.setdefault(s, n)
                for s, n in zip(letters, value.shape[: len(letters)], strict=True)
            ] + tail
        if list(value.shape) != expected:
            raise WireError(
                f"{where}: item '{name}' of {self.method} has shape {list(value.shape)}; it must be {expected}."
            )


def kind_of(declaration: str) -> str:
    """Return the kind in a declaration such as 'prototypes [held, d]'."""
    return declaration.partition(" [")[0]
