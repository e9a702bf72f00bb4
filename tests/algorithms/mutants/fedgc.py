"""Planted bugs of FedGC."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from pflsec.algorithms.model_splitting.fedgc import FedGC
from pflsec.core.algorithm import Done
from pflsec.core.items import Items, select
from pflsec.core.local import Local
from pflsec.runtime.setup import Setup
from tests.algorithms import test_fedgc as fedgc
from tests.algorithms.mutants.planted import Mutant


def _pushes(own_client: bool = False, same_class: bool = False, raw: bool = False, full: bool = False) -> type[FedGC]:
    """Return FedGC with other negatives, with exponentials as they are, or with the own term."""

    class Planted(FedGC):
        def slope(self, rows: Tensor, who: Tensor, what: Tensor, held: Tensor) -> Tensor:
            foreign = ((who[:, None] != who) | own_client) & ((what[:, None] != what) | same_class)
            foreign &= ~torch.eye(len(rows), dtype=torch.bool)
            scores = torch.cat(
                [(rows * rows).sum(1, keepdim=True), (rows @ rows.T).masked_fill(~foreign, -torch.inf)], 1
            )
            p = scores.exp() / scores.exp().sum(1, keepdim=True) if raw else scores.softmax(1)
            return p[:, 1:].T @ rows - full * (1 - p[:, :1]) * rows

    return Planted


class SkipsTheAbsent(FedGC):
    """Only the rows of this round's participants are corrected."""

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        after = super().aggregate(server, ups)
        here = torch.tensor([c in ups for c in range(self.clients)])
        return after | {"table": torch.where(here[:, None, None], after["table"], server["table"])}


class SendsEverybodysRows(FedGC):
    """A class that the client lacks comes with another client's row."""

    def downlink(self, server: Items, client: int) -> Items:
        held = server["held"].any(0)
        first = server["held"].int().argmax(0)
        mine = server["held"][client]
        table = torch.where(mine[:, None], server["table"][client], server["table"][first, torch.arange(len(first))])
        rows = {"embedding": table[held], "held": held} if mine.any() else {}
        return select(server, "body") | rows


class AveragesTheRows(FedGC):
    """One row for each class, as in FedAvg."""

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        after = super().aggregate(server, ups)
        held = after["held"][..., None]
        mean = (after["table"] * held).sum(0) / held.sum(0).clamp(min=1)
        return after | {"table": torch.where(held, mean, 0)}


class PredictsAnything(FedGC):
    def scores(self, items: Items, x: Tensor) -> Tensor:
        return self.net.features(items, x) @ items["table"].T


class KnowsTheClassesOfWholeBatches(FedGC):
    """Batches of four; a class that is only in the last short one counts as not held."""

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        seen = ctx.one_hot(ctx.targets())[: max(4, ctx.num_samples // 4 * 4)].sum(0) > 0
        if "held" in down:
            return super().local(ctx, state, down)
        done = super().local(ctx, state, down | {"held": seen, "embedding": state["table"][seen]})
        return Done(done.state, done.up | {"held": seen})


class SendsTheClassSetEveryTime(FedGC):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        done = super().local(ctx, state, down)
        return Done(done.state, done.up | select(down, "held"))


def _one_draw_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Setup, "client_fresh", lambda setup, client: setup.server_fresh)


MUTANTS = [
    Mutant("exponentials overflow", FedGC, fedgc.check_6_long_rows_overflow_nowhere, _pushes(raw=True)),
    Mutant("own term is full", FedGC, fedgc.check_3_the_closed_form_of_two_rows, _pushes(full=True)),
    Mutant("own rows are negatives", FedGC, fedgc.check_3_the_correction_is_a_step_on_reg, _pushes(own_client=True)),
    Mutant("own rows push a lonely client", FedGC, fedgc.check_5_without_negatives_the_server_does_nothing,
           _pushes(own_client=True)),
    Mutant("same class is a negative", FedGC, fedgc.check_3_the_correction_is_a_step_on_reg, _pushes(same_class=True)),
    Mutant("absent clients are left out", FedGC, fedgc.check_rows_of_absent_clients_are_corrected_too, SkipsTheAbsent),
    Mutant("foreign rows are sent", FedGC, fedgc.check_2_a_client_receives_its_own_rows_alone, SendsEverybodysRows),
    Mutant("one row a class", FedGC, fedgc.check_1_without_correction_the_server_keeps_what_it_got, AveragesTheRows),
    Mutant("unknown classes are predicted", FedGC, fedgc.check_a_class_that_a_client_lacks_is_never_predicted,
           PredictsAnything),
    Mutant("classes of whole batches", FedGC, fedgc.check_2_the_class_set_is_of_all_rows, KnowsTheClassesOfWholeBatches),
    Mutant("class set every time", FedGC, fedgc.check_2_the_class_set_is_sent_until_it_has_arrived,
           SendsTheClassSetEveryTime),
    Mutant("rows start equal", FedGC, fedgc.check_rows_start_apart, patch=_one_draw_for_all),
]  # fmt: skip
