"""The report: one HTML file that needs no other file and no network; its tables and figures also as files."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from pflsec.core.errors import RunError
from pflsec.core.files import disk_errors, write_text
from pflsec.reports import charts, exports, figures, frontier, grids, html, parts, tables, texts, threats, words
from pflsec.reports.commands import commands
from pflsec.reports.grids import Grid
from pflsec.reports.groups import Group, by_seed
from pflsec.reports.load import AttackData, RunData, load_runs
from pflsec.reports.parts import Interactive, Picture
from pflsec.reports.words import number, percent

WITHHELD = (
    "Pictures of the victims' images were left out on request (--no-originals): neither originals nor "
    "reconstructions, which show the same data, are part of this report."
)
OPTIONAL = ("leakage-by-round", "tokens", "mixed", "privacy", "norms")
"""Tables that are made only where there is something in them."""
FEW_LINES = 6
"""Up to so many lines the figure of the norms is open."""
Row = dict[str, Any]
Sections = Sequence[tuple[str, Sequence[str]]]
Made = dict[str, tuple[pd.DataFrame, Grid]]
"""Tables by name, as numbers and as the page shows them."""


@dataclass(frozen=True)
class Texts:
    """The gallery of an attack on texts, as text: the first of `total`."""

    tellings: list[texts.Telling]
    total: int


def write(run_paths: Sequence[Path], out: Path, originals: bool = True, verdict: Sections = ()) -> Path:
    """Write out/index.html, out/tables/*.csv, *.json and *.tex, out/figures/*.png, *.svg and *.pdf; return the page's path.

    verdict    titled lists of sentences that the page begins with, such as an audit's
    originals  False: nothing that shows a victim's image, so no gallery; one of an earlier report is deleted
    Raises RunError when a run is damaged, none is given, or `out` cannot be written.
    """
    if not run_paths:
        raise RunError("a report needs at least one run; train one with: pflsec train --algo fedavg")
    runs = load_runs(run_paths)
    groups = by_seed(runs)
    fronts = _frontiers(runs)
    made = _tables(runs, groups) | {
        f"frontier-{name}" if name else "frontier": (parts.frontier_table(found), grids.frontier(found))
        for name, found in fronts.items()
    }
    for name, (table, grid) in made.items():
        exports.write(out / "tables", name, table, grid)
    _forget_galleries(out / "figures")
    shown = [
        parts.frontier(found, out / "figures" / (f"frontier-{name}" if name else "frontier"), name.capitalize())
        for name, found in fronts.items()
    ]
    curves = _curves(runs, out / "figures")
    cautions = [
        *words.cautions(runs, made["leakage"][0]),
        *(text for found in fronts.values() for text in found.cautions),
    ]
    content = _content(runs, groups, made) | {
        "cautions": list(dict.fromkeys(cautions)),
        "verdict": verdict,
        "frontiers": shown,
        "curves": curves,
        "galleries": _galleries(runs, out / "figures") if originals else [],
        "withheld": None if originals else WITHHELD,
    }
    drawn = [one.chart for one in shown] + [one.chart for one in curves.values() if isinstance(one, Interactive)]
    path = out / "index.html"
    write_text(path, html.render("report.html.j2", content, drawn))
    return path


def _frontiers(runs: Sequence[RunData]) -> dict[str, frontier.Frontier]:
    """Return the frontier; where some data are images and some are texts, one of each, for their leakage has no common unit."""
    kinds = {"images": [run for run in runs if not run.holds_texts], "texts": [run for run in runs if run.holds_texts]}
    both = all(kinds.values())
    return {name if both else "": frontier.measure(some) for name, some in kinds.items() if some}


def _tables(runs: Sequence[RunData], groups: Sequence[Group]) -> Made:
    """Return all tables; those of texts, of mixed images and of privacy only where there is something in them."""
    found = {
        "headline": (tables.headline_table(groups), grids.headline),
        "accuracy": (tables.accuracy_table(runs), grids.accuracy),
        "leakage": (tables.leakage_table(runs), grids.leakage),
        "leakage-by-round": (tables.rounds_table(runs), grids.by_round),
        "tokens": (tables.tokens_table(runs), grids.words),
        "mixed": (tables.mixed_table(runs), grids.mixed),
        "membership": (tables.membership_table(runs), grids.membership),
        "victims": (tables.victims_table(runs), grids.victims),
        "traffic": (tables.traffic_table(runs), grids.traffic),
        "privacy": (tables.privacy_table(runs), grids.privacy),
        "norms": (tables.norms_table(runs), grids.norms),
        "wire": (pd.concat([tables.wire_table(run) for run in runs], ignore_index=True), grids.wire),
        "configuration": (
            pd.concat([tables.configuration_table(run) for run in runs], ignore_index=True),
            grids.configuration,
        ),
    }
    return {
        name: (table, written(tables.records(table)))
        for name, (table, written) in found.items()
        if len(table) or name not in OPTIONAL
    }


def _content(runs: Sequence[RunData], groups: Sequence[Group], made: Made) -> dict[str, Any]:
    """Return what the template shows of the tables, and the sentences beside them."""
    leakage, headline = made["leakage"][0], tables.records(made["headline"][0])
    rows = tables.records(leakage)
    names = ", ".join(run.name for run in runs) if len(runs) < 4 else f"{len(runs)} runs"
    return {
        "title": f"pflsec report: {names}",
        "cards": [_card(group, row, made, rows) for group, row in zip(groups, headline, strict=True)],
        "files": list(made),
        "grids": dict.fromkeys(OPTIONAL) | {name: grid if grid.rows else None for name, (_, grid) in made.items()},
        "reasons": grids.reasons(rows),
        "ssim": ", ".join(sorted({row["ssim_variant"] for row in rows} - {""})),
        "remedies": words.lpips_remedies(runs),
        "few_norms": len(list(tables.norm_lines(made["norms"][0]))) <= FEW_LINES if "norms" in made else True,
        "success": f"{tables.SUCCESS:.0f}",
        "claim": tables.CLAIM,
        "controls": [(run.name, words.control_sentences(run)) for run in runs if run.attacks],
        "wires": [(run.name, grids.wire(tables.records(tables.wire_table(run))), words.keeps(run)) for run in runs],
        "threats": threats.threats(runs, leakage),
        "untested": threats.untested(runs, leakage),
        "differing": grids.differences(runs, made["configuration"][0]),
        "configurations": [
            (run.name, grids.configuration(tables.records(tables.configuration_table(run)))) for run in runs
        ],
        "commands": [(run.name, commands(run)) for run in runs],
    }


@dataclass(frozen=True)
class Card:
    """The summary of one method: its accuracy and its worst case, then each of its runs in words."""

    name: str
    about: str
    states: str
    accuracy: str
    seeds: int
    worst: str
    blind: str
    where: str
    mean: str
    n: int
    note: str
    headline: str
    controls: list[str]
    runs: list[tuple[str, list[str]]]
    steps: list[str]


def _card(group: Group, headline: Row, made: Made, leakage: list[Row]) -> Card:
    final = {row["run"]: row for row in tables.records(made["accuracy"][0]) if row["at"] == "final"}
    first, attacked = group.runs[0], any(run.attacks for run in group.runs)
    seeds = ", ".join(str(run.config.get("seed")) for run in group.runs)
    setting = f"{first.manifest['data']['name']}, {first.config.get('clients')} clients, seed {seeds}"
    found = bool(headline["attack"])
    return Card(
        name=group.name,
        about=f"{first.manifest['algorithm']['title']} Data: {setting}. Defenses: {group.defense}.",
        states=", ".join(dict.fromkeys(str(run.manifest["state"]) for run in group.runs)),
        accuracy=words.accuracy_of([final[run.name]["mean"] for run in group.runs]),
        seeds=len(group.runs),
        worst=words.measured(headline, "worst") if found else "",
        blind=words.measured(headline, "blind") if found else "",
        where=f"{headline['attack']}; {words.place(headline)}" if found else "",
        mean=words.mean(headline) if found else "",
        n=headline["n"],
        note=headline["note"],
        headline=words.headline_sentence(headline) if attacked else "",
        controls=list(dict.fromkeys(text for run in group.runs for text in words.control_sentences(run))),
        runs=[(run.name, _sentences(run, final[run.name], leakage)) for run in group.runs],
        steps=[step for run in group.runs for step in words.next_steps(run)],
    )


def _sentences(run: RunData, final: Row, leakage: list[Row]) -> list[str]:
    rows = [row for row in leakage if row["run"] == run.name]
    return [
        *words.accuracy_sentences(run, final),
        *words.batchnorm_sentences(run),
        *words.leakage_sentences(run, rows),
    ]


def _curves(runs: Sequence[RunData], folder: Path) -> dict[str, Interactive | str]:
    """Return the curves by round as figures, or why there are none."""
    accuracy = tables.records(tables.accuracy_table(runs))
    last = [row for row in accuracy if row["at"] == "final" and row["mean"] is not None]
    said = "; ".join(f"{row['run']}: {percent(row['mean'])} in round {row['round']:.0f}" for row in last)
    losses = [(run.name, run.metrics["train_loss"].dropna()) for run in runs]
    lost = "; ".join(f"{name}: {number(values.iloc[-1], 3)}" for name, values in losses if len(values))
    private = tables.records(tables.privacy_table(runs))
    spent = "; ".join(
        f"{row['run']}: {number(row['epsilon'], 2)} {'without a guarantee' if row['note'] else 'per ' + row['unit']}"
        for row in private
        if row["epsilon"] is not None
    )
    alts = {
        "accuracy": f"Mean personal accuracy by round, ending at {said}." if said else "No run has a tested round.",
        "loss": f"Training loss by round, ending at {lost}." if lost else "No run has recorded a training loss.",
        "epsilon": f"Epsilon by round, ending at {spent}." if spent else "No run is differentially private.",
        "norms": _norms_alt(runs),
    }
    drawings = {
        "accuracy": (charts.accuracy, figures.accuracy_curves),
        "loss": (charts.loss, figures.loss_curves),
        "epsilon": (charts.epsilon, figures.epsilon_curves),
        "norms": (charts.norms, figures.norm_curves),
    }
    return {
        name: parts.interactive(chart(runs), figure(runs), folder / f"{name}-by-round", alts[name])
        for name, (chart, figure) in drawings.items()
    }


def _norms_alt(runs: Sequence[RunData]) -> str:
    lines = tables.norm_lines(tables.norms_table(runs))
    last = "; ".join(f"{run}, {holder}, {part}: {number(values[-1], 3)}" for run, holder, part, _, values in lines)
    return f"Norms of the states by round, ending at {last}." if last else "No run has recorded norms."


def _galleries(runs: Sequence[RunData], folder: Path) -> list[tuple[str, Picture | Texts | str]]:
    """Return for every attack its title, and its gallery or why there is none."""
    attacks = [(run, attack) for run in runs for attack in run.attacks]
    return [
        (f"{run.name}: {attack.name} ({attack.id})", _gallery(run, attack, folder, place))
        for place, (run, attack) in enumerate(attacks, start=1)
    ]


def _gallery(run: RunData, attack: AttackData, folder: Path, place: int) -> Picture | Texts | str:
    if not figures.has_pictures(attack):
        kind = "text" if run.holds_texts else "image"
        return f"The attack gave no {kind}. See the table of leakage for the reason."
    if not (run.path / "vault").is_dir():
        return "The run's vault, which holds the originals, is not there, so nothing can be compared by eye."
    alt = f"Originals, reconstructions by {attack.name} and the blind guess, for victims of run {run.name}."
    path = folder / re.sub(r"[^A-Za-z0-9]+", "-", f"gallery-{place:02d}-{run.name}-{attack.id}")
    drawn = figures.gallery(run, attack)
    if run.holds_texts:
        figures.save(drawn, path)
        return Texts(*texts.tellings(run, attack))
    return parts.picture(drawn, path, "png", alt)


def _forget_galleries(folder: Path) -> None:
    """Delete the galleries of an earlier report, which might show what this one must not."""
    with disk_errors(folder):
        for path in folder.glob("gallery-*"):
            path.unlink()
