"""Running cells: each on its own, so that one that fails keeps no other from its work, and none is run twice.

What was done is read from the run folders themselves: a training is known by its configuration, an attack by its options.
So a killed process loses nothing that was written, and another grid shares the trainings that it has in common.
"""

import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pflsec import api
from pflsec.core import methodfile
from pflsec.core.errors import PflsecError, PflsecWarning, RunError
from pflsec.runtime.defending import why_unseen
from pflsec.runtime.estimate import best_executor
from pflsec.runtime.folder import RunFolder
from pflsec.sweep.plan import REFUSALS, Attack, Cell, fingerprint

State = Literal["planned", "running", "done", "refused", "failed", "interrupted"]
"""refused: the method cannot be trained so, and says why."""


class Nothing(PflsecError):
    """A training has nothing that an attack could work on."""


OnStep = Callable[[str, int], None]
"""Called with (what was done, units of progress so far)."""


@dataclass
class Ending:
    """How a training or an attack stands. reason: one line; details: the traceback of an error that is not ours."""

    state: State = "planned"
    reason: str = ""
    details: str = ""

    def fail(self, error: Exception) -> None:
        """Take note of an error."""
        known = error if isinstance(error, PflsecError) else methodfile.blame(error)
        reason, _, more = str(known or f"{type(error).__name__}: {error}").partition("\n")
        self.state = "refused" if isinstance(error, (*REFUSALS, Nothing)) else "failed"
        self.reason, self.details = reason, more if known else "".join(traceback.format_exception(error))


@dataclass
class Progress:
    """What has come of a cell. run: its run's folder, once there is one; attacks: by label; scores: their folders."""

    cell: Cell
    training: Ending = field(default_factory=Ending)
    run: Path | None = None
    attacks: dict[str, Ending] = field(default_factory=dict)
    scores: dict[str, Path] = field(default_factory=dict)

    @property
    def ending(self) -> Ending:
        """How the cell as a whole stands: the first thing that is not done."""
        return next(
            (e for e in (self.training, *self.attacks.values()) if e.state not in ("done", "refused")), self.training
        )


@dataclass(frozen=True)
class How:
    """How work is executed, and who is told of it. Nothing here changes a result.

    paces  seconds for a victim of each attack, where known: short work starts no worker processes
    """

    executor: str = "serial"
    workers: int | None = None
    paces: Mapping[str, float | None] = field(default_factory=dict)
    on_step: OnStep = lambda note, done: None
    on_change: Callable[[Progress], None] = lambda progress: None


def run(cells: Sequence[Cell], attacks: Sequence[Attack], runs: Path, how: How) -> list[Progress]:
    """Run cells one after the other in the folder `runs`; return what came of each.

    Ctrl-C is noted in the cell that it meets, and raised again; the same call goes on from there.
    """
    known, done, all_progress = finished_runs(runs), 0, []
    for number, cell in enumerate(cells, start=1):
        progress = Progress(cell)
        all_progress.append(progress)
        steps = _Steps(f"cell {number}/{len(cells)}, {cell.name}", done, how.on_step)
        _run_cell(progress, attacks, runs, known, how, steps)
        done += cell.units(attacks)
        steps.reach(progress.ending.state, done)
    return all_progress


def finished_runs(runs: Path) -> dict[str, Path]:
    """Return the runs in a folder by fingerprint: those that are done before those that are not."""
    found: dict[str, tuple[bool, Path]] = {}
    for folder in RunFolder.all(runs):
        try:
            facts = folder.manifest()
            mark = fingerprint(facts["config"], facts["algorithm"]["file"], facts["data"]["partition"])
            complete = facts["state"] == "done"
        except (RunError, KeyError, TypeError, AttributeError) as error:
            warnings.warn(f"{folder.path} is no run that can be gone on with: {error}", PflsecWarning, stacklevel=2)
            continue
        if mark not in found or complete > found[mark][0]:
            found[mark] = (complete, folder.path)
    return {mark: path for mark, (_, path) in found.items()}


def _run_cell(
    progress: Progress, attacks: Sequence[Attack], runs: Path, known: dict[str, Path], how: How, steps: "_Steps"
) -> None:
    if progress.cell.config is None:
        progress.training = Ending("refused", progress.cell.refused)
    else:
        _attempt(progress, progress.training, lambda: _train(progress, runs, known, how, steps), how)
    if progress.training.state == "done":
        for attack in attacks:
            ending = progress.attacks.setdefault(attack.label, Ending())
            _attempt(progress, ending, lambda a=attack: _attack(progress, a, how, steps), how)
    how.on_change(progress)


def _attempt(progress: Progress, ending: Ending, work: Callable[[], None], how: How) -> None:
    """Do a piece of work, and note how it ended."""
    ending.state = "running"
    how.on_change(progress)
    try:
        work()
    except KeyboardInterrupt:
        ending.state = "interrupted"
        how.on_change(progress)
        raise
    except Exception as error:
        ending.fail(error)
    else:
        ending.state = "done"


def _train(progress: Progress, runs: Path, known: dict[str, Path], how: How, steps: "_Steps") -> None:
    """Set the cell's run: trained before, gone on with, or new."""
    cell = progress.cell
    act: dict[str, Any] = {"on_round": steps.round, "executor": best_executor(how.executor, cell.seconds)}
    progress.run = known.get(cell.fingerprint)
    if progress.run is None:
        setup = _with_workers(cell.training.setup(), how)
        progress.run = known[cell.fingerprint] = api.run_training(setup, name=cell.name, runs_dir=runs, **act).path
        return
    found = api.Run(progress.run)
    steps.done += len(found.metrics)
    if found.manifest["state"] != "done":
        setup, found = api.plan_resumption(found)
        api.resume_training(_with_workers(setup, how), found, **act)


def _with_workers(setup: api.Setup, how: How) -> api.Setup:
    return replace(setup, config=setup.config.model_copy(update={"workers": how.workers})) if how.workers else setup


def _attack(progress: Progress, attack: Attack, how: How, steps: "_Steps") -> None:
    """Attack the cell's run, unless that was done before."""
    assert progress.run is not None
    assert progress.cell.config is not None
    victims, pace = attack.victims(progress.cell.config), how.paces.get(attack.label)
    if not victims:
        why = why_unseen(progress.cell.config.defense) or f"the training has no capture for {attack.label}"
        raise Nothing(f"nothing to attack: {why}.")
    executor = how.executor if pace is None else best_executor(how.executor, pace * victims)
    config = attack.config(executor=executor, **({"workers": how.workers} if how.workers else {}))
    made = attack.make()
    session = api.AttackSession(RunFolder(progress.run), config)
    if (scores := session.finished(attack.name, made)) is None:
        scores = session.run(attack.name, made, steps.victim, steps.control)
    progress.scores[attack.label] = scores.path


@dataclass
class _Steps:
    """Counts a cell's rounds and victims, for whoever follows the work."""

    cell: str
    done: int
    on_step: OnStep

    def round(self, t: int, metrics: Mapping[str, Any]) -> None:
        self._step(f"round {t}")

    def victim(self, name: str, done: int, total: int, row: Mapping[str, Any]) -> None:
        self._step(f"{name}, {row['status']}")

    def control(self, name: str, row: Mapping[str, Any]) -> None:
        self._step(f"{name}, {row['control']} control")

    def reach(self, note: str, done: int) -> None:
        """Say that the cell has ended."""
        self.done = done
        self.on_step(f"{self.cell}: {note}", done)

    def _step(self, note: str) -> None:
        self.done += 1
        self.on_step(f"{self.cell}: {note}", self.done)
