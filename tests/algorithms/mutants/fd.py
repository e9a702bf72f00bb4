"""Planted bugs of FD."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from pflsec.algorithms.knowledge_distillation import fd as module
from pflsec.algorithms.knowledge_distillation.fd import FD
from pflsec.core.algorithm import Done
from pflsec.core.items import Items
from pflsec.core.local import Local
from pflsec.training.local import cross_entropy
from tests.algorithms import test_fd as fd
from tests.algorithms.mutants.planted import Mutant


class SendsLogits(FD):
    def output(self, z: Tensor) -> Tensor:
        return z


class TeachesAClientItself(FD):
    def downlink(self, server: Items, client: int) -> Items:
        return super().downlink(server, -1)


class DividesByAllOthers(FD):
    """As if every client held every class."""

    def downlink(self, server: Items, client: int) -> Items:
        down, held = super().downlink(server, client), server["held"].clone()
        held[client] = False
        number = held.sum(0)[down["known"]]
        return down | {"teacher": down["teacher"] * (number / (self.clients - 1))[:, None]}


class TableOfThisRoundOnly(FD):
    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        return super().aggregate({k: torch.zeros_like(v) for k, v in server.items()}, ups)


class OldClassesStay(FD):
    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        new = super().aggregate(server, ups)
        return new | {"held": new["held"] | server["held"]}


class TeachesUnknownClassesUniformly(FD):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        table = torch.full((self.net.classes, self.net.classes), 1 / self.net.classes)
        table[down["known"]] = down["teacher"]
        return super().local(ctx, state, {"teacher": table, "known": torch.ones_like(down["known"])})


class PredictsAfterTraining(FD):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        settings = self.cfg.model_copy(update={"collect": "eval"})
        return FD(settings, self.net, self.clients).local(ctx, state, down)


class NeverTeaches(FD):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        none = {"teacher": down["teacher"][:0], "known": torch.zeros_like(down["known"])}
        return super().local(ctx, state, none)


class RawLogitsAsProbabilities(FD):
    """Cross entropy with the averaged logits for its target, whatever the space."""

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        table = torch.zeros(self.net.classes, self.net.classes)
        table[down["known"]] = down["teacher"]

        def loss(model: Items, x: Tensor, y: Tensor) -> Tensor:
            z = self.net.logits(model, x)
            return cross_entropy(z, y) + self.cfg.gamma * cross_entropy(z, ctx.one_hot(y) @ table)

        return Done(ctx.fit(state, on=loss), super().local(ctx, state, down).up)


def _another_loss(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "cross_entropy", lambda z, y: cross_entropy(z, y) + 0.01 * z.square().sum(1))


MUTANTS = [
    Mutant("sends logits as probabilities", FD, fd.check_2_rows_are_probability_vectors, SendsLogits),
    Mutant("own row in the teacher", FD, fd.check_4_the_teacher_leaves_its_client_out, TeachesAClientItself),
    Mutant("own row handed back", FD, fd.check_5_two_holders_teach_each_other, TeachesAClientItself),
    Mutant("divided by all others", FD, fd.check_4_the_teacher_leaves_its_client_out, DividesByAllOthers),
    Mutant("table of this round only", FD, fd.check_a_row_stays_while_its_client_is_away, TableOfThisRoundOnly),
    Mutant("classes never leave", FD, fd.check_a_row_stays_while_its_client_is_away, OldClassesStay),
    Mutant("a target without a teacher", FD, fd.check_0_one_step_follows_the_objective, TeachesUnknownClassesUniformly),
    Mutant("predicts late", FD, fd.check_what_is_sent_are_the_predictions_of_the_steps, PredictsAfterTraining),
    Mutant("never teaches", FD, fd.check_6_the_gradient_at_the_logits, NeverTeaches),
    Mutant(
        "cross entropy on raw logits",
        FD,
        fd.check_0_logits_are_compared_by_their_squared_distance,
        RawLogitsAsProbabilities,
    ),
    Mutant(
        "another loss without a teacher",
        FD,
        fd.check_3_without_the_teacher_it_is_isolated_training,
        patch=_another_loss,
    ),
]
