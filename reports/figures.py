"""Figures: the gallery of an attack, accuracy against leakage, learning curves. Safe for the colour-blind."""

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, product
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib import patheffects
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Annotation, Text
from matplotlib.ticker import MaxNLocator

from pflsec.core.errors import RunError
from pflsec.core.files import write_bytes
from pflsec.core.items import Items
from pflsec.core.tensors import read_items
from pflsec.reports import texts
from pflsec.reports.load import AttackData, CaptureId, RunData, load_run
from pflsec.reports.tables import (
    FAILED,
    SUCCESS,
    accuracy_table,
    leakage_table,
    records,
    victims_table,
)

MOST = 10  # images in a gallery
CHANNELS = 3  # of a signal, in a gallery
HEAD, CAPTION = 0.85, 2.05  # inches above and to the right of a gallery's pictures
NAMED = 12  # points with their names beside them; more would hide each other
CAP = 100.0  # dB; equal images
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#4D4D4D")  # Okabe and Ito
INK, QUIET, ALARM = "#1a1a1a", "#666666", "#D55E00"
SHAPES = ("o", "s", "^", "D", "v", "P", "X")
WORST: dict[str, Any] = {"linewidth": 1, "linestyle": (0, (4, 2))}
CURVES: dict[str, dict[str, Any]] = {
    "blind guess": {"color": "#aaaaaa", "linewidth": 1.0, "linestyle": (0, (2, 2))},
    "original": {"color": INK, "linewidth": 1.8},
    "reconstruction": {"color": ALARM, "linewidth": 1.2},
}
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same figure everywhere
    "font.size": 10.5,
    "text.color": INK,
    "text.parse_math": False,  # names come from outside; a dollar sign is a dollar sign
    "axes.edgecolor": QUIET,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "svg.hashsalt": "pflsec",
    "svg.fonttype": "path",
}


Box = tuple[float, float, float, float]
"""Left, bottom, right, top in the canvas's pixels."""


@dataclass(frozen=True, eq=False)
class Pair:
    """One true image and its reconstruction, both [C, H, W] in [0, 1], with the labels as text."""

    capture: CaptureId
    truth: np.ndarray
    found: np.ndarray
    label_true: str
    label_found: str
    status: str
    ssim: float | None

    @property
    def psnr(self) -> float:
        """PSNR of the reconstruction in dB, at most 100."""
        return psnr(self.truth, self.found)


def psnr(truth: np.ndarray, other: np.ndarray) -> float:
    """Return the PSNR in dB of two images in [0, 1], at most 100."""
    error = float(np.mean((truth.astype(float) - other.astype(float)) ** 2))
    return CAP if error == 0 else min(CAP, -10 * np.log10(error))


def gallery(run: RunData, attack: AttackData) -> Figure:
    """Return a row for each of the at most 10 victim images that are rebuilt best, the worst leak first; or the first 16
    victim texts, the words that were recovered marked.

    Images: original, reconstruction, blind guess. Signals (inputs of height 1): all three as curves, for the first channels.
    Without any reconstruction the figure is one sentence. Raises RunError for damaged files.
    """
    if run.input.vocabulary is not None:
        return _texts(run, attack)
    pairs, total = _pairs(run, attack)
    if not pairs:
        return sentence(f"{run.name}, {attack.name}: no reconstruction to show")
    mean = read_items(run.path / "vault" / "pool.safetensors", "the mean image").get("mean")
    blind = _image(mean, run, "the mean image")
    channels, signals = run.input.shape[0], run.input.shape[1] == 1
    columns, width = (min(CHANNELS, channels), 1.9) if signals else (3, 1.12)
    with style():
        size = 0.2 + width * columns + CAPTION, HEAD + 1.2 * len(pairs)
        figure = Figure(figsize=size)
        grid = figure.subplots(len(pairs), columns, squeeze=False)
        sides = {
            "left": 0.2 / size[0],
            "right": 1 - CAPTION / size[0],
            "top": 1 - HEAD / size[1],
            "bottom": 0.1 / size[1],
        }
        figure.subplots_adjust(**sides, wspace=0.08, hspace=0.12)
        for row, pair in zip(grid, pairs, strict=True):
            (_curves if signals else _pictures)(row, pair, blind)
            _caption(row[-1], pair, blind)
        heads = [f"channel {i}" for i in range(columns)] if signals else ["original", "reconstruction", "blind guess"]
        for axes, head in zip(grid[0], heads, strict=True):
            axes.set_title(head, fontsize=9, color=QUIET)
        things, most = "signals" if signals else "images", total - len(pairs)
        left = f"{len(pairs)} of {total} {things}, {most} left out" if most else f"{total} {things}"
        notes = [left, "worst leak first"] if total > 1 else []
        notes += [f"{columns} of {channels} channels"] if signals and channels > columns else []
        _heading(figure, f"{run.name} · {attack.name}", "; ".join(notes))
        if signals:
            _curve_key(figure)
    return figure


