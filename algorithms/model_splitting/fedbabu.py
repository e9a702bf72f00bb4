"""FedBABU: the federation trains the body alone, under a random head that never moves; clients fine-tune copies for use.

Source   Oh, Kim, Yun, ICLR 2022, arXiv 2106.06042, Algorithm 1.
Solves   min over body b of  sum_i n_i/n mean_(x,y in i) CE(h_0(b(x)), y),  h_0 fixed
Wire     down body.* (head.* until a client's first upload has arrived) | up body.*, num_samples     Private   nothing
Cost     FedAvg without the head's gradient, the body in each direction; tune_epochs before a client's model is used.
Leaks    The body's gradient under a model that the server knows whole in every round, so labels come back through the
         known head. Missing is the head's gradient alone.
Limits   head_epochs = 0, private_start = shared, weighting = samples of FedRep: the same bits.   tune_epochs = 0: one model.
Differs  tuning starts at the newest aggregate, as in the paper; PFLlib's at what a client's own last round left.
         weighting: paper samples, authors' code uniform, the same for its clients of equal size.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from pflsec.core.algorithm import Algorithm, Done, mean_of_uploads, sample_count
from pflsec.core.config import Config, above, at_least, option
from pflsec.core.items import Items, select
from pflsec.core.local import Local
from pflsec.core.streams import seed_from, stream


class FedBABUConfig(Config):
    tune_epochs: int = at_least(
        0, default=5, about="epochs by which a client fits a copy of the model to its own rows", paper=5, pfllib=10
    )
    tuned: Literal["full", "head", "body"] = option(
        default="full", about="the part of the copy that is fitted", paper="full", pfllib="full"
    )
    tune_lr: float | None = above(0, default=None, about="learning rate of the fitting; none: the run's")
    head_start: Literal["default", "orthogonal"] = option(
        default="default", about="the fixed head: as the network draws it, or with orthogonal rows", paper="both"
    )
    weighting: Literal["samples", "uniform"] = option(
        default="samples", about="weights of the mean over uploads", paper="samples", code="uniform", pfllib="samples"
    )


class FedBABU(Algorithm[FedBABUConfig]):
    key, shared, private = "fedbabu", ("body",), ()
    Config = FedBABUConfig
    down: ClassVar = {"body.*": "weights", "head.*?": "weights"}
    up: ClassVar = {"body.*": "weights", "num_samples?": "counts"}
    dp_support = "full"
    batchnorm = "yes"
    presets: ClassVar = {
        "paper": {"lr": 0.1, "batch_size": 50, "local_epochs": 10, "participation": 0.1, "rounds": 32},
        "pfllib": {"tune_epochs": 10, "lr": 0.005, "batch_size": 10, "local_epochs": 1},
    }

    def init_server(self, fresh: Items) -> Items:
        head = select(fresh, "head")
        if self.cfg.head_start == "orthogonal":
            rng = stream(self.key, seed_from(fresh), "head")
            rows = {k: torch.empty_like(v) for k, v in head.items() if v.dim() > 1}
            head |= {k: nn.init.orthogonal_(v, generator=rng) for k, v in rows.items()}
        return select(fresh, "body") | head | {"met": torch.zeros(self.clients, dtype=torch.bool)}

    def init_client(self, fresh: Items, server: Items) -> Items:
        """Return the head, which is public: it is the same constant everywhere, and sent only so that it is counted."""
        return select(server, "head")

    def downlink(self, server: Items, client: int) -> Items:
        return select(server, *(("body",) if server["met"][client] else ("body", "head")))

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        head = state | select(down, "head")
        body = ctx.fit(select(down, "body"), on=lambda b, x, y: ctx.ce(b | head, x, y))
        return Done(state=head, up=body | (sample_count(ctx) if self.cfg.weighting == "samples" else {}))

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        met = server["met"].index_fill(0, torch.tensor(list(ups)), True)
        return server | mean_of_uploads(ups, "body", weighting=self.cfg.weighting) | {"met": met}

    def deploy(self, state: Items, down: Items) -> Items:
        return select(down, "body") | state

    def personalise(self, ctx: Local, items: Items) -> Items:
        """Return a copy fitted to the client's own rows; the copy is used, and nothing of it is kept or sent."""
        cfg = self.cfg
        part = items if cfg.tuned == "full" else select(items, cfg.tuned)

        def loss(p: Items, x: Tensor, y: Tensor) -> Tensor:
            return ctx.ce(items | p, x, y)

        return items | ctx.fit(part, on=loss, epochs=cfg.tune_epochs, lr=cfg.tune_lr, phase="tune")

    def global_model(self, server: Items) -> Items:
        return select(server, "body", "head")
