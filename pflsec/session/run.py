"""Attacks on one run with one set of options: what is attacked, scored and written."""

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pflsec.config.attack import AttackConfig, Ready, narrowed
from pflsec.core import registry
from pflsec.core.attack import Attack, Reconstruction
from pflsec.core.errors import RunError
from pflsec.core.files import plain, read_json, to_json
from pflsec.core.inputs import InputSpec
from pflsec.core.knowledge import POWERS, Knows
from pflsec.core.streams import stream
from pflsec.leakage import membership, mixed, results, texts
from pflsec.leakage.controls import verdict
from pflsec.leakage.matching import assign
from pflsec.leakage.perceptual import Perceptual
from pflsec.leakage.score import VictimScore, check_pool, parts, score
from pflsec.leakage.vault import Mixtures, Outsiders, Pool, Truth, Vault, joined
from pflsec.runtime import attacking, cluster, manifest
from pflsec.runtime.active import Client
from pflsec.runtime.controls import Control
from pflsec.runtime.defending import mixing, parse_defense
from pflsec.runtime.folder import RunFolder, attack_folder, secure
from pflsec.runtime.views import groups
from pflsec.wire.store import CaptureStore

if TYPE_CHECKING:
    import pandas

UNSCORED = "not scored: the run has no vault"
NAIVE = "naive: the attacker does not know of the defense"
NO_IMAGE = "texts have no image measures: see tokens.csv"
OnVictim = Callable[[str, int, int, Mapping[str, Any]], None]
OnControl = Callable[[str, Mapping[str, Any]], None]
Row = dict[str, Any]
NOTHING = "not-applicable"
SWITCHED_OFF = "switched off with --no-controls"
PLAIN: Row = {
    "algo": "fedavg",
    "family": "traditional",
    "defense": "none",
    "epsilon": None,
    "kind": "control",
    "steps": 1,
}
"""What is different about the positive control's row."""


def acts(name: str) -> bool:
    """Return whether an attack chooses what the client receives, so that the exchange is done again with the client's data."""
    return bool(registry.load("attacks", name).needs & POWERS)


@dataclass(frozen=True)
class Finding:
    """What came of one capture: its row of scores.csv, its rows of the other tables, and its pictures in the truth's order."""

    capture: str
    row: Row
    result: Reconstruction | None
    images: list[Row] = field(default_factory=list)
    tokens: list[Row] = field(default_factory=list)
    members: list[Row] = field(default_factory=list)
    mixtures: list[Row] = field(default_factory=list)
    picture: Tensor | None = None


@dataclass(frozen=True)
class Scores:
    """The results of one attack on disk."""

    path: Path

    @property
    def table(self) -> "pandas.DataFrame":
        """A row per victim, with the columns of scores.csv."""
        from pflsec.reports.load import load_run as read

        return next(a.scores for a in read(self.path.parents[1]).attacks if a.id == self.path.name)

    @property
    def tokens(self) -> "pandas.DataFrame":
        """A row per text, with the columns of tokens.csv; no rows where the data are images."""
        from pflsec.reports.load import load_run as read

        return next(a.tokens for a in read(self.path.parents[1]).attacks if a.id == self.path.name)

    @property
    def mixed(self) -> "pandas.DataFrame":
        """A row per victim image, with the columns of mixed.csv; no rows where clients do not train on mixed images."""
        from pflsec.reports.load import load_run as read

        return next(a.mixed for a in read(self.path.parents[1]).attacks if a.id == self.path.name)

    @property
    def membership(self) -> dict[str, dict[str, Any]]:
        """What each statistic of a membership attack is worth (see pflsec.leakage.membership.summary); {} for other attacks."""
        return read_json(self.path / "attack.json", "the attack").get("membership", {})


