"""pflsec from Python: the same as the command line, under the same option names."""

import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pflsec.config.attack import AttackConfig, attack_names, make_attack
from pflsec.config.train import resolve, run_name
from pflsec.core import methodfile, registry
from pflsec.core.attack import Attack
from pflsec.core.config import build
from pflsec.core.errors import PflsecError, RunError
from pflsec.core.files import plain, to_json
from pflsec.core.knowledge import Knows
from pflsec.data.datasets import Dataset
from pflsec.leakage import results
from pflsec.leakage.matching import assign
from pflsec.leakage.perceptual import Perceptual
from pflsec.leakage.score import VictimScore, score
from pflsec.leakage.vault import Pool, Truth, Vault
from pflsec.runtime import attacking, checkpoint, manifest, privacy
from pflsec.runtime.estimate import Cost
from pflsec.runtime.estimate import estimate as _estimate
from pflsec.runtime.executor import Executor, Serial
from pflsec.runtime.folder import RunFolder, attack_folder, secure
from pflsec.runtime.pool import Processes
from pflsec.runtime.rounds import play
from pflsec.runtime.setup import Setup, prepare
from pflsec.wire.store import CaptureStore

if TYPE_CHECKING:
    import pandas

NAIVE = "naive: the attacker does not know of the defense"
OnRound = Callable[[int, Mapping[str, Any]], None]
OnVictim = Callable[[str, int, int, Mapping[str, Any]], None]


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


@dataclass(frozen=True)
class Scores:
    """The results of one attack on disk."""

    path: Path

    @property
    def table(self) -> "pandas.DataFrame":
        """A row per victim, with the columns of scores.csv."""
        from pflsec.reports.load import load_run as read

        return next(a.scores for a in read(self.path.parents[1]).attacks if a.id == self.path.name)


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
    privacy.check(setup)
    return setup


def estimate(setup: Setup) -> Cost:
    """Return seconds of work and bytes on disk of a run, roughly, measured on a few of its own batches."""
    return _estimate(setup)


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
    executor = "processes" if setup.config.executor == "processes" else "serial"
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

    executor  serial or processes: the results are the same bits
    """
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
    return _play(setup, RunFolder(run.path), on_round, executor)


def _play(setup: Setup, folder: RunFolder, on_round: OnRound, executor: str) -> Run:
    with checkpoint.alone(folder):
        facts = folder.manifest() | {"state": "running", "reason": None, "finished": None}
        folder.write_manifest(facts)
        try:
            with _executor(setup, executor) as workers:
                play(setup, folder, on_round, workers)
        except KeyboardInterrupt:
            folder.write_manifest(facts | {"state": "interrupted", "finished": manifest.now()})
            raise
        except Exception as error:
            blamed = methodfile.blame(error)
            reason = str(blamed or error).partition("\n")[0] or type(error).__name__
            folder.write_manifest(facts | {"state": "failed", "reason": reason, "finished": manifest.now()})
            if blamed:
                raise blamed from error
            raise
        folder.write_manifest(facts | {"state": "done", "finished": manifest.now()})
    return Run(folder.path)


def _executor(setup: Setup, name: str) -> AbstractContextManager[Executor]:
    count = min(setup.config.workers or os.cpu_count() or 1, setup.federation.clients)
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
    options  as on the command line, with underscores: knowledge="oracle", restarts=2, settings={"tv": 1e-4}
    Raises PflsecError before anything runs when the adversary lacks knowledge that was asked for.
    """
    config = build(AttackConfig, {"executor": "serial", **options}, "attack")
    folder = RunFolder.open(run.path if isinstance(run, Run) else run, Path(runs_dir))
    names = attack_names(attacks)
    session = AttackSession(folder, config)
    ready = [(name, make_attack(name, config)) for name in names]
    found = [session.run(name, made, on_victim) for name, made in ready]
    return found[0] if isinstance(attacks, str) and len(found) == 1 else found


