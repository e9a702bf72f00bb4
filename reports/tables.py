"""Runs as data frames of plain numbers: accuracies in [0, 1], PSNR in dB, sizes in MB of 10^6 bytes.

A missing number is NaN, and a column beside it says why.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from pflsec.core.errors import RunError
from pflsec.core.files import to_json
from pflsec.core.statistics import FEWEST, TOO_FEW, summary, wilson
from pflsec.reports import controls
from pflsec.reports.load import SCORES, AttackData, RunData

SUCCESS = 20.0  # dB; from here on a reconstruction counts as a success
CLAIM = 20  # victims; below that a number illustrates, and supports no claim
ILLUSTRATES = "illustrates only"
NOT_APPLICABLE = "not-applicable"
FAILED = ("diverged", "nonfinite")
MEASURES = {
    "mean": "personal_accuracy_mean",
    "weighted": "personal_accuracy_weighted",
    "std": "personal_accuracy_std",
    "worst10": "personal_accuracy_worst10",
    "global": "global_accuracy",
}
ACCURACY = (
    "run",
    "algo",
    "family",
    "defense",
    "state",
    "at",
    "round",
    *MEASURES,
    "rounds",
    "rounds_planned",
    "mb_up",
    "mb_down",
    "epsilon",
)
TEXT_SHARES = {"multiset": "multiset_exact", "sequence": "sequence_exact", "identified": "identified"}
TEXT_MEASURES = {
    "recall": "token_recall",
    "recall_blind": "recall_blind",
    "precision": "token_precision",
    **TEXT_SHARES,
}
SETTING = ("attack", "adversary", "knowledge", "hidden", "kind")
LEAKAGE = (
    "run",
    "algo",
    "family",
    "defense",
    "attack_id",
    *SETTING,
    "labels",
    "batch_min",
    "batch",
    "steps_min",
    "steps",
    "iterations",
    "restarts",
    "seconds",
    "controls",
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
HEADLINE = (
    "run",
    "algo",
    "family",
    "defense",
    "attack",
    "attack_id",
    "adversary",
    "knowledge",
    "hidden",
    "kind",
    "round",
    "client",
    "victim",
    "psnr_max",
    "psnr_blind",
    "psnr_mean",
    "psnr_low",
    "psnr_high",
    "psnr_note",
    "success",
    "success_low",
    "success_high",
    "n",
    "clients",
    "not_valid",
    "not_applicable",
    "controls",
    "note",
)


MEMBERSHIP: dict[str, type | tuple[type, ...]] = {
    "n_victims": int,
    "n_clients": int,
    "n_members": int,
    "n_others": int,
    "auc": (int, float),
    "auc_low": (int, float, type(None)),
    "auc_high": (int, float, type(None)),
    "tpr_1pct": (int, float),
    "tpr_1pct_low": (int, float, type(None)),
    "tpr_1pct_high": (int, float, type(None)),
    "tpr_01pct": (int, float, type(None)),
    "tpr_01pct_low": (int, float, type(None)),
    "tpr_01pct_high": (int, float, type(None)),
    "note": str,
    "verdict": str,
}
"""Of a statistic in attack.json, as the scorer wrote it."""


def accuracy_table(runs: Iterable[RunData]) -> pd.DataFrame:
    """Return two rows a run, `at` = final and best (by mean personal accuracy); an untested run has one.

    mean, std and worst10 are over clients, weighted is over test rows; global is the word none where the
    method has no global model; mb_up and mb_down are totals of all rounds.
    """
    return pd.DataFrame([row for run in runs for row in _accuracies(run)], columns=list(ACCURACY))


def _named(run: RunData) -> dict[str, Any]:
    """Return what tells a run's rows from others'."""
    algorithm = run.manifest["algorithm"]
    return {"run": run.name, "algo": algorithm["key"], "family": algorithm["family"], "defense": defense_of(run)}


def _accuracies(run: RunData) -> list[dict[str, Any]]:
    metrics, manifest = run.metrics, run.manifest
    common = {
        **_named(run),
        "state": manifest["state"],
        "rounds": len(metrics),
        "rounds_planned": run.config.get("rounds"),
        "mb_up": metrics["bytes_up"].sum() / 1e6,
        "mb_down": metrics["bytes_down"].sum() / 1e6,
        "epsilon": metrics["epsilon"].max(),
    }
    tested = metrics.dropna(subset=[MEASURES["mean"]])
    if tested.empty:
        return [common | {"at": "final"}]
    places = {
        "final": tested.iloc[-1],
        "best": tested.iloc[int(tested[MEASURES["mean"]].to_numpy().argmax())],
    }
    return [common | {"at": at, "round": int(place["round"])} | _measures(place) for at, place in places.items()]


def _measures(place: pd.Series) -> dict[str, Any]:
    found = {name: place[column] for name, column in MEASURES.items()}
    return found | {"global": "none" if pd.isna(found["global"]) else found["global"]}


def defense_of(run: RunData) -> str:
    """Return the run's defenses in their order, joined by +, or none."""
    return "+".join(map(str, run.config.get("defense") or [])) or "none"


