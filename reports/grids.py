"""The page's tables: the frames of `tables` as text. A column is a head, and how a row is written there."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from pflsec.reports import tables
from pflsec.reports.frontier import Frontier
from pflsec.reports.frontier import table as frontier_rows
from pflsec.reports.load import RunData
from pflsec.reports.words import DASH, mean, measured, number, of_clients, percent, place, with_interval

Row = Mapping[str, Any]
Cell = Callable[[Row], str]
DIRECTIONS = {"down": "server to client", "up": "client to server", "private": "stays with the client"}


@dataclass(frozen=True)
class Grid:
    """A table as text: heads are (title, whether numbers stand below). It is sorted by the numbers with which cells begin."""

    heads: list[tuple[str, bool]]
    rows: list[list[str]]


def _grid(
    rows: Sequence[Row], words: Mapping[str, Cell], numbers: Mapping[str, Cell], notes: Mapping[str, Cell] = {}
) -> Grid:
    """Return a grid of words, then numbers, then notes, which are words again."""
    heads = [(head, part is numbers) for part in (words, numbers, notes) for head in part]
    cells = [*words.values(), *numbers.values(), *notes.values()]
    return Grid(heads, [[cell(row) for cell in cells] for row in rows])


def _as(name: str, written: Callable[[Any], str] = str) -> Cell:
    return lambda row: written(row[name])


def _whole(value: float | None) -> str:
    return DASH if value is None else f"{value:,.0f}"


def accuracy(rows: Sequence[Row]) -> Grid:
    """Return the accuracy table's rows as text."""
    numbers = {
        "round": _as("round", _whole),
        "mean": _as("mean", percent),
        "weighted": _as("weighted", percent),
        "std": _as("std", percent),
        "worst tenth": _as("worst10", percent),
        "global": _as("global", lambda value: value if value == "none" else percent(value)),
        "rounds": lambda row: f"{row['rounds']} of {row['rounds_planned']}",
    }
    if any(row["epsilon"] is not None for row in rows):
        numbers["epsilon"] = _as("epsilon", lambda value: number(value, 2))
    names = {"run": "run", "family": "family", "defenses": "defense", "at": "at"}
    return _grid(rows, {head: _as(name) for head, name in names.items()}, numbers)


def _attacked(*names: str) -> dict[str, Cell]:
    """Return the columns that say what was attacked, as these name it, how, and by whom."""
    return {name: _as(name) for name in names} | {"attack": _attack, "attacker": _attacker}


def leakage(rows: Sequence[Row]) -> Grid:
    """Return the leakage table's rows as text, what matters most first."""
    words = _attacked("run", "algo", "defense") | {"kind": _kind}
    numbers = {
        "rounds": _as("rounds"),
        "victims": _as("victims"),
        "blind guess": _as("psnr_blind", number),
        "median PSNR": _as("psnr_median", number),
        "above blind [95 %]": _interval("excess_mean", "excess", number, "excess_note"),
        f"≥ {tables.SUCCESS:.0f} dB [95 %]": _interval("success", "success", percent, "rate_note"),
        "identified [95 %]": _interval("identified", "identified", percent, "rate_note"),
        "labels right": _as("label_accuracy", percent),
        "SSIM": _as("ssim", lambda value: number(value, 3)),
        "LPIPS": lambda row: _lpips(row["lpips"], row["lpips_status"]),
        "mean PSNR": _as("psnr_mean", number),
        "max PSNR": _as("psnr_max", number),
        "not valid": _as("not_valid"),
        "n/a": _as("not_applicable"),
        "K": _range("steps"),
        "B": _range("batch"),
        "iterations": _as("iterations", _whole),
        "restarts": _as("restarts", _whole),
        "seconds": _as("seconds", number),
    }
    notes = {
        "controls": _as("controls"),
        "private items": _as("hidden", lambda value: value or DASH),
        "labels": _as("labels", lambda value: value or DASH),
    }
    return _grid(rows, words, numbers, notes)


def by_round(rows: Sequence[Row]) -> Grid:
    """Return the leakage of every captured round as text, with the accuracy about it."""
    words = _attacked("run") | {"kind": _kind}
    numbers = {
        "round": _as("round"),
        "accuracy before": lambda row: "untrained" if row["round"] == 0 else percent(row["accuracy_before"]),
        "accuracy after": _as("accuracy_after", percent),
        "victims": _as("victims"),
        "blind guess": _as("psnr_blind", number),
        "median PSNR": _as("psnr_median", number),
        "max PSNR": _as("psnr_max", number),
        f"≥ {tables.SUCCESS:.0f} dB": _as("success", percent),
        "identified": _as("identified", percent),
        "labels right": _as("label_accuracy", percent),
    }
    return _grid(rows, words, numbers, {"private items": _as("hidden", lambda value: value or DASH)})


