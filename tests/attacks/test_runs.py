"""Attacks on a run's folder: what they read, what they write, and that nothing else makes a difference."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pflsec import api
from pflsec.config.attack import AttackConfig
from pflsec.core.config import build
from pflsec.core.errors import KnowledgeError, PflsecError, RunError
from pflsec.core.tensors import read_items, write_items
from pflsec.leakage import vault
from pflsec.leakage.results import COLUMNS, REPLAY_TOLERANCE, validity
from pflsec.runtime import attacking, replay
from pflsec.runtime.folder import RunFolder
from pflsec.runtime.setup import rebuild
from pflsec.wire.store import CaptureStore
from tests import toys

SMALL: dict[str, Any] = {"iterations": 25, "lpips": "none", "controls": False}
CAPTURES = ["r001-c01-v0-probe", "r001-c01-v1-probe", "r001-c03-v0-probe", "r001-c03-v1-probe"]


def attacked(run: api.Run, name: str = "ig", **options: Any) -> api.Scores:
    scores = api.attack(run, name, **(SMALL | options))
    assert isinstance(scores, api.Scores)
    return scores


def pictures(scores: api.Scores) -> dict[str, Tensor]:
    return read_items(scores.path / "reconstructions.safetensors", "reconstructions")


def rows(scores: api.Scores) -> list[dict[str, str]]:
    with (scores.path / "scores.csv").open(encoding="utf8", newline="") as file:
        return list(csv.DictReader(file))


def without(row: dict[str, str], *names: str) -> dict[str, str]:
    return {k: v for k, v in row.items() if k not in names}


# --- a victim's result depends on the victim alone


def test_a_victims_result_does_not_depend_on_the_others(run: api.Run):
    everything = attacked(run)
    for client in (1, 3):
        some = attacked(run, clients=[client])
        assert some.path != everything.path
        for capture, picture in pictures(some).items():
            assert torch.equal(picture, pictures(everything)[capture])
        mine = [without(row, "seconds") for row in rows(everything) if row["client"] == str(client)]
        assert [without(row, "seconds") for row in rows(some)] == mine


def test_attacking_in_another_order_changes_the_order_alone(run: api.Run):
    config = build(AttackConfig, SMALL | {"executor": "serial"}, "attack")
    targets = [attacking.Target(run.path, c, "inverting-gradients", config, None, None) for c in CAPTURES]
    forth = {a.capture: a.result for a in attacking.attempts(targets, "serial", None)}
    back = {a.capture: a.result for a in attacking.attempts(targets[::-1], "serial", None)}
    assert list(back) == list(forth)[::-1]
    for capture, found in forth.items():
        other = back[capture]
        assert found is not None
        assert other is not None
        assert found.x is not None
        assert other.x is not None
        assert torch.equal(found.x, other.x)


def test_processes_give_the_bits_of_one_process(run: api.Run):
    serial = attacked(run, executor="serial")
    before, table = pictures(serial), rows(serial)
    processes = attacked(run, executor="processes", workers=2)
    assert processes.path == serial.path
    assert toys.same(pictures(processes), before)
    assert [without(r, "seconds") for r in rows(processes)] == [without(r, "seconds") for r in table]


def test_another_seed_of_the_attacker_gives_other_pictures(run: api.Run):
    first, second = attacked(run), attacked(run, seed=1)
    assert first.path != second.path
    assert not any(torch.equal(a, pictures(second)[c]) for c, a in pictures(first).items())


# --- the vault


def test_without_the_vault_the_pictures_have_the_same_bits_and_nothing_is_scored(run: api.Run):
    before = pictures(attacked(run))
    for file in run.path.joinpath("vault").iterdir():
        file.unlink()
    run.path.joinpath("vault").rmdir()
    blind = attacked(run)
    assert toys.same(pictures(blind), before)
    for row in rows(blind):
        assert row["reason"] == "not scored: the run has no vault"
        scored = (
            "mse",
            "psnr",
            "ssim",
            "lpips",
            "label_true",
            "label_correct",
            "identified",
            "psnr_blind",
            "attack_valid",
        )
        assert {name: row[name] for name in scored} == dict.fromkeys(scored, "")
        assert float(row["objective"]) < 1
        assert row["status"] in ("budget", "converged")


def test_the_attacking_side_never_opens_the_vault(run: api.Run, monkeypatch: pytest.MonkeyPatch):
    def refuse(*arguments: Any) -> Any:
        raise AssertionError("the vault was opened")

    for name in ("__init__", "truth", "pool"):
        monkeypatch.setattr(vault.Vault, name, refuse)
    real_open: Callable[..., Any] = Path.open

    def watched(path: Path, *arguments: Any, **more: Any) -> Any:
        assert "vault" not in path.parts
        return real_open(path, *arguments, **more)

    monkeypatch.setattr(Path, "open", watched)
    for name in ("dlg", "idlg", "inverting-gradients"):
        settings = {} if name == "inverting-gradients" else {"rescue": 0}
        config = build(AttackConfig, {"iterations": 1, "restarts": 1, "settings": settings}, "attack")
        folder = RunFolder(run.path)
        attacking.check(folder, CAPTURES)
        targets = [attacking.Target(run.path, c, name, config, None, None) for c in attacking.selected(folder, config)]
        assert all(found.result is not None for found in attacking.attempts(targets, "serial", None))


def test_no_truth_is_looked_up_for_an_adversary_that_has_the_wire_alone(run: api.Run):
    session = api.AttackSession(RunFolder(run.path), build(AttackConfig, SMALL, "attack"))
    assert all((t.labels, t.state) == (None, None) for t in session.granting.targets("dlg"))
    granted = api.AttackSession(
        RunFolder(run.path), build(AttackConfig, SMALL | {"knowledge": "wire+labels"}, "attack")
    )
    for target in granted.granting.targets("dlg"):
        assert target.labels is not None
        assert target.state is None


def test_the_truth_is_asked_for_before_work_begins_where_the_oracle_needs_it(run: api.Run):
    run.path.joinpath("vault", f"{CAPTURES[2]}.safetensors").unlink()
    with pytest.raises(RunError, match=f"truth of capture {CAPTURES[2]} is missing"):
        attacked(run, knowledge="oracle")
    with pytest.raises(RunError, match=f"truth of capture {CAPTURES[2]} is missing"):
        attacked(run)
    assert list(run.path.joinpath("attacks").iterdir()) == []


# --- knowledge


def test_a_refusal_comes_before_anything_runs(run: api.Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attacking, "attempt", None)
    for options in ({"labels": "known"}, {"hidden": "oracle"}, {"adversary": "eavesdropper"}):
        with pytest.raises(KnowledgeError):
            attacked(run, "dlg,idlg,ig", **options)
    with pytest.raises(PflsecError, match="tv is -1"):
        attacked(run, "ig", settings={"tv": -1})
    assert list(run.path.joinpath("attacks").iterdir()) == []


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ("server", "wire", "restore", "none")),
        ({"knowledge": "oracle"}, ("server", "oracle", "known", "none")),
        ({"knowledge": "wire+labels"}, ("server", "wire+labels", "known", "none")),
        (
            {"adversary": "eavesdropper", "knowledge": "wire+hyper", "labels": "optimise"},
            ("eavesdropper", "wire+hyper", "optimise", "none"),
        ),
    ],
)
def test_rows_say_what_was_known_and_what_was_used(run: api.Run, options: dict[str, Any], expected: tuple[str, ...]):
    for row in rows(attacked(run, iterations=1, rounds=[1], clients=[1], **options)):
        assert tuple(row[name] for name in ("adversary", "knowledge", "labels", "hidden")) == expected


# --- what is written


def test_scores_have_the_columns_of_the_contract_in_order(run: api.Run):
    text = (attacked(run).path / "scores.csv").read_text(encoding="utf8")
    assert text.splitlines()[0].split(",") == list(COLUMNS)


def test_rows_describe_their_captures(run: api.Run):
    found = rows(attacked(run))
    places = [f"r00{r['round']}-c0{r['client']}-v{r['victim']}-{r['kind']}" for r in found]
    assert places == CAPTURES
    for row in found:
        assert (row["run"], row["algo"], row["family"], row["defense"]) == ("toy", "fedavg", "traditional", "none")
        assert (row["kind"], row["batch"], row["steps"], row["restarts"]) == ("probe", "1", "1", "1")
        assert (row["iterations"], row["status"], row["attack_valid"], row["reason"]) == ("25", "budget", "true", "")
        assert float(row["excess_psnr"]) == pytest.approx(
            float(row["psnr_capped"]) - float(row["psnr_blind"]), abs=1e-3
        )
        assert row["lpips"] == ""
        assert row["lpips_status"] == "off"


def test_an_attacks_configuration_is_written_in_full(run: api.Run):
    scores = attacked(run, "dlg", iterations=1, restarts=2, settings={"rescue": 0}, knowledge="wire+labels")
    meta = json.loads((scores.path / "attack.json").read_text(encoding="utf8"))
    assert meta["schema"] == 1
    assert meta["id"] == scores.path.name
    assert (meta["attack"], meta["state"], meta["seed"]) == ("dlg", "done", 0)
    assert meta["config"]["restarts"] == 2
    assert meta["config"]["rescue"] == 0
    assert meta["config"]["labels"] == "known"
    assert meta["config"]["lr"] == 1.0
    assert meta["threat_model"]["knowledge"] == "wire+labels"
    assert "labels" in meta["threat_model"]["knows"]
    assert meta["captures"] == CAPTURES == list(meta["victims"])
    assert all(set(v) == {"failures", "trace"} for v in meta["victims"].values())


def test_pictures_lie_among_valid_pixels_and_close_to_the_truth_where_the_row_says_so(run: api.Run):
    scores = attacked(run, "idlg", iterations=20, restarts=3, settings={"rescue": 0})
    for row, (capture, picture) in zip(rows(scores), sorted(pictures(scores).items()), strict=True):
        assert float(picture.min()) >= 0
        assert float(picture.max()) <= 1
        spec = api.AttackSession(RunFolder(run.path), build(AttackConfig, SMALL, "attack")).opened.spec
        true = spec.pixels(vault.Vault(run.path / "vault").truth(capture).x)
        mse = float((true.double() - picture.double()).square().mean())
        assert mse == pytest.approx(float(row["mse"]), rel=1e-2, abs=1e-9)
        assert float(row["psnr"]) >= 40


def test_the_same_attack_again_lies_in_the_same_place_and_another_one_beside_it(run: api.Run):
    first, again, other = attacked(run), attacked(run), attacked(run, iterations=26)
    assert first.path == again.path != other.path
    assert toys.same(pictures(first), pictures(again))


@pytest.mark.parametrize("key", ["scaffold", "fedamp"])
def test_the_log_of_a_real_run_gives_the_state_that_lies_in_the_vault(key: str, tmp_path: Path):
    made = api.train(
        algo=key, dataset=toys.dataset(), partition="natural", test="given", model="mlp", rounds=3, capture_rounds="2",
        capture_clients="3", victims=1, runs_dir=tmp_path,
    )  # fmt: skip
    record = CaptureStore(made.path / "captures").read("r002-c03-v0-probe")
    config, spec = attacking.training_config(RunFolder(made.path))
    net, algorithm = rebuild(config, spec)
    known = replay.capture(algorithm, net, record, history=True, seed=0).known
    assert known is not None
    assert toys.same(known, vault.Vault(made.path / "vault").truth(record.id).state)


# --- is the capture what the client's code makes of the truth?


def test_three_local_epochs_are_replayed_in_the_order_of_their_batches(tmp_path: Path):
    made = api.train(
        dataset=toys.dataset(), partition="natural", test="given", model="mlp", rounds=1, local_epochs=3, batch_size=4,
        lr=0.1, kind="update", capture_rounds="0", capture_clients="3", runs_dir=tmp_path,
    )  # fmt: skip
    record = CaptureStore(made.path / "captures").read("r000-c03-v0-update")
    assert (record.epochs, record.steps) == (3, 6)
    residual = vault.Vault(made.path / "vault").truth(record.id).replay_residual
    assert residual is not None
    assert residual < 1e-6


@pytest.mark.parametrize("off", [0.0, 1e-7, REPLAY_TOLERANCE])
def test_a_replay_that_meets_what_was_sent_makes_an_attack_valid(off: float):
    assert validity(off) == (True, "")


@pytest.mark.parametrize("off", [1.1 * REPLAY_TOLERANCE, 1e-2, float("inf"), float("nan")])
def test_a_replay_that_misses_what_was_sent_makes_an_attack_invalid(off: float):
    valid, why = validity(off)
    assert valid is False
    assert "replay of the true batch misses what was sent" in why


def test_a_replay_that_was_not_measured_is_unknown_and_says_so():
    assert validity(None) == (None, "the replay of the true batch was not measured")


@pytest.mark.parametrize(
    ("measured", "valid", "why"),
    [(2e-2, "false", "misses what was sent by 0.02"), (None, "", "was not measured"), (1e-9, "true", "")],
)
def test_rows_carry_what_was_measured(run: api.Run, measured: float | None, valid: str, why: str):
    facts = run.path / "vault" / f"{CAPTURES[0]}.json"
    facts.write_text(json.dumps({**json.loads(facts.read_text()), "replay_residual": measured}))
    first, *others = rows(attacked(run, iterations=1))
    assert first["attack_valid"] == valid
    assert why in first["reason"]
    assert {row["attack_valid"] for row in others} == {"true"}


def test_an_upload_that_was_changed_on_disk_is_damaged(run: api.Run):
    header = json.loads((run.path / "captures" / f"{CAPTURES[0]}.json").read_text())
    blob = run.path / "captures" / "blobs" / f"{header['messages']['up']}.safetensors"
    items = read_items(blob, "upload")
    items["head.bias"][0] += 1e-2
    write_items(blob, items)
    with pytest.raises(RunError, match="does not have the content that was written"):
        attacked(run)
    assert list(run.path.joinpath("attacks").iterdir()) == []


# --- endings


def interrupted(after: int, error: BaseException):
    """Return a report on victims that raises once so many are finished."""

    def on_victim(name: str, done: int, total: int, row: Any) -> None:
        if done == after:
            raise error

    return on_victim


@pytest.mark.parametrize(("error", "state"), [(KeyboardInterrupt(), "interrupted"), (ValueError("x"), "failed")])
def test_what_is_finished_is_kept_when_an_attack_stops(run: api.Run, error: BaseException, state: str):
    with pytest.raises(type(error)):
        attacked(run, on_victim=interrupted(2, error))
    (folder,) = run.path.joinpath("attacks").iterdir()
    assert json.loads((folder / "attack.json").read_text())["state"] == state
    assert len(rows(api.Scores(folder))) == 2
    assert sorted(pictures(api.Scores(folder))) == CAPTURES[:2]


def test_an_attack_that_stops_before_its_first_victim_leaves_nothing(run: api.Run):
    with pytest.raises(RunError):
        attacked(run, rounds=[0])
    assert list(run.path.joinpath("attacks").iterdir()) == []


def test_a_stopped_attack_never_replaces_more_than_it_has(run: api.Run):
    stop = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        attacked(run, on_victim=interrupted(2, stop))
    (folder,) = run.path.joinpath("attacks").iterdir()
    for after, kept in ((1, 2), (3, 3)):
        with pytest.raises(KeyboardInterrupt):
            attacked(run, on_victim=interrupted(after, stop))
        assert len(rows(api.Scores(folder))) == kept
    whole = attacked(run)
    assert whole.path == folder
    with pytest.raises(KeyboardInterrupt):
        attacked(run, on_victim=interrupted(3, stop))
    assert len(rows(whole)) == 4
    assert json.loads((folder / "attack.json").read_text())["state"] == "done"


def test_a_failed_search_is_a_row_that_says_so(run: api.Run, monkeypatch: pytest.MonkeyPatch):
    real = attacking.attempt

    def broken(target: attacking.Target) -> attacking.Attempt:
        found = real(target)
        assert found.result is not None
        if target.capture == CAPTURES[0]:
            assert found.result.x is not None
            found.result.x[:] = float("nan")
        return found

    monkeypatch.setattr(attacking, "attempt", broken)
    first, *others = rows(attacked(run))
    assert first["status"] == "nonfinite"
    assert float(first["psnr_capped"]) < float(first["psnr_blind"]) + 1
    assert first["identified"] == "0"
    assert {row["status"] for row in others} == {"budget"}
