"""What attacks on texts recovered."""

from collections.abc import Iterable
from typing import Any

import pandas as pd

from pflsec.reports import controls
from pflsec.reports.load import AttackData, RunData
from pflsec.reports.tables.rows import capture_names, is_naive, named, sorted_out

TEXT_SHARES = {"multiset": "multiset_exact", "sequence": "sequence_exact", "identified": "identified"}
TEXT_MEASURES = {
    "recall": "token_recall",
    "recall_blind": "recall_blind",
    "precision": "token_precision",
    "rouge_l": "rouge_l",
    "in_place": "in_place",
    **TEXT_SHARES,
}
TOKENS = [
    *("run", "algo", "family", "defense", "attack_id", "attack", "adversary", "knowledge", "controls", "naive"),
    *("texts", "recall", "recall_blind", "precision", "rouge_l", "in_place", *TEXT_SHARES),
]


def tokens_table(runs: Iterable[RunData]) -> pd.DataFrame:
    """Return a row for every run and attack on texts: means over texts on which the attack could work.

    recall, precision  words in text and reconstruction (multisets), as shares of the true and of the found ones
    recall_blind       recall of the best guess without any message
    rouge_l, in_place  words in the right order, with gaps (F1); words at their own place, as a share of the true ones
    multiset, sequence, identified  shares of texts whose words were all found, found in order, or told from all others
    Texts of captures that are not valid stand in no number; the leakage table counts them.
    """
    return pd.DataFrame([row for run in runs for attack in run.attacks for row in _tokens(run, attack)], columns=TOKENS)


def _tokens(run: RunData, attack: AttackData) -> list[dict[str, Any]]:
    found = attack.tokens.dropna(subset=["token_recall"])
    _, invalid, _ = sorted_out(attack.scores)
    found = found[~found["capture"].isin(capture_names(invalid))]
    if found.empty:
        return []
    threat = {name: attack.meta["threat_model"][name] for name in ("adversary", "knowledge")}
    about = {"attack_id": attack.id, "attack": attack.name, **threat, "controls": controls.state(attack.meta)}
    means = {name: found[column].mean() for name, column in TEXT_MEASURES.items()}
    return [{**named(run), **about, "naive": is_naive(attack), "texts": len(found), **means}]
