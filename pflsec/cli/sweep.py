"""pflsec sweep."""

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from pflsec.cli.console import duration, megabytes, number, print_json, print_table, progress, say
from pflsec.cli.options import check_executor
from pflsec.core.errors import ConfigError


def sweep(
    file: Annotated[Path, typer.Argument(metavar="FILE.toml", help="The grid: see below.")],
    runs_dir: Annotated[Path, typer.Option(help="Folder of all runs; the sweep's is in it, by its name.")] = Path(
        "runs"
    ),
    executor: Annotated[
        str, typer.Option(help="auto, serial, processes or ray; the results are the same bits.")
    ] = "auto",
    workers: Annotated[int | None, typer.Option(help="Worker processes. [default: one per core]")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check, list the trainings, estimate, and stop.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")] = False,
) -> None:
    """Train a grid of methods, defenses, seeds and whatever else, attack every training, and report on all of them.

    A file has options of `pflsec train`, where a list is an axis of the grid, and of `pflsec attack`:

      name = "frontier"

      [train]

      algo = ["fedavg", "fedprox"]

      defense = [[], ["dp-sgd:epsilon=8"]]

      seed = [0, 1]

      [settings.fedprox]

      mu = [0.01, 0.1]

      [[attack]]

      name = "ig"

    The same command again goes on after any interruption: nothing that is finished is done again, and a changed file keeps
    what it has in common. Exit code 1: something failed; the rest is done.

    Examples:

      pflsec sweep frontier.toml --dry-run

      pflsec sweep frontier.toml --workers 4
    """
    check_executor(executor)
    if workers is not None and workers < 1:
        raise ConfigError(f"--workers is {workers}; it must be at least 1.")
    from pflsec.sweep.file import load
    from pflsec.sweep.folder import SweepFolder
    from pflsec.sweep.plan import price
    from pflsec.sweep.work import How

    made = load(file)
    say_cells(made.cells, made.attacks)
    cost = price(made.cells, made.attacks)
    say_price(cost)
    if dry_run:
        _print_dry(made, cost, json)
        return
    folder = SweepFolder(runs_dir / made.name, made)
    with progress(cost.units, "step") as bar:
        rows = folder.run(How(executor, workers, cost.paces, on_step=paced(bar)))
    failed = Counter(row["status"] for row in rows)["failed"]
    print_json({"path": str(folder.path), "rows": rows}) if json else _print_rows(rows)
    say(f"{len(rows)} rows, {failed} failed; tables, report and frontier in {folder.path}")
    if failed:
        raise typer.Exit(1)


def say_cells(cells: Sequence[Any], attacks: Sequence[Any]) -> None:
    """Say how much there is to do."""
    refused = sum(cell.config is None for cell in cells)
    apart = f", {refused} of them not applicable" if refused else ""
    say(f"{len(cells)} trainings{apart}; attacks on each: {', '.join(attack.label for attack in attacks) or 'none'}")


def say_price(cost: Any) -> None:
    """Say what it will cost, and how far that is to be trusted."""
    say(
        f"the trainings take about {duration(cost.seconds)} and {megabytes(cost.bytes)} on disk, less what is done already"
    )
    if cost.timed_on:
        say(
            f"the attacks take up to about {duration(cost.attacking)}, less where they converge early: a few iterations were "
            f"timed on {cost.timed_on}"
        )
    if unknown := [label for label, pace in cost.paces.items() if pace is None]:
        say(f"how long {', '.join(unknown)} will take is not known before there is a training to attack")


def paced(bar: Any) -> Any:
    """Return what a progress bar is told of each step, with the rate so far."""
    began, steps = time.monotonic(), [0]

    def on_step(note: str, done: int) -> None:
        steps[0] += 1
        rate = steps[0] / max(1e-9, time.monotonic() - began)
        bar.advance(f"{note} ({rate:.2g} steps/s)", done)

    return on_step


def _print_dry(made: Any, cost: Any, json: bool) -> None:
    rows = [
        {
            "training": cell.name,
            **cell.training.axes,
            "seconds": cell.seconds if cell.config else None,
            "victims": {a.label: a.victims(cell.config) for a in made.attacks} if cell.config else {},
            "status": "planned" if cell.config else "not-applicable",
            "reason": cell.refused,
        }
        for cell in made.cells
    ]
    if json:
        price = {
            "seconds": cost.seconds,
            "bytes": cost.bytes,
            "attack_seconds": cost.attacking if cost.timed_on else None,
        }
        print_json({"name": made.name, "cells": rows, **price})
        return
    shown = [
        [row["training"], *(row.get(axis) for axis in made.axes), number(row["seconds"], 1), _victims(row)]
        for row in rows
    ]
    print_table("", ["training", *made.axes, "seconds", "victims of each attack"], shown)


def _victims(row: Any) -> str:
    return f"not applicable: {row['reason']}" if row["reason"] else " ".join(map(str, row["victims"].values()))


def _print_rows(rows: Sequence[Any]) -> None:
    columns = [
        "training",
        "attack",
        "accuracy %",
        "epsilon",
        "PSNR dB",
        "best",
        "blind",
        "controls",
        "status",
        "reason",
    ]
    shown = []
    for row in rows:
        accuracy = None if row["accuracy"] is None else 100 * row["accuracy"]
        leakage = [number(row.get(name), 1) for name in ("psnr_median", "psnr_worst", "psnr_blind")]
        ended = [row.get("controls"), row["status"], row["reason"]]
        shown.append(
            [row["training"], row.get("attack"), number(accuracy, 1), number(row["epsilon"]), *leakage, *ended]
        )
    print_table("Medians over victims (best: the highest PSNR)", columns, shown)
