"""Defended runs on disk: what is captured, and attacks that know of the defense or do not."""

from pathlib import Path
from typing import Any

import pytest

import pflsec
from pflsec import api
from pflsec.core.errors import RunError
from pflsec.core.files import read_json
from pflsec.core.items import norm, subtract
from pflsec.reports import figures
from pflsec.wire.store import CaptureStore
from tests import toys

QUICK: dict[str, Any] = {
    "iterations": 2, "restarts": 1, "settings": {"rescue": 0}, "controls": False, "lpips": "none",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _no_galleries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "write_gallery", lambda path, attack: None)


def trained(folder: Path, *defense: str, **options: Any) -> api.Run:
    common: dict[str, Any] = {
        "algo": "fedavg", "model": "mlp", "partition": "natural", "test": "given", "rounds": 1, "batch_size": 4,
        "capture_clients": "0", "victims": 1, "defense": list(defense),
    }  # fmt: skip
    return api.train(dataset=toys.dataset(), runs_dir=folder, **(common | options))


def test_an_attack_adapts_unless_it_is_naive_and_says_so(tmp_path: Path):
    run = trained(tmp_path, "prune:keep=0.3", capture_rounds="first")
    for naive in (False, True):
        scores = api.attack(run, "dlg", **QUICK, naive=naive)
        assert isinstance(scores, api.Scores)
        assert read_json(scores.path / "attack.json", "attack")["naive"] is naive
        assert list(scores.table["reason"].fillna("").str.contains("naive")) == [naive]
        assert list(scores.table["defense"]) == ["prune:keep=0.3"]
    assert len(list((run.path / "attacks").iterdir())) == 2


def test_without_a_defense_nobody_is_naive(tmp_path: Path):
    scores = api.attack(trained(tmp_path, capture_rounds="first"), "dlg", **QUICK, naive=True)
    assert isinstance(scores, api.Scores)
    assert read_json(scores.path / "attack.json", "attack")["naive"] is False
    assert not scores.table["reason"].fillna("").str.contains("naive").any()


def test_captures_hold_what_left_the_device_and_the_record_says_what_did_undefended(tmp_path: Path):
    run = trained(tmp_path, "clip:bound=0.01", capture_rounds="first", kind="both")
    store = CaptureStore(run.path / "captures")
    assert {store.header(name)["kind"] for name in store.ids()} == {"probe", "update"}
    for name in store.ids():
        record = store.read(name)
        change = subtract({k: record.up[k] for k in record.down}, record.down)
        assert float(norm(change)) == pytest.approx(0.01, rel=1e-3)
    assert run.manifest["undefended"] == ["num_samples"]


def test_under_secure_aggregation_no_upload_is_captured(tmp_path: Path):
    run = trained(tmp_path, "secagg")
    assert run.manifest["captures"]["rounds"] == []
    assert not CaptureStore(run.path / "captures").ids()
    assert run.manifest["state"] == "done"
    with pytest.raises(RunError, match=r"under secagg the server sees sums .*--adversary server-secagg") as refused:
        pflsec.attack(run, "dlg")
    assert "--capture-rounds" not in str(refused.value)


def test_the_user_level_epsilon_stands_in_the_metrics_and_in_the_record(tmp_path: Path):
    run = trained(tmp_path, "dp-fedavg:noise_multiplier=1", capture_rounds="none", rounds=2)
    assert run.manifest["dp"]["unit"] == "user"
    assert list(run.metrics["epsilon_unit"]) == ["user", "user"]
    assert run.metrics["epsilon"].is_monotonic_increasing
    assert run.clients["epsilon"].notna().all()
