"""Planted bugs of FedPHP."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from pflsec.algorithms.personalized_aggregation import fedphp as module
from pflsec.algorithms.personalized_aggregation.fedphp import FedPHP
from pflsec.core.algorithm import Done
from pflsec.core.items import Items, combine, select
from pflsec.core.local import Local
from tests.algorithms import test_fedphp as fedphp
from tests.algorithms.mutants.planted import Mutant


class CountsTheRoundsOfTheRun(FedPHP):
    """The momentum follows the round, so that a late client inherits from the first model of all."""

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        return super().local(ctx, state | {"times": torch.tensor(ctx.round)}, down)


class TestsTheWorkingModel(FedPHP):
    def deploy(self, state: Items, down: Items) -> Items:
        return select(down, *self.shared)


class InheritsWhatItReceived(FedPHP):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        return Done(self.inherit(state, down), super().local(ctx, state, down).up)


class ExchangesTheShares(FedPHP):
    """m weighs what was trained."""

    def inherit(self, state: Items, w: Items) -> Items:
        kept, new = super().inherit(state, w), select(state, *self.private)
        return kept | combine(lambda h, a, b: a + b - h, select(kept, *self.private), w, new)


class PlainMean(FedPHP):
    """Clients count alike, whatever their rows."""

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        return super().aggregate(server, {c: up | {"num_samples": torch.tensor(1)} for c, up in ups.items()})


class LearnsFromTheTeacherAlways(FedPHP):
    """lam = 0 is taken for the default."""

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        lam = self.cfg.lam or 0.05
        other = FedPHP(self.cfg.model_copy(update={"lam": lam}), self.net, self.clients)
        return other.local(ctx, state, down)


class TeachesItself(FedPHP):
    """The teacher is the model received, not the inherited one."""

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        done = super().local(ctx, down | {"times": state["times"]}, down)
        return Done(self.inherit(state, select(done.up, *self.shared)), done.up)


class WritesIntoTheTeacher(FedPHP):
    """The running mean is taken in place."""

    def inherit(self, state: Items, w: Items) -> Items:
        kept = super().inherit(state, w)
        for name in w:
            state[name].copy_(kept[name])
        return kept


def _fixed_widths(patch: pytest.MonkeyPatch) -> None:
    def fixed(ctx: Local, a: Tensor, b: Tensor) -> Tensor:
        return fedphp.squared_mmd(a, b, [10.0, 15.0, 20.0, 50.0])

    patch.setattr(module, "mmd", fixed)


def _moving_widths(patch: pytest.MonkeyPatch) -> None:
    class Moving:
        @staticmethod
        def constant(value: Tensor) -> Tensor:
            return value

    kept = module.mmd
    patch.setattr(module, "mmd", lambda ctx, a, b: kept(Moving, a, b))  # type: ignore[arg-type]


def _head_in_the_teaching(patch: pytest.MonkeyPatch) -> None:
    """The teacher's term reaches the head: it looks at outputs where features belong."""
    kept = FedPHP.local

    def local(self: FedPHP, ctx: Local, state: Items, down: Items) -> Done:
        outputs = FedPHP(self.cfg.model_copy(update={"teacher": "kd"}), self.net, self.clients)
        return kept(outputs, ctx, state, down)

    patch.setattr(FedPHP, "local", local)


MUTANTS = [
    Mutant(
        "rounds of the run counted", FedPHP, fedphp.check_2_the_first_model_is_inherited_whole, CountsTheRoundsOfTheRun
    ),
    Mutant("counter astray", FedPHP, fedphp.check_3_the_log_tells_the_inherited_model, CountsTheRoundsOfTheRun),
    Mutant("working model tested", FedPHP, fedphp.check_the_inherited_model_is_tested, TestsTheWorkingModel),
    Mutant("received model inherited", FedPHP, fedphp.check_5_the_teacher_stands_still, InheritsWhatItReceived),
    Mutant("shares exchanged", FedPHP, fedphp.check_3_the_log_tells_the_inherited_model, ExchangesTheShares),
    Mutant("teacher written to", FedPHP, fedphp.check_5_the_teacher_stands_still, WritesIntoTheTeacher),
    Mutant(
        "teacher at lam 0",
        FedPHP,
        fedphp.check_1_without_a_teacher_what_is_sent_is_fedavgs,
        LearnsFromTheTeacherAlways,
    ),
    Mutant("plain mean", FedPHP, fedphp.check_1_without_a_teacher_what_is_sent_is_fedavgs, PlainMean),
    Mutant("taught by itself", FedPHP, fedphp.check_0_steps_follow_the_objective, TeachesItself),
    Mutant("taught by its own outputs", FedPHP, fedphp.check_0_outputs_follow_softened_ones, TeachesItself),
    Mutant("fixed widths", FedPHP, fedphp.check_0_steps_follow_the_objective, patch=_fixed_widths),
    Mutant("widths have a slope", FedPHP, fedphp.check_0_steps_follow_the_objective, patch=_moving_widths),
    Mutant(
        "teacher reaches the head",
        FedPHP,
        fedphp.check_4_the_head_shows_its_share_of_fedavgs_gradient,
        patch=_head_in_the_teaching,
    ),
]
