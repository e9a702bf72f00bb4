"""Planted bugs of FedALA."""

from typing import Any

import torch
from torch import Tensor

from pflsec.algorithms.personalized_aggregation.fedala import FedALA
from pflsec.algorithms.traditional.fedavg import FedAvg
from pflsec.core.algorithm import Done
from pflsec.core.items import Items, prefixed, select, without_prefix
from pflsec.core.local import Local
from tests.algorithms import test_fedala as fedala
from tests.algorithms.mutants.planted import Mutant


class MixesBySumAndDifference(FedALA):
    """old + (new - old) W is not new where W is 1."""

    def start(self, state: Items, down: Items) -> Items:
        return fedala.hand_start(state, select(down, *self.shared)) if state["trained"] else super().start(state, down)


class NewcomersMix(FedALA):
    """A client that joins late mixes with the random model it was born with."""

    def init_client(self, fresh: Items, server: Items) -> Items:
        return super().init_client(fresh, server) | {"trained": torch.tensor(True)}


class ForgetsItsWeights(FedALA):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        done = super().local(ctx, state, down)
        return Done(done.state | select(state, "mix"), done.up)


class CountsTensors(FedALA):
    """The last tensor is a bias: the layer is split."""

    def top(self) -> list[str]:
        return list(self.net.shapes)[-self.cfg.layers :]


class NeverStops(FedALA):
    def settled(self, losses: Any) -> bool:
        return super().settled(losses) and len(losses) > 30


class LosesTheClip(FedALA):
    """W leaves [0, 1], so that the start leaves the segment between the two models."""

    def mix(self, ctx: Local, state: Items, down: Items) -> Items:
        if not self.mixes(state, down):
            return state

        def loss(w: Items, x: Tensor, y: Tensor) -> Tensor:
            return ctx.ce(self.start(state | prefixed("mix", w), down), x, y)

        w = ctx.fit(without_prefix("mix", state), on=loss, epochs=1, lr=self.cfg.mix_lr, phase="mix")
        return state | prefixed("mix", w) | {"mixed": torch.tensor(True)}


class UsesTheModelReceived(FedALA):
    def personalise(self, ctx: Local, items: Items) -> Items:
        return without_prefix("down", items) or items


class TakesUpperLayersForGradients(FedALA):
    def change(self, state: Items, down: Items, up: Items, lr: float, steps: int) -> Items:
        return FedAvg.change(self, state, down, up, lr, steps)  # type: ignore[arg-type]


MUTANTS = [
    Mutant("no lerp", FedALA, fedala.check_1_without_learning_it_is_fedavg, MixesBySumAndDifference),
    Mutant("newcomers mix", FedALA, fedala.check_4_a_clients_first_exchange_is_fedavgs, NewcomersMix),
    Mutant("weights not kept", FedALA, fedala.check_the_weights_are_kept, ForgetsItsWeights),
    Mutant("tensors for layers", FedALA, fedala.check_layers_are_whole, CountsTensors),
    Mutant("no end", FedALA, fedala.check_the_first_mixing_ends_when_the_loss_has_settled, NeverStops),
    Mutant("no clipping", FedALA, fedala.check_2_the_start_lies_between_the_two_models, LosesTheClip),
    Mutant(
        "uses the model received",
        FedALA,
        fedala.check_the_tested_model_is_the_start_of_the_next_round,
        UsesTheModelReceived,
    ),
    Mutant(
        "mixture taken for a gradient",
        FedALA,
        fedala.check_6_lower_layers_show_the_gradient_at_the_start,
        TakesUpperLayersForGradients,
    ),
]
