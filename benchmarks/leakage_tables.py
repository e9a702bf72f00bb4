"""Leakage of every method under one protocol: the tables in docs/tables, and the rows that they come from.

    python -m benchmarks.leakage_tables [WORKERS]

Digits, 20 clients, Dirichlet 0.1, 10 rounds. Victims: two of each of four clients, before training and in the last round.
Attack: inverting-gradients, on one image and one local step for all methods; on four images, and on five steps, for six of them
(joint alone).
Runs whose rows stand in the CSV file are not made again.

    joint      the wire alone; what the client hides is rebuilt from the log, or optimised with the image
    cotangent  the wire alone; the unknown gradient at the features in place of a hidden head, where that can be posed
    oracle     labels and private items given; not run where nothing is hidden from the wire, since it would be the same attack
"""

import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import pandas as pd

from benchmarks.rows import Table, inverted
from pflsec import api
from pflsec.core import registry
from pflsec.core.files import write_text

ROUNDS, ITERATIONS = 10, 250
SIX = ("fedavg", "fedrep", "ditto", "fedproto", "fedbabu", "scaffold")
HIDING = {"cotangent": {"hidden": "cotangent"}, "joint": {}, "oracle": {"knowledge": "oracle"}}
COLUMNS: tuple[str, ...] = (
    "method", "batch", "steps", "hiding", "round", "client", "victim", "labels", "hidden", "status", "attack_valid", "reason",
    "objective", "psnr_capped", "ssim", "psnr_blind", "label_correct", "identified", "seconds",
)  # fmt: skip

Job = tuple[str, int, int]
"""Method, images in a victim batch, local steps on it."""


def jobs() -> list[Job]:
    """Return all runs of the tables."""
    keys = [key for key in registry.names("algorithms") if key != "local"]
    return [(key, 1, 1) for key in keys] + [(key, b, k) for key in SIX for b, k in ((4, 1), (1, 5))]


def run(job: Job) -> list[dict[str, Any]]:
    """Train and attack in a folder that is thrown away; return a row for each victim and way of treating what is hidden."""
    key, batch, steps = job
    with tempfile.TemporaryDirectory() as folder:
        trained = api.train(
            algo=key,
            rounds=ROUNDS,
            capture_rounds="first,last",
            capture_clients="0,1,2,3",
            victims=2,
            victim_batch=batch,
            victim_steps=steps,
            eval_every=ROUNDS,
            runs_dir=folder,
        )
        found: list[dict[str, Any]] = []
        for hiding in ("joint", "oracle", "cotangent"):
            secrets = {row["hidden"] for row in found if row["hiding"] == "joint"}
            one = batch == steps == 1
            if hiding == "joint" or (one and "joint" in secrets) or (one and hiding == "oracle" and secrets - {"none"}):
                found += _attack(trained, folder, hiding)
    return [{"method": key, "batch": batch, "steps": steps, **row} for row in found]


def _attack(trained: api.Run, folder: str, hiding: str) -> list[dict[str, Any]]:
    found = inverted(trained, folder, ITERATIONS, **HIDING[hiding])
    return [{"hiding": hiding} | {c: row[c] for c in COLUMNS[4:]} for row in found]


def summary(table: pd.DataFrame, batch: int, steps: int) -> str:
    """Return the Markdown table: medians over victims in dB, before training and in the last round."""
    chosen = table[(table["batch"] == batch) & (table["steps"] == steps)]
    lines = [
        "| method | hidden | untrained: joint | cotangent | oracle | last round: joint | cotangent | oracle | best | ≥ 20 dB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    ordered = sorted(chosen.groupby("method"), key=lambda pair: -_median(pair[1], "joint"))
    for key, group in ordered:
        wire = group[group["hiding"] == "joint"]
        cells = [
            _cell(group[group["round"] == t], hiding)
            for t in (0, ROUNDS - 1)
            for hiding in ("joint", "cotangent", "oracle")
        ]
        hidden = " / ".join(sorted({str(h) for h in wire["hidden"].dropna()})) or "–"
        leaks = int((wire["psnr_capped"] >= 20).sum())
        best = group["psnr_capped"].max()
        lines.append(f"| {key} | {hidden} | {' | '.join(cells)} | {best:.1f} | {leaks} of {len(wire)} |")
    return "\n".join(lines) + "\n"


def _median(group: pd.DataFrame, hiding: str) -> float:
    value = group[group["hiding"] == hiding]["psnr_capped"].median()
    return -1.0 if pd.isna(value) else float(value)


def _cell(group: pd.DataFrame, hiding: str) -> str:
    value = _median(group, hiding)
    return "–" if value < 0 else f"{value:.1f}"


def main(words: Sequence[str]) -> None:
    order = ("batch", "steps", "method", "hiding", "round", "client", "victim")
    made = Table("leakage-digits", COLUMNS, ("method", "batch", "steps"), order)
    table = made.fill(made.missing(jobs(), key=lambda job: job), run, int(words[0]) if words else None)
    parts = [f"B = {b}, K = {k}\n\n{summary(table, b, k)}" for b, k in ((1, 1), (4, 1), (1, 5))]
    write_text(made.path.with_suffix(".md"), "\n".join(parts))


if __name__ == "__main__":
    main(sys.argv[1:])
