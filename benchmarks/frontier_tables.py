"""What defenses cost in accuracy and buy in leakage: the tables in docs/tables, and the rows that they come from.

    python -m benchmarks.frontier_tables digits [WORKERS]                       4 methods, 6 defenses, 2 seeds, 10 rounds
    python -m benchmarks.frontier_tables mnist300 mnist70k.npz [WORKERS]        the same on natural clients cut to 300 rows
    python -m benchmarks.frontier_tables naive [WORKERS]                        fedavg, every heuristic, naive and adaptive

Attack: inverting-gradients on one image and one local step, from an attacker who knows of the defense (`naive`: from both),
on a victim of each of four clients before training and in the last round. Runs whose rows stand in the CSV file are not
made again. A method that a defense refuses has one row that says why.
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from benchmarks.bench_training import mnist300 as cut
from benchmarks.rows import Row, Table, inverted
from pflsec import api
from pflsec.core import registry
from pflsec.core.errors import PflsecError
from pflsec.core.files import write_text

ROUNDS, ITERATIONS = 10, 250
METHODS = ("fedavg", "fedrep", "ditto", "fedproto")
DEFENSES = (
    "none",
    "dp-sgd:epsilon=8",
    "dp-sgd:epsilon=50",
    "prune:keep=0.1",
    "gaussian:std=1,relative=true",
    "qsgd:bits=8",
)
HEURISTICS = (
    "clip:bound=0.1", "gaussian:std=0.3,relative=true", "gaussian:std=1,relative=true", "laplace:scale=0.7,relative=true",
    "prune:keep=0.1", "prune:keep=0.01", "prune:keep=0.01,feedback=true", "qsgd:bits=8", "qsgd:bits=4", "sign", "fp16", "precode",
    "none",
)  # fmt: skip
COLUMNS = (
    "method", "defense", "seed", "attacker", "accuracy", "worst10", "bytes_up", "epsilon", "round", "client", "victim", "status",
    "attack_valid", "psnr_capped", "ssim", "psnr_blind", "label_correct", "identified", "reason",
)  # fmt: skip


class Job(NamedTuple):
    """One training with its attacks."""

    method: str
    defense: str
    seed: int
    attackers: tuple[str, ...]
    file: str | None


def jobs(what: str, file: str | None) -> list[Job]:
    """Return all runs of a table, those first that say most."""
    if what == "naive":
        return [Job("fedavg", d, 0, ("adaptive", "naive") if d != "none" else ("adaptive",), None) for d in HEURISTICS]
    return [Job(m, _fitting(m, d), seed, ("adaptive",), file) for seed in range(2) for d in DEFENSES for m in METHODS]


def _fitting(method: str, defense: str) -> str:
    """Return a defense as the method can be trained under it: what is sent of raw data needs noise of its own."""
    partial = registry.load("algorithms", method).dp_support.startswith("partial")
    return f"{defense}+dp-release" if partial and defense.startswith("dp-sgd") else defense


def run(job: Job) -> list[Row]:
    """Train and attack in a folder that is thrown away; return a row for each victim and attacker."""
    same = {"method": job.method, "defense": job.defense, "seed": job.seed}
    dataset = cut(job.file) if job.file else None
    options: dict[str, Any] = {"partition": "natural", "test": "given"} if job.file else {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            setup = api.plan_training(
                {
                    "algo": job.method,
                    "rounds": ROUNDS,
                    "seed": job.seed,
                    "defense": [] if job.defense == "none" else job.defense.split("+"),
                    "capture_rounds": "first,last",
                    "capture_clients": "0,1,2,3",
                    "victims": 1,
                    **options,
                },
                dataset=dataset,
            )
            trained = api.run_training(setup, name="run", runs_dir=Path(folder), executor="serial")
        except PflsecError as error:
            return [same | {"attacker": "", "status": "not-applicable", "reason": str(error)}]
        last = trained.metrics.iloc[-1]
        same |= {
            "accuracy": float(last["personal_accuracy_mean"]),
            "worst10": float(last["personal_accuracy_worst10"]),
            "bytes_up": int(trained.metrics["bytes_up"].sum()),
            "epsilon": None if pd.isna(last["epsilon"]) else float(last["epsilon"]),
        }
        return [row for attacker in job.attackers for row in _attacked(trained, folder, attacker, same)]


def _attacked(trained: api.Run, folder: str, attacker: str, same: Row) -> list[Row]:
    found = inverted(trained, folder, ITERATIONS, controls=False, naive=attacker == "naive")
    kept = [c for c in COLUMNS if c not in (*same, "attacker")]
    return [{**same, "attacker": attacker, **{c: row[c] for c in kept}} for row in found]


def frontier(table: pd.DataFrame) -> str:
    """Return the Markdown table: accuracy, and medians over victims in dB."""
    lines = [
        "| method | defense | accuracy, % | ± seeds | epsilon | sent, MB | untrained | last round | worst | blind, dB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (method, defense), group in table.groupby(["method", "defense"], sort=False):
        if group["accuracy"].isna().all():
            lines.append(f"| {method} | {defense} | refused: {group['reason'].iloc[0].split('. ')[0]} | | | | | | | |")
            continue
        runs = group.groupby("seed").first()
        epsilon = "" if runs["epsilon"].isna().all() else f"{runs['epsilon'].max():.2f}"
        cells = [f"{100 * runs['accuracy'].mean():.1f}", _number(100 * runs["accuracy"].std()), epsilon]
        cells += [f"{runs['bytes_up'].mean() / 1e6:.1f}"]
        cells += [_number(group[group["round"] == t]["psnr_capped"].median()) for t in (0, ROUNDS - 1)]
        cells += [_number(group["psnr_capped"].max()), _number(group["psnr_blind"].median())]
        lines.append(f"| {method} | {defense} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def trade(table: pd.DataFrame) -> str:
    """Return the Markdown table of naive against adaptive attackers: medians over victims in dB."""
    lines = [
        "| defense | accuracy, % | untrained: naive | adaptive | last round: naive | adaptive |",
        "|---|---|---|---|---|---|",
    ]
    for defense, group in table.groupby("defense", sort=False):
        cells = [
            _number(group[(group["round"] == t) & (group["attacker"] == who)]["psnr_capped"].median())
            for t in (0, ROUNDS - 1)
            for who in ("naive", "adaptive")
        ]
        lines.append(f"| {defense} | {100 * group['accuracy'].iloc[0]:.1f} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    return "–" if pd.isna(value) else f"{value:.1f}"


def main(words: Sequence[str]) -> None:
    what, rest = (words[0] if words else ""), list(words[1:])
    if what not in ("digits", "mnist300", "naive") or (what == "mnist300" and not rest):
        sys.exit(__doc__)
    file = rest.pop(0) if what == "mnist300" else None
    made = Table(
        "defenses-naive" if what == "naive" else f"frontier-{what}",
        COLUMNS,
        ("method", "defense", "seed"),
        ("method", "defense", "seed", "attacker", "round", "client", "victim"),
    )
    todo = made.missing(jobs(what, file), key=lambda job: job[:3])
    table = made.fill(todo, run, int(rest[0]) if rest else None)
    text = trade(table) if what == "naive" else frontier(table)
    write_text(made.path.with_suffix(".md"), text)
    print(text)


if __name__ == "__main__":
    main(sys.argv[1:])
