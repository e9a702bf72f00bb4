"""`all`: each attack takes the options that it has, and none keeps another from its work."""

import csv
import json
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from pflsec import api
from pflsec.cli.app import main
from pflsec.config.attack import AttackConfig, make_attacks
from pflsec.core import registry
from pflsec.core.config import build
from pflsec.core.errors import ConfigError, KnowledgeError, PflsecError

OURS = {
    "broken": "tests.attacks.others:Broken",
    "flat": "tests.attacks.others:Flat",
    "idle": "tests.attacks.others:Idle",
    "ig": "pflsec.attacks.optimisation.inverting_gradients:InvertingGradients",
}
QUICK: dict[str, Any] = {"iterations": 2, "lpips": "none", "clients": [1]}


@pytest.fixture(autouse=True)
def _these(monkeypatch: pytest.MonkeyPatch) -> Any:
    real = registry._entries
    entries = {name: EntryPoint(name, value, "pflsec.attacks") for name, value in OURS.items()}
    monkeypatch.setattr(registry, "_entries", lambda group: entries if group == "attacks" else real(group))
    registry.registered_card.cache_clear()
    yield
    registry.registered_card.cache_clear()


def without_the_broken_one(monkeypatch: pytest.MonkeyPatch) -> None:
    real = registry._entries
    monkeypatch.setattr(registry, "_entries", lambda group: {k: v for k, v in real(group).items() if k != "broken"})


def rows(scores: api.Scores) -> list[dict[str, str]]:
    with (scores.path / "scores.csv").open(encoding="utf8", newline="") as file:
        return list(csv.DictReader(file))


def by_attack(run: api.Run) -> Mapping[str, list[dict[str, str]]]:
    return {f.name.rpartition("-")[0]: rows(api.Scores(f)) for f in run.path.joinpath("attacks").iterdir()}


def made(text: str, **options: Any) -> dict[str, dict[str, Any]]:
    ready = make_attacks(text, build(AttackConfig, options, "attack"))
    return {one.name: one.attack.cfg.model_dump() for one in ready}


def test_each_takes_the_options_that_it_has():
    cfg = made("all", iterations=7, restarts=2, labels="optimise", hidden="guess", settings={"tint": 0.25, "tv": 0.5})
    assert cfg["flat"] == {"tint": 0.25, "labels": "restore"}
    assert cfg["idle"] == {}
    ig = cfg["ig"]
    assert (ig["iterations"], ig["restarts"], ig["labels"], ig["hidden"], ig["tv"]) == (7, 2, "optimise", "guess", 0.5)


def test_what_is_granted_is_used_by_those_that_can():
    cfg = made("all", knowledge="oracle")
    assert cfg["flat"]["labels"] == "known"
    assert (cfg["ig"]["labels"], cfg["ig"]["hidden"]) == ("known", "oracle")
    assert cfg["idle"] == {}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"iterations": 7}, "attack flat has no --iterations"),
        ({"restarts": 1}, "attack flat has no --restarts"),
        ({"hidden": "guess"}, "attack flat has no --hidden"),
        ({"labels": "optimise"}, "labels is 'optimise'"),
        ({"settings": {"tv": 0.1}}, "attack flat has no setting 'tv'"),
    ],
)
@pytest.mark.parametrize("text", ["flat", "ig,flat"])
def test_an_attack_that_is_named_must_have_them_all(text: str, options: dict[str, Any], says: str):
    with pytest.raises(ConfigError, match=says):
        made(text, **options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"settings": {"tintt": 0.1}}, "no attack has a setting 'tintt'; did you mean tint"),
        ({"settings": {"tint": 2}}, "tint is 2"),
        ({"settings": {"tv": -1}}, "tv is -1"),
        ({"iterations": 7, "settings": {"iterations": 8}}, "iterations is given twice"),
        ({"adversary": "sever"}, "did you mean server"),
        ({"knowledge": "wire+lables"}, "did you mean labels"),
    ],
)
def test_a_mistake_is_one_for_all(options: dict[str, Any], says: str):
    with pytest.raises(PflsecError, match=says) as refusal:
        made("all", **options)
    assert "\n" not in str(refusal.value)


