"""The gallery of an attack: originals, reconstructions and blind guesses side by side, or texts with their words marked."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from pflsec.core.errors import RunError
from pflsec.core.files import write_bytes
from pflsec.core.items import Items
from pflsec.core.tensors import read_items
from pflsec.reports import texts
from pflsec.reports.figures.style import ALARM, INK, QUIET, encode, sentence, style
from pflsec.reports.load import AttackData, CaptureId, RunData, load_run
from pflsec.reports.tables import FAILED

MOST = 10  # images in a gallery
COLUMNS = ("original", "reconstruction", "blind guess")
CHANNELS = 3  # of a signal, in a gallery
HEAD, CAPTION = 0.85, 2.05  # inches above and to the right of a gallery's pictures
CAP = 100.0  # dB; equal images
CURVES: dict[str, dict[str, Any]] = {
    "blind guess": {"color": "#aaaaaa", "linewidth": 1.0, "linestyle": (0, (2, 2))},
    "original": {"color": INK, "linewidth": 1.8},
    "reconstruction": {"color": ALARM, "linewidth": 1.2},
}


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
    columns = [f"channel {i}" for i in range(min(CHANNELS, channels))] if signals else list(COLUMNS)
    notes = _left_out(len(pairs), total, "signals" if signals else "images")
    notes += [f"{len(columns)} of {channels} channels"] if signals and channels > len(columns) else []
    with style():
        figure, grid = _table(columns, len(pairs), 1.9 if signals else 1.12)
        for row, pair in zip(grid, pairs, strict=True):
            (_curves if signals else _pictures)(row, pair, blind)
            _caption(row[-1], pair, blind)
        _heading(figure, f"{run.name} · {attack.name}", "; ".join(notes))
        if signals:
            _curve_key(figure)
    return figure


def _left_out(shown: int, total: int, things: str) -> list[str]:
    """Return what the heading says of how many there are, and of their order."""
    if total == 1:
        return []
    count = f"{shown} of {total} {things}, {total - shown} left out" if shown < total else f"{total} {things}"
    return [count, "worst leak first"]


def _table(columns: Sequence[str], rows: int, width: float) -> tuple[Figure, np.ndarray]:
    """Return a figure and its axes [rows, columns], the columns `width` inches wide, with room for a heading and captions."""
    size = 0.2 + width * len(columns) + CAPTION, HEAD + 1.2 * rows
    figure = Figure(figsize=size)
    grid = figure.subplots(rows, len(columns), squeeze=False)
    sides = {"left": 0.2 / size[0], "right": 1 - CAPTION / size[0], "top": 1 - HEAD / size[1], "bottom": 0.1 / size[1]}
    figure.subplots_adjust(**sides, wspace=0.08, hspace=0.12)
    for axes, column in zip(grid[0], columns, strict=True):
        axes.set_title(column, fontsize=9, color=QUIET)
    return figure, grid


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
