"""Captures on disk: what comes back is what was written, and nothing else comes back."""

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pflsec.core.errors import ConfigError, RunError
from pflsec.core.inputs import InputSpec
from pflsec.core.items import Items
from pflsec.wire.capture import Capture, Record
from pflsec.wire.store import CaptureStore
from tests import toys

SPEC = InputSpec((1, 4, 4), 3, (0.25,), (0.5,))


def record(**changes: Any) -> Record:
    down: Items = {"body.w": torch.randn(2, 3), "known": torch.tensor([True, False])}
    up: Items = {"body.w": torch.randn(2, 3), "count": torch.tensor(3), "empty": torch.zeros(0, 3)}
    whole = Record(
        "r000-c00-v0-probe", "fedavg", 0, 0, 0, "probe", down, up, {}, SPEC, 2, 3, 2, 0.05, False, {"note": "x"}
    )
    return replace(whole, **changes)


@pytest.fixture
def store(tmp_path: Path) -> CaptureStore:
    return CaptureStore(tmp_path / "captures")


def blobs(store: CaptureStore) -> list[Path]:
    return sorted((store.folder / "blobs").iterdir())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (2, 3)])
def test_what_is_read_is_what_was_written(store: CaptureStore, dtype: torch.dtype, shape: tuple[int, ...]):
    written = record(memory={"m": torch.ones(shape).to(dtype)}, up={"u": torch.zeros(shape).to(dtype)})
    store.write(written)
    read = store.read(written.id)
    for message in ("down", "up", "memory"):
        assert toys.same(getattr(read, message), getattr(written, message))
    assert replace(read, down={}, up={}, memory={}) == replace(written, down={}, up={}, memory={})


def test_what_others_see_is_stored_where_they_see_something(store: CaptureStore):
    written = record(shown={"body.w": torch.ones(2, 3)})
    store.write(written)
    assert toys.same(store.read(written.id).shown, written.shown)
    store.write(record())
    assert store.read(written.id).shown == {}
    assert "shown" not in store.header(written.id)["messages"]


def test_equal_downlinks_are_stored_once(store: CaptureStore):
    first = record()
    store.write(first)
    (store.folder / f"{first.id}.json").unlink()
    before = {blob: blob.stat().st_ino for blob in blobs(store)}
    for client in range(5):
        store.write(replace(first, id=f"c{client}", client=client, up={"u": torch.tensor([client])}))
    assert all(blob.stat().st_ino == inode for blob, inode in before.items())
    assert len(blobs(store)) == 3 + 5  # one downlink, one empty memory, the first uplink and five others
    assert store.ids() == [f"c{client}" for client in range(5)]


def test_the_same_values_in_another_shape_or_dtype_are_another_message(store: CaptureStore):
    values = [
        torch.zeros(4),
        torch.zeros(2, 2),
        torch.zeros(4, dtype=torch.int32),
        torch.zeros(2, dtype=torch.float64),
    ]
    for number, value in enumerate(values):
        store.write(record(id=f"c{number}", up={"u": value}))
        assert store.read(f"c{number}").up["u"].dtype == value.dtype
        assert store.read(f"c{number}").up["u"].shape == value.shape


def sentence(store: CaptureStore, capture: str) -> str:
    """Return the refusal, which must be one line that names the capture."""
    with pytest.raises(RunError) as refused:
        store.read(capture)
    text = str(refused.value)
    assert f"'{capture}'" in text
    assert "\n" not in text
    return text


def test_a_capture_that_is_not_there_is_named(store: CaptureStore):
    assert "is missing" in sentence(store, "r009-c00-v0-probe")


@pytest.mark.parametrize("keep", [0, 1, 40])
def test_a_truncated_header_is_refused(store: CaptureStore, keep: int):
    store.write(record())
    header = store.folder / f"{record().id}.json"
    header.write_text(header.read_text()[:keep])
    assert "damaged or truncated" in sentence(store, record().id)


@pytest.mark.parametrize("text", ["null", "[]", "3", '"text"', "\x00\xff", "[" * 100_000])
def test_a_header_that_is_something_else_is_refused(store: CaptureStore, text: str):
    store.write(record())
    (store.folder / f"{record().id}.json").write_text(text, encoding="latin1")
    sentence(store, record().id)


def test_a_header_of_another_schema_names_both_versions(store: CaptureStore):
    change(store, lambda header: header | {"schema": 7})
    assert "schema version 7; this version of pflsec reads 1" in sentence(store, record().id)


