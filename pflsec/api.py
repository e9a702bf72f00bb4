"""pflsec from Python: the same as the command line, under the same option names."""

import hashlib
import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pflsec.config.attack import AttackConfig, Ready, attack_names, make_attack, make_attacks, narrowed
from pflsec.config.train import resolve, run_name
from pflsec.config.update import UpdateConfig
from pflsec.core import methodfile, registry
from pflsec.core.attack import Attack, Reconstruction
from pflsec.core.config import build
from pflsec.core.errors import ConfigError, PflsecError, PflsecWarning, RunError
from pflsec.core.files import plain, to_json, write_json
from pflsec.core.inputs import InputSpec
from pflsec.core.knowledge import Knows
from pflsec.core.tensors import write_items
from pflsec.data.datasets import Dataset, labelled_images
from pflsec.leakage import results
from pflsec.leakage.matching import assign
from pflsec.leakage.perceptual import Perceptual
from pflsec.leakage.score import VictimScore, check_pool, score
from pflsec.leakage.vault import Pool, Truth, Vault
from pflsec.runtime import attacking, checkpoint, elsewhere, manifest, privacy
from pflsec.runtime.estimate import Cost
from pflsec.runtime.estimate import estimate as _estimate
from pflsec.runtime.executor import Executor, Serial
from pflsec.runtime.folder import RunFolder, attack_folder, secure
from pflsec.runtime.pool import Processes
from pflsec.runtime.replay import visible_items
from pflsec.runtime.rounds import play
from pflsec.runtime.setup import Setup, prepare
from pflsec.wire.store import CaptureStore

if TYPE_CHECKING:
    import pandas

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
    return prepare(resolve(options, preset=preset, file=file, assignments=assignments), dataset)


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


@dataclass(frozen=True)
class Found:
    """What an attack on an update from elsewhere has found.

    path       folder of the results           images  [B, C, H, W] in [0, 1], None where only labels were sought
    labels     int64 [B], or None              objective  the attacker's own loss
    doubts     what speaks against the description of the update, known before the search
    scores     the row of scores.csv, or None without truth
    """

    path: Path
    images: Tensor | None
    labels: Tensor | None
    objective: float
    status: str
    doubts: list[str]
    scores: dict[str, Any] | None


