"""pflsec sweep: from the shell's side."""

import json
from pathlib import Path

import pytest

from pflsec.core.files import locked
from pflsec.sweep import folder
from tests.audit.methods import LATE
from tests.audit.methods import write as write_method
from tests.cli.conftest import Cli
from tests.sweep.grids import write


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(folder, "write_page", lambda paths, out: None)
    monkeypatch.setattr(folder, "write_frontier", lambda paths, out: None)


def test_a_dry_run_lists_the_trainings_estimates_and_writes_nothing(cli: Cli, tmp_path: Path):
    write(tmp_path, ("rounds = 2", 'rounds = 2\ndefense = [[], ["dp-sgd:epsilon=8"]]'), ('"fedrep"', '"fedproto"'))
    done = cli.succeed("sweep", "s.toml", "--dry-run")
    assert "4 trainings, 1 of them not applicable" in done.err
    assert "the attacks take up to about" in done.err
    assert "a few iterations were timed on fedavg-none-s0" in done.err
    for word in ("fedavg-none-s0", "not applicable: fedproto", "victims of each attack"):
        assert word in " ".join(done.out.split())
    found = json.loads(cli.succeed("sweep", "s.toml", "--dry-run", "--json").out)
    assert [cell["status"] for cell in found["cells"]] == ["planned"] * 3 + ["not-applicable"]
    assert found["seconds"] > 0
    assert [p.name for p in tmp_path.iterdir()] == ["s.toml"]


def test_a_sweep_prints_its_rows_and_says_where_they_are(cli: Cli, tmp_path: Path):
    write(tmp_path)
    done = cli.succeed("sweep", "s.toml")
    assert "fedavg-s0" in done.out
    assert "2 rows, 0 failed; tables, report and frontier in runs/small" in done.err
    again = json.loads(cli.succeed("sweep", "s.toml", "--json", "--workers", "1").out)
    assert [row["status"] for row in again["rows"]] == ["done", "done"]


def test_something_failed_is_exit_code_one(cli: Cli, tmp_path: Path):
    name = write_method(tmp_path / "mine.py", LATE.replace("== 1", "== 0"))
    write(tmp_path, ('"fedavg"', f'"{name}"'))
    done = cli("sweep", "s.toml")
    assert done.code == 1
    assert "2 rows, 1 failed" in done.err
    assert "internal error" not in done.err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("rounds = 2", "rouns = 2"), "s.toml, line 7, column 1: train has no option 'rouns'; did you mean rounds?"),
        (('name = "small"', 'name = "../x"'), "s.toml, line 1, column 1: sweep name '../x' is not usable"),
        (("rounds = 2", "rounds == 2"), "s.toml, line 7, column 9: this is no TOML"),
    ],
)
def test_mistakes_in_the_file_end_in_one_line_and_leave_nothing(cli: Cli, tmp_path: Path, change: tuple, said: str):
    write(tmp_path, change)
    assert said in cli.mistake("sweep", "s.toml")
    assert [p.name for p in tmp_path.iterdir()] == ["s.toml"]


def test_mistakes_in_the_options_end_in_one_line(cli: Cli, tmp_path: Path):
    assert "the file gone.toml does not exist" in cli.mistake("sweep", "gone.toml")
    assert "--executor gpu is not known" in cli.mistake("sweep", "gone.toml", "--executor", "gpu")
    assert "--workers is 0" in cli.mistake("sweep", "gone.toml", "--workers", "0")
    write(tmp_path, ("iterations = 2", "iterations = 1"))
    (tmp_path / "runs/small").mkdir(parents=True)
    with locked(tmp_path / "runs/small/.lock", ""):
        assert "is being run by another process" in cli.mistake("sweep", "s.toml", announced=True)
