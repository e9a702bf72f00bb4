"""Planted bugs of FedPAC."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from pflsec.algorithms.knowledge_distillation.fedpac import FedPAC
from pflsec.core.algorithm import Done
from pflsec.core.items import Items, select
from pflsec.core.local import Local
from pflsec.training.local import LocalWork
from tests.algorithms import test_fedpac as fedpac
from tests.algorithms.mutants.planted import Mutant


class StatisticsOfOtherClients(FedPAC):
    """Statistics stand in one order, heads in another."""

    def mixtures(self, ups: Sequence[Items]) -> Tensor:
        return super().mixtures(ups[::-1])


class MixesMixedHeads(FedPAC):
    """A head is overwritten before the next client's is mixed."""

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        new, a = super().aggregate(server, ups), self.mixtures(list(ups.values()))
        for name in select(next(iter(ups.values())), "head"):
            heads = torch.stack([up[name] for up in ups.values()])
            for i in range(len(heads)):
                heads[i] = torch.tensordot(a[i].to(heads), heads, dims=1)
            new[f"mixed.{name}"] = new[f"mixed.{name}"].index_copy(0, torch.tensor(list(ups)), heads)
        return new


class ForgetsTheVariance(FedPAC):
    def mixtures(self, ups: Sequence[Items]) -> Tensor:
        return super().mixtures([up | {"variance": torch.zeros(())} for up in ups])


class WeighsClientsForPrototypes(FedPAC):
    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        held = {c: up | {"label_counts": (up["label_counts"] > 0).double()} for c, up in ups.items()}
        return super().aggregate(server, held)


class UniformBody(FedPAC):
    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        return super().aggregate(server, {c: up | {"num_samples": torch.tensor(1)} for c, up in ups.items()})


class NoFallback(FedPAC):
    """A class without global prototype is pulled to zero."""

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        all_known = torch.ones_like(down["known"]) if down["known"].any() else down["known"]
        return super().local(ctx, state, down | {"known": all_known})


class NoPull(FedPAC):
    """A class without global prototype is not pulled at all."""

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        done, known = super().local(ctx, state, down), down["known"].double()

        def loss(body: Items, x: Tensor, y: Tensor) -> Tensor:
            z, target = self.net.features(body, x), ctx.one_hot(y)
            off = (z - target @ down["prototype"]).square().mean(1)
            return ctx.head_ce(done.up, z, y) + self.cfg.lam * (target @ known) * off

        return Done(done.state, done.up | ctx.fit(select(down, "body"), on=loss))


class TakesTheHeadsEpochFromTheBody(FedPAC):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        left = ctx.epochs - self.cfg.head_epochs
        return super().local(replace(cast(LocalWork, ctx), epochs=left), state, down)


class StatisticsOfWholeBatches(FedPAC):
    """Batches of two; the last short one is dropped."""

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        done, whole = super().local(ctx, state, down), ctx.num_samples // 2 * 2
        h = ctx.one_hot(ctx.targets())[:whole].T @ ctx.features(down)[:whole] / whole
        return Done(done.state, done.up | {"feature_mean": h})


class AlignsInTheFirstRound(FedPAC):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        if down["known"].any():
            return super().local(ctx, state, down)
        own = super().local(ctx, state, down).up["feature_mean"]
        return super().local(ctx, state, down | {"prototype": own, "known": own.any(1)})


class StatisticsOfTheTrainedBody(FedPAC):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        done = super().local(ctx, state, down)
        h = ctx.one_hot(ctx.targets()).T @ ctx.features(done.up) / ctx.num_samples
        return Done(done.state, done.up | {"feature_mean": h})


class PrototypesOfTheOldBody(FedPAC):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        done = super().local(ctx, state, down)
        share = done.up["label_counts"].clamp(min=1) / ctx.num_samples
        return Done(done.state, done.up | {"prototype": done.up["feature_mean"] / share[:, None]})


class TrainsTheWholeModel(FedPAC):
    """The body phase moves the head as well."""

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        done = super().local(ctx, state, down)
        return Done(done.state, done.up | ctx.fit(select(done.up, "body", "head"), on=ctx.ce))


MUTANTS = [
    Mutant(
        "statistics of other clients",
        FedPAC,
        fedpac.check_1_of_two_clients_it_is_known_in_closed_form,
        StatisticsOfOtherClients,
    ),
    Mutant(
        "mixes mixed heads, in an order",
        FedPAC,
        fedpac.check_4_a_mixture_does_not_depend_on_the_order_of_clients,
        MixesMixedHeads,
    ),
    Mutant("mixes mixed heads", FedPAC, fedpac.check_6_equal_clients_get_the_plain_mean, MixesMixedHeads),
    Mutant("no variance", FedPAC, fedpac.check_1_a_mixture_is_the_best_on_the_simplex, ForgetsTheVariance),
    Mutant(
        "prototypes uniform over clients",
        FedPAC,
        fedpac.check_5_the_body_is_the_mean_by_samples_and_prototypes_are_pooled,
        WeighsClientsForPrototypes,
    ),
    Mutant(
        "body uniform over clients",
        FedPAC,
        fedpac.check_5_the_body_is_the_mean_by_samples_and_prototypes_are_pooled,
        UniformBody,
    ),
    Mutant("no fallback", FedPAC, fedpac.check_0_one_step_of_each_phase_follows_its_objective, NoFallback),
    Mutant("no pull", FedPAC, fedpac.check_0_one_step_of_each_phase_follows_its_objective, NoPull),
    Mutant(
        "head's epoch is the body's",
        FedPAC,
        fedpac.check_0_one_step_of_each_phase_follows_its_objective,
        TakesTheHeadsEpochFromTheBody,
    ),
    Mutant(
        "last batch has no statistics", FedPAC, fedpac.check_what_is_sent_about_the_features, StatisticsOfWholeBatches
    ),
    Mutant("aligns at once", FedPAC, fedpac.check_0_the_first_round_aligns_nothing, AlignsInTheFirstRound),
    Mutant("statistics come late", FedPAC, fedpac.check_what_is_sent_about_the_features, StatisticsOfTheTrainedBody),
    Mutant("prototypes come early", FedPAC, fedpac.check_what_is_sent_about_the_features, PrototypesOfTheOldBody),
    Mutant("head moves with the body", FedPAC, fedpac.check_3_a_phase_leaves_the_other_part_alone, TrainsTheWholeModel),
]