class AttackSession:
    """Attacks on one run with one set of options. Opens the vault for scoring, and for what the threat model grants."""

    def __init__(self, folder: RunFolder, config: AttackConfig):
        self.folder, self.config = folder, config
        if config.executor == "ray":
            cluster.library()
        self.train, self.spec = attacking.training_config(folder)
        self.card = registry.card("algorithms", self.train.algo)
        self.naive = self.config.naive and bool(self.train.defense)
        self.mixing = mixing([parse_defense(text) for text in self.train.defense])
        self.epsilon = folder.last_metrics().get("epsilon")
        self.captures = attacking.selected(folder, config)
        weights = Path(config.lpips_weights) if config.lpips_weights else None
        self.perceptual = Perceptual.find(config.lpips if self.spec.vocabulary is None else "none", weights)
        self.vault = Vault(folder.vault)
        self.pool: Pool | None = self.vault.pool() if (folder.vault / "pool.safetensors").exists() else None
        private = attacking.check(folder, self.captures, config.visible or ())
        store = CaptureStore(folder.captures)
        self.headers = {name: store.header(name) for name in self.captures}
        if self.pool is not None:
            for name, header in self.headers.items():
                sent = {item["name"]: torch.Size(item["shape"]) for item in header["items"]["up"]}
                check_pool(self.pool, self.vault.check(name, self.spec, header["batch"], private, sent))
                self._mixtures(name)
        self.groups = groups(config.threat, self.headers)
        self._drawn: dict[str, membership.Candidates | None] = {}

    def run_each(
        self, ready: Sequence[Ready], on_victim: OnVictim, on_control: OnControl = lambda name, row: None
    ) -> tuple[list[Scores], dict[str, Exception]]:
        """Run attacks one after the other; return the scores, and the failures by attack: one keeps no other from its work.

        Where results cannot be read or written there is no going on.
        """
        scores, failures = [], {}
        for one in ready:
            try:
                scores.append(self.run(one.name, one.attack, on_victim, on_control, one.refused))
            except RunError:
                raise
            except Exception as error:
                failures[one.name] = error
        return scores, failures

    def finished(self, name: str, made: Attack[Any]) -> Scores | None:
        """Return the results of this very attack, measured in the same ways, if it was done before; None otherwise."""
        path = attack_folder(self.folder, self._id(name, made))
        meta = results.facts(path)
        try:
            unchecked = self.config.controls and meta["controls"]["positive"]["reason"] == SWITCHED_OFF
            same = meta["state"] == "done" and meta["lpips"]["name"] == self.perceptual.name and not unchecked
        except (KeyError, TypeError):  # no results, or damaged ones
            return None
        return Scores(path) if same else None

    def trial(self, name: str) -> attacking.Attempt:
        """Attack the first target alone, for the time that it takes. Nothing is scored or written."""
        return attacking.attempt(self._targets(name)[0])

    def run(
        self,
        name: str,
        made: Attack[Any],
        on_victim: OnVictim,
        on_control: OnControl = lambda name, row: None,
        refused: str = "",
    ) -> Scores:
        """Run one attack on all selected captures, and then on its controls, and write its folder.

        refused  why it cannot be mounted: nothing is tried, and every row says so
        On Ctrl-C and on failure the finished victims are written, unless earlier results hold as many.
        """
        began, started = time.perf_counter(), manifest.now()
        found: list[Finding] = []
        controls: list[Row] = []
        path = attack_folder(self.folder, self._id(name, made))
        secure(path.parent)
        state = "interrupted"
        try:
            for tried in self._tried(name, refused):
                for one in self._findings(name, tried):
                    found.append(one)
                    on_victim(name, len(found), len(self.captures), one.row)
            for row in self._controls(name, found):
                controls.append(row)
                on_control(name, row)
            state = "done"
        except Exception:
            state = "failed"
            raise
        finally:
            if state == "done" or len(found) > results.victims_in(path):
                meta = self._meta(name, made, path.name, started, time.perf_counter() - began, state)
                self._write(path, meta | {"controls": self._verdicts(name, found, controls)}, found, controls)
        if self.pool is not None and any(one.picture is not None for one in found):
            from pflsec.reports.figures import write_gallery

            write_gallery(self.folder.path, path.name)
        return Scores(path)

    def _write(self, path: Path, meta: Row, found: Sequence[Finding], controls: Sequence[Row]) -> None:
        secure(path)
        told = {one.capture: {k: getattr(one.result, k, None) for k in ("failures", "trace")} for one in found}
        images, tokens, members, mixtures = (
            list(chain.from_iterable(getattr(one, table) for one in found))
            for table in ("images", "tokens", "members", "mixtures")
        )
        pictures = {one.capture: one.picture for one in found if one.picture is not None}
        rows = [one.row for one in found]
        results.write(path, meta | {"victims": told}, rows, images, pictures, controls, tokens, members, mixtures)

    def _tried(self, name: str, refused: str) -> Iterable[attacking.Attempt]:
        if refused:
            return [attacking.Attempt(capture, None, refused, 0.0) for capture in self.captures]
        return self._attempts(self._targets(name))

    def _targets(self, name: str) -> list[attacking.Target]:
        targets = [[self._target(name, capture) for capture in group] for group in self.groups]
        return [replace(first, others=tuple(others)) for first, *others in targets]

    def _target(self, name: str, capture: str) -> attacking.Target:
        """Return one capture to attack, with the truth that the threat model grants, and why it cannot speak, if so."""
        target = attacking.Target(self.folder.path, capture, name, narrowed(name, self.config), None, None)
        knows = self.config.threat.knows
        granted = knows & {Knows.LABELS, Knows.LABEL_HIST, Knows.PRIVATE, Knows.CANDIDATES}
        if self.pool is None and not granted and not acts(name):
            return target
        truth = self.vault.truth(capture)
        valid, why = results.validity(truth.replay_residual)
        own, gone = self._own(capture, truth) if acts(name) else (None, "")
        put = self._candidates(name, capture)
        return replace(
            target,
            candidates=(put.x, put.y) if put else None,
            labels=self._labels(capture, truth) if Knows.LABELS in knows else None,
            state=truth.state if Knows.PRIVATE in knows else None,
            counts=torch.bincount(truth.y, minlength=self.spec.classes) if Knows.LABEL_HIST in knows else None,
            own=own,
            doubt=why if valid is False else gone,
        )

    def _mixtures(self, capture: str) -> Mixtures | None:
        """Return what a capture's steps trained on in place of its batch, or None where they did not, or it was not stored."""
        return self.vault.mixtures(capture, self.spec) if self.mixing is not None else None

    def _labels(self, capture: str, truth: Truth) -> Tensor | None:
        """Return the labels that are granted: those that were trained with, unless the attacker knows of no mixing."""
        if self.mixing is None or self.naive:
            return truth.y
        found = self._mixtures(capture)
        return None if found is None else found.labels(truth.dataset_index)

    def _own(self, capture: str, truth: Truth) -> tuple[Client, str]:
        """Return with what a client's work is done again on another downlink, and why that would be no such work, if so."""
        if self.mixing is None:
            return Client(truth.x, truth.y, truth.state, truth.unsent), ""
        found = self._mixtures(capture)
        places = [] if found is None else [found.of(row) for row in truth.dataset_index.tolist()]
        if found is None or self.headers[capture]["steps"] > 1 or not all(len(some) for some in places):
            why = f"the exchange cannot be done again under {self.mixing.key}: its steps mix anew, or were not stored"
            return Client(truth.x, truth.y, truth.state, truth.unsent), why
        first = torch.stack([some[0] for some in places])
        return Client(found.x[first], found.y[first], truth.state, truth.unsent), ""

    def _candidates(self, name: str, capture: str) -> membership.Candidates | None:
        """Return what an attack that judges candidates is asked about: the same for every call; None for other attacks.

        Raises RunError where the run's vault has no images from outside the batches.
        """
        if Knows.CANDIDATES not in registry.load("attacks", name).needs:
            return None
        if capture not in self._drawn:
            rng, client = stream(self.config.seed, "candidates", capture), int(self.headers[capture]["client"])
            self._drawn[capture] = membership.candidates(self.vault.truth(capture), self._outsiders, client, rng)
        return self._drawn[capture]

    @cached_property
    def _outsiders(self) -> Outsiders:
        return self.vault.outsiders()

    def _member_rows(self, name: str, capture: str, scores: Mapping[str, Tensor] | None) -> list[Row]:
        put = self._candidates(name, capture) if scores else None
        return membership.rows(capture, int(self.headers[capture]["client"]), put, scores) if put and scores else []

    @property
    def controlled(self) -> bool:
        """Whether the controls can be attacked too: the positive one is made of the truth."""
        return self.config.controls and self.pool is not None

    def _attempts(self, targets: Sequence[attacking.Target]) -> Iterator[attacking.Attempt]:
        return attacking.attempts(targets, self.config.executor, self.config.workers)

    def _controls(self, name: str, found: Sequence[Finding]) -> Iterator[Row]:
        """Attack the controls of the first victim on which the attack had something to work; yield their rows."""
        if not self.controlled or acts(name):
            return
        first = next((one.capture for one in found if one.row["status"] != NOTHING), None)
        if first is None:
            return
        truth, target = self.vault.truth(first), replace(self._target(name, first), doubt="")
        whole = target.config.model_copy(update={"visible": None})
        positive = replace(
            target,
            config=whole,
            labels=None if target.labels is None else truth.y,
            state=None if target.state is None else {},
            control=Control("positive", truth.x, truth.y),
        )
        targets = [positive, replace(target, control=Control("negative"))]
        for target, tried in zip(targets, self._attempts(targets), strict=True):
            assert target.control is not None
            (one,) = self._findings(name, tried)
            valid, why = self._validity(tried, None)
            row = one.row | {"attack_valid": valid, "reason": self._reason(tried, why)}
            yield row | {"control": target.control.name} | (PLAIN if target is positive else {})

    def _verdicts(self, name: str, found: Sequence[Finding], controls: Sequence[Row]) -> dict[str, Any]:
        """Return {control: verdict}: what the controls say of the attack, or why they were not run."""
        absent = ""
        if not self.config.controls:
            absent = SWITCHED_OFF
        elif self.pool is None:
            absent = "the run has no vault"
        elif len(found) == len(self.captures) and all(one.row["status"] == NOTHING for one in found):
            absent = "no victim could be attacked"
        elif acts(name):
            absent = "the attack brings about its own exchange"
        elif len(controls) < 2:
            absent = "the attack was stopped before"
        said = {row["control"]: verdict(row["control"], row) for row in controls}
        return {name: said.get(name, {"verdict": "not run", "reason": absent}) for name in ("positive", "negative")}

    def _findings(self, name: str, tried: attacking.Attempt) -> Iterator[Finding]:
        """Yield what came of each capture that was attacked. Those that were seen as one batch are scored as one, and each
        row holds what came of its own images."""
        captures, result = [tried.capture, *tried.others], tried.result
        if self.pool is None:
            for i, capture in enumerate(captures):
                valid, why = self._validity(tried, None)
                row = self._row(name, capture, tried) | {
                    "attack_valid": valid,
                    "reason": self._reason(tried, why, UNSCORED),
                }
                yield Finding(capture, row, result, picture=None if i else self._picture(result, None))
            return
        truths = [self.vault.truth(capture) for capture in captures]
        scored, words = self._score(result, joined(truths))
        whole, at = self._picture(result, joined(truths)), 0
        no_image = "" if result is None or self.spec.vocabulary is None else NO_IMAGE
        found = self._mixed(result, captures)
        for capture, truth, part in zip(captures, truths, parts(scored, [len(t.x) for t in truths]), strict=True):
            own, at = slice(at, at + len(truth.x)), at + len(truth.x)
            row = self._row(name, capture, tried) | {k: v for k, v in part.row().items() if k in results.COLUMNS}
            row["status"] = "nonfinite" if part.nonfinite else row["status"]
            valid, why = self._validity(tried, truth)
            row |= {"dataset_index": " ".join(map(str, truth.dataset_index.tolist())), "attack_valid": valid}
            seen = mixed.rows(capture, truth.dataset_index.tolist(), found or {})
            said = mixed.UNKNOWN if found is None else mixed.sentence(seen, truth.mixed_residual)
            yield Finding(
                capture,
                row | {"reason": self._reason(tried, why, no_image, said)},
                result,
                images=results.image_rows(capture, part),
                tokens=[one.row() | {"capture": capture} for one in words[own]],
                members=self._member_rows(name, capture, result.membership if result else None),
                mixtures=seen,
                picture=None if whole is None else whole[own],
            )

    def _row(self, name: str, capture: str, tried: attacking.Attempt) -> Row:
        """Return what a row says of a capture and of the attack, without scores."""
        header, result = self.headers[capture], tried.result
        row: Row = {
            "run": self.folder.path.name,
            "algo": self.card.key,
            "family": self.card.family,
            "defense": "+".join(self.train.defense) or "none",
            "epsilon": self.epsilon,
            "attack": name,
            "adversary": self.config.adversary,
            "knowledge": self.config.knowledge,
            "seconds": tried.seconds,
            "status": result.status if result else NOTHING,
        } | {k: header[k] for k in ("kind", "round", "client", "victim", "batch", "steps")}
        if result is not None:
            row |= {k: getattr(result, k) for k in ("labels", "hidden", "iterations", "restarts", "objective")}
        return row

    def _reason(self, tried: attacking.Attempt, *more: str) -> str:
        return "; ".join(filter(None, (tried.reason, limits(self.config), NAIVE if self.naive else "", *more)))

    def _validity(self, tried: attacking.Attempt, truth: Truth | None) -> tuple[bool | None, str]:
        """Return whether an attack on a capture can say anything, and why not beyond the attempt's own reason."""
        if tried.inconclusive:
            return False, ""
        return (None, "") if truth is None else results.validity(truth.replay_residual)

    def _score(self, result: Reconstruction | None, truth: Truth) -> tuple[VictimScore, list[texts.TextScore]]:
        assert self.pool is not None
        x, y = (result.x, result.y) if result else (None, None)
        if self.spec.vocabulary is not None:
            return texts.score(truth, x, y, self.pool)
        return score(truth, x, y, self.spec.pixels, self.pool, self.perceptual), []

    def _mixed(self, result: Reconstruction | None, captures: Sequence[str]) -> Mapping[int, mixed.MixedScore] | None:
        """Return what was found of mixed images, by the dataset row that each stands for; {} where there is nothing to compare,
        None where it is not known what was trained on."""
        assert self.pool is not None
        if self.mixing is None or result is None or result.x is None:
            return {}
        found = mixed.joined([self._mixtures(capture) for capture in captures])
        return None if found is None else mixed.score(found, result.x, self.spec.pixels, self.pool)

    def _picture(self, result: Reconstruction | None, truth: Truth | None) -> Tensor | None:
        if result is None or result.x is None:
            return None
        if self.spec.vocabulary is not None:
            return texts.in_order(None if truth is None else truth.x, result.x)
        return as_pictures(self.spec, result.x, truth)

    def _id(self, name: str, made: Attack[Any]) -> str:
        facts = [made.cfg.model_dump(), self.config.adversary, self.config.knowledge, self.config.seed, self.captures]
        facts += [self.config.visible] if self.config.visible else []
        facts += [NAIVE] if self.naive else []
        return f"{name}-{hashlib.sha256(to_json(facts).encode()).hexdigest()[:8]}"

    def _meta(self, name: str, made: Attack[Any], id: str, started: str, seconds: float, state: str) -> dict[str, Any]:
        facts = attack_facts(name, made, self.config, self.perceptual, started, seconds)
        return {"id": id, **facts, "naive": self.naive, "captures": self.captures, "state": state}


def attack_facts(
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
            "letter": config.threat_model,
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


def limits(config: AttackConfig) -> str:
    """Return what a row says of a limited view of the upload."""
    return f"visible alone: {', '.join(config.visible)}" if config.visible else ""


def as_pictures(spec: InputSpec, x: Tensor, truth: Truth | None) -> Tensor:
    """Return a reconstruction as pixels, float32 [B, C, H, W] in [0, 1], in the order of the truth where there is one."""
    pixels = torch.nan_to_num(spec.pixels(x.detach().double()), nan=0.5).clamp(0, 1)
    if truth is not None:
        order = assign(spec.pixels(truth.x.double()).clamp(0, 1), pixels)
        pixels = torch.stack([pixels[j] if j >= 0 else torch.full_like(pixels[0], 0.5) for j in order.tolist()])
    return pixels.float()
