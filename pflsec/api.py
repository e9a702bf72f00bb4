"""pflsec from Python: the same as the command line, under the same option names."""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from pflsec import tracking
from pflsec.config.attack import AttackConfig, make_attacks
from pflsec.config.train import resolve, run_name
from pflsec.core import methodfile
from pflsec.core.config import build
from pflsec.core.errors import PflsecError, PflsecWarning, RunError, first_line
from pflsec.data.datasets import Dataset
from pflsec.runtime import attacking, checkpoint, cluster, manifest, privacy
from pflsec.runtime.estimate import Cost
from pflsec.runtime.estimate import estimate as _estimate
from pflsec.runtime.executor import Executor, Serial
from pflsec.runtime.folder import RunFolder
from pflsec.runtime.pool import Processes
from pflsec.runtime.rounds import play
from pflsec.runtime.setup import Setup, prepare
from pflsec.session.run import AttackSession, OnVictim, Scores
from pflsec.session.update import Found, UpdateSession

if TYPE_CHECKING:
    import pandas

OnRound = Callable[[int, Mapping[str, Any]], None]


@dataclass(frozen=True)
class Run:
    """A training run on disk."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def manifest(self) -> dict[str, Any]:
        """run.json."""
        return RunFolder(self.path).manifest()

    @property
    def metrics(self) -> "pandas.DataFrame":
        """A row per round (see metrics.jsonl in the guide)."""
        from pflsec.reports.load import load_run as read

        return read(self.path).metrics

    @property
    def clients(self) -> "pandas.DataFrame":
        """A row per round and client."""
        from pflsec.reports.load import load_run as read

        return read(self.path).clients


def load_run(path: str | Path, runs_dir: str | Path = "runs") -> Run:
    """Return a run by folder or name. Raises RunError when it does not exist or cannot be read."""
    folder = RunFolder.open(path, Path(runs_dir))
    folder.manifest()
    return Run(folder.path)


def plan_training(
    options: Mapping[str, Any],
    *,
    preset: str | None = None,
    config: str | Path | None = None,
    assignments: Mapping[str, str] = {},
    dataset: Dataset | None = None,
) -> Setup:
    """Return the setup of a run without running it: every mistake in the options shows here."""
    file = Path(config) if config else None
    setup = prepare(resolve(options, preset=preset, file=file, assignments=assignments), dataset)
    tracking.require(setup.config.track)
    privacy.check(setup)
    if setup.config.executor == "ray":
        cluster.library()
    return setup


def estimate(setup: Setup) -> Cost:
    """Return seconds of work and bytes on disk of a run, roughly, measured on a few of its own batches."""
    return _estimate(setup)


def estimate_attack(setup: Setup, attack: str, options: Mapping[str, Any] = {}) -> float | None:
    """Return seconds of an attack's work on one probe, roughly: a few iterations are timed before anything is trained.

    None for attacks on real uploads, which only a training makes.
    """
    from pflsec.session.estimate import seconds_per_victim

    return seconds_per_victim(setup, attack, options)


def train(
    *,
    name: str | None = None,
    runs_dir: str | Path = "runs",
    preset: str | None = None,
    config: str | Path | None = None,
    dataset: Dataset | None = None,
    on_round: OnRound = lambda t, metrics: None,
    **options: Any,
) -> Run:
    """Train a federation and capture what crosses the wire; return the run.

    name      of the run's folder; an existing run is never overwritten, the new one gets a number
    dataset   takes the place of the one named by `data` (see pflsec.data.datasets.from_arrays)
    options   as on the command line, with underscores: algo="fedrep", rounds=10, settings={"head_epochs": 5}
    Raises PflsecError with a sentence for the user.
    """
    setup = plan_training(options, preset=preset, config=config, dataset=dataset)
    executor = "serial" if setup.config.executor == "auto" else setup.config.executor
    return run_training(setup, name=name, runs_dir=runs_dir, on_round=on_round, executor=executor)


def run_training(
    setup: Setup,
    *,
    name: str | None = None,
    runs_dir: str | Path = "runs",
    on_round: OnRound = lambda t, metrics: None,
    executor: str = "serial",
) -> Run:
    """Run a setup in a new folder; the folder's state tells how it ended: done, failed or interrupted.

    executor  serial, processes or ray: the results are the same bits
    """
    tracking.require(setup.config.track)
    dp = privacy.describe(setup)
    facts = manifest.describe(setup, run_name(setup.config, name), dp)
    folder = RunFolder.create(Path(runs_dir), facts["name"])
    folder.write_manifest(facts | {"name": folder.path.name})
    return _play(setup, folder, on_round, executor)


def plan_resumption(
    run: Run | str | Path, runs_dir: str | Path = "runs", dataset: Dataset | None = None
) -> tuple[Setup, Run]:
    """Return the setup of an earlier run, to go on with it. Raises RunError when it is complete or its data changed."""
    folder = RunFolder.open(run.path if isinstance(run, Run) else run, Path(runs_dir))
    facts = folder.manifest()
    if facts.get("state") == "done":
        raise RunError(f"run '{folder.path.name}' is complete; there is nothing to resume.")
    config, _ = attacking.training_config(folder)
    setup = prepare(config, dataset)
    if setup.federation.fingerprint() != facts["data"]["partition"]:
        raise RunError(f"run '{folder.path.name}' cannot be resumed: the data are not those it began with.")
    return setup, Run(folder.path)


def resume(
    run: Run | str | Path,
    *,
    runs_dir: str | Path = "runs",
    dataset: Dataset | None = None,
    on_round: OnRound = lambda t, metrics: None,
    executor: str = "serial",
) -> Run:
    """Go on with a run that was interrupted, failed or killed; the result equals an uninterrupted run, bit for bit."""
    setup, found = plan_resumption(run, runs_dir, dataset)
    return resume_training(setup, found, on_round=on_round, executor=executor)


def resume_training(
    setup: Setup, run: Run, *, on_round: OnRound = lambda t, metrics: None, executor: str = "serial"
) -> Run:
    """Play the rounds that are left of a run."""
    tracking.require(setup.config.track)
    return _play(setup, RunFolder(run.path), on_round, executor)


def _play(setup: Setup, folder: RunFolder, on_round: OnRound, executor: str) -> Run:
    with checkpoint.alone(folder):
        facts = folder.manifest() | {"state": "running", "reason": None, "finished": None}
        folder.write_manifest(facts)
        try:
            config = setup.config.model_dump()
            with (
                _executor(setup, executor) as workers,
                tracking.following(config["track"], folder.path, config) as follow,
            ):

                def report(t: int, metrics: Mapping[str, Any]) -> None:
                    follow(t, metrics)
                    on_round(t, metrics)

                play(setup, folder, report, workers)
        except KeyboardInterrupt:
            folder.write_manifest(facts | {"state": "interrupted", "finished": manifest.now()})
            raise
        except Exception as error:
            blamed = methodfile.blame(error)
            reason = first_line(blamed or error)
            folder.write_manifest(facts | {"state": "failed", "reason": reason, "finished": manifest.now()})
            if blamed:
                raise blamed from error
            raise
        folder.write_manifest(facts | {"state": "done", "finished": manifest.now()})
    return Run(folder.path)


def _executor(setup: Setup, name: str) -> AbstractContextManager[Executor]:
    count = min(setup.config.workers or os.cpu_count() or 1, setup.federation.clients)
    if name == "ray":
        return closing(cluster.Cluster(setup, count))
    return closing(Processes(setup, count) if name == "processes" else Serial(setup))


def attack(
    run: Run | str | Path | None = None,
    attacks: str | Sequence[str] = "dlg",
    *,
    runs_dir: str | Path = "runs",
    on_victim: OnVictim = lambda name, done, total, row: None,
    **options: Any,
) -> Scores | list[Scores]:
    """Attack a run's captures and score the reconstructions; return the scores (a list for several attacks).

    run      a Run, its folder or name; None: the newest
    attacks  "dlg", "dlg,ig", a list of names, or "all"
    options  as on the command line, with underscores: knowledge="oracle", threat_model="F", restarts=2, settings={"tv": 1e-4}
    Raises PflsecError before anything runs when the adversary lacks knowledge that was asked for. Of `all`, an attack that
    this adversary cannot mount ends as not applicable. One that fails is raised once the others are done.
    """
    config = build(AttackConfig, {"executor": "serial", **options}, "attack")
    folder = RunFolder.open(run.path if isinstance(run, Run) else run, Path(runs_dir))
    ready = make_attacks(attacks, config)
    session = AttackSession(folder, config)
    found, failures = session.run_each(ready, on_victim)
    if failures:
        raise next(iter(failures.values()))
    return found[0] if isinstance(attacks, str) and len(found) == 1 else found


def attack_update(
    attack: str = "dlg",
    *,
    before: str | Path,
    after: str | Path,
    model: str | nn.Module,
    out: str | Path,
    truth: str | Path | None = None,
    **options: Any,
) -> Found:
    """Attack an update that no run of ours has made, and write what is found to the folder `out`.

    before, after  safetensors files of the model's weights, as its state_dict names them or under our names (body.*, head.*)
    model          a registered network's name, or a module
    truth          an .npz file with the true images and labels, for scoring alone
    options        of the update: shape=(1, 28, 28), classes=10, lr=0.1, mean, std, images, steps, batch_size, split,
                   known_labels; and of the attack, as for `attack`
    Doubts about the description are warnings. Raises PflsecError before anything is searched or written.
    """
    session = UpdateSession(attack, before=before, after=after, model=model, out=out, truth=truth, options=options)
    for doubt in session.doubts:
        warnings.warn(f"{doubt}.", PflsecWarning, stacklevel=2)
    return session.run()


def report(
    runs: Sequence[Run | str | Path] | Run | str | Path | None = None,
    *,
    out: str | Path | None = None,
    runs_dir: str | Path = "runs",
    originals: bool = True,
) -> Path:
    """Write the report of one run or several side by side; return the page's path.

    runs       a Run, folder or name, or several; None: the newest
    out        folder of the report; default: report/ in the run's folder, or <runs_dir>/report for several
    originals  False leaves the victims' images, and all that is made from them, out of the page
    """
    from pflsec.reports.page import write

    wanted = [runs] if runs is None or isinstance(runs, Run | str | Path) else list(runs)
    if not wanted:
        raise PflsecError("there is nothing to report: no run was given.")
    folders = [RunFolder.open(r.path if isinstance(r, Run) else r, Path(runs_dir)) for r in wanted]
    where = Path(out) if out else (folders[0].path / "report" if len(folders) == 1 else Path(runs_dir) / "report")
    return write([f.path for f in folders], where, originals=originals)