def change(store: CaptureStore, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Write the record with an edited header."""
    store.write(record())
    path = store.folder / f"{record().id}.json"
    path.write_text(json.dumps(edit(json.loads(path.read_text()))))


@pytest.mark.parametrize(
    "field",
    [
        "algorithm",
        "round",
        "client",
        "victim",
        "kind",
        "messages",
        "items",
        "input",
        "batch",
        "epochs",
        "batch_size",
        "lr",
        "facts",
    ],
)
def test_a_header_without_a_field_is_refused(store: CaptureStore, field: str):
    change(store, lambda header: {k: v for k, v in header.items() if k != field})
    sentence(store, record().id)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((field, value) for field in ("round", "client", "victim") for value in ("one", -1, None, float("inf"), [1])),
        *((field, value) for field in ("batch", "batch_size") for value in ("one", 0, -1, float("nan"), {})),
        *(("epochs", value) for value in ("one", -1, float("nan"), float("inf"), {})),
        *(("lr", value) for value in ("fast", 0, -0.1, float("nan"), float("inf"), None)),
        ("messages", {"down": "x", "up": "x", "memory": "x"}),
        ("messages", {"down": "../../vault/x", "up": 3, "memory": None}),
        ("messages", []),
        ("items", {"down": [], "up": []}),
        ("items", {"down": None, "up": None}),
        ("input", {"shape": [1, 4], "classes": 3, "mean": [0], "std": [1]}),
        ("input", {"shape": [1, 4, 4], "classes": 3, "mean": [0], "std": [0]}),
        ("input", "grey"),
        ("facts", 3),
    ],
)
def test_a_garbled_field_is_refused(store: CaptureStore, field: str, value: Any):
    change(store, lambda header: header | {field: value})
    sentence(store, record().id)


def test_a_header_under_another_captures_name_is_refused(store: CaptureStore):
    store.write(record())
    (store.folder / f"{record().id}.json").rename(store.folder / "r000-c01-v0-probe.json")
    sentence(store, "r000-c01-v0-probe")


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: data[:-1] + bytes([data[-1] ^ 1]), lambda _: b""]
)
def test_a_message_that_was_tampered_with_is_refused(store: CaptureStore, damage: Callable[[bytes], bytes]):
    store.write(record())
    for blob in blobs(store):
        whole = blob.read_bytes()
        blob.write_bytes(damage(whole))
        assert "hash differs" in sentence(store, record().id)
        blob.write_bytes(whole)
    store.read(record().id)


def test_a_message_that_is_not_there_is_refused(store: CaptureStore):
    store.write(record())
    for blob in blobs(store):
        whole = blob.read_bytes()
        blob.unlink()
        assert "is missing" in sentence(store, record().id)
        blob.write_bytes(whole)


def test_the_message_of_another_capture_is_refused(store: CaptureStore):
    """Its hash is right, but it is not what this header lists."""
    store.write(record(id="other", up={"u": torch.ones(7)}))
    change(
        store,
        lambda header: header | {"messages": header["messages"] | {"up": store.header("other")["messages"]["up"]}},
    )
    assert "uplink is not what the header lists" in sentence(store, record().id)


def test_a_message_of_another_dtype_is_refused(store: CaptureStore):
    """Same names and shapes, other bits."""
    doubled = {k: v.double() if v.is_floating_point() else v for k, v in record().up.items()}
    store.write(record(id="other", up=doubled))
    change(
        store,
        lambda header: header | {"messages": header["messages"] | {"up": store.header("other")["messages"]["up"]}},
    )
    sentence(store, record().id)


@pytest.mark.parametrize("name", ["../vault/pool", "/etc/passwd", "..", "", "a/b", "a\x00b"])
def test_a_name_cannot_leave_the_folder(store: CaptureStore, name: str):
    with pytest.raises(ConfigError):
        store.read(name)


def test_a_file_with_the_right_hash_that_is_no_safetensors_file_is_refused(store: CaptureStore):
    import hashlib

    data = b"\x80\x04N."  # what pickle.dumps(None) gives
    name = hashlib.sha256(data).hexdigest()
    change(store, lambda header: header | {"messages": header["messages"] | {"up": name}})
    (store.folder / "blobs" / f"{name}.safetensors").write_bytes(data)
    assert "is no safetensors file" in sentence(store, record().id)


def test_a_capture_says_which_classes_it_holds():
    """The label set of a FedProto upload, and nothing where there is none."""

    def held(**up: torch.Tensor) -> list[int] | None:
        unknown: dict[str, Any] = dict.fromkeys(field.name for field in fields(Capture))
        cap = replace(Capture(**unknown), record=record(up=up))
        return None if cap.held_classes is None else cap.held_classes.tolist()

    assert held(held=torch.tensor([True, False, True])) == [0, 2]
    assert held(held=torch.ones(3)) is None
    assert held(w=torch.ones(3)) is None
