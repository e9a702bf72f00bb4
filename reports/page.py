"""The report: one HTML file that needs no other file and no network; its tables and figures also as files."""

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.figure import Figure

from pflsec.core.errors import RunError
from pflsec.core.files import disk_errors, to_csv, write_json, write_text
from pflsec.reports import figures, grids, tables, texts, words
from pflsec.reports.load import AttackData, RunData, load_runs
from pflsec.reports.words import number, percent

WITHHELD = (
    "Pictures of the victims' images were left out on request (--no-originals): neither originals nor "
    "reconstructions, which show the same data, are part of this report."
)
Row = dict[str, Any]


@dataclass(frozen=True)
class Picture:
    """An image inside the page; width in CSS pixels is what it needs to be readable."""

    source: str
    alt: str
    width: int


@dataclass(frozen=True)
class Texts:
    """The gallery of an attack on texts, as text: the first of `total`."""

    tellings: list[texts.Telling]
    total: int


def write(
    run_paths: Sequence[Path], out: Path, originals: bool = True, verdict: Sequence[tuple[str, Sequence[str]]] = ()
) -> Path:
    """Write out/index.html, out/tables/*.csv and *.json, out/figures/*.png and *.svg; return the page's path.

    verdict    titled lists of sentences that the page begins with, such as an audit's
    originals  False: nothing that shows a victim's image, so no gallery; one of an earlier report is deleted
    Raises RunError when a run is damaged, none is given, or `out` cannot be written.
    """
    if not run_paths:
        raise RunError("a report needs at least one run; train one with: pflsec train --algo fedavg")
    runs = load_runs(run_paths)
    accuracy, leakage = tables.accuracy_table(runs), tables.leakage_table(runs)
    found = {
        "headline": tables.headline_table(runs),
        "accuracy": accuracy,
        "leakage": leakage,
        "membership": tables.membership_table(runs),
        "victims": tables.victims_table(runs),
        "wire": pd.concat([tables.wire_table(run) for run in runs], ignore_index=True),
        "configuration": pd.concat([tables.configuration_table(run) for run in runs], ignore_index=True),
    }
    if not (tokens := tables.tokens_table(runs)).empty:
        found["tokens"] = tokens
    for name, table in found.items():
        rows = tables.records(table)
        write_text(out / "tables" / f"{name}.csv", to_csv([str(c) for c in table.columns], rows))
        write_json(out / "tables" / f"{name}.json", rows)
    _forget_galleries(out / "figures")
    template = Environment(
        loader=PackageLoader("pflsec.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    ).get_template("report.html.j2")
    path = out / "index.html"
    write_text(path, template.render(verdict=verdict, **_content(runs, found, out / "figures", originals)))
    return path


def _content(
    runs: Sequence[RunData], found: Mapping[str, pd.DataFrame], folder: Path, originals: bool
) -> dict[str, Any]:
    """Return what the template shows, writing the figures on the way."""
    accuracy, leakage, headline = (tables.records(found[name]) for name in ("accuracy", "leakage", "headline"))
    members = tables.records(found["membership"])
    names = ", ".join(run.name for run in runs) if len(runs) < 4 else f"{len(runs)} runs"
    return {
        "title": f"pflsec report: {names}",
        "cautions": words.cautions(runs, found["leakage"]),
        "cards": [_card(run, row, accuracy, leakage) for run, row in zip(runs, headline, strict=True)],
        "headline": grids.headline(headline),
        "accuracy": grids.accuracy(accuracy),
        "leakage": grids.leakage(leakage) if leakage else None,
        "reasons": grids.reasons(leakage),
        "words": grids.words(tables.records(found["tokens"])) if "tokens" in found else None,
        "membership": grids.membership(members) if members else None,
        "ssim": ", ".join(sorted({row["ssim_variant"] for row in leakage} - {""})),
        "remedies": words.lpips_remedies(runs),
        "success": f"{tables.SUCCESS:.0f}",
        "claim": tables.CLAIM,
        "galleries": _galleries(runs, folder) if originals else [],
        "withheld": None if originals else WITHHELD,
        "tradeoff": _tradeoff(runs, accuracy, leakage, folder),
        "curves": _curves(runs, accuracy, folder),
        "wires": [(run.name, grids.wire(run), words.keeps(run)) for run in runs],
        "threats": words.threats(runs, found["leakage"]),
        "untested": words.untested(runs, found["leakage"]),
        "differing": grids.differences(runs, found["configuration"]),
        "configurations": [(run.name, grids.configuration(run)) for run in runs],
        "commands": [(run.name, words.commands(run)) for run in runs],
    }


@dataclass(frozen=True)
class Card:
    """The summary of one run."""

    name: str
    about: str
    state: str
    accuracy: str
    psnr: str
    blind: str
    worst: str
    headline: str
    controls: list[str]
    sentences: list[str]
    steps: list[str]


def _card(run: RunData, headline: Row, accuracy: list[Row], leakage: list[Row]) -> Card:
    final = next((row for row in accuracy if row["run"] == run.name and row["at"] == "final"), None)
    rows = [row for row in leakage if row["run"] == run.name]
    setting = f"{run.manifest['data']['name']}, {run.config.get('clients')} clients, seed {run.config.get('seed')}"
    return Card(
        name=run.name,
        about=f"{run.manifest['algorithm']['title']} Data: {setting}. Defenses: {tables.defense_of(run)}.",
        state=run.manifest["state"],
        accuracy=percent(final["mean"] if final else None),
        psnr=number(headline["psnr_max"]),
        blind=number(headline["psnr_blind"]),
        worst=f"{headline['attack']}; {words.place(headline)}" if headline["attack"] else "",
        headline=words.headline_sentence(headline) if run.attacks else "",
        controls=words.control_sentences(run),
        steps=words.next_steps(run),
        sentences=[
            *words.accuracy_sentences(run, final),
            *words.batchnorm_sentences(run),
            *words.leakage_sentences(run, rows),
        ],
    )


def _galleries(runs: Sequence[RunData], folder: Path) -> list[tuple[str, Picture | Texts | str]]:
    """Return for every attack its title, and its gallery or why there is none."""
    attacks = [(run, attack) for run in runs for attack in run.attacks]
    return [
        (f"{run.name}: {attack.name} ({attack.id})", _gallery(run, attack, folder, place))
        for place, (run, attack) in enumerate(attacks, start=1)
    ]


def _gallery(run: RunData, attack: AttackData, folder: Path, place: int) -> Picture | Texts | str:
    if not figures.has_pictures(attack):
        kind = "image" if run.input.vocabulary is None else "text"
        return f"The attack gave no {kind}. See the table of leakage for the reason."
    if not (run.path / "vault").is_dir():
        return "The run's vault, which holds the originals, is not there, so nothing can be compared by eye."
    alt = f"Originals, reconstructions by {attack.name} and the blind guess, for victims of run {run.name}."
    name = re.sub(r"[^A-Za-z0-9]+", "-", f"gallery-{place:02d}-{run.name}-{attack.id}")
    drawn = figures.gallery(run, attack)
    if run.input.vocabulary is not None:
        figures.save(drawn, folder / name)
        return Texts(*texts.tellings(run, attack))
    return _picture(drawn, folder / name, "png", alt)


def _picture(figure: Figure, path: Path, kind: str, alt: str) -> Picture:
    """Write the figure's files and return it as an image for the page."""
    figures.save(figure, path)
    data = path.with_name(f"{path.name}.{kind}").read_bytes()
    media = {"png": "image/png", "svg": "image/svg+xml"}[kind]
    width = round(96 * figure.get_figwidth())
    return Picture(f"data:{media};base64,{base64.b64encode(data).decode()}", alt, width)


def _tradeoff(runs: Sequence[RunData], accuracy: list[Row], leakage: list[Row], folder: Path) -> Picture | str:
    tested = {row["run"] for row in accuracy if row["mean"] is not None}
    points = [row for row in leakage if row["psnr_median"] is not None and row["run"] in tested]
    if not points:
        return "No run has both an accuracy and a reconstruction."
    said = "; ".join(f"{row['run']}, {row['attack']}: {number(row['psnr_median'])} dB" for row in points)
    alt = f"Mean personal accuracy against median PSNR. {said}."
    return _picture(figures.tradeoff(runs), folder / "accuracy-leakage", "svg", alt)


def _curves(runs: Sequence[RunData], accuracy: list[Row], folder: Path) -> Picture | str:
    final = [row for row in accuracy if row["at"] == "final" and row["mean"] is not None]
    if not final:
        return "No run has a tested round."
    said = "; ".join(f"{row['run']}: {percent(row['mean'])} in round {row['round']:.0f}" for row in final)
    alt = f"Mean personal accuracy by round, ending at {said}."
    return _picture(figures.learning_curves(runs), folder / "learning-curves", "svg", alt)


def _forget_galleries(folder: Path) -> None:
    """Delete the galleries of an earlier report, which might show what this one must not."""
    with disk_errors(folder):
        for path in folder.glob("gallery-*"):
            path.unlink()
