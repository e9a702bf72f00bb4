"""Planted bugs of SCAFFOLD."""

from collections.abc import Mapping
from typing import Any

import pytest

from pflsec.algorithms.traditional.scaffold import Scaffold
from pflsec.core.algorithm import Done
from pflsec.core.items import Items, combine, prefixed
from pflsec.core.local import Local
from pflsec.runtime.rounds import Federated
from tests.algorithms import test_scaffold as scaffold
from tests.algorithms.mutants.planted import Mutant


class DividesByTheCohort(Scaffold):
    """Three were asked, two arrived."""

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        shrunk = {
            c: {k: v * len(ups) / 3 if k.startswith("delta.") else v for k, v in up.items()} for c, up in ups.items()
        }
        return super().aggregate(server, shrunk)


class ControlByParticipants(Scaffold):
    """c moves by the mean over participants, not over all clients."""

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        grown = {
            c: {k: v * self.clients / len(ups) if k.startswith("control.") else v for k, v in up.items()}
            for c, up in ups.items()
        }
        return super().aggregate(server, grown)


class NeverKeepsItsControl(Scaffold):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        return Done(state, super().local(ctx, state, down).up)


class InitialLearningRate(Scaffold):
    """Option II divides by the first round's rate although the rate decays."""

    def _control_change(self, ctx: Local, x: Items, y: Items, c: Items, c_i: Items) -> Items:
        return combine(lambda x, y, c: (x - y) / (ctx.steps() * 0.1) - c, x, y, c)


class EpochsForSteps(Scaffold):
    """Option II divides by the number of epochs."""

    def _control_change(self, ctx: Local, x: Items, y: Items, c: Items, c_i: Items) -> Items:
        return combine(lambda x, y, c: (x - y) / (ctx.epochs * ctx.lr) - c, x, y, c)


class StartsWithTheWeights(Scaffold):
    def init_server(self, fresh: Items) -> Items:
        return fresh | prefixed("control", fresh)


def commits_lost_uploads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client whose upload is lost keeps the state that its work left, as if it had arrived."""
    whole = Federated.advance

    def advance(self: Federated) -> Any:
        t, before = self.t, dict(self.states)
        server = self.server
        metrics, rows = whole(self)
        for c in metrics["lost"]:
            down = self.setup.algorithm.downlink(server, c)
            context = scaffold.toys.context(self.setup, t, c)
            self.states[c] = self.setup.algorithm.local(context, before[c], down).state
        return metrics, rows

    monkeypatch.setattr(Federated, "advance", advance)


MUTANTS = [
    Mutant(
        "divided by the cohort",
        Scaffold,
        scaffold.check_the_model_moves_by_the_mean_of_what_arrived,
        DividesByTheCohort,
    ),
    Mutant(
        "c by participants",
        Scaffold,
        scaffold.check_3_the_server_holds_the_mean_of_all_control_variates,
        ControlByParticipants,
    ),
    Mutant("c_i never kept", Scaffold, scaffold.check_5_the_log_gives_the_state_away, NeverKeepsItsControl),
    Mutant(
        "c_i kept although the upload is lost",
        Scaffold,
        scaffold.check_6_a_lost_upload_leaves_both_control_variates,
        patch=commits_lost_uploads,
    ),
    Mutant(
        "c is no mean after a loss",
        Scaffold,
        scaffold.check_3_the_server_holds_the_mean_of_all_control_variates,
        patch=commits_lost_uploads,
    ),
    Mutant(
        "initial learning rate", Scaffold, scaffold.check_2_option_ii_keeps_the_mean_raw_gradient, InitialLearningRate
    ),
    Mutant("epochs for steps", Scaffold, scaffold.check_2_option_ii_keeps_the_mean_raw_gradient, EpochsForSteps),
    Mutant("c starts with the weights", Scaffold, scaffold.check_1_the_first_round_is_fedavgs, StartsWithTheWeights),
]
