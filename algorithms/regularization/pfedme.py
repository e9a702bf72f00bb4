"""pFedMe: a personal model solves its client's problem near the shared one, which then moves a little towards it.

Source   Dinh, Tran, Nguyen, NeurIPS 2020, arXiv 2006.08848, Algorithm 1.
Solves   min over w of  mean_i F_i(w),  F_i(w) = min over theta of  f_i(theta) + lam/2 |theta - w|^2  (Moreau envelope)
Wire     down body.*, head.* | up body.*, head.* (num_samples with weighting = samples)
Private  theta: body.*, head.* of a second model
Cost     inner_steps times FedAvg's gradients on FedAvg's batches; FedAvg's bytes; one model of memory per client.
Leaks    theta starts at the model received, so nothing is hidden. One batch: down - up = lr lam (w - theta), which gives
         theta itself; with one inner step, the gradient of the batch.
Limits   lam or lr 0: w stands still. inner_lr = 0: theta is w. lr lam = 1: w jumps onto theta. beta = 0: w never changes.
         One batch and one inner step: FedAvg with learning rate lr lam inner_lr.
Differs  lam: paper 15, PFLlib 1.  beta: PFLlib 0.  decay: PFLlib 0.001.  weighting: authors' and public code by samples.
         batches: paper 20 a round, here the run's epochs.
"""

import warnings
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor

from pflsec.core.algorithm import Algorithm, Done, mean_of_uploads, sample_count
from pflsec.core.config import Config, at_least, option
from pflsec.core.errors import PflsecWarning
from pflsec.core.items import Items, combine, select
from pflsec.core.local import Local, half_squared_distance


class PFedMeConfig(Config):
    lam: float = at_least(0, default=15.0, about="weight of the pull of theta towards w", paper=15.0, pfllib=1.0)
    inner_steps: int = at_least(0, default=5, about="steps of theta on each batch", paper=5, pfllib=5)
    inner_lr: float | None = at_least(
        0,
        default=None,
        about="learning rate of theta; none: lr / (1 + lr lam), stable with the pull where the run's lr is without it",
        paper="0.01 to 0.1",
        pfllib=0.01,
    )
    inner_reset: bool = option(default=False, about="theta starts at w on each batch, not where the last one left it")
    decay: float = at_least(0, default=0.0, about="weight decay of theta", paper=0.0, pfllib=0.001)
    beta: float = at_least(
        0, default=1.0, about="share of the mean in the next w; above 1 it goes beyond", paper="1 to 4", pfllib=0.0
    )
    untrained: Literal["global", "adapt"] = option(
        default="global",
        about="model of a client that never trained: w, or inner_steps on one of its batches from there",
    )
    weighting: Literal["uniform", "samples"] = option(
        default="uniform", about="weights of the mean over uploads", paper="uniform", code="samples", pfllib="samples"
    )


class PFedMe(Algorithm[PFedMeConfig]):
    key, shared, private = "pfedme", ("body", "head"), ("body", "head")
    Config = PFedMeConfig
    down: ClassVar = {"body.*": "weights", "head.*": "weights"}
    up: ClassVar = {"body.*": "weights", "head.*": "weights", "num_samples?": "counts"}
    dp_support = "none: the steps on one minibatch are not the separate draws that the account is kept of"
    presets: ClassVar = {
        "paper": {"lam": 15.0, "inner_lr": 0.1, "beta": 1.0, "lr": 0.005, "batch_size": 20},
        "pfllib": {"lam": 1.0, "inner_lr": 0.01, "decay": 0.001, "beta": 0.0, "weighting": "samples", "lr": 0.005,
                   "batch_size": 10, "local_epochs": 1},
    }  # fmt: skip

    def init_client(self, fresh: Items, server: Items) -> Items:
        return select(server, *self.shared) | {"trained": torch.tensor(False)}

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        pace = ctx.lr * self.cfg.lam
        if pace > 1:
            warnings.warn(
                f"pfedme: lr * lam is {pace:g}; above 1 the shared model goes beyond the personal one. Lower lr or lam.",
                PflsecWarning,
                stacklevel=2,
            )
        w = theta = down
        for x, y in ctx.batches():
            theta = self.personal(ctx, w if self.cfg.inner_reset else theta, w, x, y)
            w = combine(lambda w, near: torch.lerp(w, near, pace), w, theta)
        sent = w | (sample_count(ctx) if self.cfg.weighting == "samples" else {})
        return Done(state=theta | {"trained": torch.tensor(True)}, up=sent)

    def personal(self, ctx: Local, theta: Items, w: Items, x: Tensor, y: Tensor) -> Items:
        """Return theta after its steps on one batch, held near w."""
        cfg, origin = self.cfg, combine(torch.zeros_like, w)
        pull, shrink = half_squared_distance(cfg.lam, w), half_squared_distance(cfg.decay, origin)
        held = (lambda p, rng: pull(p, rng) + shrink(p, rng)) if cfg.decay else pull
        for _ in range(cfg.inner_steps):
            theta = ctx.step(theta, ctx.ce, x, y, penalty=held, lr=self.inner_lr(ctx.lr))
        return theta

    def inner_lr(self, lr: float) -> float:
        """Return the learning rate of theta in a round whose learning rate is lr."""
        return lr / (1 + lr * self.cfg.lam) if self.cfg.inner_lr is None else self.cfg.inner_lr

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        mean = mean_of_uploads(ups, *self.shared, weighting=self.cfg.weighting)
        return combine(lambda w, new: torch.lerp(w, new, self.cfg.beta), server, mean)

    def global_model(self, server: Items) -> Items:
        return server

    def deploy(self, state: Items, down: Items) -> Items:
        model = state if state["trained"] else down
        return select(model, *self.private) | {"trained": state["trained"]}

    def personalise(self, ctx: Local, items: Items) -> Items:
        if items["trained"] or self.cfg.untrained == "global":
            return items
        w = select(items, *self.private)
        x, y = next(iter(ctx.batches(1, phase="adapt")))
        return self.personal(ctx, w, w, x, y)

    def change(self, state: Items, down: Items, up: Items, lr: float, steps: int) -> Items:
        """Exactly the gradient for one batch and one inner step without decay, else a sum of several on that scale."""
        size = self.cfg.lam * self.inner_lr(lr) * self.cfg.inner_steps
        return super().change(state, down, up, lr * size, steps) if size else {}
