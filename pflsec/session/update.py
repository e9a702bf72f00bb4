"""An attack on an update that no run of ours has made: what is checked, attacked, scored and written."""

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pflsec.config.attack import AttackConfig, attack_names, make_attack
from pflsec.config.update import UpdateConfig
from pflsec.core import registry
from pflsec.core.attack import Reconstruction
from pflsec.core.config import build
from pflsec.core.errors import ConfigError, NotApplicable, RunError
from pflsec.core.files import plain, write_json
from pflsec.core.knowledge import Knows
from pflsec.core.tensors import write_items
from pflsec.data.datasets import labelled_images
from pflsec.leakage import results
from pflsec.leakage.perceptual import Perceptual
from pflsec.leakage.score import score
from pflsec.leakage.vault import Pool, Truth
from pflsec.runtime import attacking, elsewhere, manifest
from pflsec.runtime.folder import secure
from pflsec.runtime.replay import visible_items
from pflsec.session.run import attack_facts
from pflsec.session.scoring import as_pictures, limits


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
        try:
            found = attacking.reconstruct(self.name, self.made, self.config, self.update.capture, labels)
        except NotApplicable as reason:
            raise ConfigError(f"{self.name} has nothing to work on in this update: {reason}.") from reason
        seconds = time.perf_counter() - began
        row, images = (None, []) if self.truth is None else self._score(found, self.truth, seconds)
        x = found.x
        pixels = None if x is None else as_pictures(self.update.record.input, x, self.truth)
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
        said = (found.note, limits(self.config), why, "no other images to identify among or to guess from")
        row["reason"] = "; ".join(filter(None, said))
        if scored.nonfinite:
            row["status"] = "nonfinite"
        return row, [image | unknown for image in results.image_rows("update", scored)]

    def _meta(self, found: Reconstruction, started: str, seconds: float) -> dict[str, Any]:
        hashes = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in self.files.items()}
        told = ("objective", "status", "labels", "hidden", "iterations", "restarts", "failures", "trace")
        result = {name: plain(getattr(found, name)) for name in told}
        update = plain(self.described.model_dump()) | {"model": self.model, "sha256": hashes}
        return attack_facts(self.name, self.made, self.config, self.perceptual, started, seconds) | {
            "update": update | {"doubts": self.doubts},
            "result": result | {"label_found": None if found.y is None else found.y.tolist()},
            "state": "done",
        }
