"""Planted bugs of FedBN."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from pflsec.algorithms.other.fedbn import FedBN, FedBNConfig
from pflsec.core.algorithm import Done, mean_of_uploads, sample_count
from pflsec.core.items import Items
from pflsec.core.local import Local
from pflsec.core.network import Net
from tests.algorithms import test_fedbn as fedbn
from tests.algorithms.mutants.planted import Mutant


class ByName(FedBN):
    def kept(self) -> frozenset[str]:
        return frozenset(name for name in self.net.shapes if "bn" in name)


class KeepsStatisticsAlone(FedBN):
    def kept(self) -> frozenset[str]:
        return self.net.buffers


class KeepsWeightsAlone(FedBN):
    def kept(self) -> frozenset[str]:
        return self.net.norms - self.net.buffers


class KeepsNothing(FedBN):
    def kept(self) -> frozenset[str]:
        return frozenset()


class SendsWholeModels(FedBN):
    """The server averages norms like the rest; they are only not loaded back."""

    def __init__(self, cfg: FedBNConfig, net: Net, clients: int):
        super().__init__(cfg, net, clients)
        self.contract = replace(self.contract, omit=frozenset())

    def init_server(self, fresh: Items) -> Items:
        return fresh

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        done = super().local(ctx, state, self.sent(down))
        return Done(done.state, done.up | self.norms(done.state))


class BySamples(FedBN):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        done = super().local(ctx, state, down)
        return Done(done.state, done.up | sample_count(ctx))

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        return mean_of_uploads(ups, *self.shared, weighting="samples")


class StartsAtNewNorms(FedBN):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        new = {k: torch.full_like(v, k.endswith(("weight", "var"))) for k, v in self.norms(state).items()}
        return super().local(ctx, state | new, down)


class ForgetsStatistics(FedBN):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        done = super().local(ctx, state, down)
        return Done(done.state | {k: state[k] for k in self.net.buffers}, done.up)


class FreezesWeights(FedBN):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        done = super().local(ctx, state, down)
        return Done(done.state | {k: state[k] for k in self.net.norms - self.net.buffers}, done.up)


WIRE, DOWN = fedbn.check_1_no_item_of_a_batchnorm_layer_is_on_the_wire, fedbn.check_2_the_downlink_changes_no_norm
SHIFT = fedbn.check_4_clients_with_shifted_inputs_have_other_statistics
STEP = fedbn.check_6_one_step_gives_the_gradient_at_the_clients_own_norms
MUTANTS = [
    Mutant("layers known by their names", FedBN, WIRE, ByName),
    Mutant("layers known by their names are not kept", FedBN, DOWN, ByName),
    Mutant("weight and bias are shared", FedBN, WIRE, KeepsStatisticsAlone),
    Mutant("statistics are shared", FedBN, WIRE, KeepsWeightsAlone),
    Mutant("norms are averaged and overwritten", FedBN, DOWN, KeepsNothing),
    Mutant("whole models are sent", FedBN, WIRE, SendsWholeModels),
    Mutant("weights by samples", FedBN, fedbn.check_4_shared_items_are_the_mean_of_the_uploads, BySamples),
    Mutant("training starts at new norms", FedBN, DOWN, StartsAtNewNorms),
    Mutant(
        "gradient at new norms",
        FedBN,
        STEP,
        StartsAtNewNorms,
    ),
    Mutant("statistics never move", FedBN, SHIFT, ForgetsStatistics),
    Mutant(
        "weight and bias never move",
        FedBN,
        STEP,
        FreezesWeights,
    ),
]