def test_an_option_that_no_attack_has_is_refused(monkeypatch: pytest.MonkeyPatch):
    real = registry._entries
    monkeypatch.setattr(registry, "_entries", lambda group: {k: v for k, v in real(group).items() if k != "ig"})
    with pytest.raises(ConfigError, match="no attack has --iterations 7"):
        made("all", iterations=7)


def test_an_attack_that_this_adversary_cannot_mount_is_a_row_that_says_so(
    run: api.Run, monkeypatch: pytest.MonkeyPatch
):
    without_the_broken_one(monkeypatch)
    api.attack(run, "all", adversary="eavesdropper", **QUICK)
    found = by_attack(run)
    assert {row["status"] for row in found["ig"]} == {"not-applicable"}
    for row in found["ig"]:
        assert "Grant it with --knowledge wire+hyper" in row["reason"]
        assert (row["psnr"], row["iterations"], row["labels"]) == ("", "", "")
        assert row["label_true"]
    assert {row["status"] for row in found["flat"]} == {"converged"}


def test_nobody_can_mount_anything(run: api.Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pflsec.config.attack.attack_names", lambda text: ["ig"])
    with pytest.raises(KnowledgeError, match="attack inverting-gradients needs learning rate"):
        api.attack(run, "all", adversary="eavesdropper", **QUICK)
    assert list(run.path.joinpath("attacks").iterdir()) == []


def test_what_does_not_apply_is_a_row_with_the_reason_and_the_others_run(run: api.Run, monkeypatch: pytest.MonkeyPatch):
    without_the_broken_one(monkeypatch)
    scores = api.attack(run, "all", **QUICK)
    assert isinstance(scores, list)
    found = by_attack(run)
    assert [(len(r), {row["status"] for row in r}) for r in (found["flat"], found["idle"])] == [
        (2, {"converged"}), (2, {"not-applicable"})
    ]  # fmt: skip
    assert {row["reason"] for row in found["idle"]} == {"there are no words in pictures"}
    assert {row["iterations"] for row in found["ig"]} == {"2"}


def test_one_that_breaks_keeps_no_other_from_its_work_and_is_not_passed_over(run: api.Run):
    with pytest.raises(IndexError, match="list index out of range"):
        api.attack(run, "all", **QUICK)
    found = by_attack(run)
    assert set(found) == {"flat", "idle", "ig"}
    for folder in run.path.joinpath("attacks").iterdir():
        assert json.loads((folder / "attack.json").read_text())["state"] == "done"


def test_a_named_list_goes_on_as_well(run: api.Run):
    with pytest.raises(IndexError):
        api.attack(run, "broken,flat", lpips="none")
    assert set(by_attack(run)) == {"flat"}


def test_on_the_command_line_it_ends_as_a_failure_after_the_others_results(
    run: api.Run, capsys: pytest.CaptureFixture[str]
):
    assert (
        main(["attack", "all", str(run.path), "--lpips", "none", "--iterations", "2", "--executor", "serial", "--json"])
        == 1
    )
    printed = capsys.readouterr()
    assert [len(one["scores"]) for one in json.loads(printed.out)] == [4, 4, 4]
    assert "broken failed: list index out of range" in printed.err
    assert "this is a fault of pflsec" in printed.err


def test_on_the_command_line_a_dry_run_says_what_does_not_apply(run: api.Run, capsys: pytest.CaptureFixture[str]):
    words = ["attack", "all", str(run.path), "--lpips", "none", "--adversary", "eavesdropper", "--dry-run"]
    assert main(words) == 0
    assert "note: ig does not apply: attack inverting-gradients needs" in capsys.readouterr().err
    assert list(run.path.joinpath("attacks").iterdir()) == []
