"""What came of attacks on a run's captures: rows of scores.csv and of the tables beside it, and pictures."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pflsec.config.attack import AttackConfig
from pflsec.core.attack import Reconstruction
from pflsec.core.inputs import InputSpec
from pflsec.leakage import membership, mixed, results, texts
from pflsec.leakage.matching import assign
from pflsec.leakage.score import VictimScore, parts, score
from pflsec.leakage.vault import Truth, joined
from pflsec.runtime import attacking
from pflsec.session.granting import Granting
from pflsec.session.opened import OpenRun

UNSCORED = "not scored: the run has no vault"
NAIVE = "naive: the attacker does not know of the defense"
NO_IMAGE = "texts have no image measures: see tokens.csv"
NOTHING = "not-applicable"
Row = dict[str, Any]


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


class Scoring:
    """Scores attempts at the captures of an opened run."""

    def __init__(self, run: OpenRun, granting: Granting):
        self.run, self.granting = run, granting

    def findings(self, name: str, tried: attacking.Attempt) -> Iterator[Finding]:
        """Yield what came of each capture that was attacked. Those that were seen as one batch are scored as one, and each
        row holds what came of its own images."""
        captures, result = [tried.capture, *tried.others], tried.result
        if self.run.pool is None:
            for i, capture in enumerate(captures):
                valid, why = self.validity(tried, None)
                row = self._row(name, capture, tried) | {
                    "attack_valid": valid,
                    "reason": self.reason(tried, why, UNSCORED),
                }
                yield Finding(capture, row, result, picture=None if i else self._picture(result, None))
            return
        truths = [self.run.vault.truth(capture) for capture in captures]
        scored, words = self._score(result, joined(truths))
        whole, at = self._picture(result, joined(truths)), 0
        no_image = "" if result is None or self.run.spec.vocabulary is None else NO_IMAGE
        found = self._mixed(result, captures)
        for capture, truth, part in zip(captures, truths, parts(scored, [len(t.x) for t in truths]), strict=True):
            own, at = slice(at, at + len(truth.x)), at + len(truth.x)
            row = self._row(name, capture, tried) | {k: v for k, v in part.row().items() if k in results.COLUMNS}
            row["status"] = "nonfinite" if part.nonfinite else row["status"]
            valid, why = self.validity(tried, truth)
            row |= {"dataset_index": " ".join(map(str, truth.dataset_index.tolist())), "attack_valid": valid}
            seen = mixed.rows(capture, truth.dataset_index.tolist(), found or {})
            said = mixed.UNKNOWN if found is None else mixed.sentence(seen, truth.mixed_residual)
            yield Finding(
                capture,
                row | {"reason": self.reason(tried, why, no_image, said)},
                result,
                images=results.image_rows(capture, part),
                tokens=[one.row() | {"capture": capture} for one in words[own]],
                members=self._member_rows(name, capture, result.membership if result else None),
                mixtures=seen,
                picture=None if whole is None else whole[own],
            )

    def _row(self, name: str, capture: str, tried: attacking.Attempt) -> Row:
        """Return what a row says of a capture and of the attack, without scores."""
        header, result = self.run.headers[capture], tried.result
        row: Row = {
            "run": self.run.folder.path.name,
            "algo": self.run.card.key,
            "family": self.run.card.family,
            "defense": "+".join(self.run.train.defense) or "none",
            "epsilon": self.run.epsilon,
            "attack": name,
            "adversary": self.run.config.adversary,
            "knowledge": self.run.config.knowledge,
            "seconds": tried.seconds,
            "status": result.status if result else NOTHING,
        } | {k: header[k] for k in ("kind", "round", "client", "victim", "batch", "steps")}
        if result is not None:
            row |= {k: getattr(result, k) for k in ("labels", "hidden", "iterations", "restarts", "objective")}
        return row

    def reason(self, tried: attacking.Attempt, *more: str) -> str:
        """Return what a row says in words: of the attempt, of what the attacker saw and knew, and more."""
        return "; ".join(filter(None, (tried.reason, limits(self.run.config), NAIVE if self.run.naive else "", *more)))

    def validity(self, tried: attacking.Attempt, truth: Truth | None) -> tuple[bool | None, str]:
        """Return whether an attack on a capture can say anything, and why not beyond the attempt's own reason."""
        if tried.inconclusive:
            return False, ""
        return (None, "") if truth is None else results.validity(truth.replay_residual)

    def _score(self, result: Reconstruction | None, truth: Truth) -> tuple[VictimScore, list[texts.TextScore]]:
        assert self.run.pool is not None
        x, y = (result.x, result.y) if result else (None, None)
        if self.run.spec.vocabulary is not None:
            return texts.score(truth, x, y, self.run.pool)
        return score(truth, x, y, self.run.spec.pixels, self.run.pool, self.run.perceptual), []

    def _mixed(self, result: Reconstruction | None, captures: Sequence[str]) -> Mapping[int, mixed.MixedScore] | None:
        """Return what was found of mixed images, by the dataset row that each stands for; {} where there is nothing to compare,
        None where it is not known what was trained on."""
        assert self.run.pool is not None
        if self.run.mixing is None or result is None or result.x is None:
            return {}
        found = mixed.joined([self.run.mixtures(capture) for capture in captures])
        return None if found is None else mixed.score(found, result.x, self.run.spec.pixels, self.run.pool)

    def _picture(self, result: Reconstruction | None, truth: Truth | None) -> Tensor | None:
        if result is None or result.x is None:
            return None
        if self.run.spec.vocabulary is not None:
            return texts.in_order(None if truth is None else truth.x, result.x)
        return as_pictures(self.run.spec, result.x, truth)

    def _member_rows(self, name: str, capture: str, scores: Mapping[str, Tensor] | None) -> list[Row]:
        put = self.granting.candidates(name, capture) if scores else None
        client = int(self.run.headers[capture]["client"])
        return membership.rows(capture, client, put, scores) if put and scores else []


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
