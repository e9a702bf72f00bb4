"""What attacks on texts recovered."""

from collections.abc import Iterable
from typing import Any

import pandas as pd

from pflsec.reports.load import AttackData, RunData
from pflsec.reports.tables.rows import FOUND_BY, found_by, speaking

TEXT_SHARES = {"multiset": "multiset_exact", "sequence": "sequence_exact", "identified": "identified"}
TEXT_MEASURES = {
    "recall": "token_recall",
    "recall_blind": "recall_blind",
    "precision": "token_precision",
    "rouge_l": "rouge_l",
    "in_place": "in_place",
    **TEXT_SHARES,
}
TOKENS = [*FOUND_BY, "texts", *TEXT_MEASURES]


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
    found = speaking(attack, attack.tokens.dropna(subset=["token_recall"]))
    if found.empty:
        return []
    means = {name: found[column].mean() for name, column in TEXT_MEASURES.items()}
    return [found_by(run, attack) | {"texts": len(found), **means}]
