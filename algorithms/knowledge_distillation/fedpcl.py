"""FedPCL: clients keep their extractors, exchange class means of unit features, and learn by contrast to everybody's.

Source   Tan et al., NeurIPS 2022, arXiv 2209.10083; here the whole body is trained, and there are no frozen backbones.
Solves   locally  min over body f of  l(C) + 1/N sum_p l(P_p),  z = f(x)/|f(x)|,
         l(Q) = mean_b - log [ exp(z_b.Q_y/tau) / sum over known k, k != y_b, of exp(z_b.Q_k/tau) ];
         C the mean prototypes, P_p those of client p, with C where p holds none
Wire     down mean, sets, known | up prototype, held (counts with weighting = count)     Private   body.*; no head
Cost     FedAvg's pass over the body and one forward pass; (N + 1) C d numbers down, C d up; N C d on the server.
Leaks    The exact set of a client's labels, and means of unit features: of the public first extractor in its first
         exchange, later of one that nobody sees. Every client receives every other one's means, not their mean alone.
Limits   First exchange of a client, also of a late one, and one known class: nothing is trained.
         include_positive: softmax cross entropy, twice.
Differs  denominator: PFLlib keeps the positive class.  tau: authors' code 0.07, PFLlib 1.  steps: theirs Adam, here SGD.
         objective: the authors' published code contrasts prototypes with the features of a batch, and has no mean.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from pflsec.core.algorithm import Algorithm, Done, PrivateStart
from pflsec.core.config import above, option
from pflsec.core.items import Items, select
from pflsec.core.local import Local, LossPerExample
from pflsec.core.prototypes import as_table, class_means, nearest


class FedPCLConfig(PrivateStart):
    private_start: Literal["apart", "shared"] = option(
        default="shared", about="shared: all extractors start from one public draw; apart: each client draws its own"
    )
    tau: float = above(0, default=0.07, about="temperature of the contrast", code=0.07, pfllib=1.0)
    include_positive: bool = option(
        default=False, about="keep the sample's own class in the denominator: the loss is then bounded", pfllib=True
    )
    renormalise: bool = option(default=False, about="bring a class's mean back to length 1")
    stale: bool = option(
        default=True, about="send also the prototypes of clients that missed the last round", pfllib=True
    )
    weighting: Literal["uniform", "count"] = option(
        default="uniform", about="weights of a class's mean over clients", code="uniform", paper="count"
    )


class FedPCL(Algorithm[FedPCLConfig]):
    key, shared, private = "fedpcl", (), ("body",)
    Config = FedPCLConfig
    down: ClassVar = {"mean": "prototypes [known, d]", "sets": "prototypes [n, known, d]", "known": "label set [C]"}
    up: ClassVar = {"prototype": "prototypes [held, d]", "held": "label set [C]", "counts?": "counts [C]"}
    dp_support = "partial: prototype and held are computed from raw data"
    presets: ClassVar = {
        "authors": {"batch_size": 32, "local_epochs": 1},
        "pfllib": {"tau": 1.0, "include_positive": True, "lr": 0.005, "batch_size": 10, "local_epochs": 1},
    }

    def init_server(self, fresh: Items) -> Items:
        classes, d, n = self.net.classes, self.net.feature_dim, self.clients
        table, sets = torch.zeros(classes, d), torch.zeros(n, classes, d)
        masks = {"known": torch.zeros(classes), "holds": torch.zeros(n, classes), "last": torch.zeros(n)}
        return {"table": table, "sets": sets} | {k: v.bool() for k, v in masks.items()}

    def init_client(self, fresh: Items, server: Items) -> Items:
        own = {"table": torch.zeros_like(server["table"]), "held": torch.zeros_like(server["known"])}
        return select(fresh, "body") | own | {"trained": torch.tensor(False)}

    def downlink(self, server: Items, client: int) -> Items:
        known, holds = server["known"], server["holds"]
        who = holds.any(1) if self.cfg.stale else server["last"]
        filled = torch.where(holds[:, :, None], server["sets"], server["table"])
        return {"mean": server["table"][known], "sets": filled[who][:, known], "known": known}

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        body, contrasts = select(state, "body"), self.contrasts(state, down)
        if contrasts:
            body = ctx.fit(body, on=self.contrast(ctx, down))
        sums, counts = ctx.class_sums(lambda x: unit(self.net.features(body, x)))
        held = counts > 0
        table = class_means(sums, counts)
        table = unit(table) if self.cfg.renormalise else table
        kept = body | {"table": table, "held": held, "trained": state["trained"] | torch.tensor(contrasts)}
        up = {"prototype": table[held], "held": held}
        return Done(kept, up | ({"counts": counts} if self.cfg.weighting == "count" else {}))

    def contrasts(self, state: Items, down: Items) -> bool:
        """Return whether a client trains: it has sent its prototypes before, and at least two classes are known."""
        return bool(state["held"].any()) and int(down["known"].sum()) > 1

    def contrast(self, ctx: Local, down: Items) -> LossPerExample:
        """Return l(mean) + the mean of l over the received sets. A class that is not known adds nothing."""
        known = down["known"]
        tables = torch.cat([down["mean"][None], down["sets"]])
        own = torch.eye(int(known.sum()), dtype=torch.bool)

        def loss(body: Items, x: Tensor, y: Tensor) -> Tensor:
            z = unit(self.net.features(body, x))
            near = torch.einsum("bd,qkd->qbk", z, tables.to(z)) / self.cfg.tau
            if self.cfg.include_positive:
                rest = near.logsumexp(2, keepdim=True)
            else:
                rest = near[:, :, None].masked_fill(own, -torch.inf).logsumexp(3)
            each = ((rest - near) * ctx.one_hot(y)[:, known]).sum(2)
            return each[0] + each[1:].mean(0)

        return loss

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        sets, holds, last = server["sets"].clone(), server["holds"].clone(), torch.zeros_like(server["last"])
        total, weight = torch.zeros_like(server["table"]), torch.zeros(self.net.classes)
        for client, up in ups.items():
            held = up["held"]
            sets[client], holds[client], last[client] = as_table(up["prototype"], held), held, True
            share = up["counts"] if self.cfg.weighting == "count" else held.to(weight)
            total += share[:, None] * sets[client]
            weight += share
        seen = weight > 0
        table = torch.where(seen[:, None], total / torch.where(seen, weight, 1)[:, None], server["table"])
        return {"table": table, "sets": sets, "known": server["known"] | seen, "holds": holds, "last": last}

    def deploy(self, state: Items, down: Items) -> Items:
        own = select(state, "table", "held")
        if not state["held"].any():  # not asked yet: the mean prototypes are all there is
            own = {"table": as_table(down["mean"], down["known"]), "held": down["known"]}
        return select(state, "body") | own

    def deploy_trained(self, state: Items, down: Items, up: Items) -> Items:
        return self.deploy(state, down)

    def scores(self, items: Items, x: Tensor) -> Tensor:
        """Nearest own prototype, among the classes that the client holds."""
        return nearest(unit(self.net.features(items, x)), items["table"], items["held"])

    def observe(self, memory: Items, down: Items, up: Items) -> Items:
        trained = memory["trained"] | torch.tensor(self.contrasts(memory, down))
        return memory | {"table": as_table(up["prototype"], up["held"]), "held": up["held"], "trained": trained}

    def reconstruct_state(self, memory: Items) -> Items:
        """Return its prototypes, and its extractor while that is still the public first one."""
        public = self.cfg.private_start == "shared" and not memory["trained"]
        return {k: v for k, v in memory.items() if public or not k.startswith("body.")}


def unit(z: Tensor) -> Tensor:
    """Return rows [B, d] at length 1."""
    return F.normalize(z, dim=1)
