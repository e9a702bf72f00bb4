"""FedAvg: the server averages the models that clients trained on their own data.

Source   McMahan et al., AISTATS 2017, arXiv 1602.05629, Algorithm 1.
Solves   min over theta of  sum_k n_k/n mean_(x,y in k) CE(f(x; theta), y)
Wire     down body.*, head.* | up body.*, head.*, num_samples     Private   nothing
Cost     1 forward and backward per sample and epoch; the model once in each direction.
Leaks    One local step gives the gradient of the batch exactly: the reference for every other method.
Limits   One full batch and one epoch: one step of centralised SGD on all data.
Differs  weighting: paper by samples; uniform is an option.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pflsec.core.algorithm import Algorithm, Done, mean_of_uploads, sample_count
from pflsec.core.config import Config, option
from pflsec.core.items import Items
from pflsec.core.local import Local


class FedAvgConfig(Config):
    weighting: Literal["samples", "uniform"] = option(
        default="samples", about="weights of the mean over uploads", paper="samples", pfllib="samples"
    )


class FedAvg(Algorithm[FedAvgConfig]):
    key, shared, private = "fedavg", ("body", "head"), ()
    Config = FedAvgConfig
    down: ClassVar = {"body.*": "weights", "head.*": "weights"}
    up: ClassVar = {"body.*": "weights", "head.*": "weights", "num_samples?": "counts"}
    dp_support = "full"
    batchnorm = "yes"
    presets: ClassVar = {
        "paper": {"participation": 0.1, "local_epochs": 5, "batch_size": 10},
        "pfllib": {"lr": 0.005, "batch_size": 10, "local_epochs": 1},
    }

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        model = ctx.fit(down, on=ctx.ce)
        return Done(state, up=model | (sample_count(ctx) if self.cfg.weighting == "samples" else {}))

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        return mean_of_uploads(ups, *self.shared, weighting=self.cfg.weighting)

    def global_model(self, server: Items) -> Items:
        return server
