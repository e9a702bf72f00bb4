"""Sweeps that are run: nothing is done twice, whatever stopped the last call, and one failure stops nothing else."""

import csv
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pflsec import api
from pflsec.core.errors import PflsecWarning, RunError
from pflsec.core.files import locked, read_json
from pflsec.reports import figures
from pflsec.sweep import folder
from pflsec.sweep.file import load
from pflsec.sweep.folder import SweepFolder
from pflsec.sweep.work import How
from tests.audit.methods import LATE
from tests.audit.methods import write as write_method
from tests.audit.test_audits import captured, scores
from tests.sweep.grids import write


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep that is done, for tests to copy and go on with."""
    place = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "write_gallery", lambda path, attack: None)
        patch.setattr(folder, "write_page", lambda paths, out: None)
        patch.setattr(folder, "write_frontier", lambda paths, out: None)
        sweep(place)
    return place


@pytest.fixture
def done(finished: Path, tmp_path: Path) -> Path:
    """A folder of one's own with the sweep that is done."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.fixture(autouse=True)
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Draw no pictures, which take longer than all the rest; return of which runs there would have been any."""
    pages: list[list[str]] = []
    monkeypatch.setattr(figures, "write_gallery", lambda path, attack: None)
    monkeypatch.setattr(folder, "write_page", lambda paths, out: pages.append([p.name for p in paths]))
    monkeypatch.setattr(folder, "write_frontier", lambda paths, out: pages.append([p.name for p in paths]))
    return pages


def sweep(tmp_path: Path, *changes: tuple[str, str], how: How = How()) -> list[dict[str, Any]]:  # noqa: B008
    made = load(write(tmp_path, *changes))
    return SweepFolder(tmp_path / "runs" / made.name, made).run(how)


def files(path: Path) -> dict[Path, int]:
    return {p: p.stat().st_mtime_ns for p in path.rglob("*") if p.is_file()}


def test_every_training_and_attack_has_a_row_and_is_not_done_again(tmp_path: Path, drawn: list[list[str]]):
    rows = sweep(tmp_path)
    path = tmp_path / "runs/small"
    assert [(r["training"], r["algo"], r["attack"], r["status"]) for r in rows] == [
        ("fedavg-s0", "fedavg", "inverting-gradients", "done"),
        ("fedrep-s0", "fedrep", "inverting-gradients", "done"),
    ]
    one = scores(path / "runs/fedavg-s0")[0]
    assert (rows[0]["psnr_median"], rows[0]["psnr_worst"], rows[0]["victims"]) == (
        one["psnr_capped"],
        one["psnr_capped"],
        1,
    )
    assert rows[0]["accuracy"] == pytest.approx(
        api.Run(path / "runs/fedavg-s0").metrics["personal_accuracy_mean"].iloc[-1]
    )
    with (path / "sweep.csv").open() as text:
        table = list(csv.DictReader(text))
    assert [row["psnr_median"] for row in table] == [f"{row['psnr_median']:.6g}" for row in rows]
    assert read_json(path / "sweep.json", "")["rows"][0]["run"] == "fedavg-s0"
    assert drawn == [["fedavg-s0", "fedrep-s0"]] * 2
    assert path.stat().st_mode & 0o777 == 0o700
    before = files(path / "runs")
    assert sweep(tmp_path) == rows
    assert files(path / "runs") == before


def test_other_attacks_train_nothing_and_another_grid_keeps_what_it_shares(done: Path):
    runs = done / "runs/small/runs"
    before = {p: t for p, t in files(runs).items() if "attacks" not in p.parts}
    rows = sweep(done, ('name = "ig"', 'name = "analytic"'), ("iterations = 2\n", ""))
    assert [row["attack"] for row in rows] == ["analytic", "analytic"]
    assert {p: t for p, t in files(runs).items() if "attacks" not in p.parts} == before
    rows = sweep(done, ('"fedavg"', '"fedper"'))
    assert [row["run"] for row in rows] == ["fedper-s0", "fedrep-s0"]
    assert {p: t for p, t in files(runs).items() if "attacks" not in p.parts and "fedper-s0" not in p.parts} == before


def test_an_attack_is_made_again_where_it_was_measured_otherwise(done: Path):
    (before,) = (done / "runs/small/runs/fedavg-s0/attacks").glob("*/attack.json")
    then = before.stat().st_mtime_ns
    rows = sweep(done, ("controls = false", "controls = true"))
    assert before.stat().st_mtime_ns > then
    assert rows[0]["controls"].startswith(("passed", "failed"))


@pytest.mark.parametrize("after", [1, 3])
def test_a_killed_sweep_goes_on_with_the_same_bits(tmp_path: Path, finished: Path, after: int):
    """After 1 step it is in the first training, after 3 it has attacked the first victim and not yet said so."""
    write(tmp_path)
    code = """
