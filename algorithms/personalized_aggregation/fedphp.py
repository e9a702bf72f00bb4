"""FedPHP: each client inherits a private model, the running mean of what it trained, which teaches the shared one.

Source   Li et al., ECML PKDD 2021 (LNCS 12975, 587-602); constants as in the authors' published code.
Solves   locally  min over w of  (1 - lam) mean CE(f(x; w), y) + lam R(w, h),  then  h <- m h + (1 - m) w,
         m = mu min(1, z / max(1, floor(ramp planned))), z how often the client took part before
         R = mmd: MMD^2 between the features of w and h over a batch, biased, five Gaussian kernels, widths b0 2^k / 4,
         b0 the mean squared distance of two features; kd: cross entropy of w's outputs to h's softened ones
Wire     down body.*, head.* | up body.*, head.*, num_samples     Private   h: body.*, head.* of a second model; z
Cost     FedAvg and one forward pass of the teacher a step; FedAvg's bytes; one model of memory per client.
Leaks    The log gives h away: it starts public, and is folded from the uploads. With it (1 - lam) of FedAvg's gradient
         plus lam of R's, which the attacker can compute; with mmd the head shows (1 - lam) of FedAvg's alone.
Limits   lam = 0: FedAvg's uploads.   mu = 0: h is the last w.   lam = 1: no label is learnt from.
Differs  lam: authors' code 0.05 or 0.1, PFLlib 1.  m: PFLlib counts the rounds of the run.  widths: there fixed.
         tested model: PFLlib takes the working model, not h.  floor of the widths: ours.
"""

import warnings
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor

from pflsec.core.algorithm import Algorithm, Done, mean_of_uploads, sample_count
from pflsec.core.config import Config, above, at_least, between, option
from pflsec.core.errors import PflsecWarning
from pflsec.core.items import Items, combine, prefixed, select, without_prefix
from pflsec.core.local import Local
from pflsec.core.network import Net

KERNELS = 5
FLOOR = 1e-4  # of the kernels' width, as a share of the mean squared feature


class FedPHPConfig(Config):
    lam: float = between(
        0, 1, default=0.05, about="weight of the teacher; labels weigh the rest", code="0.05 or 0.1", pfllib=1.0
    )
    teacher: Literal["mmd", "kd"] = option(
        default="mmd", about="what the inherited model teaches: where features lie, or outputs", pfllib="mmd"
    )
    temperature: float = above(0, default=4.0, about="softens the teacher's outputs with teacher = kd", code=4.0)
    skip_first: bool = option(
        default=False, about="no teacher in a client's first round, when its inherited model is the first of all"
    )
    mu: float = between(0, 1, default=0.9, about="weight that inheritance reaches", code=0.9, pfllib=0.0)
    ramp: float = between(0, 1, default=0.1, about="share of the planned rounds until it is reached", code=0.1)
    planned: int = at_least(1, default=1000, about="rounds that are planned", code=1000, pfllib="the run's")
    tested: Literal["inherited", "both"] = option(
        default="inherited", about="both: mean of the class probabilities of the inherited and the shared model"
    )
    weighting: Literal["samples", "uniform"] = option(
        default="samples", about="weights of the mean over uploads", code="samples", pfllib="samples"
    )


class FedPHP(Algorithm[FedPHPConfig]):
    key, shared, private = "fedphp", ("body", "head"), ("body", "head")
    Config = FedPHPConfig
    down: ClassVar = {"body.*": "weights", "head.*": "weights"}
    up: ClassVar = {"body.*": "weights", "head.*": "weights", "num_samples?": "counts"}
    dp_support = "none: the distance of the features' distributions couples the samples of a batch"
    presets: ClassVar = {
        "authors": {"lam": 0.05, "mu": 0.9, "ramp": 0.1, "planned": 1000},
        "pfllib": {"lam": 1.0, "mu": 0.0, "lr": 0.005, "batch_size": 10, "local_epochs": 1},
    }

    def __init__(self, cfg: FedPHPConfig, net: Net, clients: int):
        super().__init__(cfg, net, clients)
        if cfg.lam == 1:
            warnings.warn(
                "fedphp: lam is 1; labels then count for nothing, and the first model never learns. Choose it below 1, "
                "such as 0.05.",
                PflsecWarning,
                stacklevel=2,
            )

    def init_client(self, fresh: Items, server: Items) -> Items:
        return select(server, *self.shared) | {"times": torch.tensor(0)}

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        cfg, h = self.cfg, select(state, *self.private)

        def loss(w: Items, x: Tensor, y: Tensor) -> Tensor:
            z, taught = self.net.features(w, x), self.net.features(h, x)
            if cfg.teacher == "mmd":
                apart = mmd(ctx, z, taught)
            else:
                soft = (self.net.head(h, taught) / cfg.temperature).softmax(1)
                apart = -(soft * self.net.head(w, z).log_softmax(1)).sum(1)
            return (1 - cfg.lam) * ctx.head_ce(w, z, y) + cfg.lam * apart

        alone = cfg.lam == 0 or (cfg.skip_first and not state["times"])
        w = ctx.fit(down, on=ctx.ce if alone else loss)
        return Done(self.inherit(state, w), up=w | (sample_count(ctx) if cfg.weighting == "samples" else {}))

    def inherit(self, state: Items, w: Items) -> Items:
        """Return the state after a round that ended at w. `lerp` gives exactly w the first time."""
        times, full = int(state["times"]), max(int(self.cfg.ramp * self.cfg.planned), 1)
        m = self.cfg.mu * min(times / full, 1.0)
        h = combine(lambda w, h: torch.lerp(w, h, m), w, select(state, *self.private))
        return h | {"times": state["times"] + 1}

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        return mean_of_uploads(ups, *self.shared, weighting=self.cfg.weighting)

    def deploy(self, state: Items, down: Items) -> Items:
        w = select(down, *self.shared)
        if not state["times"]:
            return w
        return select(state, *self.private) | (prefixed("shared", w) if self.cfg.tested == "both" else {})

    def deploy_trained(self, state: Items, down: Items, up: Items) -> Items:
        return self.deploy(state, up)

    def scores(self, items: Items, x: Tensor) -> Tensor:
        if not (other := without_prefix("shared", items)):
            return self.net.logits(items, x)
        return (self.net.logits(items, x).softmax(1) + self.net.logits(other, x).softmax(1)) / 2

    def global_model(self, server: Items) -> Items:
        return server

    def observe(self, memory: Items, down: Items, up: Items) -> Items:
        return self.inherit(memory, select(up, *self.shared))

    def reconstruct_state(self, memory: Items) -> Items:
        return memory


def mmd(ctx: Local, a: Tensor, b: Tensor) -> Tensor:
    """Return the biased MMD^2, 0-d, between features a and b, [B, d] each. The kernels' width is constant in a step.

    It has a floor: without, the kernels know no scale, and the slope at one image's two features is the inverse of what
    rounding leaves between them.
    """
    both, n = torch.cat([a, b]), len(a) + len(b)
    apart = (both[:, None] - both).square().sum(2)
    width = torch.maximum(apart.sum() / (n * n - n), FLOOR * both.square().sum(1).mean())
    width = ctx.constant(torch.where(width > 0, width, 1))
    k = torch.stack([torch.exp(-4 * apart / (width * 2**i)) for i in range(KERNELS)]).sum(0)
    own, other = k[: len(a), : len(a)] + k[len(a) :, len(a) :], k[: len(a), len(a) :] + k[len(a) :, : len(a)]
    return (own - other).mean()
