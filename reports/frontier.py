"""The privacy-utility frontier: a point for each run, the runs that no other beats in both, and how they are drawn."""

import base64
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from pflsec.core.errors import ConfigError, RunError, unknown
from pflsec.core.files import to_csv, write_json, write_text
from pflsec.reports import tables, words
from pflsec.reports.figures import COLOURS, INK, NAMED, QUIET, name_points, percent_label, save, sentence, style
from pflsec.reports.load import RunData, load_runs

Kind = Literal["defended", "undefended", "nothing on the wire"]
X = {
    "leakage": "median PSNR of the worst attack in dB",
    "ssim": "mean SSIM of the attack with the highest",
    "identified": "share of victims identified by the attack with the highest",
    "epsilon": "epsilon of the guarantee, the largest over clients; no guarantee: infinite",
}
Y = {
    "accuracy": "mean personal accuracy",
    "global": "accuracy of the global model",
    "worst10": "accuracy of the worst tenth of the clients",
}
NOTHING: Kind = "nothing on the wire"
SHAPES: dict[Kind, str] = {"defended": "s", "undefended": "o", NOTHING: "D"}
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Point:
    """A run in the plane: less x is more private, more y more useful. `attack` is the one that x comes from."""

    run: str
    algo: str
    defense: str
    kind: Kind
    x: float
    y: float
    attack: str
    knowledge: str
    blind: float | None
    pareto: bool = False


@dataclass(frozen=True)
class Frontier:
    """All points, for each run that has none the reason, and why the runs may not be set against each other."""

    x: str
    y: str
    points: list[Point]
    missing: dict[str, str]
    cautions: list[str]

    @property
    def blind(self) -> float | None:
        """The median over runs of what no message at all gives; only PSNR has one."""
        level = _common_level(self.points, self.x)
        return level if math.isfinite(level) else None


def measure(runs: Sequence[RunData], x: str = "leakage", y: str = "accuracy") -> Frontier:
    """Return the frontier of runs. Raises ConfigError for an x or y that is not one of X and Y."""
    for what, name, known in (("--x", x, X), ("--y", y, Y)):
        if name not in known:
            raise ConfigError(unknown(what, name, known))
    points, missing = [], {}
    for run in runs:
        found = _point(run, x, y)
        if isinstance(found, Point):
            points.append(found)
        else:
            missing[run.name] = found
    level = _common_level(points, x)
    best = pareto([(max(p.x, level), p.y) for p in points])  # worse than a guess is no more private than a guess
    marked = [replace(p, pareto=i in best) for i, p in enumerate(points)]
    return Frontier(
        x,
        y,
        sorted(marked, key=lambda p: (p.x, -p.y, p.run)),
        missing,
        words.cautions(runs, tables.leakage_table(runs)),
    )


def _common_level(points: Iterable[Point], x: str) -> float:
    levels = [p.blind for p in points if p.blind is not None]
    return float(np.median(levels)) if levels and x == "leakage" else -math.inf


def pareto(places: Sequence[tuple[float, float]]) -> set[int]:
    """Return which places no other beats: none has as little x and as much y, and more of one. Equals stay together."""
    return {i for i, (x, y) in enumerate(places) if not any(a <= x and b >= y and (a < x or b > y) for a, b in places)}


def _point(run: RunData, x: str, y: str) -> Point | str:
    """Return a run's point, or why it has none."""
    final = next(row for row in tables.records(tables.accuracy_table([run])) if row["at"] == "final")
    height = final["mean" if y == "accuracy" else y]
    if not isinstance(height, float):
        return "its method has no global model" if height == "none" else "no round has been tested"
    silent = not any(row["direction"] == "up" for row in run.manifest["wire"])
    defense = tables.defense_of(run)
    common = {"run": run.name, "algo": run.manifest["algorithm"]["key"], "defense": defense, "y": height}
    kind: Kind = NOTHING if silent else "undefended" if defense == "none" else "defended"
    rows = tables.records(tables.leakage_table([run]))
    if x == "epsilon":
        spent = math.inf if final["epsilon"] is None or _untrusted(run) else final["epsilon"]
        return Point(**common, kind=kind, x=0.0 if silent else spent, attack="", knowledge="", blind=None)
    if silent:
        level = _blind_level(run)
        return Point(**common, kind=kind, x=level if x == "leakage" else 0.0, attack="", knowledge="", blind=level)
    worst = _worst(rows, {"leakage": "psnr_median"}.get(x, x))
    if worst is None:
        reasons = "; ".join(sorted({row[why] for row in rows for why in ("reasons", "not_valid_reasons")} - {""}))
        return f"no attack gave a score{': ' + reasons if reasons else ''}" if rows else "it has not been attacked"
    where = {"attack": worst["attack"], "knowledge": worst["knowledge"], "blind": worst["psnr_blind"]}
    return Point(**common, kind=kind, x=worst["psnr_median" if x == "leakage" else x], **where)


