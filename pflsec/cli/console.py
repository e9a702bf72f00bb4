"""What the commands share: where things are printed, how errors end, how long work shows its progress."""

import json
import math
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.table import Table

from pflsec.core.errors import PflsecWarning
from pflsec.core.files import to_json

WIDE = 120  # columns where there is no terminal to ask

out = Console(highlight=False, emoji=False, soft_wrap=True, width=None if sys.stdout.isatty() else WIDE)
err = Console(stderr=True, highlight=False, emoji=False, soft_wrap=True)

QUIET_SECONDS = 5.0  # without a terminal, a line of progress this often at most


def say(text: str) -> None:
    """Print a line for the reader (stderr: stdout is for results)."""
    err.print(text, markup=False)


def say_error(text: str) -> None:
    """Print a mistake of the user's on one line, whatever characters its names and paths have."""
    say("error: " + "".join(c if c.isprintable() else "?" for c in " ".join(text.split())))


def print_json(value: Any) -> None:
    """Print a result for machines: one JSON document on stdout, null instead of NaN and infinities."""
    sys.stdout.write(to_json(value) + "\n")


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table on stdout. Cells are text, never markup."""
    from rich.text import Text

    table = Table(title=title or None, title_justify="left", header_style="bold", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text("" if cell is None else str(cell)) for cell in row))
    out.print(table)


def show_warnings() -> None:
    """Print our warnings as one line each, once; hide those of libraries, which the user cannot act on."""
    warnings.resetwarnings()
    warnings.simplefilter("ignore")
    warnings.simplefilter("once", PflsecWarning)

    def show(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
        if issubclass(category, PflsecWarning):
            say(f"warning: {message}")

    warnings.showwarning = show


class Progress:
    """A bar with rate and time left on a terminal, otherwise a line every few seconds at most."""

    def __init__(self, bar: Any, task: Any, total: int, unit: str):
        self._bar, self._task, self._total, self._unit = bar, task, total, unit
        self._began = self._last = time.monotonic()
        self._done = self._here = 0

    def advance(self, note: str, done: int | None = None) -> None:
        """One more unit is done, or so many in all; the note says how it went."""
        self._done = self._done + 1 if done is None else done
        self._here += 1
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, description=note)
            return
        now = time.monotonic()
        if now - self._last >= QUIET_SECONDS or self._done == self._total:
            left = (now - self._began) / self._here * (self._total - self._done)
            say(f"{self._unit} {self._done}/{self._total}, {duration(left)} left: {note}")
            self._last = now


@contextmanager
def progress(total: int, unit: str) -> Iterator[Progress]:
    """Show the progress of `total` units of work."""
    if not err.is_terminal:
        yield Progress(None, None, total, unit)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn(unit),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Bar(*columns, console=err, transient=True) as bar:
        yield Progress(bar, bar.add_task("", total=total), total, unit)


def duration(seconds: float) -> str:
    """Return a time span in words, e.g. '2 min 05 s'."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min {seconds % 60:02.0f} s"
    return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:02.0f} min"


def megabytes(count: float) -> str:
    """Return a number of bytes in MB."""
    return f"{count / 1e6:.1f} MB"


def number(value: Any, digits: int = 2) -> str:
    """Return a number for a table; empty where there is none."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return f"{value:.{digits}f}" if isinstance(value, float) else str(value)


def as_text(value: Any) -> str:
    """Return a configuration value as one would type it."""
    return value if isinstance(value, str) else json.dumps(value)
