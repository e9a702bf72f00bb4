"""The page's interactive figures, as plain data for plotly. Colours of text and ground are the page's, set by its script.

Names come from outside and plotly reads a little markup in texts, so every text is escaped here.
"""

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

import plotly.graph_objects as go

from pflsec.core.files import plain
from pflsec.reports import words
from pflsec.reports.figures.frontier import UNTRAINED, colours_of, drawn_places
from pflsec.reports.frontier import NOTHING, Frontier, Kind, Point, X, Y, attack_text, epsilon_text, x_text
from pflsec.reports.load import RunData
from pflsec.reports.tables import SUCCESS, epsilon_label, norm_lines, norms_table

Chart = dict[str, Any]
SYMBOLS: dict[Kind, str] = {"defended": "square", "undefended": "circle-open", NOTHING: "diamond"}
INK = {"ink": True}
"""Marks a trace that is drawn in the page's colour of text."""
SHARES = ("recall", "identified", "ssim")
WHOLE = (-0.02, 1.02)
"""Range of an axis of shares, with room for points at its ends."""
COLOURS = ("#2f8fd0", "#e0671a", "#12a67c", "#d67fb1", "#dd9e00", "#5bb8ee", "#878e97")
"""The hues of the drawn figures, readable on light and on dark ground."""
LINES = ("solid", "dash", "dot", "dashdot", "longdash")


def frontier(found: Frontier) -> Chart | None:
    """Return the frontier; hovering over a point says what it is. None without points."""
    if not found.points:
        return None
    places = drawn_places(found)
    figure = go.Figure()
    _pareto(figure, found, places)
    _untrained(figure, found)
    for algo, colour in colours_of(found, COLOURS).items():
        chosen = [(p, place) for p, place in zip(found.points, places, strict=True) if p.algo == algo]
        _points(figure, found, algo, colour, chosen)
    for one in found.unseen:
        said = escape(f"{one.name}: {words.percent(one.y)}; {one.reason}", quote=False)
        figure.add_hline(y=one.y, line={"width": 1, "dash": "dot"})
        figure.add_annotation(x=1, xref="paper", xanchor="right", y=one.y, yanchor="bottom", text=said, showarrow=False)
    _levels(figure, found)
    x: Chart = {"title": {"text": f"{X[found.x].about} (right: less private)"}, "rangemode": "tozero"}
    if found.x in SHARES:
        x |= {"tickformat": ".2f" if found.x == "ssim" else ".0%"}
    if any(math.isinf(p.x) for p in found.points):
        x |= _infinite(places)
    shares = {"minallowed": WHOLE[0], "maxallowed": WHOLE[1]}  # one run alone would have an axis to 150 %
    y: Chart = {"title": {"text": Y[found.y]}, "tickformat": ".0%", "autorangeoptions": shares}
    figure.update_layout(xaxis=x, yaxis=y, hovermode="closest")
    return _chart(figure)


def accuracy(runs: Sequence[RunData]) -> Chart | None:
    """Return mean personal accuracy by round, and that of the worst tenth of the clients as thin lines."""
    figure = _lines(runs, "personal_accuracy_mean", lambda run: run.name)
    if figure is None:
        return None
    for number, run in enumerate(runs):
        table = run.metrics.dropna(subset=["personal_accuracy_worst10"])
        name = escape(f"{run.name}, worst tenth", quote=False)
        look = {"width": 1, "dash": "dot", "color": COLOURS[number % len(COLOURS)]}
        rounds, values = table["round"].tolist(), table["personal_accuracy_worst10"].tolist()
        figure.add_scatter(
            x=rounds, y=values, name=name, mode="lines", line=look, legendgroup=str(number), showlegend=False
        )
    figure.update_yaxes(tickformat=".0%", range=WHOLE, title={"text": "mean personal accuracy"})
    return _chart(figure)


