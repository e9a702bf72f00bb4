"""GPFL: shared category embeddings guide the features, a shared valve turns them towards a client's classes.

Source   Zhang et al., ICCV 2023, arXiv 2308.10279; authors' code where the paper leaves things open.
Solves   min over body f, embeddings E, valve V and heads h_i of  sum_i mean CE(h_i(V(f(x), p_i)), y)
         + CE(cos(V(f(x), g), E), y) + lam |V(f(x), g) - E_t[y]| + mu/2 |E, V|^2,  V(z, u) = relu((gamma(u) + 1) z + beta(u));
         g, p_i the means of the received E_t over the classes: plain, and by the client's label shares
Wire     down body.*, embedding, valve.gamma.weight, valve.gamma.bias, valve.gamma.scale, valve.gamma.shift,
         valve.beta.weight, valve.beta.bias, valve.beta.scale, valve.beta.shift
         | up body.*, embedding, valve.gamma.weight, valve.gamma.bias, valve.gamma.scale, valve.gamma.shift,
         valve.beta.weight, valve.beta.bias, valve.beta.scale, valve.beta.shift, num_samples
Private  head.*, label shares
Cost     FedAvg, two passes of the valve and a second classifier; C d + 2 d^2 + 6 d more numbers each way.
Leaks    The labels of a batch, by the embeddings' gradient: a cosine classifier that everybody has. The label shares,
         whatever the number of steps: a weight matrix of the valve moves by a g' + b p_i'. Body: the sum of three losses.
         Shares are of the rows that an exchange trains on: in a probe those of the victim batch.
Limits   lam = 0: no pull on lengths.   Equal label shares: p_i = g.
Differs  g and p_i: from the embeddings received; PFLlib's are one round behind.   distance: PFLlib's norm is of the whole
         batch at once.   label shares: of all rows; PFLlib leaves out a last short batch.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from pflsec.core.algorithm import Algorithm, Done, PrivateStart, mean_of_uploads, sample_count
from pflsec.core.config import at_least, option
from pflsec.core.items import Items, prefixed, select
from pflsec.core.local import Local
from pflsec.core.streams import seed_from, stream
from pflsec.training.local import cross_entropy

TINY = 1e-16  # keeps the slope of a norm finite at 0, and is less than rounding elsewhere
COMMON = ("embedding", "valve")


class GPFLConfig(PrivateStart):
    lam: float = at_least(
        0, default=0.01, about="weight of the distance to the embedding of the label", paper="0.01 to 1e-4", pfllib=1.0
    )
    mu: float = at_least(
        0, default=0.1, about="weight decay of embeddings and valve", paper="0.1, 0 with ResNet", pfllib=0.0
    )
    distance: Literal["rows", "frobenius"] = option(
        default="rows",
        about="rows: mean of each sample's distance; frobenius: one norm of the whole batch",
        paper="rows",
        pfllib="frobenius",
    )


class GPFL(Algorithm[GPFLConfig]):
    key, shared, private = "gpfl", ("body",), ("head",)
    Config = GPFLConfig
    down: ClassVar = {
        "body.*": "weights", "embedding": "weights [C, d]",
        "valve.gamma.weight": "weights [d, d]", "valve.gamma.bias": "weights [d]",
        "valve.gamma.scale": "weights [d]", "valve.gamma.shift": "weights [d]",
        "valve.beta.weight": "weights [d, d]", "valve.beta.bias": "weights [d]",
        "valve.beta.scale": "weights [d]", "valve.beta.shift": "weights [d]",
    }  # fmt: skip
    up: ClassVar = {
        "body.*": "weights", "embedding": "weights [C, d]",
        "valve.gamma.weight": "weights [d, d]", "valve.gamma.bias": "weights [d]",
        "valve.gamma.scale": "weights [d]", "valve.gamma.shift": "weights [d]",
        "valve.beta.weight": "weights [d, d]", "valve.beta.bias": "weights [d]",
        "valve.beta.scale": "weights [d]", "valve.beta.shift": "weights [d]", "num_samples": "counts",
    }  # fmt: skip
    dp_support = "partial: the label shares that enter every step are computed from raw data"
    presets: ClassVar = {
        "paper": {"lam": 0.01, "mu": 0.1, "lr": 0.005, "batch_size": 10, "local_epochs": 1},
        "pfllib": {"lam": 1.0, "mu": 0.0, "distance": "frobenius", "private_start": "shared", "lr": 0.005,
                   "batch_size": 10, "local_epochs": 1},
    }  # fmt: skip

    def init_server(self, fresh: Items) -> Items:
        d, example = self.net.feature_dim, next(iter(fresh.values()))
        rng = stream(self.key, seed_from(fresh), "start")
        server = select(fresh, "body")
        server["embedding"] = torch.randn(self.net.classes, d, generator=rng, dtype=example.dtype)
        for branch in ("gamma", "beta"):
            drawn = {"weight": (d, d), "bias": (d,)}
            layer = {
                k: d**-0.5 * (2 * torch.rand(*s, generator=rng, dtype=example.dtype) - 1) for k, s in drawn.items()
            }
            norm = {"scale": example.new_ones(d), "shift": example.new_zeros(d)}
            server |= prefixed(f"valve.{branch}", layer | norm)
        return server

    def init_client(self, fresh: Items, server: Items) -> Items:
        even = torch.full_like(server["embedding"][:, 0], 1 / self.net.classes)
        return select(fresh, "head") | {"label_shares": even}

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        received, shares = down["embedding"], ctx.class_counts() / ctx.num_samples
        g, p = received.mean(0), shares @ received

        def loss(model: Items, x: Tensor, y: Tensor) -> Tensor:
            z, target = self.net.features(model, x), ctx.one_hot(y)
            common = valve(model, z, g)
            angle = cross_entropy(unit(common) @ unit(model["embedding"]).T, y)
            off = self.length(common - target @ received)
            return ctx.head_ce(model, valve(model, z, p), y) + angle + self.cfg.lam * off

        def decay(model: Items, rng: torch.Generator) -> Tensor:
            return self.cfg.mu / 2 * torch.stack([w.square().sum() for w in select(model, *COMMON).values()]).sum()

        model = ctx.fit(down | select(state, "head"), on=loss, penalty=decay if self.cfg.mu else None)
        sent = select(model, "body", *COMMON)
        return Done(select(model, "head") | {"label_shares": shares}, up=sent | sample_count(ctx))

    def length(self, off: Tensor) -> Tensor:
        """Return [B] values whose mean is the magnitude term of differences off [B, d]."""
        if self.cfg.distance == "rows":
            return (off.square().sum(1) + TINY).sqrt()
        return (off.square().sum() + TINY).sqrt().expand(len(off))

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        return mean_of_uploads(ups, "body", *COMMON, weighting="samples")

    def deploy(self, state: Items, down: Items) -> Items:
        return down | state

    def deploy_trained(self, state: Items, down: Items, up: Items) -> Items:
        """The head was trained on a valve that was asked by the embeddings received, not by those that are sent."""
        return down | select(up, "body", "valve") | state

    def scores(self, items: Items, x: Tensor) -> Tensor:
        p = items["label_shares"] @ items["embedding"]
        return self.net.head(items, valve(items, self.net.features(items, x), p))

    def change(self, state: Items, down: Items, up: Items, lr: float, steps: int) -> Items:
        """The decay is public, and taken off exactly: without a gradient, `steps` of them shrink a weight to `kept`."""
        kept = (1 - lr * self.cfg.mu) ** steps
        return super().change(state, down | {k: kept * w for k, w in select(down, *COMMON).items()}, up, lr, steps)


def valve(model: Items, z: Tensor, u: Tensor) -> Tensor:
    """Return features z [B, d] as the conditional input u [d] lets them through."""
    gamma, beta = (_branch(model, f"valve.{name}", u) for name in ("gamma", "beta"))
    return ((gamma + 1) * z + beta).relu()


def _branch(model: Items, name: str, u: Tensor) -> Tensor:
    hidden = F.linear(u, model[f"{name}.weight"], model[f"{name}.bias"]).relu()
    return F.layer_norm(hidden, hidden.shape, model[f"{name}.scale"], model[f"{name}.shift"])


def unit(rows: Tensor) -> Tensor:
    """Return the rows with length 1; a row of zeros stays 0."""
    return rows * (rows.square().sum(1, keepdim=True) + TINY).rsqrt()
