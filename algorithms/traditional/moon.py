"""MOON: features are drawn to those of the model received, and pushed away from those of the client's last one.

Source   Li, He, Song, CVPR 2021, arXiv 2103.16257, Algorithm 1.
Solves   locally  min over theta of  mean CE(h(z), y) + mu softplus((cos(z, z_p) - cos(z, z_g)) / tau),  z = b(x; theta),
         z_g of the model received, z_p of the one that the client sent last, both constant; no z_p, no term
Wire     down body.*, head.* | up body.*, head.*, num_samples (not with weighting = uniform)
Private  nothing: what a client keeps, it has sent
Cost     FedAvg and two forward passes of the body a step (1 + pool); FedAvg's bytes; pool bodies of memory per client.
Leaks    One local step: head as FedAvg's; body FedAvg's gradient and mu/tau sigma((cos - 1)/tau) times the one of
         cos(z, z_p), which needs no label and is known to who has the log.
Limits   mu = 0: FedAvg. First round of a client: FedAvg's for every mu.
Differs  mu: paper 1 to 10 by task, PFLlib 0.  tau: PFLlib 1.  projector: the paper's sits in its network; here z is what
         the body returns, so a body may end in one.  first: PFLlib initial, authors' code a random network.
"""

from collections.abc import Mapping
from math import log1p
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from pflsec.core.algorithm import Algorithm, Done, mean_of_uploads, sample_count
from pflsec.core.config import Config, above, at_least, option
from pflsec.core.items import Items, combine, prefixed, repeated, select, without_prefix
from pflsec.core.local import Local


class MOONConfig(Config):
    mu: float = at_least(0, default=1.0, about="weight of the contrast", paper="1, 5, 10", code=1.0, pfllib=0.0)
    tau: float = above(0, default=0.5, about="temperature of the contrast; small is sharp", paper=0.5, pfllib=1.0)
    pool: int = at_least(1, default=1, about="how many of its last models a client is pushed away from", paper=1)
    first: Literal["skip", "initial"] = option(
        default="skip",
        about="a client without a last model leaves the term out, or takes the very first global model for it",
        pfllib="initial",
    )
    weighting: Literal["samples", "uniform"] = option(
        default="samples", about="weights of the mean over uploads", paper="samples", pfllib="samples"
    )


class MOON(Algorithm[MOONConfig]):
    key, shared, private = "moon", ("body", "head"), ()
    Config = MOONConfig
    down: ClassVar = {"body.*": "weights", "head.*": "weights"}
    up: ClassVar = {"body.*": "weights", "head.*": "weights", "num_samples?": "counts"}
    dp_support = "full"
    batchnorm = "yes"
    presets: ClassVar = {
        "paper": {"mu": 5.0, "tau": 0.5, "lr": 0.01, "batch_size": 64, "local_epochs": 10},
        "pfllib": {"mu": 0.0, "tau": 1.0, "first": "initial", "lr": 0.005, "batch_size": 10, "local_epochs": 1},
    }

    def init_client(self, fresh: Items, server: Items) -> Items:
        """Return the pool of last bodies, [pool, ...] each with the newest first, and how many have been put there."""
        start = repeated(select(server, "body"), self.cfg.pool)
        return prefixed("last", start) | {"trained": torch.tensor(0)}

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        last, mu = self.last(state), self.cfg.mu
        zero = log1p(len(last))  # where all models are one: reported losses go on where the term sets in

        def loss(model: Items, x: Tensor, y: Tensor) -> Tensor:
            z = self.net.features(model, x)
            far = torch.stack([self.net.features(body, x) for body in last])
            return ctx.head_ce(model, z, y) + mu * (self.contrast(z, self.net.features(down, x), far) - zero)

        model = ctx.fit(down, on=loss if mu and last else ctx.ce)
        weight = sample_count(ctx) if self.cfg.weighting == "samples" else {}
        return Done(self.pushed(state, model), up=model | weight)

    def last(self, state: Items) -> list[Items]:
        """Return the bodies that this client is pushed away from."""
        pool = without_prefix("last", state)
        count = int(state["trained"]) + (self.cfg.first == "initial")
        return [{k: w[i] for k, w in pool.items()} for i in range(min(count, self.cfg.pool))]

    def pushed(self, state: Items, model: Items) -> Items:
        """Return the state with this model's body at the front of the pool."""
        pool = combine(
            lambda new, w: torch.cat([new[None], w[:-1]]), select(model, "body"), without_prefix("last", state)
        )
        return prefixed("last", pool) | {"trained": state["trained"] + 1}

    def contrast(self, z: Tensor, near: Tensor, far: Tensor) -> Tensor:
        """Return -log of the softmax weight [B] of `near` [B, d] among `near` and `far` [P, B, d] by cos(z, .)/tau."""
        s_far = torch.logsumexp(F.cosine_similarity(z, far, 2) / self.cfg.tau, 0)
        return F.softplus(s_far - F.cosine_similarity(z, near, 1) / self.cfg.tau)

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        return mean_of_uploads(ups, *self.shared, weighting=self.cfg.weighting)

    def global_model(self, server: Items) -> Items:
        return server

    def observe(self, memory: Items, down: Items, up: Items) -> Items:
        return self.pushed(memory, up)

    def reconstruct_state(self, memory: Items) -> Items:
        return memory
