"""A small run to attack, trained once; no galleries of what attacks find."""

import shutil
from pathlib import Path

import pytest

from pflsec import api
from pflsec.reports import figures
from tests import toys


@pytest.fixture(autouse=True)
def _no_galleries(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take longer than all the rest; the tests of reports draw some."""
    monkeypatch.setattr(figures, "write_gallery", lambda path, attack: None)


@pytest.fixture(scope="session")
def _trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = api.train(
        dataset=toys.dataset(), partition="natural", test="given", model="mlp", rounds=2, lr=0.1, batch_size=4,
        capture_rounds="last", capture_clients="1,3", victims=2, name="toy", runs_dir=tmp_path_factory.mktemp("runs"),
    )  # fmt: skip
    return run.path


@pytest.fixture
def run(_trained: Path, tmp_path: Path) -> api.Run:
    """A run of FedAvg on the toy data with four captures, which the test may damage."""
    return api.Run(shutil.copytree(_trained, tmp_path / "toy"))
