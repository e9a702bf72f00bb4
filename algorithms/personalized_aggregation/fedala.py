"""FedALA: each client mixes its own last model with the one received, weight by weight, and learns how much of each.

Source   Zhang et al., AAAI 2023, arXiv 2212.01197, Algorithm 1.
Solves   start = old + (received - old) W on the last `layers` layers, the received model below them; W in [0, 1] by
         projected SGD on  mean CE(f(x; start), y);  then FedAvg's local objective from start
Wire     down body.*, head.* | up body.*, head.*, num_samples (not with weighting = uniform)     Private   W, the start
Cost     FedAvg and one more epoch over `share` of the rows; the first time until the loss settles, at least 11 epochs.
Leaks    Lower layers: FedAvg's gradient at a point whose upper layers are hidden; these lie between two known models.
Limits   mix_lr = 0: FedAvg. First exchange of a client: FedAvg's.
Differs  tested model: the start, before training, as in the authors' code.  subset: random rows, there a random slice.
         layers: a layer is weight and bias together, there each tensor counts.
"""

from collections.abc import Mapping, Sequence
from statistics import pstdev
from typing import ClassVar, Literal

import torch
from torch import Tensor

from pflsec.core.algorithm import Algorithm, Done, mean_of_uploads, sample_count
from pflsec.core.config import Config, above, at_least, option
from pflsec.core.items import Items, combine, prefixed, select, without_prefix
from pflsec.core.local import Local

WINDOW = 10  # epochs over which the loss must have settled


class FedALAConfig(Config):
    layers: int = at_least(
        1, default=1, about="how many of the last layers are mixed; more than there are: all", paper=1, pfllib=1
    )
    mix_lr: float = at_least(0, default=1.0, about="learning rate of the mixing weights", paper=1.0, pfllib=1.0)
    share: float = above(0, default=0.8, about="share of the rows on which the mixing is learnt", paper=0.8, pfllib=0.8)
    threshold: float = at_least(
        0, default=0.1, about="the first mixing ends when the loss of 10 epochs deviates by less", paper=0.1, pfllib=0.1
    )
    most_epochs: int = at_least(1, default=50, about="epochs after which the first mixing ends in any case")
    weighting: Literal["samples", "uniform"] = option(
        default="samples", about="weights of the mean over uploads", paper="samples", pfllib="samples"
    )


class FedALA(Algorithm[FedALAConfig]):
    key, shared, private = "fedala", ("body", "head"), ()
    Config = FedALAConfig
    down: ClassVar = {"body.*": "weights", "head.*": "weights"}
    up: ClassVar = {"body.*": "weights", "head.*": "weights", "num_samples?": "counts"}
    dp_support = "none: the start is fitted to data for as long as the raw loss says, and is part of what is sent"
    batchnorm = "yes"
    batchable = False
    presets: ClassVar = {"pfllib": {"lr": 0.005, "batch_size": 10, "local_epochs": 1}}

    def init_client(self, fresh: Items, server: Items) -> Items:
        """Return the old model, the mixing weights W, and whether the client has ever trained and ever mixed."""
        mix = {k: torch.ones_like(server[k]) for k in self.top()}
        flags = {"trained": torch.tensor(False), "mixed": torch.tensor(False)}
        return select(server, *self.shared) | prefixed("mix", mix) | flags

    def top(self) -> list[str]:
        """Return the names of the parameters that are mixed."""
        layers = list(dict.fromkeys(name.rpartition(".")[0] for name in self.net.shapes))
        return [name for name in self.net.shapes if name.rpartition(".")[0] in layers[-self.cfg.layers :]]

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        state = self.mix(ctx, state, down)
        model = ctx.fit(self.start(state, down), on=ctx.ce)
        sent = model | (sample_count(ctx) if self.cfg.weighting == "samples" else {})
        return Done(state | model | {"trained": torch.tensor(True)}, up=sent)

    def mix(self, ctx: Local, state: Items, down: Items) -> Items:
        """Return the state with mixing weights fitted to the model received."""
        if not self.mixes(state, down):
            return state
        cfg, first = self.cfg, not state["mixed"]

        def loss(w: Items, x: Tensor, y: Tensor) -> Tensor:
            return ctx.ce(self.start(state | prefixed("mix", w), down), x, y)

        w = ctx.subset(cfg.share, "mix").fit(
            without_prefix("mix", state),
            on=loss,
            project=lambda w: combine(lambda v: v.clamp(0, 1), w),
            until=self.settled if first else None,
            epochs=cfg.most_epochs if first else 1,
            lr=cfg.mix_lr,
            phase="mix",
        )
        return state | prefixed("mix", w) | {"mixed": torch.tensor(True)}

    def mixes(self, state: Items, down: Items) -> bool:
        """Return whether there is anything to mix: an own model that is not the one received."""
        new = select(down, *self.shared)
        return bool(state["trained"]) and not all(torch.equal(state[k], v) for k, v in new.items())

    def settled(self, losses: Sequence[float]) -> bool:
        """Return whether the loss has settled."""
        return len(losses) > WINDOW and pstdev(losses[-WINDOW:]) < self.cfg.threshold

    def start(self, state: Items, down: Items) -> Items:
        """Return where training begins. `lerp` gives the received model exactly where W is 1."""
        new, top = select(down, *self.shared), self.top() if state["trained"] else ()
        return {k: torch.lerp(state[k], v, state[f"mix.{k}"]) if k in top else v for k, v in new.items()}

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        return mean_of_uploads(ups, *self.shared, weighting=self.cfg.weighting)

    def global_model(self, server: Items) -> Items:
        return server

    def deploy(self, state: Items, down: Items) -> Items:
        return self.start(state, down) | prefixed("state", state) | prefixed("down", down)

    def personalise(self, ctx: Local, items: Items) -> Items:
        """Return the start of the next round; what training left is tested as it is."""
        state, down = without_prefix("state", items), without_prefix("down", items)
        return self.start(self.mix(ctx, state, down), down) if down else items

    def deploy_trained(self, state: Items, down: Items, up: Items) -> Items:
        return select(up, *self.shared)

    def observe(self, memory: Items, down: Items, up: Items) -> Items:
        mixed = memory["mixed"] | torch.tensor(self.mixes(memory, down))
        return memory | select(up, *self.shared) | {"trained": torch.tensor(True), "mixed": mixed}

    def reconstruct_state(self, memory: Items) -> Items:
        return {k: v for k, v in memory.items() if not k.startswith("mix.")}

    def change(self, state: Items, down: Items, up: Items, lr: float, steps: int) -> Items:
        """Where a mixture was trained, its layers show no gradient: the unknown start drowns it. The others do."""
        seen = super().change(state, down, up, lr, steps)
        if not self.mixes(state, down):
            return seen
        below = {k: v for k, v in seen.items() if k not in self.top()}
        return below or prefixed("mixed", seen)
