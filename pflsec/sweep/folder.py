"""A sweep's folder: runs/<training>, sweep.json and sweep.csv with a row for each training and attack, report/, frontier/."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from pflsec.core.errors import RunError
from pflsec.core.files import disk_errors, locked, to_csv, write_json, write_text
from pflsec.reports import controls, tables
from pflsec.reports.frontier_page import write as write_frontier
from pflsec.reports.load import RunData, load_run
from pflsec.reports.page import write as write_page
from pflsec.sweep import work
from pflsec.sweep.file import Sweep
from pflsec.sweep.work import Ending, How, Progress

SCHEMA = 1
NOT_APPLICABLE = "not-applicable"
COLUMNS = (
    "status", "reason", "run", "accuracy", "epsilon", "attack", "adversary", "knowledge", "victims", "psnr_median",
    "psnr_worst", "psnr_blind", "controls",
)  # fmt: skip
"""After the training and its axes. accuracy: mean personal accuracy of the last tested round, in [0, 1]; epsilon: the largest
over clients; psnr_*: capped PSNR in dB over the attack's victims, worst being the highest; controls: what the attack's
controls say of it. status: done, not-applicable (for the reason), failed, planned, running or interrupted."""
LEFTOVERS = (".lock", ".sweep.")
"""Beginnings of names that a process may leave which was killed before the first sweep.json."""
Row = dict[str, Any]


class SweepFolder:
    """Where a sweep's trainings and results lie. All of it is found again by the next call, whatever became of the last."""

    def __init__(self, path: Path, sweep: Sweep):
        self.path, self.sweep = path, sweep
        self.runs = path / "runs"

    def run(self, how: How) -> list[Row]:
        """Do what is not done yet; return the rows of sweep.csv, which are on disk after every cell, report and frontier too.

        Raises RunError where the folder is something else's, or another process works on the same sweep.
        """
        self._claim()
        busy = (
            f"the sweep in {self.path} is being run by another process; wait for it to end, or give yours another name."
        )
        with locked(self.path / ".lock", busy):
            rows = {cell.name: self._rows(Progress(cell)) for cell in self.sweep.cells}
            self._write(rows)

            def changed(one: Progress) -> None:
                rows[one.cell.name] = self._rows(one)
                self._write(rows)
                how.on_change(one)

            ended = work.run(self.sweep.cells, self.sweep.attacks, self.runs, replace(how, on_change=changed))
            self._draw(ended)
        return list(chain.from_iterable(rows.values()))

    def _claim(self) -> None:
        """Make the folder (mode 0700: it holds private images), unless it is there."""
        there = self.path.exists()
        if there and not (self.path / "sweep.json").exists():
            strange = (
                [p.name for p in self.path.iterdir() if not p.name.startswith(LEFTOVERS)]
                if self.path.is_dir()
                else [""]
            )
            if strange:
                raise RunError(f"{self.path} exists, and is no sweep's folder; give the sweep another name.")
        with disk_errors(self.path):
            self.path.mkdir(parents=True, mode=0o700, exist_ok=True)

    def _write(self, rows: Mapping[str, Sequence[Row]]) -> None:
        flat, columns = list(chain.from_iterable(rows.values())), ["training", *self.sweep.axes, *COLUMNS]
        write_json(self.path / "sweep.json", {"schema": SCHEMA, "name": self.sweep.name, "rows": flat})
        write_text(self.path / "sweep.csv", to_csv(columns, flat))

    def _rows(self, one: Progress) -> list[Row]:
        """Return a training's rows: one for each attack, or one of its own where there is none to speak of."""
        try:
            data = load_run(one.run) if one.run is not None and one.training.state == "done" else None
        except RunError as damage:
            data = None
            one.training.fail(damage)
        row = {"training": one.cell.name, **one.cell.training.axes, **_trained(data), **_status(one.training)}
        if one.training.state in ("refused", "failed") or not self.sweep.attacks:
            return [row]
        return [row | self._attack_row(one, attack.label, data) for attack in self.sweep.attacks]

    def _attack_row(self, one: Progress, label: str, data: RunData | None) -> Row:
        if data is None:
            return {"attack": label}
        row, scores = {"attack": label} | _status(one.attacks.get(label, Ending())), one.scores.get(label)
        return row if scores is None else row | _attacked(data, scores)

    def _draw(self, ended: Sequence[Progress]) -> None:
        """Write report and frontier of all trainings that were finished."""
        paths = [one.run for one in ended if one.run is not None and one.training.state == "done"]
        if paths:
            write_page(paths, self.path / "report")
            write_frontier(paths, self.path / "frontier")


def _status(ending: Ending) -> Row:
    status = NOT_APPLICABLE if ending.state == "refused" else ending.state
    return {"status": status, "reason": ending.reason, "details": ending.details}


def _trained(run: RunData | None) -> Row:
    """Return what the metrics say of a training."""
    if run is None:
        return {"run": None, "accuracy": None, "epsilon": None}
    final = next(row for row in tables.records(tables.accuracy_table([run])) if row["at"] == "final")
    return {"run": run.name, "accuracy": final["mean"], "epsilon": final["epsilon"]}


def _attacked(run: RunData, scores: Path) -> Row:
    """Return what an attack's scores say: of victims that can speak, and otherwise why none can."""
    attack = next(one for one in run.attacks if one.folder.name == scores.name)
    table = attack.scores
    absent = table["status"] == NOT_APPLICABLE
    spoke = table[~absent & ~table["attack_valid"].eq(False).fillna(False)]
    silent = {} if len(spoke) else {"reason": "; ".join(sorted(set(table["reason"])))}
    return {
        **{name: attack.meta["threat_model"][name] for name in ("adversary", "knowledge")},
        "victims": len(spoke),
        "psnr_median": spoke["psnr_capped"].median(),
        "psnr_worst": spoke["psnr_capped"].max(),
        "psnr_blind": spoke["psnr_blind"].median(),
        "controls": controls.state(attack.meta),
        **silent,
        **({"status": NOT_APPLICABLE} if absent.all() else {}),
    }
