"""SCAFFOLD: local steps are corrected by control variates, so that clients do not drift apart.

Source   Karimireddy et al., ICML 2020, arXiv 1910.06378, Algorithm 1.
Solves   the problem of FedAvg with equal client weights; local step  y <- y - lr (g_i(y) + c - c_i)
Wire     down body.*, head.*, control.* | up delta.*, control.* (the change of c_i)     Private   c_i, seemingly
Cost     FedAvg and one vector operation a step; twice the bytes in each direction; one model of memory per client.
Leaks    The log gives c_i away (it is the sum of the changes sent), and with it the raw mean gradient, learning rate or
         not. Option I sends the gradient over all of the client's data.
Limits   First round (c = c_i = 0): the upload of FedAvg.
Differs  option: paper's experiments II, PFLlib II.  server_lr: 1 in both.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch

from pflsec.core.algorithm import Algorithm, Done
from pflsec.core.config import Config, above, option
from pflsec.core.items import Items, combine, prefixed, select, subtract, weighted_mean, without_prefix
from pflsec.core.local import Local, linear


class ScaffoldConfig(Config):
    option: Literal["I", "II"] = option(
        default="II",
        about="II: c_i is the mean gradient along the path; I: the full gradient at the downlink",
        paper="II",
    )
    server_lr: float = above(0, default=1.0, about="step size of the server", paper=1.0, pfllib=1.0)


class Scaffold(Algorithm[ScaffoldConfig]):
    key, shared, private = "scaffold", ("body", "head"), ()
    Config = ScaffoldConfig
    down: ClassVar = {"body.*": "weights", "head.*": "weights", "control.*": "control variate"}
    up: ClassVar = {"delta.*": "weights-delta", "control.*": "control variate"}
    dp_support = "full"
    batchnorm = "no: control variates and server steps are made for weights, which gradients move"
    presets: ClassVar = {"pfllib": {"lr": 0.005, "batch_size": 10, "local_epochs": 1}}

    def init_server(self, fresh: Items) -> Items:
        return fresh | prefixed("control", combine(torch.zeros_like, fresh))

    def init_client(self, fresh: Items, server: Items) -> Items:
        return select(server, "control")

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        x, c, c_i = select(down, *self.shared), without_prefix("control", down), without_prefix("control", state)
        y = ctx.fit(x, on=ctx.ce, penalty=linear(subtract(c, c_i)))
        change = self._control_change(ctx, x, y, c, c_i)
        return Done(
            state=prefixed("control", combine(torch.add, c_i, change)),  # the server adds up the same numbers
            up=prefixed("delta", subtract(y, x)) | prefixed("control", change),
        )

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        mean = weighted_mean(ups.values(), [1.0] * len(ups))
        share = len(ups) / self.clients
        x = combine(
            lambda x, d: x + self.cfg.server_lr * d, select(server, *self.shared), without_prefix("delta", mean)
        )
        c = combine(lambda c, d: c + share * d, select(server, "control"), select(mean, "control"))
        return x | c

    def global_model(self, server: Items) -> Items:
        return select(server, *self.shared)

    def deploy_trained(self, state: Items, down: Items, up: Items) -> Items:
        return combine(torch.add, select(down, *self.shared), without_prefix("delta", up))

    def observe(self, memory: Items, down: Items, up: Items) -> Items:
        return combine(torch.add, memory, select(up, "control"))

    def reconstruct_state(self, memory: Items) -> Items:
        return memory

    def change(self, state: Items, down: Items, up: Items, lr: float, steps: int) -> Items:
        return without_prefix("control", combine(torch.add, select(state, "control"), select(up, "control")))

    def _control_change(self, ctx: Local, x: Items, y: Items, c: Items, c_i: Items) -> Items:
        """Return c_i+ - c_i, by the configured option."""
        if self.cfg.option == "I":
            return subtract(ctx.full_gradient(x, ctx.ce), c_i)
        steps = ctx.steps()
        if not steps:
            return combine(torch.zeros_like, c_i)
        return combine(lambda x, y, c: (x - y) / (steps * ctx.lr) - c, x, y, c)
