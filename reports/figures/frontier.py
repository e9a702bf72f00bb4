"""The frontier as a figure: up and to the left is better."""

import math
from collections.abc import Sequence
from itertools import cycle
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from pflsec.reports.figures import labels
from pflsec.reports.figures.style import COLOURS, INK, QUIET, percent_label, sentence, style
from pflsec.reports.frontier import NOTHING, Frontier, Kind, Point, X, Y
from pflsec.reports.tables import SUCCESS

NAMED = 12  # points with their names beside them; more get numbers
SHAPES: dict[Kind, str] = {"defended": "s", "undefended": "o", NOTHING: "D"}
LEAST = {"leakage": 40.0, "recall": 1.0, "ssim": 1.0, "identified": 1.0}
"""How far x reaches at least."""
UNTRAINED = "architecture only (round 0)"


def frontier(found: Frontier) -> Figure:
    """Return the points with their spread over seeds, the frontier as steps, the blind level and the controls.

    Points are named where the names find room, else numbered, with a key below. Without points: one sentence.
    """
    if not found.points:
        return sentence("No run has both coordinates")
    with style():
        canvas = Figure(figsize=(7.8, 5.4), layout="constrained")
        axes = canvas.subplots()
        places = drawn_places(found)
        _limits(axes, found, places)
        _levels(axes, found)
        _stairs(axes, [place for place, p in zip(places, found.points, strict=True) if p.pareto], found.blind or 0.0)
        colours = colours_of(found)
        for place, point in zip(places, found.points, strict=True):
            _draw(axes, point, place, colours[point.algo])
        axes.set_xlabel(f"{X[found.x].about}  (further right: less private)")
        axes.set_ylabel(Y[found.y])
        axes.yaxis.set_major_formatter(percent_label)
        _key(canvas, found)
        names = [point.name for point in found.points]
        if len(places) > NAMED or not labels.fits(axes, names, places):
            _numbered(canvas, names)
            labels.number(axes, places)
    return canvas


def colours_of(found: Frontier, colours: Sequence[str] = COLOURS) -> dict[str, str]:
    """Return a colour for each method, in order of appearance; after the last the first comes again."""
    return dict(zip(dict.fromkeys(p.algo for p in found.points), cycle(colours), strict=False))


def drawn_places(found: Frontier) -> list[tuple[float, float]]:
    """Return where points are drawn: infinite x a little beyond the largest finite one."""
    finite = [p.x for p in found.points if math.isfinite(p.x)]
    edge = 1.35 * max(finite) if finite and max(finite) > 0 else 1.0
    return [(p.x if math.isfinite(p.x) else edge, p.y) for p in found.points]


def _limits(axes: Axes, found: Frontier, places: Sequence[tuple[float, float]]) -> None:
    starts = [p.untrained for p in found.points if p.untrained is not None]
    widest = max([x for x, _ in places] + starts)
    heights = [y for _, y in places] + [u.y for u in found.unseen]
    least = LEAST.get(found.x, 0.0)
    axes.set_xlim(-0.03 * max(least, widest), max(least, 1.12 * widest) or 1.0)
    axes.set_ylim(max(-0.03, min(heights) - 0.12), min(1.06, max(heights) + 0.12))
    if any(math.isinf(p.x) for p in found.points):
        edge = max(x for x, _ in places)
        ticks = [t for t in axes.get_xticks() if 0 <= t < 0.9 * edge]
        axes.set_xticks([*ticks, edge], [*(f"{t:g}" for t in ticks), "infinite"])


