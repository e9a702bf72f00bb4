"""Planted bugs of FedBABU."""

from collections.abc import Mapping
from typing import ClassVar

import torch

from pflsec.algorithms.model_splitting.fedbabu import FedBABU
from pflsec.core.algorithm import Done, mean_of_uploads, sample_count
from pflsec.core.items import Items, select
from pflsec.core.local import Local
from tests.algorithms import test_fedbabu as fedbabu
from tests.algorithms.mutants.planted import Mutant


class TrainsTheHead(FedBABU):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        model = ctx.fit(down | state, on=ctx.ce)
        return Done(select(model, "head"), select(model, "body") | sample_count(ctx))


class DrawsAHeadForEach(FedBABU):
    def init_client(self, fresh: Items, server: Items) -> Items:
        return select(fresh, "head")

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        return super().local(ctx, state, select(down, "body"))


class SendsTheHeadEveryRound(FedBABU):
    def downlink(self, server: Items, client: int) -> Items:
        return select(server, "body", "head")


class SendsTheHeadBack(FedBABU):
    """The head goes up with the body, though it never moves."""

    up: ClassVar = {"body.*": "weights", "head.*": "weights", "num_samples?": "counts"}

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        done = super().local(ctx, state, down)
        return Done(done.state, done.up | select(done.state, "head"))


class WeighsEqually(FedBABU):
    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        body = mean_of_uploads(ups, "body", weighting="uniform")
        return server | body | {"met": torch.ones(self.clients, dtype=torch.bool)}


class TunesWhatItsLastRoundLeft(FedBABU):
    """A participant fits its own last body, not the aggregate."""

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        done = super().local(ctx, select(state, "head"), down)
        return Done(done.state | select(done.up, "body"), done.up)


class TunesTheBodyAlone(FedBABU):
    def personalise(self, ctx: Local, items: Items) -> Items:
        body, head = select(items, "body"), select(items, "head")
        epochs = self.cfg.tune_epochs
        return items | ctx.fit(body, on=lambda b, x, y: ctx.ce(b | head, x, y), epochs=epochs, phase="tune")


class TunesInPlace(FedBABU):
    """The model that is fitted is no copy: the next training goes on from it."""

    def personalise(self, ctx: Local, items: Items) -> Items:
        for name, value in super().personalise(ctx, items).items():
            items[name].copy_(value)
        return items


class AlwaysTunes(FedBABU):
    def personalise(self, ctx: Local, items: Items) -> Items:
        return ctx.fit(items, on=ctx.ce, epochs=50, lr=1.0, phase="tune")


MUTANTS = [
    Mutant("head moves", FedBABU, fedbabu.check_1_the_head_never_moves, TrainsTheHead),
    Mutant("head moves, against fedrep", FedBABU, fedbabu.check_4_it_is_fedrep_without_a_head_phase, TrainsTheHead),
    Mutant("a head for each client", FedBABU, fedbabu.check_1_the_head_never_moves, DrawsAHeadForEach),
    Mutant("a head for each, first step", FedBABU, fedbabu.check_3_the_first_step_is_fedavgs_of_the_body,
           DrawsAHeadForEach),
    Mutant("head comes every round", FedBABU, fedbabu.check_2_the_body_is_on_the_wire_and_the_head_once,
           SendsTheHeadEveryRound),
    Mutant("head goes up", FedBABU, fedbabu.check_2_the_body_is_on_the_wire_and_the_head_once, SendsTheHeadBack),
    Mutant("equal weights", FedBABU, fedbabu.check_6_the_body_is_the_mean_by_samples, WeighsEqually),
    Mutant("tuning starts at a client's own body", FedBABU,
           fedbabu.check_5_a_clients_model_is_the_newest_aggregate_fitted_to_its_rows, TunesWhatItsLastRoundLeft),
    Mutant("no copy is tuned", FedBABU, fedbabu.check_5_a_clients_model_is_the_newest_aggregate_fitted_to_its_rows,
           TunesInPlace),
    Mutant("only the body is tuned", FedBABU,
           fedbabu.check_5_a_clients_model_is_the_newest_aggregate_fitted_to_its_rows, TunesTheBodyAlone),
    Mutant("tuned in any case", FedBABU, fedbabu.check_5_without_tuning_everybody_uses_one_model, AlwaysTunes),
]  # fmt: skip
