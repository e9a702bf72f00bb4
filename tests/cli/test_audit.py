"""pflsec audit: from the shell's side."""

import json
from pathlib import Path

import pytest

from pflsec.audit import folder
from tests.audit.methods import FEDAVG, LATE, write
from tests.cli.conftest import Cli

SMALL = (
    "--model",
    "mlp",
    "--partition",
    "iid",
    "--clients",
    "4",
    "--rounds",
    "1",
    "--capture-clients",
    "0",
    "--victims",
    "2",
)
QUICK = ("--attacks", "ig", "--iterations", "2", "--restarts", "1", "--executor", "serial")


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(folder, "write_page", lambda paths, out, verdict: None)


def test_an_audit_of_a_file_prints_a_verdict_and_leaves_its_folder(cli: Cli, tmp_path: Path):
    write(tmp_path / "mine.py")
    done = cli.succeed("audit", "mine.py:FedAvg", "--against", "fedavg", *SMALL, *QUICK)
    assert "fedavg-file against fedavg: mean personal accuracy" in done.out
    assert "n too small for an interval" in done.out
    assert "What was not tested" in done.out
    assert "pflsec audit --resume audits/fedavg-file-digits" in done.err
    assert (tmp_path / "audits/fedavg-file-digits/verdict.md").exists()
    again = json.loads(cli.succeed("audit", "--resume", "audits/fedavg-file-digits", "--json").out)
    assert again["state"] == "done"
    assert set(again["cells"]) == {"fedavg-file-none-s0", "fedavg-none-s0", "local-none-s0"}
    shown = cli.succeed("show", "mine.py:FedAvg").out
    assert "own file" in shown


def test_a_failed_cell_gives_exit_code_one_and_its_reason(cli: Cli, tmp_path: Path):
    write(tmp_path / "mine.py", LATE.replace("== 1", "== 0"))
    done = cli("audit", "mine.py:FedAvg", "--against", "", *SMALL, *QUICK)
    assert done.code == 1
    assert "ValueError: no more" in done.out
    assert "internal error" not in done.err


def test_a_refused_cell_is_no_failure(cli: Cli):
    done = cli.succeed(
        "audit", "fedproto", "--against", "", *SMALL, *QUICK, "--defenses", "dp-sgd:noise_multiplier=1", "--name", "x"
    )
    assert "Refused" in done.out
    assert "fedproto cannot be trained under dp-sgd" in done.out


def test_a_dry_run_lists_the_cells_and_writes_nothing(cli: Cli, tmp_path: Path):
    defenses = ("--defenses", "none,dp-sgd:epsilon=8")
    done = cli.succeed("audit", "fedrep", *defenses, "--seeds", "2", *SMALL, *QUICK, "--dry-run")
    assert "fedrep-dp-sgd-epsilon-8-s1" in done.err
    assert "the attacks take up to about" in done.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "which method is to be audited"),
        (("fedrepp",), "did you mean fedrep"),
        (("gone.py:X",), "does not exist"),
        (("fedrep", "--against", "fedavgg"), "did you mean fedavg"),
        (("fedrep", "--attacks", "dlgg"), "did you mean dlg"),
        (("fedrep", "--attacks", ""), "at least one attack"),
        (("fedrep", "--defenses", "epsilon=8"), "without a defense before it"),
        (("fedrep", "--defenses", "dp-sgd:sigma=8"), "no setting 'sigma'"),
        (("fedrep", "--seeds", "0"), "--seeds is 0"),
        (("fedrep", "--set", "head"), "NAME=VALUE"),
        (("fedrep", "--set", "heads=3"), "no setting 'heads'"),
        (("fedrep", "--rounds", "0"), "rounds is 0"),
        (("fedrep", "--adversary", "nobody"), "nobody"),
        (("fedrep", "--kind", "both"), "kind is 'both'"),
        (("fedrep", "--name", "../x"), "not usable as a folder name"),
        (("fedrep", "--executor", "gpu"), "--executor gpu is not known"),
        (("--resume", "nowhere"), "nowhere/audit.json does not exist"),
        (("fedrep", "--resume", "nowhere"), "--resume takes the audit's own plan"),
    ],
)
def test_mistakes_end_in_one_line_and_leave_nothing(cli: Cli, tmp_path: Path, words: tuple[str, ...], said: str):
    assert said in cli.mistake("audit", *words)
    assert list(tmp_path.iterdir()) == []


def test_training_and_attacking_a_file_go_together_until_it_changes(cli: Cli, tmp_path: Path):
    write(tmp_path / "mine.py")
    cli.succeed("train", "--algo", "mine.py:FedAvg", *SMALL, "--name", "a", "--executor", "processes", "--workers", "2")
    attack = ("attack", "ig", "a", "--iterations", "2", "--restarts", "1", "--executor", "serial", "--lpips", "none")
    cli.succeed(*attack)
    (tmp_path / "mine.py").write_text(FEDAVG + "# a word more\n")
    assert "is not the one the run was made with" in cli.mistake(*attack)


def test_a_training_that_fails_late_names_round_client_and_line_and_is_not_resumed_with_other_code(
    cli: Cli, tmp_path: Path
):
    write(tmp_path / "mine.py", LATE)
    rounds = [("2" if SMALL[i - 1] == "--rounds" else word) for i, word in enumerate(SMALL)]
    failed = cli("train", "--algo", "mine.py:FedAvg", *rounds, "--name", "a")
    assert failed.code == 1
    assert "round 1, client 0" in failed.err
    assert "ValueError: no more" in failed.err
    assert 'mine.py", line' in failed.err
    assert "internal error" not in failed.err
    assert len((tmp_path / "runs/a/metrics.jsonl").read_text().splitlines()) == 1
    assert cli("train", "--resume", "a").code == 1  # the same code fails again
    write(tmp_path / "mine.py")
    assert "is not the one the run was made with" in cli.mistake("train", "--resume", "a")
