"""Planted bugs of MOON."""

import torch
import torch.nn.functional as F
from torch import Tensor

from pflsec.algorithms.traditional.moon import MOON
from pflsec.core.algorithm import Done
from pflsec.core.items import Items
from pflsec.core.local import Local
from tests.algorithms import test_moon as moon
from tests.algorithms.mutants.planted import Mutant
from tests.algorithms.mutants.scaffold import commits_lost_uploads


class NewcomersTakeTheInitialModel(MOON):
    def last(self, state: Items) -> list[Items]:
        return super().last(state | {"trained": state["trained"].clamp(min=1)})


class KeepsTheModelReceived(MOON):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        return Done(self.pushed(state, down), super().local(ctx, state, down).up)


class Swapped(MOON):
    """Drawn to the last model, pushed away from the one received."""

    def contrast(self, z: Tensor, near: Tensor, far: Tensor) -> Tensor:
        return super().contrast(z, far[0], near[None])


class ExponentialForm(MOON):
    def contrast(self, z: Tensor, near: Tensor, far: Tensor) -> Tensor:
        s, p = (F.cosine_similarity(z, other, -1).div(self.cfg.tau).exp() for other in (near, far))
        return -(s / (s + p.sum(0))).log()


class DotProducts(MOON):
    """Features are compared without being brought to length 1."""

    def contrast(self, z: Tensor, near: Tensor, far: Tensor) -> Tensor:
        return F.softplus(torch.logsumexp((z * far).sum(2) / self.cfg.tau, 0) - (z * near).sum(1) / self.cfg.tau)


class HoldsTheBodyStill(MOON):
    """The references are computed with a graph and the features without one."""

    def contrast(self, z: Tensor, near: Tensor, far: Tensor) -> Tensor:
        return super().contrast(z.detach(), near, far)


class OneReferenceForBoth(MOON):
    """Both references are to the same model."""

    def contrast(self, z: Tensor, near: Tensor, far: Tensor) -> Tensor:
        return super().contrast(z, far[0], far)


class ReceivedModelMovesAlong(MOON):
    """The received model is a reference to the one in training."""

    def contrast(self, z: Tensor, near: Tensor, far: Tensor) -> Tensor:
        return super().contrast(z, z.detach(), far)


class CountsBatches(MOON):
    """The weight is the number of batches."""

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        done = super().local(ctx, state, down)
        return Done(done.state, done.up | {"num_samples": torch.tensor(ctx.steps(1))})


MUTANTS = [
    Mutant(
        "newcomers are pushed too", MOON, moon.check_2_a_clients_first_round_is_fedavgs, NewcomersTakeTheInitialModel
    ),
    Mutant(
        "keeps what it received",
        MOON,
        moon.check_5_the_last_model_is_the_one_that_was_sent,
        KeepsTheModelReceived,
    ),
    Mutant(
        "keeps what never arrived",
        MOON,
        moon.check_5_the_last_model_is_the_one_that_was_sent,
        patch=commits_lost_uploads,
    ),
    Mutant("models swapped", MOON, moon.check_0_steps_follow_the_objective, Swapped),
    Mutant("received model moves along", MOON, moon.check_0_steps_follow_the_objective, ReceivedModelMovesAlong),
    Mutant("weighted by batches", MOON, moon.check_1_without_the_contrast_it_is_fedavg, CountsBatches),
    Mutant("exponentials overflow", MOON, moon.check_6_a_sharp_contrast_is_finite, ExponentialForm),
    Mutant("no cosine", MOON, moon.check_4_the_first_step_pushes_the_body_alone, DotProducts),
    Mutant("no slope", MOON, moon.check_4_the_first_step_pushes_the_body_alone, HoldsTheBodyStill),
    Mutant("always ln 2", MOON, moon.check_2_a_clients_first_round_is_fedavgs, OneReferenceForBoth),
]
