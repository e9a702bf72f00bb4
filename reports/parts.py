"""Parts of a page: pictures, interactive figures with the picture that stands in for them, and a frontier with its table."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from pflsec.reports import charts, figures, grids
from pflsec.reports.charts import Chart
from pflsec.reports.figures import save
from pflsec.reports.frontier import Frontier, Point, x_text
from pflsec.reports.grids import Grid
from pflsec.reports.words import percent

MEDIA = {"png": "image/png", "svg": "image/svg+xml"}


@dataclass(frozen=True)
class Picture:
    """An image inside the page; width in CSS pixels is what it needs to be readable."""

    source: str
    alt: str
    width: int


@dataclass(frozen=True)
class Interactive:
    """A figure that plotly draws, and the picture for where no script runs."""

    chart: Chart
    picture: Picture


@dataclass(frozen=True)
class Shown:
    """A frontier on a page: its figure or why there is none, its table, its controls, and the runs without a point."""

    title: str
    figure: Interactive | str
    grid: Grid | None
    controls: Sequence[str]
    missing: Mapping[str, str]
    x: str

    @property
    def chart(self) -> Chart | None:
        """What plotly draws of it."""
        return self.figure.chart if isinstance(self.figure, Interactive) else None


def picture(figure: Figure, path: Path, kind: str, alt: str) -> Picture:
    """Write the figure's files <path>.png, .svg and .pdf; return it as an image of that kind for the page."""
    save(figure, path)
    data = path.with_name(f"{path.name}.{kind}").read_bytes()
    source = f"data:{MEDIA[kind]};base64,{base64.b64encode(data).decode()}"
    return Picture(source, alt, round(96 * figure.get_figwidth()))


def interactive(chart: Chart | None, figure: Figure, path: Path, alt: str) -> Interactive | str:
    """Write the figure's files and return it for the page; without anything to draw (no chart) return `alt`, which says why."""
    drawn = picture(figure, path, "svg", alt)
    return alt if chart is None else Interactive(chart, drawn)


def frontier(found: Frontier, path: Path, title: str = "") -> Shown:
    """Write the frontier's figure to <path>.png, .svg and .pdf, and return it with all that belongs to it."""
    said = "; ".join(
        f"{p.name}: {x_text(found, p)}, {percent(p.y)}{' (Pareto)' if p.pareto else ''}" for p in found.points
    )
    alt = f"{found.y} against {found.x}. {said}." if said else "No run has both an accuracy and a leakage."
    figure = interactive(charts.frontier(found), figures.frontier(found), path, alt)
    any_row = found.points or found.unseen
    return Shown(title, figure, grids.frontier(found) if any_row else None, found.controls, found.missing, found.x)


def frontier_table(found: Frontier) -> pd.DataFrame:
    """Return the points as a table, and after them, without an x, the methods of which nothing is seen."""
    rows = [asdict(point) | {"axis": found.x, "y_axis": found.y, "reason": ""} for point in found.points]
    rows += [asdict(one) | {"axis": found.x, "y_axis": found.y} for one in found.unseen]
    columns = ["name", "axis", "y_axis", *(name for name in Point.__dataclass_fields__ if name != "name"), "reason"]
    return pd.DataFrame(rows, columns=columns)
