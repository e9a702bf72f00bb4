"""pflsec from Python: the same as the command line, under the same names."""

import inspect
import json
import os
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import pflsec
from pflsec import api
from pflsec.cli import attack as attack_command
from pflsec.cli import train as train_command
from pflsec.config.attack import AttackConfig
from pflsec.config.train import TrainConfig, resolve
from pflsec.config.update import UpdateConfig
from pflsec.core.errors import ConfigError, DataError, KnowledgeError, PflsecError, RunError
from tests import toys

TINY: dict[str, Any] = {
    "dataset": toys.dataset(), "partition": "natural", "test": "given", "model": "mlp", "rounds": 1, "lr": 0.1,
    "batch_size": 4, "capture_clients": "1,3", "victims": 1,
}  # fmt: skip
SMALL: dict[str, Any] = {"iterations": 2, "restarts": 1, "lpips": "none", "controls": False}


def train(**options: Any) -> api.Run:
    return pflsec.train(**(TINY | options))


def attack(run: Any = None, name: Any = "ig", **options: Any) -> Any:
    return pflsec.attack(run, name, **(SMALL | options))


# --- training


def test_a_run_has_its_description_and_its_tables():
    run = train(algo="fedrep", rounds=2)
    assert run.path == Path("runs/fedrep-digits-s0")
    assert run.manifest["state"] == "done"
    assert list(run.metrics["round"]) == [0, 1]
    assert isinstance(run.metrics, pd.DataFrame)
    assert list(run.clients["client"]) == [0, 1, 2, 3] * 2


def test_a_methods_settings_reach_the_method():
    run = train(algo="fedprox", settings={"mu": 0.625})
    assert run.manifest["config"]["settings"] == {"mu": 0.625}
    assert run.manifest["algorithm"]["settings"]["mu"] == 0.625


def test_settings_are_taken_from_everywhere_and_the_nearest_wins(tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_text('algo = "fedprox"\n[settings]\nmu = 1\nstragglers = 0.5\nsampling = "uniform"\n')
    config = resolve({"settings": {"stragglers": 0.25}}, file=file, assignments={"sampling": "by_size"})
    assert config.settings == {"mu": 1, "stragglers": 0.25, "sampling": "by_size"}
    assert resolve({"settings": {"mu": 2}}, file=file, preset="pfllib").settings["mu"] == 2
    assert resolve({}, file=file, preset="pfllib").settings["mu"] == 0


def test_rounds_are_reported_as_they_come():
    seen: list[int] = []
    train(rounds=3, on_round=lambda t, metrics: seen.append(t))
    assert seen == [0, 1, 2]


def test_an_earlier_run_is_never_overwritten():
    first = train(name="mine")
    before = (first.path / "run.json").read_bytes()
    assert train(name="mine").name == "mine-2"
    assert (first.path / "run.json").read_bytes() == before


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"rouns": 3}, ConfigError, "did you mean rounds?"),
        ({"rounds": 0}, ConfigError, "rounds is 0"),
        ({"rounds": "many"}, ConfigError, "rounds is 'many'"),
        ({"algo": "fedavgg"}, ConfigError, "did you mean fedavg?"),
        ({"algo": ""}, ConfigError, "algorithm '' is not known"),
        ({"settings": {"muu": 1}}, ConfigError, "has no setting 'muu'"),
        ({"settings": "mu=1"}, ConfigError, "settings is 'mu=1'; it must be a table"),
        ({"name": "../x"}, ConfigError, "run name '../x'"),
        ({"lr": float("nan")}, ConfigError, "lr is nan"),
        ({"clients": 5}, DataError, "have 4 natural clients"),
        ({"victim_batch": 100}, ConfigError, "does not fit"),
    ],
)
def test_mistakes_raise_one_sentence_and_leave_nothing(options: dict[str, Any], kind: type[Exception], says: str):
    with pytest.raises(kind) as refusal:
        train(**options)
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert not Path("runs").exists()


def test_a_run_that_was_stopped_says_so_and_goes_on_later():
    def stop(t: int, metrics: Any) -> None:
        if t == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(rounds=3, on_round=stop)
    run = pflsec.load_run("fedavg-digits-s0")
    assert (run.manifest["state"], len(run.metrics)) == ("interrupted", 2)
    resumed = pflsec.resume(run, dataset=TINY["dataset"])
    assert (resumed.manifest["state"], len(resumed.metrics)) == ("done", 3)
    with pytest.raises(RunError, match="is complete"):
        pflsec.resume(run, dataset=TINY["dataset"])


def test_a_run_that_failed_says_why():
    def fail(t: int, metrics: Any) -> None:
        raise ValueError("first line\nsecond line")

    with pytest.raises(ValueError, match="first line"):
        train(on_round=fail)
    facts = pflsec.load_run("fedavg-digits-s0").manifest
    assert (facts["state"], facts["reason"]) == ("failed", "first line")


