"""Planted bugs of FedProx."""

from collections.abc import Callable

import torch
from torch import Tensor

from pflsec.algorithms.traditional.fedprox import FedProx
from pflsec.core.algorithm import Done
from pflsec.core.items import Items
from pflsec.core.local import Local, Penalty
from tests.algorithms import test_fedprox as fedprox
from tests.algorithms.mutants.planted import Mutant, unsquared


def _penalised(penalty: Callable[[float, Items], Penalty]) -> type[FedProx]:
    class Planted(FedProx):
        def local(self, ctx: Local, state: Items, down: Items) -> Done:
            model = ctx.fit(down, on=ctx.ce, penalty=penalty(self.cfg.mu, down), epochs=self._epochs(ctx))
            return Done(state, up=model | {"num_samples": torch.tensor(ctx.num_samples)})

    return Planted


def _without_gradient(mu: float, anchor: Items) -> Penalty:
    def penalty(params: Items, rng: torch.Generator) -> Tensor:
        return mu / 2 * torch.stack([(p.detach() - anchor[k]).square().sum() for k, p in params.items()]).sum()

    return penalty


def _without_half(mu: float, anchor: Items) -> Penalty:
    def penalty(params: Items, rng: torch.Generator) -> Tensor:
        return mu * torch.stack([(p - anchor[k]).square().sum() for k, p in params.items()]).sum()

    return penalty


class StragglersAreIgnored(FedProx):
    def _epochs(self, ctx: Local) -> int:
        return ctx.epochs


MUTANTS = [
    Mutant("norm not squared", FedProx, fedprox.check_3_two_steps_discount_the_first_gradient, _penalised(unsquared)),
    Mutant("half forgotten", FedProx, fedprox.check_3_two_steps_discount_the_first_gradient, _penalised(_without_half)),
    Mutant(
        "penalty without gradient",
        FedProx,
        fedprox.check_4_at_lr_times_mu_one_only_the_last_gradient_is_left,
        _penalised(_without_gradient),
    ),
    Mutant(
        "stronger penalty stays as far",
        FedProx,
        fedprox.check_5_a_larger_mu_stays_nearer,
        _penalised(_without_gradient),
    ),
    Mutant(
        "stragglers do all their work", FedProx, fedprox.check_6_stragglers_are_part_of_the_mean, StragglersAreIgnored
    ),
]
