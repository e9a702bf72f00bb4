"""FedBN: all is shared but the BatchNorm layers, which each client keeps with weights and running statistics.

Source   Li et al., ICLR 2021, arXiv 2102.07623, Algorithm 1.
Solves   min over shared w and norms v_i of  sum_i mean_(x,y) CE(f(x; w, v_i), y)
Wire     down body.*, head.* | up body.*, head.* (num_samples with weighting = samples)
Private  of both parts the BatchNorm layers, which are never sent (with personal_norms GroupNorm and LayerNorm as well)
Cost     FedAvg, less the norms in each direction: about 0.1 % of a ResNet-18. Four vectors a layer and client.
Leaks    The gradient of all that is shared, at weights and biases of the norms that the server does not see; not the
         statistics of the batch, which FedAvg sends along.
Limits   Without such layers: FedAvg with the same weighting, and a warning.
Differs  weighting: paper uniform, PFLlib by samples.  membership: by the type of a layer; public code goes by names,
         and misses some layers or all.  calibrate_new: ours.
"""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Literal

import torch

from pflsec.core.algorithm import Algorithm, Done, mean_of_uploads, sample_count
from pflsec.core.config import Config, option
from pflsec.core.errors import PflsecWarning, UnfitError
from pflsec.core.items import Items
from pflsec.core.local import Local
from pflsec.core.network import Net


class FedBNConfig(Config):
    weighting: Literal["uniform", "samples"] = option(
        default="uniform", about="weights of the mean over uploads", paper="uniform", pfllib="samples"
    )
    personal_norms: bool = option(default=False, about="keep layers of GroupNorm and LayerNorm as well", paper=False)
    calibrate_new: bool = option(
        default=True,
        about="before a client that has never trained is tested, its running statistics see its training rows once",
    )


class FedBN(Algorithm[FedBNConfig]):
    key, shared, private = "fedbn", ("body", "head"), ()
    Config = FedBNConfig
    down: ClassVar = {"body.*": "weights", "head.*": "weights"}
    up: ClassVar = {"body.*": "weights", "head.*": "weights", "num_samples?": "counts"}
    dp_support = "full"
    batchnorm = "yes"
    presets: ClassVar = {
        "paper": {"lr": 0.01, "batch_size": 32, "local_epochs": 1},
        "pfllib": {"weighting": "samples", "lr": 0.005, "batch_size": 10, "local_epochs": 1},
    }

    def __init__(self, cfg: FedBNConfig, net: Net, clients: int):
        super().__init__(cfg, net, clients)
        self.contract = replace(self.contract, omit=self.kept())
        if self.kept() >= net.shapes.keys():
            raise UnfitError(
                "fedbn: all parameters of the model belong to normalisation layers, so nothing is left to share. Use local."
            )
        if not self.kept():
            warnings.warn(
                f"fedbn: the model has no BatchNorm layer, so this is fedavg with weighting={cfg.weighting}. Use a model that "
                "has some, such as cnn-bn or resnet18.",
                PflsecWarning,
                stacklevel=2,
            )

    def kept(self) -> frozenset[str]:
        """Return the names of the items that stay on the client."""
        return self.net.norms | (self.net.sample_norms if self.cfg.personal_norms else frozenset())

    def sent(self, model: Items) -> Items:
        """Return the items of a model that are shared."""
        return {k: v for k, v in model.items() if k not in self.kept()}

    def norms(self, model: Items) -> Items:
        """Return the items of a model that stay on the client."""
        return {k: v for k, v in model.items() if k in self.kept()}

    def init_server(self, fresh: Items) -> Items:
        return self.sent(fresh)

    def init_client(self, fresh: Items, server: Items) -> Items:
        return self.norms(fresh) | {"trained": torch.tensor(False)}

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        model = ctx.fit(down | self.norms(state), on=ctx.ce)
        weight = sample_count(ctx) if self.cfg.weighting == "samples" else {}
        return Done(self.norms(model) | {"trained": torch.tensor(True)}, up=self.sent(model) | weight)

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        return mean_of_uploads(ups, *self.shared, weighting=self.cfg.weighting)

    def personalise(self, ctx: Local, items: Items) -> Items:
        """Return the model with statistics of the client's own rows where it has none: an epoch in which no weight moves."""
        if items["trained"] or not self.cfg.calibrate_new or not self.net.buffers:
            return items
        return items | ctx.fit(
            {k: v for k, v in items.items() if k != "trained"}, on=ctx.ce, epochs=1, lr=0.0, phase="calibrate"
        )

    def deploy(self, state: Items, down: Items) -> Items:
        return self.sent({k: v for k, v in down.items() if k in self.net.shapes}) | state
