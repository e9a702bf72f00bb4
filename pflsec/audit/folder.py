"""An audit's folder: audit.json (plan and state of every cell), runs/<cell>, report/ and verdict.md.

Its cells are run as those of a sweep.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pflsec.audit import verdict
from pflsec.audit.plan import Cell, Plan
from pflsec.core import methodfile
from pflsec.core.errors import RunError
from pflsec.core.files import disk_errors, locked, read_json, safe_name, write_json, write_text
from pflsec.reports.load import RunData, load_run
from pflsec.reports.page import write as write_page
from pflsec.sweep import plan as sweep
from pflsec.sweep import work
from pflsec.sweep.work import How, Progress

SCHEMA = 1
FINISHED = ("done", "refused")
"""States of a cell that a resumed audit leaves alone."""


def check(plan: Plan, cells: Sequence[Cell] | None = None) -> list[sweep.Cell]:
    """Return cells (all of the plan's, unless said) as a sweep runs them; mistakes in their options show here."""
    checker = sweep.Checker()
    wanted = plan.cells() if cells is None else cells
    return [checker.check(plan.as_training(cell)) for cell in wanted]


@dataclass
class Audit:
    """A plan and how far it has come. All that changes is in `record`, which is audit.json."""

    path: Path
    plan: Plan
    record: dict[str, Any]

    @staticmethod
    def create(parent: Path, name: str, plan: Plan) -> "Audit":
        """Make the folder of a new audit (mode 0700: it holds private images); an earlier one of that name is kept."""
        safe_name(name, "audit name")
        with disk_errors(parent / name):
            parent.mkdir(parents=True, exist_ok=True)
            number = next(n for n in range(1, 10_000) if not (parent / _numbered(name, n)).exists())
            path = parent / _numbered(name, number)
            path.mkdir(mode=0o700)
        cells = {cell.name: {"state": "planned", "reason": "", "attacks": []} for cell in plan.cells()}
        audit = Audit(path, plan, {"schema": SCHEMA, "name": path.name, "plan": plan.as_dict(), "cells": cells})
        audit.save()
        return audit

    @staticmethod
    def open(path: Path) -> "Audit":
        """Return an audit that was begun earlier. Raises RunError when it is damaged, or its method's file changed."""
        what = f"audit '{path.name}'"
        record = read_json(path / "audit.json", what)
        if not isinstance(record, dict) or record.get("schema") != SCHEMA:
            raise RunError(f"{what} is of another schema version, or damaged: {path / 'audit.json'}.")
        plan = Plan.from_dict(record.get("plan"), f"{what} ({path / 'audit.json'})")
        methodfile.check_unchanged(plan.file, what)
        if set(record.get("cells") or {}) != {cell.name for cell in plan.cells()}:
            raise RunError(f"{what} is damaged: its cells are not those of its plan ({path / 'audit.json'}).")
        return Audit(path, plan, record)

    def save(self) -> None:
        """Write audit.json."""
        write_json(self.path / "audit.json", self.record)

    def state(self, cell: Cell) -> dict[str, Any]:
        """Return what audit.json says of a cell."""
        return self.record["cells"][cell.name]

    def unfinished(self) -> list[Cell]:
        """Return the cells that are still to be run, in order."""
        return [cell for cell in self.plan.cells() if self.state(cell)["state"] not in FINISHED]

    def run(self, how: How | None = None, checked: Sequence[sweep.Cell] | None = None) -> None:
        """Run the cells that are left, then judge. A cell that fails is recorded, and the rest goes on.

        checked  the unfinished cells, as `check` returned them; None: they are checked now
        Ctrl-C is recorded and raised again; `Audit.open` goes on from there. Raises RunError while another process runs it.
        """
        how = how or How()
        busy = f"audit '{self.path.name}' is being run by another process; wait for it to end."
        with locked(self.path / ".lock", busy):
            self.record["state"] = "running"
            left = check(self.plan, self.unfinished()) if checked is None else checked

            def changed(progress: Progress) -> None:
                self._note(progress)
                how.on_change(progress)

            try:
                work.run(left, self.plan.assaults(), self.path / "runs", replace(how, on_change=changed))
            except KeyboardInterrupt:
                self.record["state"] = "interrupted"
                self.save()
                raise
            self.judge()

    def _note(self, progress: Progress) -> None:
        """Write down how a cell stands."""
        ending, state = progress.ending, self.record["cells"][progress.cell.name]
        attacks = [label for label, one in progress.attacks.items() if one.state == "done"]
        state |= {"state": ending.state, "reason": ending.reason, "traceback": ending.details, "attacks": attacks}
        state["not_applicable"] = {
            label: one.reason for label, one in progress.attacks.items() if one.state == "refused"
        }
        state |= {"run": progress.run.name} if progress.run else {}
        self.save()

    def runs(self) -> list[verdict.CellRun]:
        """Return the runs of the cells that are done, each under its cell's name."""
        done = [cell for cell in self.plan.cells() if self.state(cell)["state"] == "done"]
        return [verdict.CellRun(cell.label, cell.role, cell.defense, cell.seed, self._data(cell)) for cell in done]

    def _data(self, cell: Cell) -> RunData:
        return replace(load_run(self.path / "runs" / self.state(cell).get("run", cell.name)), name=cell.name)

    def judge(self) -> dict[str, Any]:
        """Write the report, verdict.md and the verdict in audit.json; return the verdict."""
        runs, cells = self.runs(), self.record["cells"]
        found = verdict.judge(self.plan.label, runs)
        for state in ("refused", "failed"):
            found[state] = {name: cell["reason"] for name, cell in cells.items() if cell["state"] == state}
        found["refused"] |= {f"{name}, {a}": why for name, c in cells.items() for a, why in _not_applicable(c).items()}
        if runs:
            write_page([one.data.path for one in runs], self.path / "report", verdict=verdict.lines(found))
        bad = bool(found["failed"])
        self.record |= {"state": "failed" if bad else "done", "verdict": found}
        write_text(self.path / "verdict.md", verdict.markdown(self.record["name"], found))
        self.save()
        return found


def _not_applicable(cell: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the attacks that had nothing to work on in a cell, with the reasons; audits of earlier versions name none."""
    return cell.get("not_applicable", {})


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name}-{number}"
