"""Leakage where clients train on mixtures of their images: how well a mixed image was rebuilt, and how well one of its parts.

A low PSNR against a victim's own image says little there: what the network saw was another one. Against what it saw, each step's
mixed images are matched with the reconstructions as images are elsewhere (pflsec.leakage.matching). A part may show through
darker or paler, so it is compared with a*rec + b, clamped to [0, 1], for the a and b that bring the two nearest.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from pflsec.core.defense import together
from pflsec.leakage.images import capped, psnr
from pflsec.leakage.matching import assign
from pflsec.leakage.score import GREY, clean
from pflsec.leakage.vault import Mixtures, Pool

COLUMNS = (
    "capture", "position", "dataset_index", "step", "weight", "psnr_mixed", "psnr_mixed_blind",
    "part", "part_weight", "psnr_part", "psnr_part_blind",
)  # fmt: skip
UNKNOWN = "what was trained on, mixed images, is not in the vault"
ONE_MIXTURE = 1e-3
"""Largest relative distance, at the truth, between what the replay of one mixed batch and the captured uplink say."""


@dataclass(frozen=True, kw_only=True)
class MixedScore:
    """What an attack found of a mixed image that was trained on in place of a victim's; all PSNR capped.

    step              the step whose mixed image was rebuilt best      weight  the share of the victim's own image in it
    psnr_mixed        against that mixed image, psnr_mixed_blind that of the pool's mean image
    part, part_weight the dataset row of the part that shows best after scale and shift, and its share
    psnr_part         against that part; psnr_part_blind: the best of the mean image over the parts, likewise
    """

    step: int
    weight: float
    psnr_mixed: float
    psnr_mixed_blind: float
    part: int
    part_weight: float
    psnr_part: float
    psnr_part_blind: float


def score(found: Mixtures, rec_x: Tensor, to_pixels: Callable[[Tensor], Tensor], pool: Pool) -> dict[int, MixedScore]:
    """Return the best score over the steps, by the dataset row in whose place a mixed image was trained on.

    rec_x [R, C, H, W] is normalised like what was trained on.
    """
    guesses = clean(to_pixels(rec_x.detach().cpu().double()))
    best: dict[int, MixedScore] = {}
    for step in found.step.unique().tolist():
        places = (found.step == step).nonzero().flatten()
        true = to_pixels(found.x[places].double()).clamp(0, 1)
        for place, image, j in zip(places.tolist(), true, assign(true, guesses).tolist(), strict=True):
            guess = guesses[j] if j >= 0 else torch.full_like(image, GREY)
            row, reached = int(found.parts[place, 0]), capped(psnr(image, guess))
            if row not in best or reached > best[row].psnr_mixed:
                best[row] = _score(found, place, image, guess, to_pixels, pool)
    return best


def _score(
    found: Mixtures, place: int, image: Tensor, guess: Tensor, to_pixels: Callable[[Tensor], Tensor], pool: Pool
) -> MixedScore:
    shares = {int(r): float(w) for r, w in zip(found.parts[place], found.weights[place], strict=True) if w > 0}
    mean = pool.mean.double()
    parts = {row: to_pixels(found.images[found.dataset_index == row][0].double()).clamp(0, 1) for row in shares}
    showing = {row: capped(psnr(true, fitted(guess, true))) for row, true in parts.items()}
    part = max(showing, key=lambda row: showing[row])
    return MixedScore(
        step=int(found.step[place]),
        weight=float(found.weights[place, 0]),
        psnr_mixed=capped(psnr(image, guess)),
        psnr_mixed_blind=capped(psnr(image, mean)),
        part=part,
        part_weight=shares[part],
        psnr_part=showing[part],
        psnr_part_blind=max(capped(psnr(true, fitted(mean, true))) for true in parts.values()),
    )


def fitted(guess: Tensor, true: Tensor) -> Tensor:
    """Return a*guess + b, clamped to [0, 1], a and b by least squares: the mean of `true` for a guess without contrast."""
    centred = guess - guess.mean()
    size = float(centred.square().sum())
    slope = float((centred * (true - true.mean())).sum()) / size if size > 0 else 0.0
    return (slope * centred + true.mean()).clamp(0, 1)


def joined(many: Sequence[Mixtures | None]) -> Mixtures | None:
    """Return the mixtures of several local works as one, or None where those of one are not known. Steps of one number are
    taken together, as their batches are attacked."""
    known = [one for one in many if one is not None]
    if len(known) < len(many) or not known:
        return None
    if len(known) == 1:
        return known[0]
    parts, weights = together([(one.parts, one.weights) for one in known])
    names = ("x", "y", "step", "main", "images", "dataset_index")
    same = {name: torch.cat([getattr(one, name) for one in known]) for name in names}
    return Mixtures(**same, parts=parts, weights=weights)


def rows(capture: str, victims: Sequence[int], scores: Mapping[int, MixedScore]) -> list[dict[str, Any]]:
    """Return a row of mixed.csv for each image of a victim batch, given by its dataset row, on which some step trained."""
    return [
        {"capture": capture, "position": i, "dataset_index": row} | asdict(scores[row])
        for i, row in enumerate(victims)
        if row in scores
    ]


def sentence(found: Sequence[Mapping[str, Any]], residual: float | None) -> str:
    """Return what a row of scores.csv says of its mixed images, "" without any; `found` are its rows of mixed.csv.

    residual  how far the replay of the first step's mixed batch is from what was sent, where measured
    """
    if not found:
        return ""
    mixed, blind, part, part_blind = (
        fmean(row[name] for row in found) for name in ("psnr_mixed", "psnr_mixed_blind", "psnr_part", "psnr_part_blind")
    )
    images = "mixed image was" if len(found) == 1 else f"{len(found)} mixed images were"
    said = (
        f"the {images} rebuilt at {mixed:.1f} dB (blind {blind:.1f}), the part that shows best at {part:.1f} dB "
        f"(blind {part_blind:.1f}): see mixed.csv"
    )
    if residual is not None and residual > ONE_MIXTURE:
        said += (
            f"; the replay of one mixed batch misses what was sent by {residual:.1g} (relative): steps trained on several, or "
            "the loss looks at the client's own labels"
        )
    return said
