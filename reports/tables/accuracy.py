"""How accurate runs are, what they send, and what privacy they have spent."""

from collections.abc import Iterable, Iterator
from typing import Any

import pandas as pd

from pflsec.reports.load import RunData
from pflsec.reports.tables.rows import named

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

NAMES = ("run", "algo", "family", "defense")
TRAFFIC = (*NAMES, "rounds", "mb_up", "mb_down", "mb_total", "mb_up_round", "mb_down_round")
PRIVACY = (*NAMES, "unit", "epsilon", "delta", "guarantee", "adversary", "note")


def accuracy_table(runs: Iterable[RunData]) -> pd.DataFrame:
    """Return two rows a run, `at` = final and best (by mean personal accuracy); an untested run has one.

    mean, std and worst10 are over clients, weighted is over test rows; global is the word none where the
    method has no global model; mb_up and mb_down are totals of all rounds.
    """
    return pd.DataFrame([row for run in runs for row in _accuracies(run)], columns=list(ACCURACY))


def _accuracies(run: RunData) -> list[dict[str, Any]]:
    metrics, manifest = run.metrics, run.manifest
    common = {
        **named(run),
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


def accuracies_about(run: RunData, t: int) -> dict[str, float]:
    """Return the mean personal accuracy before and after round t, where it was measured."""
    measured = run.metrics.dropna(subset=[MEASURES["mean"]])
    by_round = dict(zip(measured["round"], measured[MEASURES["mean"]], strict=True))
    places = {"accuracy_before": t - 1, "accuracy_after": t}
    return {name: float(by_round[place]) for name, place in places.items() if place in by_round}


def norms_table(runs: Iterable[RunData]) -> pd.DataFrame:
    """Return the Euclidean norms of what the server holds and of what clients keep, by run, round, holder and part.

    holder  server, or clients: the mean over those that took part in the round; part: body, head, control ...
    """
    rows = [
        {"run": run.name, "round": t, "holder": holder, "part": part, "norm": norm}
        for run in runs
        for t, norms in zip(run.metrics["round"], run.metrics["norms"], strict=True)
        if isinstance(norms, dict)
        for holder, parts in norms.items()
        for part, norm in parts.items()
    ]
    return pd.DataFrame(rows, columns=["run", "round", "holder", "part", "norm"]).astype({"norm": "float64"})


def norm_lines(table: pd.DataFrame) -> Iterator[tuple[str, str, str, list[int], list[float | None]]]:
    """Return the norms table line by line: run, holder, part, rounds, and norms, None where one was not finite."""
    for (run, holder, part), rows in table.groupby(["run", "holder", "part"], sort=False):  # type: ignore[misc]
        values = [None if pd.isna(value) else float(value) for value in rows["norm"]]
        yield str(run), str(holder), str(part), [int(t) for t in rows["round"]], values


def traffic_table(runs: Iterable[RunData]) -> pd.DataFrame:
    """Return a row for every run: MB over all clients, in total and as a mean over the rounds played."""
    return pd.DataFrame([_traffic(run) for run in runs], columns=list(TRAFFIC))


def _traffic(run: RunData) -> dict[str, Any]:
    up, down = run.metrics["bytes_up"] / 1e6, run.metrics["bytes_down"] / 1e6
    return {
        **named(run),
        "rounds": len(run.metrics),
        "mb_up": up.sum(),
        "mb_down": down.sum(),
        "mb_total": up.sum() + down.sum(),
        "mb_up_round": up.mean(),
        "mb_down_round": down.mean(),
    }


def privacy_table(runs: Iterable[RunData]) -> pd.DataFrame:
    """Return a row for every run under differential privacy: epsilon, for whom (unit), at which delta, and what voids it (note).

    epsilon is missing where it is infinite.
    """
    private = [
        run for run in runs if (run.manifest.get("dp") or {}).get("enabled") or run.metrics["epsilon"].notna().any()
    ]
    return pd.DataFrame([_privacy(run) for run in private], columns=list(PRIVACY))


def _privacy(run: RunData) -> dict[str, Any]:
    dp = run.manifest.get("dp") or {}
    deltas = dp.get("delta")
    return {
        **named(run),
        "unit": epsilon_unit(run),
        "epsilon": run.metrics["epsilon"].max(),
        "delta": deltas.get("most") if isinstance(deltas, dict) else deltas,
        "guarantee": str(dp.get("guarantee") or "not recorded"),
        "adversary": str(dp.get("adversary") or "not recorded"),
        "note": no_guarantee(run),
    }


def epsilon_unit(run: RunData) -> str:
    """Return whom a run's epsilon protects: record, user, or not recorded."""
    return str((run.manifest.get("dp") or {}).get("unit") or "not recorded")


def no_guarantee(run: RunData) -> str:
    """Return why a run's epsilon guarantees nothing, or "" where it does: noise that was fixed, or none at all."""
    dp = run.manifest.get("dp") or {}
    if dp.get("test_seed"):
        return "the noise was fixed for a test: no guarantee"
    claim = str(dp.get("guarantee") or "")
    return f"no guarantee ({claim})" if claim.startswith("none") else ""


def epsilon_label(run: RunData) -> str:
    """Return the run's name with whom its epsilon protects, or that it protects nobody."""
    return f"{run.name} ({'no guarantee' if no_guarantee(run) else f'per {epsilon_unit(run)}'})"
