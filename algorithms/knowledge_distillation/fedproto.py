"""FedProto: clients keep their whole models and exchange class-mean features (prototypes).

Source   Tan et al., AAAI 2022, arXiv 2105.00243, Algorithm 1 and the authors' published update rule.
Solves   locally  min over theta of  mean CE(h(f(x)), y) + lam/(B d) sum_b [y_b known] |f(x_b) - C_{y_b}|^2
Wire     down prototype, known | up prototype, held (counts with weighting = count)     Private   body.*, head.*
Cost     1 FedAvg pass and one forward pass; C x d numbers each way.
Leaks    The exact set of a client's labels; features of an extractor that the server does not have.
Limits   lam = 0: isolated training that still sends prototypes.
Differs  prototypes: ours and the paper's from the trained model in one pass; PFLlib's from all local steps.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor

from pflsec.core.algorithm import Algorithm, Done, PrivateStart
from pflsec.core.config import at_least, option
from pflsec.core.items import Items, select
from pflsec.core.local import Local
from pflsec.core.prototypes import as_table, class_means, nearest


class FedProtoConfig(PrivateStart):
    lam: float = at_least(
        0, default=1.0, about="weight of the distance to the global prototypes", paper=1.0, pfllib=1.0
    )
    weighting: Literal["uniform", "count"] = option(
        default="uniform", about="weights of a class's mean over clients", paper="uniform", pfllib="uniform"
    )


class FedProto(Algorithm[FedProtoConfig]):
    key, shared, private = "fedproto", (), ("body", "head")
    Config = FedProtoConfig
    down: ClassVar = {"prototype": "prototypes [known, d]", "known": "label set [C]"}
    up: ClassVar = {"prototype": "prototypes [held, d]", "held": "label set [C]", "counts?": "counts [C]"}
    dp_support = "partial: prototype and held are computed from raw data"
    batchnorm = "yes"
    presets: ClassVar = {"pfllib": {"private_start": "shared", "lr": 0.005, "batch_size": 10, "local_epochs": 1}}

    def init_server(self, fresh: Items) -> Items:
        classes = self.net.classes
        return {"table": torch.zeros(classes, self.net.feature_dim), "known": torch.zeros(classes, dtype=torch.bool)}

    def init_client(self, fresh: Items, server: Items) -> Items:
        return fresh | {"held": torch.zeros(self.net.classes, dtype=torch.bool)}

    def downlink(self, server: Items, client: int) -> Items:
        return {"prototype": server["table"][server["known"]], "known": server["known"]}

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        table, known = as_table(down["prototype"], down["known"]), down["known"]

        def loss(model: Items, x: Tensor, y: Tensor) -> Tensor:
            z, target = self.net.features(model, x), ctx.one_hot(y)
            pulled = target @ known.to(z)
            return ctx.head_ce(model, z, y) + self.cfg.lam * pulled * (z - target @ table.to(z)).square().mean(1)

        model = ctx.fit(select(state, *self.private), on=loss)
        sums, counts = ctx.class_sums(lambda x: self.net.features(model, x))
        held = counts > 0
        prototype = class_means(sums, counts)[held]
        up = {"prototype": prototype, "held": held}
        return Done(state=model | {"held": held}, up=up | ({"counts": counts} if self.cfg.weighting == "count" else {}))

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        total, weight = torch.zeros_like(server["table"]), torch.zeros(self.net.classes)
        for up in ups.values():
            share = up["counts"] if self.cfg.weighting == "count" else up["held"].to(weight)
            total[up["held"]] += share[up["held"], None] * up["prototype"]
            weight += share
        seen = weight > 0
        table = torch.where(seen[:, None], total / weight.clamp(min=1)[:, None], server["table"])
        return {"table": table, "known": server["known"] | seen}

    def deploy(self, state: Items, down: Items) -> Items:
        return state | {"table": as_table(down["prototype"], down["known"]), "known": down["known"]}

    def deploy_trained(self, state: Items, down: Items, up: Items) -> Items:
        return self.deploy(state, down)

    def scores(self, items: Items, x: Tensor) -> Tensor:
        """Nearest global prototype, among the classes that the client holds (all known ones before it has trained)."""
        allowed = items["known"] & (items["held"] if items["held"].any() else items["known"])
        if not allowed.any():  # no prototype has ever been aggregated: the head is all there is
            return self.net.logits(items, x)
        return nearest(self.net.features(items, x), items["table"], allowed)
