"""Planted bugs of FedProto."""

from collections.abc import Mapping

import torch

from pflsec.algorithms.knowledge_distillation.fedproto import FedProto
from pflsec.core.algorithm import Done
from pflsec.core.items import Items
from pflsec.core.local import Local
from pflsec.core.prototypes import as_table
from tests.algorithms import test_fedproto as fedproto
from tests.algorithms.mutants.planted import Mutant


class TableOfThisRoundOnly(FedProto):
    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        empty = {"table": torch.zeros_like(server["table"]), "known": torch.zeros_like(server["known"])}
        return super().aggregate(empty, ups)


class AveragesTwice(FedProto):
    """The paper's equation, read literally: 1/|N_k| and n_ik/n_k."""

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        holders = torch.stack([up["held"] for up in ups.values()]).sum(0).clamp(min=1)
        new = super().aggregate(server, ups)
        return new | {"table": new["table"] / holders[:, None]}


class PrototypesOfTheOldModel(FedProto):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        done = super().local(ctx, state, down)
        z, target = ctx.features(state), ctx.one_hot(ctx.targets())
        means = (target.T @ z)[done.up["held"]] / target.sum(0)[done.up["held"], None]
        return Done(done.state, done.up | {"prototype": means})


class NeverBackpropagatesThePull(FedProto):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        plain = FedProto(self.cfg.model_copy(update={"lam": 0.0}), self.net, self.clients)
        return plain.local(ctx, state, down)


class PullsUnknownClasses(FedProto):
    """A class without a global prototype is pulled towards zero."""

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        return super().local(
            ctx,
            state,
            {"prototype": as_table(down["prototype"], down["known"]), "known": torch.ones_like(down["known"])},
        )


class PredictsAnyKnownClass(FedProto):
    def deploy(self, state: Items, down: Items) -> Items:
        return super().deploy(state, down) | {"held": down["known"]}


MUTANTS = [
    Mutant(
        "table of this round only",
        FedProto,
        fedproto.check_a_class_that_is_away_keeps_its_prototype,
        TableOfThisRoundOnly,
    ),
    Mutant(
        "averaged twice", FedProto, fedproto.check_3_a_global_prototype_is_the_plain_mean_over_holders, AveragesTwice
    ),
    Mutant(
        "prototypes of the old model",
        FedProto,
        fedproto.check_4_prototypes_come_from_the_trained_model,
        PrototypesOfTheOldModel,
    ),
    Mutant(
        "pull never back-propagated",
        FedProto,
        fedproto.check_6_the_pull_moves_the_body_alone,
        NeverBackpropagatesThePull,
    ),
    Mutant(
        "objective without the pull",
        FedProto,
        fedproto.check_0_one_step_follows_the_objective,
        NeverBackpropagatesThePull,
    ),
    Mutant(
        "unknown classes pulled to zero", FedProto, fedproto.check_5_an_unknown_class_is_not_pulled, PullsUnknownClasses
    ),
    Mutant(
        "predicts classes it does not hold",
        FedProto,
        fedproto.check_prediction_is_the_nearest_prototype_of_a_held_class,
        PredictsAnyKnownClass,
    ),
]
