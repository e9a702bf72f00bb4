"""FML: each client trains a personal model and a copy of the shared one, and the two learn from each other.

Source   Shen et al. 2020, arXiv 2006.16765 (deep mutual learning); authors' code for weights and means.
Solves   p, q: predictions of the personal model theta and of the shared one, phi, at the same step
         theta  min  mean  alpha CE(p, y) + (1 - alpha) KL(q | p), q held constant
         phi    min  mean  beta CE(q, y) + (1 - beta) KL(p | q), p held constant
Wire     down body.*, head.* | up body.*, head.*     Private   theta: body.*, head.* of a second model
Cost     Twice FedAvg's local work; FedAvg's bytes; one model of memory per client.
Leaks    The gradient of a cross entropy with the soft label beta y + (1 - beta) p, where p is hidden. In a first round in
         which both models are equal (private_start = shared): FedAvg's gradient, times beta.
Limits   alpha = beta = 1: FedAvg with uniform weights, and beside it isolated training.
Differs  loss: authors' code weighs both terms by 1, as alpha = beta = 0.5 at twice the rate. PFLlib 1 and 0: the shared
         model sees no labels, and the personal one nothing of it.  KL: mean over the batch, PFLlib over classes as well.
"""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from pflsec.core.algorithm import Algorithm, Done, PrivateStart, mean_of_uploads
from pflsec.core.config import between
from pflsec.core.items import Items, prefixed, without_prefix
from pflsec.core.local import Local
from pflsec.training.local import cross_entropy


class FMLConfig(PrivateStart):
    alpha: float = between(
        0, 1, default=0.5, about="weight of the labels for the personal model", paper="tuned", code=0.5, pfllib=1.0
    )
    beta: float = between(
        0, 1, default=0.5, about="weight of the labels for the shared model", paper="tuned", code=0.5, pfllib=0.0
    )


class FML(Algorithm[FMLConfig]):
    key, shared, private = "fml", ("body", "head"), ("body", "head")
    Config = FMLConfig
    down: ClassVar = {"body.*": "weights", "head.*": "weights"}
    up: ClassVar = {"body.*": "weights", "head.*": "weights"}
    dp_support = "full"
    presets: ClassVar = {
        "authors": {"alpha": 0.5, "beta": 0.5, "lr": 0.2},
        "pfllib": {
            "alpha": 1.0,
            "beta": 0.0,
            "private_start": "shared",
            "lr": 0.005,
            "batch_size": 10,
            "local_epochs": 1,
        },
    }

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        alpha, beta = self.cfg.alpha, self.cfg.beta

        def loss(pair: Items, x: Tensor, y: Tensor) -> Tensor:
            """Return both losses' sum: each moves its own model alone, since the other's predictions are constants."""
            z_p, z_q = (self.net.logits(without_prefix(name, pair), x) for name in ("personal", "shared"))
            p, q = z_p.log_softmax(1), z_q.log_softmax(1)
            personal = alpha * cross_entropy(z_p, y) + (1 - alpha) * divergence(ctx.constant(q), p)
            shared = beta * cross_entropy(z_q, y) + (1 - beta) * divergence(ctx.constant(p), q)
            return personal + shared

        pair = ctx.fit(prefixed("personal", state) | prefixed("shared", down), on=loss)
        return Done(state=without_prefix("personal", pair), up=without_prefix("shared", pair))

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        return mean_of_uploads(ups, *self.shared, weighting="uniform")

    def global_model(self, server: Items) -> Items:
        return server


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """Return KL(teacher | student) of each row, [B], from log-probabilities [B, C]."""
    return (teacher.exp() * (teacher - student)).sum(1)
