"""Planted bugs of FedFomo."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pflsec.algorithms.personalized_aggregation.fedfomo import TINY, FedFomo
from pflsec.core.algorithm import Done
from pflsec.core.items import Items, prefixed, select
from pflsec.core.local import Local
from pflsec.training.local import LocalWork
from tests.algorithms import test_fedfomo as fedfomo
from tests.algorithms.mutants.planted import Mutant


class SplitsAnewEveryRound(FedFomo):
    """Rows that are held back in one round are trained on in the next."""

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        done = super().local(ctx, state, down)
        part = ctx.subset(0.8, "train")
        return Done(done.state, done.up | part.fit(self.mixture(state, down, done.up["scores"]), on=ctx.ce))


class TrainsOnAllRows(FedFomo):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        done = super().local(ctx, state, down)
        model = ctx.fit(self.mixture(state, down, done.up["scores"]), on=ctx.ce)
        return Done(done.state | model, done.up | model)


class ScoresAgainstTheOwnModel(FedFomo):
    def _base(self, state: Items) -> Items:
        return select(state, "body", "head")


class ScoresTheLossAlone(FedFomo):
    """The distance is forgotten."""

    def judge(self, held: Local, state: Items, down: Items) -> Tensor:
        base, scores = self._base(state), super().judge(held, state, down)
        models = self.candidates(state, down)
        apart = torch.cat([(v - base[k]).flatten(1) for k, v in models.items()], 1).norm(dim=1)
        return scores * (apart + TINY)


class ScoresOnOtherRows(FedFomo):
    """Every model is judged on a row of its own."""

    def judge(self, held: Local, state: Items, down: Items) -> Tensor:
        return super().judge(held, state, down) * (1 + torch.arange(1 + int(down["peers"].sum())))


class ScoresAgainstAnother(FedFomo):
    def _base(self, state: Items) -> Items:
        return {k: torch.zeros_like(v) for k, v in super()._base(state).items()}


class KeepsNegativeWeights(FedFomo):
    def mixture(self, state: Items, down: Items, scores: Tensor) -> Items:
        weights = scores / (scores.sum() if scores.any() else 1)
        return {k: torch.tensordot(weights, v, dims=1) for k, v in self.candidates(state, down).items()}


class WritesIntoWhatItReceived(FedFomo):
    """Models come by reference, and judging them moves something in them."""

    def downlink(self, server: Items, client: int) -> Items:
        self._server = server
        return super().downlink(server, client)

    def judge(self, held: Local, state: Items, down: Items) -> Tensor:
        self._server["bank.head.bias"].mul_(0.9)
        return super().judge(held, state, down)


class TakesTheLastUploadForTheStart(FedFomo):
    """The jump to the mixture counts as gradient."""

    def change(self, state: Items, down: Items, up: Items, lr: float, steps: int) -> Items:
        seen = {k: (v - up[k]) / (lr * steps) for k, v in select(state, "body", "head").items()}
        return seen | {"scores": up["scores"]}


class RemembersNoStart(FedFomo):
    """The base is where training ended, so that the next round's scores are against it."""

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        done = super().local(ctx, state, down)
        return Done(done.state | prefixed("base", select(done.state, "body", "head")), done.up)


class OffersEverybody(FedFomo):
    """Its own model too, and those that nobody has trained yet."""

    def chosen(self, server: Items, client: int) -> Tensor:
        return torch.arange(self.clients) < self.cfg.peers


class ForgetsOldScores(FedFomo):
    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        return super().aggregate(server | {"likes": torch.eye(self.clients)}, ups)


def _holds_few_rows_back_whole(patch: pytest.MonkeyPatch) -> None:
    """A fifth of fewer than five rows is none, and counted from the end none is all."""

    def split(self: LocalWork, share: float, purpose: str) -> tuple[LocalWork, LocalWork]:
        first = int(share * self.num_samples)
        return replace(self, x=self.x[-first:], y=self.y[-first:]), replace(self, x=self.x[:-first], y=self.y[:-first])

    patch.setattr(LocalWork, "split", split)


MUTANTS = [
    Mutant("few rows all held", FedFomo, fedfomo.check_few_rows_are_split_too, patch=_holds_few_rows_back_whole),
    Mutant("split drawn anew", FedFomo, fedfomo.check_5_held_rows_are_never_trained_on, SplitsAnewEveryRound),
    Mutant("held rows trained on", FedFomo, fedfomo.check_1_without_peers_it_is_isolated_training, TrainsOnAllRows),
    Mutant("base is its own model", FedFomo, fedfomo.check_0_the_start_follows_the_scores, ScoresAgainstTheOwnModel),
    Mutant("distance forgotten", FedFomo, fedfomo.check_0_the_start_follows_the_scores, ScoresTheLossAlone),
    Mutant("judged on unlike rows", FedFomo, fedfomo.check_2_identical_peers_score_alike, ScoresOnOtherRows),
    Mutant("base unlike 0", FedFomo, fedfomo.check_6_the_base_scores_0_and_a_better_model_more, ScoresAgainstAnother),
    Mutant(
        "negative weights", FedFomo, fedfomo.check_2_weights_are_shares_or_the_fallback_is_taken, KeepsNegativeWeights
    ),
    Mutant(
        "bank written to", FedFomo, fedfomo.check_4_scoring_leaves_the_servers_models_alone, WritesIntoWhatItReceived
    ),
    Mutant(
        "last upload taken for the start",
        FedFomo,
        fedfomo.check_3_the_server_computes_the_gradient,
        TakesTheLastUploadForTheStart,
    ),
    Mutant("start forgotten", FedFomo, fedfomo.check_3_the_log_tells_where_training_began, RemembersNoStart),
    Mutant("own model in a slot", FedFomo, fedfomo.check_7_only_models_of_the_last_round_are_offered, OffersEverybody),
    Mutant("old scores forgotten", FedFomo, fedfomo.check_8_scores_add_up_to_preferences, ForgetsOldScores),
]
