"""Planted bugs of FedNTD."""

from collections.abc import Mapping

import torch
from torch import Tensor

from pflsec.algorithms.traditional.fedntd import FedNTD
from pflsec.core.algorithm import Done
from pflsec.core.items import Items, combine
from pflsec.core.local import Local
from tests.algorithms import test_fedntd as fedntd
from tests.algorithms.mutants.planted import Mutant


class AlwaysTauSquared(FedNTD):
    def divergence(self, student: Tensor, teacher: Tensor, target: Tensor) -> Tensor:
        return self.cfg.tau**2 * super().divergence(student, teacher, target)


class KeepsTheTrueClass(FedNTD):
    """Plain distillation: the row's own class takes part."""

    def divergence(self, student: Tensor, teacher: Tensor, target: Tensor) -> Tensor:
        q, g = ((z / self.cfg.tau).log_softmax(1) for z in (student, teacher))
        return (g.exp() * (g - q)).sum(1)


class ForgetsToRenormalise(FedNTD):
    """The row's own class is left out of the sum alone."""

    def divergence(self, student: Tensor, teacher: Tensor, target: Tensor) -> Tensor:
        q, g = ((z / self.cfg.tau).log_softmax(1) for z in (student, teacher))
        return ((1 - target) * g.exp() * (g - q)).sum(1)


class OtherDirection(FedNTD):
    def divergence(self, student: Tensor, teacher: Tensor, target: Tensor) -> Tensor:
        return super().divergence(teacher, student, target)


class TeacherMovesAlong(FedNTD):
    """The teacher is a reference to the model in training."""

    def divergence(self, student: Tensor, teacher: Tensor, target: Tensor) -> Tensor:
        return super().divergence(student, student.detach(), target)


class TrainsTheModelReceived(FedNTD):
    """No copy is made: what was received is what is trained."""

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        done = super().local(ctx, state, down)
        for k, v in down.items():
            v.copy_(done.up[k])
        return done


class DividesByTheCohort(FedNTD):
    """Three were asked, two arrived."""

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        return combine(lambda v: v * len(ups) / 3, super().aggregate(server, ups))


class CountsBatches(FedNTD):
    """The weight is the number of whole batches."""

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        done = super().local(ctx, state, down)
        return Done(
            done.state, done.up | {"num_samples": torch.tensor(ctx.steps(1))} if "num_samples" in done.up else done.up
        )


MUTANTS = [
    Mutant("tau squared unasked", FedNTD, fedntd.check_3_the_rows_own_class_feels_nothing, AlwaysTauSquared),
    Mutant("true class kept", FedNTD, fedntd.check_3_the_rows_own_class_feels_nothing, KeepsTheTrueClass),
    Mutant(
        "true class kept, two classes", FedNTD, fedntd.check_4_two_classes_leave_nothing_to_preserve, KeepsTheTrueClass
    ),
    Mutant("not renormalised", FedNTD, fedntd.check_5_constants_are_not_seen, ForgetsToRenormalise),
    Mutant("KL turned round", FedNTD, fedntd.check_0_steps_follow_the_objective, OtherDirection),
    Mutant("teacher moves along", FedNTD, fedntd.check_2_the_first_step_is_fedavgs, TeacherMovesAlong),
    Mutant(
        "teacher is trained",
        FedNTD,
        fedntd.check_6_the_teacher_is_the_model_received_and_stands_still,
        TrainsTheModelReceived,
    ),
    Mutant("divided by the cohort", FedNTD, fedntd.check_the_mean_is_over_what_arrived, DividesByTheCohort),
    Mutant("weighted by batches", FedNTD, fedntd.check_the_mean_is_over_what_arrived, CountsBatches),
]
