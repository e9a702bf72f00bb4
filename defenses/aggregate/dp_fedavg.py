"""DP-FedAvg: every client's whole change is clipped, and the server adds noise to their sum, once a round.

Source   McMahan et al., ICLR 2018, arXiv 1710.06963, Algorithm 1 (fixed denominator, flat clipping); accounting by Opacus.
Seam     aggregate; the clipping is the client's, after all defenses of the uplink
Claims   formal: (epsilon, delta) for whole clients (add or remove one), against clients and everybody who sees what the
         server sends, for all of it. The server itself is trusted: it sees clipped changes without noise, and so do captures.
         Who took part must stay secret.
Knob     epsilon (the noise is found for the planned rounds) or noise_multiplier
Limits   noise_multiplier = 0, a large bound, equal weights and everybody in every round: training without it, up to rounding.
         Sample counts are not used: clients count equally. An attacker who knows of it clips its replay.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from pydantic import model_validator

from pflsec.core.config import Config, above, at_least, option
from pflsec.core.defense import Spend, UserDefense
from pflsec.core.items import Items
from pflsec.defenses import accounting
from pflsec.defenses.vectors import clipped, shortened


class DPFedAvgConfig(Config):
    epsilon: float | None = above(
        0, default=None, about="budget of the whole run; the server stops before exceeding it"
    )
    noise_multiplier: float | None = at_least(0, default=None, about="standard deviation of the sum's noise over bound")
    bound: float = above(0, default=1.0, about="norm to which each client's change is clipped, all items together")
    delta: float | None = above(0, default=None, about="none: the smaller of 1e-5 and n^-1.1, n the number of clients")
    accountant: Literal["rdp", "prv"] = option(default="rdp", about="rdp: fast upper bound; prv: tighter, slow")
    sampling: Literal["poisson", "fixed"] = option(
        default="poisson",
        about="poisson: every client takes part by chance, as the accountant assumes; fixed: cohorts of one size, for which "
        "its numbers are approximations unless everybody takes part",
    )
    unit: Literal["user"] = option(default="user", about="what is protected: all data of a client")

    @model_validator(mode="after")
    def _one_knob_at_least(self):
        if self.epsilon is None and self.noise_multiplier is None:
            raise ValueError("give epsilon or noise_multiplier, e.g. dp-fedavg:noise_multiplier=1")
        if self.delta is not None and self.delta >= 1:
            raise ValueError(f"delta is {self.delta:g}; it must be below 1, and should be below 1/n")
        return self


class DPFedAvg(UserDefense[DPFedAvgConfig]):
    key = "dp-fedavg"
    excludes = ("gaussian", "laplace")
    Config = DPFedAvgConfig

    @property
    def budget(self) -> float | None:
        return self.cfg.epsilon

    @property
    def sigma(self) -> float:
        assert self.cfg.noise_multiplier is not None  # given, or found by planned()
        return self.cfg.noise_multiplier

    @property
    def sampling(self) -> Literal["poisson", "fixed"]:
        return self.cfg.sampling

    def planned(self, clients: int, rate: float, rounds: int) -> "DPFedAvg":
        if self.cfg.noise_multiplier is not None or self.cfg.epsilon is None:
            return self
        found = accounting.noise_for(self.cfg.epsilon, self.delta(clients), rate, rounds, who=self.key)
        return DPFedAvg(self.cfg.model_copy(update={"noise_multiplier": found}))

    def delta(self, clients: int) -> float:
        return self.cfg.delta if self.cfg.delta is not None else min(1e-5, clients**-1.1)

    def epsilon(self, account: Sequence[Spend], clients: int) -> float:
        return accounting.epsilon(account, self.delta(clients), self.cfg.accountant)

    def bound(self, account: Sequence[Spend], clients: int) -> float:
        return accounting.epsilon(account, self.delta(clients))

    def claim(self, rate: float) -> str:
        if self.cfg.sampling == "poisson" or rate == 1:
            return "formal: (epsilon, delta) for whole clients"
        return "none: cohorts of one size are accounted as if they were drawn by Poisson sampling"

    def protect(self, message: Items, reference: Items, rng: torch.Generator) -> Items:
        return clipped(message, reference, self.cfg.bound)

    def combine(self, changes: Mapping[int, Items], expected: float, rng: torch.Generator) -> Items:
        """Return (sum of the changes + N(0, (sigma bound)^2)) / the expected size of a cohort.

        They are clipped once more: rounding in a client's message may have made its change a little longer.
        """
        scale, total = self.sigma * self.cfg.bound, {}
        changes = {c: shortened(step, self.cfg.bound) for c, step in changes.items()}
        for name, first in next(iter(changes.values())).items():
            noise = scale * torch.randn(first.shape, generator=rng, dtype=first.dtype) if scale else 0
            total[name] = (torch.stack([c[name] for c in changes.values()]).sum(0) + noise) / expected
        return total

    def adapt(self, guess: Items, seen: Items) -> Items:
        return shortened(guess, self.cfg.bound)
