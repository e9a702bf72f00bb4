"""FedAMP: the server sends each client its own mixture of all clients' models; similar models weigh more.

Source   Huang et al., AAAI 2021, arXiv 2007.03797, Algorithm 1; the heuristic variant is HeurFedAMP.
Solves   sum_i F_i(w_i) + lam sum_{i<j} A(|w_i - w_j|^2), A(s) = 1 - exp(-s/sigma); locally
         min over w of  F_i(w) + lam/(2 alpha) |w - u_i|^2  with  u_i = sum_j xi_ij w_j
Wire     down body.*, head.* (a different u_i for each client) | up body.*, head.*     Private   nothing
Cost     FedAvg and one vector operation a step; on the server N^2/2 distances and N mixtures, N models stored.
Leaks    As FedAvg. Training starts at the client's last upload, not at the downlink; the server knows both.
Limits   lam = 0: isolated training.   alpha = sigma/N, sigma to infinity: u_i is the plain mean for everybody.
Differs  alpha, sigma: paper 1e4, 1e6; PFLlib 1, 1, where xi_ii turns negative.
"""

import warnings
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor

from pflsec.core.algorithm import Algorithm, Done
from pflsec.core.config import Config, above, at_least, between, option
from pflsec.core.errors import PflsecWarning
from pflsec.core.items import Items, combine, prefixed, repeated, select, with_rows, without_prefix
from pflsec.core.local import Local, half_squared_distance
from pflsec.core.network import Net


class FedAMPConfig(Config):
    lam: float = at_least(0, default=1.0, about="weight of the attraction", paper=1.0, pfllib=1.0)
    alpha: float = above(0, default=1e4, about="step size of the mixing", paper=1e4, pfllib=1.0)
    sigma: float = above(0, default=1e6, about="width of the attraction, or sharpness with heur", paper=1e6, pfllib=1.0)
    start: Literal["own", "cloud"] = option(default="own", about="where training starts: the client's model or u_i")
    heur: bool = option(default=False, about="weights by softmax of cosine similarities (HeurFedAMP)")
    xi_self: float = between(0, 1, default=0.05, about="weight of a client's own model with heur")
    renormalise: bool = option(default=False, about="shrink the others' weights where they sum to more than 1")


class FedAMP(Algorithm[FedAMPConfig]):
    key, shared, private = "fedamp", (), ()
    Config = FedAMPConfig
    down: ClassVar = {"body.*": "weights", "head.*": "weights"}
    up: ClassVar = {"body.*": "weights", "head.*": "weights"}
    dp_support = "full"
    batchnorm = "local: the server measures distances between models and mixes them, and statistics are no weights"
    presets: ClassVar = {"pfllib": {"alpha": 1.0, "sigma": 1.0, "lr": 0.005, "batch_size": 10, "local_epochs": 1}}

    def __init__(self, cfg: FedAMPConfig, net: Net, clients: int):
        super().__init__(cfg, net, clients)
        if not cfg.heur and not cfg.renormalise and cfg.alpha * (clients - 1) > cfg.sigma:
            warnings.warn(
                f"fedamp: alpha is {cfg.alpha:g}; above sigma/(clients - 1) = {cfg.sigma / (clients - 1):g} a client's own "
                "weight in its mixture can turn negative. Lower alpha, raise sigma, or set renormalise=true.",
                PflsecWarning,
                stacklevel=2,
            )

    def init_server(self, fresh: Items) -> Items:
        return prefixed("bank", repeated(fresh, self.clients))

    def init_client(self, fresh: Items, server: Items) -> Items:
        return combine(lambda bank: bank[0].clone(), without_prefix("bank", server))

    def downlink(self, server: Items, client: int) -> Items:
        bank = without_prefix("bank", server)
        xi = self.mixture(bank, client)
        return combine(lambda models: torch.tensordot(xi, models, dims=1), bank)

    def mixture(self, bank: Items, client: int) -> Tensor:
        """Return the row xi_i [N] of a client, summing to 1. `bank` holds all clients' last uploads, [N, ...] each."""
        cfg, others = self.cfg, torch.arange(self.clients) != client
        flat = [models.flatten(1) for models in bank.values()]
        if cfg.heur:
            inner = torch.stack([w @ w[client] for w in flat]).sum(0)
            length = torch.stack([w.square().sum(1) for w in flat]).sum(0).sqrt()
            sharp = torch.softmax(cfg.sigma * (inner / (length * length[client]))[others], 0)
            xi = torch.zeros(self.clients, dtype=sharp.dtype).masked_scatter(others, (1 - cfg.xi_self) * sharp)
        else:
            distance = torch.stack([(w - w[client]).square().sum(1) for w in flat]).sum(0)
            xi = cfg.alpha / cfg.sigma * torch.exp(-distance / cfg.sigma) * others
            if cfg.renormalise:
                xi = xi / xi.sum().clamp(min=1)
        xi[client] = 1 - xi.sum()
        return xi

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        pull = half_squared_distance(self.cfg.lam / self.cfg.alpha, down)
        model = ctx.fit(self.start(state, down), on=ctx.ce, penalty=pull)
        return Done(state=model, up=model)

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        return prefixed("bank", with_rows(without_prefix("bank", server), ups))

    def deploy(self, state: Items, down: Items) -> Items:
        return state

    def start(self, state: Items, down: Items) -> Items:
        return state if self.cfg.start == "own" else down

    def observe(self, memory: Items, down: Items, up: Items) -> Items:
        return select(up, "body", "head")

    def reconstruct_state(self, memory: Items) -> Items:
        return memory

    def change(self, state: Items, down: Items, up: Items, lr: float, steps: int) -> Items:
        start, pull = self.start(state, down), self.cfg.lam / self.cfg.alpha
        return combine(lambda w, u, sent: (w - sent) / (lr * steps) - pull * (w - u), start, down, up)
