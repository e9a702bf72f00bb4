"""FedPAC: a shared body that is aligned to class prototypes, and for each client its own mixture of all heads.

Source   Xu, Tong, Huang, ICLR 2023, arXiv 2306.11867; authors' code for the order of the phases.
Solves   head  min mean CE(h(f(x)), y) under the body received; then, under that head,
         body  min mean CE(h(f(x)), y) + lam/(B d) sum_b |f(x_b) - c_{y_b}|^2,  c_k the global prototype, or the client's
         own class mean where there is none
         server  for each client i  min over a >= 0, sum a = 1 of  sum_j a_j^2 V_j + |sum_j a_j (h_j - h_i)|^2
         with h_j [C, d] the class means times the classes' shares, V_j the variance of that estimate
Wire     down body.*, head.* (a mixture of its own for each client), prototype, known
         | up body.*, head.*, prototype, label_counts, feature_mean, variance, num_samples
Private  nothing
Cost     FedAvg, head_epochs of the head alone and two forward passes; FedAvg's bytes and 2 C d + C numbers; on the
         server N^2 C d and N quadratic programmes of N unknowns, and N heads.
Leaks    Two gradients, of the head and of the body, at models that the server has; class means of the features of all
         rows under two known bodies, so of a class with one row its feature; the exact label histogram.
Limits   collaborate = false, lam = 0: FedRep with one first head for all, weights by samples, and as many head epochs.
Differs  head_lr: paper 0.1 beside a body's 0.01, here the run's for both.  prototypes: weighted by class counts, PFLlib
         uniform over clients.  A class without global prototype is pulled to the client's own, in PFLlib not at all.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from pflsec.core.algorithm import Algorithm, Done, mean_of_uploads, sample_count
from pflsec.core.config import Config, above, at_least, between, option
from pflsec.core.items import Items, combine, prefixed, repeated, select, with_rows, without_prefix
from pflsec.core.local import Local
from pflsec.core.prototypes import class_means

RIDGE = 1e-12  # relative: of several best mixtures the one nearest to uniform


class FedPACConfig(Config):
    lam: float = at_least(0, default=1.0, about="weight of the distance to the prototypes", paper=1.0, pfllib=1.0)
    head_epochs: int = at_least(0, default=1, about="epochs of the head before the body moves", paper=1, pfllib=1)
    head_lr: float | None = above(
        0, default=None, about="learning rate of the head phase; none: the run's", paper=0.1, pfllib=0.005
    )
    collaborate: bool = option(default=True, about="heads are mixed; false: each client keeps its own", paper=True)
    cutoff: float = between(
        0, 0.1, default=1e-3, about="smaller weights of a mixture become zero", paper=1e-3, pfllib=1e-3
    )
    tested: Literal["trained", "mixed"] = option(
        default="trained",
        about="the tested model: as local training left it, or the new body with the new mixture of heads",
        paper="trained",
    )


class FedPAC(Algorithm[FedPACConfig]):
    key, shared, private = "fedpac", ("body", "head"), ()
    Config = FedPACConfig
    down: ClassVar = {
        "body.*": "weights",
        "head.*": "weights",
        "prototype": "prototypes [C, d]",
        "known": "label set [C]",
    }
    up: ClassVar = {
        "body.*": "weights", "head.*": "weights", "prototype": "prototypes [C, d]", "label_counts": "counts [C]",
        "feature_mean": "statistics [C, d]", "variance": "scalar", "num_samples": "counts",
    }  # fmt: skip
    dp_support = "partial: prototype, feature_mean, variance and label_counts are computed from raw data"
    presets: ClassVar = {
        "paper": {"head_lr": 0.1, "lr": 0.01, "local_epochs": 5, "batch_size": 50},
        "pfllib": {"lr": 0.005, "batch_size": 10, "local_epochs": 1},
    }

    def init_server(self, fresh: Items) -> Items:
        """Return the body, every client's head, [N, ...] each, and the prototypes."""
        heads = repeated(select(fresh, "head"), self.clients)
        classes = self.net.classes
        known = torch.zeros(classes, dtype=torch.bool)
        table = {"prototype": torch.zeros(classes, self.net.feature_dim), "known": known}
        return select(fresh, "body") | prefixed("mixed", heads) | table

    def init_client(self, fresh: Items, server: Items) -> Items:
        """Return the model trained last, at first the one that all begin with."""
        return select(self.downlink(server, 0), *self.shared) | {"trained": torch.tensor(False)}

    def downlink(self, server: Items, client: int) -> Items:
        head = {k: v[client].clone() for k, v in without_prefix("mixed", server).items()}
        return select(server, "body") | head | select(server, "prototype", "known")

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        cfg, before = self.cfg, select(down, "body")
        sums, counts = ctx.class_sums(lambda x: self.net.features(before, x))
        # A release of its own: in one row with the features, clipping would shorten these by the length of their square.
        squares, _ = ctx.class_sums(lambda x: self.net.features(before, x).square().sum(1, keepdim=True))
        own = class_means(sums, counts)
        h = own * (counts / ctx.num_samples)[:, None]
        spread = squares.sum() / ctx.num_samples - h.square().sum()  # >= 0 but for rounding, and for noise
        centre = torch.where(down["known"][:, None], down["prototype"], own)
        lam = cfg.lam if down["known"].any() else 0.0  # in the first round nothing is aligned
        train: dict[str, Any] = {"epochs": cfg.head_epochs, "lr": cfg.head_lr, "phase": "head"}
        head = ctx.fit(select(down, "head"), on=ctx.head_ce, features_of=before, **train)

        def loss(body: Items, x: Tensor, y: Tensor) -> Tensor:
            z = self.net.features(body, x)
            return ctx.head_ce(head, z, y) + lam * (z - ctx.one_hot(y) @ centre).square().mean(1)

        body = ctx.fit(before, on=loss)
        facts = {"label_counts": counts, "feature_mean": h, "variance": spread.clamp(min=0) / ctx.num_samples}
        prototype = class_means(*ctx.class_sums(lambda x: self.net.features(body, x)))
        up = body | head | {"prototype": prototype} | facts | sample_count(ctx)
        return Done(body | head | {"trained": torch.tensor(True)}, up)

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        ups = dict(sorted(ups.items()))
        counts, table = (torch.stack([up[k] for up in ups.values()]) for k in ("label_counts", "prototype"))
        number = counts.sum(0)
        pooled = (counts[:, :, None] * table).sum(0) / torch.where(number > 0, number, 1)[:, None]
        prototype = torch.where((number > 0)[:, None], pooled, server["prototype"])
        a = self.mixtures(list(ups.values()))
        sent = combine(lambda *heads: torch.stack(heads), *(select(up, "head") for up in ups.values()))
        fresh = combine(lambda heads: torch.tensordot(a.to(heads), heads, dims=1), sent)
        rows = {c: {k: v[i] for k, v in fresh.items()} for i, c in enumerate(ups)}
        mixed = with_rows(without_prefix("mixed", server), rows)
        body = mean_of_uploads(ups, "body", weighting="samples")
        return body | prefixed("mixed", mixed) | {"prototype": prototype, "known": server["known"] | (number > 0)}

    def mixtures(self, ups: Sequence[Items]) -> Tensor:
        """Return the weights [S, S] of the heads in each participant's mixture, float64."""
        if not self.cfg.collaborate:
            return torch.eye(len(ups), dtype=torch.float64)
        h = torch.stack([up["feature_mean"].flatten() for up in ups]).double()
        inner = (h - h.mean(0)) @ (h - h.mean(0)).T
        variance = torch.tensor([float(up["variance"]) for up in ups], dtype=torch.float64).diag()
        rows = []
        for i in range(len(ups)):
            apart = inner - inner[:, i, None] - inner[i] + inner[i, i]  # <h_j - h_i, h_l - h_i>
            try:
                a = simplex_minimum((variance + apart).numpy())
            except RuntimeError:  # the solver has not ended: the client keeps its own head
                a = np.eye(len(ups))[i]
            kept = np.where(a < self.cfg.cutoff, 0, a)
            rows.append(torch.from_numpy(kept / kept.sum() if kept.any() else a))
        return torch.stack(rows)

    def deploy(self, state: Items, down: Items) -> Items:
        own = self.cfg.tested == "trained" and bool(state["trained"])
        return select(state if own else down, *self.shared)

    def deploy_trained(self, state: Items, down: Items, up: Items) -> Items:
        return select(up, *self.shared)

    def observe(self, memory: Items, down: Items, up: Items) -> Items:
        return select(up, *self.shared) | {"trained": torch.tensor(True)}

    def reconstruct_state(self, memory: Items) -> Items:
        return memory

    def change(self, state: Items, down: Items, up: Items, lr: float, steps: int) -> Items:
        """The head's gradient is summed over the batches of an epoch; the label histogram is read, not matched."""
        seen = super().change(state, down, up, lr, steps)
        size = (self.cfg.head_lr or lr) * max(1, self.cfg.head_epochs)
        seen |= {k: (down[k] - v) / size for k, v in select(up, "head").items()}
        return {k: v for k, v in seen.items() if k != "label_counts"}


def simplex_minimum(p: np.ndarray) -> np.ndarray:
    """Return the a >= 0 with sum 1 that minimises a^T P a; P [S, S] positive semidefinite.

    By least squares over x >= 0: for x = t a, |L^T x|^2 + (1 - sum x)^2 = t^2 q + (1 - t)^2 with P = L L^T and q = a^T P a.
    The best t leaves q/(1 + q), which grows with q, so the best x points to the best a. Raises RuntimeError if the solver
    does not end.
    """
    scale = float(np.trace(p)) or 1.0
    root = np.linalg.cholesky(p / scale + RIDGE * np.eye(len(p)))
    x, _ = nnls(np.vstack([root.T, np.ones(len(p))]), np.append(np.zeros(len(p)), 1.0))
    return x / x.sum()