import os, signal, sys
from pathlib import Path
from pflsec.sweep.file import load
from pflsec.sweep.folder import SweepFolder
from pflsec.sweep.work import How
seen = []
def kill(note, done):
    seen.append(note)
    if len(seen) == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
SweepFolder(Path("runs/small"), load(Path("s.toml"))).run(How(on_step=kill))
"""
    ended = subprocess.run(
        [sys.executable, "-c", code, str(after)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ended.returncode == -9, ended.stderr
    again, whole = sweep(tmp_path), read_json(finished / "runs/small/sweep.json", "the whole sweep")["rows"]
    same = ("psnr_median", "accuracy", "status", "run")
    assert [[row[k] for k in same] for row in again] == [[row[k] for k in same] for row in whole]
    for name in ("fedavg-s0", "fedrep-s0"):
        one, other = (place / "runs/small/runs" / name for place in (tmp_path, finished))
        assert captured(one) == captured(other)
        assert scores(one) == scores(other)
    assert sorted(p.name for p in (tmp_path / "runs/small/runs").iterdir()) == ["fedavg-s0", "fedrep-s0"]


def test_ctrl_c_is_noted_and_the_same_call_goes_on(tmp_path: Path):
    def stop(note: str, done: int) -> None:
        if "fedrep" in note:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(tmp_path, how=How(on_step=stop))
    states = [row["status"] for row in read_json(tmp_path / "runs/small/sweep.json", "")["rows"]]
    assert states == ["done", "interrupted"]
    assert [row["status"] for row in sweep(tmp_path)] == ["done", "done"]


def test_what_a_kill_left_half_made_is_neither_used_nor_lost(tmp_path: Path):
    (tmp_path / "runs/small/runs/fedavg-s0/captures").mkdir(parents=True)
    (tmp_path / "runs/small/runs/broken").mkdir()
    (tmp_path / "runs/small/runs/broken/run.json").write_text("{")
    (tmp_path / "runs/small/sweep.json").write_text("{")
    only = ('["fedavg", "fedrep"]', '"fedavg"')
    with pytest.warns(PflsecWarning, match="broken is no run that can be gone on with"):
        rows = sweep(tmp_path, only)
    assert [row["run"] for row in rows] == ["fedavg-s0-2"]
    assert (tmp_path / "runs/small/runs/broken/run.json").read_text() == "{"


def test_a_training_that_fails_keeps_no_other_from_its_work(tmp_path: Path, drawn: list[list[str]]):
    name = write_method(tmp_path / "mine.py", LATE)
    change = ('"fedavg"', f'"{name}"')
    rows = sweep(tmp_path, change)
    assert [row["status"] for row in rows] == ["failed", "done"]
    assert "round 1, client 0" in rows[0]["reason"]
    assert "ValueError: no more" in rows[0]["reason"]
    assert 'mine.py", line' in rows[0]["details"]
    assert drawn[0] == ["fedrep-s0"]
    before = files(tmp_path / "runs/small/runs/fedrep-s0")
    assert [row["status"] for row in sweep(tmp_path, change)] == ["failed", "done"]
    assert files(tmp_path / "runs/small/runs/fedrep-s0") == before
    write_method(tmp_path / "mine.py")
    assert [row["status"] for row in sweep(tmp_path, change)] == ["done", "done"]


def test_an_attack_that_fails_keeps_no_other_from_its_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = api.AttackSession.run

    def fail(self: api.AttackSession, name: str, *rest: Any) -> Any:
        if name == "inverting-gradients":
            raise ZeroDivisionError("nothing")
        return run(self, name, *rest)

    monkeypatch.setattr(api.AttackSession, "run", fail)
    rows = sweep(tmp_path, ("[[attack]]", '[[attack]]\nname = "analytic"\n[[attack]]'))
    assert [(row["attack"], row["status"]) for row in rows] == [
        ("analytic", "done"),
        ("inverting-gradients", "failed"),
    ] * 2
    assert rows[1]["reason"] == "ZeroDivisionError: nothing"


def test_what_does_not_apply_says_why(tmp_path: Path):
    defenses = ("rounds = 2", 'rounds = 2\ndefense = [[], ["dp-sgd:epsilon=8"]]')
    rows = sweep(
        tmp_path, ('"fedavg", "fedrep"', '"fedproto"'), defenses, ('name = "ig"\niterations = 2', 'name = "analytic"')
    )
    assert [(row["status"], row.get("attack")) for row in rows] == [
        ("not-applicable", "analytic"),
        ("not-applicable", None),
    ]
    assert "is not sent" in rows[0]["reason"]
    assert "cannot be trained under dp-sgd" in rows[1]["reason"]
    assert (rows[0]["accuracy"] is None, rows[1]["accuracy"] is None) == (False, True)


def test_a_damaged_run_is_reported_and_the_rest_is_done(done: Path, drawn: list[list[str]]):
    (done / "runs/small/runs/fedavg-s0/clients.csv").write_text("nothing\n")
    rows = sweep(done)
    assert [row["status"] for row in rows] == ["failed", "done"]
    assert "clients.csv" in rows[0]["reason"]
    assert drawn[-1] == ["fedrep-s0"]


def test_two_sweeps_in_one_folder_are_refused(tmp_path: Path):
    path = tmp_path / "runs/small"
    path.mkdir(parents=True)
    with locked(path / ".lock", ""), pytest.raises(RunError, match="is being run by another process"):
        sweep(tmp_path)
    assert [p.name for p in path.iterdir()] == [".lock"]


def test_the_folder_of_something_else_is_left_alone(tmp_path: Path):
    path = tmp_path / "runs/small"
    path.mkdir(parents=True)
    (path / "run.json").write_text("{}")
    with pytest.raises(RunError, match="is no sweep's folder"):
        sweep(tmp_path)
    assert [p.name for p in path.iterdir()] == ["run.json"]
    (path / "run.json").unlink()
    path.rmdir()
    path.write_text("a file")
    with pytest.raises(RunError, match="is no sweep's folder"):
        sweep(tmp_path)


def test_where_the_server_sees_sums_the_training_is_done_without_captures_and_its_attacks_do_not_apply(tmp_path: Path):
    """capture_rounds stands in the file, for the other trainings; secagg by itself refuses it as a mistake."""
    defenses = ("rounds = 2", 'rounds = 2\ndefense = [[], ["secagg"]]')
    rows = sweep(tmp_path, ('"fedavg", "fedrep"', '"fedavg"'), defenses)
    assert [row["status"] for row in rows] == ["done", "not-applicable"]
    assert "under secagg the server sees sums" in rows[1]["reason"]
    assert rows[1]["accuracy"] is not None
    assert rows[0]["psnr_median"] is not None


def test_a_sweep_of_nothing_but_sums_is_run_and_says_so(tmp_path: Path):
    rows = sweep(tmp_path, ('"fedavg", "fedrep"', '"fedavg"'), ("rounds = 2", 'rounds = 2\ndefense = ["secagg"]'))
    assert [(row["status"], row["accuracy"] is None) for row in rows] == [("not-applicable", False)]
