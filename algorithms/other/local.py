"""Local: every client trains alone; nothing is sent in either direction. The control of every report.

Source   no paper; what a client has without any federation.
Solves   for each client alone  min over theta of  mean CE(f(x; theta), y)
Wire     down nothing | up nothing     Private   body.*, head.*
Cost     1 forward and backward per sample and epoch; not a byte on the wire.
Leaks    Nothing: no attack on the wire has anything to work on.
Limits   One client: FedAvg with one client.
Differs  A client of the cohort whose upload is lost loses its round of training, as under every other method.
"""

from collections.abc import Mapping
from typing import ClassVar

from pflsec.core.algorithm import Algorithm, Done, PrivateStart
from pflsec.core.items import Items
from pflsec.core.local import Local


class IsolatedConfig(PrivateStart):
    pass


class Isolated(Algorithm[IsolatedConfig]):
    key, shared, private = "local", (), ("body", "head")
    Config = IsolatedConfig
    down: ClassVar = {}
    up: ClassVar = {}
    dp_support = "full"
    batchnorm = "yes"
    presets: ClassVar = {"pfllib": {"private_start": "shared", "lr": 0.005, "batch_size": 10, "local_epochs": 1}}

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        return Done(state=ctx.fit(state, on=ctx.ce), up={})

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        return server
