"""FedGH: each client keeps its body; the server trains one head on the class means of the clients' features.

Source   Yi et al., ACM MM 2023, arXiv 2303.13137, Algorithm 1.
Solves   clients  min over body b_i and a copy of the head h of  mean CE(h(b_i(x)), y);  server, SGD over the pairs
         (mean feature z_ic, class c) of a round on  CE(h(z_ic), c)
Wire     down head.* | up prototype, held (counts with weighting = count)
Private  body.*, head.* as local training left it
Cost     1 FedAvg pass and one forward pass; up C x d numbers at most, down the head; a head pass a pair on the server.
Leaks    The exact set of a client's labels, and mean features of an extractor that is never sent: the feature itself of a
         class with one image, but which classes these are is not told. No gradient is sent, and none of the head's is shown.
Limits   server_lr = 0: the head never moves, and no client's result depends on another's.
Differs  batches of the server: paper and authors one pair a step, PFLlib ten, shuffled.   server_lr: not set apart in the
         authors' code, whose header stays as drawn; PFLlib 1.0.   means: over all rows, in public code of batches or a part.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch

from pflsec.core.algorithm import Algorithm, Done, PrivateStart
from pflsec.core.config import at_least, option
from pflsec.core.items import Items, select
from pflsec.core.local import Local
from pflsec.core.prototypes import class_means
from pflsec.core.streams import seed_from, stream
from pflsec.training.local import cross_entropy


class FedGHConfig(PrivateStart):
    server_lr: float = at_least(0, default=0.05, about="learning rate of the server's head", pfllib=1.0)
    server_epochs: int = at_least(0, default=1, about="passes of the server over a round's pairs", paper=1, pfllib=1)
    server_batch_size: int = at_least(1, default=1, about="pairs in a step of the server", paper=1, pfllib=10)
    shuffle: bool = option(
        default=False, about="a new order of the pairs in every pass, not by client and class", pfllib=True
    )
    weighting: Literal["uniform", "count"] = option(
        default="uniform",
        about="weights of the pairs in the server's loss; count: by their rows, which are then sent",
        paper="uniform",
        pfllib="uniform",
    )
    tested: Literal["own", "global"] = option(
        default="own",
        about="head of a client's model: as its training left it, or the newest one",
        code="own",
        pfllib="global",
    )


class FedGH(Algorithm[FedGHConfig]):
    key, shared, private = "fedgh", ("head",), ("body", "head")
    Config = FedGHConfig
    down: ClassVar = {"head.*": "weights"}
    up: ClassVar = {"prototype": "prototypes [held, d]", "held": "label set [C]", "counts?": "counts [C]"}
    dp_support = "partial: prototype and held are computed from raw data"
    presets: ClassVar = {
        "authors": {"lr": 0.01, "batch_size": 64, "local_epochs": 10, "participation": 0.1},
        "pfllib": {"server_lr": 1.0, "server_batch_size": 10, "shuffle": True, "tested": "global",
                   "private_start": "shared", "lr": 0.005, "batch_size": 10, "local_epochs": 1},
    }  # fmt: skip

    def init_server(self, fresh: Items) -> Items:
        return select(fresh, "head") | {"seed": torch.tensor(seed_from(fresh)), "turn": torch.tensor(0)}

    def init_client(self, fresh: Items, server: Items) -> Items:
        return select(fresh, "body") | select(server, "head") | {"trained": torch.tensor(False)}

    def downlink(self, server: Items, client: int) -> Items:
        return select(server, "head")

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        model = ctx.fit(select(state, "body") | down, on=ctx.ce)
        sums, counts = ctx.class_sums(lambda x: self.net.features(model, x))
        held = counts > 0
        prototype = class_means(sums, counts)[held]
        up = {"prototype": prototype, "held": held} | ({"counts": counts} if self.cfg.weighting == "count" else {})
        return Done(state=model | {"trained": torch.tensor(True)}, up=up)

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        """Return the head after SGD on the pairs, in the order of clients and classes unless they are shuffled."""
        cfg, sent = self.cfg, [up for _, up in sorted(ups.items())]
        z, y = (
            torch.cat(parts) for parts in zip(*((u["prototype"], u["held"].nonzero()[:, 0]) for u in sent), strict=True)
        )
        if not len(y):  # noise can leave no class of any client
            return server | {"turn": server["turn"] + 1}
        weight = torch.ones_like(z[:, 0])
        if cfg.weighting == "count":
            weight = torch.cat([up["counts"][up["held"]] for up in sent])
            weight = weight / weight.mean()
        head, rng = select(server, "head"), stream(self.key, int(server["seed"]), int(server["turn"]))
        for _ in range(cfg.server_epochs):
            order = torch.randperm(len(y), generator=rng) if cfg.shuffle else torch.arange(len(y))
            for rows in order.split(cfg.server_batch_size):
                held = {k: v.detach().requires_grad_() for k, v in head.items()}
                loss = (weight[rows] * cross_entropy(self.net.head(held, z[rows]), y[rows])).mean()
                slopes = torch.autograd.grad(loss, list(held.values()))
                head = {k: v.detach() - cfg.server_lr * s for (k, v), s in zip(held.items(), slopes, strict=True)}
        return server | head | {"turn": server["turn"] + 1}

    def deploy(self, state: Items, down: Items) -> Items:
        own = self.cfg.tested == "own" and bool(state["trained"])
        return select(state, "body") | select(state if own else down, "head")

    def deploy_trained(self, state: Items, down: Items, up: Items) -> Items:
        return select(state, "body", "head")
