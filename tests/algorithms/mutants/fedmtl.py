"""Planted bugs of FedMTL."""

from collections.abc import Mapping

import torch
from torch import Tensor

from pflsec.algorithms.other.fedmtl import FedMTL
from pflsec.core.items import Items, combine, prefixed, without_prefix
from pflsec.core.local import Penalty
from tests.algorithms import test_fedmtl as fedmtl
from tests.algorithms.mutants.planted import Mutant


class TieWithoutGradient(FedMTL):
    """The penalty is made of copies: it adds a constant to the loss."""

    def tie(self, decay: float, down: Items) -> Penalty:
        whole = super().tie(decay, down)
        return lambda w, rng: whole(combine(Tensor.detach, w), rng) + 0 * next(iter(w.values())).sum()


class OnesForTheIdentity(FedMTL):
    """Omega = (1 - 1/N)^2 everywhere: the sum of all models shrinks, not their spread."""

    def init_server(self, fresh: Items) -> Items:
        omega = torch.full((self.clients, self.clients), (1 - 1 / self.clients) ** 2)
        return super().init_server(fresh) | {"omega": omega}


class ForgetsTheTwo(FedMTL):
    def tie(self, decay: float, down: Items) -> Penalty:
        half = {k: v / 2 if k.startswith("reference.") else v for k, v in down.items()}
        return super().tie(decay / 2, half)


class PulledToTheOthersMean(FedMTL):
    """The client's own weight is left out of the pull."""

    def tie(self, decay: float, down: Items) -> Penalty:
        return super().tie(0.0, down)


class ByPlaceInTheCohort(FedMTL):
    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        return super().aggregate(server, dict(enumerate(ups.values())))


class ParticipantsOnly(FedMTL):
    """Who is away vanishes from the relation."""

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        gone = [c for c in range(self.clients) if c not in ups]
        bank = combine(
            lambda w: w.index_fill(0, torch.tensor(gone, dtype=torch.long), 0), without_prefix("bank", server)
        )
        return super().aggregate(server | prefixed("bank", bank), ups)


class SigmaNotInverted(FedMTL):
    def inverted(self, sigma: Tensor) -> Tensor:
        return sigma


class ReadsTheTieAsData(FedMTL):
    def change(self, state: Items, down: Items, up: Items, lr: float, steps: int) -> Items:
        return combine(lambda w, sent: (w - sent) / (lr * steps), state, up)


MUTANTS = [
    Mutant("tie without gradient", FedMTL, fedmtl.check_5_a_stronger_tie_keeps_models_nearer, TieWithoutGradient),
    Mutant("no gradient, step by step", FedMTL, fedmtl.check_3_steps_follow_the_objective, TieWithoutGradient),
    Mutant("ones for the identity", FedMTL, fedmtl.check_2_the_mean_relation_measures_the_spread, OnesForTheIdentity),
    Mutant("equal clients pulled", FedMTL, fedmtl.check_4_equal_clients_stay_equal, OnesForTheIdentity),
    Mutant("factor two forgotten", FedMTL, fedmtl.check_3_steps_follow_the_objective, ForgetsTheTwo),
    Mutant("own model left out", FedMTL, fedmtl.check_4_equal_clients_stay_equal, PulledToTheOthersMean),
    Mutant("by place in the cohort", FedMTL, fedmtl.check_the_server_keeps_everybodys_last_upload, ByPlaceInTheCohort),
    Mutant("participants only", FedMTL, fedmtl.check_the_server_keeps_everybodys_last_upload, ParticipantsOnly),
    Mutant(
        "relation not inverted", FedMTL, fedmtl.check_6_a_learned_relation_is_an_inverse_similarity, SigmaNotInverted
    ),
    Mutant("tie read as data", FedMTL, fedmtl.check_the_gradient_is_read_without_the_tie, ReadsTheTieAsData),
]
