"""Planted bugs of FedLC."""

from collections.abc import Mapping

import torch
from torch import Tensor

from pflsec.algorithms.traditional.fedlc import FedLC
from pflsec.core.algorithm import Done
from pflsec.core.items import Items
from pflsec.core.local import Local
from tests.algorithms import test_fedlc as fedlc
from tests.algorithms.mutants.planted import Mutant


class AddsTheMargin(FedLC):
    """The frequent classes get the larger margin."""

    def calibrated(self, logits: Tensor, target: Tensor, counts: Tensor) -> Tensor:
        held = counts > 0
        margin = torch.where(held, counts.clamp(min=1) ** (-1 / 4), 0)
        return super().calibrated(logits + 2 * self.cfg.tau * margin, target, counts)


class OneMarginForAll(FedLC):
    """Everybody is calibrated by the counts of all clients, which are balanced."""

    def calibrated(self, logits: Tensor, target: Tensor, counts: Tensor) -> Tensor:
        return super().calibrated(logits, target, torch.full_like(counts, 500.0))


class CountsWholeBatches(FedLC):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        whole = ctx.num_samples // 4 * 4
        first = {"counts": ctx.one_hot(ctx.targets()[:whole]).sum(0), "counted": torch.tensor(True)}
        return super().local(ctx, state if state["counted"] else first, down)


class CountsTheBatchAtHand(FedLC):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        return super().local(ctx, state | {"counted": torch.tensor(False)}, down)


class CountsMissingAsOne(FedLC):
    """A missing class keeps its place in the softmax, with the margin of one row."""

    def calibrated(self, logits: Tensor, target: Tensor, counts: Tensor) -> Tensor:
        return super().calibrated(logits, target, counts.clamp(min=1))


class InfiniteMargins(FedLC):
    """A missing class is left to its margin, 0^(-1/4): nothing times infinity."""

    def calibrated(self, logits: Tensor, target: Tensor, counts: Tensor) -> Tensor:
        return -(target * (logits - self.cfg.tau * counts ** (-1 / 4)).log_softmax(1)).sum(1)


class RawExponentials(FedLC):
    def calibrated(self, logits: Tensor, target: Tensor, counts: Tensor) -> Tensor:
        e = (logits - self.cfg.tau * counts.clamp(min=1e-8) ** (-1 / 4)).exp()
        rest = e.sum(1) if self.cfg.denominator == "all" else (e * (1 - target)).sum(1)
        return -((e * target).sum(1) / rest).log()


class PlainMean(FedLC):
    """Clients count alike, whatever their rows."""

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        return super().aggregate(server, {c: up | {"num_samples": torch.tensor(1)} for c, up in ups.items()})


class MasksWithoutMargins(FedLC):
    """tau = 0 still takes missing classes out."""

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        own = state["counts"] if state["counted"] else ctx.one_hot(ctx.targets()).sum(0)
        work = ctx.fit(
            {k: down[k] for k in self.net.shapes},
            on=lambda m, x, y: self.calibrated(self.net.logits(m, x), ctx.one_hot(y), own),
        )
        return Done({"counts": own, "counted": torch.tensor(True)}, super().local(ctx, state, down).up | work)


class PredictsWithMargins(FedLC):
    def deploy(self, state: Items, down: Items) -> Items:
        return super().deploy(state, down) | {"margin": self.cfg.tau * state["counts"].clamp(min=1) ** (-1 / 4)}

    def scores(self, items: Items, x: Tensor) -> Tensor:
        return super().scores(items, x) - items["margin"]


MUTANTS = [
    Mutant("sign of the margin", FedLC, fedlc.check_0_one_step_follows_the_objective, AddsTheMargin),
    Mutant("everybody's counts", FedLC, fedlc.check_5_margins_are_the_clients_own_and_stay_with_it, OneMarginForAll),
    Mutant("counts whole batches", FedLC, fedlc.check_5_all_rows_are_counted_once, CountsWholeBatches),
    Mutant("counts the batch at hand", FedLC, fedlc.check_5_all_rows_are_counted_once, CountsTheBatchAtHand),
    Mutant("no mask", FedLC, fedlc.check_3_the_rows_of_a_missing_class_stand_still, CountsMissingAsOne),
    Mutant("infinite margins", FedLC, fedlc.check_0_one_step_follows_the_objective, InfiniteMargins),
    Mutant("raw exponentials", FedLC, fedlc.check_large_logits_stay_finite, RawExponentials),
    Mutant("plain mean", FedLC, fedlc.check_1_without_margins_it_is_fedavg, PlainMean),
    Mutant("mask without margins", FedLC, fedlc.check_1_without_margins_it_is_fedavg, MasksWithoutMargins),
    Mutant("margins in use", FedLC, fedlc.check_6_the_model_is_used_without_margins, PredictsWithMargins),
]