def leakage_table(runs: Iterable[RunData]) -> pd.DataFrame:
    """Return a row for every run, attack and setting of it (SETTING).

    victims         attacked victim batches that can speak, the unit of every number
    not_valid       victims of which nothing follows (attack_valid is false), in no other number: `not_valid_reasons` says why;
                    failures are those of them that diverged
    not_applicable  victims on which the attack had nothing to work; `reasons` says why
    batch, steps    the largest B and K; batch_min, steps_min the smallest; iterations and restarts are medians, seconds a sum
    psnr_*          of the capped PSNR; psnr_blind is the median of the guess made without any message
    excess_*        mean PSNR above that guess, with the 95% interval, clients being resampled whole
    *_low, *_high   95% Wilson intervals of shares of victims; excess_note and rate_note: why there is none
    """
    rows = [row for run in runs for attack in run.attacks for row in _leakages(run, attack)]
    return pd.DataFrame(rows, columns=list(LEAKAGE))


def membership_table(runs: Iterable[RunData]) -> pd.DataFrame:
    """Return a row for every run, membership attack and statistic: AUC and true positive rates with 95% intervals.

    n_victims, n_clients, n_members, n_others: what was pooled; note: why there is no interval. Raises RunError when the numbers
    of an attack are damaged.
    """
    rows = [row for run in runs for attack in run.attacks for row in _memberships(run, attack)]
    columns = ["run", "algo", "family", "defense", "attack_id", "attack", "adversary", "knowledge", "kind", "statistic"]
    return pd.DataFrame(rows, columns=[*columns, *MEMBERSHIP])


def _memberships(run: RunData, attack: AttackData) -> list[dict[str, Any]]:
    found = attack.meta.get("membership") or {}
    for name, numbers in found.items() if isinstance(found, dict) else [("membership", None)]:
        fits = isinstance(numbers, dict) and all(isinstance(numbers.get(k), kind) for k, kind in MEMBERSHIP.items())
        if not fits:
            raise RunError(f"{attack.folder / 'attack.json'} is damaged: '{name}' lacks or garbles a number.")
    fixed = {
        **_named(run),
        "attack_id": attack.id,
        "attack": attack.name,
        "adversary": attack.meta["threat_model"]["adversary"],
        "knowledge": attack.meta["threat_model"]["knowledge"],
        "kind": ", ".join(sorted({capture.kind for capture in attack.captures})),
    }
    return [fixed | {"statistic": name} | {k: numbers[k] for k in MEMBERSHIP} for name, numbers in found.items()]


def _leakages(run: RunData, attack: AttackData) -> list[dict[str, Any]]:
    scores = _settled(attack)
    fixed = {
        **_named(run),
        "attack_id": attack.id,
        "controls": controls.state(attack.meta),
        "state": attack.meta["state"],
    }
    return [
        fixed | dict(zip(SETTING, key, strict=True)) | _leakage(group)
        for key, group in scores.groupby(list(SETTING), sort=True, dropna=False)
        if isinstance(key, tuple)
    ]


def _settled(attack: AttackData) -> pd.DataFrame:
    """Return the scores; victims that could not be attacked get the others' commonest `hidden`.

    Nothing was treated there, so they would else stand apart from the row to which they belong.
    """
    scores = attack.scores.copy()
    absent = scores["status"] == NOT_APPLICABLE
    usual = scores.loc[~absent, "hidden"].mode()
    scores.loc[absent, "hidden"] = "" if usual.empty else str(usual.iloc[0])
    return scores


