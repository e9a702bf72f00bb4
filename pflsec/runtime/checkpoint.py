"""Checkpoints: all that changes in a run, written after every round, the newest two kept.

A run that was killed at any moment and is resumed equals an uninterrupted one, bit for bit: everything else is a function of
the configuration and of named random streams.
"""

import hashlib
import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pflsec.core.errors import PflsecWarning, RunError
from pflsec.core.files import disk_errors, locked, read_json, write_bytes, write_json, write_text
from pflsec.core.items import Items, prefixed, without_prefix
from pflsec.core.tensors import read_items, to_bytes
from pflsec.runtime.folder import RunFolder

SCHEMA = 1
KEPT = 2


@dataclass
class State:
    """What changes in a run. `t` is the next round to play; `unsent` holds what the defenses of each client have kept back of its
    uploads; `facts` holds plain numbers (privacy accounts, ...)."""

    t: int
    server: Items
    states: dict[int, Items]
    unsent: dict[int, Items]
    memories: dict[int, Items]
    last_trained: dict[int, int]
    facts: dict[str, Any]


def save(folder: RunFolder, state: State) -> None:
    """Write a checkpoint and delete those before the newest two. The header is written last: without it there is none."""
    items = prefixed("server", state.server)
    for kind, many in (("state", state.states), ("unsent", state.unsent), ("memory", state.memories)):
        for client, held in many.items():
            items |= prefixed(f"{kind}.{client}", held)
    data = to_bytes(items)
    path = folder.checkpoints / f"round-{state.t:06d}.safetensors"
    write_bytes(path, data)
    header = {
        "schema": SCHEMA,
        "t": state.t,
        "sha256": hashlib.sha256(data).hexdigest(),
        "clients": sorted(state.states),
        "watched": sorted(state.memories),
        "last_trained": state.last_trained,
        "facts": state.facts,
    }
    write_json(path.with_suffix(".json"), header)
    for old in sorted(folder.checkpoints.glob("round-*.json"))[:-KEPT]:
        old.unlink(missing_ok=True)
        old.with_suffix(".safetensors").unlink(missing_ok=True)


def newest(folder: RunFolder) -> State | None:
    """Return the newest checkpoint that is whole, with a warning for each damaged one; None where there is none at all.

    Raises RunError when there are checkpoints and all are damaged.
    """
    headers = sorted(folder.checkpoints.glob("round-*.json"), reverse=True)
    for header in headers:
        try:
            return _read(header)
        except RunError as error:
            warnings.warn(f"{error} Going on from the one before.", PflsecWarning, stacklevel=2)
    if headers:
        raise RunError(f"run '{folder.path.name}' cannot be resumed: all its checkpoints are damaged. Train it again.")
    return None


def _read(path: Path) -> State:
    what = f"checkpoint {path.stem}"
    header = read_json(path, what)
    try:
        if header["schema"] != SCHEMA:
            raise RunError(f"{what} has schema version {header['schema']}; this version of pflsec reads {SCHEMA}.")
        items = read_items(path.with_suffix(".safetensors"), what, sha256=str(header["sha256"]))
        return State(
            t=int(header["t"]),
            server=without_prefix("server", items),
            states=_by_client("state", header["clients"], items),
            unsent=_by_client("unsent", header["clients"], items),
            memories=_by_client("memory", header["watched"], items),
            last_trained={int(c): int(t) for c, t in header["last_trained"].items()},
            facts=dict(header["facts"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunError(f"{what} is damaged: its header lacks or garbles {error}.") from error


def _by_client(kind: str, clients: list[int], items: Mapping[str, Any]) -> dict[int, Items]:
    grouped: dict[int, Items] = {int(c): {} for c in clients}
    for name, value in without_prefix(kind, dict(items)).items():
        client, _, rest = name.partition(".")
        grouped[int(client)][rest] = value
    return grouped


def rewind(folder: RunFolder, t: int) -> None:
    """Cut metrics.jsonl and clients.csv back to the rounds before t: later ones are played again."""
    for name, header, per_round in (("metrics.jsonl", 0, _metrics_round), ("clients.csv", 1, _clients_round)):
        path = folder.path / name
        if not path.exists():
            continue
        with disk_errors(path):
            lines = path.read_text(encoding="utf8").splitlines(keepends=True)
        kept = [line for i, line in enumerate(lines) if i < header or (line.endswith("\n") and per_round(line) < t)]
        write_text(path, "".join(kept))


def _metrics_round(line: str) -> float:
    try:
        return int(json.loads(line)["round"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


def _clients_round(line: str) -> float:
    first = line.partition(",")[0]
    return int(first) if first.isdigit() else float("inf")


@contextmanager
def alone(folder: RunFolder) -> Iterator[None]:
    """Hold the run for this process. Raises RunError while another one trains it; a killed process holds nothing."""
    busy = f"run '{folder.path.name}' is being trained by another process; wait for it to end."
    with locked(folder.path / ".lock", busy):
        yield