def _levels(axes: Axes, found: Frontier) -> None:
    """Draw what no message at all gives, where success begins, and how accurate the methods are of which nothing is seen."""
    top: dict[str, Any] = {"va": "bottom", "fontsize": 9, "color": QUIET, "transform": axes.get_xaxis_transform()}
    if found.blind is not None:
        axes.axvline(found.blind, color=QUIET, linewidth=1.2)
        axes.text(found.blind, 1.01, "blind guess ", ha="right", **top)
    if found.x == "leakage":
        axes.axvline(SUCCESS, color=QUIET, linewidth=1.2, linestyle=(0, (4, 3)))
        axes.text(SUCCESS, 1.01, "  success: 20 dB", ha="left", **top)
    right: dict[str, Any] = {"ha": "right", "va": "bottom", "fontsize": 8.5, "transform": axes.get_yaxis_transform()}
    for one in found.unseen:
        axes.axhline(one.y, color=QUIET, linewidth=1.2, linestyle=(0, (1, 2)))
        axes.text(0.995, one.y, f"{one.name}: no single upload is seen", color=QUIET, **right)


def _stairs(axes: Axes, places: Sequence[tuple[float, float]], left: float) -> None:
    """Draw the frontier as steps from x = left on, and a ring about each of its points."""
    x, y = zip(*sorted(places), strict=True)
    axes.step([max(value, left) for value in x], y, where="post", color=INK, linewidth=1.4, alpha=0.7, zorder=2)
    axes.plot(x, y, linestyle="", marker="o", markersize=17, markerfacecolor="none", markeredgecolor=INK, zorder=3)


def _draw(axes: Axes, point: Point, place: tuple[float, float], colour: str) -> None:
    """Draw a point, its spread over seeds as bars, and to its side what the untrained network gives away."""
    (x, y), kept = place, {"color": colour, "zorder": 4}
    if point.untrained is not None:
        axes.plot([x, point.untrained], [y, y], color=colour, linewidth=0.9, linestyle=(0, (1, 2)), zorder=2)
        axes.plot([point.untrained], [y], marker="^", markersize=7, markerfacecolor="white", **kept)  # type: ignore
    axes.errorbar([x], [y], xerr=point.x_spread, yerr=point.y_spread, capsize=3, linewidth=1.3, **kept)  # type: ignore
    inside = "white" if point.kind == "undefended" else colour
    dot: dict[str, Any] = {"marker": SHAPES[point.kind], "markersize": 9, "markerfacecolor": inside}
    axes.plot([x], [y], markeredgewidth=1.8, **dot, **kept)  # type: ignore


def _key(canvas: Figure, found: Frontier) -> None:
    kinds = {p.kind for p in found.points}
    marks = [_mark(shape, f" {kind}", kind == "undefended") for kind, shape in SHAPES.items() if kind in kinds]
    if any(p.untrained is not None for p in found.points):
        marks.append(_mark("^", f" {UNTRAINED}", True))
    ring: dict[str, Any] = {"marker": "o", "markersize": 13, "markerfacecolor": "none", "markeredgecolor": INK}
    best = Line2D([], [], color=INK, linewidth=1.4, label=" not beaten in both (Pareto)", **ring)
    canvas.legend(handles=[*marks, best], loc="outside lower center", ncols=4, fontsize=9)


def _mark(shape: str, label: str, hollow: bool) -> Line2D:
    inside = "white" if hollow else INK
    return Line2D([], [], color=INK, linestyle="", markersize=8, marker=shape, markerfacecolor=inside, label=label)


def _numbered(canvas: Figure, names: Sequence[str]) -> None:
    """Write under the axes which number is which name."""
    short = [name if len(name) <= 36 else f"{name[:35]}…" for name in names]
    keys = [Line2D([], [], linestyle="", label=f"{count}  {name}") for count, name in enumerate(short, start=1)]
    columns = 2 if max(map(len, short)) > 24 else 3
    rows = -(-len(keys) // columns)
    canvas.set_figheight(canvas.get_figheight() + 0.2 * rows)
    look: dict[str, Any] = {"fontsize": 8.5, "handlelength": 0, "handletextpad": 0, "columnspacing": 1.6}
    canvas.legend(handles=keys, loc="outside lower left", ncols=columns, **look)
