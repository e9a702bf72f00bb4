"""Planted bugs of isolated training."""

from collections.abc import Mapping
from typing import ClassVar

from pflsec.algorithms.other.local import Isolated
from pflsec.core.algorithm import Done, mean_of_uploads
from pflsec.core.items import Items
from pflsec.core.local import Local
from tests.algorithms import test_local as local
from tests.algorithms.mutants.planted import Mutant


class StartsAnew(Isolated):
    """Every round begins with the same draw."""

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        return Done(ctx.fit(self.net.fresh(0), on=ctx.ce), up={})


class HandsModelsRound(Isolated):
    """A server that is said to do nothing averages."""

    down: ClassVar = {"body.*": "weights", "head.*": "weights"}
    up: ClassVar = {"body.*": "weights", "head.*": "weights"}

    def init_server(self, fresh: Items) -> Items:
        return fresh

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        model = ctx.fit(down, on=ctx.ce)
        return Done(model, up=model)

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        return mean_of_uploads(ups, "body", "head", weighting="uniform")


MUTANTS = [
    Mutant("starts anew", Isolated, local.check_each_client_trains_on_from_where_it_was, StartsAnew),
    Mutant("not alone", Isolated, local.check_a_client_does_not_know_the_others, HandsModelsRound),
    Mutant("not silent", Isolated, local.check_nothing_is_on_the_wire, HandsModelsRound),
]
