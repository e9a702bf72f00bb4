"""An audit's folder: audit.json (plan and state of every cell), runs/<cell>, report/ and verdict.md."""

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pflsec import api
from pflsec.audit import verdict
from pflsec.audit.plan import NONE, Cell, Plan
from pflsec.core import methodfile
from pflsec.core.errors import PflsecError, PrivacyError, RunError
from pflsec.core.files import disk_errors, read_json, safe_name, write_json, write_text
from pflsec.reports.load import RunData, load_run
from pflsec.reports.page import write as write_page

SCHEMA = 1
FINISHED = ("done", "refused")
"""States of a cell that a resumed audit leaves alone."""
DEFENDED = 4
"""A private step takes about so many times as long as a bare one."""

OnStep = Callable[[str, int], None]
"""Called with (what was done, units of progress so far)."""


@dataclass(frozen=True)
class Cost:
    """Units of progress in each cell (its rounds, and a victim of each attack), seconds of training, bytes on disk."""

    units: int
    seconds: float
    bytes: float


def cost(plan: Plan) -> Cost:
    """Return what an audit costs; mistakes in its options show here. Attacks are not measured.

    A method that raises is not measured either: that is for its cells to report.
    """
    units, seconds, size, dataset = 0, 0.0, 0.0, None
    for cell in (cell for cell in plan.cells() if cell.seed == plan.seeds[0]):
        setup = api.plan_training(plan.options(cell), dataset=dataset)
        dataset, config = setup.federation.dataset, setup.config
        victims = len(config.captured_rounds()) * len(config.captured_clients()) * config.victims
        units = config.rounds + victims * len(plan.attacks)
        try:
            one = api.estimate(setup)
        except Exception as error:
            if not isinstance(error, PflsecError) and methodfile.blame(error) is None:
                raise
            continue
        seconds += one.seconds * len(plan.seeds) * (1 if cell.defense == NONE else DEFENDED)
        size += one.bytes * len(plan.seeds)
    return Cost(units, seconds, size)


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

    def run(self, on_step: OnStep = lambda note, done: None, executor: str = "serial", units: int = 0) -> None:
        """Run the cells that are left, then judge. A cell that fails is recorded, and the rest goes on.

        units  of progress in a cell (see Cost)
        Ctrl-C is recorded and raised again; `Audit.open` goes on from there.
        """
        self.record["state"] = "running"
        for number, cell in enumerate(self.unfinished(), start=1):
            steps = _Steps(cell.name, (number - 1) * units, on_step)
            state = self.state(cell)
            try:
                self._run(cell, state, steps, executor)
            except KeyboardInterrupt:
                state["state"] = self.record["state"] = "interrupted"
                self.save()
                raise
            self.save()
            on_step(f"{cell.name}: {state['state']}", number * units)
        self.judge()

    def _run(self, cell: Cell, state: dict[str, Any], steps: "_Steps", executor: str) -> None:
        state |= {"state": "running", "reason": ""}
        self.save()
        try:
            run = self._train(cell, state, steps, executor)
            for name in self.plan.attacks:
                if name not in state["attacks"]:
                    api.attack(run, [name], on_victim=steps.victim, executor=executor, **self.plan.attack_options(name))
                    state["attacks"].append(name)
                    self.save()
            state["state"] = "done"
        except PrivacyError as error:
            state |= {"state": "refused", "reason": str(error)}
        except Exception as error:
            known = error if isinstance(error, PflsecError) else methodfile.blame(error)
            reason, _, more = str(known or f"{type(error).__name__}: {error}").partition("\n")
            trace = more if known else "".join(traceback.format_exception(error))
            state |= {"state": "failed", "reason": reason, "traceback": trace}

    def _train(self, cell: Cell, state: dict[str, Any], steps: "_Steps", executor: str) -> api.Run:
        """Return the cell's run: trained before, gone on with, or new."""
        runs = self.path / "runs"
        how = {"on_round": steps.round, "executor": executor}
        if (runs / state.get("run", cell.name) / "run.json").is_file():
            run = api.load_run(runs / state.get("run", cell.name))
            return run if run.manifest["state"] == "done" else api.resume(run, **how)
        options: dict[str, Any] = self.plan.options(cell) | {"executor": executor}
        run = api.train(name=cell.name, runs_dir=runs, on_round=steps.round, **options)
        state["run"] = run.name
        return run

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
        if runs:
            write_page([one.data.path for one in runs], self.path / "report", verdict=verdict.lines(found))
        bad = bool(found["failed"])
        self.record |= {"state": "failed" if bad else "done", "verdict": found}
        write_text(self.path / "verdict.md", verdict.markdown(self.record["name"], found))
        self.save()
        return found


@dataclass
class _Steps:
    """Counts a cell's rounds and victims."""

    cell: str
    done: int
    on_step: OnStep

    def round(self, t: int, metrics: Mapping[str, Any]) -> None:
        self._step(f"{self.cell}: round {t}")

    def victim(self, name: str, done: int, total: int, row: Mapping[str, Any]) -> None:
        self._step(f"{self.cell}: {name}, {row['status']}")

    def _step(self, note: str) -> None:
        self.done += 1
        self.on_step(note, self.done)


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name}-{number}"
