"""FedFomo: each client receives some other clients' models and mixes those that help it on rows held back.

Source   Zhang et al., ICLR 2021, arXiv 2012.08565, Algorithm 1.
Solves   start = base + sum_j w_j (theta_j - base) over its own and the received models,  w_j = [s_j]_+ / sum [s]_+,
         s_j = (L(base) - L(theta_j)) / |theta_j - base|, L the mean CE on the held rows; then  min CE on the other rows
Wire     down peer.*, peers | up body.*, head.*, scores (with preferences = client in their place wanted)
Private  the start of a client's last training; with preferences = client also what it thinks of the others
Cost     FedAvg on the rows left, and peers + 2 passes over those held; `peers` models down; N models on the server.
Leaks    The gradient at a start that the server computes from the scores. Scores: what each model does on the held rows.
         Every client receives single models of other clients; nothing is averaged before.
Limits   peers = 0: isolated training on the rows that are not held.   epsilon = 1: random peers.
Differs  preferences: authors' code divides a round's scores by the size of their sum before it adds them up.
         norm: their default is l1.  held rows: PFLlib takes the last fifth, and of fewer than 5 rows all.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor

from pflsec.core.algorithm import Algorithm, Done
from pflsec.core.config import Config, at_least, between, option
from pflsec.core.items import Items, combine, floating, prefixed, repeated, select, with_rows, without_prefix
from pflsec.core.local import Local
from pflsec.core.streams import seed_from, stream

TINY = 1e-5  # added to the distance of two models


class FedFomoConfig(Config):
    peers: int = at_least(
        0, default=4, about="models of other clients received in a round", paper="4 or 9 of 14", pfllib="5 with its own"
    )
    epsilon: float = between(0, 1, default=0.3, about="chance that a peer is drawn, not the best one left", paper=0.3)
    epsilon_decay: float = at_least(0, default=0.05, about="taken off epsilon every round", paper=0.05)
    validation: float = between(
        0.01, 0.99, default=0.2, about="share of the rows held back to judge models", paper=0.2, pfllib=0.2
    )
    baseline: Literal["first", "current"] = option(
        default="first", about="base of all scores: the start of the client's last training, or where that ended"
    )
    norm: Literal["l2", "l1"] = option(default="l2", about="length of a model's distance", paper="l2", code="l1")
    fallback: Literal["own", "base"] = option(
        default="own", about="the start where no model scores above 0", code="base", pfllib="own"
    )
    preferences: Literal["server", "client"] = option(
        default="server", about="who adds up the scores; client: it asks for peers by number, and sends no scores"
    )
    stale: bool = option(
        default=False, about="offer also the models of clients that missed the last round", pfllib=True
    )


class FedFomo(Algorithm[FedFomoConfig]):
    key, shared, private = "fedfomo", (), ()
    Config = FedFomoConfig
    down: ClassVar = {"peer.*": "weights [m, ...]", "peers": "mask [n]"}
    up: ClassVar = {"body.*": "weights", "head.*": "weights", "scores?": "statistics [s]", "wanted?": "mask [n]"}
    dp_support = "none: models are mixed by raw losses on the rows held back, and training begins at the mixture"
    presets: ClassVar = {
        "paper": {"lr": 0.1, "lr_decay": 0.99, "local_epochs": 5},
        "pfllib": {"epsilon": 0.0, "stale": True, "lr": 0.005, "batch_size": 10, "local_epochs": 1},
    }

    def init_server(self, fresh: Items) -> Items:
        """Return everybody's last model, the turn in which it came (-1: never), and what clients think of each other."""
        likes = torch.eye(self.clients, dtype=next(iter(fresh.values())).dtype)
        facts = {
            "turn": torch.tensor(0),
            "came": torch.full((self.clients,), -1),
            "seed": torch.tensor(seed_from(fresh)),
        }
        opinion = {"likes": likes} if self.cfg.preferences == "server" else {"wanted": torch.zeros_like(likes).bool()}
        return prefixed("bank", repeated(fresh, self.clients)) | facts | opinion

    def init_client(self, fresh: Items, server: Items) -> Items:
        model = {k: v[0].clone() for k, v in without_prefix("bank", server).items()}
        likes = {"likes": next(iter(model.values())).new_zeros(self.clients)}
        return model | prefixed("base", model) | (likes if self.cfg.preferences == "client" else {})

    def downlink(self, server: Items, client: int) -> Items:
        who = self.chosen(server, client)
        return {f"peer.{k}": v[who] for k, v in without_prefix("bank", server).items()} | {"peers": who}

    def chosen(self, server: Items, client: int) -> Tensor:
        """Return whose models a client receives next, [N]."""
        turn, came = int(server["turn"]), server["came"]
        offered = (came >= (0 if self.cfg.stale else max(turn - 1, 0))) & (torch.arange(self.clients) != client)
        if self.cfg.preferences == "client":
            return offered & server["wanted"][client]
        rng = stream(self.key, int(server["seed"]), turn, client)
        return self.choose(server["likes"][client], offered, turn, rng)

    def choose(self, likes: Tensor, offered: Tensor, turn: int, rng: torch.Generator) -> Tensor:
        """Return at most `peers` of those offered, [N]: each the best one left, or with chance epsilon any of them."""
        epsilon = self.cfg.epsilon - turn * self.cfg.epsilon_decay
        left = [j for j in likes.argsort(descending=True, stable=True).tolist() if offered[j]]
        who = torch.zeros_like(offered)
        for _ in range(min(self.cfg.peers, len(left))):
            explore = float(torch.rand((), generator=rng)) < epsilon
            who[left.pop(int(torch.randint(len(left), (), generator=rng)) if explore else 0)] = True
        return who

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        held, rest = ctx.split(self.cfg.validation, "validation")
        scores = self.judge(held, state, down)
        start = self.mixture(state, down, scores)
        model = rest.fit(start, on=rest.ce)
        kept = model | prefixed("base", start)
        if self.cfg.preferences == "server":
            return Done(kept, up=model | {"scores": scores})
        others = torch.arange(self.clients) != ctx.client
        likes = state["likes"].masked_scatter(down["peers"], state["likes"][down["peers"]] + scores[1:])
        wanted = self.choose(likes, others, ctx.round, ctx.rng("wanted"))
        return Done(kept | {"likes": likes}, up=model | {"wanted": wanted})

    def judge(self, held: Local, state: Items, down: Items) -> Tensor:
        """Return the scores of the client's own model and of the received ones, [1 + m]."""
        y, base = held.targets(), self._base(state)

        def loss(model: Items) -> Tensor:
            return held.head_ce(model, held.features(model), y).mean()

        before, order, scores = loss(base), 1 if self.cfg.norm == "l1" else 2, []
        candidates = self.candidates(state, down)
        for i in range(1 + int(down["peers"].sum())):
            model = {k: v[i] for k, v in candidates.items()}
            apart = torch.cat([(v - base[k]).flatten() for k, v in model.items()])
            scores.append((before - loss(model)) / (torch.linalg.vector_norm(apart, order) + TINY))
        return torch.stack(scores)

    def candidates(self, state: Items, down: Items) -> Items:
        """Return the client's own model and the received ones, [1 + m, ...] each."""
        received = without_prefix("peer", down)
        return combine(lambda own, peers: torch.cat([own[None], peers]), select(state, "body", "head"), received)

    def mixture(self, state: Items, down: Items, scores: Tensor) -> Items:
        """Return where training begins. The weights sum to 1, so that base + sum_j w_j (theta_j - base) has no base."""
        weights = scores.clamp(min=0)
        if not weights.any():
            return select(state, "body", "head") if self.cfg.fallback == "own" else self._base(state)
        weights = weights / weights.sum()
        return {k: torch.tensordot(weights, v, dims=1) for k, v in self.candidates(state, down).items()}

    def _base(self, state: Items) -> Items:
        return without_prefix("base", state) if self.cfg.baseline == "first" else select(state, "body", "head")

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        bank = with_rows(without_prefix("bank", server), {c: select(up, "body", "head") for c, up in ups.items()})
        came, turn = server["came"].clone(), server["turn"]
        came[list(ups)] = turn
        news = prefixed("bank", bank) | {"came": came, "turn": turn + 1}
        if self.cfg.preferences == "client":
            return (
                server | news | with_rows(select(server, "wanted"), {c: select(up, "wanted") for c, up in ups.items()})
            )
        likes = server["likes"].clone()
        for client, up in ups.items():
            likes[client, client] += up["scores"][0]
            likes[client, self.chosen(server, client)] += up["scores"][1:]
        return server | news | {"likes": likes}

    def deploy(self, state: Items, down: Items) -> Items:
        return select(state, "body", "head")

    def observe(self, memory: Items, down: Items, up: Items) -> Items:
        model = select(up, "body", "head")
        if self.cfg.preferences == "client":
            return memory | model
        return memory | model | prefixed("base", self.mixture(memory, down, up["scores"]))

    def reconstruct_state(self, memory: Items) -> Items:
        return memory if self.cfg.preferences == "server" else select(memory, "body", "head")

    def start(self, state: Items, down: Items) -> Items:
        return select(state, "body", "head")

    def change(self, state: Items, down: Items, up: Items, lr: float, steps: int) -> Items:
        """Where scores are seen, they say where training began. Else an unknown jump to the start is part of the change."""
        if "scores" in up:
            begun = self.mixture(state, down, up["scores"])
            return {k: (v - up[k]) / (lr * steps) for k, v in begun.items()} | floating(select(up, "scores"))
        seen = super().change(state, down, up, lr, steps)
        return prefixed("mixed", seen) if down["peers"].any() else seen
