"""Planted bugs of APPLE."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from pflsec.algorithms.personalized_aggregation.apple import APPLE
from pflsec.core.algorithm import Done
from pflsec.core.items import Items, combine, select
from pflsec.core.local import Local
from tests.algorithms import test_apple as apple
from tests.algorithms.mutants.planted import Mutant


class WritesIntoTheSharedBank(APPLE):
    """The trained core goes into the list that later clients of the round see."""

    def downlink(self, server: Items, client: int) -> Items:
        self._server = server
        return super().downlink(server, client)

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        done = super().local(ctx, state, down)
        for name, value in select(done.up, "body", "head").items():
            self._server[f"core.{name}"][ctx.client] = value
        return done


class UploadsTheMixture(APPLE):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        done = super().local(ctx, state, down)
        return Done(done.state, done.up | self.deploy(done.state, down))


class AveragesTheSlopeOfTheShares(APPLE):
    """The mean over parameters where the inner product belongs."""

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        done = super().local(ctx, state, down)
        size = sum(v.numel() for v in select(state, "body", "head").values())
        return Done(done.state | {"p": state["p"] + (done.state["p"] - state["p"]) / size}, done.up)


class MovesTheShareByTheNewCore(APPLE):
    """The own share's slope is taken at the core after its step."""

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        done = super().local(ctx, state, down)
        i = int(down["client"])
        g = {k: (state[k] - v) / (ctx.lr * state["p"][i]) for k, v in select(done.up, "body", "head").items()}
        late = torch.stack([(g[k] * (done.up[k] - state[k])).sum() for k in g]).sum()
        return Done(
            done.state | {"p": done.state["p"] - ctx.lr * self.cfg.p_pace * late * torch.eye(self.clients)[i]}, done.up
        )


class MultipliesTheLearningRate(APPLE):
    """The cores' learning rate is multiplied by the number of clients."""

    def local(self, ctx: Any, state: Items, down: Items) -> Done:
        own = super().local(replace(ctx, lr=ctx.lr * self.clients), state, down)
        return Done(own.state | {"p": super().local(ctx, state, down).state["p"]}, own.up)


class StartsAtEqualShares(APPLE):
    def enrol(self, server: Items, sizes: Sequence[int]) -> Items:
        return server


class FadesARoundLate(APPLE):
    def fading(self, t: int) -> float:
        return super().fading(max(t - 1, 0))


class PullsTwice(APPLE):
    """The penalty lacks its half."""

    def fading(self, t: int) -> float:
        return 2 * super().fading(t)


class KeepsTheMixture(APPLE):
    """The mixture is made once a round: later steps take their slopes at the first one."""

    def local(self, ctx: Any, state: Items, down: Items) -> Done:
        totals: list[Items] = []
        for x, y in ctx.batches():
            part = replace(ctx, x=x, y=y, batch_size=len(y), epochs=1, losses=[], _used={})
            done = super().local(part, state, down)
            totals.append(combine(torch.sub, done.state, state))
        moved = {k: v + torch.stack([t[k] for t in totals]).sum(0) for k, v in state.items()}
        return Done(moved, select(moved, "body", "head"))


class TestsTheCore(APPLE):
    def deploy_trained(self, state: Items, down: Items, up: Items) -> Items:
        return select(up, "body", "head")


class ForgetsItsShare(APPLE):
    """The core moves by the whole gradient."""

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        done, share = super().local(ctx, state, down), state["p"][int(down["client"])]
        core = {k: state[k] + (v - state[k]) / share for k, v in select(done.up, "body", "head").items()}
        return Done(done.state | core, done.up | core)


class NeverKnowsTheShares(APPLE):
    """The shares count as hidden in the first round too."""

    def reconstruct_state(self, memory: Items) -> Items:
        return {k: v for k, v in memory.items() if k != "p"}


class TakesTheFirstSharesForever(APPLE):
    def observe(self, memory: Items, down: Items, up: Items) -> Items:
        return super().observe(memory, down, up) | {"p": memory["p"]}


class MovesSharesAtPace0(APPLE):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        moving = APPLE(self.cfg.model_copy(update={"p_pace": self.cfg.p_pace or 0.1}), self.net, self.clients)
        return moving.local(ctx, state, down)


MUTANTS = [
    Mutant("bank written to", APPLE, apple.check_3_the_order_of_clients_changes_nothing, WritesIntoTheSharedBank),
    Mutant("mixture uploaded", APPLE, apple.check_4_the_core_is_uploaded_and_nobody_elses_moves, UploadsTheMixture),
    Mutant("mean for inner product", APPLE, apple.check_2_a_shares_slope_is_the_losss, AveragesTheSlopeOfTheShares),
    Mutant("mean, seen by the server", APPLE, apple.check_5_the_server_follows_the_shares, AveragesTheSlopeOfTheShares),
    Mutant("slope at the new core", APPLE, apple.check_2_one_step_follows_the_objective, MovesTheShareByTheNewCore),
    Mutant(
        "learning rate times N", APPLE, apple.check_1_one_share_of_1_is_isolated_training, MultipliesTheLearningRate
    ),
    Mutant("equal shares", APPLE, apple.check_7_shares_start_at_the_rows_and_are_not_sent, StartsAtEqualShares),
    Mutant("fades a round late", APPLE, apple.check_6_the_pull_fades, FadesARoundLate),
    Mutant("pulls twice", APPLE, apple.check_6_a_strong_pull_holds_the_shares, PullsTwice),
    Mutant("mixture kept for a round", APPLE, apple.check_2_later_steps_use_the_new_mixture, KeepsTheMixture),
    Mutant("core tested", APPLE, apple.check_the_new_mixture_is_tested, TestsTheCore),
    Mutant("whole gradient", APPLE, apple.check_2_one_step_follows_the_objective, ForgetsItsShare),
    Mutant("shares never known", APPLE, apple.check_5_the_log_gives_the_shares_until_they_move, NeverKnowsTheShares),
    Mutant(
        "shares taken for the first",
        APPLE,
        apple.check_5_the_log_gives_the_shares_until_they_move,
        TakesTheFirstSharesForever,
    ),
    Mutant("shares move at pace 0", APPLE, apple.check_1_at_pace_0_the_shares_stay, MovesSharesAtPace0),
]
