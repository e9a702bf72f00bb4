"""pflsec report."""

from pathlib import Path
from typing import Annotated

import typer

from pflsec.cli.console import print_json, say


def report(
    runs: Annotated[list[str] | None, typer.Argument(metavar="[RUN ...]", help="Runs; nothing: the newest.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the report. [default: report/ in the run]")] = None,
    runs_dir: Annotated[Path, typer.Option(help="Folder of all runs.")] = Path("runs"),
    no_originals: Annotated[
        bool, typer.Option("--no-originals", help="Leave out the victims' images and all made from them.")
    ] = False,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print where things are as JSON on stdout.")] = False,
) -> None:
    """Write one HTML page with accuracy and leakage of one run, or of several side by side.

    Examples:

      pflsec report

      pflsec report run-a run-b --out comparison
    """
    from pflsec import api

    page = api.report(runs or None, out=out, runs_dir=runs_dir, originals=not no_originals)
    if json:
        print_json({"page": str(page), "folder": str(page.parent)})
    else:
        say(f"report: {page.resolve()}")
    if open_page:
        typer.launch(str(page))
