"""FedGC: a shared body, and for each client a row of weights per class of its own, which the server corrects.

Source   Niu, Deng, AAAI 2022, arXiv 2112.07246; classes that several clients hold are an extension of ours.
Solves   clients  min over body b and rows W_i of  mean CE(W_i b(x), y) among their own classes;  server, one step on
         Reg = sum over rows q of -log e^(w.q) / (e^(w.q) + sum e^(v.q)),  w = q the row, v rows of other clients and classes
Wire     down body.*, embedding, held (only body.* at a client's first exchange) | up body.*, embedding, num_samples
         (held at a client's first exchange)
Private  rows that a client draws for its first exchange
Cost     FedAvg with m < C rows of the last layer; on the server M^2 inner products of all M rows.
Leaks    To the server the gradient of a model among few classes, all of it known to the server but the rows that a
         client's first exchange starts from; and once the exact class set.
         To a client a mixture of other clients' rows: its own as they come back, minus as they were sent.
Limits   correction = 0: the rows come back as they were sent.   One class: nothing moves locally.   One client: no step.
Differs  query: PFLlib one mean row per class, against clients without that class.   own_term: full pushes rows outwards.
         loss: the network's own head and its bias are not used.   start of rows: here apart, PFLlib equal on all clients.
"""

import math
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from pflsec.core.algorithm import Algorithm, Done, PrivateStart, mean_of_uploads, sample_count
from pflsec.core.config import above, at_least, between, option
from pflsec.core.items import Items, select
from pflsec.core.local import Local
from pflsec.core.streams import seed_from, stream
from pflsec.training.local import cross_entropy


class FedGCConfig(PrivateStart):
    correction: float = at_least(
        0, default=0.05, about="size of the server's step: lambda times the clients' learning rate", pfllib=0.005
    )
    loss: Literal["softmax", "cosine", "arcface"] = option(
        default="softmax", about="logits: inner products, scaled cosines, or these with a margin", pfllib="softmax"
    )
    scale: float = above(0, default=16.0, about="scale of the cosines")
    margin: float = between(0, 1, default=0.5, about="angle in radians that arcface adds at the label")
    query: Literal["own", "mean"] = option(
        default="own",
        about="a row's query: itself, or the mean row of its class over clients",
        paper="own",
        pfllib="mean",
    )
    negatives: Literal["others", "unheld"] = option(
        default="others",
        about="rows that a query is pushed from: other classes of other clients; unheld: that its client lacks, too",
    )
    own_term: Literal["detached", "full"] = option(
        default="detached", about="whether a row is also pulled along itself", paper="full", pfllib="detached"
    )
    weighting: Literal["samples", "uniform"] = option(
        default="samples", about="weights of the mean over bodies", paper="samples", pfllib="samples"
    )