def _worst(rows: Iterable[Row], name: str) -> Row | None:
    """Return the row with the highest value: of attacks on what the wire shows, or of all where there is none such."""
    scored = [row for row in rows if row[name] is not None]
    wire = [row for row in scored if row["knowledge"] == "wire"]
    return max(wire or scored, key=lambda row: row[name], default=None)


def _untrusted(run: RunData) -> bool:
    """Return whether the run's epsilon is none: its noise was fixed, for a test."""
    return bool((run.manifest.get("dp") or {}).get("test_seed"))


def _blind_level(run: RunData) -> float:
    """Return the PSNR of the guess without any message, over a run's victims; 0 dB where nothing was captured."""
    levels = tables.victims_table([run])["psnr_blind"].dropna()
    return 0.0 if levels.empty else float(levels.median())


def table(found: Frontier) -> list[list[str]]:
    """Return a row of text for each point, the header first."""
    header = ["pareto", "run", "algo", "defense", found.x, found.y, "attack", "knowledge", "mark"]
    rows = [
        [
            "*" if p.pareto else "",
            p.run,
            p.algo,
            p.defense,
            x_text(found, p),
            words.percent(p.y),
            p.attack,
            p.knowledge,
            p.kind,
        ]
        for p in found.points
    ]
    return [header, *rows]


def x_text(found: Frontier, point: Point) -> str:
    """Return a point's x as text."""
    if math.isinf(point.x):
        return "infinite"
    return (
        words.percent(point.x) if found.x == "identified" else words.number(point.x, 1 if found.x == "leakage" else 2)
    )


def figure(found: Frontier) -> Figure:
    """Return the frontier as a figure: up and to the left is better."""
    if not found.points:
        return sentence("No run has both coordinates")
    with style():
        canvas = Figure(figsize=(7.8, 5.2), layout="constrained")
        axes = canvas.subplots()
        places, left = _places(found), found.blind or 0.0
        _limits(axes, found, places)
        _levels(axes, found)
        colours = dict(
            zip(dict.fromkeys(p.algo for p in found.points), [c for _ in range(9) for c in COLOURS], strict=False)
        )
        _stairs(axes, [place for place, p in zip(places, found.points, strict=True) if p.pareto], left)
        for (x, y), p in zip(places, found.points, strict=True):
            inside = "white" if p.kind == "undefended" else colours[p.algo]
            dot: dict[str, Any] = {
                "marker": SHAPES[p.kind],
                "markersize": 9,
                "markerfacecolor": inside,
                "markeredgewidth": 1.8,
            }
            axes.plot([x], [y], color=colours[p.algo], zorder=4, **dot)
        axes.set_xlabel(f"{X[found.x]}  (further right: less private)")
        axes.set_ylabel(Y[found.y])
        axes.yaxis.set_major_formatter(percent_label)
        _key(canvas, {p.kind for p in found.points})
        if len(places) <= NAMED:
            name_points(axes, [(p.run, *place) for place, p in zip(places, found.points, strict=True)])
        else:
            _colour_key(canvas, colours)
    return canvas


def _places(found: Frontier) -> list[tuple[float, float]]:
    """Return where points are drawn: infinite x a little beyond the largest finite one."""
    finite = [p.x for p in found.points if math.isfinite(p.x)]
    edge = 1.35 * max(finite) if finite and max(finite) > 0 else 1.0
    return [(p.x if math.isfinite(p.x) else edge, p.y) for p in found.points]


