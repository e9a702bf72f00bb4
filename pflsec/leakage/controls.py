"""What an attack's controls say of it: whether what must leak was found, and nothing where there is nothing to find."""

from collections.abc import Mapping
from typing import Any

FOUND = 10.0  # dB above the blind guess; from here on an image counts as rebuilt
SLACK = 1.0  # dB above the blind guess; nothing learnt may still come out so far above it
RIGHT = 0.9  # share of the labels, where an attack finds labels alone

PASSED, FAILED, UNFIT, OPEN = "passed", "failed", "not applicable", "not judged"


def verdict(control: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the verdict on a control's row of controls.csv, with the reason and the numbers behind it.

    control  positive: an exchange that must leak; negative: one that says nothing about its victim
    """
    found, why = (_positive if control == "positive" else _negative)(row)
    numbers = {name: row.get(name) for name in ("status", "psnr_capped", "psnr_blind", "excess_psnr", "label_correct")}
    return {"verdict": found, "reason": why, **numbers}


def _positive(row: Mapping[str, Any]) -> tuple[str, str]:
    if row["status"] == "not-applicable":
        return UNFIT, row["reason"]
    excess, labels = row.get("excess_psnr"), row.get("label_correct")
    if excess is not None:
        return PASSED if excess >= FOUND else FAILED, f"{excess:.1f} dB above a blind guess; {FOUND:g} are needed"
    if labels is not None:
        return (
            PASSED if labels >= RIGHT else FAILED,
            f"{100 * labels:.0f} % of the labels right; {100 * RIGHT:g} are needed",
        )
    return OPEN, "the attack gives neither images nor labels"


def _negative(row: Mapping[str, Any]) -> tuple[str, str]:
    if row["status"] == "not-applicable":
        return PASSED, f"nothing was rebuilt: {row['reason']}"
    excess = row.get("excess_psnr")
    if excess is not None:
        return (
            PASSED if excess <= SLACK else FAILED,
            f"{excess:+.1f} dB against a blind guess; {SLACK:g} above is allowed",
        )
    return OPEN, "without images one batch shows nothing: labels can be right by chance"
