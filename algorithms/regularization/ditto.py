"""Ditto: FedAvg for one model, and beside it a personal model of each client that is held near the one received.

Source   Li et al., ICML 2021, arXiv 2012.04221, Algorithm 1.
Solves   min over w of FedAvg's objective, and for each client  min over v of  F_i(v) + lam/2 |v - w_t|^2
Wire     down body.*, head.* | up body.*, head.*, num_samples     Private   v: body.*, head.* of a second model
Cost     Twice FedAvg's local work with as many personal epochs; FedAvg's bytes; one model of memory per client.
Leaks    What FedAvg leaks, bit for bit: the personal model does not enter what is sent.
Limits   lam = 0: v is isolated training on its own batches. personal_epochs = 0: v stays at the start.
Differs  upload: paper w_i - w_t, here w_i as in FedAvg, which is the same knowledge.  lam: PFLlib 0, which is no Ditto.
         batches: authors' code uses one batch for both tasks, here each task has an order of its own.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch

from pflsec.core.algorithm import Algorithm, Done, mean_of_uploads, sample_count
from pflsec.core.config import Config, above, at_least, option
from pflsec.core.items import Items, select
from pflsec.core.local import Local, half_squared_distance


class DittoConfig(Config):
    lam: float = at_least(
        0, default=1.0, about="weight of the pull towards the received model", paper="0.1 to 2", pfllib=0.0
    )
    personal_epochs: int | None = at_least(
        0, default=None, about="epochs of the personal model; none: the run's", paper="as many", pfllib=1
    )
    personal_lr: float | None = above(0, default=None, about="learning rate of the personal model; none: the run's")
    warm_start: bool = option(
        default=False, about="the personal model starts at the first model received, not at the very first one"
    )
    weighting: Literal["samples", "uniform"] = option(
        default="samples", about="weights of the mean over uploads", paper="uniform", pfllib="samples"
    )


class Ditto(Algorithm[DittoConfig]):
    key, shared, private = "ditto", ("body", "head"), ("body", "head")
    Config = DittoConfig
    down: ClassVar = {"body.*": "weights", "head.*": "weights"}
    up: ClassVar = {"body.*": "weights", "head.*": "weights", "num_samples?": "counts"}
    dp_support = "full"
    batchnorm = "yes"
    presets: ClassVar = {
        "paper": {"lam": 1.0, "weighting": "uniform"},
        "pfllib": {"lam": 0.0, "personal_epochs": 1, "lr": 0.005, "batch_size": 10, "local_epochs": 1},
    }

    def init_client(self, fresh: Items, server: Items) -> Items:
        return select(server, *self.shared) | {"trained": torch.tensor(False)}

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        cfg, newcomer = self.cfg, not state["trained"]
        v = down if cfg.warm_start and newcomer else select(state, *self.private)
        pull = half_squared_distance(cfg.lam, down)  # towards the model received, never towards the one trained from it
        v = ctx.fit(v, on=ctx.ce, penalty=pull, epochs=cfg.personal_epochs, lr=cfg.personal_lr, phase="personal")
        w = ctx.fit(down, on=ctx.ce)
        sent = w | (sample_count(ctx) if cfg.weighting == "samples" else {})
        return Done(state=v | {"trained": torch.tensor(True)}, up=sent)

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        return mean_of_uploads(ups, *self.shared, weighting=self.cfg.weighting)

    def global_model(self, server: Items) -> Items:
        return server
