"""Secure aggregation, simulated: the server gets the mean of a round's changes, and no single client's.

Source   Bonawitz et al., CCS 2017, doi 10.1145/3133956.3133982: what the protocol gives the server. There is no cryptography
         here, only the flow of information.
Seam     aggregate
Claims   The server sees sums over the cohort. None about what a sum says: it is not noised, a small cohort hides little, and
         repeated cohorts can be subtracted.
Knob     least
Limits   With equal weights and from one downlink: the method's own mean, up to rounding. Clients count equally, since sample
         counts stay hidden too. Nothing of a single client is captured: there is nothing that the server could see.
"""

from collections.abc import Mapping

import torch

from pflsec.core.config import Config, at_least
from pflsec.core.defense import AggregateDefense
from pflsec.core.items import Items, weighted_mean


class SecAggConfig(Config):
    least: int = at_least(2, default=2, about="fewest uploads that are added up; a round with fewer is lost")


class SecAgg(AggregateDefense[SecAggConfig]):
    key, hides_clients = "secagg", True
    Config = SecAggConfig

    @property
    def least(self) -> int:
        return self.cfg.least

    def combine(self, changes: Mapping[int, Items], expected: float, rng: torch.Generator) -> Items:
        return weighted_mean(changes.values(), [1.0] * len(changes))
