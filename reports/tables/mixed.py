"""What attacks found of mixed images, where clients trained on such."""

from collections.abc import Iterable
from typing import Any

import pandas as pd

from pflsec.reports import controls
from pflsec.reports.load import AttackData, RunData
from pflsec.reports.tables.rows import SUCCESS, capture_names, is_naive, named, sorted_out

MEDIANS = ("psnr_mixed", "psnr_mixed_blind", "psnr_part", "psnr_part_blind")
MIXED = [
    *("run", "algo", "family", "defense", "attack_id", "attack", "adversary", "knowledge", "controls", "naive"),
    *("images", *MEDIANS, "success"),
]


def mixed_table(runs: Iterable[RunData]) -> pd.DataFrame:
    """Return a row for every run and attack: medians in dB over the images in whose place mixed ones were trained on.

    psnr_mixed  against the mixed image that was rebuilt best over the steps      success  share of them from SUCCESS on
    psnr_part   of that mixed image the part that shows best, after scale and shift      *_blind  of the guess without any message
    Images of captures that are not valid stand in no number; the leakage table counts them.
    """
    return pd.DataFrame([row for run in runs for attack in run.attacks for row in _mixed(run, attack)], columns=MIXED)


def _mixed(run: RunData, attack: AttackData) -> list[dict[str, Any]]:
    _, invalid, _ = sorted_out(attack.scores)
    found = attack.mixed[~attack.mixed["capture"].isin(capture_names(invalid))]
    if found.empty:
        return []
    threat = {name: attack.meta["threat_model"][name] for name in ("adversary", "knowledge")}
    about = {"attack_id": attack.id, "attack": attack.name, **threat, "controls": controls.state(attack.meta)}
    numbers = {name: found[name].median() for name in MEDIANS}
    success = (found["psnr_mixed"] >= SUCCESS).mean()
    return [{**named(run), **about, "naive": is_naive(attack), "images": len(found), **numbers, "success": success}]
