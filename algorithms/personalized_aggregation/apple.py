"""APPLE: every client uploads a core model and downloads all others', and learns how much of each makes up its own model.

Source   Luo and Wu, IJCAI 2022, arXiv 2110.08394; authors' published code where preset authors says so.
Solves   for each client  min over c_i, p_i of  F_i(sum_j p_ij c_j) + lam(t) mu/2 |p_i - p_0|^2,  the other cores fixed;
         p_0 the clients' shares of all rows; lam falls from lam(0) = 1 to 0 at t = penalty_rounds
Wire     down core.*, cores, share, client | up body.*, head.* (the core; with limit also wanted)
Private  p_i; with limit the cores downloaded earlier
Cost     FedAvg, one mixture of N models and N inner products a step; N - 1 models down, `limit` of them if limited; the
         server stores N models and computes nothing.
Leaks    p_ii times the gradient at the mixture. Round 0: p_i = p_0 is known. Later, with one step a round, the log gives
         p_i away: p_ii and the upload give the gradient, and it the next p_i. Every client receives what the server does.
Limits   p_i = 1 at i alone, p_pace = 0: isolated training.   mu large: p_i stays near p_0.   penalty_rounds = 0: no pull.
Differs  steps: authors' code with momentum 0.9, here plain SGD.  mu: theirs lacks the 1/2, so 0.1 there is 0.2 here.
         first download with limit: none, all cores being the first model; there all of them.
         PFLlib: p starts at 1/N, lr times N, p_pace = 0, and the mixture is uploaded.
"""

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from pflsec.core.algorithm import Algorithm, Done
from pflsec.core.config import Config, at_least, option
from pflsec.core.items import Items, combine, prefixed, repeated, select, with_rows, without_prefix
from pflsec.core.local import Local, paced


class APPLEConfig(Config):
    p_pace: float = at_least(
        0, default=0.1, about="learning rate of p, as a multiple of the run's", code="0.001 / 0.01", pfllib=0.0
    )
    mu: float = at_least(0, default=0.1, about="weight of the pull of p towards p_0", code=0.2, pfllib=0.0)
    penalty_rounds: int = at_least(
        0, default=16, about="rounds until that pull has faded", code="a tenth of 160", pfllib="all"
    )
    schedule: Literal["exponential", "cosine"] = option(
        default="exponential", about="how it fades", code="exponential", pfllib="cosine"
    )
    limit: int | None = at_least(
        0, default=None, about="cores a client downloads in a round; none: all; the others stay as they were last seen"
    )
    base: float = at_least(
        1,
        default=1.5,
        about="with limit, a core j is drawn with chance ~ b^|p_ij|; b: downloads of a core so far, on average, at least this",
        code=1.5,
    )


