"""Planted bugs of FedAvg."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from torch import Tensor

from pflsec.algorithms.traditional.fedavg import FedAvg
from pflsec.core.algorithm import mean_of_uploads
from pflsec.core.items import Items, combine
from pflsec.training.local import LocalWork
from tests.algorithms import test_fedavg as fedavg
from tests.algorithms.mutants.planted import Mutant


class UniformWeights(FedAvg):
    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        return mean_of_uploads(ups, *self.shared, weighting="uniform")


class DividesByAllClients(FedAvg):
    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        share = len(ups) / self.clients
        return combine(lambda v: share * v, super().aggregate(server, ups))


def drop_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """A last short batch, or all rows of a client smaller than a batch, are not trained on."""
    whole = LocalWork._batches

    def batches(self: LocalWork, *args: Any) -> Iterator[tuple[Tensor, Tensor]]:
        return ((x, y) for x, y in whole(self, *args) if len(y) == self.batch_size)

    monkeypatch.setattr(LocalWork, "_batches", batches)


MUTANTS = [
    Mutant(
        "uniform instead of sample weights", FedAvg, fedavg.check_2_the_server_takes_the_mean_by_samples, UniformWeights
    ),
    Mutant("one and three samples weigh the same", FedAvg, fedavg.check_2_one_and_three_samples, UniformWeights),
    Mutant(
        "divided by all clients", FedAvg, fedavg.check_6_weights_sum_to_one_for_every_drop_pattern, DividesByAllClients
    ),
    Mutant("short batches dropped", FedAvg, fedavg.check_3_full_batch_equals_centralised_sgd, patch=drop_last),
]
