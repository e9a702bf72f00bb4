"""Planted bugs of FedPCL."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from pflsec.algorithms.knowledge_distillation import fedpcl as module
from pflsec.algorithms.knowledge_distillation.fedpcl import FedPCL
from pflsec.core.algorithm import Done
from pflsec.core.items import Items, select
from pflsec.core.local import Local
from tests.algorithms import test_fedpcl as fedpcl
from tests.algorithms.mutants.planted import Mutant


class StacksClassesAsTheyCome(FedPCL):
    """Rows stand in the order in which classes first come up, and labels index them all the same."""

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        seen = list(dict.fromkeys([*ctx.targets().tolist(), *range(self.net.classes)]))
        order = torch.tensor([k for k in seen if down["known"][k]])
        rows = (down["known"].cumsum(0) - 1)[order] if len(order) else order
        return super().local(ctx, state, down | {"mean": down["mean"][rows], "sets": down["sets"][:, rows]})


class FillsGapsInPlace(FedPCL):
    """What is stored is filled, and with it what the client is taken to hold."""

    def downlink(self, server: Items, client: int) -> Items:
        down = super().downlink(server, client)
        gaps = server["known"] & ~server["holds"] & server["holds"].any(1, keepdim=True)
        server["sets"].copy_(torch.where(gaps[:, :, None], server["table"], server["sets"]))
        server["holds"].logical_or_(gaps)
        return down


class LeavesGapsEmpty(FedPCL):
    def downlink(self, server: Items, client: int) -> Items:
        return super().downlink(
            server | {"holds": server["holds"].any(1, keepdim=True).expand_as(server["holds"])}, client
        )


class ScoresMissingClasses0(FedPCL):
    """A class that is not held beats every negative score."""

    def scores(self, items: Items, x: Tensor) -> Tensor:
        return torch.where(items["held"], super().scores(items, x), 0.0)


class KeepsThePositive(FedPCL):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        other = FedPCL(self.cfg.model_copy(update={"include_positive": True}), self.net, self.clients)
        return other.local(ctx, state, down)


class LeavesThePositiveOut(FedPCL):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        other = FedPCL(self.cfg.model_copy(update={"include_positive": False}), self.net, self.clients)
        return other.local(ctx, state, down)


class TrainsWhateverItReceives(FedPCL):
    """A late client trains before it has sent anything."""

    def contrasts(self, state: Items, down: Items) -> bool:
        return super().contrasts(state | {"held": torch.ones_like(state["held"])}, down)


class TrainsInTheFirstRound(FedPCL):
    """Zeros stand for the prototypes that there are not."""

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        done = super().local(ctx, state, down)
        return Done(done.state | {k: v * 0.99 for k, v in select(done.state, "body").items()}, done.up)


class PrototypesOfTheOldExtractor(FedPCL):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        nothing = {"mean": down["mean"][:0], "sets": down["sets"][:, :0], "known": torch.zeros_like(down["known"])}
        return Done(super().local(ctx, state, down).state, super().local(ctx, state, nothing).up)


class SendsTheHeldMeanOfAll(FedPCL):
    """A class's mean is over all participants, holders or not."""

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        new = super().aggregate(server, ups)
        holders = torch.stack([up["held"] for up in ups.values()]).sum(0)
        return new | {"table": new["table"] * (holders / len(ups))[:, None]}


class SendsAllRows(FedPCL):
    """Also those of classes that are not held, as zeros."""

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        done = super().local(ctx, state, down)
        return Done(done.state, {"prototype": done.state["table"], "held": torch.ones_like(done.up["held"])})


def _raw_features(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "unit", lambda z: z)


MUTANTS = [
    Mutant(
        "classes as they come", FedPCL, fedpcl.check_2_the_order_of_classes_changes_nothing, StacksClassesAsTheyCome
    ),
    Mutant("gaps filled in place", FedPCL, fedpcl.check_4_sending_leaves_the_stored_sets_alone, FillsGapsInPlace),
    Mutant("gaps left empty", FedPCL, fedpcl.check_4_gaps_are_filled_with_the_mean, LeavesGapsEmpty),
    Mutant(
        "missing classes score 0", FedPCL, fedpcl.check_8_prediction_is_the_nearest_own_prototype, ScoresMissingClasses0
    ),
    Mutant("positive kept", FedPCL, fedpcl.check_0_steps_follow_the_objective, KeepsThePositive),
    Mutant(
        "positive left out", FedPCL, fedpcl.check_3_with_the_positive_it_is_cross_entropy_twice, LeavesThePositiveOut
    ),
    Mutant(
        "late clients train at once",
        FedPCL,
        fedpcl.check_1_who_joins_late_only_sends_at_first,
        TrainsWhateverItReceives,
    ),
    Mutant("trains at once", FedPCL, fedpcl.check_1_the_first_round_trains_nothing, TrainsInTheFirstRound),
    Mutant(
        "old extractor", FedPCL, fedpcl.check_7_prototypes_come_from_the_trained_extractor, PrototypesOfTheOldExtractor
    ),
    Mutant(
        "mean over all", FedPCL, fedpcl.check_6_a_mean_is_over_the_clients_that_hold_the_class, SendsTheHeldMeanOfAll
    ),
    Mutant("all rows sent", FedPCL, fedpcl.check_5_prototypes_and_label_sets_are_all_that_is_sent, SendsAllRows),
    Mutant("features of any length", FedPCL, fedpcl.check_0_steps_follow_the_objective, patch=_raw_features),
]
