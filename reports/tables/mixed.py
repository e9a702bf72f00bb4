"""What attacks found of mixed images, where clients trained on such."""

from collections.abc import Iterable
from typing import Any

import pandas as pd

from pflsec.reports.load import AttackData, RunData
from pflsec.reports.tables.rows import FOUND_BY, SUCCESS, found_by, speaking

MEDIANS = ("psnr_mixed", "psnr_mixed_blind", "psnr_part", "psnr_part_blind")
MIXED = [*FOUND_BY, "images", *MEDIANS, "success"]


def mixed_table(runs: Iterable[RunData]) -> pd.DataFrame:
    """Return a row for every run and attack: medians in dB over the images in whose place mixed ones were trained on.

    psnr_mixed  against the mixed image that was rebuilt best over the steps      success  share of them from SUCCESS on
    psnr_part   of that mixed image the part that shows best, after scale and shift      *_blind  of the guess without any message
    Images of captures that are not valid stand in no number; the leakage table counts them.
    """
    return pd.DataFrame([row for run in runs for attack in run.attacks for row in _mixed(run, attack)], columns=MIXED)


def _mixed(run: RunData, attack: AttackData) -> list[dict[str, Any]]:
    found = speaking(attack, attack.mixed)
    if found.empty:
        return []
    numbers = {name: found[name].median() for name in MEDIANS}
    success = (found["psnr_mixed"] >= SUCCESS).mean()
    return [found_by(run, attack) | {"images": len(found), **numbers, "success": success}]
