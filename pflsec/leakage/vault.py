"""The vault's reader: the victims' true data and the pool of candidates. Nothing else opens the vault."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pflsec.core.errors import RunError
from pflsec.core.files import read_json, safe_name
from pflsec.core.inputs import InputSpec
from pflsec.core.items import Items, first_nonfinite, without_prefix
from pflsec.core.tensors import read_items

RANGE_SLACK = 1e-4  # de-normalising in float32 misses 0 and 1 by about 1e-7; a wrong scale misses by far more


@dataclass(frozen=True, eq=False)
class Truth:
    """One victim batch: x [B, C, H, W] normalised as the network saw it, or tokens int64 [B, T]; y and dataset_index int64 [B].

    state holds the client's private items before its local work; replay_residual is the relative distance of
    the replayed from the captured uplink, at the truth, or None when it was not measured; mixed_residual that of
    the replay on the mixed batch of the first step, under a defense that mixes images.

    Under defenses of the wire, up holds the upload before they acted, and unsent, by `<defense>.<item>`, what they had left out
    of earlier ones and would add to this one. Both are empty without such defenses, and in runs of earlier versions.
    """

    x: Tensor
    y: Tensor
    dataset_index: Tensor
    state: Items
    replay_residual: float | None
    mixed_residual: float | None = None
    up: Items = field(default_factory=dict)
    unsent: Items = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Mixtures:
    """What the steps of a local work trained on in place of their batches, N images in all, under a defense that mixes images.

    x, y            inputs [N, C, H, W] normalised as the network saw them, probabilities [N, classes]
    step, main      int64 [N], the steps in their order; bool [N], whether of the phase that is sent
    parts, weights  int64 [N, k], dataset rows that x is mixed of, its own first; their shares [N, k], which sum to 1
    images, dataset_index  all parts, [P, C, H, W] normalised, int64 [P]
    """

    x: Tensor
    y: Tensor
    step: Tensor
    main: Tensor
    parts: Tensor
    weights: Tensor
    images: Tensor
    dataset_index: Tensor

    def labels(self, rows: Tensor) -> Tensor | None:
        """Return the labels [B, classes] with which these dataset rows [B] were trained on: for each the mean over its steps, as
        far as they are sent; None where no step trained on one of them."""
        found = [self.of(int(row)) for row in rows]
        return torch.stack([self.y[steps].mean(0) for steps in found]) if all(len(s) for s in found) else None

    def of(self, row: int) -> Tensor:
        """Return the places of what was trained on in place of a dataset row, int64: those that are sent, or all without any."""
        own = self.parts[:, 0] == row
        return (own & self.main if bool((own & self.main).any()) else own).nonzero().flatten()


def joined(truths: Sequence[Truth]) -> Truth:
    """Return several batches as one, in their order. Private items are left out: they are each client's own."""
    if len(truths) == 1:
        return truths[0]
    x, y, index = (torch.cat([getattr(t, name) for t in truths]) for name in ("x", "y", "dataset_index"))
    return Truth(x, y, index, {}, None)


@dataclass(frozen=True, eq=False)
class Pool:
    """The candidates: images [P, C, H, W] in [0, 1], dataset_index int64 [P], mean image [C, H, W].

    Of texts: tokens int64 [P, T] in place of images, and the commonest ones [T] in place of their mean.
    """

    images: Tensor
    dataset_index: Tensor
    mean: Tensor


@dataclass(frozen=True, eq=False)
class Outsiders:
    """Images that are in no batch: x [N, C, H, W] normalised as the network sees them, or tokens int64 [N, T]; y, dataset_index
    and client int64 [N].

    They are test rows of the captured clients, up to 100 of each, its classes in turn, and serve as the non-members among the
    candidates of a membership attack.
    """

    x: Tensor
    y: Tensor
    dataset_index: Tensor
    client: Tensor


