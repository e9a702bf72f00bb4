"""Leakage of one victim batch: reconstruction against truth, in an order of steps fixed for every attack.

Normalised tensors become pixels once; truth and reconstruction are clamped to [0, 1]; reconstructions that
are not finite become grey 0.5, never dropped; one Hungarian assignment serves every metric and the labels;
truths without a reconstruction are compared with grey 0.5; a batch's value is the mean of its images' values
(of dBs, not dB of the mean error).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pflsec.core.errors import RunError
from pflsec.leakage.identify import identified
from pflsec.leakage.images import PSNR_CAP, capped, mse, psnr, ssim
from pflsec.leakage.labels import overlap
from pflsec.leakage.matching import assign
from pflsec.leakage.perceptual import Perceptual
from pflsec.leakage.vault import Pool, Truth

GREY = 0.5
ROUNDING = 1e-6  # float32 leaves exact blacks and whites this far outside [0, 1]; that is no divergence
NOTHING = "no-reconstruction"
MEANS = (
    "mse",
    "mse_unclipped",
    "psnr",
    "psnr_capped",
    "ssim",
    "lpips",
    "identified",
    "psnr_blind",
    "excess_psnr",
)


@dataclass(frozen=True, kw_only=True)
class Leakage:
    """What is measured alike of an image and of a batch (mean over its images). None: not available.

    mse, psnr (inf when equal), psnr_capped (at 100 dB), ssim, lpips: after clamping.
    ssim_variant, lpips_status: which variant, and whether the weights were there; without a value, why not.
    mse_unclipped: before clamping; inf when the reconstruction is not finite.
    clip_frac: share of values outside [0, 1] before clamping, 1.0 for a diverged run.
    saturated: clamping made the match: below 100 dB before it, at or above after it.
    nonfinite: the reconstruction held a NaN or an infinity and was replaced by grey 0.5.
    label_correct, identified: 0.0 or 1.0 for an image, a share for a batch.
    psnr_blind: PSNR of the pool's mean image, the best guess without any message, capped.
    excess_psnr: psnr_capped - psnr_blind.
    """

    mse: float | None
    mse_unclipped: float | None
    psnr: float | None
    psnr_capped: float | None
    ssim: float | None
    ssim_variant: str
    lpips: float | None
    lpips_status: str
    clip_frac: float | None
    saturated: bool
    nonfinite: bool
    label_correct: float | None
    identified: float | None
    psnr_blind: float | None
    excess_psnr: float | None

    def row(self) -> dict[str, Any]:
        """Return the values by column name, for `pflsec.core.files.to_csv`; a batch's images are left out."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "images"}


@dataclass(frozen=True, kw_only=True)
class ImageScore(Leakage):
    """One true image against the reconstruction assigned to it, or against grey when it is not matched."""

    position: int
    dataset_index: int
    matched: bool
    label_true: int
    label_found: int | None


@dataclass(frozen=True, kw_only=True)
class VictimScore(Leakage):
    """One victim batch. Labels are space-separated; label_found is in label_true's order if images match. Of texts: no images."""

    label_true: str
    label_found: str | None
    images: list[ImageScore]


def score(
    truth: Truth,
    rec_x: Tensor | None,
    rec_y: Tensor | None,
    to_pixels: Callable[[Tensor], Tensor],
    pool: Pool,
    perceptual: Perceptual,
) -> VictimScore:
    """Return the leakage of one victim batch of B images.

    rec_x [R, C, H, W] is normalised like truth.x; None when the attack gives labels only, or nothing. rec_y
    [R] holds labels; None when the attack gives none. to_pixels undoes the normalisation for float64 CPU
    tensors [N, C, H, W] and must not clamp, or clip_frac and saturated would be blind. Raises ValueError when
    reconstruction and truth do not fit each other, RunError when pool and truth do not.
    """
    target = to_pixels(truth.x.double()).clamp(0, 1)
    labels = None if rec_y is None else [int(label) for label in rec_y]
    check_pool(pool, truth)
    case = _Case(truth, target, pool, perceptual)
    if rec_x is None:
        return _batch([_image(case, i, None, False, None) for i in range(len(target))], labels, None)
    _check_reconstruction(truth.x, rec_x, labels)
    raw = to_pixels(rec_x.detach().cpu().double())
    grey = torch.full_like(target[0], GREY)
    images = []
    for i, j in enumerate(assign(target, clean(raw)).tolist()):
        matched = j >= 0
        label = labels[j] if matched and labels is not None else None
        images.append(_image(case, i, raw[j] if matched else grey, matched, label))
    found = None if labels is None else [one.label_found for one in images if one.label_found is not None]
    return _batch(images, found, _outside(raw) if len(raw) else None)


def parts(found: VictimScore, sizes: Sequence[int]) -> list[VictimScore]:
    """Return the scores of the batches that were scored as one, in the order in which they were joined.

    Labels that were found without images belong to no image: each batch then gets the labels of all.
    """
    if len(sizes) == 1:
        return [found]
    scores, at = [], 0
    for size in sizes:
        images = [replace(one, position=i) for i, one in enumerate(found.images[at : at + size])]
        labels = [one.label_found for one in images if one.label_found is not None]
        part = _batch(images, labels if found.label_found is not None else None, found.clip_frac)
        if not any(one.matched for one in found.images):
            part = replace(part, label_found=found.label_found, label_correct=found.label_correct)
        scores.append(part)
        at += size
    return scores


