"""How all figures look, and how they become files. Safe for the colour-blind."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from pflsec.core.files import write_bytes

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#4D4D4D")  # Okabe and Ito
INK, QUIET, ALARM = "#1a1a1a", "#666666", "#D55E00"
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
    "pdf.fonttype": 42,  # text stays text
}
UNDATED: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
"""The kinds of files of a figure, and what is left out of them so that equal figures are equal bytes."""


def save(figure: Figure, path: Path) -> list[Path]:
    """Write <path>.png, .svg and .pdf atomically and return them. Equal figures give equal bytes."""
    files = [path.with_name(f"{path.name}.{kind}") for kind in UNDATED]
    for file in files:
        write_bytes(file, encode(figure, file.suffix[1:]))
    return files


def encode(figure: Figure, kind: str) -> bytes:
    """Return the figure as PNG, SVG or PDF bytes, without a date."""
    data = io.BytesIO()
    with style():
        figure.savefig(data, format=kind, dpi=110, metadata=UNDATED[kind], facecolor="white")
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


def percent_label(value: float, _: object) -> str:
    """Return an axis label for an accuracy, none outside [0, 1]."""
    return f"{100 * value:.0f} %" if -1e-6 <= value <= 1 + 1e-6 else ""