class APPLE(Algorithm[APPLEConfig]):
    key, shared, private = "apple", (), ()
    Config = APPLEConfig
    down: ClassVar = {"core.*": "weights [m, ...]", "cores": "mask [n]", "share": "statistics [n]", "client": "scalar"}
    up: ClassVar = {"body.*": "weights", "head.*": "weights", "wanted?": "mask [n]"}
    dp_support = "full"
    presets: ClassVar = {
        "authors": {"mu": 0.2, "lr": 0.01, "batch_size": 256, "local_epochs": 5, "rounds": 160},
        "pfllib": {"p_pace": 0.0, "mu": 0.0, "schedule": "cosine", "lr": 0.005, "batch_size": 10, "local_epochs": 1},
    }

    def init_server(self, fresh: Items) -> Items:
        share = next(iter(fresh.values())).new_full((self.clients,), 1 / self.clients)
        wanted = {} if self.cfg.limit is None else {"wanted": torch.zeros(self.clients, self.clients, dtype=torch.bool)}
        return prefixed("core", repeated(fresh, self.clients)) | {"share": share} | wanted

    def enrol(self, server: Items, sizes: Sequence[int]) -> Items:
        counts = torch.tensor(sizes).to(server["share"])
        return server | {"share": counts / counts.sum()}

    def init_client(self, fresh: Items, server: Items) -> Items:
        cores = without_prefix("core", server)
        old = {} if self.cfg.limit is None else prefixed("seen", cores) | {"known": torch.zeros(self.clients).bool()}
        return {k: v[0].clone() for k, v in cores.items()} | {"p": server["share"].clone()} | old

    def downlink(self, server: Items, client: int) -> Items:
        who = torch.arange(self.clients) != client if self.cfg.limit is None else server["wanted"][client]
        cores = {f"core.{k}": v[who] for k, v in without_prefix("core", server).items()}
        return cores | {"cores": who, "share": server["share"], "client": torch.tensor(client)}

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        cfg, own = self.cfg, select(state, "body", "head")
        state = self.received(state, down)
        shares = {"p": state["p"]} if cfg.p_pace else {}

        def loss(at: Items, x: Tensor, y: Tensor) -> Tensor:
            p = paced(ctx, at["p"], cfg.p_pace) if shares else state["p"]
            return ctx.ce(self.mixture(select(at, "body", "head"), p, state, down), x, y)

        def penalty(at: Items, rng: torch.Generator) -> Tensor:
            off = paced(ctx, at["p"], cfg.p_pace) - down["share"]
            return self.fading(ctx.round) * cfg.mu / 2 * off.square().sum()

        end = ctx.fit(own | shares, on=loss, penalty=penalty if shares else None)
        core = select(end, "body", "head")
        asked = {} if cfg.limit is None else {"wanted": self.wanted(ctx, state | end, int(down["client"]))}
        return Done(state | end, up=core | asked)

    def mixture(self, own: Items, p: Tensor, state: Items, down: Items) -> Items:
        """Return sum_j p_j c_j, the client's own core being `own`."""
        i = int(down["client"])
        if self.cfg.limit is None:
            who, cores = down["cores"], without_prefix("core", down)
        else:
            who = torch.arange(self.clients) != i
            cores = {k: v[who] for k, v in without_prefix("seen", state).items()}
        return combine(lambda c, others: p[i] * c + torch.tensordot(p[who], others, dims=1), own, cores)

    def received(self, state: Items, down: Items) -> Items:
        """Return the state with the downloaded cores in place of older ones; without a limit none are kept."""
        who = down["cores"].nonzero().flatten().tolist()
        if self.cfg.limit is None or not who:
            return state
        new = without_prefix("core", down)
        seen = with_rows(
            without_prefix("seen", state), {j: {k: v[m] for k, v in new.items()} for m, j in enumerate(who)}
        )
        return state | prefixed("seen", seen) | {"known": state["known"] | down["cores"]}

    def wanted(self, ctx: Local, state: Items, client: int) -> Tensor:
        """Return which cores to ask for, [N]: those never downloaded first, then by chance, ~ b^|p|; b grows with the mean
        number of downloads of a core, so that choices sharpen."""
        limit, rng = min(self.cfg.limit or 0, self.clients - 1), ctx.rng("wanted")
        order = torch.randperm(self.clients, generator=rng)
        fresh = [j for j in order.tolist() if not state["known"][j] and j != client][:limit]
        who = torch.zeros_like(state["known"])
        who[fresh] = True
        if (left := limit - len(fresh)) > 0:
            base = max(self.cfg.base, (ctx.round + 1) * limit / self.clients)
            chance = base ** state["p"].abs() * ~who * (torch.arange(self.clients) != client)
            who[torch.multinomial(chance, left, generator=rng)] = True
        return who

    def fading(self, t: int) -> float:
        """Return lam(t): 1 at round 0, 0 from penalty_rounds on."""
        if t >= self.cfg.penalty_rounds:
            return 0.0
        done = t / self.cfg.penalty_rounds
        return 0.001**done if self.cfg.schedule == "exponential" else (math.cos(math.pi * done) + 1) / 2

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        cores = with_rows(without_prefix("core", server), {c: select(up, "body", "head") for c, up in ups.items()})
        asked = {c: select(up, "wanted") for c, up in ups.items()}
        wanted = {} if self.cfg.limit is None else with_rows(select(server, "wanted"), asked)
        return server | prefixed("core", cores) | wanted

    def deploy(self, state: Items, down: Items) -> Items:
        return self.mixture(select(state, "body", "head"), state["p"], self.received(state, down), down)

    def deploy_trained(self, state: Items, down: Items, up: Items) -> Items:
        return self.deploy(state, down)

    def observe(self, memory: Items, down: Items, up: Items) -> Items:
        """Where p moves, one needs the learning rate to follow it, and one step a round: it is known until then."""
        seen = self.received(memory, down) | select(up, "body", "head")
        return {k: v for k, v in seen.items() if k != "p" or not self.cfg.p_pace}

    def reconstruct_state(self, memory: Items) -> Items:
        return memory

    def start(self, state: Items, down: Items) -> Items:
        return select(state, "body", "head")

    def change(self, state: Items, down: Items, up: Items, lr: float, steps: int) -> Items:
        """What was trained on the mixture reaches the core times p_ii."""
        share = state["p"][int(down["client"])]
        return {k: v / share for k, v in super().change(state, down, up, lr, steps).items()} if share else {}