def _limits(axes: Axes, found: Frontier, places: Sequence[tuple[float, float]]) -> None:
    widest, heights = max(x for x, _ in places), [y for _, y in places]
    least = {"leakage": 40.0, "ssim": 1.0, "identified": 1.0}.get(found.x, 0.0)
    axes.set_xlim(-0.03 * max(least, widest), max(least, 1.12 * widest) or 1.0)
    axes.set_ylim(max(-0.03, min(heights) - 0.12), min(1.06, max(heights) + 0.12))
    infinite = {x for (x, _), p in zip(places, found.points, strict=True) if math.isinf(p.x)}
    if infinite:
        edge = infinite.pop()
        ticks = [t for t in axes.get_xticks() if 0 <= t < 0.9 * edge]
        axes.set_xticks([*ticks, edge], [*(f"{t:g}" for t in ticks), "infinite"])


def _levels(axes: Axes, found: Frontier) -> None:
    top: dict[str, Any] = {"va": "bottom", "fontsize": 9, "color": QUIET, "transform": axes.get_xaxis_transform()}
    if found.blind is not None:
        axes.axvline(found.blind, color=QUIET, linewidth=1.2)
        axes.text(found.blind, 1.01, "blind guess", ha="center", **top)
    if found.x == "leakage":
        axes.axvline(tables.SUCCESS, color=QUIET, linewidth=1.2, linestyle=(0, (4, 3)))
        axes.text(tables.SUCCESS, 1.01, "  success: 20 dB", ha="left", **top)


def _stairs(axes: Axes, places: Sequence[tuple[float, float]], left: float) -> None:
    """Draw the frontier as steps from x = left on, and a ring about each of its points."""
    x, y = zip(*sorted(places), strict=True)
    axes.step([max(value, left) for value in x], y, where="post", color=INK, linewidth=1.4, alpha=0.7, zorder=2)
    axes.plot(x, y, linestyle="", marker="o", markersize=17, markerfacecolor="none", markeredgecolor=INK, zorder=3)


def _key(canvas: Figure, kinds: set[Kind]) -> None:
    inside: Callable[[Kind], str] = lambda kind: "white" if kind == "undefended" else INK  # noqa: E731
    marks = [
        Line2D(
            [], [], color=INK, linestyle="", markersize=8, marker=shape, markerfacecolor=inside(kind), label=f" {kind}"
        )
        for kind, shape in SHAPES.items()
        if kind in kinds
    ]
    ring: dict[str, Any] = {"marker": "o", "markersize": 13, "markerfacecolor": "none", "markeredgecolor": INK}
    best = Line2D([], [], color=INK, linewidth=1.4, label=" not beaten in both (Pareto)", **ring)
    canvas.legend(handles=[*marks, best], loc="outside lower center", ncols=4, fontsize=9)


def _colour_key(canvas: Figure, colours: Mapping[str, str]) -> None:
    lines = [Line2D([], [], color=colour, linewidth=5, label=f" {algo}") for algo, colour in colours.items()]
    canvas.legend(handles=lines, loc="outside upper center", ncols=6, fontsize=9)


def write(run_paths: Sequence[Path], out: Path, x: str = "leakage", y: str = "accuracy") -> Frontier:
    """Write out/frontier.png, .svg, .csv, .json and index.html, which needs no other file; return the frontier.

    Raises RunError when a run is damaged or none is given, ConfigError for an unknown x or y.
    """
    if not run_paths:
        raise RunError("a frontier needs runs; train some with pflsec train, and attack them with pflsec attack.")
    found = measure(load_runs(run_paths), x, y)
    files = save(figure(found), out / "frontier")
    rows = [asdict(point) for point in found.points]
    write_text(out / "frontier.csv", to_csv(list(Point.__dataclass_fields__), rows))
    infinite = [
        row | {"x": None if math.isinf(row["x"]) else row["x"], "x_infinite": math.isinf(row["x"])} for row in rows
    ]
    write_json(
        out / "frontier.json",
        {
            "x": x,
            "y": y,
            "blind": found.blind,
            "points": infinite,
            "missing": found.missing,
            "cautions": found.cautions,
        },
    )
    picture = base64.b64encode(files[1].read_bytes()).decode()
    page = Environment(
        loader=PackageLoader("pflsec.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    ).get_template("frontier.html.j2")
    header, *body = table(found)
    content = {"found": found, "picture": picture, "header": header, "rows": body, "about_x": X[x], "about_y": Y[y]}
    write_text(out / "index.html", page.render(**content))
    return found