def _texts(run: RunData, attack: AttackData) -> Figure:
    told, total = texts.tellings(run, attack)
    if not told:
        return sentence(f"{run.name}, {attack.name}: no reconstruction to show")
    shown = f"first {len(told)} of {total} texts" if total > len(told) else f"{total} texts"
    with style():
        return texts.sheet(told, f"{run.name} · {attack.name} · {shown}")


def has_pictures(attack: AttackData) -> bool:
    """Return whether the attack left any reconstruction."""
    return bool(_reconstructions(attack))


def write_gallery(run_folder: Path, attack_id: str) -> Path:
    """Write attacks/<id>/gallery.png of a run; return its path. Raises RunError without such an attack."""
    run = load_run(run_folder)
    for attack in run.attacks:
        if attack.id == attack_id:
            path = attack.folder / "gallery.png"
            write_bytes(path, encode(gallery(run, attack), "png"))
            return path
    known = ", ".join(a.id for a in run.attacks) or "none"
    raise RunError(f"run '{run.name}' has no attack '{attack_id}'. It has: {known}.")


def write_sheet(path: Path, title: str, found: np.ndarray, truth: np.ndarray | None) -> None:
    """Write a picture of the first 16 reconstructions [B, C, H, W] in [0, 1], under the true images where there are any."""
    count = min(len(found), MOST)
    rows = [found] if truth is None else [truth, found]
    wide = 1.35 + 1.12 * count
    with style():
        figure = Figure(figsize=(max(wide, 0.3 + 0.1 * len(title)), 0.5 + 1.5 * len(rows)))
        grid = figure.subplots(len(rows), count, squeeze=False)
        for axes, image in zip(grid.flat, (image for row in rows for image in row[:count]), strict=True):
            _picture(axes, image)
        for axes, name in zip(grid[::-1, 0], ("reconstruction", "original"), strict=False):
            axes.set_ylabel(name, rotation=0, ha="right", va="center", labelpad=8)
        for i, axes in enumerate(grid[-1] if truth is not None else ()):
            axes.set_xlabel(_decibel(psnr(rows[0][i], found[i])), fontsize=8.5, labelpad=3)
        figure.subplots_adjust(
            left=1.3 / figure.get_figwidth(), right=0.98 * wide / figure.get_figwidth(), bottom=0.15, top=0.8
        )
        figure.suptitle(title, x=0.02, ha="left", fontsize=11.5)
    write_bytes(path, encode(figure, "png"))


