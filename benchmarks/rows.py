"""Tables whose rows take long to make: kept in a CSV file, where runs that stand there are not made again."""

import csv
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from pflsec import api

FOLDER = Path(__file__).parents[1] / "docs" / "tables"
Row = dict[str, Any]
Job = TypeVar("Job", bound=tuple[Any, ...])


@dataclass(frozen=True)
class Table:
    """A CSV file in docs/tables.

    name     of the file, without its ending
    columns  in order
    key      the columns that say which run a row is of
    order    the columns by which rows are sorted in the end
    """

    name: str
    columns: Sequence[str]
    key: Sequence[str]
    order: Sequence[str]

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.csv"

    def missing(self, jobs: Sequence[Job], key: Callable[[Job], tuple[Any, ...]]) -> list[Job]:
        """Return the runs that have no rows yet."""
        there = set()
        if self.path.exists():
            found = pd.read_csv(self.path, keep_default_na=False)
            there = set(found[list(self.key)].astype(str).itertuples(index=False, name=None))
        return [job for job in jobs if tuple(map(str, key(job))) not in there]

    def fill(self, todo: Sequence[Job], run: Callable[[Job], list[Row]], workers: int | None = None) -> pd.DataFrame:
        """Make runs, so many at once, one thread each; return the whole table, which the file then holds in order."""
        os.environ["OMP_NUM_THREADS"] = "1"
        new = not self.path.exists()
        with self.path.open("a", newline="") as file, ProcessPoolExecutor(workers or os.cpu_count()) as pool:
            writer = csv.DictWriter(file, self.columns, lineterminator="\n")
            if new:
                writer.writeheader()
            for future in as_completed([pool.submit(run, job) for job in todo]):
                writer.writerows(map(rounded, future.result()))
                file.flush()
                print(*(future.result()[0][k] for k in self.key), flush=True)
        table = pd.read_csv(self.path).sort_values(list(self.order), ignore_index=True)
        table.to_csv(self.path, index=False)
        return table


def inverted(trained: api.Run, folder: str, iterations: int, **options: Any) -> list[dict[Any, Any]]:
    """Return the rows of Inverting Gradients on a run's captures: one restart, single precision, no LPIPS."""
    scores = api.attack(
        trained,
        ["inverting-gradients"],
        runs_dir=folder,
        iterations=iterations,
        restarts=1,
        settings={"precision": "float32"},
        lpips="none",
        **options,
    )
    assert isinstance(scores, list)
    return scores[0].table.to_dict("records")


def rounded(row: Mapping[str, Any]) -> Row:
    """Return a row with its numbers to four digits."""
    return {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in row.items()}
