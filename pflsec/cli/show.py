"""pflsec show."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from pflsec.cli.console import as_text, out, print_json, print_table
from pflsec.core import registry
from pflsec.core.errors import ConfigError, RunError, unknown
from pflsec.runtime.folder import RunFolder, is_run


def show(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="A method (also FILE.py:Class), attack, defense, dataset, model or run."),
    ],
    runs_dir: Annotated[Path, typer.Option(help="Folder of all runs.")] = Path("runs"),
    json: Annotated[bool, typer.Option("--json", help="Print as JSON on stdout.")] = False,
) -> None:
    """Show the card of a method, attack, defense, dataset or model, or what a run was.

    Examples:

      pflsec show fedrep

      pflsec show ig

      pflsec show mymethod.py:MyMethod

      pflsec show fedrep-digits-s0
    """
    for group in registry.GROUPS:
        try:
            key = registry.find(group, name)
        except ConfigError:
            if ".py" in name:  # a method of the user's own, which only this group has
                raise
            continue
        card = registry.card(group, key)
        print_json(asdict(card)) if json else _print_card(card)
        return
    path = Path(name) if is_run(Path(name)) else runs_dir / name
    if ".." in Path(name).parts or not is_run(path):
        known = [n for group in registry.GROUPS for n in registry.names(group)]
        raise ConfigError(unknown("name", name, [*known, *(run.path.name for run in RunFolder.all(runs_dir))]))
    manifest = RunFolder(path).manifest()
    if json:
        print_json(manifest)
        return
    try:
        _print_run(manifest)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunError(f"run '{path.name}' is damaged: run.json lacks or garbles {error}.") from error


def _print_card(card: registry.Card) -> None:
    out.print(f"{card.key}: {card.title}", markup=False, style="bold")
    home = (
        f"{card.group.removesuffix('s')}, {card.family}" if card.group == "algorithms" else card.group.removesuffix("s")
    )
    print_table("", ["", ""], [["Kind", home], *([k, v] for k, v in card.sections.items())])
    rows = _wire(card.attributes)
    if rows:
        print_table("\nWire", ["direction", "item", "kind"], rows)
    if card.settings:
        sources = sorted({k for s in card.settings for k in s.cited}, key=lambda k: (k != "paper", k))
        columns = ["setting", "default", "range", *sources, "meaning"]
        how = f"--defense {card.key}:NAME=VALUE" if card.group == "defenses" else "--set NAME=VALUE"
        print_table(
            f"\nSettings ({how})",
            columns,
            [
                [s.name, s.default, s.rule or _choices(s.type), *(s.cited.get(k) for k in sources), s.about]
                for s in card.settings
            ],
        )
    for name, values in card.attributes.get("presets", {}).items():
        text = ", ".join(f"{k}={as_text(v)}" for k, v in values.items())
        out.print(f"\n--preset {name}: {text}", markup=False)


def _wire(attributes: dict[str, Any]) -> list[list[str]]:
    rows = [
        [direction, item.rstrip("?") + (" (optional)" if item.endswith("?") else ""), kind]
        for direction in ("down", "up")
        for item, kind in attributes.get(direction, {}).items()
    ]
    return rows + [["private", f"{part}.*", "weights"] for part in attributes.get("private", ())]


def _choices(annotation: str) -> str:
    return annotation.removeprefix("Literal[").removesuffix("]") if annotation.startswith("Literal") else annotation


def _print_run(manifest: dict[str, Any]) -> None:
    title = f"{manifest['name']}: {manifest['algorithm']['title']}"
    facts = {
        "state": manifest["state"] + (f" ({manifest['reason']})" if manifest.get("reason") else ""),
        "started": manifest["started"],
        "model": f"{manifest['model']['name']}, {manifest['model']['parameters']:,} parameters",
        "BatchNorm statistics": manifest["model"].get("bn_buffers", "n/a"),
        "clients": str(len(manifest["data"]["histogram"]["train"]["per_client"])),
        "differential privacy": _privacy(manifest["dp"]),
        "revision": manifest.get("git") or "",
    }
    covered = manifest["dp"]["coverage"] if manifest["dp"]["enabled"] else {}
    wire = [
        [r["direction"], r["item"], r["kind"], r["numbers"]]
        + ([covered.get(r["item"]) if r["direction"] == "up" else None] if covered else [])
        for r in manifest["wire"]
    ]
    config = [[k, as_text(v)] for k, v in manifest["config"].items()]
    out.print(title, markup=False, style="bold")
    print_table("", ["", ""], [[k, v] for k, v in facts.items() if v])
    print_table("\nWire", ["direction", "item", "kind", "numbers", *(["guarantee"] if covered else [])], wire)
    print_table("\nConfiguration", ["option", "value"], config)


def _privacy(dp: dict[str, Any]) -> str:
    """Return the privacy of a run in words; epsilon over rounds stands in metrics.jsonl and clients.csv."""
    if not dp["enabled"]:
        return "off"
    noise, delta = dp["noise_multiplier"], dp["delta"]
    fixed = "; the noise was fixed, for a test: no guarantee" if dp["test_seed"] else ""
    return (
        f"{dp['defense']}, {dp['guarantee']}; noise multiplier {noise['least']:.3g} to {noise['most']:.3g}, "
        f"delta {delta['least']:.3g} to {delta['most']:.3g}{fixed}"
    )
