"""A run's folder: what lies where, written atomically and readable by nobody else."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pflsec.core.errors import RunError
from pflsec.core.files import append_line, disk_errors, read_json, safe_name, to_csv, to_json, write_json, write_text

SCHEMA = 1
CLIENT_COLUMNS = (
    "round",
    "client",
    "train_samples",
    "test_samples",
    "last_trained_round",
    "accuracy_post_agg",
    "accuracy_post_local",
    "train_loss",
    "uploaded",
    "epsilon",
)


class RunFolder:
    """runs/<name>/ with run.json, metrics.jsonl, clients.csv, captures/, vault/, attacks/ and report/."""

    def __init__(self, path: Path):
        self.path = path
        self.captures = path / "captures"
        self.vault = path / "vault"
        self.attacks = path / "attacks"
        self.checkpoints = path / "checkpoints"

    @staticmethod
    def create(runs_dir: Path, name: str) -> "RunFolder":
        """Make an empty run folder (mode 0700: it holds private images). An earlier run of that name is kept: the new one
        gets the next free number."""
        safe_name(name, "run name")
        with disk_errors(runs_dir / name):
            runs_dir.mkdir(parents=True, exist_ok=True)
            for number in range(1, 10_000):
                path = runs_dir / safe_name(name if number == 1 else f"{name}-{number}", "run name")
                try:
                    path.mkdir(mode=0o700)
                except FileExistsError:
                    continue
                for part in ("captures", "vault", "attacks", "checkpoints"):
                    (path / part).mkdir(mode=0o700)
                return RunFolder(path)
        raise RunError(f"{runs_dir} already holds 10,000 runs called {name}; choose another --name.")

    @staticmethod
    def open(run: str | Path | None, runs_dir: Path) -> "RunFolder":
        """Return an existing run by folder or name; None: the newest. Raises RunError saying what is there instead."""
        if run is None:
            runs = RunFolder.all(runs_dir)
            if not runs:
                raise RunError(f"there is no run in {runs_dir}. Make one with: pflsec train --algo fedavg")
            return max(runs, key=lambda r: (r.path / "run.json").stat().st_mtime)
        path = Path(run)
        if not is_run(path):
            path = runs_dir / safe_name(str(run), "run") if path.name == str(run) else path
        if not is_run(path):
            known = ", ".join(sorted(r.path.name for r in RunFolder.all(runs_dir))) or "none"
            raise RunError(f"run '{run}' does not exist (no {path / 'run.json'}). Runs in {runs_dir}: {known}.")
        return RunFolder(path)

    @staticmethod
    def all(runs_dir: Path) -> list["RunFolder"]:
        """Return all runs in a folder, by name."""
        return [RunFolder(p.parent) for p in sorted(runs_dir.glob("*/run.json")) if p.is_file()]

    def manifest(self) -> dict[str, Any]:
        """Return run.json. Raises RunError when it is missing, damaged or of another schema version."""
        manifest = read_json(self.path / "run.json", f"run '{self.path.name}'")
        found = manifest.get("schema") if isinstance(manifest, dict) else None
        if found != SCHEMA:
            raise RunError(
                f"run '{self.path.name}' has schema version {found}; this version of pflsec reads {SCHEMA}. "
                "Train it again, or use the version that wrote it."
            )
        return manifest

    def write_manifest(self, manifest: Mapping[str, Any]) -> None:
        """Replace run.json."""
        write_json(self.path / "run.json", manifest)

    def last_metrics(self) -> dict[str, Any]:
        """Return the newest whole line of metrics.jsonl, {} where there is none; a kill may have torn the last one."""
        path = self.path / "metrics.jsonl"
        lines = path.read_text(encoding="utf8", errors="replace").splitlines() if path.exists() else []
        for line in reversed(lines):
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict):
                return found
        return {}

    def add_metrics(self, row: Mapping[str, Any]) -> None:
        """Append one round to metrics.jsonl."""
        append_line(self.path / "metrics.jsonl", to_json(row, indent=None))

    def add_clients(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append one round's clients to clients.csv."""
        path = self.path / "clients.csv"
        header, _, lines = to_csv(CLIENT_COLUMNS, rows).partition("\n")
        if not path.exists():
            write_text(path, header + "\n")
        if lines:
            append_line(path, lines.removesuffix("\n"))

    def size(self) -> int:
        """Return the bytes of all files in the folder."""
        return sum(p.stat().st_size for p in self.path.rglob("*") if p.is_file())


def is_run(path: Path) -> bool:
    """Return whether a folder is a run's. A name that the system refuses, such as one that is too long, is none."""
    try:
        return (path / "run.json").is_file()
    except OSError:
        return False


def attack_folder(run: RunFolder, name: str) -> Path:
    """Return the folder of one attack's results."""
    return run.attacks / safe_name(name, "attack id")


def secure(path: Path) -> None:
    """Make a folder readable by its owner alone."""
    with disk_errors(path):
        path.mkdir(parents=True, exist_ok=True)
        os.chmod(path, 0o700)
