"""Attacks on one run with one set of options: what is attacked, scored and written."""

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pflsec.config.attack import AttackConfig, Ready
from pflsec.core import registry
from pflsec.core.attack import Attack
from pflsec.core.errors import RunError
from pflsec.core.files import plain, read_json, to_json
from pflsec.core.knowledge import Knows
from pflsec.leakage import results
from pflsec.leakage.controls import verdict
from pflsec.leakage.perceptual import Perceptual
from pflsec.runtime import attacking, manifest
from pflsec.runtime.controls import Control
from pflsec.runtime.folder import RunFolder, attack_folder, secure
from pflsec.session.granting import Granting, acts
from pflsec.session.opened import OpenRun
from pflsec.session.scoring import NAIVE, NOTHING, Finding, Row, Scoring

if TYPE_CHECKING:
    import pandas

    from pflsec.reports.load import AttackData

OnVictim = Callable[[str, int, int, Mapping[str, Any]], None]
OnControl = Callable[[str, Mapping[str, Any]], None]
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


@dataclass(frozen=True)
class Scores:
    """The results of one attack on disk."""

    path: Path

    @property
    def table(self) -> "pandas.DataFrame":
        """A row per victim, with the columns of scores.csv."""
        return self._data.scores

    @property
    def tokens(self) -> "pandas.DataFrame":
        """A row per text, with the columns of tokens.csv; no rows where the data are images."""
        return self._data.tokens

    @property
    def mixed(self) -> "pandas.DataFrame":
        """A row per victim image, with the columns of mixed.csv; no rows where clients do not train on mixed images."""
        return self._data.mixed

    @property
    def membership(self) -> dict[str, dict[str, Any]]:
        """What each statistic of a membership attack is worth (see pflsec.leakage.membership.summary); {} for other attacks."""
        return read_json(self.path / "attack.json", "the attack").get("membership", {})

    @property
    def _data(self) -> "AttackData":
        from pflsec.reports.load import load_run

        return next(one for one in load_run(self.path.parents[1]).attacks if one.id == self.path.name)


class AttackSession:
    """Attacks on one run with one set of options. Opens the vault for scoring, and for what the threat model grants."""

    def __init__(self, folder: RunFolder, config: AttackConfig):
        self.folder, self.config, self.opened = folder, config, OpenRun(folder, config)
        self.granting = Granting(self.opened)
        self.scoring = Scoring(self.opened, self.granting)

    @property
    def captures(self) -> list[str]:
        """The ids of the captures that the options select, sorted."""
        return self.opened.captures

    @property
    def perceptual(self) -> Perceptual:
        """The perceptual metric, or why there is none."""
        return self.opened.perceptual

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
        return attacking.attempt(self.granting.targets(name)[0])

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
                for one in self.scoring.findings(name, tried):
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
        if self.opened.pool is not None and any(one.picture is not None for one in found):
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
        return self._attempts(self.granting.targets(name))

    @property
    def controlled(self) -> bool:
        """Whether the controls can be attacked too: the positive one is made of the truth."""
        return self.config.controls and self.opened.pool is not None

    def _attempts(self, targets: Sequence[attacking.Target]) -> Iterator[attacking.Attempt]:
        return attacking.attempts(targets, self.config.executor, self.config.workers)

    def _controls(self, name: str, found: Sequence[Finding]) -> Iterator[Row]:
        """Attack the controls of the first victim on which the attack had something to work; yield their rows."""
        if not self.controlled or acts(name):
            return
        first = next((one.capture for one in found if one.row["status"] != NOTHING), None)
        if first is None:
            return
        truth, target = self.opened.vault.truth(first), replace(self.granting.target(name, first), doubt="")
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
            (one,) = self.scoring.findings(name, tried)
            valid, why = self.scoring.validity(tried, None)
            row = one.row | {"attack_valid": valid, "reason": self.scoring.reason(tried, why)}
            yield row | {"control": target.control.name} | (PLAIN if target is positive else {})

    def _verdicts(self, name: str, found: Sequence[Finding], controls: Sequence[Row]) -> dict[str, Any]:
        """Return {control: verdict}: what the controls say of the attack, or why they were not run."""
        absent = ""
        if not self.config.controls:
            absent = SWITCHED_OFF
        elif self.opened.pool is None:
            absent = "the run has no vault"
        elif len(found) == len(self.captures) and all(one.row["status"] == NOTHING for one in found):
            absent = "no victim could be attacked"
        elif acts(name):
            absent = "the attack brings about its own exchange"
        elif len(controls) < 2:
            absent = "the attack was stopped before"
        said = {row["control"]: verdict(row["control"], row) for row in controls}
        return {name: said.get(name, {"verdict": "not run", "reason": absent}) for name in ("positive", "negative")}

    def _id(self, name: str, made: Attack[Any]) -> str:
        facts = [made.cfg.model_dump(), self.config.adversary, self.config.knowledge, self.config.seed, self.captures]
        facts += [self.config.visible] if self.config.visible else []
        facts += [NAIVE] if self.opened.naive else []
        return f"{name}-{hashlib.sha256(to_json(facts).encode()).hexdigest()[:8]}"

    def _meta(self, name: str, made: Attack[Any], id: str, started: str, seconds: float, state: str) -> dict[str, Any]:
        facts = attack_facts(name, made, self.config, self.perceptual, started, seconds)
        return {"id": id, **facts, "naive": self.opened.naive, "captures": self.captures, "state": state}


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
