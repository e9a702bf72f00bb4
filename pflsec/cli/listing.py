"""pflsec list."""

from pathlib import Path
from typing import Annotated, Any

import typer

from pflsec.cli.console import out, print_json, print_table
from pflsec.core import registry
from pflsec.core.errors import ConfigError, RunError, unknown
from pflsec.runtime.folder import RunFolder

KINDS = (*registry.GROUPS, "runs")


def listing(
    what: Annotated[
        str, typer.Argument(metavar="WHAT", help="algorithms, attacks, defenses, datasets, models or runs.")
    ],
    runs_dir: Annotated[Path, typer.Option(help="Folder of all runs.")] = Path("runs"),
    json: Annotated[bool, typer.Option("--json", help="Print as JSON on stdout.")] = False,
) -> None:
    """List methods, attacks, defenses, datasets, models or runs.

    Examples:

      pflsec list algorithms

      pflsec list runs --json
    """
    if what not in KINDS:
        raise ConfigError(unknown("list", what, KINDS))
    rows = _runs(runs_dir) if what == "runs" else [_entry(what, name) for name in registry.names(what)]
    if json:
        print_json(rows)
    elif not rows:
        out.print(f"no {what} yet")
    else:
        print_table(what, list(rows[0]), [list(row.values()) for row in rows])


def _entry(group: str, name: str) -> dict[str, Any]:
    card = registry.card(group, name)
    row: dict[str, Any] = {"key": name}
    if group == "algorithms":
        wire = card.sections.get("Wire", "").partition("     ")[0]
        row |= {"family": card.family, "wire": wire, "source": card.sections.get("Source", "")}
    elif group == "attacks":
        row |= {"aliases": ", ".join(card.attributes.get("aliases", ())), "source": card.sections.get("Source", "")}
    else:
        row |= {k.lower(): card.sections.get(k, "") for k in ("Source", "Shape", "Input", "Size") if k in card.sections}
    return row | {"summary": card.title}


def _runs(runs_dir: Path) -> list[dict[str, Any]]:
    rows = []
    for folder in RunFolder.all(runs_dir):
        try:
            manifest = folder.manifest()
            config = manifest["config"]
            facts = {k: config[k] for k in ("algo", "data", "rounds", "seed")}
            row = {"run": folder.path.name, "state": manifest["state"], **facts}
        except (RunError, KeyError, TypeError):
            row = {"run": folder.path.name, "state": "damaged", "algo": "", "data": "", "rounds": "", "seed": ""}
        rows.append(row | {"attacks": len(list(folder.attacks.glob("*/attack.json")))})
    return rows
