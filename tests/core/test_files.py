"""Files and tensor files: written whole or not at all, and read as if a stranger had written them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pflsec.core import files
from pflsec.core.errors import RunError
from pflsec.core.tensors import read_items, write_items
from pflsec.core.vault import VaultWriter
from tests import toys


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(3),
        torch.tensor(True),
        torch.tensor(0.5, dtype=torch.float64),
        torch.zeros(0, 3),
        torch.zeros(2, 0, dtype=torch.int64),
        torch.tensor([True, False]),
        torch.arange(6).reshape(2, 3),
        torch.tensor([float("inf"), float("nan"), -0.0]),
        torch.arange(6.0).reshape(2, 3).T,
        torch.ones(1, 3).expand(4, 3),
        torch.ones(2, dtype=torch.float16),
    ],
    ids=lambda v: f"{v.dtype} {list(v.shape)}",
)
def test_shape_dtype_and_bits_survive_a_file(value: torch.Tensor, tmp_path: Path):
    """0-d, integer, boolean, empty, transposed and expanded tensors; NaN too."""
    write_items(tmp_path / "a", {"v": value, "other": torch.ones(1)})
    found = read_items(tmp_path / "a", "a")["v"]
    assert (found.dtype, found.shape) == (value.dtype, value.shape)
    assert (
        torch.equal(found.contiguous().view(torch.uint8), value.contiguous().view(torch.uint8))
        if value.dim()
        else (found.item() == value.item())
    )


def test_items_that_share_memory_are_written_in_full(tmp_path: Path):
    base = torch.arange(4.0)
    write_items(tmp_path / "a", {"one": base, "two": base, "part": base[1:3]})
    found = read_items(tmp_path / "a", "a")
    assert found["two"].tolist() == [0, 1, 2, 3]
    assert found["part"].tolist() == [1, 2]


def test_a_graph_does_not_get_into_a_file(tmp_path: Path):
    write_items(tmp_path / "a", {"w": torch.ones(2, requires_grad=True) * 2})
    assert not read_items(tmp_path / "a", "a")["w"].requires_grad


def test_no_items_are_a_file_too(tmp_path: Path):
    write_items(tmp_path / "a", {})
    assert read_items(tmp_path / "a", "a") == {}


def test_equal_items_have_equal_hashes_and_others_do_not(tmp_path: Path):
    items = {"w": torch.ones(3)}
    digest = write_items(tmp_path / "a", items)
    assert write_items(tmp_path / "b", items) == digest
    assert write_items(tmp_path / "c", {"w": torch.ones(3, dtype=torch.float64)}) != digest
    assert toys.same(read_items(tmp_path / "a", "a", sha256=digest), items)
    with pytest.raises(RunError, match="hash differs"):
        read_items(tmp_path / "c", "a", sha256=digest)


@pytest.mark.parametrize("data", [b"", b"x", b"\x80\x04N.", b"\xff" * 100, (2**62).to_bytes(8, "little") + b"{}"])
def test_a_damaged_tensor_file_is_one_sentence(data: bytes, tmp_path: Path):
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(RunError, match="the thing is damaged") as refused:
        read_items(tmp_path / "a", "the thing")
    assert "\n" not in str(refused.value)


def test_a_missing_tensor_file_is_named(tmp_path: Path):
    with pytest.raises(RunError, match="the thing is missing"):
        read_items(tmp_path / "a", "the thing")
    with pytest.raises(RunError, match="the thing cannot be read"):
        read_items(tmp_path, "the thing")


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "a.json"
    files.write_json(path, {"v": 1})

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(RunError, match=r"cannot write .*a\.json: No space left on device"):
        files.write_json(path, {"v": 2})
    assert json.loads(path.read_text()) == {"v": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_json_has_no_nan_and_no_tensors():
    value = {
        "a": float("nan"),
        "b": (1, torch.tensor(2)),
        3: {2, 1},
        "p": Path("x"),
        "i": float("inf"),
        "t": True,
    }
    assert json.loads(files.to_json(value)) == {
        "a": None,
        "b": [1, 2],
        "3": [1, 2],
        "p": "x",
        "i": None,
        "t": True,
    }


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        (float("nan"), ""),
        (float("inf"), "inf"),
        (True, "true"),
        (0.1 + 0.2, "0.3"),
        (3, "3"),
        ("a", "a"),
    ],
)
def test_a_cell_of_a_table(value: Any, text: str):
    assert files.cell(value) == text


def test_a_table_keeps_its_columns_and_quotes_what_needs_it():
    text = files.to_csv(["a", "b"], [{"b": 'x,"y"'}, {"a": 1, "c": 2}])
    assert text == 'a,b\n,"x,""y"""\n1,\n'


@pytest.mark.parametrize("name", ["a", "A1", "fedavg-digits-s0", "x.y_z", "9", "a" * 100])
def test_usual_names_are_safe(name: str):
    assert files.safe_name(name, "name") == name


@pytest.mark.parametrize("text", ["", "{", "{'a': 1}", "\xff\xfe", "[" * 100_000])
def test_a_damaged_json_file_is_one_sentence(text: str, tmp_path: Path):
    (tmp_path / "a").write_bytes(text.encode("latin1"))
    with pytest.raises(RunError, match="the thing cannot be read") as refused:
        files.read_json(tmp_path / "a", "the thing")
    assert "\n" not in str(refused.value)


def test_the_vault_writer_keeps_batch_state_and_pool(tmp_path: Path):
    vault = VaultWriter(tmp_path / "vault")
    x, y, index = torch.rand(2, 1, 4, 4), torch.tensor([1, 2]), torch.tensor([10, 20])
    vault.victim("a", x, y, index, {"head.w": torch.ones(3)}, {"replay_residual": float("nan")})
    vault.pool(x, index, x.mean(0))
    assert read_items(tmp_path / "vault" / "a.safetensors", "a").keys() == {
        "x",
        "y",
        "dataset_index",
        "state.head.w",
    }
    assert json.loads((tmp_path / "vault" / "a.json").read_text()) == {"replay_residual": None}
    assert read_items(tmp_path / "vault" / "pool.safetensors", "pool").keys() == {
        "images",
        "dataset_index",
        "mean",
    }
