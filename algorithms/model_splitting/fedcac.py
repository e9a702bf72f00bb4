"""FedCAC: what matters to a client comes from clients to whom the same matters, everything else from everybody.

Source   Wu et al., ICCV 2023, arXiv 2309.11103.
Solves   locally FedAvg's problem, from  M_i theta_C,i + (1 - M_i) theta;  M_i the tau numel entries of each tensor with the
         largest |change| |value| in the client's last training; theta_C,i the mean over {i} and those j with
         O_ij >= mean O + t/beta (max O - mean O),  O_ij = 1 - |M_i - M_j|_1 / (2 |M_i|_1)
Wire     down body.*, head.*, custom.* (not to newcomers; with mix_on = server the mixture alone, as body.*, head.*)
         | up body.*, head.*, mask.*, num_samples (not with weighting = uniform)
Private  nothing (a client keeps its mask)
Cost     FedAvg, a sort of each tensor; P bytes of mask more up, a second model down; on the server N models and masks,
         S^2 overlaps.
Leaks    As FedAvg, from a start that the server knows. To clients: theta_C,i may be the mean of two models, one their own.
Limits   tau = 0: FedAvg.   t > beta: critical entries are the client's own; with tau = 1, isolated training.
Differs  first mixture: after the first aggregation; PFLlib puts the initial weights back then.   beta: PFLlib 0, which
         fails; one participant fails there too.   Entries that did not move are never critical.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor

from pflsec.core.algorithm import Algorithm, Done, mean_of_uploads, sample_count
from pflsec.core.config import Config, at_least, between, option
from pflsec.core.items import Items, combine, prefixed, repeated, select, weighted_mean, with_rows, without_prefix
from pflsec.core.local import Local

TOLERANCE = 1e-12  # of overlaps: rounding of their mean must not part two clients that overlap as much as any


class FedCACConfig(Config):
    tau: float = between(
        0, 1, default=0.5, about="share of the entries of each tensor that are critical", paper=0.5, pfllib=1.0
    )
    beta: int = at_least(
        1, default=170, about="round from which nobody shares critical entries", paper="100 to 200", pfllib=0
    )
    mix_on: Literal["client", "server"] = option(
        default="client", about="who puts theta and theta_C,i together", paper="client", pfllib="client"
    )
    weighting: Literal["samples", "uniform"] = option(
        default="samples", about="weights of the mean over uploads", pfllib="samples"
    )


class FedCAC(Algorithm[FedCACConfig]):
    key, shared, private = "fedcac", ("body", "head"), ()
    Config = FedCACConfig
    down: ClassVar = {"body.*": "weights", "head.*": "weights", "custom.*?": "weights"}
    up: ClassVar = {"body.*": "weights", "head.*": "weights", "mask.*": "mask", "num_samples?": "counts"}
    dp_support = "full"
    presets: ClassVar = {
        "paper": {"tau": 0.5, "beta": 170},
        "pfllib": {"tau": 1.0, "lr": 0.005, "batch_size": 10, "local_epochs": 1},
    }

    def init_server(self, fresh: Items) -> Items:
        """Return model, round, and for every client its customised model, mask, and whether it has trained."""
        bank = repeated(fresh, self.clients)
        masks = combine(lambda bank: torch.zeros_like(bank, dtype=torch.bool), bank)
        facts = {"turn": torch.tensor(0), "trained": torch.zeros(self.clients, dtype=torch.bool)}
        return fresh | prefixed("custom", bank) | prefixed("mask", masks) | facts

    def init_client(self, fresh: Items, server: Items) -> Items:
        return self.kept(combine(lambda masks: masks[0], select(server, "mask")))

    def kept(self, mask: Items) -> Items:
        """Return what a client keeps of its mask."""
        return mask if self.cfg.mix_on == "client" else {}

    def downlink(self, server: Items, client: int) -> Items:
        model = select(server, *self.shared)
        if not server["trained"][client]:
            return model
        custom, mask = (combine(lambda bank: bank[client], select(server, name)) for name in ("custom", "mask"))
        return model | custom if self.cfg.mix_on == "client" else self.start(mask, model | custom)

    def start(self, state: Items, down: Items) -> Items:
        model, custom = select(down, *self.shared), without_prefix("custom", down)
        return combine(torch.where, without_prefix("mask", state), custom, model) if custom else model

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        start = self.start(state, down)
        model = ctx.fit(start, on=ctx.ce)
        mask = prefixed("mask", combine(self.critical, start, model))
        weight = sample_count(ctx) if self.cfg.weighting == "samples" else {}
        return Done(self.kept(mask), up=model | mask | weight)

    def critical(self, was: Tensor, now: Tensor) -> Tensor:
        """Return the mask of the entries with the largest |now - was| |now|; never one with 0."""
        size = ((now - was).abs() * now.abs()).flatten()
        first = size.sort(descending=True, stable=True).indices[: int(self.cfg.tau * size.numel() + 1e-9)]
        chosen = torch.zeros_like(size, dtype=torch.bool).index_fill(0, first, True)
        return (chosen & (size > 0)).view_as(now)

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        turn = server["turn"] + 1
        models = [select(up, *self.shared) for up in ups.values()]
        partners = self.partners([select(up, "mask") for up in ups.values()], int(turn))
        # Pairwise among this round's cohort alone; who is absent finds its customised model as it was.
        custom = [
            weighted_mean([m for m, near in zip(models, row, strict=True) if near], [1.0] * int(row.sum()))
            for row in partners
        ]
        latest = {c: prefixed("custom", mean) | select(ups[c], "mask") for c, mean in zip(ups, custom, strict=True)}
        banks = with_rows(select(server, "custom", "mask"), latest)
        trained = server["trained"].index_fill(0, torch.tensor(list(ups)), True)
        mean = mean_of_uploads(ups, *self.shared, weighting=self.cfg.weighting)
        return server | mean | banks | {"turn": turn, "trained": trained}

    def partners(self, masks: list[Items], turn: int) -> Tensor:
        """Return [S, S]: whether row i's client takes in column j's model. Rounds count from 1."""
        if len(masks) == 1:
            return torch.ones(1, 1, dtype=torch.bool)
        overlap, self_ = overlaps(masks), torch.eye(len(masks), dtype=torch.bool)
        pairs = overlap[~self_]
        least = pairs.mean() + turn / self.cfg.beta * (pairs.max() - pairs.mean())
        return self_ | (overlap >= least - TOLERANCE)

    def deploy(self, state: Items, down: Items) -> Items:
        return self.start(state, down)

    def deploy_trained(self, state: Items, down: Items, up: Items) -> Items:
        return select(up, *self.shared)

    def global_model(self, server: Items) -> Items:
        return select(server, *self.shared)

    def observe(self, memory: Items, down: Items, up: Items) -> Items:
        return self.kept(select(up, "mask"))

    def reconstruct_state(self, memory: Items) -> Items:
        return memory


def overlaps(masks: list[Items]) -> Tensor:
    """Return O [S, S]. A mask without entries overlaps wholly with another such, and not at all with any other."""
    rows = torch.stack([torch.cat([v.flatten() for v in mask.values()]) for mask in masks]).double()
    size = rows.sum(1)
    apart = size[:, None] + size - 2 * rows @ rows.T
    return torch.where(size[:, None] > 0, 1 - apart / (2 * size[:, None]).clamp(min=1), (apart == 0).double())
