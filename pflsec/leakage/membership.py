"""Membership: which images are put before the attacker, and how well its scores tell those of the batch from others.

Positive is a member; the higher the score, the more a candidate looks like one. All candidates of all victims are pooled.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pflsec.core.statistics import FEWEST, ONE_CLUSTER, TOO_FEW, cluster_bootstrap
from pflsec.leakage.vault import Outsiders, Truth

COLUMNS = ("victim", "client", "candidate", "dataset_index", "label", "member")
"""Of membership.csv, before a column for each statistic."""
RATES = {"tpr_1pct": (0.01, 1), "tpr_01pct": (0.001, 1000)}
"""False positive rates, and from how many non-members on the true positive rate at them is given."""
SAME = 1e-3  # L2 as the network sees it; images this close are one picture stored twice


@dataclass(frozen=True, eq=False)
class Candidates:
    """Images x [n, C, H, W] with labels y [n] for an attacker, and what it is not told: member bool [n], dataset_index [n]."""

    x: Tensor
    y: Tensor
    member: Tensor
    dataset_index: Tensor


def candidates(truth: Truth, outsiders: Outsiders, client: int, rng: torch.Generator) -> Candidates | None:
    """Return a batch and all outsiders of its classes, shuffled: the client's own, or other clients' where it has none.

    An outsider that is a picture of the batch once more is left out. None where there is no outsider of these classes.
    """
    batch = truth.x.flatten(1).double()
    gaps = (
        torch.cdist(outsiders.x.flatten(1).double(), batch, compute_mode="donot_use_mm_for_euclid_dist").min(1).values
    )
    fit = torch.isin(outsiders.y, truth.y) & ~torch.isin(outsiders.dataset_index, truth.dataset_index) & (gaps > SAME)
    own = fit & (outsiders.client == client)
    chosen = own if own.any() else fit
    if not chosen.any():
        return None
    member = torch.cat([torch.ones_like(truth.y), torch.zeros_like(outsiders.y[chosen])]).bool()
    order = torch.randperm(len(member), generator=rng)
    x, y, index = (
        torch.cat([mine, theirs[chosen]])[order]
        for mine, theirs in (
            (truth.x, outsiders.x),
            (truth.y, outsiders.y),
            (truth.dataset_index, outsiders.dataset_index),
        )
    )
    return Candidates(x, y, member[order], index)


def rows(victim: str, client: int, drawn: Candidates, scores: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Return a row of membership.csv for each candidate of a victim. Scores are text that gives back every bit."""
    facts = zip(drawn.dataset_index.tolist(), drawn.y.tolist(), drawn.member.tolist(), strict=True)
    columns = {name: [repr(v) for v in values.double().tolist()] for name, values in scores.items()}
    return [
        {"victim": victim, "client": client, "candidate": i, "dataset_index": index, "label": label, "member": member}
        | {name: values[i] for name, values in columns.items()}
        for i, (index, label, member) in enumerate(facts)
    ]


def statistics(found: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the statistics that some row has, in the order of their first appearance."""
    return list(dict.fromkeys(name for row in found for name in row if name not in COLUMNS))


def roc(member: np.ndarray, score: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return false and true positive rates, ascending from (0, 0) to (1, 1), one point for each distinct score.

    member bool [n], score float [n]. Raises ValueError unless there are both members and others, and no score is NaN.
    """
    alarms, hits = _accused(member, score)
    return alarms / alarms[-1], hits / hits[-1]


def _accused(member: np.ndarray, score: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return how many others and how many members lie above a threshold, from none to all, in whole numbers."""
    if member.all() or not member.any() or np.isnan(score).any():
        raise ValueError("a ROC curve needs members and others, each with a score")
    distinct, place = np.unique(-score, return_inverse=True)
    hits, alarms = (np.bincount(place[who], minlength=len(distinct)).cumsum() for who in (member, ~member))
    return np.append(0, alarms), np.append(0, hits)


def auc(member: np.ndarray, score: np.ndarray) -> float:
    """Return the area under the ROC curve: the chance that a member's score is above another's, ties counting half."""
    alarms, hits = _accused(member, score)
    return float(np.sum(np.diff(alarms) * (hits[1:] + hits[:-1])) / (2 * alarms[-1] * hits[-1]))


def tpr_at(member: np.ndarray, score: np.ndarray, fpr: float) -> float:
    """Return the largest share of members found by a threshold that accuses at most this share of the others."""
    false, true = roc(member, score)
    return float(true[false <= fpr + 1e-12].max())


def summary(found: Sequence[Mapping[str, Any]], seed: int = 0) -> dict[str, dict[str, Any]]:
    """Return for each statistic what its scores are worth, over all rows of membership.csv that have it.

    auc and the rates of RATES, each with its 95 % bootstrap interval *_low, *_high, clients being resampled whole; note: why
    there is none; n_victims, n_clients, n_members, n_others; verdict. tpr_01pct is None below 1000 non-members.
    """
    return {name: _summary([row for row in found if row.get(name)], name, seed) for name in statistics(found)}


def _summary(found: Sequence[Mapping[str, Any]], name: str, seed: int) -> dict[str, Any]:
    member = np.array([bool(row["member"]) for row in found])
    score = np.array([float(row[name]) for row in found])
    clients, victims = [row["client"] for row in found], {row["victim"] for row in found}
    others = int((~member).sum())
    note = TOO_FEW if len(victims) < FEWEST else ONE_CLUSTER if len(set(clients)) < 2 else ""
    measures: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {"auc": auc}
    for rate, (level, fewest) in RATES.items():
        if others >= fewest:
            measures[rate] = partial(tpr_at, fpr=level)
    result: dict[str, Any] = {"n_victims": len(victims), "n_clients": len(set(clients))}
    result |= {"n_members": int(member.sum()), "n_others": others, "note": note}
    for measure in ("auc", *RATES):
        of = measures.get(measure)
        low, high = (None, None) if of is None or note else _interval(of, member, score, clients, seed)
        result |= {measure: None if of is None else of(member, score), f"{measure}_low": low, f"{measure}_high": high}
    return result | {"verdict": verdict(result["auc_low"], result["auc_high"], note)}


def _interval(
    of: Callable[[np.ndarray, np.ndarray], float], member: np.ndarray, score: np.ndarray, clients: list[int], seed: int
) -> tuple[float, float]:
    """Return a measure's interval. Rows are drawn by number, so that a member flag and its score stay together."""

    def measured(numbers: np.ndarray) -> float:
        drawn = numbers.astype(int)
        return of(member[drawn], score[drawn])

    return cluster_bootstrap(list(range(len(score))), clients, measured, seed=seed)


def verdict(low: float | None, high: float | None, note: str) -> str:
    """Return what an AUC's interval allows to say, or why there is no interval."""
    if low is None or high is None:
        return note
    return "above chance" if low > 0.5 else "below chance" if high < 0.5 else "not distinguishable from chance"
