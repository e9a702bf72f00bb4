"""Planted bugs of Per-FedAvg."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pflsec.algorithms.meta_learning.perfedavg import PerFedAvg, moved
from pflsec.core.algorithm import Done, mean_of_uploads
from pflsec.core.items import Items
from pflsec.core.local import Local
from tests.algorithms import test_perfedavg as perfedavg
from tests.algorithms.mutants.planted import Mutant


class OneStepSizeForBoth(PerFedAvg):
    """The flag of the outer step is read and ignored."""

    def _beta(self, lr: float) -> float:
        return self.cfg.alpha


class NoOuterStepMeansTheLearningRate(PerFedAvg):
    def _beta(self, lr: float) -> float:
        return self.cfg.beta or lr


class MovesOnFromTheInnerStep(PerFedAvg):
    """The outer gradient is applied where it was taken."""

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        w = down
        for inner, outer in ctx.row_sets(2):
            w = moved(w, ctx.gradient(w, ctx.ce, inner, phase="inner"), self.cfg.alpha)
            w = moved(w, ctx.gradient(w, ctx.ce, outer), self._beta(ctx.lr))
        return Done(state, up=w)


class CutsTheGraph(PerFedAvg):
    """Second order is announced, but the inner step is no part of what is differentiated."""

    def meta_gradient(self, ctx: Local, w: Items, inner: Tensor, outer: Tensor, third: Tensor | None = None) -> Items:
        return super().meta_gradient(ctx, w, inner, outer)


class CurvatureOfTheInnerBatch(PerFedAvg):
    def meta_gradient(self, ctx: Local, w: Items, inner: Tensor, outer: Tensor, third: Tensor | None = None) -> Items:
        return super().meta_gradient(ctx, w, inner, outer, inner)


class ForwardDifferences(PerFedAvg):
    """The error of one-sided differences falls with delta, not with its square."""

    def _slope(self, ctx: Local, v: Items) -> Any:
        if self.cfg.variant == "exact":
            return super()._slope(ctx, v)
        delta = self.cfg.delta
        return lambda w, x, y: (ctx.ce(moved(w, v, -delta), x, y) - ctx.ce(w, x, y)) / delta


class AdaptsManyTimes(PerFedAvg):
    """Many steps in place of one, on what the tested model has become."""

    def personalise(self, ctx: Local, items: Items) -> Items:
        for (rows,) in ctx.row_sets(1, epochs=3, phase="adapt"):
            items = moved(items, ctx.gradient(items, ctx.ce, rows, phase="adapt"), self.cfg.alpha)
        return items


class MetaModelsBySamples(PerFedAvg):
    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        counted = {c: up | {"num_samples": torch.tensor(perfedavg.toys.TRAIN[c])} for c, up in ups.items()}
        return mean_of_uploads(counted, *self.shared, weighting="samples")


MUTANTS = [
    Mutant("one step size for both", PerFedAvg, perfedavg.check_the_two_step_sizes_are_two, OneStepSizeForBoth),
    Mutant(
        "beta of 0 is the learning rate",
        PerFedAvg,
        perfedavg.check_without_outer_step_nothing_moves,
        NoOuterStepMeansTheLearningRate,
    ),
    Mutant(
        "moves on from the inner step",
        PerFedAvg,
        perfedavg.check_2_one_step_takes_the_gradient_ahead_and_applies_it_at_the_start,
        MovesOnFromTheInnerStep,
    ),
    Mutant("cuts the graph", PerFedAvg, perfedavg.check_3_exact_is_the_gradient_of_the_composed_loss, CutsTheGraph),
    Mutant(
        "cuts the graph with one sample",
        PerFedAvg,
        perfedavg.check_3_one_sample_serves_as_all_three_batches,
        CutsTheGraph,
    ),
    Mutant(
        "curvature of the inner batch",
        PerFedAvg,
        perfedavg.check_3_the_curvature_is_the_third_batchs,
        CurvatureOfTheInnerBatch,
    ),
    Mutant(
        "forward differences",
        PerFedAvg,
        perfedavg.check_4_differences_go_to_the_exact_gradient_with_the_square_of_delta,
        ForwardDifferences,
    ),
    Mutant(
        "adapts many times",
        PerFedAvg,
        perfedavg.check_5_the_tested_model_is_one_step_from_the_shared_one,
        AdaptsManyTimes,
    ),
    Mutant("sample weights", PerFedAvg, perfedavg.check_6_the_mean_is_plain, MetaModelsBySamples),
    Mutant(
        "sample weights without inner step",
        PerFedAvg,
        perfedavg.check_1_without_inner_step_it_is_fedavg_on_every_other_batch,
        MetaModelsBySamples,
    ),
]
