"""Planted bugs of FedKD."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from pflsec.algorithms.knowledge_distillation import fedkd as module
from pflsec.algorithms.knowledge_distillation.fedkd import FedKD
from pflsec.algorithms.knowledge_distillation.fml import divergence
from pflsec.core.algorithm import Done
from pflsec.core.items import Items, combine, prefixed, select, subtract, weighted_mean
from pflsec.core.local import Local
from pflsec.training import lowrank
from pflsec.training.local import LocalWork
from tests.algorithms import test_fedkd as fedkd
from tests.algorithms.mutants.planted import Mutant


def _nothing_is_constant(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LocalWork, "constant", lambda self, value: value)


def _mean_over_classes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "divergence", lambda t, s: divergence(t, s) / t.shape[1])


def _full_rank_is_never_tried(patch: pytest.MonkeyPatch) -> None:
    """The search ends before the last singular value, and starts from 0: no prefix passes, zeros are sent."""

    def rank(values: Tensor, energy: float) -> int:
        power = values.square().cumsum(0) / values.square().sum()
        return next((k for k in range(1, len(values)) if power[k - 1] >= energy), 0)

    patch.setattr(lowrank, "rank", rank)


def _energy_of_values(patch: pytest.MonkeyPatch) -> None:
    """The share is taken of the values, not of their squares, and rounded down."""
    patch.setattr(lowrank, "rank", lambda s, t: max(1, int((s.cumsum(0) < t * s.sum()).sum() // 2)))


def _all_of_them(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lowrank, "rank", lambda s, t: len(s))


class CompressesTheParameters(FedKD):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        exact = FedKD(self.cfg.model_copy(update={"start_energy": 1.0}), self.net, self.clients)
        done = exact.local(ctx, state, down | {"energy": torch.tensor(1.0)})
        start = self.start(state, down)
        trained = combine(torch.add, start, lowrank.unpack(done.up, self.net.shapes))
        near = lowrank.unpack(lowrank.pack(trained, float(down["energy"])), self.net.shapes)
        return Done(done.state, lowrank.pack(subtract(near, start), 1.0))


class AppliesTheWholeMean(FedKD):
    """The server keeps for itself what it cut off for the others."""

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        mean = weighted_mean([lowrank.unpack(up, self.net.shapes) for up in ups.values()], [1.0] * len(ups))
        return super().aggregate(server, ups) | combine(torch.add, select(server, *self.shared), mean)


class SendsTheLastUpdateToAll(FedKD):
    """Also to those who missed others."""

    def downlink(self, server: Items, client: int) -> Items:
        return super().downlink(server | {"current": torch.ones_like(server["current"])}, client)


class SendsTheMentor(FedKD):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        done = super().local(ctx, state, down)
        moved = subtract(select(done.state, *self.private), select(state, *self.private))
        return Done(done.state, lowrank.pack(moved, float(down["energy"])))


class KeepsTheTrainedMentee(FedKD):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        done = super().local(ctx, state, down)
        trained = combine(torch.add, self.start(state, down), lowrank.unpack(done.up, self.net.shapes))
        return Done(done.state | prefixed("mentee", trained), done.up)


class WeighsClients(FedKD):
    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        counts = {c: up | {"num_samples": torch.tensor(1 + c)} for c, up in ups.items()}
        return FedKD(self.cfg.model_copy(update={"weighting": "samples"}), self.net, self.clients).aggregate(
            server, counts
        )


LEFT_OUT = fedkd.check_1_what_is_left_out_is_at_most_what_the_energy_allows
MUTANTS = [
    Mutant("nothing is constant", FedKD, fedkd.check_0_one_step_follows_both_objectives, patch=_nothing_is_constant),
    Mutant("KL over classes too", FedKD, fedkd.check_0_the_heads_gradient, patch=_mean_over_classes),
    Mutant("full rank is never tried", FedKD, LEFT_OUT, patch=_full_rank_is_never_tried),
    Mutant("too few singular values", FedKD, LEFT_OUT, patch=_energy_of_values),
    Mutant("compresses the parameters", FedKD, LEFT_OUT, CompressesTheParameters),
    Mutant(
        "all singular values are sent",
        FedKD,
        fedkd.check_4_one_sample_loses_nothing_in_a_fully_connected_layer,
        patch=_all_of_them,
    ),
    Mutant(
        "server applies the whole mean",
        FedKD,
        fedkd.check_3_the_server_compresses_the_mean_for_itself_too,
        AppliesTheWholeMean,
    ),
    Mutant(
        "the others follow another mean",
        FedKD,
        fedkd.check_3_who_takes_part_has_the_servers_mentee,
        AppliesTheWholeMean,
    ),
    Mutant(
        "missed updates stay missed",
        FedKD,
        fedkd.check_3_who_takes_part_has_the_servers_mentee,
        SendsTheLastUpdateToAll,
    ),
    Mutant(
        "update of the trained mentee",
        FedKD,
        fedkd.check_3_who_takes_part_has_the_servers_mentee,
        KeepsTheTrainedMentee,
    ),
    Mutant("mentor is sent", FedKD, fedkd.check_5_nothing_of_the_mentor_is_sent, SendsTheMentor),
    Mutant("clients are weighted", FedKD, fedkd.check_2_lossless_and_without_distillation_it_is_fedavg, WeighsClients),
]