class FedGC(Algorithm[FedGCConfig]):
    key, shared, private = "fedgc", ("body",), ()
    Config = FedGCConfig
    down: ClassVar = {"body.*": "weights", "embedding?": "weights [m, d]", "held?": "label set [C]"}
    up: ClassVar = {
        "body.*": "weights", "embedding": "weights [m, d]", "num_samples?": "counts", "held?": "label set [C]",
    }  # fmt: skip
    dp_support = "partial: held is computed from raw data"
    presets: ClassVar = {
        "pfllib": {"correction": 0.005, "query": "mean", "private_start": "shared", "lr": 0.005, "batch_size": 10,
                   "local_epochs": 1},
    }  # fmt: skip

    def init_server(self, fresh: Items) -> Items:
        """Return the body, and room for a row of each client and class, [N, C, d], with the mask of those in use."""
        size, dtype = (self.clients, self.net.classes), next(iter(fresh.values())).dtype
        table = torch.zeros(*size, self.net.feature_dim, dtype=dtype)
        return select(fresh, "body") | {"table": table, "held": torch.zeros(size, dtype=torch.bool)}

    def init_client(self, fresh: Items, server: Items) -> Items:
        size = self.net.classes, self.net.feature_dim
        draw = torch.rand(size, generator=stream(self.key, seed_from(fresh), "rows"), dtype=server["table"].dtype)
        return {"table": (2 * draw - 1) / math.sqrt(self.net.feature_dim)}

    def downlink(self, server: Items, client: int) -> Items:
        held = server["held"][client]
        rows = {"embedding": server["table"][client][held], "held": held} if held.any() else {}
        return select(server, "body") | rows

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        first = "held" not in down
        held = ctx.class_counts() > 0 if first else down["held"]
        rows = state["table"][held] if first else down["embedding"]

        def loss(model: Items, x: Tensor, y: Tensor) -> Tensor:
            target = ctx.one_hot(y)[:, held]
            return cross_entropy(self.logits(model["embedding"], self.net.features(model, x), target), target)

        model = ctx.fit(select(down, "body") | {"embedding": rows}, on=loss)
        weight = sample_count(ctx) if self.cfg.weighting == "samples" else {}
        return Done(state, up=model | weight | ({"held": held} if first else {}))

    def logits(self, rows: Tensor, z: Tensor, target: Tensor | None = None) -> Tensor:
        """Return the logits [B, m] of features z; arcface's margin is laid on the target [B, m] where there is one."""
        if self.cfg.loss == "softmax":
            return z @ rows.T
        cosine = F.normalize(z, dim=1) @ F.normalize(rows, dim=1).T
        if self.cfg.loss == "arcface" and target is not None:
            cosine = cosine + target * (self._with_margin(cosine) - cosine)
        return self.cfg.scale * cosine

    def _with_margin(self, cosine: Tensor) -> Tensor:
        """Return cos(angle + margin); beyond pi, where that would rise again, a line that keeps falling."""
        m, sine = self.cfg.margin, (1 - cosine.square()).clamp(min=1e-12).sqrt()
        turned = cosine * math.cos(m) - sine * math.sin(m)
        return torch.where(cosine > -math.cos(m), turned, cosine - m * math.sin(m))

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        table, held = server["table"].clone(), server["held"].clone()
        for client, up in ups.items():
            held[client] = up.get("held", held[client])
            table[client, held[client]] = up["embedding"]
        body = mean_of_uploads(ups, "body", weighting=self.cfg.weighting)
        return body | {"table": self.corrected(table, held), "held": held}

    def corrected(self, table: Tensor, held: Tensor) -> Tensor:
        """Return the rows [N, C, d] after one step on Reg; without any negatives, as they are."""
        who, what = held.nonzero(as_tuple=True)
        rows = table[who, what]
        return table.index_put((who, what), rows - self.cfg.correction * self.slope(rows, who, what, held))

    def slope(self, rows: Tensor, who: Tensor, what: Tensor, held: Tensor) -> Tensor:
        """Return the gradient of Reg, [M, d]: row z gets sum over queries of P(z | q) q, by which the queries push it.

        who, what  client and class of each row
        """
        cfg, cosine = self.cfg, self.cfg.loss != "softmax"
        w = F.normalize(rows, dim=1) if cosine else rows
        foreign = (who[:, None] != who) & (what[:, None] != what)  # query, row
        if cfg.query == "mean":
            same = (what[:, None] == what).to(w)
            q, foreign = same @ w / same.sum(1, keepdim=True), ~held[:, what].T[:, who]
        elif cfg.negatives == "unheld":
            q, foreign = w, foreign & ~held[who][:, what]
        else:
            q = w
        scale = cfg.scale if cosine else 1.0
        own = scale * (q * q).sum(1, keepdim=True)
        against = (scale * q @ w.T).masked_fill(~foreign, -torch.inf)
        p = torch.cat([own, against], 1).softmax(1)
        slope = scale * p[:, 1:].T @ q
        if cfg.own_term == "full" and cfg.query == "own":
            slope = slope - scale * (1 - p[:, :1]) * q
        if cosine:  # w lies on the sphere: only what is across a row moves its direction
            slope = (slope - (slope * w).sum(1, keepdim=True) * w) / rows.norm(dim=1, keepdim=True)
        return slope

    def deploy(self, state: Items, down: Items) -> Items:
        """Return the body and the client's rows, each at its class; before its first exchange, all that it drew."""
        held = down.get("held", torch.ones(self.net.classes, dtype=torch.bool))
        table = torch.zeros_like(state["table"])
        table[held] = down.get("embedding", state["table"])
        return select(down, "body") | {"table": table, "held": held}

    def scores(self, items: Items, x: Tensor) -> Tensor:
        """Return each class's score by its row, the highest where there are several; never of a class without."""
        z, held = self.net.features(items, x), items["held"].reshape(-1, self.net.classes)
        rows = items["table"].reshape(-1, z.shape[1])
        seen = self.logits(rows, z).reshape(len(z), -1, self.net.classes)
        return torch.where(held, seen, -torch.inf).amax(1)

    def global_model(self, server: Items) -> Items:
        return server

    def change(self, state: Items, down: Items, up: Items, lr: float, steps: int) -> Items:
        first = {"embedding": state["table"][up["held"]]} if "held" in up else {}
        return super().change(state, down | first, up, lr, steps)
