"""FedDBE: FedAvg whose features are a shared part plus a personal bias vector, with means drawn to a common one.

Source   Zhang et al., NeurIPS 2023, arXiv 2311.14975; authors' code where the paper leaves things open.
Solves   min over body f, head h and vectors z_i of  sum_i mean CE(h(f(x) + z_i), y) + kappa/2d |m - zbar|^2;
         m the running mean of features, m <- (1 - mu) m + mu mean_b f(x), from 0 in every local training
Wire     down body.*, head.* (once to each client global_mean, which is zbar)
         | up body.*, head.*, num_samples (in the initial round mean in place of the model)
Private  z_i
Cost     FedAvg, and one round before it whose models are thrown away: it yields zbar, d numbers, each way once.
Leaks    FedAvg's gradient with z_i in it and, for kappa, of a known term; z_i begins at 0 and in rounds of one step follows
         exactly: z_i - lr W' g, W and g the head's weight and bias gradient. The initial mean is of the last batch (mu = 1),
         under unknown weights unless there was one batch.
Limits   kappa = 0, bias_rate = 0: FedAvg, after the initial round.
Differs  kappa, mu: authors' script 50 and 1; PFLlib 0 and 0.1, which is next to nothing.   Initial round: of the first
         cohort; PFLlib's is of all clients, whatever the participation.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor

from pflsec.core.algorithm import Algorithm, Done, mean_of_uploads, sample_count
from pflsec.core.config import Config, at_least, between, option
from pflsec.core.items import Items, select
from pflsec.core.local import Local, paced


class FedDBEConfig(Config):
    kappa: float = at_least(
        0, default=50.0, about="weight of the distance to the common feature mean", paper=50.0, pfllib=0.0
    )
    mu: float = between(0, 1, default=1.0, about="share of a batch in the running mean", paper=1.0, pfllib=0.1)
    bias_rate: float = at_least(
        0, default=1.0, about="learning rate of the bias vector, as a multiple of the run's", paper=1.0, pfllib=1.0
    )
    init_mean: Literal["ema", "exact"] = option(
        default="ema",
        about="mean that a client sends at first: the running one, or that of all rows under the trained body",
        paper="ema",
        pfllib="ema",
    )


class FedDBE(Algorithm[FedDBEConfig]):
    key, shared, private = "feddbe", ("body", "head"), ()
    Config = FedDBEConfig
    down: ClassVar = {"body.*": "weights", "head.*": "weights", "global_mean?": "statistics [d]"}
    up: ClassVar = {
        "body.*?": "weights", "head.*?": "weights", "mean?": "statistics [d]", "num_samples": "counts",
    }  # fmt: skip
    dp_support = "none: the mean of the features couples the rows of a batch"
    presets: ClassVar = {
        "paper": {"kappa": 50.0, "mu": 1.0, "batch_size": 10, "local_epochs": 1},
        "pfllib": {"kappa": 0.0, "mu": 0.1, "lr": 0.005, "batch_size": 10, "local_epochs": 1},
    }

    def init_server(self, fresh: Items) -> Items:
        """Return model, common mean, whether there is one yet, and which clients have it."""
        mean = next(iter(fresh.values())).new_zeros(self.net.feature_dim)
        told = torch.zeros(self.clients, dtype=torch.bool)
        return fresh | {"global_mean": mean, "ready": torch.tensor(False), "told": told}

    def init_client(self, fresh: Items, server: Items) -> Items:
        mean = server["global_mean"]
        return {"bias": torch.zeros_like(mean), "global_mean": mean, "told": torch.tensor(False)}

    def downlink(self, server: Items, client: int) -> Items:
        news = select(server, "global_mean") if server["ready"] and not server["told"][client] else {}
        return select(server, *self.shared) | news

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        mean = RunningMean(ctx, self.cfg.mu, torch.zeros_like(state["bias"]))
        if "global_mean" not in down and not state["told"]:
            return Done(state, up={"mean": self.first_mean(ctx, mean, down)} | sample_count(ctx))
        state = state | select(down, "global_mean") | {"told": torch.tensor(True)}

        def loss(model: Items, x: Tensor, y: Tensor) -> Tensor:
            z = self.net.features(model, x)
            ce = ctx.head_ce(model, z + paced(ctx, model["bias"], self.cfg.bias_rate), y)
            return ce + self.cfg.kappa / 2 * (mean.update(z) - state["global_mean"]).square().mean()

        model = ctx.fit(select(down, *self.shared) | select(state, "bias"), on=loss)
        return Done(state | select(model, "bias"), up=select(model, *self.shared) | sample_count(ctx))

    def first_mean(self, ctx: Local, mean: "RunningMean", down: Items) -> Tensor:
        """Return the feature mean [d] of an ordinary local training, whose model is thrown away."""

        def loss(model: Items, x: Tensor, y: Tensor) -> Tensor:
            z = self.net.features(model, x)
            mean.update(z)
            return ctx.head_ce(model, z, y)

        model = ctx.fit(down, on=loss)
        return ctx.features(model).mean(0) if self.cfg.init_mean == "exact" else mean.value

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        if not server["ready"]:
            mean = mean_of_uploads(ups, "mean", weighting="samples")["mean"]
            return server | {"global_mean": mean, "ready": torch.tensor(True)}
        told = server["told"].index_fill(0, torch.tensor(list(ups)), True)
        return server | mean_of_uploads(ups, *self.shared, weighting="samples") | {"told": told}

    def deploy(self, state: Items, down: Items) -> Items:
        return select(down, *self.shared) | select(state, "bias")

    def scores(self, items: Items, x: Tensor) -> Tensor:
        return self.net.head(items, self.net.features(items, x) + items["bias"])

    def global_model(self, server: Items) -> Items:
        return select(server, *self.shared) | {"bias": torch.zeros_like(server["global_mean"])}

    def observe(self, memory: Items, down: Items, up: Items) -> Items:
        return memory | ({} if "mean" in up else select(down, "global_mean") | {"told": torch.tensor(True)})

    def reconstruct_state(self, memory: Items) -> Items:
        """Before a client has trained, all that it has is public; after that its bias vector is not in the log."""
        return select(memory, "global_mean", "told") if memory["told"] else memory


class RunningMean:
    """The running mean of features within one local training. Its past is constant in the gradient of a step."""

    def __init__(self, ctx: Local, share: float, start: Tensor):
        self.ctx, self.share, self.value = ctx, share, start

    def update(self, z: Tensor) -> Tensor:
        """Return the mean [d] after the features z [B, d] of one more batch."""
        mean = (1 - self.share) * self.value + self.share * z.mean(0)
        self.value = self.ctx.constant(mean)
        return mean
