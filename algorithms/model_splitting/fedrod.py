"""FedRoD: one shared body with a generic head, trained under balanced softmax, and a personal head added on top.

Source   Chen, Chao, ICLR 2022, arXiv 2107.00778.
Solves   shared body b, head g:  mean CE(g(b(x)) + log n_i^gamma, y), n_i the client's class counts;  beside them
         min over p_i of  mean CE(g(b(x)) + p_i(b(x)), y), g and b held constant;  hyper: p_i = nu(n_i/|n_i|)
Wire     down body.*, head.* (nu.in, nu.in_bias, nu.out, nu.out_bias with variant = hyper) | up body.*, head.*,
         num_samples (nu.in, nu.in_bias, nu.out, nu.out_bias with variant = hyper)
Private  head.* of the personal head, log_share, held, counted: the client's classes and their shares
Cost     FedAvg and one more head pass a step; FedAvg's bytes, with hyper hidden times the head's more.
Leaks    FedAvg's gradient at logits shifted by C unknown numbers; a class that the client lacks shows as rows of the
         head that do not move. The personal head does not enter. hyper: the class shares exactly (row of nu.in over bias).
         A client's counts are taken at its first exchange: if that is a probe of one class, nothing moves.
Limits   gamma = 0: FedAvg's bits.   Equal counts of all classes: FedAvg's step.   One class: up equals down.
Differs  start of the personal head: the paper is silent, PFLlib copies the generic one.   gamma: 1, not to be set in
         PFLlib.   hyper: hidden as in FL-bench; here it trains with the rest, as in the paper.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor

from pflsec.core.algorithm import Algorithm, Done, mean_of_uploads, sample_count
from pflsec.core.config import Config, at_least, option
from pflsec.core.items import Items, combine, prefixed, select, without_prefix
from pflsec.core.local import Local
from pflsec.core.streams import seed_from, stream
from pflsec.training.local import cross_entropy

ABSENT = -1e30  # in place of log 0: its softmax is exactly 0, and 0 times it is no NaN


class FedRoDConfig(Config):
    gamma: float = at_least(
        0, default=1.0, about="power of the class counts in the generic loss", paper=1.0, pfllib=1.0
    )
    variant: Literal["linear", "hyper"] = option(
        default="linear",
        about="linear: a personal head of its own; hyper: made by a shared network from the client's class shares",
        paper="both",
        pfllib="linear",
    )
    personal_start: Literal["zero", "copy"] = option(
        default="zero", about="start of the personal head: nothing added, or the generic head", pfllib="copy"
    )
    hidden: int = at_least(1, default=32, about="hidden units of the network of hyper", flbench=32)
    weighting: Literal["samples", "uniform"] = option(
        default="samples", about="weights of the mean over uploads", paper="samples", pfllib="samples"
    )


class FedRoD(Algorithm[FedRoDConfig]):
    key, shared, private = "fedrod", ("body", "head"), ("head",)
    Config = FedRoDConfig
    down: ClassVar = {
        "body.*": "weights", "head.*": "weights", "nu.in?": "weights [h, C]", "nu.in_bias?": "weights [h]",
        "nu.out?": "weights [p, h]", "nu.out_bias?": "weights [p]",
    }  # fmt: skip
    up: ClassVar = {
        "body.*": "weights", "head.*": "weights", "num_samples?": "counts", "nu.in?": "weights [h, C]",
        "nu.in_bias?": "weights [h]", "nu.out?": "weights [p, h]", "nu.out_bias?": "weights [p]",
    }  # fmt: skip
    dp_support = "partial: the class counts that shift the loss of every example are computed from raw data"
    batchnorm = "yes"
    presets: ClassVar = {"pfllib": {"personal_start": "copy", "lr": 0.005, "batch_size": 10, "local_epochs": 1}}

    def init_server(self, fresh: Items) -> Items:
        if self.cfg.variant == "linear":
            return fresh
        head = torch.cat([v.flatten() for v in self.first_head(fresh).values()])
        h, c, rng = self.cfg.hidden, self.net.classes, stream(self.key, seed_from(fresh), "nu")
        inner = {"in": torch.randn(h, c, generator=rng, dtype=head.dtype), "in_bias": head.new_zeros(h)}
        outer = {"out": head.new_zeros(len(head), h), "out_bias": head}
        return fresh | prefixed("nu", inner | outer)

    def init_client(self, fresh: Items, server: Items) -> Items:
        """Return the personal head, and equal shares of all classes, which are not counted yet."""
        even = counted(torch.ones(self.net.classes, dtype=next(iter(server.values())).dtype))
        return self.first_head(server) | even | {"counted": torch.tensor(False)}

    def first_head(self, items: Items) -> Items:
        """Return the start of the personal head beside this generic one."""
        generic = select(items, "head")
        return generic if self.cfg.personal_start == "copy" else combine(torch.zeros_like, generic)

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        facts, hyper = self.facts(ctx, state), self.cfg.variant == "hyper"
        shift = self.shift(facts)

        def loss(model: Items, x: Tensor, y: Tensor) -> Tensor:
            z = self.net.features(model, x)
            generic = self.net.head(model, z)
            own = self.made(model, facts) if hyper else without_prefix("personal", model)
            both = ctx.constant(generic) + self.net.head(own, ctx.constant(z))
            return cross_entropy(generic + shift, y) + cross_entropy(both, y)

        model = ctx.fit(down if hyper else down | prefixed("personal", select(state, "head")), on=loss)
        weight = sample_count(ctx) if self.cfg.weighting == "samples" else {}
        own = self.made(model, facts) if hyper else without_prefix("personal", model)
        return Done(state=own | facts, up=select(model, *self.shared, "nu") | weight)

    def facts(self, ctx: Local, state: Items) -> Items:
        """Return the client's classes and the logs of their shares among its rows: counted once, over all of them."""
        if state["counted"]:
            return select(state, "log_share", "held", "counted")
        return counted(ctx.class_counts())

    def shift(self, facts: Items) -> Tensor:
        """Return log n^gamma up to a constant, [C]; 0^0 = 1."""
        gamma = self.cfg.gamma
        return torch.where(facts["held"], gamma * facts["log_share"], ABSENT) if gamma else torch.zeros(())

    def made(self, nu: Items, facts: Items) -> Items:
        """Return the personal head that the shared network makes of the class shares."""
        share = torch.where(facts["held"], facts["log_share"].exp(), 0)
        values = nu["nu.out"] @ (nu["nu.in"] @ share + nu["nu.in_bias"]).relu() + nu["nu.out_bias"]
        shapes = {k: v for k, v in self.net.shapes.items() if k.startswith("head.")}
        parts = values.split([torch.Size(shape).numel() for shape in shapes.values()])
        return {k: part.unflatten(0, shape) for (k, shape), part in zip(shapes.items(), parts, strict=True)}

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        return mean_of_uploads(ups, *self.shared, "nu", weighting=self.cfg.weighting)

    def deploy(self, state: Items, down: Items) -> Items:
        return select(down, *self.shared, "nu") | prefixed("personal", select(state, "head"))

    def personalise(self, ctx: Local, items: Items) -> Items:
        """Return the model with the head that the newest shared network makes, newcomers included."""
        if self.cfg.variant == "linear":
            return items
        facts = counted(ctx.class_counts())
        return items | prefixed("personal", self.made(items, facts))

    def scores(self, items: Items, x: Tensor) -> Tensor:
        z, own = self.net.features(items, x), without_prefix("personal", items)
        return self.net.head(items, z) + self.net.head(own, z) if own else self.net.head(items, z)

    def global_model(self, server: Items) -> Items:
        return select(server, *self.shared)

    def observe(self, memory: Items, down: Items, up: Items) -> Items:
        """Fold in the classes whose rows of the last layer moved, and with hyper the class counts."""
        memory = memory | {"counted": torch.tensor(True)} | ({} if memory["counted"] else {"held": ~memory["held"]})
        for name in self._rows():
            moved = (up[name] != down[name]).flatten(1).any(1) if up[name].dim() > 1 else up[name] != down[name]
            memory["held"] = memory["held"] | moved
        if "nu.in" not in up or "num_samples" not in up:
            return memory
        w, b = down["nu.in"] - up["nu.in"], down["nu.in_bias"] - up["nu.in_bias"]
        counts = (b @ w / b.square().sum() * up["num_samples"]).round()  # NaN where nothing moved
        return memory | ({"counts": counts} if counts.sum() == up["num_samples"] else {})

    def reconstruct_state(self, memory: Items) -> Items:
        if "counts" in memory:
            return counted(memory["counts"])
        seen = self.cfg.gamma > 0 and bool(memory["held"].any())
        return select(memory, "counted", *(["held"] if seen else []))

    def _rows(self) -> list[str]:
        """Return the parameters of the last layer, provided that each has a row for every class."""
        layer, shapes = list(self.net.shapes)[-1].rpartition(".")[0], self.net.shapes
        names = [name for name in shapes if name.rpartition(".")[0] == layer]
        return names if all(shapes[name][0] == self.net.classes for name in names) else []


def counted(counts: Tensor) -> Items:
    """Return which classes [C] have a count, and the logs of their shares."""
    held = counts > 0
    total = counts.sum().clamp(min=1)  # under noise no class may be left
    share = torch.where(held, counts, total) / total
    return {"log_share": share.log(), "held": held, "counted": torch.tensor(True)}