class UpdateSession:
    """An attack on an update from elsewhere. All that can be checked is checked when it is made; nothing is written."""

    def __init__(
        self,
        attack: str,
        *,
        before: str | Path,
        after: str | Path,
        model: str | nn.Module,
        out: str | Path,
        truth: str | Path | None = None,
        options: Mapping[str, Any],
    ):
        names = attack_names(attack)
        if len(names) != 1:
            raise ConfigError(
                f"an update from elsewhere is attacked by one attack at a time, not by {', '.join(names)}."
            )
        unused = [name for name in ("rounds", "clients", "kind") if name in options]
        if unused:
            raise ConfigError(f"{unused[0]} selects captures of a run; an update from elsewhere has none.")
        own = {name: value for name, value in options.items() if name in UpdateConfig.model_fields}
        shared = {name: value for name, value in options.items() if name not in own}
        self.config = build(AttackConfig, {**shared, "kind": "update"}, "attack")
        self.described = build(UpdateConfig, own, "update")
        self.name, self.made = names[0], make_attack(names[0], self.config)
        self._check_labels()
        self.out = Path(out)
        if self.out.exists() and (not self.out.is_dir() or any(self.out.iterdir())):
            raise RunError(f"{self.out} is there already and not empty; choose another folder with --out.")
        weights = Path(self.config.lpips_weights) if self.config.lpips_weights else None
        self.perceptual = Perceptual.find(self.config.lpips, weights)
        self.files = {"before": Path(before), "after": Path(after)}
        self.update = elsewhere.load(self.files["before"], self.files["after"], model, self.described)
        visible_items(self.update.record, self.config.visible or ())
        self.model = model if isinstance(model, str) else type(model).__name__
        self.truth = None if truth is None else self._truth(Path(truth))
        self.doubts = [*self.update.doubts, *self._truth_doubts()]

    def run(self) -> Found:
        """Run the attack and write its folder. Raises ConfigError where it has nothing to work on."""
        began, started = time.perf_counter(), manifest.now()
        granted = self.described.known_labels
        labels = None if granted is None else torch.tensor(granted)
        found, reason = attacking.reconstruct(self.name, self.made, self.config, self.update.capture, labels)
        if found is None:
            raise ConfigError(f"{self.name} has nothing to work on in this update: {reason}.")
        seconds = time.perf_counter() - began
        row, images = (None, []) if self.truth is None else self._score(found, self.truth, seconds)
        x = found.x
        pixels = None if x is None else _pictures(self.update.record.input, x, self.truth)
        meta = self._meta(found, started, seconds)
        pictures = {} if pixels is None else {"update": pixels}
        secure(self.out)
        if row is None:
            write_items(self.out / "reconstructions.safetensors", pictures)
            write_json(self.out / "attack.json", {"schema": results.SCHEMA, **meta})
        else:
            results.write(self.out, meta, [row], images, pictures)
        if pixels is not None:
            from pflsec.reports.figures import write_sheet

            true = None if self.truth is None else self.update.record.input.pixels(self.truth.x).clamp(0, 1).numpy()
            write_sheet(self.out / "gallery.png", f"{self.name} on {self.files['after'].name}", pixels.numpy(), true)
        return Found(self.out, pixels, found.y, found.objective, found.status, self.doubts, row)

    def _check_labels(self) -> None:
        given, granted = self.described.known_labels is not None, Knows.LABELS in self.config.threat.knows
        if given:
            self.config.threat.require({Knows.LABELS}, "--known-labels")
        elif granted:
            raise ConfigError("this knowledge includes the images' labels: give them with --known-labels, such as 3,1.")

    def _truth(self, path: Path) -> Truth:
        images, labels = labelled_images(path)
        record = self.update.record
        spec, wanted = record.input, (record.batch, *record.input.shape)
        if images.shape != wanted:
            raise ConfigError(f"truth: the images in {path} are {list(images.shape)}; the update is of {list(wanted)}.")
        if labels.min() < 0 or labels.max() >= spec.classes:
            raise ConfigError(
                f"truth: the labels in {path} run from {labels.min()} to {labels.max()}; classes: {spec.classes}."
            )
        x, y = spec.normalise(torch.from_numpy(images)), torch.from_numpy(labels)
        return Truth(x, y, torch.arange(len(y)), {}, self.update.residual(x, y))

    def _truth_doubts(self) -> list[str]:
        residual = None if self.truth is None else self.truth.replay_residual
        valid, why = results.validity(residual)
        if residual is None or valid:
            return []
        return [f"{why}: the client did something else than is described (normalisation, learning rate, loss, mode)"]

    def _score(
        self, found: Reconstruction, truth: Truth, seconds: float
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return the row and the images' rows. There are no other images to tell the true ones from, and no mean of any."""
        spec = self.update.record.input
        true = spec.pixels(truth.x).clamp(0, 1)
        pool = Pool(true, truth.dataset_index, torch.full_like(true[0], 0.5))
        scored = score(truth, found.x, found.y, spec.pixels, pool, self.perceptual)
        valid, why = results.validity(truth.replay_residual)
        card = registry.card("algorithms", "fedavg")
        unknown = {"identified": None, "psnr_blind": None, "excess_psnr": None, "dataset_index": None}
        row: dict[str, Any] = {k: v for k, v in scored.row().items() if k in results.COLUMNS} | unknown
        row |= {k: getattr(found, k) for k in ("labels", "hidden", "iterations", "restarts", "objective", "status")}
        row |= {"algo": card.key, "family": card.family, "attack": self.name, "kind": "update", "seconds": seconds}
        row |= {"adversary": self.config.adversary, "knowledge": self.config.knowledge, "attack_valid": valid}
        row |= {"batch": self.update.record.batch, "steps": self.update.record.steps}
        said = (found.note, _seen(self.config), why, "no other images to identify among or to guess from")
        row["reason"] = "; ".join(filter(None, said))
        if scored.nonfinite:
            row["status"] = "nonfinite"
        return row, [image | unknown for image in results.image_rows("update", scored)]

    def _meta(self, found: Reconstruction, started: str, seconds: float) -> dict[str, Any]:
        hashes = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in self.files.items()}
        told = ("objective", "status", "labels", "hidden", "iterations", "restarts", "failures", "trace")
        result = {name: plain(getattr(found, name)) for name in told}
        update = plain(self.described.model_dump()) | {"model": self.model, "sha256": hashes}
        return _attack_facts(self.name, self.made, self.config, self.perceptual, started, seconds) | {
            "update": update | {"doubts": self.doubts},
            "result": result | {"label_found": None if found.y is None else found.y.tolist()},
            "state": "done",
        }


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