def _leakage(group: pd.DataFrame) -> dict[str, Any]:
    tried, invalid, absent = _sorted_out(group)
    scored = tried.dropna(subset=["psnr_capped"])
    psnr = scored["psnr_capped"]
    return {
        "labels": _common(tried["labels"]),
        **{f"{name}_min": group[name].min() for name in ("batch", "steps")},
        **{name: group[name].max() for name in ("batch", "steps")},
        **{name: tried[name].astype(float).median() for name in ("iterations", "restarts")},
        "seconds": group["seconds"].sum(),
        "victims": len(tried),
        "clients": tried["client"].nunique(),
        "failures": int(group["status"].isin(FAILED).sum()),
        "not_valid": len(invalid),
        "not_valid_reasons": _reasons(invalid),
        "not_applicable": len(absent),
        "reasons": _reasons(absent),
        "psnr_median": psnr.median(),
        "psnr_q25": psnr.quantile(0.25),
        "psnr_q75": psnr.quantile(0.75),
        "psnr_mean": psnr.mean(),
        "psnr_max": psnr.max(),
        "psnr_blind": tried["psnr_blind"].median(),
        **_excess(scored.dropna(subset=["excess_psnr"])),
        "ssim": tried["ssim"].mean(),
        "ssim_variant": _common(tried["ssim_variant"]),
        "lpips": tried["lpips"].mean(),
        "lpips_status": _common(tried["lpips_status"]),
        "label_accuracy": tried["label_correct"].mean(),
        **_share("identified", tried["identified"].dropna()),
        **_share("success", (psnr >= SUCCESS).astype(float)),
        "rate_note": "" if len(tried) >= FEWEST else TOO_FEW,
    }


