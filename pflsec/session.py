"""Attacks on one run with one set of options: what is attacked, scored and written."""

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pflsec.config.attack import AttackConfig
from pflsec.core import registry
from pflsec.core.attack import Attack
from pflsec.core.files import plain, to_json
from pflsec.core.knowledge import Knows
from pflsec.leakage import results
from pflsec.leakage.matching import assign
from pflsec.leakage.perceptual import Perceptual
from pflsec.leakage.score import VictimScore, score
from pflsec.leakage.vault import Pool, Truth, Vault
from pflsec.runtime import attacking, manifest
from pflsec.runtime.folder import RunFolder, attack_folder, secure
from pflsec.wire.store import CaptureStore

if TYPE_CHECKING:
    import pandas

OnVictim = Callable[[str, int, int, Mapping[str, Any]], None]


@dataclass(frozen=True)
class Scores:
    """The results of one attack on disk."""

    path: Path

    @property
    def table(self) -> "pandas.DataFrame":
        """A row per victim, with the columns of scores.csv."""
        from pflsec.reports.load import load_run as read

        return next(a.scores for a in read(self.path.parents[1]).attacks if a.id == self.path.name)


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
            "reason": tried.reason,
            "status": result.status if result else "not-applicable",
        } | {k: header[k] for k in ("kind", "round", "client", "victim", "batch", "steps")}
        if result is not None:
            row |= {k: getattr(result, k) for k in ("labels", "hidden", "iterations", "restarts", "objective")}
        if self.pool is None:
            return (
                row | {"reason": row["reason"] or "not scored: the run has no vault"},
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
        row["reason"] = "; ".join(filter(None, (tried.reason, why)))
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
