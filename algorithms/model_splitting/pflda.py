"""PFL-DA: each client maps its inputs into a common feature space by a body of its own; only a shared head is sent.

Source   Shi, Al Kontar, Technometrics 65(3), 2023, doi 10.1080/00401706.2022.2157882; published code where it goes further.
Solves   sum_i  min over body b_i and shared head g of  mean CE(g(b_i(x)), y), and by its side, at fixed features,
         min over h_i of  mean CE(h_i(b_i(x)), y) + lam/2 |h_i - g_t|^2,  g_t as received
Wire     down head.* | up head.* (num_samples with weighting = samples)     Private   body.*, head.* (h_i)
Cost     FedAvg and one more forward of the body; C (d + 1) numbers each way.
Leaks    The gradient of the last layer alone: labels as with FedAvg; with one sample its features exactly, of a body that
         the server knows in the first round and never again. h_i does not enter what is sent.
Limits   lam = 0: h_i is trained as it likes.   personal_head = prox, rho = 1: h_i = g_t.
Differs  lam: PFLlib's term has no gradient.   schedule: PFLlib two_phase, h_i on the old body and b_i after it.
         weighting: PFLlib by samples.   optimiser: published code Adam, here SGD.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor

from pflsec.core.algorithm import Algorithm, Done, PrivateStart, mean_of_uploads, sample_count
from pflsec.core.config import at_least, between, option
from pflsec.core.items import Items, combine, select, squared_distance
from pflsec.core.local import Local, half_squared_distance


class PFLDAConfig(PrivateStart):
    private_start: Literal["apart", "shared"] = option(
        default="shared",
        about="where clients' items start: shared gives all one body, without which nothing ties their features",
    )
    lam: float = at_least(0, default=1.0, about="weight of the pull on the personal head", pfllib=1.0)
    personal_head: Literal["quadratic", "prox"] = option(
        default="quadratic",
        about="pull in the loss, or after each step h <- rho g + (1 - rho) h",
        code="prox",
    )
    rho: float = between(0, 1, default=0.99, about="share of the head received after each step, with prox", code=0.99)
    schedule: Literal["interleaved", "two_phase"] = option(
        default="interleaved",
        about="personal head after every step of the body, or before all of them",
        code="interleaved",
        pfllib="two_phase",
    )
    weighting: Literal["uniform", "samples"] = option(
        default="uniform", about="weights of the mean over uploads", code="uniform", pfllib="samples"
    )


class PFLDA(Algorithm[PFLDAConfig]):
    key, shared, private = "pflda", ("head",), ("body", "head")
    Config = PFLDAConfig
    down: ClassVar = {"head.*": "weights"}
    up: ClassVar = {"head.*": "weights", "num_samples?": "counts"}
    dp_support = "none: each batch is used twice, which needs it as it is"
    presets: ClassVar = {
        "authors": {"personal_head": "prox", "rho": 0.99},
        "pfllib": {"schedule": "two_phase", "weighting": "samples", "lr": 0.005, "batch_size": 10, "local_epochs": 1},
    }

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        body, head = select(state, "body"), select(state, "head")
        train = self.interleaved if self.cfg.schedule == "interleaved" else self.two_phase
        body, common, head = train(ctx, body, down, head)
        weight = sample_count(ctx) if self.cfg.weighting == "samples" else {}
        return Done(state=body | head, up=common | weight)

    def interleaved(self, ctx: Local, body: Items, received: Items, head: Items) -> tuple[Items, Items, Items]:
        """Return body, shared head and personal head: a batch moves the first two, then, by their features, the third."""
        model, lam = body | received, self.cfg.lam if self.cfg.personal_head == "quadratic" else 0.0

        def personal(head: Items, z: Tensor, y: Tensor) -> Tensor:
            ce = ctx.head_ce(head, z, y)
            return ce + lam / 2 * squared_distance(head, received) if lam else ce

        for x, y in ctx.batches():
            model = ctx.step(model, ctx.ce, x, y)
            head = ctx.step(head, personal, self.net.features(model, x), y, phase="head")
            head = self.pulled(head, received)
        return select(model, "body"), select(model, "head"), head

    def two_phase(self, ctx: Local, body: Items, received: Items, head: Items) -> tuple[Items, Items, Items]:
        """Return the same, from as many epochs of the personal head on the old body, and then of body and shared head."""
        prox = self.cfg.personal_head == "prox"
        head = ctx.fit(
            head,
            on=ctx.head_ce,
            features_of=body,
            penalty=None if prox else half_squared_distance(self.cfg.lam, received),
            project=(lambda head: self.pulled(head, received)) if prox else None,
            phase="head",
        )
        model = ctx.fit(body | received, on=ctx.ce)
        return select(model, "body"), select(model, "head"), head

    def pulled(self, head: Items, received: Items) -> Items:
        """Return the personal head after the pull that follows a step."""
        if self.cfg.personal_head == "quadratic":
            return head
        return combine(lambda h, g: torch.lerp(h, g, self.cfg.rho), head, received)

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        return mean_of_uploads(ups, "head", weighting=self.cfg.weighting)