class Vault:
    """Reads what `pflsec.core.vault.VaultWriter` wrote into `folder`; every file is checked first."""

    def __init__(self, folder: Path):
        self.folder = folder

    def truth(self, capture_id: str) -> Truth:
        """Return one capture's victim batch; RunError says which file is missing or damaged, and how."""
        name = safe_name(capture_id, "the capture id")
        path = self.folder / f"{name}.safetensors"
        items = read_items(path, f"the truth of capture {name}")
        x = _inputs(items, "B", path)
        y = _integers(items, "y", x.shape[0], path)
        index = _integers(items, "dataset_index", x.shape[0], path)
        facts = self.folder / f"{name}.json"
        checks = read_json(facts, f"the replay check of capture {name}")
        replayed, mixed = (_residual(checks, key, facts) for key in ("replay_residual", "mixed_residual"))
        state, up, unsent = (without_prefix(name, items) for name in ("state", "up", "unsent"))
        return Truth(x, y, index, state, replayed, mixed, up, unsent)

    def check(
        self,
        capture_id: str,
        spec: InputSpec,
        batch: int,
        private: Mapping[str, torch.Size],
        sent: Mapping[str, torch.Size],
    ) -> Truth:
        """Return one capture's victim batch; RunError unless it is one of the run's.

        spec, batch    the network's inputs, and the number of images
        private, sent  shapes of the client's private items, and of its upload's
        """
        truth, path = self.truth(capture_id), self.folder / f"{capture_id}.safetensors"
        if truth.x.shape != (batch, *spec.shape):
            raise _damaged(path, f"'x' is {list(truth.x.shape)}; the capture is of {[batch, *spec.shape]}")
        if not bool(((truth.y >= 0) & (truth.y < spec.classes)).all()):
            raise _damaged(path, f"'y' holds {truth.y.tolist()}; labels lie in 0 to {spec.classes - 1}")
        if odd := _unlike({k: v.shape for k, v in truth.state.items()}, private):
            raise _damaged(path, f"the client's private items are not those of the method (first: '{odd}')")
        if truth.up and (odd := _unlike({k: v.shape for k, v in truth.up.items()}, sent)):
            raise _damaged(path, f"the upload before its defenses is not like the one after them (first: '{odd}')")
        for name, value in truth.unsent.items():
            shape = sent.get(name.partition(".")[2], value.shape)  # an item may be left out of one upload, and wait
            if value.shape != shape:
                raise _damaged(
                    path, f"'unsent.{name}' is {list(value.shape)}; that item of the upload is {list(shape)}"
                )
        for part in ("state", "up", "unsent"):
            if bad := first_nonfinite(getattr(truth, part)):
                raise _damaged(path, f"'{part}.{bad}' holds a NaN or an infinity")
        return truth

    def mixtures(self, capture_id: str, spec: InputSpec) -> Mixtures | None:
        """Return what the steps behind a capture trained on in place of its victim batch, or None where that was not stored.

        spec  the network's inputs; RunError for others, and for a damaged file
        """
        path = self.folder / f"{safe_name(capture_id, 'the capture id')}.mixed.safetensors"
        if not path.exists():
            return None
        items = read_items(path, f"what was mixed for capture {capture_id}")
        x, images = (_floats(items, name, ("N", "C", "H", "W"), path) for name in ("x", "images"))
        y, weights = _shares(items, "y", len(x), path), _shares(items, "weights", len(x), path)
        parts, main = (_item(items, name, path) for name in ("parts", "main"))
        index = _integers(items, "dataset_index", len(images), path)
        found = Mixtures(x, y, _integers(items, "step", len(x), path), main, parts, weights, images, index)
        if x.shape[1:] != spec.shape or images.shape[1:] != spec.shape or y.shape[1] != spec.classes:
            raise _damaged(
                path, f"it is of images {list(x.shape[1:])} of {y.shape[1]} classes, which the run's are not"
            )
        if parts.dtype != torch.int64 or parts.shape != weights.shape or not bool(torch.isin(parts, index).all()):
            raise _damaged(
                path, f"'parts' are {parts.dtype} {list(parts.shape)}, or name a row that is not among its images"
            )
        if main.dtype != torch.bool or main.shape != (len(x),):
            raise _damaged(path, f"'main' is {main.dtype} {list(main.shape)}; it must be bool {[len(x)]}")
        return found

    def pool(self) -> Pool:
        """Return the identification pool, clamped to [0, 1]; RunError if missing or damaged."""
        path = self.folder / "pool.safetensors"
        items = read_items(path, "the pool of candidate images")
        if _is_text(items, "images"):
            images, mean = _tokens(items, "images", 2, path), _tokens(items, "mean", 1, path)
        else:
            images = _pixels(_floats(items, "images", ("P", "C", "H", "W"), path), "images", path)
            mean = _pixels(_floats(items, "mean", ("C", "H", "W"), path), "mean", path)
        if mean.shape != images.shape[1:]:
            raise _damaged(path, f"the mean image is {list(mean.shape)}, the images {list(images.shape[1:])}")
        return Pool(images, _integers(items, "dataset_index", images.shape[0], path), mean)

    def outsiders(self) -> Outsiders:
        """Return the images that are in no batch; RunError where the run is too old to have them, or they are damaged."""
        path = self.folder / "outsiders.safetensors"
        if not path.exists():
            raise RunError(
                f"run '{self.folder.parent.name}' has no images from outside the batches ({path.name} is not in its vault), so "
                "nothing tells members from others. Train again with --capture-rounds to store some."
            )
        items = read_items(path, "the images from outside the batches")
        x = _inputs(items, "N", path)
        y, index, client = (_integers(items, name, x.shape[0], path) for name in ("y", "dataset_index", "client"))
        return Outsiders(x, y, index, client)