def loss(runs: Sequence[RunData]) -> Chart | None:
    """Return the mean training loss of the clients by round."""
    figure = _lines(runs, "train_loss", lambda run: run.name)
    return _chart(figure.update_yaxes(title={"text": "mean training loss"}, rangemode="tozero")) if figure else None


def epsilon(runs: Sequence[RunData]) -> Chart | None:
    """Return the spent epsilon by round, the largest over clients, with the unit that it protects."""
    figure = _lines(runs, "epsilon", epsilon_label)
    return _chart(figure.update_yaxes(title={"text": "epsilon spent so far"}, rangemode="tozero")) if figure else None


def norms(runs: Sequence[RunData]) -> Chart | None:
    """Return how long each part of the server's and of the clients' state is by round; clients: means over the cohort."""
    figure, numbers = go.Figure(), {run.name: i for i, run in enumerate(runs)}
    lines = list(norm_lines(norms_table(runs)))
    kinds = list(dict.fromkeys((holder, part) for _, holder, part, _, _ in lines))
    for run, holder, part, rounds, values in lines:
        dash = LINES[kinds.index((holder, part)) % len(LINES)]
        look = {"width": 2, "color": COLOURS[numbers[run] % len(COLOURS)], "dash": dash}
        said = escape(f"{run}: {holder}, {part}", quote=False)
        figure.add_scatter(
            x=rounds, y=values, name=said, mode="lines+markers", line=look, legendgroup=escape(run, quote=False)
        )
    if not figure.data:
        return None
    figure.update_layout(xaxis=_round_axis(runs), hovermode="closest", showlegend=True)
    return _chart(figure.update_yaxes(title={"text": "Euclidean norm"}, rangemode="tozero"))


