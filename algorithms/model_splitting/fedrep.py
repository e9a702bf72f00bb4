"""FedRep: shared body, personal head, trained one after the other.

Source   Collins et al., ICML 2021, arXiv 2102.07078, Algorithm 1.
Solves   min over body b and heads h_i of  sum_i mean_(x,y) CE(h_i(b(x)), y)
Wire     down body.* | up body.* (num_samples with weighting = samples)     Private   head.*
Cost     head_epochs of the head alone (features are computed once), then one FedAvg pass; the body in each direction.
Leaks    The body's gradient at a head that the server never sees, fitted to the data just before.
Limits   body epochs 0: up equals down.   head_epochs = 0, private_start = shared, weighting = samples: FedBABU.
Differs  head_epochs: paper 10, PFLlib 1.   weighting: paper uniform, PFLlib by samples.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pflsec.core.algorithm import Algorithm, Done, PrivateStart, mean_of_uploads, sample_count
from pflsec.core.config import above, at_least, option
from pflsec.core.items import Items
from pflsec.core.local import Local


class FedRepConfig(PrivateStart):
    head_epochs: int = at_least(0, default=10, about="epochs of the head before the body moves", paper=10, pfllib=1)
    head_lr: float | None = above(0, default=None, about="learning rate of the head phase; none: the run's", paper=0.01)
    weighting: Literal["uniform", "samples"] = option(
        default="uniform", about="weights of the mean over uploads", paper="uniform", pfllib="samples"
    )


class FedRep(Algorithm[FedRepConfig]):
    key, shared, private = "fedrep", ("body",), ("head",)
    Config = FedRepConfig
    down: ClassVar = {"body.*": "weights"}
    up: ClassVar = {"body.*": "weights", "num_samples?": "counts"}
    dp_support = "full"
    batchnorm = "yes"
    presets: ClassVar = {
        "paper": {"head_epochs": 10, "lr": 0.01, "batch_size": 10, "local_epochs": 1, "participation": 0.1},
        "pfllib": {
            "head_epochs": 1,
            "weighting": "samples",
            "private_start": "shared",
            "lr": 0.005,
            "batch_size": 10,
            "local_epochs": 1,
        },
    }

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        body, head, cfg = down, state, self.cfg
        head = ctx.fit(head, on=ctx.head_ce, features_of=body, epochs=cfg.head_epochs, lr=cfg.head_lr, phase="head")
        body = ctx.fit(body, on=lambda b, x, y: ctx.ce(b | head, x, y))
        return Done(state=head, up=body | (sample_count(ctx) if cfg.weighting == "samples" else {}))

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        return mean_of_uploads(ups, *self.shared, weighting=self.cfg.weighting)
