"""LG-FedAvg: personal body, shared head, trained together in the same steps.

Source   Liang et al. 2020, arXiv 2001.01523, Algorithm 1; authors' code where it says so.
Solves   min over head h and bodies b_i of  sum_i n_i/n mean_(x,y in i) CE(h(b_i(x)), y)
Wire     down head.* (body.*, warm with warm_start_rounds) | up head.*, num_samples (body.* in a warm round)
Private  body.*
Cost     1 forward and backward per sample and epoch; the head in each direction; one body of memory per client.
Leaks    The head's gradient alone: labels by its bias, and of one image its features exactly (row over bias). Pixels lie
         behind a body that is never sent, known before a client's first step with private_start = shared or a warm start.
Limits   All shared (split at the first layer): FedAvg.   Nothing shared (split after the last): isolated training.
Differs  warm_start_rounds: the authors start all clients from a converged FedAvg model, PFLlib from one random draw.
         weighting: paper samples, authors' code uniform, the same for its clients of equal size.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch

from pflsec.core.algorithm import Algorithm, Done, PrivateStart, mean_of_uploads, sample_count
from pflsec.core.config import at_least, option
from pflsec.core.items import Items, select
from pflsec.core.local import Local


class LGFedAvgConfig(PrivateStart):
    warm_start_rounds: int = at_least(
        0, default=0, about="rounds of FedAvg first, whose body is sent to each client once more", pfllib=0
    )
    weighting: Literal["samples", "uniform"] = option(
        default="samples", about="weights of the mean over uploads", paper="samples", code="uniform", pfllib="samples"
    )


class LGFedAvg(Algorithm[LGFedAvgConfig]):
    key, shared, private = "lgfedavg", ("head",), ("body",)
    Config = LGFedAvgConfig
    down: ClassVar = {"body.*?": "weights", "head.*": "weights", "warm?": "scalar"}
    up: ClassVar = {"body.*?": "weights", "head.*": "weights", "num_samples?": "counts"}
    dp_support = "full"
    batchnorm = "yes"
    presets: ClassVar = {
        "authors": {"weighting": "uniform", "lr": 0.1, "batch_size": 50, "local_epochs": 1, "participation": 0.1,
                    "rounds": 200},
        "pfllib": {"private_start": "shared", "lr": 0.005, "batch_size": 10, "local_epochs": 1},
    }  # fmt: skip

    def init_server(self, fresh: Items) -> Items:
        if not self.cfg.warm_start_rounds:
            return select(fresh, "head")
        return fresh | {"warm": torch.tensor(self.cfg.warm_start_rounds), "served": torch.zeros(self.clients).bool()}

    def downlink(self, server: Items, client: int) -> Items:
        """Return the head; in a warm round, and until a client has trained the warm body as its own, that body as well."""
        if "warm" not in server or server["served"][client]:
            return select(server, "head")
        return select(server, "body", "head") | {"warm": server["warm"] > 0}

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        model = ctx.fit(self._model(state, down), on=ctx.ce)
        sent = ("body", "head") if down.get("warm") else self.shared
        weight = sample_count(ctx) if self.cfg.weighting == "samples" else {}
        return Done(state=select(model, "body"), up=select(model, *sent) | weight)

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        warm = "warm" in server and bool(server["warm"])
        parts = ("body", "head") if warm else self.shared
        server = server | mean_of_uploads(ups, *parts, weighting=self.cfg.weighting)
        if warm:
            return server | {"warm": server["warm"] - 1}
        if "warm" in server:
            return server | {"served": server["served"].index_fill(0, torch.tensor(list(ups)), True)}
        return server

    def deploy(self, state: Items, down: Items) -> Items:
        return self._model(state, down)

    def deploy_trained(self, state: Items, down: Items, up: Items) -> Items:
        return state | select(up, "head")

    def _model(self, state: Items, down: Items) -> Items:
        """Return the client's body, or the one that came with the head, under that head."""
        return state | select(down, "body", "head")
