"""Captures on disk: JSON headers and content-hashed safetensors, so that equal messages are stored once."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pflsec.core.errors import RunError
from pflsec.core.files import disk_errors, read_json, safe_name, write_bytes, write_json
from pflsec.core.inputs import InputSpec
from pflsec.core.items import Items
from pflsec.core.tensors import read_items, to_bytes
from pflsec.wire.capture import KINDS, Record, capture_id

SCHEMA = 1
MOST = 2**31  # no count in a header is larger


class CaptureStore:
    """The folder `captures/` of a run: <id>.json and blobs/<sha256>.safetensors."""

    def __init__(self, folder: Path):
        self.folder = folder

    def write(self, record: Record) -> None:
        """Store a record; its header is written last, so that a header always has its messages."""
        messages = {name: self._blob(getattr(record, name)) for name in ("down", "up", "memory")}
        if record.shown:
            messages["shown"] = self._blob(record.shown)
        header = {
            "schema": SCHEMA,
            "id": record.id,
            "algorithm": record.algorithm,
            "round": record.round,
            "client": record.client,
            "victim": record.victim,
            "kind": record.kind,
            "messages": messages,
            "items": {
                direction: [{"name": k, "shape": list(v.shape), "dtype": str(v.dtype)} for k, v in items.items()]
                for direction, items in (("down", record.down), ("up", record.up))
            },
            "input": record.input.as_dict(),
            "batch": record.batch,
            "epochs": record.epochs,
            "batch_size": record.batch_size,
            "steps": record.steps,
            "lr": record.lr,
            "personal_equals_public": record.personal_equals_public,
            "facts": dict(record.facts),
        }
        write_json(self.folder / f"{record.id}.json", header)

    def ids(self) -> list[str]:
        """Return the ids of all captures, sorted."""
        return sorted(p.stem for p in self.folder.glob("*.json"))

    def header(self, capture: str) -> dict[str, Any]:
        """Return a capture's header. Raises RunError when it is missing, damaged or of another schema."""
        what = f"capture '{capture}'"
        header = read_json(self.folder / f"{safe_name(capture, 'capture')}.json", what)
        if not isinstance(header, dict) or type(header.get("schema")) is not int or header["schema"] != SCHEMA:
            found = header.get("schema") if isinstance(header, dict) else None
            raise RunError(
                f"{what} has schema version {found}; this version of pflsec reads {SCHEMA}. Train the run again."
            )
        return header

    def place(self, capture: str) -> tuple[int, int, str]:
        """Return a capture's round, client and kind, from its header alone; its name must say the same. Raises RunError."""
        header = self.header(capture)
        with _garbled(f"capture '{capture}'"):
            t, client, victim = (_whole(header, name) for name in ("round", "client", "victim"))
            kind = _kind(header)
        if capture != (own := capture_id(t, client, victim, kind)):
            raise RunError(f"capture '{capture}' is damaged: its header is that of '{own}'.")
        return t, client, kind

    def input(self, capture: str) -> InputSpec:
        """Return what a capture's inputs look like, from its header alone. Raises RunError like `read`."""
        header = self.header(capture)
        with _garbled(f"capture '{capture}'"):
            return _input(header["input"], f"capture '{capture}'")

    def read(self, capture: str) -> Record:
        """Return a record. Raises RunError when anything of it is missing, damaged or foreign."""
        header = self.header(capture)
        what = f"capture '{capture}'"
        with _garbled(what):
            down, up, memory = (
                self._read(header["messages"][name], f"{what}, {name}") for name in ("down", "up", "memory")
            )
            for direction, items in (("down", down), ("up", up)):
                listed = {item["name"]: (item["shape"], item["dtype"]) for item in header["items"][direction]}
                if {k: (list(v.shape), str(v.dtype)) for k, v in items.items()} != listed:
                    raise RunError(f"{what} is damaged: its {direction}link is not what the header lists.")
            shown = header["messages"].get("shown")
            record = Record(
                id=str(header["id"]),
                algorithm=str(header["algorithm"]),
                round=_whole(header, "round"),
                client=_whole(header, "client"),
                victim=_whole(header, "victim"),
                kind=_kind(header),
                down=down,
                up=up,
                memory=memory,
                input=_input(header["input"], what),
                batch=_whole(header, "batch"),
                epochs=_whole(header, "epochs"),
                batch_size=_whole(header, "batch_size"),
                lr=float(_typed(header, "lr", int, float)),
                personal_equals_public=_typed(header, "personal_equals_public", bool),
                shown={} if shown is None else self._read(shown, f"{what}, shown"),
                facts=_typed(header, "facts", dict),
            )
            if _whole(header, "steps") != record.steps:
                raise ValueError(f"steps, which do not follow from {record.batch} images in {record.epochs} epochs")
        _check(record, capture, what)
        return record

    def _blob(self, items: Items) -> str:
        data = to_bytes(items)
        name = hashlib.sha256(data).hexdigest()
        path = self.folder / "blobs" / f"{name}.safetensors"
        with disk_errors(path):
            if not path.exists():
                write_bytes(path, data)
        return name

    def _read(self, blob: str, what: str) -> Items:
        if not (isinstance(blob, str) and len(blob) == 64 and all(c in "0123456789abcdef" for c in blob)):
            raise RunError(f"{what} is damaged: '{blob}' is no content hash.")
        return read_items(self.folder / "blobs" / f"{blob}.safetensors", what, sha256=blob)


@contextmanager
def _garbled(what: str) -> Iterator[None]:
    """Turn what goes wrong while a header is read into one sentence."""
    try:
        yield
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise RunError(f"{what} is damaged: its header lacks or garbles {error}.") from error


def _typed(header: dict[str, Any], name: str, *kinds: type) -> Any:
    """Return a field of exactly one of these types: true is no number. Raises ValueError, KeyError."""
    if type(header[name]) not in kinds:
        raise ValueError(f"'{name}', which is {str(header[name])[:40]!r}")
    return header[name]


def _whole(header: dict[str, Any], name: str) -> int:
    if not 0 <= (value := _typed(header, name, int)) < MOST:
        raise ValueError(f"'{name}', which is {value}")
    return value


def _kind(header: dict[str, Any]) -> str:
    if (kind := _typed(header, "kind", str)) not in KINDS:
        raise ValueError(f"'kind', which is {kind[:40]!r}")
    return kind


def _input(values: Any, what: str) -> InputSpec:
    try:
        return InputSpec.from_dict(values)
    except RunError as error:
        raise RunError(f"{what} is damaged: {error}") from error


def _check(record: Record, capture: str, what: str) -> None:
    """Raise RunError when the header is another capture's, or its numbers are none that a run could have had."""
    if record.id != capture:
        raise RunError(f"{what} is damaged: its header is that of '{record.id}'.")
    if min(record.batch, record.batch_size) < 1:
        raise RunError(f"{what} is damaged: its header has {record.batch} images in steps of {record.batch_size}.")
    if not 0 < record.lr < float("inf"):
        raise RunError(f"{what} is damaged: its header has the learning rate {record.lr}.")