def _unlike(found: Mapping[str, torch.Size], wanted: Mapping[str, torch.Size]) -> str | None:
    """Return the first name whose shape is another, or that only one of the two has; None where they are alike."""
    return min((k for k in {*found, *wanted} if found.get(k) != wanted.get(k)), default=None)


def _damaged(path: Path, why: str) -> RunError:
    return RunError(f"the vault is damaged: {path}: {why}. Train again with captures to write a new one.")


def _item(items: Items, name: str, path: Path) -> Tensor:
    if name not in items:
        raise _damaged(path, f"it has no item '{name}'")
    return items[name]


def _floats(items: Items, name: str, axes: tuple[str, ...], path: Path) -> Tensor:
    tensor = _item(items, name, path)
    if not tensor.is_floating_point() or tensor.dim() != len(axes) or not tensor.numel():
        found, wanted = f"{tensor.dtype} {list(tensor.shape)}", ", ".join(axes)
        raise _damaged(path, f"'{name}' is {found}; it must be floating point [{wanted}] and not empty")
    if not torch.isfinite(tensor).all():
        raise _damaged(path, f"'{name}' holds a NaN or an infinity")
    return tensor


def _inputs(items: Items, count: str, path: Path) -> Tensor:
    """Return the item 'x' as the network sees it: images, or tokens."""
    return _tokens(items, "x", 2, path) if _is_text(items, "x") else _floats(items, "x", (count, "C", "H", "W"), path)


def _is_text(items: Items, name: str) -> bool:
    return name in items and items[name].dtype == torch.int64 and items[name].dim() < 3


def _tokens(items: Items, name: str, axes: int, path: Path) -> Tensor:
    tensor = _item(items, name, path)
    if tensor.dtype != torch.int64 or tensor.dim() != axes or not tensor.numel() or int(tensor.min()) < 0:
        found = f"{tensor.dtype} {list(tensor.shape)}"
        raise _damaged(path, f"'{name}' is {found}; it must be token numbers, int64 of {axes} axes, and not empty")
    return tensor


def _integers(items: Items, name: str, length: int, path: Path) -> Tensor:
    tensor = _item(items, name, path)
    if tensor.dtype != torch.int64 or tuple(tensor.shape) != (length,):
        raise _damaged(path, f"'{name}' is {tensor.dtype} {list(tensor.shape)}; it must be int64 [{length}]")
    return tensor


def _shares(items: Items, name: str, length: int, path: Path) -> Tensor:
    tensor = _floats(items, name, ("N", "k"), path)
    if len(tensor) != length or float(tensor.min()) < 0 or float((tensor.sum(1) - 1).abs().max()) > RANGE_SLACK:
        raise _damaged(path, f"'{name}' is {list(tensor.shape)}; it must be {length} rows of shares, which sum to 1")
    return tensor


def _pixels(tensor: Tensor, name: str, path: Path) -> Tensor:
    low, high = float(tensor.min()), float(tensor.max())
    if low < -RANGE_SLACK or high > 1 + RANGE_SLACK:
        raise _damaged(path, f"'{name}' runs from {low:.3g} to {high:.3g}; pixels lie in [0, 1]")
    return tensor.clamp(0, 1)


def _residual(facts: Any, name: str, path: Path) -> float | None:
    if isinstance(facts, dict):
        value = facts.get(name)
        if value is None:
            return None
        if isinstance(value, int | float) and not isinstance(value, bool) and not value < 0:
            return float(value)
    raise _damaged(path, f"{name} must be a number or null in a JSON object")
