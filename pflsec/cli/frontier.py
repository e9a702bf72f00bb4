"""pflsec frontier."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from pflsec.cli.console import print_json, print_table, say
from pflsec.core.errors import RunError
from pflsec.runtime.folder import RunFolder


def frontier(
    runs: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN ...]", help="Runs; nothing: all in --runs-dir.")
    ] = None,
    x: Annotated[str, typer.Option("--x", help="leakage, ssim, identified or epsilon: less is better.")] = "leakage",
    y: Annotated[str, typer.Option("--y", help="accuracy, global or worst10: more is better.")] = "accuracy",
    out: Annotated[Path | None, typer.Option(help="Folder of the figure. [default: frontier/ in --runs-dir]")] = None,
    runs_dir: Annotated[Path, typer.Option(help="Folder of all runs.")] = Path("runs"),
    json: Annotated[bool, typer.Option("--json", help="Print the points as JSON on stdout.")] = False,
) -> None:
    """Show which runs are accurate and private, and which no other run beats in both.

    Examples:

      pflsec frontier

      pflsec frontier run-a run-b --x identified --y worst10

      pflsec frontier --runs-dir audits/fedrep-digits/runs
    """
    folders = [RunFolder.open(run, runs_dir) for run in runs] if runs else RunFolder.all(runs_dir)
    if not folders:
        raise RunError(f"there is no run in {runs_dir}. Make one with: pflsec train --algo fedavg")
    from pflsec.reports.frontier import table, write

    where = out or runs_dir / "frontier"
    found = write([folder.path for folder in folders], where, x, y)
    if json:
        print_json({"points": [asdict(p) for p in found.points], "blind": found.blind, "missing": found.missing})
        return
    header, *rows = table(found)
    print_table("", header, rows)
    for name, reason in found.missing.items():
        say(f"without a point: {name}: {reason}")
    for caution in found.cautions:
        say(caution)
    if found.blind is not None:
        say(f"a blind guess, without any message: {found.blind:.1f} dB")
    say(f"figure and page: {where / 'index.html'}")
