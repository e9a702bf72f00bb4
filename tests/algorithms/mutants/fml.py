"""Planted bugs of FML."""

from collections.abc import Mapping

import pytest
from torch import Tensor

from pflsec.algorithms.knowledge_distillation import fml as module
from pflsec.algorithms.knowledge_distillation.fml import FML, divergence
from pflsec.core.algorithm import Done
from pflsec.core.items import Items, weighted_mean
from pflsec.core.local import Local
from pflsec.training.local import LocalWork, cross_entropy
from tests.algorithms import test_fml as fml
from tests.algorithms.mutants.planted import Mutant


def _nothing_is_constant(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LocalWork, "constant", lambda self, value: value)


def _mean_over_classes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "divergence", lambda t, s: divergence(t, s) / t.shape[1])


def _the_other_way_round(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "divergence", lambda t, s: divergence(s, t))


class OneAfterTheOther(FML):
    """The personal model learns from the shared one as it is after the step."""

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        done = super().local(ctx, state, down)

        def loss(theta: Items, x: Tensor, y: Tensor) -> Tensor:
            z, q = self.net.logits(theta, x), self.net.logits(done.up, x).log_softmax(1)
            return self.cfg.alpha * cross_entropy(z, y) + (1 - self.cfg.alpha) * divergence(q, z.log_softmax(1))

        return Done(ctx.fit(state, on=loss), done.up)


class OneWeightForBoth(FML):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        settings = self.cfg.model_copy(update={"beta": self.cfg.alpha})
        return FML(settings, self.net, self.clients).local(ctx, state, down)


class TrainsOnOtherBatches(FML):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        return Done(ctx.fit(state, on=ctx.ce, phase="personal"), super().local(ctx, state, down).up)


class SendsThePersonalModel(FML):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        done = super().local(ctx, state, down)
        return Done(done.state, done.up | {"head.bias": done.state["head.bias"]})


class WeighsClients(FML):
    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        return weighted_mean(ups.values(), [1.0 + client for client in ups])


MUTANTS = [
    Mutant("teachers not constant", FML, fml.check_0_one_step_follows_both_objectives, patch=_nothing_is_constant),
    Mutant("losses move both models", FML, fml.check_4_a_loss_moves_its_own_model_alone, patch=_nothing_is_constant),
    Mutant("KL over classes too", FML, fml.check_0_one_step_follows_both_objectives, patch=_mean_over_classes),
    Mutant(
        "KL the other way round",
        FML,
        fml.check_2_the_wire_shows_cross_entropy_with_a_soft_label,
        patch=_the_other_way_round,
    ),
    Mutant("models in turn", FML, fml.check_0_one_step_follows_both_objectives, OneAfterTheOther),
    Mutant(
        "the weaker KL on the wire",
        FML,
        fml.check_2_the_wire_shows_cross_entropy_with_a_soft_label,
        patch=_mean_over_classes,
    ),
    Mutant(
        "models in turn, equal at first",
        FML,
        fml.check_3_equal_models_have_nothing_to_tell_each_other,
        OneAfterTheOther,
    ),
    Mutant("one weight for both", FML, fml.check_4_a_loss_moves_its_own_model_alone, OneWeightForBoth),
    Mutant(
        "alone, but on other batches",
        FML,
        fml.check_1_with_labels_alone_it_is_fedavg_and_isolated_training,
        TrainsOnOtherBatches,
    ),
    Mutant("personal item is sent", FML, fml.check_5_nothing_of_the_personal_model_is_sent, SendsThePersonalModel),
    Mutant("clients are weighted", FML, fml.check_6_the_shared_model_is_the_plain_mean, WeighsClients),
]
