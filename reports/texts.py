"""The gallery of an attack on texts: each true text, its recovered words marked, and what was found beside them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
from matplotlib.figure import Figure
from torch import Tensor

from pflsec.core.errors import RunError
from pflsec.core.inputs import PAD
from pflsec.core.tensors import read_items
from pflsec.reports.load import AttackData, RunData

MOST = 16  # texts in a gallery
WIDTH = 100  # characters in a line of the figure
SIZE, LINE = 9.5, 0.215  # font size in points, height of a line in inches
LETTER = 0.6021 * SIZE / 72  # width of a letter of DejaVu Sans Mono, in inches
MARGIN = 0.25
INK, QUIET, FOUND, ALARM = "#1a1a1a", "#8a8a8a", "#bcdcf2", "#D55E00"


@dataclass(frozen=True)
class Telling:
    """One true text and what an attack found of it.

    words   the true words in their order, each with whether it was recovered; a word that stands there twice may be so once
    added   words of the reconstruction that are not in the text, or not so often
    blind   number of words that the best guess without any message has in common with the text
    about   where the text comes from, and its label      label  the label that was found, or ""      status  the attack's
    """

    words: tuple[tuple[str, bool], ...]
    added: tuple[str, ...]
    blind: int
    about: str
    label: str
    status: str

    @property
    def found(self) -> int:
        """Number of true words that were recovered."""
        return sum(hit for _, hit in self.words)

    @property
    def summary(self) -> str:
        """How much was recovered, in one line."""
        exact = ", as often each and no other" if self.found == len(self.words) and not self.added else ""
        label = f"; label found: {self.label}" if self.label else ""
        return f"{self.found} of {len(self.words)} words recovered{exact} (a blind guess: {self.blind}){label}"


def tellings(run: RunData, attack: AttackData) -> tuple[list[Telling], int]:
    """Return the first 16 texts with what was found, in the captures' order, and how many there are.

    Raises RunError for damaged files.
    """
    path = attack.folder / "reconstructions.safetensors"
    found = read_items(path, f"the reconstructions of attack '{attack.id}'") if path.exists() else {}
    guess = read_items(run.path / "vault" / "pool.safetensors", "the blind guess").get("mean") if found else None
    told: list[Telling] = []
    for capture in attack.captures:
        if capture.text not in found or len(told) >= MOST:
            continue
        file = run.path / "vault" / f"{capture.text}.safetensors"
        truth = read_items(file, f"the truth of capture '{capture.text}'").get("x")
        tokens = found[capture.text]
        if truth is None or guess is None or truth.dim() != 2 or tokens.dim() != 2 or len(truth) != len(tokens):
            raise RunError(
                f"{file} or the reconstructions of attack '{attack.id}' are damaged: they do not fit each other."
            )
        row = attack.row(capture)
        true, labels = (_labels(run, row, name, len(truth)) for name in ("label_true", "label_found"))
        where = f"client {capture.client}, round {capture.round}"
        status = "" if row is None else str(row["status"])
        told += [
            _telling(run, text, guessed, guess, f"{where} · {label}", named, status)
            for text, guessed, label, named in zip(truth, tokens, true, labels, strict=True)
        ]
    return told[:MOST], sum(len(found[c.text]) for c in attack.captures if c.text in found)


def sheet(told: Sequence[Telling], title: str) -> Figure:
    """Return texts one below the other: recovered words on a coloured ground, the others grey."""
    blocks = [_lines(one) for one in told]
    height = 2 * MARGIN + LINE * (2 + sum(len(lines) + 2 for lines in blocks))
    figure = Figure(figsize=(2 * MARGIN + LETTER * WIDTH, height))
    width = figure.get_figwidth()

    def write(column: int, y: float, text: str, **how: object) -> None:
        place = (MARGIN + column * LETTER) / width, 1 - y / height
        figure.text(*place, text, va="center", **{"family": "DejaVu Sans Mono", "size": SIZE, "color": INK} | how)  # type: ignore

    y = MARGIN + LINE / 2
    write(0, y, title, family="DejaVu Sans", size=11.5)
    y += 1.3 * LINE
    ground = {"boxstyle": "square,pad=0.18", "facecolor": FOUND, "edgecolor": "none"}
    write(0, y, "recovered", bbox=ground)
    write(11, y, "not recovered", color=QUIET)
    write(26, y, "+ found, but not in the text", color=ALARM)
    write(WIDTH, y, "<unk>: a word outside the vocabulary", color=QUIET, ha="right")
    y += 1.7 * LINE
    for one, lines in zip(told, blocks, strict=True):
        write(0, y, f"{one.about} · {one.status}", family="DejaVu Sans", weight="bold", size=9)
        write(WIDTH, y, one.summary, family="DejaVu Sans", size=9, ha="right")
        y += 1.2 * LINE
        for line in lines:
            for column, word, kind in line:
                how = {"hit": {"bbox": ground}, "miss": {"color": QUIET}, "added": {"color": ALARM}}[kind]
                write(column, y, word, **how)
            y += LINE
        y += 0.8 * LINE
    return figure


def _lines(one: Telling) -> list[list[tuple[int, str, str]]]:
    """Return the words of a text in lines of at most WIDTH letters: (column, word, hit | miss | added)."""
    words = [(word, "hit" if hit else "miss") for word, hit in one.words]
    lines: list[list[tuple[int, str, str]]] = [[]]
    column = 0
    for word, kind in [*words, *((f"+{word}", "added") for word in one.added)]:
        shown = word if len(word) <= 40 else word[:39] + "…"
        if column + len(shown) > WIDTH:
            lines.append([])
            column = 0
        lines[-1].append((column, shown, kind))
        column += len(shown) + 1
    return lines


def _telling(
    run: RunData, text: Tensor, guessed: Tensor, blind: Tensor, about: str, label: str, status: str
) -> Telling:
    true, left = _plain(text), Counter(_plain(guessed))
    common = Counter(true) & Counter(_plain(blind))
    marked = []
    for token in true:
        marked.append((run.word(token), left[token] > 0))
        left[token] -= left[token] > 0
    added = tuple(run.word(token) for token in sorted(left.elements()))
    return Telling(tuple(marked), added, common.total(), about, label, status)


def _plain(tokens: Tensor) -> list[int]:
    return [int(token) for token in tokens if token != PAD]


def _labels(run: RunData, row: pd.Series | None, name: str, count: int) -> list[str]:
    words = [] if row is None else str(row[name]).split()
    return [run.class_name(word) for word in words] if len(words) == count else [""] * count
