"""Planted bugs of FedRoD."""

from collections.abc import Mapping

import torch
from torch import Tensor

from pflsec.algorithms.model_splitting.fedrod import ABSENT, FedRoD, counted
from pflsec.core.algorithm import Done, mean_of_uploads, sample_count
from pflsec.core.items import Items, prefixed, select, without_prefix
from pflsec.core.local import Local
from pflsec.training.local import cross_entropy
from tests.algorithms import test_fedrod as fedrod
from tests.algorithms.mutants.planted import Mutant


def _fedrod(alone: bool = False, through: bool = False, generic_moves: bool = False) -> type[FedRoD]:
    """Return FedRoD whose personal logits leave the generic ones out, or whose personal loss reaches shared parts."""

    class Planted(FedRoD):
        def local(self, ctx: Local, state: Items, down: Items) -> Done:
            facts = self.facts(ctx, state)
            shift = self.shift(facts)

            def loss(model: Items, x: Tensor, y: Tensor) -> Tensor:
                z = self.net.features(model, x)
                generic = self.net.head(model, z)
                own = self.net.head(without_prefix("personal", model), z if through else ctx.constant(z))
                base = 0 if alone else generic if generic_moves else ctx.constant(generic)
                return cross_entropy(generic + shift, y) + cross_entropy(base + own, y)

            model = ctx.fit(down | prefixed("personal", select(state, "head")), on=loss)
            sent = select(model, "body", "head", "nu") | sample_count(ctx)
            return Done(without_prefix("personal", model) | facts, sent)

    return Planted


class CountsWholeBatches(FedRoD):
    """Batches of four; the last short one is dropped."""

    def facts(self, ctx: Local, state: Items) -> Items:
        targets = ctx.one_hot(ctx.targets())
        return counted(targets[: max(4, len(targets) // 4 * 4)].sum(0))


class StartsAtTheGenericHead(FedRoD):
    def first_head(self, items: Items) -> Items:
        return select(items, "head")


class MultipliesTheLog(FedRoD):
    """gamma log n, with log 0 as it is."""

    def shift(self, facts: Items) -> Tensor:
        return self.cfg.gamma * torch.where(facts["held"], facts["log_share"], -torch.inf)


class SmoothsTheCounts(FedRoD):
    """An absent class counts as one row of a hundred."""

    def shift(self, facts: Items) -> Tensor:
        return super().shift(facts).clamp(min=-4.6)


class PredictsByThePersonalHeadAlone(FedRoD):
    def scores(self, items: Items, x: Tensor) -> Tensor:
        own = without_prefix("personal", items)
        return self.net.head(own or items, self.net.features(items, x))


class PlainMeanOfTheHypernetwork(FedRoD):
    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        return super().aggregate(server, ups) | mean_of_uploads(ups, "nu", weighting="uniform")


class LeavesTheCountsOut(FedRoD):
    """Generic loss without the counts: plain cross entropy."""

    def shift(self, facts: Items) -> Tensor:
        return torch.where(facts["held"], 0, ABSENT)


MUTANTS = [
    Mutant("personal logits alone", FedRoD, fedrod.check_0_one_step_follows_the_objective, _fedrod(alone=True)),
    Mutant("features carry a slope", FedRoD, fedrod.check_2_the_personal_head_does_not_touch_what_is_sent,
           _fedrod(through=True)),
    Mutant("generic logits carry a slope", FedRoD, fedrod.check_1_without_gamma_it_sends_what_fedavg_sends,
           _fedrod(generic_moves=True)),
    Mutant("last batch is not counted", FedRoD, fedrod.check_the_counts_are_of_all_rows, CountsWholeBatches),
    Mutant("copy of the generic head", FedRoD, fedrod.check_5_a_personal_head_that_never_trained_adds_nothing,
           StartsAtTheGenericHead),
    Mutant("gamma times log 0", FedRoD, fedrod.check_1_a_class_without_rows_makes_no_nan, MultipliesTheLog),
    Mutant("smoothed counts", FedRoD, fedrod.check_4_rows_of_absent_classes_stand_still, SmoothsTheCounts),
    Mutant("one class is not alone", FedRoD, fedrod.check_6_a_client_of_one_class_sends_back_what_it_received,
           SmoothsTheCounts),
    Mutant("tested with one head", FedRoD, fedrod.check_5_a_client_is_tested_with_the_sum_of_both_heads,
           PredictsByThePersonalHeadAlone),
    Mutant("plain mean of the hypernetwork", FedRoD, fedrod.check_the_server_takes_means_of_all_that_is_sent,
           PlainMeanOfTheHypernetwork),
    Mutant("counts are left out", FedRoD, fedrod.check_0_one_step_follows_the_objective, LeavesTheCountsOut),
]  # fmt: skip
