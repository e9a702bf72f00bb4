"""The vault's reader: what the writer wrote comes back; anything missing or damaged is one sentence."""

import json

import pytest
import torch

from pflsec.core.errors import ConfigError, RunError
from pflsec.core.tensors import read_items, write_items
from pflsec.core.vault import VaultWriter
from pflsec.leakage.vault import Vault

CAPTURE = "r0-c3-v1"


@pytest.fixture
def vault(tmp_path):
    writer = VaultWriter(tmp_path)
    x = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    state = {"head.weight": torch.ones(3, 2), "seen": torch.tensor(4)}
    writer.victim(CAPTURE, x, torch.tensor([3, 7]), torch.tensor([10, 11]), state, {"replay_residual": 1e-7})
    writer.pool(torch.rand(5, 1, 8, 8), torch.arange(5), torch.full((1, 8, 8), 0.5))
    return Vault(tmp_path)


def change(vault: Vault, file: str, **items: torch.Tensor | None) -> None:
    """Replace items of a vault file; None takes one out."""
    path = vault.folder / file
    new = read_items(path, "a vault file") | items
    write_items(path, {k: v for k, v in new.items() if v is not None})


def test_what_was_written_comes_back(vault):
    truth = vault.truth(CAPTURE)
    assert truth.x.shape == (2, 1, 8, 8)
    assert truth.y.tolist() == [3, 7]
    assert truth.dataset_index.tolist() == [10, 11]
    assert set(truth.state) == {"head.weight", "seen"}
    assert truth.state["seen"].item() == 4
    assert truth.replay_residual == 1e-7
    pool = vault.pool()
    assert pool.images.shape == (5, 1, 8, 8)
    assert pool.dataset_index.tolist() == [0, 1, 2, 3, 4]
    assert pool.mean.shape == (1, 8, 8)


@pytest.mark.parametrize("facts", [{}, {"replay_residual": None}, {"replay_residual": float("nan")}])
def test_a_residual_that_was_not_measured_is_none(vault, facts):
    VaultWriter(vault.folder).victim("other", torch.zeros(1, 1, 2, 2), torch.tensor([0]), torch.tensor([0]), {}, facts)
    assert vault.truth("other").replay_residual is None
    assert vault.truth("other").state == {}


@pytest.mark.parametrize("file", [f"{CAPTURE}.safetensors", f"{CAPTURE}.json"])
def test_a_missing_truth_is_named(vault, file):
    (vault.folder / file).unlink()
    with pytest.raises(RunError, match=f"missing: .*{file}"):
        vault.truth(CAPTURE)


def test_a_missing_pool_is_named(vault):
    (vault.folder / "pool.safetensors").unlink()
    with pytest.raises(RunError, match=r"pool .* missing: .*pool\.safetensors"):
        vault.pool()


@pytest.mark.parametrize("file", [f"{CAPTURE}.safetensors", f"{CAPTURE}.json", "pool.safetensors"])
def test_truncated_files_are_named(vault, file):
    path = vault.folder / file
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(RunError, match=f"damaged.*{file}|{file}.*damaged"):
        vault.pool() if file.startswith("pool") else vault.truth(CAPTURE)


@pytest.mark.parametrize(
    ("items", "why"),
    [
        ({"x": None}, "no item 'x'"),
        ({"y": None}, "no item 'y'"),
        ({"dataset_index": None}, "no item 'dataset_index'"),
        ({"x": torch.zeros(2, 8, 8)}, r"\[B, C, H, W\]"),
        ({"x": torch.zeros(2, 1, 8, 8, dtype=torch.int64)}, "floating point"),
        ({"x": torch.zeros(0, 1, 8, 8)}, "not empty"),
        ({"x": torch.full((2, 1, 8, 8), torch.nan)}, "NaN"),
        ({"y": torch.tensor([3])}, r"int64 \[2\]"),
        ({"y": torch.tensor([3.0, 7.0])}, r"int64 \[2\]"),
        ({"dataset_index": torch.tensor([[10, 11]])}, r"int64 \[2\]"),
    ],
)
def test_a_truth_of_another_form_is_damaged(vault, items, why):
    change(vault, f"{CAPTURE}.safetensors", **items)
    with pytest.raises(RunError, match=f"damaged: .*{CAPTURE}.safetensors.*{why}"):
        vault.truth(CAPTURE)


@pytest.mark.parametrize(
    ("items", "why"),
    [
        ({"images": None}, "no item 'images'"),
        ({"mean": None}, "no item 'mean'"),
        ({"images": torch.zeros(5, 64)}, r"\[P, C, H, W\]"),
        ({"images": torch.full((5, 1, 8, 8), 255.0)}, r"pixels lie in \[0, 1\]"),
        ({"images": torch.full((5, 1, 8, 8), -0.4)}, r"pixels lie in \[0, 1\]"),
        ({"mean": torch.full((3, 8, 8), 0.5)}, "the mean image is"),
        ({"mean": torch.full((1, 8, 8), torch.inf)}, "infinity"),
        ({"dataset_index": torch.arange(4)}, r"int64 \[5\]"),
    ],
)
def test_a_pool_of_another_form_is_damaged(vault, items, why):
    change(vault, "pool.safetensors", **items)
    with pytest.raises(RunError, match=f"damaged: .*pool.safetensors.*{why}"):
        vault.pool()


def test_rounding_beyond_the_range_is_taken_off(vault):
    change(vault, "pool.safetensors", images=torch.full((5, 1, 8, 8), 1 + 1e-6))
    assert vault.pool().images.max() == 1.0


@pytest.mark.parametrize("content", [[1], 3.0, {"replay_residual": "small"}, {"replay_residual": True}])
def test_facts_of_another_form_are_damaged(vault, content):
    (vault.folder / f"{CAPTURE}.json").write_text(json.dumps(content))
    with pytest.raises(RunError, match="replay_residual must be"):
        vault.truth(CAPTURE)


def test_a_capture_id_cannot_leave_the_folder(vault):
    with pytest.raises(ConfigError, match="capture id"):
        vault.truth("../" + CAPTURE)
