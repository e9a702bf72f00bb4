"""Per-FedAvg: the shared model is a start from which one gradient step on a client's own data leads to its model.

Source   Fallah, Mokhtari, Ozdaglar, NeurIPS 2020, arXiv 2002.07948, Algorithm 1.
Solves   min over w of  mean_i F_i(w),  F_i(w) = f_i(w - alpha grad f_i(w))
Wire     down body.*, head.* | up body.*, head.* (num_samples with weighting = samples)     Private   nothing
Cost     fo: 2 gradients a step on 2 batches, FedAvg's work per sample; exact, hf: one more, of second order.
Leaks    The gradient of one half of the batches at a point that the other half has moved; that half shows in the
         curvature alone, times alpha.
Limits   alpha = 0: FedAvg with uniform weights and learning rate beta, on every other batch. beta = 0: nothing moves.
Differs  variant: the paper names exact, fo and hf, public code runs fo.  beta: PFLlib takes alpha for it.
         weighting: PFLlib by samples.  adapt_steps: paper 1, FL-bench at least an epoch.
"""

import warnings
from collections.abc import Mapping
from itertools import islice
from typing import ClassVar, Literal

import torch
from torch import Tensor

from pflsec.core.algorithm import Algorithm, Done, mean_of_uploads, sample_count
from pflsec.core.config import Config, above, at_least, option
from pflsec.core.items import Items, combine
from pflsec.core.local import Local, LossPerExample


class PerFedAvgConfig(Config):
    variant: Literal["fo", "hf", "exact"] = option(
        default="fo",
        about="gradient of F_i: fo leaves its curvature out, hf takes it by differences",
        paper="exact",
        pfllib="fo",
    )
    alpha: float = at_least(0, default=0.01, about="size of the inner step, and of the client's own", pfllib=0.005)
    beta: float | None = at_least(
        0, default=None, about="size of the outer step; none: the run's learning rate", pfllib=0.005
    )
    delta: float = above(0, default=1e-3, about="half the distance of the two points of hf")
    adapt_steps: int = at_least(
        0, default=1, about="steps by which a client fits the shared model to itself", paper=1, pfllib=1
    )
    weighting: Literal["uniform", "samples"] = option(
        default="uniform", about="weights of the mean over uploads", paper="uniform", pfllib="samples"
    )


class PerFedAvg(Algorithm[PerFedAvgConfig]):
    key, shared, private = "perfedavg", ("body", "head"), ()
    Config = PerFedAvgConfig
    down: ClassVar = {"body.*": "weights", "head.*": "weights"}
    up: ClassVar = {"body.*": "weights", "head.*": "weights", "num_samples?": "counts"}
    dp_support = "full"
    batchnorm = "no: it takes gradients at points of its own, and no step of a model that statistics could follow"
    presets: ClassVar = {
        "pfllib": {"alpha": 0.005, "weighting": "samples", "lr": 0.005, "batch_size": 10, "local_epochs": 2},
    }

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        w, fo = down, self.cfg.variant == "fo"
        for batches in ctx.row_sets(2 if fo else 3):
            w = moved(w, self.meta_gradient(ctx, w, *batches), self._beta(ctx.lr))
        return Done(state, up=w | (sample_count(ctx) if self.cfg.weighting == "samples" else {}))

    def meta_gradient(self, ctx: Local, w: Items, inner: Tensor, outer: Tensor, third: Tensor | None = None) -> Items:
        """Return (I - alpha H(w; third)) grad f(w - alpha grad f(w; inner); outer), without H if there is no third."""
        ahead = moved(w, ctx.gradient(w, ctx.ce, inner, phase="inner"), self.cfg.alpha)
        g = ctx.gradient(ahead, ctx.ce, outer)
        if third is None:
            return g
        return moved(g, ctx.gradient(w, self._slope(ctx, g), third, phase="curvature"), self.cfg.alpha)

    def _slope(self, ctx: Local, v: Items) -> LossPerExample:
        """Return the derivative of each example's loss along v, whose gradient is H v; hf: by a central difference."""
        delta = self.cfg.delta

        def exact(w: Items, x: Tensor, y: Tensor) -> Tensor:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # of torch, about its own way to do this
                return torch.func.jvp(lambda at: ctx.ce(at, x, y), (w,), (v,))[1]

        def central(w: Items, x: Tensor, y: Tensor) -> Tensor:
            return (ctx.ce(moved(w, v, -delta), x, y) - ctx.ce(moved(w, v, delta), x, y)) / (2 * delta)

        return exact if self.cfg.variant == "exact" else central

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        return mean_of_uploads(ups, *self.shared, weighting=self.cfg.weighting)

    def personalise(self, ctx: Local, items: Items) -> Items:
        steps = self.cfg.adapt_steps
        for (rows,) in islice(ctx.row_sets(1, epochs=steps, phase="adapt"), steps):
            items = moved(items, ctx.gradient(items, ctx.ce, rows, phase="adapt"), self.cfg.alpha)
        return items

    def global_model(self, server: Items) -> Items:
        return server

    def change(self, state: Items, down: Items, up: Items, lr: float, steps: int) -> Items:
        beta = self._beta(lr)  # the outer step's size, not the inner one's
        return super().change(state, down, up, beta, steps) if beta else {}

    def _beta(self, lr: float) -> float:
        return lr if self.cfg.beta is None else self.cfg.beta


def moved(w: Items, along: Items, size: float) -> Items:
    """Return w - size * along."""
    return combine(lambda p, g: torch.sub(p, g, alpha=size), w, along)
