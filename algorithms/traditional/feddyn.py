"""FedDyn: each client tilts its loss by a dual variable, so that local optima agree with the global one in the limit.

Source   Acar et al., ICLR 2021, arXiv 2111.04263, Algorithm 1, in the form of the authors' code.
Solves   locally  min over theta of  F_k(theta) - <g_k, theta> + alpha/2 |theta - theta_t|^2,  g_k = -alpha d_k, d_k the
         sum of the changes of client k so far: a pull towards theta_t - d_k.  Then theta = mean of S + (1/N) sum_i d_i
Wire     down body.*, head.* (alpha with alpha_scaling = by_size) | up body.*, head.*
Private  d_k, seemingly
Cost     FedAvg and one vector operation a step; FedAvg's bytes; one model of memory per client, two more on the server.
Leaks    The log gives d_k away, and with it what FedAvg shows. Where a client solves its problem to the end, -alpha d_k
         is the gradient over all of its data at the model that it sent.
Limits   First local step of a client: FedAvg's. After a first round of everybody the model that is sent has moved twice
         as far as the mean, which is the one that is tested.
Differs  alpha: paper 0.001 to 0.1, PFLlib 1.  tested: PFLlib the model that is sent, paper the mean.
         alpha_scaling: authors' code by_size, alpha mean(n)/n_k.  clip: authors' code 10.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from pflsec.core.algorithm import Algorithm, Done, mean_of_uploads
from pflsec.core.config import Config, above, option
from pflsec.core.errors import PflsecWarning
from pflsec.core.items import Items, combine, norm, prefixed, select, subtract, without_prefix
from pflsec.core.local import Local, half_squared_distance


class FedDynConfig(Config):
    alpha: float = above(
        0, default=0.01, about="weight of the pull, and scale of the dual", paper="0.001 to 0.1", code=0.01, pfllib=1.0
    )
    alpha_scaling: Literal["none", "by_size"] = option(
        default="none",
        about="by_size: a client with fewer rows than others is pulled more",
        paper="none",
        code="by_size",
    )
    clip: float | None = above(
        0, default=None, about="longest step gradient, pull included; leaves an epoch's last short batch out", code=10.0
    )
    tested: Literal["mean", "cloud"] = option(
        default="mean",
        about="model to use: the participants' mean, or the one that is sent",
        paper="mean",
        pfllib="cloud",
    )


class FedDyn(Algorithm[FedDynConfig]):
    key, shared, private = "feddyn", ("body", "head"), ()
    Config = FedDynConfig
    down: ClassVar = {"body.*": "weights", "head.*": "weights", "alpha?": "scalar"}
    up: ClassVar = {"body.*": "weights", "head.*": "weights"}
    dp_support = "full"
    presets: ClassVar = {
        "paper": {"alpha": 0.01, "lr": 0.1, "batch_size": 50, "local_epochs": 5, "participation": 0.1},
        "pfllib": {"alpha": 1.0, "tested": "cloud", "lr": 0.005, "batch_size": 10, "local_epochs": 1},
    }

    def init_server(self, fresh: Items) -> Items:
        drift = prefixed("drift", combine(torch.zeros_like, fresh))
        return fresh | prefixed("mean", fresh) | drift | self.scaled(torch.ones(self.clients))

    def enrol(self, server: Items, sizes: Sequence[int]) -> Items:
        return server | self.scaled(torch.tensor(sizes))

    def scaled(self, sizes: Tensor) -> Items:
        """Return alpha mean(n)/n_k of every client, [N], where that is asked for."""
        return {} if self.cfg.alpha_scaling == "none" else {"alphas": self.cfg.alpha * sizes.double().mean() / sizes}

    def init_client(self, fresh: Items, server: Items) -> Items:
        return select(server, "drift")

    def downlink(self, server: Items, client: int) -> Items:
        scaled = {} if self.cfg.alpha_scaling == "none" else {"alpha": server["alphas"][client]}
        return select(server, *self.shared) | scaled

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        cloud, drift = select(down, *self.shared), without_prefix("drift", state)
        alpha, anchor = self.alpha(down), subtract(cloud, drift)
        if ctx.lr * alpha > 1:
            warnings.warn(
                f"feddyn: lr * alpha is {ctx.lr * alpha:g}; above 1 the pull overshoots, from 2 on it diverges. "
                "Lower lr or alpha.",
                PflsecWarning,
                stacklevel=2,
            )
        if self.cfg.clip is None:
            model = ctx.fit(cloud, on=ctx.ce, penalty=half_squared_distance(alpha, anchor))
        else:
            model = self.clipped(ctx, cloud, anchor, alpha, self.cfg.clip)
        return Done(prefixed("drift", combine(torch.add, drift, subtract(model, cloud))), up=model)

    def alpha(self, down: Items) -> float:
        """Return the alpha of the client that receives this."""
        return float(down["alpha"]) if self.cfg.alpha_scaling == "by_size" else self.cfg.alpha

    def clipped(self, ctx: Local, model: Items, anchor: Items, alpha: float, longest: float) -> Items:
        """Return the model after SGD whose gradients, with the pull in them, are shortened to `longest`."""
        for (rows,) in ctx.row_sets(1):
            gradient = ctx.gradient(model, ctx.ce, rows)
            slope = combine(lambda g, p, a: g + alpha * (p - a), gradient, model, anchor)
            size = ctx.lr * (longest / norm(slope)).clamp(max=1)
            model = {k: p - size * slope[k] for k, p in model.items()}
        return model

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        mean, share = mean_of_uploads(ups, *self.shared, weighting="uniform"), len(ups) / self.clients
        drift = combine(
            lambda d, new, old: d + share * (new - old),  # (1/N) sum over S, also where S is not everybody
            without_prefix("drift", server),
            mean,
            select(server, *self.shared),
        )
        return server | combine(torch.add, mean, drift) | prefixed("mean", mean) | prefixed("drift", drift)

    def serve(self, server: Items, client: int) -> Items:
        return self.global_model(server)

    def global_model(self, server: Items) -> Items:
        return without_prefix("mean", server) if self.cfg.tested == "mean" else select(server, *self.shared)

    def observe(self, memory: Items, down: Items, up: Items) -> Items:
        moved = subtract(up, select(down, *self.shared))
        return prefixed("drift", combine(torch.add, without_prefix("drift", memory), moved))

    def reconstruct_state(self, memory: Items) -> Items:
        return memory

    def change(self, state: Items, down: Items, up: Items, lr: float, steps: int) -> Items:
        """Without the dual: the changes of K steps hold alpha d_k sum_j (1 - lr alpha)^j of it, j < K. Not so where a step
        was clipped: a part of the dual is then left in."""
        alpha = self.alpha(down)
        dual = alpha * sum((1 - lr * alpha) ** j for j in range(steps)) / steps
        seen = super().change(state, down, up, lr, steps)
        return combine(lambda g, d: g - dual * d, seen, without_prefix("drift", state))