def tradeoff(runs: Sequence[RunData]) -> Figure:
    """Return mean personal accuracy of the last tested round against the median capped PSNR.

    A point for each row of the leakage table, named where they are few, else by a legend; a thin line spans
    the middle half of its victims, a band the middle eight tenths of the blind guesses.
    """
    points = _points(runs)
    if not points:
        return sentence("No run has both an accuracy and a reconstruction")
    colours = _assign((point["run"] for point in points), COLOURS)
    shapes = _assign((point["attack"] for point in points), SHAPES)
    with style():
        figure = Figure(figsize=(7.6, 4.9), layout="constrained")
        axes = figure.subplots()
        _references(axes, victims_table(runs)["psnr_blind"].dropna())
        for point in points:
            _point(axes, point, colours[point["run"]], shapes[point["attack"]])
        axes.set_xlim(0, max(60.0, *(1.12 * max(p["psnr_q75"], p["psnr_median"]) for p in points)))
        heights = [point["mean"] for point in points]
        axes.set_ylim(max(-0.03, min(heights) - 0.12), min(1.06, max(heights) + 0.12))
        axes.yaxis.set_major_formatter(percent_label)
        axes.set_xlabel("median PSNR of the reconstructions in dB  (further right: leaks more)")
        axes.set_ylabel("mean personal accuracy")
        if any(point["knowledge"] != "wire" for point in points):
            axes.set_title("hollow: knowledge granted beyond the wire", loc="right", fontsize=9, color=QUIET)
        if len(points) <= NAMED:
            name_points(axes, [(p["name"], p["psnr_median"], p["mean"]) for p in points])
        else:
            _legend(figure, colours, shapes)
    return figure


