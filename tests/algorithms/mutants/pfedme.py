"""Planted bugs of pFedMe."""

from collections.abc import Mapping

import torch
from torch import Tensor

from pflsec.algorithms.regularization.pfedme import PFedMe
from pflsec.core.algorithm import Done, mean_of_uploads
from pflsec.core.items import Items, combine, select
from pflsec.core.local import Local, half_squared_distance
from tests import toys
from tests.algorithms import test_pfedme as pfedme
from tests.algorithms.mutants.planted import Mutant, unsquared


class PersonalIsAnAlias(PFedMe):
    """The personal model is the working one: what is kept is what was sent."""

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        done = super().local(ctx, state, down)
        return Done(select(done.up, *self.private) | {"trained": torch.tensor(True)}, done.up)


class ForgetsThePersonalModel(PFedMe):
    """The personal model is never stored."""

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        return Done(state, super().local(ctx, state, down).up)


class MeanByRows(PFedMe):
    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        counts = {c: up | {"num_samples": torch.tensor(toys.TRAIN[c])} for c, up in ups.items()}
        return PFedMe(self.cfg.model_copy(update={"weighting": "samples"}), self.net, self.clients).aggregate(
            server, counts
        )


class TestedGlobally(PFedMe):
    def deploy(self, state: Items, down: Items) -> Items:
        return select(down, *self.shared) | {"trained": state["trained"]}


class BetaStays(PFedMe):
    """beta is taken for the share of the old model."""

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        mean = mean_of_uploads(ups, *self.shared, weighting=self.cfg.weighting)
        return combine(lambda w, new: torch.lerp(new, w, self.cfg.beta), server, mean)


class CountsOneTwice(PFedMe):
    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        first = next(iter(ups.values()))
        return super().aggregate(server, {**ups, -1: first})


class HiddenDecay(PFedMe):
    def personal(self, ctx: Local, theta: Items, w: Items, x: Tensor, y: Tensor) -> Items:
        return combine(lambda p: p * (1 - 1e-3), super().personal(ctx, theta, w, x, y))


class UnsquaredPull(PFedMe):
    def personal(self, ctx: Local, theta: Items, w: Items, x: Tensor, y: Tensor) -> Items:
        for _ in range(self.cfg.inner_steps):
            theta = ctx.step(theta, ctx.ce, x, y, penalty=unsquared(self.cfg.lam, w), lr=self.cfg.inner_lr)
        return theta


class OneLearningRate(PFedMe):
    """theta moves at the run's learning rate, whatever its own is."""

    def personal(self, ctx: Local, theta: Items, w: Items, x: Tensor, y: Tensor) -> Items:
        for _ in range(self.cfg.inner_steps):
            theta = ctx.step(theta, ctx.ce, x, y, penalty=half_squared_distance(self.cfg.lam, w))
        return theta


MUTANTS = [
    Mutant(
        "alias of the working model", PFedMe, pfedme.check_3_the_personal_model_is_the_clients_own, PersonalIsAnAlias
    ),
    Mutant("alias, seen in the log", PFedMe, pfedme.check_4_one_batch_gives_the_personal_model_away, PersonalIsAnAlias),
    Mutant(
        "personal model never stored",
        PFedMe,
        pfedme.check_0_the_two_loops_follow_the_algorithm,
        ForgetsThePersonalModel,
    ),
    Mutant("mean by rows", PFedMe, pfedme.check_2_limits_of_both_paces, MeanByRows),
    Mutant("the global model is tested", PFedMe, pfedme.check_the_personal_model_is_tested, TestedGlobally),
    Mutant("beta is what stays", PFedMe, pfedme.check_2_limits_of_both_paces, BetaStays),
    Mutant("one client counts twice", PFedMe, pfedme.check_2_limits_of_both_paces, CountsOneTwice),
    Mutant("decay unasked", PFedMe, pfedme.check_5_many_inner_steps_solve_the_inner_problem, HiddenDecay),
    Mutant("norm not squared", PFedMe, pfedme.check_5_many_inner_steps_solve_the_inner_problem, UnsquaredPull),
    Mutant(
        "one learning rate",
        PFedMe,
        pfedme.check_1_one_inner_step_on_one_batch_is_a_small_step_of_sgd,
        OneLearningRate,
    ),
]
