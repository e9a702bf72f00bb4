"""pflsec new."""

from pathlib import Path
from typing import Annotated

import typer

from pflsec.cli.console import print_json, say
from pflsec.core.errors import ConfigError
from pflsec.core.files import disk_errors

app = typer.Typer(help="Begin something of your own.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _group() -> None:
    """Begin something of your own in the current folder."""


@app.command("algorithm")
def algorithm(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the file and, in capitals, of the class.")],
    json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON on stdout.")] = False,
) -> None:
    """Write NAME.py, a method that works, and test_NAME.py into the current folder.

    Examples:

      pflsec new algorithm mymethod
    """
    from pflsec.audit.skeleton import shadows, skeleton

    kind, files = skeleton(name)
    for file in files:
        if Path(file).exists():
            raise ConfigError(f"{file} is already here, and is not overwritten; choose another name or folder.")
    if shadows(name):
        raise ConfigError(f"{name}.py would hide the installed module {name}; choose another name.")
    for file, text in files.items():
        with disk_errors(Path(file)), Path(file).open("x", encoding="utf8") as stream:
            stream.write(text)
    if json:
        print_json({"files": list(files), "method": f"{name}.py:{kind}"})
        return
    say(f"wrote {' and '.join(files)}; next:")
    say(f"  python -m pytest test_{name}.py    (pip install pytest, where it is missing)")
    say(f"  pflsec audit {name}.py:{kind} --dry-run    (what an audit takes; then without --dry-run)")
