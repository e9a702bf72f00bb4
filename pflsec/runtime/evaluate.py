"""Accuracy: every client is tested, whether or not it took part."""

from collections.abc import Mapping, Sequence

import numpy as np

from pflsec.core.items import Items
from pflsec.runtime.executor import Executor, Score, Trial
from pflsec.runtime.setup import Setup


def everybody(
    setup: Setup, executor: Executor, server: Items, states: Mapping[int, Items], trained: Mapping[int, Items], t: int
) -> tuple[list[float], dict[int, float], float | None]:
    """Return accuracies before round t: every client's with the model that it would use now, those of the clients in
    `trained` with the models given there, and the global model's on the global test rows, or None."""
    algorithm, count = setup.algorithm, setup.federation.clients
    deployed = [algorithm.deploy(states[c], algorithm.serve(server, c)) for c in range(count)]
    trials = [Trial(t, c, items) for c, items in [*enumerate(deployed), *trained.items()]]
    common = algorithm.global_model(server)
    alone = [] if common is None or _tested_already(setup, deployed, common) else [Trial(t, None, common)]
    scores = executor.test(trials + alone)
    personal, own = scores[:count], scores[count : len(trials)]
    overall = None if common is None else (scores[-1] if alone else _together(personal)).accuracy
    return [s.accuracy for s in personal], {c: s.accuracy for c, s in zip(trained, own, strict=True)}, overall


def _tested_already(setup: Setup, deployed: Sequence[Items], common: Items) -> bool:
    """Return whether the clients together test the global model on its rows: nothing is computed twice."""
    if setup.algorithm.personalises or not setup.federation.clients_share_global_test:
        return False
    return all(_same_tensors(model, common) for model in deployed)


def _together(scores: Sequence[Score]) -> Score:
    return Score(sum(s.correct for s in scores), sum(s.rows for s in scores))


def _same_tensors(a: Items, b: Items) -> bool:
    return a.keys() == b.keys() and all(a[k] is v for k, v in b.items())


def test_sizes(setup: Setup) -> list[int]:
    """Return the number of test rows of each client."""
    return [len(shard.test) for shard in setup.federation.shards]


def summary(accuracies: Sequence[float], sizes: Sequence[int]) -> dict[str, float]:
    """Return mean over clients, mean over test rows (weighted), standard deviation over clients (population), and the mean
    of the worst tenth of the clients (at least one)."""
    values = np.asarray(accuracies, float)
    worst = np.sort(values)[: max(1, round(0.1 * len(values)))]
    return {
        "personal_accuracy_mean": float(values.mean()),
        "personal_accuracy_weighted": float(np.average(values, weights=sizes)),
        "personal_accuracy_std": float(values.std()),
        "personal_accuracy_worst10": float(worst.mean()),
    }