def norms(rows: Sequence[Row]) -> Grid:
    """Return the norms of what server and clients hold as text."""
    words = {name: _as(name) for name in ("run", "holder", "part")}
    return _grid(rows, words, {"round": _as("round"), "norm": _as("norm", lambda value: number(value, 3))})


def _attack(row: Row) -> str:
    return f"{row['attack']} (naive)" if row["naive"] else str(row["attack"])


def _attacker(row: Row) -> str:
    return f"{row['adversary']}, {row['knowledge']}"


def _kind(row: Row) -> str:
    return f"{row['kind']}: {of_clients(row['summed'])}" if row["summed"] > 1 else str(row["kind"])


def _range(name: str) -> Cell:
    """Return a cell with a count, or with the smallest and the largest of several."""
    return lambda row: _whole(row[name]) if row[f"{name}_min"] == row[name] else f"{row[f'{name}_min']}-{row[name]}"


def words(rows: Sequence[Row]) -> Grid:
    """Return the table of recovered words as text."""
    shares = {
        "words recovered": "recall",
        "blind guess": "recall_blind",
        "of the found ones right": "precision",
        "in order, with gaps (ROUGE-L)": "rouge_l",
        "at their place": "in_place",
        "all words": "multiset",
        "all in order": "sequence",
        "identified": "identified",
    }
    return _grid(
        rows, _attacked("run"), {"texts": _as("texts", _whole)} | {h: _as(n, percent) for h, n in shares.items()}
    )


def mixed(rows: Sequence[Row]) -> Grid:
    """Return the table of mixed images as text."""
    decibels = {
        "mixed image": "psnr_mixed",
        "blind guess of it": "psnr_mixed_blind",
        "best part": "psnr_part",
        "blind guess of one": "psnr_part_blind",
    }
    share = {f"mixed ≥ {tables.SUCCESS:.0f} dB": _as("success", percent)}
    numbers = {"images": _as("images", _whole)} | {head: _as(name, number) for head, name in decibels.items()} | share
    return _grid(rows, _attacked("run"), numbers, {"controls": _as("controls")})


def membership(rows: Sequence[Row]) -> Grid:
    """Return the membership table's rows as text."""

    def share(value: float | None) -> str:
        return number(value, 3)

    words = {"run": _as("run"), "statistic": _as("statistic"), "attacker": _attacker}
    numbers = {
        "victims": _as("n_victims"),
        "members": _as("n_members"),
        "others": _as("n_others"),
        "AUC [95 %]": _interval("auc", "auc", share, "note"),
        "TPR at 1 % FPR [95 %]": _interval("tpr_1pct", "tpr_1pct", percent, "note"),
        "TPR at 0.1 % FPR [95 %]": _interval("tpr_01pct", "tpr_01pct", percent, "note"),
    }
    return _grid(rows, words, numbers, {"verdict": _as("verdict"), "kind": _as("kind")})


def _interval(name: str, ends: str, written: Callable[[float | None], str], note: str) -> Cell:
    return lambda row: with_interval(
        written(row[name]), written(row[f"{ends}_low"]), written(row[f"{ends}_high"]), row[note]
    )


def _lpips(value: float | None, status: str) -> str:
    return number(value, 3) if value is not None or not status else f"n/a: {status}"


def reasons(rows: Sequence[Row]) -> list[str]:
    """Return why victims stand in no number, a line for each row of the leakage table where some do not, and each reason."""
    said = []
    for row in rows:
        who, all_of_them = f"{row['run']}, {row['attack']}", row["not_applicable"] + row["not_valid"] + row["victims"]
        if row["not_applicable"]:
            why = row["reasons"].rstrip(".")
            said.append(f"{who}: not applicable to {row['not_applicable']} of {all_of_them} victims: {why}.")
        if row["not_valid"]:
            why = row["not_valid_reasons"].rstrip(".")
            lost = f"not valid for {row['not_valid']} of {all_of_them} victims, which is no sign of privacy"
            said.append(f"{who}: {lost}: {why}.")
    return said


