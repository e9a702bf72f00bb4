"""The rows of scores.csv, and the folder of an attack's results."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from pflsec.core.errors import RunError
from pflsec.core.files import read_json, to_csv, write_json, write_text
from pflsec.core.tensors import write_items
from pflsec.leakage import membership, mixed
from pflsec.leakage.score import VictimScore

SCHEMA = 1
COLUMNS = (
    "run", "algo", "family", "defense", "epsilon", "attack", "adversary", "knowledge", "labels", "hidden", "kind", "round",
    "client", "victim", "dataset_index", "batch", "steps", "iterations", "restarts", "seconds", "objective", "mse", "psnr",
    "psnr_capped", "ssim", "ssim_variant", "lpips", "lpips_status", "clip_frac", "label_true", "label_found",
    "label_correct", "identified", "psnr_blind", "excess_psnr", "attack_valid", "reason", "status",
)  # fmt: skip
IMAGE_COLUMNS = (
    "capture", "position", "dataset_index", "matched", "mse", "mse_unclipped", "psnr", "psnr_capped", "ssim", "lpips",
    "label_true", "label_found", "identified", "psnr_blind", "excess_psnr", "saturated", "nonfinite",
)  # fmt: skip
TOKEN_COLUMNS = (
    "capture", "position", "dataset_index", "matched", "words", "unknown", "found", "token_recall", "token_precision",
    "set_exact", "multiset_exact", "sequence_exact", "rouge_l", "in_place", "identified", "recall_blind", "label_true",
    "label_found",
)  # fmt: skip
REPLAY_TOLERANCE = 1e-3
"""Largest relative distance, at the truth, between what the replayed and the captured uplink say about the data."""


def validity(residual: float | None, up_to: float = REPLAY_TOLERANCE) -> tuple[bool | None, str]:
    """Return whether an attack on this capture can speak at all, and why not; (None, reason) where it is not known."""
    if residual is None:
        return None, "the replay of the true batch was not measured"
    if not residual <= up_to:
        return False, (
            f"the replay of the true batch misses what was sent by {residual:.1g} (relative): the client's work is random, or "
            "depends on something that the capture lacks"
        )
    return True, ""


def image_rows(capture: str, score: VictimScore) -> list[dict[str, Any]]:
    """Return a row of images.csv for each image of a victim batch."""
    return [image.row() | {"capture": capture} for image in score.images]


def facts(folder: Path) -> dict[str, Any]:
    """Return attack.json; {} where the folder holds no results, or damaged or foreign ones."""
    try:
        found = read_json(folder / "attack.json", "attack")
    except RunError:
        return {}
    return found if isinstance(found, dict) and found.get("schema") == SCHEMA else {}


def victims_in(folder: Path) -> int:
    """Return of how many victims the folder holds results; 0 where it holds none, or damaged ones."""
    found = facts(folder).get("victims")
    return len(found) if isinstance(found, dict) else 0


def write(
    folder: Path,
    meta: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    images: Sequence[Mapping[str, Any]],
    pictures: Mapping[str, Tensor],
    controls: Sequence[Mapping[str, Any]] = (),
    texts: Sequence[Mapping[str, Any]] = (),
    members: Sequence[Mapping[str, Any]] = (),
    mixtures: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Write an attack's results: attack.json, scores.csv, images.csv, controls.csv and reconstructions.safetensors;
    tokens.csv of texts, membership.csv where candidates were judged, and mixed.csv where clients trained on mixed images.

    pictures  {capture: [B, C, H, W] in pixel space, clamped, in the order of the truth; or tokens [B, any length]}
    texts     rows of tokens.csv, one for each text
    members   a row of membership.csv for each candidate; where there are any, attack.json says what the scores are worth
    mixtures  rows of mixed.csv, one for each image in whose place a mixed one was trained on
    """
    if members:
        meta = {**meta, "membership": membership.summary(members)}
    write_items(folder / "reconstructions.safetensors", pictures)
    judged = [*membership.COLUMNS, *membership.statistics(members)]
    optional = (
        ("membership.csv", judged, members),
        ("tokens.csv", TOKEN_COLUMNS, texts),
        ("mixed.csv", mixed.COLUMNS, mixtures),
    )
    for name, columns, table in optional:
        if table:
            write_text(folder / name, to_csv(columns, table))
        else:  # an earlier result's would speak of other reconstructions
            (folder / name).unlink(missing_ok=True)
    write_text(folder / "images.csv", to_csv(IMAGE_COLUMNS, images))
    write_text(folder / "controls.csv", to_csv(("control", *COLUMNS), controls))
    write_text(folder / "scores.csv", to_csv(COLUMNS, rows))
    write_json(folder / "attack.json", {"schema": SCHEMA, **meta})
