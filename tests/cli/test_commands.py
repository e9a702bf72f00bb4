"""What each command prints and writes when all is well."""

import csv
import json
import stat
from pathlib import Path
from typing import Any

import pytest

import pflsec
from pflsec.config.train import TrainConfig
from tests.cli.conftest import QUICK, TRAIN, Cli, tree

COLUMNS = [
    "run",
    "algo",
    "family",
    "defense",
    "epsilon",
    "attack",
    "adversary",
    "knowledge",
    "labels",
    "hidden",
    "kind",
    "round",
    "client",
    "victim",
    "dataset_index",
    "batch",
    "steps",
    "iterations",
    "restarts",
    "seconds",
    "objective",
    "mse",
    "psnr",
    "psnr_capped",
    "ssim",
    "ssim_variant",
    "lpips",
    "lpips_status",
    "clip_frac",
    "label_true",
    "label_found",
    "label_correct",
    "identified",
    "psnr_blind",
    "excess_psnr",
    "attack_valid",
    "reason",
    "status",
]


def strict(text: str) -> Any:
    """Return the value of a JSON text; NaN and infinities are no JSON."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


# --- a run's folder


def test_a_run_says_what_it_was_in_full(runs: Path):
    facts = strict((runs / "fedrep/run.json").read_text())
    assert (facts["schema"], facts["state"], facts["name"], facts["seed"]) == (1, "done", "fedrep", 0)
    recorded = {name for name, field in TrainConfig.model_fields.items() if not field.exclude}
    assert set(facts["config"]) == recorded
    assert facts["config"]["batch_size"] == 10
    assert facts["algorithm"]["settings"]["head_epochs"] == 10
    assert {"python", "torch", "numpy", "pflsec"} <= set(facts["versions"])
    assert {"git", "device", "dp", "started", "finished", "model", "wire", "captures"} <= set(facts)
    assert facts["dp"]["enabled"] is False
    assert stat.S_IMODE((runs / "fedrep").stat().st_mode) & 0o077 == 0


def test_every_round_is_a_line_of_numbers(runs: Path):
    (line,) = (runs / "fedavg/metrics.jsonl").read_text().splitlines()
    row = strict(line)
    assert row["round"] == 0
    assert row["bytes_up"] >= row["bytes_down"] > 4 * 4 * 19_000
    for name in ("train_loss", "seconds"):
        assert row[name] > 0
    for name in ("personal_accuracy_mean", "personal_accuracy_std", "personal_accuracy_worst10", "global_accuracy"):
        assert 0 <= row[name] <= 1
    assert row["epsilon"] is None
    (line,) = (runs / "fedrep/metrics.jsonl").read_text().splitlines()
    assert strict(line)["global_accuracy"] is None


def test_every_client_is_a_line_of_every_round(runs: Path):
    with (runs / "fedavg/clients.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["client"] for row in rows] == ["0", "1", "2", "3"]
    for row in rows:
        assert row["uploaded"] == "true"
        assert 0 <= float(row["accuracy_post_agg"]) <= 1
        assert int(row["train_samples"]) > int(row["test_samples"]) > 0


def test_captures_and_truth_lie_apart(runs: Path):
    assert sorted(p.stem for p in (runs / "fedavg/captures").glob("*.json")) == [f"r000-c0{c}-v0-probe" for c in (0, 1)]
    assert not any("dataset_index" in p.read_text() for p in (runs / "fedavg/captures").glob("*.json"))
    assert (runs / "fedavg/vault/pool.safetensors").is_file()


# --- train


def test_training_prints_json_on_stdout_and_everything_else_on_stderr(cli: Cli):
    result = cli.succeed(*TRAIN, "--capture-rounds", "none", "--json")
    found = strict(result.out)
    assert set(found) == {"run", "path", "metrics"}
    assert found["metrics"]["round"] == 0
    assert "round 1/1" in result.err
    assert Path(found["path"]).joinpath("run.json").is_file()


def test_without_json_stdout_stays_empty(cli: Cli):
    result = cli.succeed(*TRAIN, "--capture-rounds", "none")
    assert result.out == ""
    assert "without captures to attack; see it with: pflsec report fedavg-digits-s0" in result.err


def test_a_name_that_is_taken_gets_a_number(cli: Cli, tmp_path: Path):
    for _ in range(2):
        cli.succeed(*TRAIN, "--capture-rounds", "none", "--name", "mine")
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == ["mine", "mine-2"]
    assert strict((tmp_path / "runs/mine-2/run.json").read_text())["name"] == "mine-2"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("FedAvg", "fedavg"),
        ("fed-avg", "fedavg"),
        ("FEDPROTO", "fedproto"),
        ("Fed_Rep", "fedrep"),
        ("SCAFFOLD", "scaffold"),
    ],
)
def test_methods_are_found_however_they_are_typed(cli: Cli, tmp_path: Path, typed: str, meant: str):
    found = strict(cli.succeed(*TRAIN, "--algo", typed, "--dry-run", "--json").out)
    assert found["config"]["algo"] == meant


def test_a_dry_run_estimates_and_writes_nothing(cli: Cli, tmp_path: Path):
    result = cli.succeed(*TRAIN, "--dry-run", "--json")
    found = strict(result.out)
    assert found["seconds"] > 0
    assert found["bytes"] > 0
    assert "19,210 parameters; about" in result.err
    assert tree(tmp_path) == {}


def test_an_estimate_does_not_take_as_long_as_the_work(cli: Cli, monkeypatch: pytest.MonkeyPatch):
    """A million local epochs are estimated from a few."""
    few, many = (
        strict(cli.succeed(*TRAIN, "--dry-run", "--json", "--local-epochs", n).out)["seconds"] for n in ("5", "1000000")
    )
    assert many > 1e4 * few


def test_a_file_gives_options_that_the_command_line_overrides(cli: Cli, tmp_path: Path):
    tmp_path.joinpath("run.toml").write_text(
        'algo = "FedProx"\nrounds = 7\nlr = 0.5\nclients = 4\nmodel = "mlp"\n[settings]\nmu = 0.25\n'
    )
    words = ("train", "--config", "run.toml", "--lr", "0.125", "--dry-run", "--json")
    config = strict(cli.succeed(*words).out)["config"]
    assert (config["algo"], config["rounds"], config["lr"], config["settings"]) == ("fedprox", 7, 0.125, {"mu": 0.25})
    config = strict(cli.succeed(*words, "--set", "mu=2", "--preset", "pfllib").out)["config"]
    assert (config["lr"], config["settings"]["mu"], config["batch_size"]) == (0.125, 2, 10)


# --- attack


def test_an_attack_writes_a_row_for_every_victim_under_the_agreed_columns(cli: Cli, runs: Path):
    result = cli.succeed("attack", "ig", "fedavg", *QUICK, "--json")
    (found,) = strict(result.out)
    folder = Path(found["path"])
    with (folder / "scores.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == COLUMNS
    assert [list(row) for row in found["scores"]] == [COLUMNS] * 2
    assert len(rows) == 2
    assert {p.name for p in folder.iterdir()} == {
        "attack.json",
        "scores.csv",
        "controls.csv",
        "images.csv",
        "reconstructions.safetensors",
    }
    assert stat.S_IMODE(folder.stat().st_mode) & 0o077 == 0
    assert "ig" not in result.out.split('"scores"')[0]
    assert "2 victims each" in result.err


def test_an_attack_without_json_prints_a_table(cli: Cli, runs: Path):
    result = cli.succeed("attack", "ig,idlg", "fedavg", *QUICK)
    assert "inverting-gradients" in result.out
    assert "idlg" in result.out
    assert all(column in result.out for column in ("PSNR dB", "best", "identified", "2 of 2"))
    assert "pflsec report fedavg" in result.err


def test_what_is_not_available_is_null_with_a_reason_beside_it(cli: Cli, runs: Path):
    (found,) = strict(cli.succeed("attack", "dlg", "fedrep", *QUICK, "--hidden", "log", "--json").out)
    for row in found["scores"]:
        assert row["status"] == "not-applicable"
        assert "log does not reveal" in row["reason"]
        assert (row["psnr"], row["objective"], row["iterations"], row["hidden"]) == (None, None, None, "")
        assert row["psnr_blind"] > 5
    assert "not-applicable" in cli.succeed("attack", "dlg", "fedrep", *QUICK, "--hidden", "log").out


def test_missing_weights_of_the_perceptual_distance_are_said_once_and_cost_nothing_else(
    cli: Cli, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "hub"))
    result = cli.succeed("attack", "ig", "fedavg", *QUICK[:-1], "alex", "--json")
    assert result.err.count("LPIPS is not available (weights-missing)") == 1
    (found,) = strict(result.out)
    assert {(row["lpips"], row["lpips_status"]) for row in found["scores"]} == {(None, "weights-missing")}


def test_a_dry_run_of_an_attack_lists_its_captures_and_writes_nothing(cli: Cli, runs: Path):
    before = tree(runs)
    found = strict(cli.succeed("attack", "IG,d-l-g,ig", "fedavg", "--clients", "1", "--dry-run", "--json").out)
    assert found["attacks"] == ["inverting-gradients", "dlg"]
    assert found["captures"] == ["r000-c01-v0-probe"]
    assert tree(runs) == before


@pytest.mark.parametrize("where", ["fedavg", "runs/fedavg", "./runs/fedavg", "runs/fedavg/"])
def test_a_run_is_found_by_name_and_by_folder(cli: Cli, runs: Path, where: str):
    assert "on run fedavg" in cli.succeed("attack", "ig", where, "--dry-run").err


def test_without_a_name_the_newest_run_is_attacked(cli: Cli, runs: Path):
    cli.succeed(*TRAIN, "--capture-rounds", "first", "--capture-clients", "2", "--name", "newest")
    assert "on run newest" in cli.succeed("attack", "ig", "--dry-run").err


def test_all_attacks_can_be_asked_for(cli: Cli, runs: Path):
    found = strict(cli.succeed("attack", "all", "fedavg", "--dry-run", "--json").out)
    assert {"dlg", "idlg", "inverting-gradients"} <= set(found["attacks"])


def test_what_was_known_and_set_is_recorded(cli: Cli, runs: Path):
    words = ("--knowledge", "wire+labels", "--set", "tv=0.5", "--set", "signed=false", "--seed", "7")
    (found,) = strict(cli.succeed("attack", "ig", "fedavg", *QUICK, *words, "--json").out)
    meta = strict(Path(found["path"], "attack.json").read_text())
    assert (meta["config"]["tv"], meta["config"]["signed"], meta["config"]["labels"]) == (0.5, False, "known")
    assert (meta["seed"], meta["threat_model"]["knowledge"]) == (7, "wire+labels")
    assert {row["labels"] for row in found["scores"]} == {"known"}


# --- report, list, show


def test_a_report_is_one_page_in_the_runs_folder(cli: Cli, runs: Path):
    cli.succeed("attack", "ig", "fedavg", *QUICK)
    found = strict(cli.succeed("report", "fedavg", "--json").out)
    page = Path(found["page"])
    assert page == Path("runs/fedavg/report/index.html")
    assert page.read_text().lstrip().lower().startswith("<!doctype html")
    assert any((page.parent / "tables").glob("*.csv"))


def test_a_report_of_several_runs_goes_where_it_is_asked_to(cli: Cli, runs: Path, tmp_path: Path):
    cli.succeed("report", "fedavg", "runs/fedrep", "--out", "both")
    page = (tmp_path / "both/index.html").read_text()
    assert "fedavg" in page
    assert "fedrep" in page


@pytest.mark.parametrize("what", ["algorithms", "attacks", "defenses", "datasets", "models", "runs"])
def test_every_list_is_a_table_and_json(cli: Cli, runs: Path, what: str):
    rows = strict(cli.succeed("list", what, "--json").out)
    assert rows
    key = "run" if what == "runs" else "key"
    table = cli.succeed("list", what)
    assert table.err == ""
    assert all(row[key] in table.out for row in rows)


def test_an_empty_list_says_so(cli: Cli):
    assert cli.succeed("list", "runs").out.strip() == "no runs yet"
    assert cli.succeed("list", "runs", "--json").out.strip() == "[]"


def test_runs_are_listed_with_their_attacks(cli: Cli, runs: Path):
    cli.succeed("attack", "ig", "fedavg", *QUICK)
    rows = {row["run"]: row for row in strict(cli.succeed("list", "runs", "--json").out)}
    assert (rows["fedavg"]["attacks"], rows["fedrep"]["attacks"]) == (1, 0)
    assert {k: rows["fedrep"][k] for k in ("algo", "data", "rounds", "state")} == {
        "algo": "fedrep", "data": "digits", "rounds": 1, "state": "done",
    }  # fmt: skip


@pytest.mark.parametrize(("name", "how"), [("prune", "--defense prune:NAME=VALUE"), ("fedprox", "--set NAME=VALUE")])
def test_a_card_says_how_its_settings_are_set(cli: Cli, name: str, how: str):
    assert f"Settings ({how})" in cli.succeed("show", name).out


@pytest.mark.parametrize("name", ["fedavg", "FedRep", "scaffold", "ig", "DLG", "digits", "mlp"])
def test_every_card_is_shown_as_text_and_json(cli: Cli, name: str):
    card = strict(cli.succeed("show", name, "--json").out)
    shown = cli.succeed("show", name).out
    assert card["title"].split(":")[0].split()[0] in shown
    assert all(setting["name"] in shown for setting in card["settings"])


def test_a_run_is_shown_as_text_and_json(cli: Cli, runs: Path):
    runs.joinpath("fedavg").rename(runs / "mine")
    assert strict(cli.succeed("show", "mine", "--json").out) == strict((runs / "mine/run.json").read_text())
    shown = cli.succeed("show", "runs/mine").out
    for part in ("done", "mlp, 19,210 parameters", "body.*", "batch_size"):
        assert part in shown


def test_the_version_is_printed(cli: Cli):
    assert cli.succeed("--version").out == f"pflsec {pflsec.__version__}\n"


def test_without_a_command_the_help_is_printed(cli: Cli):
    result = cli()
    assert result.code == 0
    assert result.out.startswith("Usage: pflsec")
    assert result.err == ""