class AttackSession:
    """Attacks on one run with one set of options. Opens the vault for scoring, and for what the threat model grants."""

    def __init__(self, folder: RunFolder, config: AttackConfig):
        self.folder, self.config = folder, config
        self.train, self.spec = attacking.training_config(folder)
        self.card = registry.card("algorithms", self.train.algo)
        self.naive = self.config.naive and bool(self.train.defense)
        self.epsilon = folder.last_metrics().get("epsilon")
        self.captures = attacking.selected(folder, config)
        weights = Path(config.lpips_weights) if config.lpips_weights else None
        self.perceptual = Perceptual.find(config.lpips, weights)
        self.vault = Vault(folder.vault)
        self.pool: Pool | None = self.vault.pool() if (folder.vault / "pool.safetensors").exists() else None
        attacking.check(folder, self.captures)
        for capture in self.captures if self.pool is not None else ():
            self.vault.truth(capture)

    def run(self, name: str, made: Attack[Any], on_victim: OnVictim) -> Scores:
        """Run one attack on all selected captures and write its folder.

        On Ctrl-C and on failure the finished victims are written, unless earlier results hold as many.
        """
        began, started = time.perf_counter(), manifest.now()
        rows: list[dict[str, Any]] = []
        images: list[dict[str, Any]] = []
        pictures: dict[str, Tensor] = {}
        victims: dict[str, dict[str, Any]] = {}
        path = attack_folder(self.folder, self._id(name, made))
        secure(path.parent)
        state = "interrupted"
        try:
            for tried in attacking.attempts(self._targets(name), self.config.executor, self.config.workers):
                row, scored, picture = self._row(name, tried)
                rows.append(row)
                victims[tried.capture] = {k: getattr(tried.result, k, None) for k in ("failures", "trace")}
                if scored is not None:
                    images += results.image_rows(tried.capture, scored)
                if picture is not None:
                    pictures[tried.capture] = picture
                on_victim(name, len(rows), len(self.captures), row)
            state = "done"
        except Exception:
            state = "failed"
            raise
        finally:
            if state == "done" or len(rows) > results.victims_in(path):
                meta = self._meta(name, made, path.name, started, time.perf_counter() - began, state)
                secure(path)
                results.write(path, meta | {"victims": victims}, rows, images, pictures)
        if pictures and self.pool is not None:
            from pflsec.reports.figures import write_gallery

            write_gallery(self.folder.path, path.name)
        return Scores(path)

    def _targets(self, name: str) -> list[attacking.Target]:
        knows, path = self.config.threat.knows, self.folder.path
        targets = []
        for capture in self.captures:
            truth = self.vault.truth(capture) if knows & {Knows.LABELS, Knows.PRIVATE} else None
            labels = truth.y if truth and Knows.LABELS in knows else None
            state = truth.state if truth and Knows.PRIVATE in knows else None
            targets.append(attacking.Target(path, capture, name, self.config, labels, state))
        return targets

    def _row(self, name: str, tried: attacking.Attempt) -> tuple[dict[str, Any], VictimScore | None, Tensor | None]:
        """Return the victim's row, its score, and its pictures in the order of the truth."""
        header = CaptureStore(self.folder.captures).header(tried.capture)
        result = tried.result
        row: dict[str, Any] = {
            "run": self.folder.path.name,
            "algo": self.card.key,
            "family": self.card.family,
            "defense": "+".join(self.train.defense) or "none",
            "epsilon": self.epsilon,
            "attack": name,
            "adversary": self.config.adversary,
            "knowledge": self.config.knowledge,
            "seconds": tried.seconds,
            "reason": "; ".join(filter(None, (tried.reason, NAIVE if self.naive else ""))),
            "status": result.status if result else "not-applicable",
        } | {k: header[k] for k in ("kind", "round", "client", "victim", "batch", "steps")}
        if result is not None:
            row |= {k: getattr(result, k) for k in ("labels", "hidden", "iterations", "restarts", "objective")}
        if self.pool is None:
            return (
                row | {"reason": "; ".join(filter(None, (row["reason"], "not scored: the run has no vault")))},
                None,
                self._picture(result, None),
            )
        truth = self.vault.truth(tried.capture)
        scored = score(
            truth,
            result.x if result else None,
            result.y if result else None,
            self.spec.pixels,
            self.pool,
            self.perceptual,
        )
        valid, why = results.validity(truth.replay_residual)
        row |= {k: v for k, v in scored.row().items() if k in results.COLUMNS}
        row |= {"dataset_index": " ".join(map(str, truth.dataset_index.tolist())), "attack_valid": valid}
        row["reason"] = "; ".join(filter(None, (row["reason"], why)))
        if scored.nonfinite:
            row["status"] = "nonfinite"
        return row, scored, self._picture(result, truth)

    def _picture(self, result: Any, truth: Truth | None) -> Tensor | None:
        if result is None or result.x is None:
            return None
        pixels = torch.nan_to_num(self.spec.pixels(result.x.detach().double()), nan=0.5).clamp(0, 1)
        if truth is not None:
            order = assign(self.spec.pixels(truth.x.double()).clamp(0, 1), pixels)
            pixels = torch.stack([pixels[j] if j >= 0 else torch.full_like(pixels[0], 0.5) for j in order.tolist()])
        return pixels.float()

    def _id(self, name: str, made: Attack[Any]) -> str:
        facts = [made.cfg.model_dump(), self.config.adversary, self.config.knowledge, self.config.seed, self.captures]
        facts += ["naive"] if self.config.naive else []
        return f"{name}-{hashlib.sha256(to_json(facts).encode()).hexdigest()[:8]}"

    def _meta(self, name: str, made: Attack[Any], id: str, started: str, seconds: float, state: str) -> dict[str, Any]:
        card = registry.card("attacks", name)
        threat = self.config.threat
        return {
            "id": id,
            "attack": name,
            "title": card.title,
            "sections": card.sections,
            "config": plain(made.cfg.model_dump()),
            "threat_model": {
                "adversary": threat.adversary,
                "knowledge": threat.knowledge,
                "knows": [k.value for k in Knows if k in threat.knows],
            },
            "naive": self.naive,
            "captures": self.captures,
            "seed": self.config.seed,
            "lpips": {
                "name": self.perceptual.name,
                "status": self.perceptual.status,
                "remedy": self.perceptual.remedy,
            },
            "state": state,
            "started": started,
            "finished": manifest.now(),
            "seconds": seconds,
            "versions": manifest.versions(),
        }


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
