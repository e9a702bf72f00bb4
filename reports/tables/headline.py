"""The worst case of every method."""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import pandas as pd

from pflsec.core.statistics import FEWEST, TOO_FEW, summary
from pflsec.reports import controls
from pflsec.reports.groups import Group
from pflsec.reports.load import AttackData, RunData
from pflsec.reports.tables.rows import (
    CLAIM,
    ILLUSTRATES,
    SETTING,
    SUCCESS,
    capture_names,
    is_naive,
    settled,
    share,
    sorted_out,
)

HEADLINE = (
    "name",
    "runs",
    "seeds",
    "algo",
    "defense",
    "measure",
    "run",
    *SETTING,
    "attack_id",
    "naive",
    "round",
    "client",
    "victim",
    "worst",
    "blind",
    "mean",
    "low",
    "high",
    "interval_note",
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
WHOLE = {"psnr": SUCCESS, "recall": 1.0}
"""From where on a victim counts as rebuilt: 20 dB; all words of a text."""
VOID = "no attack passed the negative control, so no number is evidence of a leak"


def headline_table(groups: Iterable[Group]) -> pd.DataFrame:
    """Return a row for every method: the victim rebuilt best, over all seeds, rounds, victims and attacks on what the wire shows.

    measure           psnr: capped PSNR in dB; recall: share of the words of a victim's texts
    run ... victim    which attack, with which treatment, and whose batch in which run
    worst, blind      the measure of that victim, and that of the guess made without any message
    mean ... n        of all victims of the same attack and setting in all seeds: mean with its 95% interval (seeds, then
                      clients resampled whole), share rebuilt (20 dB; all words) with its 95% Wilson interval, and how many
    not_valid, not_applicable  victims of these attacks that stand in no number
    note              why this is no claim ("n too small", "illustrates only"), or why there is no number
    Restarts are the attacker's choice, by the objective: nothing here is selected by the truth within one victim.
    """
    table = pd.DataFrame([_headline(group) for group in groups], columns=list(HEADLINE))
    return table.astype(dict.fromkeys(("summed", "round", "client", "victim", "n", "clients"), "Int64"))


def _headline(group: Group) -> dict[str, Any]:
    measure = "recall" if group.runs[0].holds_texts else "psnr"
    settings = _settings(group)
    fixed = {
        "name": group.name,
        "runs": group.run_names,
        "seeds": len(group.runs),
        "algo": group.algo,
        "defense": group.defense,
        "measure": measure,
        "not_valid": sum(len(invalid) for _, _, invalid, _ in settings),
        "not_applicable": sum(len(absent) for _, _, _, absent in settings),
    }
    some = [(attacks, victims) for attacks, victims, _, _ in settings if len(victims)]
    scored = [(attacks, victims) for attacks, victims in some if not controls.void(_control_states(attacks))]
    if not scored:
        what = "a text" if measure == "recall" else "an image"
        without = VOID if some else f"no attack on what the wire shows gave {what} that counts"
        attacked = any(run.attacks for run in group.runs)
        return fixed | {"n": 0, "note": without if attacked else unseen(group.runs[0]) or "not attacked"}
    attacks, victims = max(scored, key=lambda pair: pair[1]["value"].max())
    return fixed | _worst_case(attacks, victims, WHOLE[measure])


def _worst_case(attacks: Sequence[AttackData], victims: pd.DataFrame, whole: float) -> dict[str, Any]:
    """Return what a headline says of the victims of one attack and setting: the best rebuilt one, and all of them."""
    values, n = victims["value"], len(victims)
    worst = victims.iloc[int(values.to_numpy(float).argmax())]
    clusters: list[Hashable] = list(zip(victims["run"], victims["client"], strict=True))
    single = victims["run"].nunique() == 1
    found = summary(values.to_numpy(float), victims["client"].tolist() if single else clusters)
    low, high, why = (None, None, found["ci"]) if isinstance(found["ci"], str) else (*found["ci"], "")
    return {
        **{name: worst[name] for name in ("run", *SETTING, "round", "client", "victim", "blind")},
        "attack_id": attacks[0].id,
        "naive": any(map(is_naive, attacks)),
        "worst": worst["value"],
        **{"mean": found["mean"], "low": low, "high": high, "interval_note": why},
        **share("success", (values >= whole).astype(float)),
        "n": n,
        "clients": victims[["run", "client"]].drop_duplicates().shape[0],
        "controls": _control_states(attacks),
        "note": TOO_FEW if n < FEWEST else ILLUSTRATES if n < CLAIM else "",
    }


def _control_states(attacks: Sequence[AttackData]) -> str:
    return "; ".join(dict.fromkeys(controls.state(attack.meta) for attack in attacks))


def _settings(group: Group) -> list[tuple[list[AttackData], pd.DataFrame, pd.DataFrame, pd.DataFrame]]:
    """Return for each attack and setting, over all runs: the scored victims, the not valid, and those with nothing to attack.

    The same attack on several runs has the same id.
    """
    attacks: dict[str, list[AttackData]] = {}
    for attack in (attack for run in group.runs for attack in run.attacks):
        attacks.setdefault(attack.id, []).append(attack)
    tables = [_valued(run, attack) for run in group.runs for attack in run.attacks if not attack.scores.empty]
    if not tables:
        return []
    rows = pd.concat(tables, ignore_index=True)
    rows = rows[rows["knowledge"] == "wire"]
    found = []
    for key, part in rows.groupby(["attack_id", *SETTING], sort=True, dropna=False):
        assert isinstance(key, tuple)
        tried, invalid, absent = sorted_out(part)
        found.append((attacks[str(key[0])], tried.dropna(subset=["value"]), invalid, absent))
    return found


def _valued(run: RunData, attack: AttackData) -> pd.DataFrame:
    """Return the attack's scores with the run's name, and with the `value` that counts and its `blind` counterpart."""
    scores = settled(attack).assign(run=run.name, attack_id=attack.id)
    if not run.holds_texts:
        return scores.assign(value=scores["psnr_capped"], blind=scores["psnr_blind"])
    columns = ["token_recall", "recall_blind"]
    means = attack.tokens.set_index("capture")[columns].astype(float).groupby(level=0).mean()
    names = capture_names(scores)
    return scores.assign(value=names.map(means["token_recall"]), blind=names.map(means["recall_blind"]))


def unseen(run: RunData) -> str:
    """Return why no single upload of this run could be seen, or "" where captures were possible."""
    if not any(str(name).partition(":")[0] == "secagg" for name in run.config.get("defense") or []):
        return ""
    why = run.manifest["captures"].get("reason") or "secure aggregation shows the server the sum over the cohort alone"
    return f"no single upload is seen: {why}"