def headline(rows: Sequence[Row]) -> Grid:
    """Return the headlines as text: for every method the victim rebuilt best from what the wire shows."""
    words = {
        "method": _as("name"),
        "defense": _as("defense"),
        "attack": lambda row: _attack(row) if row["attack"] else DASH,
        "victim": lambda row: _victim(row) if row["attack"] else DASH,
    }
    numbers = {
        "worst case": lambda row: measured(row, "worst") if row["attack"] else DASH,
        "blind guess": lambda row: measured(row, "blind") if row["attack"] else DASH,
        "mean [95 %]": lambda row: mean(row) if row["attack"] else DASH,
        "rebuilt [95 %]": _interval("success", "success", percent, "note"),
        "n": _as("n"),
        "not valid": _as("not_valid"),
        "n/a": _as("not_applicable"),
    }
    notes = {"controls": lambda row: row["controls"] or DASH, "note": lambda row: row["note"] or ""}
    return _grid(rows, words, numbers, notes)


def _victim(row: Row) -> str:
    return place(row) if row["seeds"] == 1 else f"{row['run']}, {place(row)}"


def frontier(found: Frontier) -> Grid:
    """Return the frontier as text."""
    header, *rows = frontier_rows(found)
    numeric = {found.x, found.y, "n", "epsilon"}
    return Grid([(head, head in numeric) for head in header], rows)


def victims(rows: Sequence[Row]) -> Grid:
    """Return every victim's row as text: what defines it, and how much of it was found."""
    words = {name: _as(name) for name in ("run", "attack", "adversary", "knowledge", "kind")}
    numbers = {
        **{name: _as(name, _whole) for name in ("round", "client", "victim")},
        "PSNR": _as("psnr_capped", number),
        "blind guess": _as("psnr_blind", number),
        "SSIM": _as("ssim", lambda value: number(value, 3)),
        "identified": _as("identified", percent),
    }
    valid: Cell = lambda row: "not valid" if row["attack_valid"] is False else ""  # noqa: E731
    return _grid(rows, words, numbers, {"status": _as("status"), "valid": valid, "reason": _as("reason")})


def traffic(rows: Sequence[Row]) -> Grid:
    """Return what the runs sent, in MB over all clients."""
    numbers = {"rounds": _as("rounds", _whole)}
    heads = {"MB up": "mb_up", "MB down": "mb_down", "MB in all": "mb_total"}
    per_round = {"MB up per round": "mb_up_round", "MB down per round": "mb_down_round"}
    mega = {head: _as(name, lambda value: number(value, 3)) for head, name in (heads | per_round).items()}
    return _grid(rows, {name: _as(name) for name in ("run", "algo", "defense")}, numbers | mega)


def privacy(rows: Sequence[Row]) -> Grid:
    """Return what privacy the runs have spent."""
    numbers = {
        "epsilon": _as("epsilon", lambda value: number(value, 2)),
        "delta": _as("delta", lambda value: DASH if value is None else f"{value:.1g}"),
    }
    notes = {"unit": lambda row: f"per {row['unit']}"} | {n: _as(n) for n in ("guarantee", "adversary", "note")}
    return _grid(rows, {name: _as(name) for name in ("run", "defense")}, numbers, notes)


def wire(rows: Sequence[Row]) -> Grid:
    """Return rows of the wire table as text, with the run's name where they are of several."""
    words: dict[str, Cell] = {
        "direction": _as("direction", lambda value: DIRECTIONS.get(str(value), str(value))),
        "item": lambda row: row["item"] + (" (if the settings ask for it)" if row["optional"] else ""),
        "kind": lambda row: f"{row['kind']} {row['shape'] or ''}".strip(),
    }
    numbers = {"tensors": _as("tensors", _whole), "numbers": _as("numbers", _whole)}
    if len({row["run"] for row in rows}) > 1:
        words = {"run": _as("run"), **words}
    if any("guarantee" in row for row in rows):
        words["guarantee"] = _as("guarantee", lambda value: str(value or ""))
    return _grid(rows, words, numbers)


def configuration(rows: Sequence[Row]) -> Grid:
    """Return rows of the configuration table as text, with the run's name where they are of several."""
    names = (
        ("section", "name", "value") if len({row["run"] for row in rows}) == 1 else ("run", "section", "name", "value")
    )
    return _grid(rows, {name: _as(name) for name in names}, {})


def differences(runs: Sequence[RunData], table: pd.DataFrame) -> Grid | None:
    """Return the settings in which the runs differ, a column for each run; None where they do not."""
    about = table[table["section"].isin(["options", "method", "data", "model"])]
    order = about.set_index(["section", "name"]).index.unique()
    wide = about.pivot(index=["section", "name"], columns="run", values="value").reindex(order).fillna(DASH)
    differing = wide[wide.nunique(axis=1) > 1][[run.name for run in runs]]
    if differing.empty:
        return None
    rows = tables.records(differing.reset_index())
    return _grid(rows, {"setting": _as("name"), **{run.name: _as(run.name) for run in runs}}, {})
