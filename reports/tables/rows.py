"""What the tables share: a run's names, which victims can speak, shares with their intervals, rows as plain values."""

import re
from collections.abc import Sequence
from typing import Any

import pandas as pd

from pflsec.core.files import to_json
from pflsec.core.statistics import FEWEST, wilson
from pflsec.reports import controls
from pflsec.reports.load import AttackData, RunData

SUCCESS = 20.0  # dB; from here on a reconstruction counts as a success
CLAIM = 20  # victims; below that a number illustrates, and supports no claim
ILLUSTRATES = "illustrates only"
NOT_APPLICABLE = "not-applicable"
FAILED = ("diverged", "nonfinite")
SETTING = ("attack", "adversary", "knowledge", "hidden", "kind", "summed")
SUM = re.compile(r"the sum over clients? (\d+(?:, \d+)*)")
"""What the reason of a row says where the adversary saw no upload of the victim alone."""


def named(run: RunData) -> dict[str, Any]:
    """Return what tells a run's rows from others'."""
    family = run.manifest["algorithm"]["family"]
    return {"run": run.name, "algo": run.key, "family": family, "defense": run.defense}


def is_naive(attack: AttackData) -> bool:
    """Return whether the attacker ignored a defense that was there, so that its number is no bound for one who does not."""
    said = attack.scores["reason"].astype(str).str.contains("naive: ", regex=False)
    return attack.meta.get("naive") is True or bool(said.any())


ATTACKED = ("run", "algo", "family", "defense", "attack_id", "attack", "adversary", "knowledge")
"""The columns of `attacked`."""
FOUND_BY = (*ATTACKED, "controls", "naive")
"""The columns of `found_by`."""


def attacked(run: RunData, attack: AttackData) -> dict[str, Any]:
    """Return what tells an attack's rows from others': on which run, which one, by whom."""
    threat = {name: attack.meta["threat_model"][name] for name in ("adversary", "knowledge")}
    return {**named(run), "attack_id": attack.id, "attack": attack.name, **threat}


def found_by(run: RunData, attack: AttackData) -> dict[str, Any]:
    """Return the same, and how far what was found can be relied on."""
    return attacked(run, attack) | {"controls": controls.state(attack.meta), "naive": is_naive(attack)}


def speaking(attack: AttackData, found: pd.DataFrame) -> pd.DataFrame:
    """Return those rows of a table beside an attack's scores whose captures can speak."""
    _, invalid, _ = sorted_out(attack.scores)
    return found[~found["capture"].isin(capture_names(invalid))]


def settled(attack: AttackData) -> pd.DataFrame:
    """Return the scores with `summed`, the number of clients in what was attacked: 1 for an upload, more for a sum of them.

    Victims that could not be attacked get the others' commonest `hidden` and `summed`: nothing was treated there, so they would
    else stand apart from the row to which they belong.
    """
    scores = attack.scores.assign(summed=[_summed(str(reason)) for reason in attack.scores["reason"]])
    absent = scores["status"] == NOT_APPLICABLE
    for name, unknown in (("hidden", ""), ("summed", 1)):
        usual = scores.loc[~absent, name].mode()
        scores.loc[absent, name] = unknown if usual.empty else usual.iloc[0]
    return scores


def _summed(reason: str) -> int:
    found = SUM.search(reason)
    return found[1].count(",") + 1 if found else 1


def capture_names(scores: pd.DataFrame) -> pd.Series:
    """Return the capture's id of every row of scores."""
    names = [
        f"r{t:03d}-c{client:02d}-v{victim}-{kind}"
        for t, client, victim, kind in zip(*(scores[c] for c in ("round", "client", "victim", "kind")), strict=True)
    ]
    return pd.Series(names, index=scores.index, dtype=object)


def sorted_out(group: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Return the victims that can speak, those of which nothing follows, and those without anything to attack.

    An attack that diverged has failed on a victim that can speak: it counts, as a failure, and is not dropped.
    """
    invalid = group["attack_valid"].eq(False).fillna(False)
    absent = (group["status"] == NOT_APPLICABLE) & ~invalid
    return group[~invalid & ~absent], group[invalid], group[absent]


def reasons(group: pd.DataFrame) -> str:
    """Return why, each reason once."""
    return "; ".join(sorted(set(group["reason"].replace("", "no reason given"))))


def share(name: str, hits: pd.Series) -> dict[str, Any]:
    """Return the mean of hits in [0, 1], and its Wilson interval from 5 victims on."""
    low, high = wilson(float(hits.sum()), len(hits)) if len(hits) >= FEWEST else (None, None)
    return {name: hits.mean(), f"{name}_low": low, f"{name}_high": high}


def common(texts: pd.Series) -> str:
    """Return what all victims say, or all that they say."""
    return ", ".join(sorted(set(texts) - {""}))


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
