"""FedNTD: what the received model says about a row's other classes is preserved, its own class is left to the labels.

Source   Lee et al., NeurIPS 2022, arXiv 2106.03097, section 4; loss as in the authors' code.
Solves   locally  min over theta of  mean [CE(z, y) + beta KL(q^g || q)],  z = f(x; theta), z^g = f(x; theta_t) constant,
         q = softmax over the classes other than y of z/tau, q^g likewise
Wire     down body.*, head.* | up body.*, head.*, num_samples (not with weighting = uniform)     Private   nothing
Cost     FedAvg, one forward pass and C^2 numbers a row; FedAvg's bytes.
Leaks    One local step: what FedAvg leaks, for every beta and tau, since the divergence starts at its minimum. More steps:
         its slope never reaches the logit of the row's own class, so labels show as in FedAvg.
Limits   beta = 0, two classes, or one local step: FedAvg.
Differs  beta: PFLlib 0, which is FedAvg.  tau_squared: PFLlib multiplies by tau^2, the authors do not.
         weighting: authors' code by samples, PFLlib uniform.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor

from pflsec.core.algorithm import Algorithm, Done, mean_of_uploads, sample_count
from pflsec.core.config import Config, above, at_least, option
from pflsec.core.items import Items
from pflsec.core.local import Local
from pflsec.training.local import cross_entropy


class FedNTDConfig(Config):
    beta: float = at_least(0, default=1.0, about="weight of the divergence", paper=1.0, pfllib=0.0)
    tau: float = above(0, default=1.0, about="temperature of both sides; large is flat", paper=1.0, pfllib=1.0)
    tau_squared: bool = option(default=False, about="multiply the divergence by tau^2", paper=False, pfllib=True)
    weighting: Literal["samples", "uniform"] = option(
        default="samples", about="weights of the mean over uploads", code="samples", pfllib="uniform"
    )


class FedNTD(Algorithm[FedNTDConfig]):
    key, shared, private = "fedntd", ("body", "head"), ()
    Config = FedNTDConfig
    down: ClassVar = {"body.*": "weights", "head.*": "weights"}
    up: ClassVar = {"body.*": "weights", "head.*": "weights", "num_samples?": "counts"}
    dp_support = "full"
    batchnorm = "yes"
    presets: ClassVar = {
        "paper": {"beta": 1.0, "tau": 1.0, "lr": 0.01, "batch_size": 50, "local_epochs": 5, "participation": 0.1},
        "pfllib": {"beta": 0.0, "tau_squared": True, "weighting": "uniform", "lr": 0.005, "batch_size": 10,
                   "local_epochs": 1},
    }  # fmt: skip

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        beta = self.cfg.beta * (self.cfg.tau**2 if self.cfg.tau_squared else 1)

        def loss(model: Items, x: Tensor, y: Tensor) -> Tensor:
            student, teacher = self.net.logits(model, x), self.net.logits(down, x)
            return cross_entropy(student, y) + beta * self.divergence(student, teacher, ctx.one_hot(y))

        model = ctx.fit(down, on=loss if beta else ctx.ce)
        return Done(state, up=model | (sample_count(ctx) if self.cfg.weighting == "samples" else {}))

    def divergence(self, student: Tensor, teacher: Tensor, target: Tensor) -> Tensor:
        """Return KL(q^g || q) [B] of logits [B, C]; under probabilities its mean over the class that is left out."""
        log_q, log_g = (without_one(z / self.cfg.tau) for z in (student, teacher))
        return (target * (log_g.exp() * (log_g - log_q)).sum(2)).sum(1)

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        return mean_of_uploads(ups, *self.shared, weighting=self.cfg.weighting)

    def global_model(self, server: Items) -> Items:
        return server


def without_one(z: Tensor) -> Tensor:
    """Return [B, C, C]: in row y the log softmax of z [B, C] over the classes other than y, and 0 at y itself."""
    itself = torch.eye(z.shape[1], dtype=torch.bool)
    others = z[:, None].expand(-1, z.shape[1], -1).masked_fill(itself, -torch.inf)
    return others.log_softmax(2).masked_fill(itself, 0)