def learning_curves(runs: Sequence[RunData]) -> Figure:
    """Return mean personal accuracy by round, with that of the worst tenth of the clients as a thin line."""
    tested = [(run, run.metrics.dropna(subset=["personal_accuracy_mean"])) for run in runs]
    drawn = [(run, table) for run, table in tested if not table.empty]
    if not drawn:
        return sentence("No run has a tested round")
    with style():
        figure = Figure(figsize=(7.6, 4.3 + 0.16 * len(drawn)), layout="constrained")
        axes = figure.subplots()
        for number, (run, table) in enumerate(drawn):
            colour, line = COLOURS[number % len(COLOURS)], ("-", "-.", ":")[number // len(COLOURS) % 3]
            mean = {
                "linewidth": 2,
                "linestyle": line,
                "marker": "o" if len(table) <= 12 else "",
                "markersize": 4,
            }
            # The space keeps a name with a leading "_" in the legend.
            axes.plot(table["round"], table["personal_accuracy_mean"], color=colour, label=f" {run.name}", **mean)
            axes.plot(table["round"], table["personal_accuracy_worst10"], color=colour, **WORST)
        axes.plot([], [], color=QUIET, label=" worst tenth of the clients", **WORST)
        axes.set_ylim(-0.02, 1.02)
        axes.yaxis.set_major_formatter(percent_label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("round")
        axes.set_ylabel("mean personal accuracy")
        figure.legend(loc="outside lower center", ncols=3, fontsize=9.5)
    return figure


def save(figure: Figure, path: Path) -> list[Path]:
    """Write <path>.png and <path>.svg atomically and return both. Equal figures give equal bytes."""
    files = [path.with_name(f"{path.name}.{kind}") for kind in ("png", "svg")]
    for file in files:
        write_bytes(file, encode(figure, file.suffix[1:]))
    return files


def encode(figure: Figure, kind: str) -> bytes:
    """Return the figure as PNG or SVG bytes, without a date."""
    data = io.BytesIO()
    without: dict[str, Any] = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}[kind]
    with style():
        figure.savefig(data, format=kind, dpi=110, metadata=without, facecolor="white")
    return data.getvalue()


@contextmanager
def style() -> Iterator[None]:
    """Draw in the reports' style, whatever a user's matplotlibrc says."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(STYLE)
        yield


def sentence(text: str) -> Figure:
    """Return a figure that is one sentence: why there is nothing to draw."""
    with style():
        figure = Figure(figsize=(7.6, 0.9))
        figure.text(0.02, 0.5, text, va="center", color=QUIET)
    return figure


def _pairs(run: RunData, attack: AttackData) -> tuple[list[Pair], int]:
    """Return the images that are rebuilt best, the best first and failures last, and how many images there are."""
    found = _reconstructions(attack)
    pairs: list[Pair] = []
    for capture in attack.captures:
        if capture.text in found:
            pairs += _batch(run, attack, capture, found[capture.text].numpy())
    return sorted(pairs, key=lambda pair: (pair.status in FAILED, -pair.psnr))[:MOST], len(pairs)


def _reconstructions(attack: AttackData) -> Items:
    """Return {capture id: [B, C, H, W]}, empty where the attack has not written any."""
    path = attack.folder / "reconstructions.safetensors"
    return read_items(path, f"the reconstructions of attack '{attack.id}'") if path.exists() else {}


def _batch(run: RunData, attack: AttackData, capture: CaptureId, found: np.ndarray) -> list[Pair]:
    """Return one victim batch's pairs; found [B, C, H, W]."""
    path = run.path / "vault" / f"{capture.text}.safetensors"
    x = read_items(path, f"the truth of capture '{capture.text}'").get("x")
    if x is None or tuple(x.shape) != found.shape or found.shape[1:] != run.input.shape:
        shape = None if x is None else list(x.shape)
        raise RunError(
            f"the truth of capture '{capture.text}' is {shape}, but its reconstruction {list(found.shape)}: "
            f"{path} or attack '{attack.id}' is damaged."
        )
    truth = run.input.pixels(x.double()).clamp(0, 1).numpy()
    row = attack.row(capture)
    true, guess = (_labels(run, row, name, len(found)) for name in ("label_true", "label_found"))
    status = "" if row is None else str(row["status"])
    return [
        Pair(capture, truth[i], found[i], true[i], guess[i], status, _ssim(attack, capture, i))
        for i in range(len(found))
    ]


def _ssim(attack: AttackData, capture: CaptureId, position: int) -> float | None:
    table = attack.images
    found = table[(table["capture"] == capture.text) & (table["position"] == position)]["ssim"].dropna()
    return None if found.empty else float(found.iloc[0])


def _labels(run: RunData, row: pd.Series | None, name: str, count: int) -> list[str]:
    """Return a label for each image of a batch, "?" where it is not known which image has which."""
    words = [] if row is None else str(row[name]).split()
    return [_short(run.class_name(word)) for word in words] if len(words) == count else ["?"] * count


def _short(text: str) -> str:
    return text if len(text) <= 12 else text[:11] + "…"


def _image(tensor: Any, run: RunData, what: str) -> np.ndarray:
    if tensor is None or tuple(tensor.shape) != run.input.shape:
        raise RunError(f"the vault is damaged: {what} of run '{run.name}' is missing or of another shape.")
    return tensor.numpy()


def _pictures(row: np.ndarray, pair: Pair, blind: np.ndarray) -> None:
    """Draw one image: original, reconstruction, blind guess."""
    for axes, image in zip(row, (pair.truth, pair.found, blind), strict=True):
        _picture(axes, image)
    if pair.status in FAILED:
        _frame(row[1], ALARM, 2.5)


def _curves(row: np.ndarray, pair: Pair, blind: np.ndarray) -> None:
    """Draw one signal, a channel in each of the axes."""
    for channel, axes in enumerate(row):
        for signal, look in zip((blind, pair.truth, pair.found), CURVES.values(), strict=True):
            axes.plot(signal[channel, 0], **look)
        axes.set_ylim(-0.04, 1.04)
        axes.grid(visible=False)
        _frame(axes, ALARM if pair.status in FAILED else "#bbbbbb", 0.8)


def _frame(axes: Axes, colour: str, width: float) -> None:
    axes.set(xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set(visible=True, color=colour, linewidth=width)


def _curve_key(figure: Figure) -> None:
    lines = [Line2D([], [], **look, label=f" {name}") for name, look in CURVES.items()]
    place: dict[str, Any] = {"loc": "upper right", "bbox_to_anchor": (1, 1), "borderaxespad": 0.3}
    figure.legend(handles=lines, fontsize=9, **place)


def _caption(axes: Axes, pair: Pair, blind: np.ndarray) -> None:
    """Write to the right of a row how much of the image was found."""
    failed, where = pair.status in FAILED, f"client {pair.capture.client}, round {pair.capture.round}"
    alike = "" if pair.ssim is None else f", SSIM {pair.ssim:.2f}"
    found = "no label sought" if pair.label_found == "?" else f"label found {pair.label_found}"
    wrong = "" if pair.label_found in ("?", pair.label_true) else " (wrong)"
    lines = [
        f"{pair.status}: {_decibel(pair.psnr)}" if failed else f"{_decibel(pair.psnr)}{alike}",
        f"{found}{wrong}",
        f"label {pair.label_true}",
        where,
        f"blind guess {_decibel(psnr(pair.truth, blind))}",
    ]
    for number, line in enumerate(lines):
        look: dict[str, Any] = {"fontsize": 10.5, "fontweight": "bold"} if number == 0 else {"fontsize": 8.8}
        colour = ALARM if number == 0 and failed else INK if number < 2 else QUIET
        axes.text(1.07, 0.9 - 0.2 * number, line, transform=axes.transAxes, va="center", color=colour, **look)


def _heading(figure: Figure, title: str, note: str) -> None:
    """Write the figure's title, and below it what it shows."""
    height = figure.get_figheight()
    figure.text(0.2 / figure.get_figwidth(), 1 - 0.12 / height, title, ha="left", va="top", fontsize=11.5)
    where = 0.2 / figure.get_figwidth(), 1 - 0.36 / height
    figure.text(*where, note, ha="left", va="top", fontsize=9, color=QUIET)


def _picture(axes: Axes, image: np.ndarray) -> None:
    """Draw one image [C, H, W] in [0, 1]."""
    grey = image.shape[0] != 3
    shown = image.mean(axis=0) if grey else image.transpose(1, 2, 0)
    axes.imshow(np.clip(shown, 0, 1), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    _frame(axes, "#bbbbbb", 0.8)


def _decibel(value: float) -> str:
    return "exact" if value >= CAP else f"{value:.1f} dB"


def _points(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """Return the leakage table's rows with a PSNR, the run's final accuracy as `mean`, and a `name` each."""
    accuracy = accuracy_table(runs)
    final = accuracy[accuracy["at"] == "final"][["run", "mean"]]
    points = leakage_table(runs).merge(final, on="run").dropna(subset=["psnr_median", "mean"])
    return records(points.assign(name=point_names(points)))


def _assign(names: Iterable[str], values: Sequence[str]) -> dict[str, str]:
    """Return a value for each distinct name, in order of appearance; after the last the first comes again."""
    return dict(zip(dict.fromkeys(names), cycle(values), strict=False))


def _legend(figure: Figure, colours: Mapping[str, str], shapes: Mapping[str, str]) -> None:
    """Write under the axes which colour is which run, and which shape which attack."""
    runs = [Line2D([], [], color=colour, linewidth=5, label=f" {run}") for run, colour in colours.items()]
    marks = [
        Line2D([], [], color=QUIET, marker=shape, linestyle="", markersize=8, label=f" {attack}")
        for attack, shape in shapes.items()
    ]
    rows = -(-(len(runs) + len(marks)) // 4)
    figure.set_figheight(figure.get_figheight() + 0.25 * rows)
    figure.legend(handles=[*runs, *marks], loc="outside lower center", ncols=4, fontsize=9)


def _point(axes: Axes, point: dict[str, Any], colour: str, shape: str) -> None:
    span = [point["psnr_q25"], point["psnr_q75"]]
    axes.plot(span, [point["mean"]] * 2, color=colour, linewidth=1.6, alpha=0.55, zorder=3)
    inside = colour if point["knowledge"] == "wire" else "white"
    dot = {"marker": shape, "markersize": 8, "markerfacecolor": inside, "markeredgewidth": 1.8}
    axes.plot([point["psnr_median"]], [point["mean"]], color=colour, zorder=3, **dot)


def percent_label(value: float, _: object) -> str:
    """Return an axis label for an accuracy, none outside [0, 1]."""
    return f"{100 * value:.0f} %" if -1e-6 <= value <= 1 + 1e-6 else ""


def point_names(table: pd.DataFrame) -> list[str]:
    """Return "run · attack" for each row of a leakage table, unique by as much of its setting as it takes."""
    names = (table["run"] + " · " + table["attack"]).tolist()
    said: list[list[str]] = [[] for _ in names]
    for mark in ("knowledge", "adversary", "hidden", "labels", "kind", "attack_id"):
        full = [(name, *words) for name, words in zip(names, said, strict=True)]
        for i, value in enumerate(table[mark]):
            twins = [j for j, other in enumerate(full) if other == full[i]]
            if table[mark].iloc[twins].nunique() > 1:
                said[i].append(str(value))
    return [f"{name} ({', '.join(w)})" if w else name for name, w in zip(names, said, strict=True)]


def _references(axes: Axes, blind: pd.Series) -> None:
    """Draw what no information gives, and where success begins."""
    top = axes.get_xaxis_transform()
    if not blind.empty:
        axes.axvspan(float(blind.quantile(0.1)), float(blind.quantile(0.9)), color="#dddddd", linewidth=0, zorder=0)
        axes.axvline(blind.median(), color=QUIET, linewidth=1.2)
        axes.text(
            blind.median(),
            1.01,
            "blind guess",
            ha="center",
            va="bottom",
            fontsize=9,
            color=QUIET,
            transform=top,
        )
    axes.axvline(SUCCESS, color=QUIET, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.text(SUCCESS, 1.01, "  success: 20 dB", ha="left", va="bottom", fontsize=9, color=QUIET, transform=top)


def name_points(axes: Axes, points: Sequence[tuple[str, float, float]]) -> None:
    """Write the name of each (name, x, y) where it hides no other name and no point, as far as there is room."""
    figure = axes.figure
    assert isinstance(figure, Figure)
    figure.draw_without_rendering()  # fixes the layout, and with it where points lie
    places = [(x, y) for _, x, y in points]
    taken = [(x - 6, y - 6, x + 6, y + 6) for x, y in axes.transData.transform(places)]
    for name, x, y in sorted(points, key=lambda point: (point[2], point[1]), reverse=True):
        taken.append(_box(_placed(axes, name, (x, y), taken)))


def _placed(axes: Axes, name: str, place: tuple[float, float], taken: list[Box]) -> Annotation:
    """Return the name written by its point, or far off with a line leading there; at worst over others."""
    texts: list[Annotation] = []
    for dy, side in product((9, -18, 24, -33, 39, -48, 54, -63), ("center", "left", "right")):
        for text in texts:
            text.remove()
        leader = (
            {"arrowstyle": "-", "color": QUIET, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 5} if abs(dy) > 20 else None
        )
        where: dict[str, Any] = {"xytext": (0, dy), "textcoords": "offset points", "ha": side}
        texts = [axes.annotate(name, place, fontsize=9.5, zorder=4, arrowprops=leader, **where)]
        texts[0].set_path_effects([patheffects.withStroke(linewidth=3, foreground="white")])
        texts[0].set_in_layout(False)  # the layout, and with it the places, are fixed
        if _free(_box(texts[0]), axes, taken):
            break
    return texts[0]


def _box(text: Annotation) -> Box:
    text.get_window_extent()  # moves the text to its offset
    box = Text.get_window_extent(text)  # of the words, without the leading line
    return box.x0, box.y0, box.x1, box.y1


def _free(box: Box, axes: Axes, taken: list[Box]) -> bool:
    x0, y0, x1, y1 = box[0] - 8, box[1] - 2, box[2] + 8, box[3] + 2
    frame = axes.get_window_extent()
    inside = x0 >= frame.x0 and x1 <= frame.x1 + 4 and y0 >= frame.y0 and y1 <= frame.y1
    return inside and all(x1 < a or x0 > c or y1 < b or y0 > d for a, b, c, d in taken)
