"""APFL: FedAvg for one model, and beside it a local model of each client; what it uses is a mixture of the two.

Source   Deng, Kamani, Mahdavi 2020, arXiv 2003.13461, Algorithm 1; authors' code where preset authors says so.
Solves   min over w of FedAvg's objective; for each client  min over v, a in [0, 1] of  F_i(a v + (1 - a) w);  at every
         step w, v and a move by their own gradients at the values before it, w being constant to the others
Wire     down body.*, head.* | up body.*, head.* (num_samples with weighting = samples)
Private  v: body.*, head.* of a second model; a
Cost     Twice FedAvg's local work; FedAvg's bytes; two models of memory per client, one with eval_global = fresh.
Leaks    What FedAvg leaks, bit for bit: v and a do not enter what is sent. Private training clips all three gradients as
         one, so there the bits differ.
Limits   alpha = 0, alpha_lr = 0: v stays, the mixture is w.   alpha = 1, alpha_lr = 0: v is isolated training.
Differs  adaptation: the paper has a fixed and a learnt; here it is learnt, alpha_lr = 0 fixes it.  mix, alpha_every,
         alpha_decay: authors' code logits, round, 0.02.  v: PFLlib trains it on F_i(v) and mixes w into it every round.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor

from pflsec.core.algorithm import Algorithm, Done, mean_of_uploads, sample_count
from pflsec.core.config import Config, at_least, between, option
from pflsec.core.items import Items, combine, prefixed, select, without_prefix
from pflsec.core.local import Local, paced
from pflsec.training.local import cross_entropy


class APFLConfig(Config):
    alpha: float = between(
        0, 1, default=0.5, about="first weight of the local model in the mixture", paper="0.25 to 0.75", pfllib=1.0
    )
    alpha_lr: float | None = at_least(
        0, default=None, about="learning rate of that weight; none: the run's; 0: it stays", paper="0, or learnt"
    )
    alpha_every: Literal["step", "round"] = option(
        default="step", about="round: the weight moves at the first step of a round alone", code="round", pfllib="step"
    )
    alpha_decay: float = at_least(
        0, default=0.0, about="added to the weight's gradient, times the weight", paper=0, code=0.02, pfllib=0.02
    )
    mix: Literal["weights", "logits"] = option(
        default="weights", about="what is mixed: the two models or their outputs", paper="weights", code="logits"
    )
    eval_global: Literal["own", "fresh"] = option(
        default="own", about="what is mixed in for use: the client's last trained w, or the one it would receive now"
    )
    weighting: Literal["uniform", "samples"] = option(
        default="uniform", about="weights of the mean over uploads", paper="uniform", pfllib="samples"
    )


class APFL(Algorithm[APFLConfig]):
    key, shared, private = "apfl", ("body", "head"), ("body", "head")
    Config = APFLConfig
    down: ClassVar = {"body.*": "weights", "head.*": "weights"}
    up: ClassVar = {"body.*": "weights", "head.*": "weights", "num_samples?": "counts"}
    dp_support = "full"
    presets: ClassVar = {
        "authors": {"alpha_every": "round", "alpha_decay": 0.02, "mix": "logits"},
        "pfllib": {"alpha": 1.0, "alpha_decay": 0.02, "weighting": "samples", "lr": 0.005, "batch_size": 10,
                   "local_epochs": 1},
    }  # fmt: skip

    def init_client(self, fresh: Items, server: Items) -> Items:
        w = select(server, *self.shared)
        own = prefixed("own", w) if self.cfg.eval_global == "own" else {}
        return w | own | {"alpha": torch.tensor(self.cfg.alpha), "trained": torch.tensor(False)}

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        cfg, alpha = self.cfg, state["alpha"]
        pace = 1.0 if cfg.alpha_lr is None else cfg.alpha_lr / ctx.lr
        settled = [alpha] if cfg.alpha_lr == 0 else []

        def loss(p: Items, x: Tensor, y: Tensor) -> Tensor:
            fixed = {k: ctx.constant(p[k]) for k in down}
            mixed = self.mixed_logits(fixed, without_prefix("v", p), paced(ctx, p["alpha"], pace), x)
            return ctx.ce(p, x, y) + cross_entropy(mixed, y)

        def decay(p: Items, rng: torch.Generator) -> Tensor:
            return cfg.alpha_decay / 2 * paced(ctx, p["alpha"], pace).square()

        def allowed(p: Items) -> Items:
            moved = settled[0] if settled else p["alpha"].clamp(0, 1)
            if cfg.alpha_every == "round" and not settled:
                settled.append(moved)
            return p | {"alpha": moved}

        start = down | prefixed("v", select(state, *self.private)) | {"alpha": alpha}
        end = ctx.fit(start, on=loss, penalty=decay if cfg.alpha_decay else None, project=allowed)
        w = select(end, *self.shared)
        own = prefixed("own", w) if cfg.eval_global == "own" else {}
        kept = without_prefix("v", end) | own | {"alpha": end["alpha"], "trained": torch.tensor(True)}
        return Done(kept, up=w | (sample_count(ctx) if cfg.weighting == "samples" else {}))

    def mixed_logits(self, w: Items, v: Items, alpha: Tensor, x: Tensor) -> Tensor:
        """Return the class scores [B, classes] of the mixture. `lerp` gives v exactly at 1, and w exactly at 0."""
        if self.cfg.mix == "logits":
            return torch.lerp(self.net.logits(w, x), self.net.logits(v, x), alpha)
        return self.net.logits(combine(lambda w, v: torch.lerp(w, v, alpha), w, v), x)

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        return mean_of_uploads(ups, *self.shared, weighting=self.cfg.weighting)

    def deploy(self, state: Items, down: Items) -> Items:
        w = select(down, *self.shared)
        if not state["trained"]:
            return w
        w, v, alpha = without_prefix("own", state) or w, select(state, *self.private), state["alpha"]
        if self.cfg.mix == "logits":
            return v | prefixed("own", w) | {"alpha": alpha}
        return combine(lambda w, v: torch.lerp(w, v, alpha), w, v)

    def deploy_trained(self, state: Items, down: Items, up: Items) -> Items:
        return self.deploy(state, up)

    def scores(self, items: Items, x: Tensor) -> Tensor:
        if "alpha" not in items:
            return self.net.logits(items, x)
        return self.mixed_logits(without_prefix("own", items), items, items["alpha"], x)

    def global_model(self, server: Items) -> Items:
        return server

    def observe(self, memory: Items, down: Items, up: Items) -> Items:
        own = prefixed("own", select(up, *self.shared)) if self.cfg.eval_global == "own" else {}
        return memory | own | {"trained": torch.tensor(True)}

    def reconstruct_state(self, memory: Items) -> Items:
        """Return w alone: nothing on the wire depends on v or a."""
        return {k: v for k, v in memory.items() if k.startswith("own.") or k == "trained"}
