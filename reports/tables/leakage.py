"""What attacks found, by run and attack, and victim by victim."""

from collections.abc import Iterable
from typing import Any

import pandas as pd

from pflsec.core.statistics import FEWEST, TOO_FEW, summary
from pflsec.reports import controls
from pflsec.reports.load import SCORES, AttackData, RunData
from pflsec.reports.tables.accuracy import accuracies_about
from pflsec.reports.tables.rows import (
    FAILED,
    SETTING,
    SUCCESS,
    common,
    is_naive,
    named,
    reasons,
    settled,
    share,
    sorted_out,
)

LEAKAGE = (
    "run",
    "algo",
    "family",
    "defense",
    "attack_id",
    *SETTING,
    "labels",
    "rounds",
    "batch_min",
    "batch",
    "steps_min",
    "steps",
    "iterations",
    "restarts",
    "seconds",
    "controls",
    "naive",
    "victims",
    "clients",
    "failures",
    "not_valid",
    "not_valid_reasons",
    "not_applicable",
    "reasons",
    "psnr_median",
    "psnr_q25",
    "psnr_q75",
    "psnr_mean",
    "psnr_max",
    "psnr_blind",
    "excess_mean",
    "excess_low",
    "excess_high",
    "excess_note",
    "ssim",
    "ssim_variant",
    "lpips",
    "lpips_status",
    "label_accuracy",
    "identified",
    "identified_low",
    "identified_high",
    "success",
    "success_low",
    "success_high",
    "rate_note",
    "state",
)
BY_ROUND = (
    *("run", "algo", "family", "defense", "attack_id", *SETTING, "naive", "round", "accuracy_before", "accuracy_after"),
    *("victims", "not_valid", "not_applicable", "psnr_blind", "psnr_median", "psnr_max", "excess_mean"),
    *("success", "identified", "label_accuracy"),
)


def leakage_table(runs: Iterable[RunData]) -> pd.DataFrame:
    """Return a row for every run, attack and setting of it (SETTING).

    victims         attacked victim batches that can speak, the unit of every number
    not_valid       victims of which nothing follows (attack_valid is false), in no other number: `not_valid_reasons` says why;
                    failures are those of them that diverged
    not_applicable  victims on which the attack had nothing to work; `reasons` says why
    summed          clients in the attacked update: 1 for an upload, more where the adversary saw a sum over clients
    batch, steps    the largest B and K; batch_min, steps_min the smallest; iterations and restarts are medians, seconds a sum
    naive           the attacker ignored the defense that was there
    psnr_*          of the capped PSNR; psnr_blind is the median of the guess made without any message
    excess_*        mean PSNR above that guess, with the 95% interval, clients being resampled whole
    rounds          the captured rounds that are taken together here; by round: rounds_table
    *_low, *_high   95% Wilson intervals of shares of victims; excess_note and rate_note: why there is none
    """
    rows = [row for run in runs for attack in run.attacks for row in _leakages(run, attack)]
    return pd.DataFrame(rows, columns=list(LEAKAGE))


def rounds_table(runs: Iterable[RunData]) -> pd.DataFrame:
    """Return the leakage table's rows once more, one for each captured round.

    accuracy_before, accuracy_after  mean personal accuracy that was measured after the round before, which the attacked client
                                     received, and after the round itself; missing where it was not measured, as before round 0
    """
    rows = [
        row | accuracies_about(run, row["round"])
        for run in runs
        for attack in run.attacks
        for row in _leakages(run, attack, "round")
        if not pd.isna(row["round"])
    ]
    return pd.DataFrame(rows, columns=list(BY_ROUND)).astype({"round": "Int64"})


def _leakages(run: RunData, attack: AttackData, *also: str) -> list[dict[str, Any]]:
    """Return a row for each setting of an attack, and for each value of the columns of the scores in `also`."""
    scores, by = settled(attack), [*SETTING, *also]
    fixed = {
        **named(run),
        "attack_id": attack.id,
        "controls": controls.state(attack.meta),
        "naive": is_naive(attack),
        "state": attack.meta["state"],
    }
    return [
        fixed | dict(zip(by, key, strict=True)) | _leakage(group)
        for key, group in scores.groupby(by, sort=True, dropna=False)
        if isinstance(key, tuple)
    ]


def _leakage(group: pd.DataFrame) -> dict[str, Any]:
    tried, invalid, absent = sorted_out(group)
    scored = tried.dropna(subset=["psnr_capped"])
    psnr = scored["psnr_capped"]
    return {
        "labels": common(tried["labels"]),
        "rounds": ", ".join(map(str, sorted(set(group["round"].dropna())))),
        **{f"{name}_min": group[name].min() for name in ("batch", "steps")},
        **{name: group[name].max() for name in ("batch", "steps")},
        **{name: tried[name].astype(float).median() for name in ("iterations", "restarts")},
        "seconds": group["seconds"].sum(),
        "victims": len(tried),
        "clients": tried["client"].nunique(),
        "failures": int(group["status"].isin(FAILED).sum()),
        "not_valid": len(invalid),
        "not_valid_reasons": reasons(invalid),
        "not_applicable": len(absent),
        "reasons": reasons(absent),
        "psnr_median": psnr.median(),
        "psnr_q25": psnr.quantile(0.25),
        "psnr_q75": psnr.quantile(0.75),
        "psnr_mean": psnr.mean(),
        "psnr_max": psnr.max(),
        "psnr_blind": tried["psnr_blind"].median(),
        **_excess(scored.dropna(subset=["excess_psnr"])),
        "ssim": tried["ssim"].mean(),
        "ssim_variant": common(tried["ssim_variant"]),
        "lpips": tried["lpips"].mean(),
        "lpips_status": common(tried["lpips_status"]),
        "label_accuracy": tried["label_correct"].mean(),
        **share("identified", tried["identified"].dropna()),
        **share("success", (psnr >= SUCCESS).astype(float)),
        "rate_note": "" if len(tried) >= FEWEST else TOO_FEW,
    }


def _excess(scored: pd.DataFrame) -> dict[str, Any]:
    """Return the mean excess over the blind guess and its interval, or the reason why there is none."""
    found = summary(scored["excess_psnr"].to_numpy(float), scored["client"].tolist())
    interval = found["ci"] if found["n"] else "no reconstruction"
    low, high, note = (None, None, interval) if isinstance(interval, str) else (*interval, "")
    return {"excess_mean": found["mean"], "excess_low": low, "excess_high": high, "excess_note": note}


def victims_table(runs: Iterable[RunData]) -> pd.DataFrame:
    """Return every run's scores, a row for each victim batch, under the run's name and the attack's id."""
    tables = [
        attack.scores.assign(run=run.name, attack_id=attack.id)
        for run in runs
        for attack in run.attacks
        if not attack.scores.empty
    ]
    columns = ["run", "attack_id", *(name for name in SCORES if name != "run")]
    return pd.concat(tables, ignore_index=True)[columns] if tables else pd.DataFrame(columns=columns)
