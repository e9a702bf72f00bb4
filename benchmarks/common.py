"""What the benchmarks share: interleaved timing and tables. Figures are ratios within one run: machines are noisy."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence


def interleaved(candidates: Mapping[str, Callable[[], object]], repeats: int = 7) -> dict[str, list[float]]:
    """Return seconds of each candidate, measured in turn A B A B ..., after one warm-up of each."""
    for run in candidates.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(repeats):
        for name, run in candidates.items():
            began = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - began)
    return seconds


def ratio(seconds: dict[str, list[float]], of: str, to: str) -> float:
    """Return the median over pairs of seconds[of] / seconds[to]."""
    return statistics.median(a / b for a, b in zip(seconds[of], seconds[to], strict=True))


def table(title: str, columns: Sequence[str], body: Sequence[Sequence[object]]) -> None:
    """Print a Markdown table."""
    print(f"\n{title}\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for cells in body:
        row(cells)


def row(*parts: Sequence[object]) -> None:
    """Print one more row of a Markdown table, made of these parts."""
    cells = [f"{cell:.3g}" if isinstance(cell, float) else str(cell) for part in parts for cell in part]
    print(f"| {' | '.join(cells)} |", flush=True)
