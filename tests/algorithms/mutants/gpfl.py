"""Planted bugs of GPFL."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from pflsec.algorithms.model_splitting import gpfl as module
from pflsec.algorithms.model_splitting.gpfl import COMMON, GPFL, unit
from pflsec.core.algorithm import Done, mean_of_uploads, sample_count
from pflsec.core.items import Items, select
from pflsec.core.local import Local, paced
from pflsec.training.local import cross_entropy
from tests.algorithms import test_gpfl as gpfl
from tests.algorithms.mutants.planted import Mutant


def _gpfl(
    live_inputs: bool = False, live_targets: bool = False, first_rate: bool = False, decays: tuple[str, ...] = COMMON
) -> type[GPFL]:
    class Planted(GPFL):
        def local(self, ctx: Local, state: Items, down: Items) -> Done:
            shares = ctx.one_hot(ctx.targets()).mean(0)

            def loss(model: Items, x: Tensor, y: Tensor) -> Tensor:
                pace = 0.1 / ctx.lr if first_rate else 1.0
                model = model | {k: paced(ctx, v, pace) for k, v in select(model, *COMMON).items()}
                e, target = model["embedding"], ctx.one_hot(y)
                inputs, anchors = (e if live else down["embedding"] for live in (live_inputs, live_targets))
                z = self.net.features(model, x)
                common = module.valve(model, z, inputs.mean(0))
                own = ctx.head_ce(model, module.valve(model, z, shares @ inputs), y)
                angle = cross_entropy(unit(common) @ unit(e).T, y)
                return own + angle + self.cfg.lam * self.length(common - target @ anchors)

            def decay(model: Items, rng: torch.Generator) -> Tensor:
                return self.cfg.mu / 2 * torch.stack([w.square().sum() for w in select(model, *decays).values()]).sum()

            model = ctx.fit(down | select(state, "head"), on=loss, penalty=decay)
            sent = select(model, "body", *COMMON) | sample_count(ctx)
            return Done(select(model, "head") | {"label_shares": shares}, sent)

    return Planted


class OneNormOfTheBatch(GPFL):
    def length(self, off: Tensor) -> Tensor:
        return off.square().sum().sqrt().expand(len(off))


class SharesOfWholeBatches(GPFL):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        done = super().local(ctx, state, down)
        y = ctx.targets()
        whole = ctx.one_hot(y[: len(y) // 4 * 4]).mean(0)
        return Done(done.state | {"label_shares": whole}, done.up)


class SendsTheHead(GPFL):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        done = super().local(ctx, state, down)
        return Done(done.state, done.up | {"embedding": done.state["head.weight"]})


class PlainMean(GPFL):
    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        valves = mean_of_uploads(ups, "valve", weighting="uniform")
        return super().aggregate(server, ups) | valves


class DecayIsTakenForGradient(GPFL):
    def change(self, state: Items, down: Items, up: Items, lr: float, steps: int) -> Items:
        return super(GPFL, self).change(state, down, up, lr, steps)


class OldEmbeddingsAsk(GPFL):
    def deploy(self, state: Items, down: Items) -> Items:
        return down | state | {"embedding": torch.zeros_like(down["embedding"])}


def _zeros_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    real = module.valve
    monkeypatch.setattr(module, "valve", lambda model, z, u: real(model, z, torch.zeros_like(u)))


MUTANTS = [
    Mutant("conditional inputs of zeros", GPFL, gpfl.check_0_three_steps_follow_the_objective, patch=_zeros_ask),
    Mutant("inputs move within the round", GPFL, gpfl.check_0_three_steps_follow_the_objective, _gpfl(True)),
    Mutant(
        "embeddings and valve keep the first rate",
        GPFL,
        gpfl.check_0_three_steps_follow_the_objective,
        _gpfl(first_rate=True),
    ),
    Mutant("norm of the whole batch", GPFL, gpfl.check_0_three_steps_follow_the_objective, OneNormOfTheBatch),
    Mutant("decay of everything", GPFL, gpfl.check_0_three_steps_follow_the_objective, _gpfl(decays=("body", *COMMON))),
    Mutant("head is sent", GPFL, gpfl.check_1_the_head_stays_at_home, SendsTheHead),
    Mutant("inputs move, so the valve does", GPFL, gpfl.check_2_the_valve_moves_in_two_directions_only, _gpfl(True)),
    Mutant(
        "pull moves the embeddings",
        GPFL,
        gpfl.check_3_the_pull_on_lengths_does_not_move_the_embeddings,
        _gpfl(live_targets=True),
    ),
    Mutant("last rows are not counted", GPFL, gpfl.check_4_label_shares_are_of_all_rows, SharesOfWholeBatches),
    Mutant("plain mean of the valves", GPFL, gpfl.check_5_the_means_are_by_samples, PlainMean),
    Mutant("old embeddings ask", GPFL, gpfl.check_the_tested_model_asks_with_its_own_shares, OldEmbeddingsAsk),
    Mutant(
        "decay taken for gradient",
        GPFL,
        gpfl.check_a_capture_shows_gradients_without_the_decay,
        DecayIsTakenForGradient,
    ),
]
