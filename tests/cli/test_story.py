"""The whole way with the real program: train, attack, report, look."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

PROGRAM = [sys.executable, "-m", "pflsec.cli.app"]


def ask(folder: Path, *words: str) -> Any:
    """Return the JSON that a command prints; nothing else may be on stdout."""
    done = subprocess.run([*PROGRAM, *words, "--json"], capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return json.loads(done.stdout)


def test_from_training_to_the_page(tmp_path: Path):
    train = "train --algo fedavg --model mlp --clients 4 --rounds 1 --partition iid --victims 1 --capture-clients 0,3"
    run = ask(tmp_path, *train.split())
    assert run["run"] == "fedavg-digits-s0"
    attacks = ask(
        tmp_path,
        *["attack", "dlg,ig", "--iterations", "25", "--restarts", "1", "--set", "lr=0.5", "--executor", "serial"],
    )
    assert [len(found["scores"]) for found in attacks] == [2, 2]
    dlg = attacks[0]["scores"]
    assert all(row["identified"] == 1 and row["psnr"] > 40 and row["label_correct"] == 1 for row in dlg)
    assert all(Path(tmp_path, found["path"], "gallery.png").stat().st_size > 1000 for found in attacks)
    report = ask(tmp_path, "report")
    page = (tmp_path / report["page"]).read_text()
    assert "fedavg" in page
    assert 'src="http' not in page
    (listed,) = ask(tmp_path, "list", "runs")
    assert (listed["state"], listed["attacks"]) == ("done", 2)
    assert ask(tmp_path, "show", "fedavg-digits-s0")["state"] == "done"


def test_a_reader_that_stops_listening_is_no_error():
    done = subprocess.run(
        f"{' '.join(PROGRAM)} list algorithms --json | head -c 1",
        shell=True,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("[", "")