# --- attacks


def test_scores_are_a_table_with_types():
    scores = attack(train())
    table = scores.table
    assert list(table["client"]) == [1, 3]
    assert table["psnr"].dtype == "float64"
    assert table["round"].dtype == "Int64"
    assert table["attack_valid"].dtype == "boolean"
    assert set(table["attack"]) == {"inverting-gradients"}


def test_one_attack_gives_scores_and_several_a_list():
    run = train()
    assert isinstance(attack(run, "dlg"), api.Scores)
    assert [s.table["attack"].iloc[0] for s in attack(run, "dlg,ig")] == ["dlg", "inverting-gradients"]
    assert [s.path.name.split("-")[0] for s in attack(run, ["idlg"])] == ["idlg"]


def test_a_run_is_given_as_itself_by_name_by_folder_or_left_out():
    old, new = train(name="old"), train(name="new")
    os.utime(old.path / "run.json", (1, 1))
    for given in (new, "new", new.path, str(new.path), None):
        assert attack(given).path.parents[1] == new.path
    assert attack("old").path.parents[1] == old.path


def test_victims_are_reported_as_they_come():
    seen: list[tuple[str, int, int, str]] = []
    attack(train(), on_victim=lambda name, done, total, row: seen.append((name, done, total, row["status"])))
    assert seen == [("inverting-gradients", 1, 2, "budget"), ("inverting-gradients", 2, 2, "budget")]


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"rouns": [0]}, ConfigError, "did you mean rounds?"),
        ({"rounds": [7]}, RunError, "it has: rounds 0, clients 1, 3"),
        ({"labels": "known"}, KnowledgeError, "wire+labels"),
        ({"settings": {"tv": -1}}, ConfigError, "tv is -1"),
        ({"settings": {"iterations": 4}}, ConfigError, "iterations is given twice"),
        ({"runs_dir": "elsewhere"}, RunError, "there is no run in elsewhere"),
        ({"name": "nothing"}, ConfigError, "attack 'nothing' is not known"),
    ],
)
def test_mistakes_in_attacks_raise_one_sentence(options: dict[str, Any], kind: type[Exception], says: str):
    run = train()
    with pytest.raises(kind) as refusal:
        attack(None, **options)
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert list((run.path / "attacks").iterdir()) == []


def test_python_and_the_command_line_agree_bit_for_bit(capsys: pytest.CaptureFixture[str]):
    from pflsec.cli.app import main

    run = train()
    scores = attack(run)
    before = {p.name: p.read_bytes() for p in scores.path.glob("recon*")}
    words = [
        "attack",
        "ig",
        "--iterations",
        "2",
        "--restarts",
        "1",
        "--lpips",
        "none",
        "--executor",
        "serial",
        "--no-controls",
        "--json",
    ]
    assert main(words) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert Path(found["path"]) == scores.path
    assert {p.name: p.read_bytes() for p in scores.path.glob("recon*")} == before


# --- reading and reporting


@pytest.mark.parametrize("where", ["nothing", "runs/nothing", "/nowhere", "x" * 300, ""])
def test_a_run_that_is_not_there_is_an_error_for_the_user(where: str):
    train()
    with pytest.raises(PflsecError):
        pflsec.load_run(where)


def test_a_report_is_written_where_it_is_asked_for(tmp_path: Path):
    first = train(name="a")
    train(name="b", algo="fedrep")
    attack(first)
    assert pflsec.report(first) == Path("runs/a/report/index.html")
    assert pflsec.report([first, "b"]) == Path("runs/report/index.html")
    assert pflsec.report("b", out=tmp_path / "there") == tmp_path / "there/index.html"
    with pytest.raises(PflsecError, match="no run was given"):
        pflsec.report([])


# --- one vocabulary


def test_every_option_of_train_is_an_option_in_python():
    on_the_command_line = set(inspect.signature(train_command.train).parameters)
    apart = {"runs_dir", "name", "config", "preset", "resume", "dry_run", "json"}
    assert on_the_command_line - set(TrainConfig.model_fields) <= apart
    in_python = set(inspect.signature(api.train).parameters) | set(inspect.signature(api.resume).parameters)
    assert {"runs_dir", "name", "config", "preset"} <= in_python
    assert set(TrainConfig.model_fields) - on_the_command_line == set()


def test_every_option_of_attack_is_an_option_in_python():
    on_the_command_line = set(inspect.signature(attack_command.attack).parameters)
    apart = {"attacks", "run", "runs_dir", "dry_run", "json"}
    elsewhere = {*UpdateConfig.model_fields, *inspect.signature(api.attack_update).parameters}
    assert on_the_command_line - set(AttackConfig.model_fields) - elsewhere <= apart
    assert set(AttackConfig.model_fields) - on_the_command_line == set()


def test_the_package_offers_what_it_lists():
    for name in pflsec.__all__:
        assert getattr(pflsec, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        pflsec.trian  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]
