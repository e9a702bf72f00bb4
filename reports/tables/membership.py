"""Who was in a victim batch: what membership attacks found."""

from collections.abc import Iterable
from typing import Any

import pandas as pd

from pflsec.core.errors import RunError
from pflsec.reports.load import AttackData, RunData
from pflsec.reports.tables.rows import ATTACKED, attacked

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


def membership_table(runs: Iterable[RunData]) -> pd.DataFrame:
    """Return a row for every run, membership attack and statistic: AUC and true positive rates with 95% intervals.

    n_victims, n_clients, n_members, n_others: what was pooled; note: why there is no interval. Raises RunError when the numbers
    of an attack are damaged.
    """
    rows = [row for run in runs for attack in run.attacks for row in _memberships(run, attack)]
    return pd.DataFrame(rows, columns=[*ATTACKED, "kind", "statistic", *MEMBERSHIP])


def _memberships(run: RunData, attack: AttackData) -> list[dict[str, Any]]:
    found = attack.meta.get("membership") or {}
    for name, numbers in found.items() if isinstance(found, dict) else [("membership", None)]:
        fits = isinstance(numbers, dict) and all(isinstance(numbers.get(k), kind) for k, kind in MEMBERSHIP.items())
        if not fits:
            raise RunError(f"{attack.folder / 'attack.json'} is damaged: '{name}' lacks or garbles a number.")
    fixed = attacked(run, attack) | {"kind": ", ".join(sorted({capture.kind for capture in attack.captures}))}
    return [fixed | {"statistic": name} | {k: numbers[k] for k in MEMBERSHIP} for name, numbers in found.items()]
