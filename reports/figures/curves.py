"""Numbers by round, a line for each run: accuracy, training loss, epsilon."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from pflsec.reports.figures.style import COLOURS, QUIET, percent_label, sentence, style
from pflsec.reports.load import RunData
from pflsec.reports.tables import epsilon_label, norm_lines, norms_table

WORST: dict[str, Any] = {"linewidth": 1, "linestyle": (0, (4, 2))}
LINES = ("-", "--", ":", "-.", (0, (8, 3)))


def accuracy_curves(runs: Sequence[RunData]) -> Figure:
    """Return mean personal accuracy by round, with that of the worst tenth of the clients as a thin line."""

    def worst(axes: Axes, run: RunData, colour: str) -> None:
        table = run.metrics.dropna(subset=["personal_accuracy_worst10"])
        axes.plot(table["round"], table["personal_accuracy_worst10"], color=colour, **WORST)

    drawn = _curves(runs, "personal_accuracy_mean", "mean personal accuracy", also=worst)
    if drawn is None:
        return sentence("No run has a tested round")
    figure, axes = drawn
    axes.plot([], [], color=QUIET, label=" worst tenth of the clients", **WORST)
    axes.set_ylim(-0.02, 1.02)
    axes.yaxis.set_major_formatter(percent_label)
    return _keyed(figure)


def loss_curves(runs: Sequence[RunData]) -> Figure:
    """Return the mean training loss of the clients by round."""
    drawn = _curves(runs, "train_loss", "mean training loss of the clients")
    return _keyed(drawn[0]) if drawn else sentence("No run has recorded a training loss")


def epsilon_curves(runs: Sequence[RunData]) -> Figure:
    """Return the spent epsilon by round, the largest over clients, of the runs under differential privacy."""
    drawn = _curves(runs, "epsilon", "epsilon spent so far, the largest over clients", epsilon_label)
    if drawn is None:
        return sentence("No run is differentially private")
    drawn[1].set_ylim(bottom=0)
    return _keyed(drawn[0])


def norm_curves(runs: Sequence[RunData]) -> Figure:
    """Return how long each part of the server's and of the clients' state is by round."""
    lines, names = list(norm_lines(norms_table(runs))), [run.name for run in runs]
    if not lines:
        return sentence("No run has recorded norms")
    kinds = list(dict.fromkeys((holder, part) for _, holder, part, _, _ in lines))
    with style():
        figure = Figure(figsize=(7.6, 4.3 + 0.16 * len(lines)), layout="constrained")
        axes = figure.subplots()
        for run, holder, part, rounds, values in lines:
            colour, line = COLOURS[names.index(run) % len(COLOURS)], LINES[kinds.index((holder, part)) % len(LINES)]
            known = [math.nan if value is None else value for value in values]
            axes.plot(rounds, known, color=colour, linestyle=line, label=f" {run}: {holder}, {part}")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("round")
        axes.set_ylabel("Euclidean norm")
        axes.set_ylim(bottom=0)
    return _keyed(figure)


def _curves(
    runs: Sequence[RunData],
    column: str,
    what: str,
    name: Callable[[RunData], str] = lambda run: run.name,
    also: Callable[[Axes, RunData, str], None] = lambda axes, run, colour: None,
) -> tuple[Figure, Axes] | None:
    """Return a figure with a line for each run that has numbers, or None where none has."""
    tables = [(run, run.metrics.dropna(subset=[column])) for run in runs]
    drawn = [(run, table) for run, table in tables if not table.empty]
    if not drawn:
        return None
    with style():
        figure = Figure(figsize=(7.6, 4.3 + 0.16 * len(drawn)), layout="constrained")
        axes = figure.subplots()
        for number, (run, table) in enumerate(drawn):
            colour, line = COLOURS[number % len(COLOURS)], LINES[number // len(COLOURS) % len(LINES)]
            dots: dict[str, Any] = {"marker": "o" if len(table) <= 12 else "", "markersize": 4}
            # The space keeps a name with a leading "_" in the legend.
            label = f" {name(run)}"
            axes.plot(table["round"], table[column], color=colour, label=label, linewidth=2, linestyle=line, **dots)
            also(axes, run, colour)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("round")
        axes.set_ylabel(what)
    return figure, axes


def _keyed(figure: Figure) -> Figure:
    with style():
        figure.legend(loc="outside lower center", ncols=3, fontsize=9.5)
    return figure
