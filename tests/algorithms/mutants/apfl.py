"""Planted bugs of APFL."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pflsec.algorithms.personalized_aggregation.apfl import APFL
from pflsec.core.algorithm import Done
from pflsec.core.items import Items, combine, prefixed, select
from pflsec.core.local import Local
from tests.algorithms import test_apfl as apfl
from tests.algorithms.mutants.planted import Mutant


class TrainsVOnItsOwnLoss(APFL):
    """v is trained on f(v), with no mixture and no factor a."""

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        done = super().local(ctx, state, down)
        return Done(done.state | ctx.fit(select(state, *self.private), on=ctx.ce, phase="v"), done.up)


class MixesIntoV(APFL):
    """After the round v is overwritten by the mixture."""

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        done = super().local(ctx, state, down)
        return Done(done.state | self.deploy_trained(done.state, down, done.up), done.up)


class TakesTheSharedGradientTwice(APFL):
    """w steps once more on the same data."""

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        done = super().local(ctx, state, down)
        return Done(done.state, done.up | ctx.fit(select(done.up, *self.shared), on=ctx.ce, phase="again"))


class MovesTheWeightAfterwards(APFL):
    """The weight's gradient is taken at the models after the round, and decays by 0.02, come what may."""

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        done = super().local(ctx, state, down)
        v, w, alpha = select(done.state, *self.private), select(done.up, *self.shared), state["alpha"]
        at_v, at_w = ctx.full_gradient(v, ctx.ce), ctx.full_gradient(w, ctx.ce)
        g = combine(lambda a, b: alpha * a + (1 - alpha) * b, at_v, at_w)
        slope = torch.stack([((v[k] - w[k]) * g[k]).sum() for k in w]).sum() + 0.02 * alpha
        return Done(done.state | {"alpha": (alpha - ctx.lr * slope).clamp(0, 1)}, done.up)


class LeavesTheIntervalOfTheWeight(APFL):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        done = super().local(ctx, state, down)
        end = done.state["alpha"]
        return Done(done.state | {"alpha": end + (end - state["alpha"])}, done.up)


class SharesNoBatches(APFL):
    """v sees batches of its own."""

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        list(ctx.batches())
        return super().local(ctx, state, down)


class MovesTheWeightForAnEpoch(APFL):
    """Where it should move at a round's first step alone, it moves at every one of the first epoch."""

    def local(self, ctx: Any, state: Items, down: Items) -> Done:
        if self.cfg.alpha_every == "step":
            return super().local(ctx, state, down)
        cfg = self.cfg.model_copy(update={"alpha_every": "step"})
        return APFL(cfg, self.net, self.clients).local(replace(ctx, epochs=1), state, down)


class MixesTheWrongWay(APFL):
    def mixed_logits(self, w: Items, v: Items, alpha: Tensor, x: Tensor) -> Tensor:
        return super().mixed_logits(w, v, 1 - alpha, x)


class SendsTheLocalModel(APFL):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        done = super().local(ctx, state, down)
        return Done(done.state, done.up | select(done.state, *self.private))


class UsesTheReceivedModel(APFL):
    def deploy_trained(self, state: Items, down: Items, up: Items) -> Items:
        return super().deploy(state | prefixed("own", select(down, *self.shared)), down)


MUTANTS = [
    Mutant("v on its own loss", APFL, apfl.check_3_one_step_follows_the_mixture, TrainsVOnItsOwnLoss),
    Mutant("v moves at weight 0", APFL, apfl.check_2_no_weight_on_v_leaves_it_alone, TrainsVOnItsOwnLoss),
    Mutant(
        "v overwritten by the mixture", APFL, apfl.check_5_the_local_model_is_not_replaced_by_the_mixture, MixesIntoV
    ),
    Mutant("w steps twice", APFL, apfl.check_1_what_is_sent_is_fedavgs, TakesTheSharedGradientTwice),
    Mutant("batches of its own", APFL, apfl.check_1_what_is_sent_is_fedavgs, SharesNoBatches),
    Mutant("v on other batches", APFL, apfl.check_2_all_weight_on_v_is_isolated_training, SharesNoBatches),
    Mutant("weight moved after the models", APFL, apfl.check_3_one_step_follows_the_mixture, MovesTheWeightAfterwards),
    Mutant(
        "later values in a step", APFL, apfl.check_3_all_gradients_are_taken_before_the_step, MovesTheWeightAfterwards
    ),
    Mutant("decays between equals", APFL, apfl.check_4_between_equal_models_the_weight_stays, MovesTheWeightAfterwards),
    Mutant(
        "weight not held in [0, 1]", APFL, apfl.check_4_the_weight_stays_in_its_interval, LeavesTheIntervalOfTheWeight
    ),
    Mutant("decay counted twice", APFL, apfl.check_4_decay_pulls_the_weight_down, LeavesTheIntervalOfTheWeight),
    Mutant(
        "weight moves for an epoch",
        APFL,
        apfl.check_once_a_round_the_weight_moves_at_the_first_step_alone,
        MovesTheWeightForAnEpoch,
    ),
    Mutant("a and 1 - a exchanged", APFL, apfl.check_3_one_step_follows_the_mixture, MixesTheWrongWay),
    Mutant("slope at other models", APFL, apfl.check_3_the_weights_slope_is_the_losss, MovesTheWeightAfterwards),
    Mutant("local model is sent", APFL, apfl.check_5_nothing_of_the_local_model_is_sent, SendsTheLocalModel),
    Mutant("received model in use", APFL, apfl.check_2_no_weight_on_v_leaves_it_alone, UsesTheReceivedModel),
]
