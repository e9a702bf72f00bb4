"""Idle: sends back what it was sent. What a round of it costs is what the machinery costs.

Source   none
Solves   nothing
Wire     down body.*, head.* | up body.*, head.*     Private   nothing
"""

from collections.abc import Mapping
from typing import ClassVar

from pflsec.core.algorithm import Algorithm, Done, mean_of_uploads
from pflsec.core.config import Config
from pflsec.core.items import Items
from pflsec.core.local import Local


class Idle(Algorithm[Config]):
    key, shared, private = "idle", ("body", "head"), ()
    Config = Config
    down: ClassVar = {"body.*": "weights", "head.*": "weights"}
    up: ClassVar = {"body.*": "weights", "head.*": "weights"}

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        return Done(state, up=down)

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        return mean_of_uploads(ups, *self.shared, weighting="uniform")
