"""Accuracy of every method under one protocol: the tables in docs/tables, and the rows that they come from.

    python -m benchmarks.accuracy_tables digits                      all methods, 20 clients, Dirichlet 0.1, 20 rounds, 3 seeds
    python -m benchmarks.accuracy_tables mnist300 mnist70k.npz       ten methods, natural clients cut to 300 rows, 10 rounds

Runs that stand in the CSV file are not made again. Seconds there are of one thread on a busy machine: for the cost of a
round see benchmarks/bench_rounds.py, which measures all methods in turn.
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.bench_training import mnist300 as cut
from benchmarks.rows import Row, Table
from pflsec import api
from pflsec.core import registry
from pflsec.core.files import write_text

COLUMNS: tuple[str, ...] = ("method", "seed", "mean", "worst10", "global", "bytes_down", "bytes_up", "seconds")
TEN = ("fedavg", "scaffold", "fedrep", "ditto", "fedproto", "fedala", "fedcp", "gpfl", "pfedme", "apple", "local")

Job = tuple[str, int, dict[str, Any], str | None]
"""Method, seed, options, and the file of a dataset in place of the configured one."""

CHANGED: dict[str, dict[str, Any]] = {"pfedme": {"beta": 1.0}, "ditto": {"lam": 1.0}}
"""What in PFLlib's settings makes a method another one: at beta 0 the shared model never moves, at lam 0 nothing is shared."""
PACE = {"apple": 20.0}
"""PFLlib multiplies APPLE's learning rate by the number of clients: a core's slope is its share, 1/20, of the mixture's."""


def digits() -> list[Job]:
    """Return the runs of the table of all methods."""
    options = {"data": "digits", "alpha": 0.1, "clients": 20, "rounds": 20}
    return [(key, seed, options, None) for seed in range(3) for key in registry.names("algorithms")]


def mnist300(path: str) -> list[Job]:
    """Return the runs on PFLlib's division of MNIST with PFLlib's settings."""
    options = {"partition": "natural", "test": "given", "rounds": 10}
    common = {"lr": 0.005, "batch_size": 10, "local_epochs": 1}
    return [(key, 0, options | common | {"lr": 0.005 * PACE.get(key, 1)}, path) for key in TEN]


def run(job: Job) -> list[Row]:
    """Make one run in a folder that is thrown away; return its row."""
    key, seed, options, path = job
    dataset, preset, settings = None, None, {}
    if path:
        dataset, settings = cut(path), CHANGED.get(key, {})
        preset = "pfllib" if "pfllib" in registry.load("algorithms", key).presets else None
    given = {"algo": key, "seed": seed, "capture_rounds": "none", "settings": settings, **options}
    with tempfile.TemporaryDirectory() as folder:
        setup = api.plan_training(given, preset=preset, dataset=dataset)
        done = api.run_training(setup, name="run", runs_dir=Path(folder), executor="serial")
        metrics = done.metrics
    last = metrics.iloc[-1]
    row = {
        "method": key,
        "seed": seed,
        "mean": round(float(last["personal_accuracy_mean"]), 4),
        "worst10": round(float(last["personal_accuracy_worst10"]), 4),
        "global": None if pd.isna(last["global_accuracy"]) else round(float(last["global_accuracy"]), 4),
        "bytes_down": int(metrics["bytes_down"].sum()),
        "bytes_up": int(metrics["bytes_up"].sum()),
        "seconds": round(float(metrics["seconds_train"].median()), 3),
    }
    return [row]


def summary(table: pd.DataFrame, clients: int, rounds: int) -> str:
    """Return the Markdown table: means over seeds, the best method first."""
    found = []
    for key, group in table.groupby("method"):
        spread = "" if len(group) == 1 else f" ± {100 * group['mean'].std():.1f}"
        common = "" if group["global"].isna().all() else f"{100 * group['global'].mean():.1f}"
        per_client = [f"{group[c].mean() / clients / rounds / 1e3:,.1f}" for c in ("bytes_down", "bytes_up")]
        found.append((
            -group["mean"].mean(),
            f"| {key} | {100 * group['mean'].mean():.1f}{spread} | {100 * group['worst10'].mean():.1f} | {common} "
            f"| {per_client[0]} | {per_client[1]} |",
        ))  # fmt: skip
    head = (
        "| method | personal accuracy, % | worst tenth, % | global model, % | down, kB | up, kB |\n"
        "|---|---|---|---|---|---|"
    )
    return "\n".join([head, *(line for _, line in sorted(found))]) + "\n"


def main(words: Sequence[str]) -> None:
    name = words[0] if words else ""
    if name not in ("digits", "mnist300") or (name == "mnist300") != (len(words) == 2):
        sys.exit(__doc__)
    made = Table(f"accuracy-{name}", COLUMNS, ("method", "seed"), ("method", "seed"))
    jobs = digits() if name == "digits" else mnist300(words[1])
    table = made.fill(made.missing(jobs, key=lambda job: job[:2]), run)
    text = summary(table, 20, 20 if name == "digits" else 10)
    write_text(made.path.with_suffix(".md"), text)
    print(text)


if __name__ == "__main__":
    main(sys.argv[1:])
