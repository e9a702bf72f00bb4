"""FedMTL: one model a client, all of them tied to each other by how related the clients are.

Source   Smith et al., NeurIPS 2017, arXiv 1705.10467, equations 1 and 4, in the primal: the paper's solver is for linear models.
Solves   min over W = [w_1 .. w_N] of  sum_t F_t(w_t) + lam1 tr(W Omega W') + lam2 |W|^2
         mean: Omega = I - 11'/N, the trace is sum_t |w_t - mean|^2.   learned: Omega = inverse of sqrt(W'W)/tr sqrt(W'W)
Wire     down reference.*, omega (sum over s != t of Omega_ts w_s, and Omega_tt) | up body.*, head.*     Private   nothing
Cost     FedAvg and one vector operation a step; FedAvg's bytes; on the server N models and N mixtures, learned: N^2 products.
Leaks    As FedAvg: training starts at the client's last upload, and all that is added is known to the server. To a client,
         the others' models only as a mixture; with two clients, the other's model.
Limits   lam1 = lam2 = 0: isolated training. lam1 to infinity: one model for all. One client: its own with weight decay.
Differs  PFLlib: its penalty has no gradient, so that it trains in isolation.  floor: authors' code 1e-7.
         lam1: paper 1e-5 to 10 by validation.  The first Omega is the mean's: equal models have no relation to learn.
"""

import warnings
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor

from pflsec.core.algorithm import Algorithm, Done
from pflsec.core.config import Config, at_least, between, option
from pflsec.core.errors import PflsecWarning
from pflsec.core.items import Items, combine, prefixed, repeated, select, with_rows, without_prefix
from pflsec.core.local import Local, Penalty, half_squared_distance, linear


class FedMTLConfig(Config):
    lam1: float = at_least(0, default=0.01, about="weight of what ties the models", paper="1e-5 to 10", pfllib=0.0)
    lam2: float = at_least(0, default=0.0, about="weight of the models' squared norm", paper="1e-5 to 10", pfllib=0.0)
    relation: Literal["mean", "learned"] = option(
        default="mean", about="Omega: models tied to their mean, or as their own products say", paper="learned"
    )
    floor: float = between(
        1e-7, 1, default=0.05, about="least eigenvalue of the learned relation before it is inverted", code=1e-7
    )


class FedMTL(Algorithm[FedMTLConfig]):
    key, shared, private = "fedmtl", (), ()
    Config = FedMTLConfig
    down: ClassVar = {"reference.*": "weights", "omega": "scalar"}
    up: ClassVar = {"body.*": "weights", "head.*": "weights"}
    dp_support = "full"
    presets: ClassVar = {"pfllib": {"lam1": 0.0, "lam2": 0.0, "lr": 0.005, "batch_size": 10, "local_epochs": 1}}

    def init_server(self, fresh: Items) -> Items:
        omega = torch.eye(self.clients) - 1 / self.clients
        return prefixed("bank", repeated(fresh, self.clients)) | {"omega": omega.to(next(iter(fresh.values())))}

    def init_client(self, fresh: Items, server: Items) -> Items:
        return combine(lambda bank: bank[0].clone(), without_prefix("bank", server))

    def downlink(self, server: Items, client: int) -> Items:
        omega = server["omega"][client]
        others = omega.masked_fill(torch.arange(self.clients) == client, 0)
        mixed = combine(lambda w: torch.tensordot(others, w, dims=1), without_prefix("bank", server))
        return prefixed("reference", mixed) | {"omega": omega[client]}

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        decay = 2 * (self.cfg.lam1 * float(down["omega"]) + self.cfg.lam2)
        if ctx.lr * decay > 1:
            warnings.warn(
                f"fedmtl: lr times the weight of the penalty is {ctx.lr * decay:g}; above 1 it overshoots, from 2 on it "
                "diverges. Lower lr, lam1 or lam2, or raise floor.",
                PflsecWarning,
                stacklevel=2,
            )
        free = self.cfg.lam1 == 0 and self.cfg.lam2 == 0
        model = ctx.fit(state, on=ctx.ce, penalty=None if free else self.tie(decay, down))
        return Done(state=model, up=model)

    def tie(self, decay: float, down: Items) -> Penalty:
        """Return the part of the objective's penalties in which the client's own model stands, the others' fixed."""
        reference = without_prefix("reference", down)
        shrink = half_squared_distance(decay, combine(torch.zeros_like, reference))
        pull = linear(combine(lambda r: 2 * self.cfg.lam1 * r, reference))
        return lambda w, rng: shrink(w, rng) + pull(w, rng)

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        bank = with_rows(without_prefix("bank", server), ups)
        omega = server["omega"] if self.cfg.relation == "mean" else self.inverted(similarity(bank))
        return prefixed("bank", bank) | {"omega": omega.to(server["omega"])}

    def inverted(self, sigma: Tensor) -> Tensor:
        """Return the inverse of a similarity [N, N], its eigenvalues floored."""
        values, vectors = torch.linalg.eigh(sigma)
        return vectors / values.clamp(min=self.cfg.floor) @ vectors.T

    def deploy(self, state: Items, down: Items) -> Items:
        return state

    def start(self, state: Items, down: Items) -> Items:
        return state

    def observe(self, memory: Items, down: Items, up: Items) -> Items:
        return select(up, "body", "head")

    def reconstruct_state(self, memory: Items) -> Items:
        return memory

    def change(self, state: Items, down: Items, up: Items, lr: float, steps: int) -> Items:
        """Without the penalty's gradient at the start: exactly the data's for one step."""
        decay, reference = 2 * (self.cfg.lam1 * down["omega"] + self.cfg.lam2), without_prefix("reference", down)
        seen = super().change(state, down, up, lr, steps)
        return combine(lambda g, w, r: g - decay * w - 2 * self.cfg.lam1 * r, seen, state, reference)


def similarity(bank: Items) -> Tensor:
    """Return sqrt(W'W) / tr sqrt(W'W) [N, N] in float64, of models [N, ...]."""
    flat = torch.cat([w.flatten(1) for w in bank.values()], 1).double()
    values, vectors = torch.linalg.eigh(flat @ flat.T)
    roots = values.clamp(min=0).sqrt()
    return vectors * (roots / roots.sum()) @ vectors.T
