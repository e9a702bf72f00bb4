"""pflsec frontier."""

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
    x: Annotated[
        str,
        typer.Option("--x", help="leakage (of texts: recall), recall, ssim, identified or epsilon: less is better."),
    ] = "leakage",
    y: Annotated[str, typer.Option("--y", help="accuracy, global or worst10: more is better.")] = "accuracy",
    out: Annotated[Path | None, typer.Option(help="Folder of the figure. [default: frontier/ in --runs-dir]")] = None,
    runs_dir: Annotated[Path, typer.Option(help="Folder of all runs.")] = Path("runs"),
    json: Annotated[bool, typer.Option("--json", help="Print the points as JSON on stdout.")] = False,
) -> None:
    """Show which methods are accurate and private, and which no other beats in both; runs that differ by seed alone are one.

    Examples:

      pflsec frontier

      pflsec frontier run-a run-b --x identified --y worst10

      pflsec frontier --runs-dir audits/fedrep-digits/runs
    """
    folders = [RunFolder.open(run, runs_dir) for run in runs] if runs else RunFolder.all(runs_dir)
    if not folders:
        raise RunError(f"there is no run in {runs_dir}. Make one with: pflsec train --algo fedavg")
    from pflsec.reports.frontier import X, table
    from pflsec.reports.frontier_page import as_dict, write

    where = out or runs_dir / "frontier"
    found = write([folder.path for folder in folders], where, x, y)
    if json:
        print_json(as_dict(found))
        return
    header, *rows = table(found)
    print_table("", header, rows)
    for name, reason in found.missing.items():
        say(f"without a point: {name}: {reason}")
    for sentence in (*found.controls, *found.cautions):
        say(sentence)
    if found.blind is not None:
        unit = " dB" if found.x == "leakage" else ""
        say(f"a blind guess, without any message: {X[found.x].written(found.blind)}{unit}")
    say(f"page: {where / 'index.html'}; beside it the figure as PNG, SVG and PDF, the table as CSV, JSON and LaTeX")
