"""Planted bugs of FedCP."""

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pflsec.algorithms.model_splitting import fedcp as module
from pflsec.algorithms.model_splitting.fedcp import FedCP
from pflsec.core.algorithm import Done, mean_of_uploads
from pflsec.core.items import Items, combine, prefixed, select, without_prefix
from pflsec.core.local import Local
from pflsec.training.local import LocalWork
from tests.algorithms import test_fedcp as fedcp
from tests.algorithms.mutants.planted import Mutant


class RandomContext(FedCP):
    def context(self, head: Items) -> Tensor:
        return F.normalize(torch.rand(self.net.feature_dim, generator=torch.Generator().manual_seed(0)), dim=0)


class NoLengthOne(FedCP):
    def context(self, head: Items) -> Tensor:
        return head["head.weight"].sum(0)


class NoiseInTests(FedCP):
    def scores(self, items: Items, x: Tensor) -> Tensor:
        z, common = self.net.features(items, x), without_prefix("common", items)
        return self.joined(items, common, self.context(items), z, torch.Generator().manual_seed(0))


class GlobalHeadIsTrainedToo(FedCP):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        done = super().local(ctx, state, down)
        g = select(ctx.fit(select(down, "body", "head"), on=ctx.ce), "head")
        return Done(done.state, done.up | combine(lambda g, h: (g + h) / 2, g, select(done.state, "head")))


class StaleHeadForTheAbsent(FedCP):
    """Only the last cohort gets the new global head."""

    def init_server(self, fresh: Items) -> Items:
        server = super().init_server(fresh)
        return server | prefixed("old", select(server, "head")) | {"latest": torch.ones(self.clients, dtype=torch.bool)}

    def downlink(self, server: Items, client: int) -> Items:
        head = {} if server["latest"][client] else without_prefix("old", server)
        return select(server, "body", "head", "policy") | head

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        latest = torch.zeros(self.clients, dtype=torch.bool).index_fill(0, torch.tensor(list(ups)), True)
        return super().aggregate(server, ups) | prefixed("old", select(server, "head")) | {"latest": latest}


class RateNeverFalls(FedCP):
    """The optimiser is not the one whose learning rate is lowered: it keeps 0.1."""

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        return super().local(replace(cast(LocalWork, ctx), lr=0.1), state, down)


class PlainMean(FedCP):
    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        return mean_of_uploads(ups, "body", "head", "policy", weighting="uniform")


class MixtureTakenForTheHead(FedCP):
    def unmixed(self, down: Items, up: Items) -> Items:
        return select(up, "head")


def _sum_of_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    mean = module.mmd_rows
    monkeypatch.setattr(module, "mmd_rows", lambda a, b: len(a) * mean(a, b))


def _distance_to_the_moving_body(monkeypatch: pytest.MonkeyPatch) -> None:
    mean = module.mmd_rows
    monkeypatch.setattr(module, "mmd_rows", lambda a, b: mean(a, a))


MUTANTS = [
    Mutant("context is a random vector", FedCP, fedcp.check_0_three_steps_follow_the_objective, RandomContext),
    Mutant("context is not of length 1", FedCP, fedcp.check_0_three_steps_follow_the_objective, NoLengthOne),
    Mutant("rate never falls", FedCP, fedcp.check_0_three_steps_follow_the_objective, RateNeverFalls),
    Mutant("MMD summed", FedCP, fedcp.check_0_three_steps_follow_the_objective, patch=_sum_of_pairs),
    Mutant("MMD to itself", FedCP, fedcp.check_0_three_steps_follow_the_objective, patch=_distance_to_the_moving_body),
    Mutant(
        "global head is trained", FedCP, fedcp.check_1_the_upload_gives_the_personal_head_away, GlobalHeadIsTrainedToo
    ),
    Mutant(
        "stale head for the absent",
        FedCP,
        fedcp.check_4_everybody_receives_the_same_and_the_absent_keep_their_head,
        StaleHeadForTheAbsent,
    ),
    Mutant("plain mean", FedCP, fedcp.check_5_the_mean_is_by_samples, PlainMean),
    Mutant("noise in tests", FedCP, fedcp.check_the_tested_model_is_the_policys_own_mixture, NoiseInTests),
    Mutant(
        "mixture taken for the head",
        FedCP,
        fedcp.check_one_step_shows_the_gradients_of_all_three_modules,
        MixtureTakenForTheHead,
    ),
]
