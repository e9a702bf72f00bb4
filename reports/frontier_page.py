"""The frontier as files: figure, table, and a page that needs no other file."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from pflsec.core.errors import RunError
from pflsec.core.files import to_csv, write_json, write_text
from pflsec.reports import exports, html, parts
from pflsec.reports.frontier import Frontier, X, Y, measure
from pflsec.reports.grids import frontier as grid_of
from pflsec.reports.load import load_runs
from pflsec.reports.tables import records


def write(run_paths: Sequence[Path], out: Path, x: str = "leakage", y: str = "accuracy") -> Frontier:
    """Write out/frontier.png, .svg, .pdf, .csv, .json, .tex and index.html, which needs no other file; return the frontier.

    Raises RunError when a run is damaged or none is given, ConfigError for an unknown x or y.
    """
    if not run_paths:
        raise RunError("a frontier needs runs; train some with pflsec train, and attack them with pflsec attack.")
    runs = load_runs(run_paths)
    found = measure(runs, x, y)
    shown = parts.frontier(found, out / "frontier")
    table = parts.frontier_table(found)
    write_text(out / "frontier.csv", to_csv([str(column) for column in table.columns], records(table)))
    write_text(out / "frontier.tex", exports.latex(grid_of(found)))
    write_json(out / "frontier.json", as_dict(found))
    content = {
        "title": "Privacy-utility frontier",
        "shown": shown,
        "cautions": found.cautions,
        "count": len(runs),
        "about_x": X[found.x].about,
        "about_y": Y[found.y],
    }
    write_text(out / "index.html", html.render("frontier.html.j2", content, [shown.chart]))
    return found


def as_dict(found: Frontier) -> dict[str, object]:
    """Return the frontier as JSON can hold it: an infinite x is null, and x_infinite says so."""
    points = [asdict(p) | {"x_infinite": math.isinf(p.x)} for p in found.points]
    for point in points:
        point["x"] = None if point["x_infinite"] else point["x"]
    return asdict(found) | {"points": points, "blind": found.blind}
