"""FedProx: FedAvg with a penalty that keeps local models near the one that was sent.

Source   Li et al., MLSys 2020, arXiv 1812.06127, Algorithm 2.
Solves   locally, inexactly:  min over theta of  F_k(theta) + mu/2 |theta - theta_t|^2
Wire     down body.*, head.* | up body.*, head.*, num_samples     Private   nothing
Cost     FedAvg and one vector operation a step.
Leaks    The same as FedAvg at one local step, where the penalty's gradient is zero; mu is known to the server.
Limits   mu = 0: FedAvg. One local step: FedAvg for every mu.
Differs  mu: paper 0.001 to 1 by task, PFLlib 0.  weighting: the paper's experiments by samples, its analysis uniform
         with clients drawn by size (sampling = by_size).
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
from pydantic import model_validator

from pflsec.core.algorithm import Algorithm, Done, mean_of_uploads, sample_count
from pflsec.core.config import Config, at_least, between, option
from pflsec.core.errors import PflsecWarning
from pflsec.core.items import Items
from pflsec.core.local import Local, half_squared_distance


class FedProxConfig(Config):
    mu: float = at_least(0, default=0.01, about="weight of the penalty", paper="0.001 to 1", pfllib=0.0)
    stragglers: float = between(
        0,
        1,
        default=0.0,
        about="chance that a client makes only some of its epochs and still uploads",
        paper="0, 0.5, 0.9",
    )
    weighting: Literal["samples", "uniform"] = option(default="samples", about="weights of the mean over uploads")
    sampling: Literal["uniform", "by_size"] = option(default="uniform", about="how a cohort is drawn")

    @model_validator(mode="after")
    def _count_sizes_once(self):
        if self.sampling == "by_size" and self.weighting == "samples":
            raise ValueError(
                "sampling=by_size goes with weighting=uniform; with weighting=samples sizes would count twice"
            )
        return self


class FedProx(Algorithm[FedProxConfig]):
    key, shared, private = "fedprox", ("body", "head"), ()
    Config = FedProxConfig
    down: ClassVar = {"body.*": "weights", "head.*": "weights"}
    up: ClassVar = {"body.*": "weights", "head.*": "weights", "num_samples?": "counts"}
    dp_support = "full"
    batchnorm = "yes"
    presets: ClassVar = {
        "paper": {"mu": 1.0, "local_epochs": 20, "batch_size": 10},
        "pfllib": {"mu": 0.0, "lr": 0.005, "batch_size": 10, "local_epochs": 1},
    }

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        if ctx.lr * self.cfg.mu > 1:
            warnings.warn(
                f"fedprox: lr * mu is {ctx.lr * self.cfg.mu:g}; above 1 the penalty overshoots, from 2 on it diverges. "
                "Lower lr or mu.",
                PflsecWarning,
                stacklevel=2,
            )
        model = ctx.fit(down, on=ctx.ce, penalty=half_squared_distance(self.cfg.mu, down), epochs=self._epochs(ctx))
        return Done(state, up=model | (sample_count(ctx) if self.cfg.weighting == "samples" else {}))

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        return mean_of_uploads(ups, *self.shared, weighting=self.cfg.weighting)

    def global_model(self, server: Items) -> Items:
        return server

    def sampling_weights(self, sizes: Sequence[int]) -> Sequence[float] | None:
        return sizes if self.cfg.sampling == "by_size" else None

    def _epochs(self, ctx: Local) -> int:
        """Return this client's work budget in epochs: all of them, or for a straggler 1 to all, drawn evenly."""
        if not self.cfg.stragglers or ctx.fixed_epochs or ctx.epochs < 2:
            return ctx.epochs
        late, share = torch.rand(2, generator=ctx.rng("straggler")).tolist()
        return 1 + int(share * ctx.epochs) if late < self.cfg.stragglers else ctx.epochs
