"""Captures that cannot speak are not attacked and say why; with every attack its controls are attacked too."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pflsec import api
from pflsec.attacks.problem import Problem
from pflsec.core.errors import Inconclusive
from pflsec.leakage.controls import verdict
from pflsec.leakage.results import COLUMNS
from pflsec.runtime import attacking
from pflsec.runtime.controls import Control, plain_exchange, shuffled
from pflsec.runtime.replay import capture, conclusive, rounding
from tests import toys
from tests.attacks.victims import Victim, attack, victim

SMALL: dict[str, Any] = {"lpips": "none", "executor": "serial", "clients": [1]}


def attacked(run: api.Run, name: str = "ig", **options: Any) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """Return attack.json and the rows of controls.csv."""
    scores = api.attack(run, name, **(SMALL | options))
    assert isinstance(scores, api.Scores)
    with (scores.path / "controls.csv").open(encoding="utf8", newline="") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
        assert reader.fieldnames == ["control", *COLUMNS]
    return json.loads((scores.path / "attack.json").read_text(encoding="utf8")), rows


def scores_of(run: api.Run) -> list[dict[str, str]]:
    (folder,) = run.path.joinpath("attacks").iterdir()
    with (folder / "scores.csv").open(encoding="utf8", newline="") as file:
        return list(csv.DictReader(file))


def resolved(v: Victim) -> float:
    return rounding(v.setup.algorithm, v.setup.net, v.record, history=True)


# --- captures that cannot speak


def test_rounding_is_small_at_a_usual_learning_rate_and_everything_at_a_tiny_one():
    """Relative rounding of a difference of float32 weights grows as 1 / lr."""
    v = victim()
    assert resolved(v) < 1e-5
    conclusive(resolved(v), v.record.lr)
    weights = {k: u - v.record.down[k] for k, u in v.record.up.items() if k != "num_samples"}
    for scale in (1e-2, 1e-4):
        up = v.record.up | {k: v.record.down[k] + scale * d for k, d in weights.items()}
        weaker = replace(v, record=replace(v.record, up=up, lr=v.record.lr * scale))
        assert resolved(weaker) == pytest.approx(resolved(v) / scale, rel=0.2)
    with pytest.raises(Inconclusive, match="rounding is 3 times all"):
        conclusive(3.0, 1e-9)


def test_an_upload_without_any_change_has_no_gradient_left():
    v = victim()
    still = v.with_upload(v.record.up | v.record.down)
    assert resolved(still) == float("inf")
    with pytest.raises(Inconclusive, match="the gradient has vanished"):
        conclusive(resolved(still), v.record.lr)


def test_deltas_have_the_resolution_of_the_weights_they_are_differences_of():
    """SCAFFOLD sends the change of the weights: a float32 difference is exact, the weights behind it were rounded."""
    v = victim("scaffold")
    tiny = {k: u * 1e-9 if k.startswith("delta.") else torch.zeros_like(u) for k, u in v.record.up.items()}
    assert resolved(v) < 1e-4
    assert resolved(v.with_upload(tiny)) > 1


def test_too_many_steps_are_inconclusive():
    v = victim()
    cap = replace(v.capture(), record=replace(v.record, epochs=51))
    with pytest.raises(Inconclusive, match="the sum of 51 local steps"):
        Problem(cap, "restore", "auto", torch.Generator().manual_seed(0), torch.float64)


def test_a_capture_that_its_replay_misses_is_not_attacked(run: api.Run, monkeypatch: pytest.MonkeyPatch):
    for facts in run.path.joinpath("vault").glob("*.json"):
        facts.write_text(json.dumps(json.loads(facts.read_text()) | {"replay_residual": 0.5}))
    tried: list[str] = []
    monkeypatch.setattr(attacking, "reconstruct", lambda *given: tried.append("search"))
    meta, rows = attacked(run)
    assert rows == tried == []
    for row in scores_of(run):
        assert (row["attack_valid"], row["status"], row["psnr_capped"]) == ("false", "not-applicable", "")
        assert "misses what was sent by 0.5" in row["reason"]
    assert meta["controls"]["positive"] == {"verdict": "not run", "reason": "no victim could be attacked"}


def test_a_run_at_a_learning_rate_that_weights_do_not_resolve_says_so(tmp_path: Path):
    made = api.train(
        algo="fedavg", dataset=toys.dataset(), partition="natural", test="given", model="mlp", rounds=1, lr=1e-12,
        capture_clients="1", victims=1, runs_dir=tmp_path,
    )  # fmt: skip
    attacked(made)
    (row,) = scores_of(made)
    assert (row["attack_valid"], row["status"]) == ("false", "not-applicable")
    assert "the gradient has vanished" in row["reason"]


# --- controls


def test_an_attack_that_works_passes_both_controls(run: api.Run):
    meta, rows = attacked(run, "idlg", iterations=20, restarts=2, settings={"rescue": 0})
    assert [row["control"] for row in rows] == ["positive", "negative"]
    assert {name: one["verdict"] for name, one in meta["controls"].items()} == dict.fromkeys(
        ("positive", "negative"), "passed"
    )
    assert float(rows[0]["excess_psnr"]) > 10
    assert float(rows[1]["excess_psnr"]) <= 1
    assert (rows[0]["algo"], rows[0]["steps"], rows[0]["labels"], rows[0]["hidden"]) == (
        "fedavg",
        "1",
        "restore",
        "none",
    )
    assert rows[0]["dataset_index"] == rows[1]["dataset_index"] == scores_of(run)[0]["dataset_index"]


def test_an_attack_that_is_too_short_fails_the_positive_control(run: api.Run):
    meta, _ = attacked(run, iterations=1)
    assert meta["controls"]["positive"]["verdict"] == "failed"
    assert meta["controls"]["negative"]["verdict"] == "passed"


def test_controls_change_no_victims_result_and_can_be_switched_off(run: api.Run):
    attacked(run, iterations=3)
    before = [{k: v for k, v in row.items() if k != "seconds"} for row in scores_of(run)]
    meta, rows = attacked(run, iterations=3, controls=False)
    assert [{k: v for k, v in row.items() if k != "seconds"} for row in scores_of(run)] == before
    assert rows == []
    assert meta["controls"]["negative"] == {"verdict": "not run", "reason": "switched off with --no-controls"}


def test_without_the_vault_there_are_no_controls(run: api.Run):
    for file in run.path.joinpath("vault").iterdir():
        file.unlink()
    run.path.joinpath("vault").rmdir()
    meta, rows = attacked(run, iterations=1)
    assert rows == []
    assert meta["controls"]["positive"]["reason"] == "the run has no vault"


def test_the_positive_control_is_one_plain_step_whose_replay_is_exact():
    v = victim("fedrep", batch=2, steps=3)
    algorithm, record = plain_exchange(v.setup.net, v.record, v.x, v.y)
    assert (algorithm.key, record.steps, record.batch) == ("fedavg", 1, 2)
    assert set(v.setup.net.shapes) <= record.up.keys()
    cap = capture(algorithm, v.setup.net, record, history=True, seed=0)
    again = cap.replay(v.x.double(), v.y, {})
    assert toys.distance({k: again[k] for k in cap.target}, cap.target) < 1e-5
    assert attack("idlg", cap, iterations=1, restarts=1, rescue=0).hidden == "none"


def test_the_negative_control_has_the_numbers_of_the_change_in_another_order():
    v = victim("fedrep")
    assert Control("negative").instead(v.setup.algorithm, v.setup.net, v.record)[0] is v.setup.algorithm
    mixed = shuffled(v.record)
    for name, sent in v.record.up.items():
        if not sent.is_floating_point():
            assert torch.equal(mixed.up[name], sent)
            continue
        ours, theirs = (up[name] - v.record.down[name] for up in (v.record.up, mixed.up))
        assert torch.allclose(ours.flatten().sort().values, theirs.flatten().sort().values, atol=1e-6)
        assert not torch.allclose(ours, theirs, atol=1e-6)
    assert toys.same(shuffled(v.record).up, mixed.up)


@pytest.mark.parametrize(
    ("control", "row", "found"),
    [
        ("positive", {"status": "budget", "excess_psnr": 10.0}, "passed"),
        ("positive", {"status": "budget", "excess_psnr": 9.9, "label_correct": 1.0}, "failed"),
        ("positive", {"status": "budget", "label_correct": 0.9}, "passed"),
        ("positive", {"status": "budget", "label_correct": 0.5}, "failed"),
        ("positive", {"status": "budget"}, "not judged"),
        ("positive", {"status": "not-applicable", "reason": "no bias"}, "not applicable"),
        ("negative", {"status": "budget", "excess_psnr": 1.0}, "passed"),
        ("negative", {"status": "budget", "excess_psnr": 1.1}, "failed"),
        ("negative", {"status": "budget", "label_correct": 1.0}, "not judged"),
        ("negative", {"status": "not-applicable", "reason": "no bias"}, "passed"),
    ],
)
def test_verdicts_by_hand(control: str, row: dict[str, Any], found: str):
    assert verdict(control, row)["verdict"] == found