@dataclass(frozen=True, eq=False)
class _Case:
    """What every image of the batch is scored with; target [B, C, H, W] holds the true pixels, clamped."""

    truth: Truth
    target: Tensor
    pool: Pool
    perceptual: Perceptual


def check_pool(pool: Pool, truth: Truth) -> None:
    """Raise RunError unless the victim's images are among the candidates."""
    if pool.images.shape[1:] != truth.x.shape[1:]:
        sizes = f"{list(pool.images.shape[1:])}, the victim's {list(truth.x.shape[1:])}"
        raise RunError(f"the vault is damaged: the pool's images are {sizes}. Train again with captures.")
    lacking = set(truth.dataset_index.tolist()) - set(pool.dataset_index.tolist())
    if lacking:  # the victim could never be identified, which would read as privacy
        raise RunError(
            f"the vault is damaged: the pool of {len(pool.images)} candidates lacks the victim's image "
            f"{min(lacking)}. Train again with captures."
        )


def _check_reconstruction(x: Tensor, rec_x: Tensor, labels: list[int] | None) -> None:
    if rec_x.dim() != 4 or rec_x.shape[1:] != x.shape[1:]:
        raise ValueError(f"the reconstruction is {list(rec_x.shape)}, the truth {list(x.shape)}")
    if labels is not None and len(labels) != len(rec_x):
        raise ValueError(f"the reconstruction has {len(rec_x)} images and {len(labels)} labels")


def clean(raw: Tensor) -> Tensor:
    """Return [N, C, H, W] clamped to [0, 1]; an image that is not finite everywhere is grey throughout."""
    finite = torch.isfinite(raw).flatten(1).all(dim=1)
    return torch.where(finite[:, None, None, None], raw, GREY).clamp(0, 1)


def _outside(raw: Tensor) -> float:
    """Return the share of values outside [0, 1]; NaN counts as outside."""
    return 1.0 - float(((raw >= -ROUNDING) & (raw <= 1 + ROUNDING)).double().mean())


def _image(case: _Case, i: int, raw: Tensor | None, matched: bool, label: int | None) -> ImageScore:
    """Return the score of the i-th true image against raw [C, H, W], which is not yet clamped."""
    target, index, true = case.target[i], int(case.truth.dataset_index[i]), int(case.truth.y[i])
    picture = _compare(target, raw, case.perceptual)
    blind = capped(psnr(target, case.pool.mean))
    hit = None
    if raw is not None:
        # Grey that stands in for a failure may lie nearest to the victim by chance: no identification.
        attempt = matched and not picture["nonfinite"]
        hit = float(attempt and identified(clean(raw[None])[0], case.pool, index, target))
    return ImageScore(
        position=i,
        dataset_index=index,
        matched=matched,
        label_true=true,
        label_found=label,
        label_correct=None if label is None else float(label == true),
        identified=hit,
        psnr_blind=blind,
        excess_psnr=None if raw is None else picture["psnr_capped"] - blind,
        **picture,
    )


def _compare(target: Tensor, raw: Tensor | None, perceptual: Perceptual) -> dict[str, Any]:
    """Return the metrics that need a picture, by column; None throughout when there is none."""
    if raw is None:
        status = perceptual.status if perceptual.status != "ok" else NOTHING
        absent = dict.fromkeys(("mse", "mse_unclipped", "psnr", "psnr_capped", "ssim", "lpips", "clip_frac"))
        flags = {"saturated": False, "nonfinite": False}
        return absent | flags | {"ssim_variant": NOTHING, "lpips_status": status}
    pixels = clean(raw[None])[0]
    nonfinite = not bool(torch.isfinite(raw).all())
    unclipped = math.inf if nonfinite else float((raw - target).square().mean())
    decibel = psnr(target, pixels)
    similarity, variant = ssim(target, pixels)
    return {
        "mse": mse(target, pixels),
        "mse_unclipped": unclipped,
        "psnr": decibel,
        "psnr_capped": capped(decibel),
        "ssim": similarity,
        "ssim_variant": variant,
        "lpips": perceptual(target, pixels),
        "lpips_status": perceptual.reason(tuple(target.shape)),
        "clip_frac": _outside(raw),
        "saturated": decibel >= PSNR_CAP and unclipped > 10 ** (-PSNR_CAP / 10),
        "nonfinite": nonfinite,
    }


def _batch(images: list[ImageScore], found: Sequence[int] | None, clip_frac: float | None) -> VictimScore:
    """Return the batch's values: means over images, labels as multisets, clip_frac of all that came."""
    true = [one.label_true for one in images]
    return VictimScore(
        **{name: _mean(images, name) for name in MEANS},
        ssim_variant=images[0].ssim_variant,
        lpips_status=images[0].lpips_status,
        clip_frac=clip_frac,
        saturated=any(one.saturated for one in images),
        nonfinite=any(one.nonfinite for one in images),
        label_true=" ".join(map(str, true)),
        label_found=None if found is None else " ".join(map(str, found)),
        label_correct=None if found is None else overlap(true, found),
        images=images,
    )


def _mean(images: list[ImageScore], name: str) -> Any:
    """Return the mean of a metric over the images, None if they have none; infinite if one of them is."""
    values = [getattr(one, name) for one in images]
    return None if None in values else float(np.mean(values))
