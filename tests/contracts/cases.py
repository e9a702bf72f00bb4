"""Every registered method, in every configuration that one choice or switch away from its defaults gives."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

import torch

from pflsec.core import registry
from pflsec.core.config import Config, build
from pflsec.core.errors import ConfigError
from pflsec.core.items import Items
from pflsec.runtime.rounds import Federated
from pflsec.runtime.setup import Setup
from pflsec.training.local import Driver, LocalWork, Training
from tests import toys

CLIENT = 3
"""The client whose exchange is looked at: it holds all classes."""


@dataclass(frozen=True)
class Case:
    """A method and the settings that differ from its defaults.

    buffers  the network has BatchNorm layers, and this becomes of their running statistics; "": it has none
    """

    key: str
    settings: tuple[tuple[str, Any], ...] = ()
    buffers: str = ""

    def __str__(self) -> str:
        words = [f"{name}={value}" for name, value in self.settings]
        return " ".join([self.key, *words, *([f"buffers={self.buffers}"] if self.buffers else [])])


@dataclass(frozen=True)
class Exchange:
    """A federation after some rounds, and one client's next exchange in it."""

    setup: Setup
    server: Items
    state: Items
    memory: Items
    down: Items
    t: int

    def context(self, driver: type[Driver] = Training, **changes: Any) -> LocalWork:
        """Return a new context of the client's local work."""
        return toys.context(self.setup, self.t, CLIENT, driver, **changes)


def every_method() -> list[str]:
    """Return the keys of all registered methods."""
    return registry.names("algorithms")


def every_case() -> list[Case]:
    """Return all methods with their defaults, and with each choice replaced by each other one that is allowed alone."""
    return [Case(key, settings) for key in every_method() for settings in ((), *_alternatives(key))]


def every_sending_case() -> list[Case]:
    """Return the cases of methods whose clients send anything at all."""
    return [case for case in every_case() if registry.load("algorithms", case.key).up]


def every_case_with_batchnorm() -> list[Case]:
    """Return all methods with a network that has BatchNorm layers, under every policy that the method allows."""
    allowed = {"yes": ("aggregate", "local", "frozen"), "local": ("local", "frozen")}
    return [
        Case(key, buffers=policy)
        for key in every_method()
        for policy in allowed.get(registry.load("algorithms", key).batchnorm.partition(":")[0], ("frozen",))
    ]


def _alternatives(key: str) -> Iterator[tuple[tuple[str, Any], ...]]:
    model: type[Config] = registry.load("algorithms", key).Config
    for name, field in model.model_fields.items():
        kind = field.annotation
        values = get_args(kind) if get_origin(kind) is Literal else (False, True) if kind is bool else ()
        for value in values:
            if value != field.default and _allowed(model, {name: value}):
                yield ((name, value),)


def _allowed(model: type[Config], settings: dict[str, Any]) -> bool:
    try:
        build(model, settings, "case")
    except ConfigError:
        return False
    return True


@functools.cache
def exchange(case: Case, dtype: torch.dtype = torch.float64, after: int = 2) -> Exchange:
    """Return a client's exchange after so many rounds. Nothing may change it, so the tests share it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        net = toys.normed(frozen=case.buffers == "frozen") if case.buffers else None
        options = {"settings": dict(case.settings), "buffers": case.buffers or "aggregate"}
        made = toys.setup(case.key, net=net, rounds=9, capture_rounds="8", **options)
        federated = Federated(made)
        for _ in range(after):
            federated.advance()
    finally:
        torch.set_default_dtype(before)
    server = federated.server
    return Exchange(
        setup=made,
        server=server,
        state=federated.states[CLIENT],
        memory=federated.memories[CLIENT],
        down=made.algorithm.downlink(server, CLIENT),
        t=after,
    )
