"""`pflsec attack --before A --after B`: an update that comes from elsewhere."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from pflsec.models.mlp import mlp
from pflsec.reports import figures
from tests import toys
from tests.cli.conftest import Cli, tree

COMMON = ("attack", "idlg", "--before", "a.safetensors", "--after", "b.safetensors", "--model", "mlp", "--lr", "0.1")
SIZES = ("--shape", "1,4,4", "--classes", "3", "--out", "out")
QUICK = ("--iterations", "3", "--restarts", "1", "--set", "rescue=0", "--lpips", "none")


@pytest.fixture(autouse=True)
def _update(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two files of weights in the current folder: one step of torch's SGD on one image; and the image."""
    monkeypatch.setattr(figures, "write_sheet", lambda *arguments: None)
    data = toys.dataset()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = mlp(toys.SHAPE, toys.CLASSES)
    save_file(model.state_dict(), tmp_path / "a.safetensors")
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    nn.functional.cross_entropy(model(data.pixels([0])), torch.from_numpy(data.labels[:1])).backward()
    sgd.step()
    save_file(model.state_dict(), tmp_path / "b.safetensors")
    np.savez(tmp_path / "truth.npz", images=data.images[:1], labels=data.labels[:1])


def test_an_update_is_attacked_and_scored(cli: Cli):
    words = (
        "--iterations",
        "20",
        "--restarts",
        "3",
        "--set",
        "rescue=0",
        "--lpips",
        "none",
        "--truth",
        "truth.npz",
        "--json",
    )
    result = cli.succeed(*COMMON, *SIZES, *words)
    found = json.loads(result.out)
    assert found["scores"]["psnr"] is None or found["scores"]["psnr"] >= 40  # null: infinite
    assert found["labels"] == toys.dataset().labels[:1].tolist()
    assert found["doubts"] == []
    assert "warning" not in result.err


def test_without_truth_there_is_a_table_and_no_scores(cli: Cli, tmp_path: Path):
    result = cli.succeed(*COMMON, *SIZES, *QUICK)
    assert "idlg" in result.out
    assert "see --truth" in result.err
    assert set(tree(tmp_path / "out")) == {"attack.json", "reconstructions.safetensors"}


def test_a_dry_run_checks_and_writes_nothing(cli: Cli, tmp_path: Path):
    before = tree(tmp_path)
    words = [word if word != "0.1" else "0.3" for word in COMMON]
    result = cli.succeed(*words, *SIZES, *QUICK, "--dry-run", "--json")
    assert "warning: the last layer's gradient fits a learning rate of 0.1, not 0.3." in result.err
    assert len(json.loads(result.out)["doubts"]) == 1
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (COMMON, "needs --shape, --classes, --out as well"),
        (("attack", "ig", "--steps", "2"), "--steps describe an update from elsewhere, which needs --before"),
        ((*COMMON, *SIZES, "--rounds", "0"), "without --rounds"),
        ((*COMMON, *SIZES, "--kind", "update"), "without --kind"),
        ((*COMMON[:2], "my-run", *COMMON[2:], *SIZES), "without a run"),
        ((*COMMON[:-1], "0", *SIZES), "lr is 0"),
        ((*COMMON[:-1], "1e-5", *SIZES), "Give a larger learning rate"),
        ((*COMMON, *SIZES, "--mean", "x"), "--mean is 'x'"),
        ((*COMMON, *SIZES, "--known-labels", "a"), "--known-labels has 'a'"),
        ((*COMMON, *SIZES, "--labels", "known"), "--knowledge wire+labels"),
        ((*COMMON, *SIZES, "--before", "none.safetensors"), "does not exist"),
    ],
    ids=lambda v: " ".join(v[-3:]) if isinstance(v, tuple) else "",
)
def test_a_mistake_is_one_line_and_nothing_is_written(cli: Cli, tmp_path: Path, words: tuple[str, ...], says: str):
    before = tree(tmp_path)
    assert says in cli.mistake(*words)
    assert tree(tmp_path) == before
