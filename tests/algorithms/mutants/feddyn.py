"""Planted bugs of FedDyn."""

from collections.abc import Mapping

import torch

from pflsec.algorithms.traditional.feddyn import FedDyn
from pflsec.core.algorithm import Done
from pflsec.core.items import Items, combine, prefixed, select, subtract, weighted_mean, without_prefix
from pflsec.core.local import Local, Penalty, linear
from tests import toys
from tests.algorithms import test_feddyn as feddyn
from tests.algorithms.mutants.planted import Mutant, unsquared
from tests.algorithms.mutants.scaffold import commits_lost_uploads


def _penalised(pulled: bool) -> type[FedDyn]:
    """Return FedDyn with a pull whose norm is not squared, or with none: the linear term alone."""

    class Planted(FedDyn):
        def local(self, ctx: Local, state: Items, down: Items) -> Done:
            drift, alpha = without_prefix("drift", state), self.cfg.alpha
            tilt = linear(combine(lambda d: alpha * d, drift))
            pull: Penalty = unsquared(alpha, down) if pulled else lambda params, rng: tilt(params, rng) * 0
            model = ctx.fit(down, on=ctx.ce, penalty=lambda params, rng: tilt(params, rng) + pull(params, rng))
            return Done(prefixed("drift", combine(torch.add, drift, subtract(model, down))), up=model)

    return Planted


class DividesByTheCohort(FedDyn):
    """Three were asked, two arrived: the mean shrinks."""

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        shrunk = {c: combine(lambda v: v * len(ups) / 3, up) for c, up in ups.items()}
        return super().aggregate(server, shrunk)


class DualByParticipants(FedDyn):
    """The shift moves by the mean over participants, not over all clients."""

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        few = FedDyn(self.cfg, self.net, len(ups))
        return few.aggregate(server, ups)


class MeanByRows(FedDyn):
    """The participants' models are weighted by their rows, the shift is not."""

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        server = super().aggregate(server, ups)
        mean = weighted_mean([select(up, *self.shared) for up in ups.values()], [toys.TRAIN[c] for c in ups])
        return server | combine(torch.add, mean, without_prefix("drift", server)) | prefixed("mean", mean)


class ForgetsTheDual(FedDyn):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        return Done(state, super().local(ctx, state, down).up)


class SignOfTheDual(FedDyn):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        done = super().local(ctx, combine(lambda d: -d, state), down)
        moved = subtract(done.up, down)
        return Done(prefixed("drift", combine(torch.add, without_prefix("drift", state), moved)), done.up)


class ServesTheCloud(FedDyn):
    def serve(self, server: Items, client: int) -> Items:
        return select(server, *self.shared)


class ReadsTheDualAsData(FedDyn):
    def change(self, state: Items, down: Items, up: Items, lr: float, steps: int) -> Items:
        return super().change(combine(lambda d: 0 * d, state), down, up, lr, steps)


MUTANTS = [
    Mutant("norm not squared", FedDyn, feddyn.check_0_steps_follow_the_objective, _penalised(True)),
    Mutant("linear term alone", FedDyn, feddyn.check_0_steps_follow_the_objective, _penalised(False)),
    Mutant("divided by the cohort", FedDyn, feddyn.check_5_the_form_with_h_gives_the_same_models, DividesByTheCohort),
    Mutant("h by participants", FedDyn, feddyn.check_3_the_server_holds_the_mean_of_all_duals, DualByParticipants),
    Mutant("mean by rows", FedDyn, feddyn.check_5_the_form_with_h_gives_the_same_models, MeanByRows),
    Mutant("dual is not kept", FedDyn, feddyn.check_4_the_dual_is_the_sum_of_the_changes_that_arrived, ForgetsTheDual),
    Mutant("no dual at all", FedDyn, feddyn.check_6_heterogeneous_quadratics_are_solved, ForgetsTheDual),
    Mutant("sign of the dual", FedDyn, feddyn.check_6_heterogeneous_quadratics_are_solved, SignOfTheDual),
    Mutant(
        "lost uploads move the dual",
        FedDyn,
        feddyn.check_3_the_server_holds_the_mean_of_all_duals,
        patch=commits_lost_uploads,
    ),
    Mutant(
        "the cloud is tested",
        FedDyn,
        feddyn.check_the_participants_mean_is_tested_and_the_cloud_is_sent,
        ServesTheCloud,
    ),
    Mutant("dual read as data", FedDyn, feddyn.check_the_gradient_is_read_without_the_dual, ReadsTheDualAsData),
]