def _sorted_out(group: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Return the victims that can speak, those of which nothing follows, and those without anything to attack.

    An attack that diverged has failed on a victim that can speak: it counts, as a failure, and is not dropped.
    """
    invalid = group["attack_valid"].eq(False).fillna(False)
    absent = (group["status"] == NOT_APPLICABLE) & ~invalid
    return group[~invalid & ~absent], group[invalid], group[absent]


def _reasons(group: pd.DataFrame) -> str:
    return "; ".join(sorted(set(group["reason"].replace("", "no reason given"))))


def headline_table(runs: Iterable[RunData]) -> pd.DataFrame:
    """Return a row for every run: the victim rebuilt best, over all rounds, victims and attacks on what the wire shows.

    attack ... victim  which attack, with which treatment, and whose batch
    psnr_max           the capped PSNR of that victim; psnr_blind that of the guess made without any message
    psnr_mean ... n    of all victims of the same attack and setting: mean with its 95% interval (clients resampled whole),
                       share at 20 dB or more with its 95% Wilson interval, and how many there are
    not_valid, not_applicable  victims of these attacks that stand in no number
    note               why this is no claim ("n too small", "illustrates only"), or why there is no number
    Restarts are the attacker's choice, by the objective: nothing here is selected by the truth within one victim.
    """
    table = pd.DataFrame([_headline(run) for run in runs], columns=list(HEADLINE))
    return table.astype(dict.fromkeys(("round", "client", "victim", "n", "clients"), "Int64"))


def _headline(run: RunData) -> dict[str, Any]:
    fixed = _named(run)
    groups = [
        (attack, group.dropna(subset=["psnr_capped"]), invalid, absent)
        for attack in run.attacks
        for _, rows in _settled(attack).groupby(list(SETTING), sort=True, dropna=False)
        for group, invalid, absent in [_sorted_out(rows[rows["knowledge"] == "wire"])]
    ]
    lost = {
        "not_valid": sum(len(invalid) for _, _, invalid, _ in groups),
        "not_applicable": sum(len(absent) for _, _, _, absent in groups),
    }
    scored = [(attack, group) for attack, group, _, _ in groups if len(group)]
    if not scored:
        reason = "no attack on what the wire shows gave an image that counts" if run.attacks else "not attacked"
        return fixed | lost | {"n": 0, "note": reason}
    attack, group = max(scored, key=lambda pair: pair[1]["psnr_capped"].max())
    worst = group.iloc[int(group["psnr_capped"].to_numpy(float).argmax())]
    found = summary(group["psnr_capped"].to_numpy(float), group["client"].tolist())
    low, high, why = (None, None, found["ci"]) if isinstance(found["ci"], str) else (*found["ci"], "")
    n = len(group)
    return {
        **(fixed | lost),
        **{name: worst[name] for name in (*SETTING, "round", "client", "victim", "psnr_blind")},
        "attack_id": attack.id,
        "psnr_max": worst["psnr_capped"],
        **{"psnr_mean": found["mean"], "psnr_low": low, "psnr_high": high, "psnr_note": why},
        **_share("success", (group["psnr_capped"] >= SUCCESS).astype(float)),
        "n": n,
        "clients": group["client"].nunique(),
        "controls": controls.state(attack.meta),
        "note": TOO_FEW if n < FEWEST else ILLUSTRATES if n < CLAIM else "",
    }


def _excess(scored: pd.DataFrame) -> dict[str, Any]:
    """Return the mean excess over the blind guess and its interval, or the reason why there is none."""
    found = summary(scored["excess_psnr"].to_numpy(float), scored["client"].tolist())
    interval = found["ci"] if found["n"] else "no reconstruction"
    low, high, note = (None, None, interval) if isinstance(interval, str) else (*interval, "")
    return {"excess_mean": found["mean"], "excess_low": low, "excess_high": high, "excess_note": note}


def _share(name: str, hits: pd.Series) -> dict[str, Any]:
    """Return the mean of hits in [0, 1], and its Wilson interval from 5 victims on."""
    low, high = wilson(float(hits.sum()), len(hits)) if len(hits) >= FEWEST else (None, None)
    return {name: hits.mean(), f"{name}_low": low, f"{name}_high": high}


def _common(texts: pd.Series) -> str:
    """Return what all victims say, or all that they say."""
    return ", ".join(sorted(set(texts) - {""}))


def tokens_table(runs: Iterable[RunData]) -> pd.DataFrame:
    """Return a row for every run and attack on texts: means over texts on which the attack could work.

    recall, precision  words in text and reconstruction (multisets), as shares of the true and of the found ones
    recall_blind       recall of the best guess without any message
    multiset, sequence, identified  shares of texts whose words were all found, found in order, or told from all others
    """
    columns = ["run", "attack", "adversary", "knowledge", "texts", "recall", "recall_blind", "precision", *TEXT_SHARES]
    rows = []
    for run, attack in ((one, attack) for one in runs for attack in one.attacks):
        if (found := attack.tokens.dropna(subset=["token_recall"])).empty:
            continue
        threat = {name: attack.meta["threat_model"][name] for name in ("adversary", "knowledge")}
        means = {name: found[column].mean() for name, column in TEXT_MEASURES.items()}
        rows.append({"run": run.name, "attack": attack.name, **threat, "texts": len(found), **means})
    return pd.DataFrame(rows, columns=columns)


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


def wire_table(run: RunData) -> pd.DataFrame:
    """Return what crosses the wire, down then up, and what stays private, an item or part a row.

    Under differential privacy `guarantee` says of every item of the uplink whether the guarantee covers it.
    """
    columns = ["direction", "item", "kind", "optional", "shape", "tensors", "numbers"]
    table = pd.DataFrame([dict(row) for row in run.manifest["wire"]]).reindex(columns=columns)
    privacy = run.manifest.get("dp") or {}
    if privacy.get("enabled"):
        covered = privacy.get("coverage") or {}
        up = table["direction"] == "up"
        table["guarantee"] = [covered.get(item) if sent else None for item, sent in zip(table["item"], up, strict=True)]
    table.insert(0, "run", run.name)
    return table


def configuration_table(run: RunData) -> pd.DataFrame:
    """Return everything that defines the run: section, name, and value as text."""
    manifest = run.manifest
    data, model = manifest["data"], manifest["model"]
    about = ("state", "reason", "started", "finished", "seed", "device", "threads", "git")
    sections: dict[str, dict[str, Any]] = {
        "run": {name: manifest.get(name) for name in about},
        "options": {k: v for k, v in run.config.items() if k != "settings"},
        "method": manifest["algorithm"]["settings"],
        "data": {
            "name": data["name"],
            "source": data.get("source"),
            **data["input"],
            "partition": data.get("partition"),
        },
        "model": {name: model.get(name) for name in ("name", "split", "parameters")}
        | {"bn_buffers": model.get("bn_buffers", "n/a")},
        "captures": manifest["captures"],
        "privacy": manifest.get("dp") or {},
        "versions": manifest["versions"],
    }
    rows = [
        {"run": run.name, "section": section, "name": name, "value": as_text(value)}
        for section, values in sections.items()
        for name, value in values.items()
    ]
    return pd.DataFrame(rows, columns=["run", "section", "name", "value"])


def as_text(value: Any) -> str:
    """Return a configured value as text: none for None, JSON for lists and tables."""
    if value is None:
        return "none"
    return value if isinstance(value, str) else to_json(value, indent=None)


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Return a table's rows as plain Python values; every missing one is None."""
    columns = [str(name) for name in table.columns]
    rows: Sequence[Sequence[Any]] = table.astype(object).to_numpy().tolist()
    return [{name: None if pd.isna(v) else v for name, v in zip(columns, row, strict=True)} for row in rows]
