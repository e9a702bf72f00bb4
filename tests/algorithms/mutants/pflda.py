"""Planted bugs of PFL-DA."""

from collections.abc import Mapping

import torch
from torch import Tensor

from pflsec.algorithms.model_splitting.pflda import PFLDA
from pflsec.core.algorithm import mean_of_uploads
from pflsec.core.items import Items, select
from pflsec.core.local import Local
from tests.algorithms import test_pflda as pflda
from tests.algorithms.mutants.planted import Mutant, unsquared


def _pflda(anchor: str = "received", features: str = "new", pull: str = "squared", joint: bool = False) -> type[PFLDA]:
    class Planted(PFLDA):
        def interleaved(self, ctx: Local, body: Items, received: Items, head: Items) -> tuple[Items, Items, Items]:
            lam = self.cfg.lam if self.cfg.personal_head == "quadratic" else 0.0
            model: Items = body | received
            for x, y in ctx.batches():
                old: Items = model
                fixed: Items = head

                def shared(model: Items, x: Tensor, y: Tensor, fixed: Items = fixed) -> Tensor:
                    own = ctx.head_ce(fixed, self.net.features(model, x), y) if joint else 0
                    return ctx.ce(model, x, y) + own

                model = ctx.step(model, shared, x, y)
                near: Items = select(model, "head") if anchor == "trained" else received

                def personal(head: Items, z: Tensor, y: Tensor, near: Items = near) -> Tensor:
                    seen = {k: v.detach() for k, v in head.items()} if pull == "inert" else head
                    far = unsquared(2 * lam, near) if pull == "unsquared" else None
                    square = torch.stack([(seen[k] - g).square().sum() for k, g in near.items()]).sum()
                    return ctx.head_ce(head, z, y) + (far(head, ctx.rng("x")) if far else lam / 2 * square)

                z = self.net.features(model if features == "new" else old, x)
                head = self.pulled(ctx.step(head, personal, z, y, phase="head"), received)
            return select(model, "body"), select(model, "head"), head

    return Planted


class WeighsBySamples(PFLDA):
    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        counted = {c: up | {"num_samples": torch.tensor(pflda.toys.TRAIN[c])} for c, up in ups.items()}
        return mean_of_uploads(counted, "head", weighting="samples")


class SharedHeadIsTested(PFLDA):
    def deploy(self, state: Items, down: Items) -> Items:
        return select(state, "body") | down


class SendsThePersonalHead(PFLDA):
    def interleaved(self, ctx: Local, body: Items, received: Items, head: Items) -> tuple[Items, Items, Items]:
        body, _, head = super().interleaved(ctx, body, received, head)
        return body, head, head


class HeadIsNeverPinned(PFLDA):
    def pulled(self, head: Items, received: Items) -> Items:
        return head


MUTANTS = [
    Mutant("pull without gradient", PFLDA, pflda.check_0_steps_follow_the_objective, _pflda(pull="inert")),
    Mutant("norm not squared", PFLDA, pflda.check_0_steps_follow_the_objective, _pflda(pull="unsquared")),
    Mutant("features of the old body", PFLDA, pflda.check_0_steps_follow_the_objective, _pflda(features="old")),
    Mutant("anchor is the trained head", PFLDA, pflda.check_0_steps_follow_the_objective, _pflda("trained")),
    Mutant("body also serves the personal head", PFLDA, pflda.check_4_either_step_leaves_the_others_items_alone,
           _pflda(joint=True)),
    Mutant("upload knows the personal head", PFLDA, pflda.check_1_what_is_sent_does_not_know_the_personal_head,
           _pflda(joint=True)),
    Mutant("personal head is sent", PFLDA, pflda.check_2_a_head_crosses_the_wire_and_nothing_else, SendsThePersonalHead),
    Mutant("no pull after a step", PFLDA, pflda.check_3_the_pull_has_its_two_limits, HeadIsNeverPinned),
    Mutant("sample weights", PFLDA, pflda.check_the_mean_is_plain, WeighsBySamples),
    Mutant("shared head is tested", PFLDA, pflda.check_the_tested_model_is_personal, SharedHeadIsTested),
]  # fmt: skip
