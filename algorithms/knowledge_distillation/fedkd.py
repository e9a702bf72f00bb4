"""FedKD: a mentor stays with the client, a mentee travels, and they teach each other; updates are sent by singular values.

Source   Wu et al., Nature Communications 13, 2032 (2022), arXiv 2108.13323; authors' code for weights and energies.
Solves   with features H, predictions p, losses CE of mentor (t) and mentee (s), S = CE_t + CE_s, W of shape [d, d]
         mentor, W  min  CE_t + (KL(p_s | p_t) + mean |H_t - W H_s|^2) / S, all of the mentee held constant
         mentee     min  CE_s + (KL(p_t | p_s) + mean |H_t - W H_s|^2) / S, all of the mentor and W held constant
         sent: of each matrix of the change the fewest singular values whose squares make up the energy T(t) of all
Wire     down energy, ranks, update (body.*, head.* instead of ranks and update to a client that missed an update)
         | up ranks, update (num_samples with weighting = samples)
Private  body.*, head.* of the mentor, projection
Cost     Twice FedAvg's local work; a singular value decomposition of each matrix a round, on each client and the server;
         k (m + n + 1) numbers for an m x n matrix in each direction; two models and W of memory per client.
Leaks    One local step: the gradient of the mentee's loss, off by at most sqrt(1 - T) of its size in each matrix; layers
         that are fully connected lose nothing of a single sample. The mentee itself is known; mentor and W are not.
Limits   start_energy = end_energy = 1: FedAvg's upload for this loss.
Differs  joint: the authors' code and PFLlib hold nothing constant.  PFLlib compresses parameters, not their change, and
         sends zeros where all singular values are needed; its KL is a mean over classes too, as in the authors' code.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor

from pflsec.algorithms.knowledge_distillation.fml import divergence
from pflsec.core.algorithm import Algorithm, Done, PrivateStart, sample_count
from pflsec.core.config import at_least, between, option
from pflsec.core.items import Items, combine, prefixed, select, subtract, weighted_mean, without_prefix
from pflsec.core.local import Local, LossPerExample
from pflsec.core.streams import seed_from, stream
from pflsec.training import lowrank
from pflsec.training.local import cross_entropy

LEAST = 1e-8  # of S, which divides


class FedKDConfig(PrivateStart):
    start_energy: float = between(0, 1, default=0.95, about="energy kept of a change at first", code=0.95, pfllib=0.95)
    end_energy: float = between(0, 1, default=0.98, about="energy kept in the end", code=0.98, pfllib=0.98)
    energy_rounds: int = at_least(
        1, default=50, about="rounds in which the energy goes from first to last", code="all", pfllib="all"
    )
    joint: bool = option(
        default=False, about="each model follows both losses: nothing is held constant", code=True, pfllib=True
    )
    constant_scale: bool = option(default=False, about="S is held constant", code=False, pfllib=False)
    weighting: Literal["uniform", "samples"] = option(
        default="uniform", about="weights of the mean over updates", code="uniform", pfllib="uniform"
    )


class FedKD(Algorithm[FedKDConfig]):
    key, shared, private = "fedkd", ("body", "head"), ("body", "head")
    Config = FedKDConfig
    down: ClassVar = {
        "energy": "scalar", "ranks?": "counts [t]", "update?": "weights-delta [n]",
        "body.*?": "weights", "head.*?": "weights",
    }  # fmt: skip
    up: ClassVar = {"ranks": "counts [t]", "update": "weights-delta [n]", "num_samples?": "counts"}
    dp_support = "none: the weight 1/S of what the models teach each other is a mean over the batch"
    batchable = False
    presets: ClassVar = {
        "authors": {"joint": True},
        "pfllib": {"joint": True, "private_start": "shared", "lr": 0.005, "batch_size": 10, "local_epochs": 1},
    }

    def init_server(self, fresh: Items) -> Items:
        """Return the mentee, its last update (none yet), how many there were, and who lacks no other than the last."""
        none = lowrank.pack(combine(torch.zeros_like, fresh), 1.0)
        return fresh | none | {"turn": torch.tensor(0), "current": torch.ones(self.clients, dtype=torch.bool)}

    def init_client(self, fresh: Items, server: Items) -> Items:
        """Return mentor, projection, and the mentee as the server first has it."""
        d = self.net.feature_dim
        draw = torch.rand(d, d, generator=stream(self.key, seed_from(fresh)), dtype=next(iter(fresh.values())).dtype)
        return fresh | prefixed("mentee", select(server, *self.shared)) | {"projection": (2 * draw - 1) / d**0.5}

    def energy(self, turn: int) -> float:
        """Return T(t)."""
        first, last = self.cfg.start_energy, self.cfg.end_energy
        return first + min(turn / self.cfg.energy_rounds, 1) * (last - first)

    def downlink(self, server: Items, client: int) -> Items:
        news = ("ranks", "update") if server["current"][client] else self.shared
        return select(server, *news) | {"energy": torch.tensor(self.energy(int(server["turn"])))}

    def start(self, state: Items, down: Items) -> Items:
        """Return the mentee, brought up to date."""
        if "update" not in down:
            return select(down, *self.shared)
        return combine(torch.add, without_prefix("mentee", state), lowrank.unpack(down, self.net.shapes))

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        mentee = self.start(state, down)
        mentor = select(state, *self.private, "projection")
        both = ctx.fit(prefixed("mentor", mentor) | prefixed("mentee", mentee), on=self.loss(ctx))
        change = subtract(without_prefix("mentee", both), mentee)
        weight = sample_count(ctx) if self.cfg.weighting == "samples" else {}
        return Done(
            state=without_prefix("mentor", both) | prefixed("mentee", mentee),
            up=lowrank.pack(change, float(down["energy"])) | weight,
        )

    def loss(self, ctx: Local) -> LossPerExample:
        """Return both losses' sum. S is a mean over the batch; the other model's part of it is constant as well."""

        def loss(both: Items, x: Tensor, y: Tensor) -> Tensor:
            other = (lambda v: v) if self.cfg.joint else ctx.constant
            mentor, mentee = without_prefix("mentor", both), without_prefix("mentee", both)
            h_t, h_s, w = self.net.features(mentor, x), self.net.features(mentee, x), mentor["projection"]
            z_t, z_s = self.net.head(mentor, h_t), self.net.head(mentee, h_s)
            ce_t, ce_s = cross_entropy(z_t, y), cross_entropy(z_s, y)
            p_t, p_s = z_t.log_softmax(1), z_s.log_softmax(1)
            to_t = divergence(other(p_s), p_t) + (h_t - other(h_s) @ w.T).square().mean(1)
            to_s = divergence(other(p_t), p_s) + (other(h_t) - h_s @ other(w).T).square().mean(1)
            s_t, s_s = ce_t.mean() + other(ce_s).mean(), other(ce_t).mean() + ce_s.mean()
            if self.cfg.constant_scale:
                s_t, s_s = ctx.constant(s_t), ctx.constant(s_s)
            return ce_t + to_t / s_t.clamp(min=LEAST) + ce_s + to_s / s_s.clamp(min=LEAST)

        return loss

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        ordered = [up for _, up in sorted(ups.items())]  # the last bit of a sum would turn singular vectors
        weights = [float(up["num_samples"]) if self.cfg.weighting == "samples" else 1.0 for up in ordered]
        mean = weighted_mean([lowrank.unpack(up, self.net.shapes) for up in ordered], weights)
        update = lowrank.pack(mean, self.energy(int(server["turn"])))
        mentee = combine(torch.add, select(server, *self.shared), lowrank.unpack(update, self.net.shapes))
        current = torch.zeros_like(server["current"]).index_fill(0, torch.tensor(list(ups)), True)
        return mentee | update | {"turn": server["turn"] + 1, "current": current}

    def global_model(self, server: Items) -> Items:
        return select(server, *self.shared)

    def deploy(self, state: Items, down: Items) -> Items:
        return select(state, *self.private)

    def observe(self, memory: Items, down: Items, up: Items) -> Items:
        return memory | prefixed("mentee", self.start(memory, down))

    def reconstruct_state(self, memory: Items) -> Items:
        return select(memory, "mentee")

    def change(self, state: Items, down: Items, up: Items, lr: float, steps: int) -> Items:
        return {k: -v / (lr * steps) for k, v in lowrank.unpack(up, self.net.shapes).items()}