def _lines(runs: Sequence[RunData], column: str, name: Callable[[RunData], str]) -> go.Figure | None:
    """Return a line for each run that has numbers in the column, or None where none has."""
    figure = go.Figure()
    for number, run in enumerate(runs):
        table = run.metrics.dropna(subset=[column])
        if not table.empty:
            look = {
                "width": 2,
                "color": COLOURS[number % len(COLOURS)],
                "dash": LINES[number // len(COLOURS) % len(LINES)],
            }
            rounds, values = table["round"].tolist(), table[column].tolist()
            said = escape(name(run), quote=False)
            figure.add_scatter(x=rounds, y=values, name=said, mode="lines+markers", line=look, legendgroup=str(number))
    if not figure.data:
        return None
    return figure.update_layout(xaxis=_round_axis(runs), hovermode="x unified", showlegend=True)


def _round_axis(runs: Sequence[RunData]) -> Chart:
    every = {"dtick": 1} if max(len(run.metrics) for run in runs) <= 12 else {}
    return {"title": {"text": "round"}, "tickformat": "d"} | every


def _points(
    figure: go.Figure, found: Frontier, algo: str, colour: str, chosen: Sequence[tuple[Point, tuple[float, float]]]
) -> None:
    bars = {"thickness": 1.3, "width": 4}
    figure.add_scatter(
        x=[x for _, (x, _) in chosen],
        y=[y for _, (_, y) in chosen],
        error_x={"array": [p.x_spread or 0 for p, _ in chosen], **bars},
        error_y={"array": [p.y_spread or 0 for p, _ in chosen], **bars},
        mode="markers",
        name=escape(algo, quote=False),
        marker={"size": 12, "color": colour, "symbol": [SYMBOLS[p.kind] for p, _ in chosen], "line": {"width": 2}},
        hovertext=[_hover(found, p) for p, _ in chosen],
        hoverinfo="text",
    )


def _hover(found: Frontier, point: Point) -> str:
    """Return what a point is, a line for each fact."""
    facts = {
        "": point.name,
        "runs": point.runs if point.seeds > 1 else "",
        "method": point.algo,
        "defense": point.defense,
        "epsilon": epsilon_text(point),
        Y[found.y]: words.percent(point.y),
        found.x: x_text(found, point) + (" dB" if found.x == "leakage" else ""),
        "blind guess": X[found.x].written(point.blind) if point.blind is not None else "",
        "attack": f"{attack_text(point)} by the {point.adversary}" if point.attack else point.kind,
        "n": f"{point.n} victims" if point.attack else "",
        "controls": point.controls,
    }
    lines = [f"{name}: {value}" if name else value for name, value in facts.items() if value]
    return "<br>".join(escape(line, quote=False) for line in lines)


def _untrained(figure: go.Figure, found: Frontier) -> None:
    """Draw what the untrained network gives away, joined to its point by a thin line."""
    early = [(p, p.untrained) for p in found.points if p.untrained is not None and math.isfinite(p.x)]
    if not early:
        return
    joined: list[tuple[float | None, float | None]] = []
    for p, start in early:
        joined += [(start, p.y), (p.x, p.y), (None, None)]
    group = {"legendgroup": "untrained", "meta": INK, "hoverinfo": "skip"}
    figure.add_scatter(x=[x for x, _ in joined], y=[y for _, y in joined], mode="lines", opacity=0.5, showlegend=False,
                       line={"width": 1, "dash": "dot"}, **group)  # fmt: skip
    said = [escape(f"{p.name}: {UNTRAINED}: {X[found.x].written(start)}", quote=False) for p, start in early]
    figure.add_scatter(x=[start for _, start in early], y=[p.y for p, _ in early], mode="markers", name=UNTRAINED,
                       marker={"symbol": "triangle-up-open", "size": 10, "line": {"width": 1.5}},
                       **group | {"hoverinfo": "text", "hovertext": said})  # fmt: skip


def _pareto(figure: go.Figure, found: Frontier, places: Sequence[tuple[float, float]]) -> None:
    """Draw the frontier as steps from the blind level on, and a ring about each of its points."""
    best = sorted(place for place, p in zip(places, found.points, strict=True) if p.pareto)
    left = found.blind or 0.0
    name = "not beaten in both (Pareto)"
    figure.add_scatter(x=[max(x, left) for x, _ in best], y=[y for _, y in best], mode="lines", hoverinfo="skip", name=name,
                       line={"shape": "hv", "width": 1.5}, legendgroup="pareto", meta=INK)  # fmt: skip
    figure.add_scatter(x=[x for x, _ in best], y=[y for _, y in best], mode="markers", hoverinfo="skip", showlegend=False,
                       marker={"symbol": "circle-open", "size": 22, "line": {"width": 1.5}}, legendgroup="pareto",
                       meta=INK)  # fmt: skip


def _levels(figure: go.Figure, found: Frontier) -> None:
    above = {"yref": "paper", "y": 1, "yanchor": "bottom", "showarrow": False}
    if found.blind is not None:
        figure.add_vline(x=found.blind, line={"width": 1.5})
        figure.add_annotation(x=found.blind, text="blind guess", xanchor="right", **above)
    if found.x == "leakage":
        figure.add_vline(x=SUCCESS, line={"width": 1.5, "dash": "dash"})
        figure.add_annotation(x=SUCCESS, text="success: 20 dB", xanchor="left", **above)


def _infinite(places: Sequence[tuple[float, float]]) -> Chart:
    """Return ticks of an axis on whose right end infinity stands."""
    edge = max(x for x, _ in places)
    ticks = [round(edge * part / 5, 2) for part in range(4)]
    return {"tickvals": [*ticks, edge], "ticktext": [*(f"{t:g}" for t in ticks), "infinite"]}


def _chart(figure: go.Figure) -> Chart:
    """Return the figure as plain data, laid out for a page of any width."""
    below = {"orientation": "h", "yanchor": "top", "y": -0.2, "x": 0}
    figure.update_layout(template=None, legend=below, margin={"l": 60, "r": 16, "t": 34, "b": 54}, autosize=True)
    figure.update_xaxes(automargin=True, zeroline=False)
    figure.update_yaxes(automargin=True, zeroline=False)
    return plain(figure.to_plotly_json())
