"""Names beside the points of a figure: none hides another, or numbers stand for all of them."""

from collections.abc import Sequence
from itertools import product
from typing import Any

from matplotlib import patheffects
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text

from pflsec.reports.figures.style import QUIET

Place = tuple[float, float]
Box = tuple[float, float, float, float]
"""Left, bottom, right, top in the canvas's pixels."""
OFFSETS = (9, -18, 24, -33, 39, -48, 54, -63)


def fits(axes: Axes, names: Sequence[str], places: Sequence[Place]) -> bool:
    """Write each name by its place (x, y); return whether all stand free of each other, or take all away again."""
    written: list[Annotation] = []
    taken = _dots(axes, places)
    for place, name in sorted(zip(places, names, strict=True), key=lambda pair: pair[0][::-1], reverse=True):
        text = _placed(axes, name, place, taken)
        if text is None:
            for other in written:
                other.remove()
            return False
        written.append(text)
        taken.append(_box(text))
    return True


def number(axes: Axes, places: Sequence[Place]) -> None:
    """Write 1, 2, ... by the places (x, y); places that coincide share one text, and what finds no room stands over others."""
    shared: dict[Place, list[str]] = {}
    for count, place in enumerate(places, start=1):
        shared.setdefault(place, []).append(str(count))
    taken = _dots(axes, places)
    for place, numbers in shared.items():
        text = _placed(axes, ", ".join(numbers), place, taken) or _write(axes, ", ".join(numbers), place, 9, "center")
        taken.append(_box(text))


def _dots(axes: Axes, places: Sequence[Place]) -> list[Box]:
    """Return the boxes of the points themselves."""
    figure = axes.figure
    assert isinstance(figure, Figure)
    figure.draw_without_rendering()  # fixes the layout, and with it where points lie
    return [(x - 6, y - 6, x + 6, y + 6) for x, y in axes.transData.transform(places)]


def _placed(axes: Axes, name: str, place: Place, taken: list[Box]) -> Annotation | None:
    """Return the name written by its point, or far off with a line leading there; None where there is no room for it."""
    for dy, side in product(OFFSETS, ("center", "left", "right")):
        text = _write(axes, name, place, dy, side)
        if _free(_box(text), axes, taken):
            return text
        text.remove()
    return None


def _write(axes: Axes, name: str, place: Place, dy: int, side: str) -> Annotation:
    leader = {"arrowstyle": "-", "color": QUIET, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 5} if abs(dy) > 20 else None
    where: dict[str, Any] = {"xytext": (0, dy), "textcoords": "offset points", "ha": side}
    text = axes.annotate(name, place, fontsize=9.5, zorder=6, arrowprops=leader, **where)
    text.set_path_effects([patheffects.withStroke(linewidth=3, foreground="white")])
    text.set_in_layout(False)  # the layout, and with it the places, are fixed
    return text


def _box(text: Annotation) -> Box:
    text.get_window_extent()  # moves the text to its offset
    box = Text.get_window_extent(text)  # of the words, without the leading line
    return box.x0, box.y0, box.x1, box.y1


def _free(box: Box, axes: Axes, taken: list[Box]) -> bool:
    x0, y0, x1, y1 = box[0] - 8, box[1] - 2, box[2] + 8, box[3] + 2
    frame = axes.get_window_extent()
    inside = x0 >= frame.x0 and x1 <= frame.x1 + 4 and y0 >= frame.y0 and y1 <= frame.y1
    return inside and all(x1 < a or x0 > c or y1 < b or y0 > d for a, b, c, d in taken)