class AttackSession:
    """Attacks on one run with one set of options. Opens the vault for scoring, and for what the threat model grants."""

    def __init__(self, folder: RunFolder, config: AttackConfig):
        self.folder, self.config = folder, config
        self.train, self.spec = attacking.training_config(folder)
        self.card = registry.card("algorithms", self.train.algo)
        self.epsilon = folder.last_metrics().get("epsilon")
        self.captures = attacking.selected(folder, config)
        weights = Path(config.lpips_weights) if config.lpips_weights else None
        self.perceptual = Perceptual.find(config.lpips, weights)
        self.vault = Vault(folder.vault)
        self.pool: Pool | None = self.vault.pool() if (folder.vault / "pool.safetensors").exists() else None
        private = attacking.check(folder, self.captures, config.visible or ())
        if self.pool is not None:
            self._check_vault(self.pool, private)

    def _check_vault(self, pool: Pool, private: Mapping[str, torch.Size]) -> None:
        store = CaptureStore(self.folder.captures)
        for capture in self.captures:
            check_pool(pool, self.vault.check(capture, self.spec, store.header(capture)["batch"], private))

    def run_each(self, ready: Sequence[Ready], on_victim: OnVictim) -> tuple[list[Scores], dict[str, Exception]]:
        """Run attacks one after the other; return the scores, and the failures by attack: one keeps no other from its work.

        Where results cannot be read or written there is no going on.
        """
        scores, failures = [], {}
        for one in ready:
            try:
                scores.append(self.run(one.name, one.attack, on_victim, one.refused))
            except RunError:
                raise
            except Exception as error:
                failures[one.name] = error
        return scores, failures

    def run(self, name: str, made: Attack[Any], on_victim: OnVictim, refused: str = "") -> Scores:
        """Run one attack on all selected captures and write its folder.

        refused  why it cannot be mounted: nothing is tried, and every row says so
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
            for tried in self._attempts(name, refused):
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

    def _attempts(self, name: str, refused: str) -> Iterable[attacking.Attempt]:
        if refused:
            return [attacking.Attempt(capture, None, refused, 0.0) for capture in self.captures]
        return attacking.attempts(self._targets(name), self.config.executor, self.config.workers)

    def _targets(self, name: str) -> list[attacking.Target]:
        config = narrowed(name, self.config)
        knows, path = self.config.threat.knows, self.folder.path
        targets = []
        for capture in self.captures:
            truth = self.vault.truth(capture) if knows & {Knows.LABELS, Knows.PRIVATE} else None
            labels = truth.y if truth and Knows.LABELS in knows else None
            state = truth.state if truth and Knows.PRIVATE in knows else None
            targets.append(attacking.Target(path, capture, name, config, labels, state))
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
            "reason": "; ".join(filter(None, (tried.reason, _seen(self.config)))),
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
        return None if result is None or result.x is None else _pictures(self.spec, result.x, truth)

    def _id(self, name: str, made: Attack[Any]) -> str:
        facts = [made.cfg.model_dump(), self.config.adversary, self.config.knowledge, self.config.seed, self.captures]
        facts += [self.config.visible] if self.config.visible else []
        return f"{name}-{hashlib.sha256(to_json(facts).encode()).hexdigest()[:8]}"

    def _meta(self, name: str, made: Attack[Any], id: str, started: str, seconds: float, state: str) -> dict[str, Any]:
        facts = _attack_facts(name, made, self.config, self.perceptual, started, seconds)
        return {"id": id, **facts, "captures": self.captures, "state": state}


def _attack_facts(
    name: str, made: Attack[Any], config: AttackConfig, perceptual: Perceptual, started: str, seconds: float
) -> dict[str, Any]:
    """Return what attack.json says of every attack."""
    card, threat = registry.card("attacks", name), config.threat
    return {
        "attack": name,
        "title": card.title,
        "sections": card.sections,
        "config": plain(made.cfg.model_dump()),
        "threat_model": {
            "adversary": threat.adversary,
            "knowledge": threat.knowledge,
            "knows": [k.value for k in Knows if k in threat.knows],
        },
        "visible": config.visible,
        "seed": config.seed,
        "lpips": {"name": perceptual.name, "status": perceptual.status, "remedy": perceptual.remedy},
        "started": started,
        "finished": manifest.now(),
        "seconds": seconds,
        "versions": manifest.versions(),
    }


def _seen(config: AttackConfig) -> str:
    """Return what a row says of a limited view of the upload."""
    return f"visible alone: {', '.join(config.visible)}" if config.visible else ""


def _pictures(spec: InputSpec, x: Tensor, truth: Truth | None) -> Tensor:
    """Return a reconstruction as pixels, float32 [B, C, H, W] in [0, 1], in the order of the truth where there is one."""
    pixels = torch.nan_to_num(spec.pixels(x.detach().double()), nan=0.5).clamp(0, 1)
    if truth is not None:
        order = assign(spec.pixels(truth.x.double()).clamp(0, 1), pixels)
        pixels = torch.stack([pixels[j] if j >= 0 else torch.full_like(pixels[0], 0.5) for j in order.tolist()])
    return pixels.float()


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
