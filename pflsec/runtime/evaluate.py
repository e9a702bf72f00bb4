"""Accuracy: every client is tested, whether or not it took part."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pflsec.core.algorithm import Algorithm
from pflsec.core.items import Items
from pflsec.runtime.executor import context
from pflsec.runtime.setup import Setup

BATCH = 100  # larger batches leave the CPU's cache and are slower


@torch.inference_mode()
def correct(algorithm: Algorithm[Any], items: Items, x: Tensor, y: Tensor) -> int:
    """Return how many of the rows the deployed model gets right."""
    pairs = zip(x.split(BATCH), y.split(BATCH), strict=True)
    return sum(int((algorithm.scores(items, a).argmax(1) == b).sum()) for a, b in pairs)


def accuracy(setup: Setup, items: Items, client: int) -> float:
    """Return a deployed model's accuracy on one client's test data, in [0, 1]."""
    x, y = setup.federation.test(client)
    return correct(setup.algorithm, items, x, y) / len(y)


def ready(setup: Setup, items: Items, client: int, t: int) -> Items:
    """Return a deployed model as its client uses it before round t: fitted to its own rows where the method does so."""
    if type(setup.algorithm).personalise is Algorithm.personalise:
        return items
    return setup.algorithm.personalise(context(setup, t, client), items)


def everybody(setup: Setup, server: Items, states: Mapping[int, Items], t: int) -> tuple[list[float], float | None]:
    """Return each client's accuracy with the model it would use before round t, and the global model's or None."""
    algorithm, federation = setup.algorithm, setup.federation
    common = algorithm.global_model(server)
    personal, all_common = [], common is not None
    for client in range(federation.clients):
        items = ready(setup, algorithm.deploy(states[client], algorithm.downlink(server, client)), client, t)
        all_common = all_common and common is not None and _same_tensors(items, common)
        personal.append(accuracy(setup, items, client))
    if common is None:
        return personal, None
    if all_common and setup.config.test == "split":  # the same model on the same rows: nothing to compute twice
        return personal, float(np.average(personal, weights=test_sizes(setup)))
    x, y = federation.global_test_set()
    return personal, correct(algorithm, common, x, y) / len(y)


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
