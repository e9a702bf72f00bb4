"""Planted bugs of FedPer."""

from collections.abc import Mapping
from typing import ClassVar

import pytest
import torch

from pflsec.algorithms.model_splitting.fedper import FedPer
from pflsec.core.algorithm import Done, mean_of_uploads
from pflsec.core.items import Items, select, weighted_mean
from pflsec.core.local import Local
from pflsec.runtime.setup import Setup
from tests.algorithms import test_fedper as fedper
from tests.algorithms.mutants.planted import Mutant


class SendsTheHead(FedPer):
    """The personal part is averaged like the rest; each client puts its own back when it trains."""

    shared = ("body", "head")
    down: ClassVar = {"body.*": "weights", "head.*": "weights"}
    up: ClassVar = {"body.*": "weights", "head.*": "weights", "num_samples?": "counts"}


class WeighsByBatches(FedPer):
    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        return mean_of_uploads(
            {c: up | {"num_samples": -(-up["num_samples"] // 4)} for c, up in ups.items()}, "body", weighting="samples"
        )


class WeighsByAllClients(FedPer):
    """The paper's weights under partial participation: the absent clients' share stays with the old body."""

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        away = float(sum(fedper.toys.TRAIN)) - sum(float(up["num_samples"]) for up in ups.values())
        bodies = [server, *(select(up, "body") for up in ups.values())]
        return weighted_mean(bodies, [away, *(float(up["num_samples"]) for up in ups.values())])


class TrainsTheHeadFirst(FedPer):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        head = ctx.fit(select(state, "head"), on=ctx.head_ce, features_of=down)
        body = ctx.fit(down, on=lambda b, x, y: ctx.ce(b | head, x, y))
        count = {"num_samples": torch.tensor(ctx.num_samples)}
        return Done(head | {"trained": torch.tensor(True)}, body | count)


class ForgetsTheHead(FedPer):
    """The state that was trained is thrown away."""

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        return Done(state, super().local(ctx, state, down).up)


class FitsNewcomersWhole(FedPer):
    def personalise(self, ctx: Local, items: Items) -> Items:
        model = select(items, "body", "head")
        fitted = ctx.fit(model, on=ctx.ce, epochs=self.cfg.newcomer_epochs, phase="newcomer")
        return items if items["trained"] else items | fitted


def _one_draw_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Setup, "client_fresh", lambda setup, client: setup.server_fresh)


MUTANTS = [
    Mutant("head is sent", FedPer, fedper.check_1_only_the_body_is_on_the_wire, SendsTheHead),
    Mutant(
        "weights are numbers of batches",
        FedPer,
        fedper.check_2_the_body_is_the_mean_by_samples_over_who_took_part,
        WeighsByBatches,
    ),
    Mutant(
        "weights of all clients",
        FedPer,
        fedper.check_2_the_body_is_the_mean_by_samples_over_who_took_part,
        WeighsByAllClients,
    ),
    Mutant("head first", FedPer, fedper.check_5_one_step_moves_both_parts_at_one_point, TrainsTheHeadFirst),
    Mutant(
        "head is not kept",
        FedPer,
        fedper.check_3_with_all_personal_it_is_isolated_training,
        ForgetsTheHead,
    ),
    Mutant(
        "all heads start equal",
        FedPer,
        fedper.check_heads_start_apart_unless_they_are_told_to_share,
        patch=_one_draw_for_all,
    ),
    Mutant(
        "newcomers are fitted whole",
        FedPer,
        fedper.check_a_newcomer_is_tested_with_a_head_that_was_fitted_alone,
        FitsNewcomersWhole,
    ),
]
