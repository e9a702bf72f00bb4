"""Planted bugs of Ditto."""

import torch

from pflsec.algorithms.regularization.ditto import Ditto
from pflsec.core.algorithm import Done
from pflsec.core.items import Items, select
from pflsec.core.local import Local, half_squared_distance
from tests.algorithms import test_ditto as ditto
from tests.algorithms.mutants.planted import Mutant, unsquared


def _ditto(anchor_trained: bool = False, phase: str = "personal", share: float = 1.0) -> type[Ditto]:
    class Planted(Ditto):
        def local(self, ctx: Local, state: Items, down: Items) -> Done:
            v = select(state, *self.private)
            w = ctx.fit(down, on=ctx.ce) if phase == "personal" else None
            pull = half_squared_distance(share * self.cfg.lam, w if anchor_trained and w else down)
            v = ctx.fit(v, on=ctx.ce, penalty=pull, epochs=self.cfg.personal_epochs, phase=phase)
            w = ctx.fit(down, on=ctx.ce) if w is None else w
            return Done(v | {"trained": torch.tensor(True)}, w | {"num_samples": torch.tensor(ctx.num_samples)})

    return Planted


class SendsThePersonalModel(Ditto):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        done = super().local(ctx, state, down)
        return Done(done.state, done.up | select(done.state, *self.private))


class UnsquaredDitto(Ditto):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        v = select(state, *self.private)
        v = ctx.fit(v, on=ctx.ce, penalty=unsquared(self.cfg.lam, down), phase="personal")
        return Done(v | {"trained": torch.tensor(True)}, super().local(ctx, state, down).up)


MUTANTS = [
    Mutant("anchor is the trained model", Ditto, ditto.check_3_the_anchor_is_the_model_that_was_received, _ditto(True)),
    Mutant("one batch order for both", Ditto, ditto.check_1_what_is_sent_is_fedavgs, _ditto(phase="main")),
    Mutant("order matters", Ditto, ditto.check_4_the_order_of_the_two_tasks_changes_nothing, _ditto(phase="main")),
    Mutant("no pull at all", Ditto, ditto.check_3_one_personal_step_follows_the_objective, _ditto(share=0.0)),
    Mutant("norm not squared", Ditto, ditto.check_3_one_personal_step_follows_the_objective, UnsquaredDitto),
    Mutant(
        "alone, but on other batches",
        Ditto,
        ditto.check_2_without_the_pull_it_is_isolated_training,
        _ditto(phase="main"),
    ),
    Mutant("personal model is sent", Ditto, ditto.check_5_nothing_of_the_personal_model_is_sent, SendsThePersonalModel),
]
