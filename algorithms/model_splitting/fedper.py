"""FedPer: shared body, personal head, trained together in the same steps.

Source   Arivazhagan et al. 2019, arXiv 1912.00818, Algorithm 1.
Solves   min over body b and heads h_i of  sum_i n_i/n mean_(x,y in i) CE(h_i(b(x)), y)
Wire     down body.* | up body.*, num_samples     Private   head.*
Cost     1 forward and backward per sample and epoch; the body in each direction; one head of memory per client.
Leaks    The body's gradient at a head that is never sent: it enters through one d-vector per image and hides no more.
         Labels cannot be read from the last bias. With private_start = shared the first exchange hides nothing.
Limits   Nothing personal (split after the last layer): FedAvg.   All personal (split at the first): isolated training.
Differs  start of heads: paper apart, PFLlib shared.   newcomer_epochs: here the head alone, PFLlib trains all parts.
         weights: the paper divides by all clients' samples, here by those of the accepted uploads.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch

from pflsec.core.algorithm import Algorithm, Done, PrivateStart, mean_of_uploads, sample_count
from pflsec.core.config import at_least, option
from pflsec.core.items import Items, select
from pflsec.core.local import Local


class FedPerConfig(PrivateStart):
    newcomer_epochs: int = at_least(
        0, default=0, about="epochs of its head alone before a client that has never taken part is tested"
    )
    weighting: Literal["samples", "uniform"] = option(
        default="samples", about="weights of the mean over uploads", paper="samples", pfllib="samples"
    )


class FedPer(Algorithm[FedPerConfig]):
    key, shared, private = "fedper", ("body",), ("head",)
    Config = FedPerConfig
    down: ClassVar = {"body.*": "weights"}
    up: ClassVar = {"body.*": "weights", "num_samples?": "counts"}
    dp_support = "full"
    batchnorm = "yes"
    presets: ClassVar = {
        "flower": {"lr": 0.01, "batch_size": 128, "local_epochs": 4},
        "pfllib": {"private_start": "shared", "lr": 0.005, "batch_size": 10, "local_epochs": 1},
    }

    def init_client(self, fresh: Items, server: Items) -> Items:
        return select(fresh, *self.private) | {"trained": torch.tensor(False)}

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        model = ctx.fit(down | select(state, *self.private), on=ctx.ce)
        weight = sample_count(ctx) if self.cfg.weighting == "samples" else {}
        head = select(model, *self.private) | {"trained": torch.tensor(True)}
        return Done(state=head, up=select(model, *self.shared) | weight)

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        return mean_of_uploads(ups, *self.shared, weighting=self.cfg.weighting)

    def deploy(self, state: Items, down: Items) -> Items:
        return select(down, *self.shared) | state

    def personalise(self, ctx: Local, items: Items) -> Items:
        """Return the model of a client that has never taken part with its head fitted to the body as it is now."""
        if items["trained"] or not self.cfg.newcomer_epochs:
            return items
        head, body = select(items, *self.private), select(items, *self.shared)
        epochs = self.cfg.newcomer_epochs
        return items | ctx.fit(head, on=ctx.head_ce, features_of=body, epochs=epochs, phase="newcomer")
