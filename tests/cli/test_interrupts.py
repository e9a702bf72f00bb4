"""Ctrl-C: exit code 130, no traceback, and what was finished is kept."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pflsec.cli import console
from tests.cli.conftest import QUICK, TRAIN, Cli, tree

PROGRAM = [sys.executable, "-m", "pflsec.cli.app"]


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch):
    """Return a function that lets Ctrl-C come once so many rounds or victims have been reported."""

    def arrange(after: int) -> None:
        advance = console.Progress.advance
        seen: list[int] = []

        def interrupted(self: console.Progress, *arguments: Any, **more: Any) -> None:
            advance(self, *arguments, **more)
            seen.append(1)
            if len(seen) == after:
                os.kill(os.getpid(), signal.SIGINT)

        monkeypatch.setattr(console.Progress, "advance", interrupted)

    return arrange


def test_training_that_is_interrupted_keeps_its_rounds(cli: Cli, tmp_path: Path, interrupt: Any):
    interrupt(after=2)
    result = cli(*TRAIN, "--rounds", "5", "--name", "cut")
    assert result.code == 130
    assert result.err.splitlines()[-1] == "interrupted: what was finished is kept"
    assert "Traceback" not in result.err
    assert result.out == ""
    run = tmp_path / "runs/cut"
    assert json.loads((run / "run.json").read_text())["state"] == "interrupted"
    assert [json.loads(line)["round"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [0, 1]
    cli.succeed("attack", "ig", "cut", *QUICK)
    cli.succeed("report", "cut")


def test_an_attack_that_is_interrupted_keeps_its_victims(cli: Cli, runs: Path, interrupt: Any):
    interrupt(after=1)
    result = cli("attack", "ig", "fedavg", *QUICK)
    assert result.code == 130
    assert "Traceback" not in result.err
    (folder,) = (runs / "fedavg/attacks").iterdir()
    assert json.loads((folder / "attack.json").read_text())["state"] == "interrupted"
    assert len((folder / "scores.csv").read_text().splitlines()) == 2
    cli.succeed("report", "fedavg")


def test_complete_results_are_not_replaced_by_an_interrupted_attack(cli: Cli, runs: Path, interrupt: Any):
    cli.succeed("attack", "ig", "fedavg", *QUICK)
    before = tree(runs / "fedavg/attacks")
    interrupt(after=1)
    assert cli("attack", "ig", "fedavg", *QUICK).code == 130
    assert tree(runs / "fedavg/attacks") == before


def test_of_several_attacks_those_before_ctrl_c_are_complete(cli: Cli, runs: Path, interrupt: Any):
    interrupt(after=3)
    assert cli("attack", "ig,idlg", "fedavg", *QUICK).code == 130
    states = {
        f.name.rpartition("-")[0]: json.loads((f / "attack.json").read_text())["state"]
        for f in (runs / "fedavg/attacks").iterdir()
    }
    assert states == {"inverting-gradients": "done", "idlg": "interrupted"}


def test_ctrl_c_acts_as_before_once_the_program_has_ended(cli: Cli):
    before = signal.getsignal(signal.SIGINT)
    cli.succeed("list", "attacks")
    assert signal.getsignal(signal.SIGINT) is before


def interrupted(words: list[str], folder: Path, after: str, file: str = ".") -> subprocess.CompletedProcess[str]:
    """Run the program, send Ctrl-C to all its processes once it has printed a line that starts so, and let it end.

    file  to wait for as well
    """
    process = subprocess.Popen(
        [*PROGRAM, *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder, start_new_session=True,
    )  # fmt: skip
    assert process.stderr is not None
    said = ""
    for line in process.stderr:
        said += line
        if line.startswith(after):
            break
    while process.poll() is None and not (folder / file).exists():
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    out, rest = process.communicate()
    return subprocess.CompletedProcess(words, process.returncode, out, said + rest)


def test_the_real_program_ends_training_in_order(tmp_path: Path):
    words = [*TRAIN, "--rounds", "100000", "--executor", "serial", "--name", "cut"]
    ended = interrupted(words, tmp_path, after="fedavg on digits", file="runs/cut/metrics.jsonl")
    assert ended.returncode == 130, ended.stderr
    assert ended.stderr.splitlines()[-1] == "interrupted: what was finished is kept"
    assert "Traceback" not in ended.stderr
    assert json.loads((tmp_path / "runs/cut/run.json").read_text())["state"] == "interrupted"
    rounds = [json.loads(line)["round"] for line in (tmp_path / "runs/cut/metrics.jsonl").read_text().splitlines()]
    assert rounds == list(range(len(rounds)))
    assert len(rounds) >= 1


@pytest.mark.parametrize("executor", ["serial", "processes"])
def test_the_real_program_ends_an_attack_in_order(tmp_path: Path, runs: Path, executor: str):
    """Workers that are just starting must not answer with tracebacks of their own."""
    before = tree(runs)
    words = ["attack", "ig", "fedavg", "--iterations", "1000000", "--set", "tolerance=0"]
    how = ["--executor", executor, "--workers", "2", "--lpips", "none"]
    ended = interrupted([*words, *how], tmp_path, after="inverting-gradients on run fedavg")
    assert ended.returncode == 130, ended.stderr
    assert ended.stderr.splitlines()[-1] == "interrupted: what was finished is kept"
    assert "Traceback" not in ended.stderr
    assert ended.stdout == ""
    assert tree(runs) == before
