"""Planted bugs of FedRep."""

from collections.abc import Mapping

import torch

from pflsec.algorithms.model_splitting.fedrep import FedRep
from pflsec.core.algorithm import Done, mean_of_uploads
from pflsec.core.items import Items, select
from pflsec.core.local import Local
from tests.algorithms import test_fedrep as fedrep
from tests.algorithms.mutants.planted import Mutant


class SkipsTheHeadPhase(FedRep):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        body = ctx.fit(down, on=lambda b, x, y: ctx.ce(b | state, x, y))
        return Done(state=state, up=body)


class BodyMovesInTheHeadPhase(FedRep):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        model = ctx.fit(down | state, on=ctx.ce, epochs=self.cfg.head_epochs, phase="head")
        body, head = select(model, "body"), select(model, "head")
        body = ctx.fit(body, on=lambda b, x, y: ctx.ce(b | head, x, y))
        return Done(state=head, up=body)


class HeadMovesInTheBodyPhase(FedRep):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        head = ctx.fit(state, on=ctx.head_ce, features_of=down, epochs=self.cfg.head_epochs, phase="head")
        model = ctx.fit(down | head, on=ctx.ce)
        return Done(state=select(model, "head"), up=select(model, "body"))


class BodyTrainsUnderTheOldHead(FedRep):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        head = super().local(ctx, state, down).state
        body = ctx.fit(down, on=lambda b, x, y: ctx.ce(b | state, x, y))
        return Done(state=head, up=body)


class WeighsBySamples(FedRep):
    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        counted = {c: up | {"num_samples": torch.tensor(fedrep.toys.TRAIN[c])} for c, up in ups.items()}
        return mean_of_uploads(counted, *self.shared, weighting="samples")


MUTANTS = [
    Mutant("no head phase", FedRep, fedrep.check_2_the_head_phase_moves_the_head_alone, SkipsTheHeadPhase),
    Mutant(
        "body moves in the head phase",
        FedRep,
        fedrep.check_2_the_head_phase_moves_the_head_alone,
        BodyMovesInTheHeadPhase,
    ),
    Mutant(
        "head moves in the body phase",
        FedRep,
        fedrep.check_2_the_body_phase_moves_the_body_alone,
        HeadMovesInTheBodyPhase,
    ),
    Mutant(
        "body under the old head",
        FedRep,
        fedrep.check_3_one_step_gives_the_bodys_gradient_at_the_new_head,
        BodyTrainsUnderTheOldHead,
    ),
    Mutant("sample weights", FedRep, fedrep.check_5_the_mean_is_plain, WeighsBySamples),
]
