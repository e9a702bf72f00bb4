"""Planted bugs of FedAMP."""

from collections.abc import Mapping

import torch
from torch import Tensor

from pflsec.algorithms.personalized_aggregation.fedamp import FedAMP
from pflsec.core.algorithm import Done
from pflsec.core.items import Items, combine, prefixed, without_prefix
from pflsec.core.local import Local
from tests.algorithms import test_fedamp as fedamp
from tests.algorithms.mutants.planted import Mutant, unsquared


class PullWithoutGradient(FedAMP):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        model = ctx.fit(self.start(state, down), on=ctx.ce)
        return Done(state=model, up=model)


class UnsquaredPull(FedAMP):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        pull = unsquared(self.cfg.lam / self.cfg.alpha, down)
        model = ctx.fit(self.start(state, down), on=ctx.ce, penalty=pull)
        return Done(state=model, up=model)


class TrainsFromTheCloudModel(FedAMP):
    """Training begins at u_i, while its base is taken to be the client's own model."""

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        return super().local(ctx, down, down)


class TakesTheDownlinkForTheStart(FedAMP):
    """The observer takes down minus up for the gradient."""

    def change(self, state: Items, down: Items, up: Items, lr: float, steps: int) -> Items:
        return combine(lambda u, sent: (u - sent) / (lr * steps), down, up)


class MixesThisRoundsUploadsOnly(FedAMP):
    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        start = without_prefix("bank", server)
        fresh = combine(lambda w: w[:1].expand_as(w), start)
        return super().aggregate(prefixed("bank", fresh), ups)


class NegativeExponentForgotten(FedAMP):
    """exp(+d/sigma): the more different, the more weight."""

    def mixture(self, bank: Items, client: int) -> Tensor:
        flat = torch.cat([models.flatten(1) for models in bank.values()], 1)
        far = (flat - flat[client]).square().sum(1)
        xi = self.cfg.alpha / self.cfg.sigma * torch.exp(far / self.cfg.sigma) * (torch.arange(self.clients) != client)
        xi[client] = 1 - xi.sum()
        return xi


MUTANTS = [
    Mutant(
        "pull without gradient",
        FedAMP,
        fedamp.check_4_one_step_is_pulled_towards_the_received_model,
        PullWithoutGradient,
    ),
    Mutant(
        "lambda makes no difference", FedAMP, fedamp.check_4_another_lambda_sends_another_upload, PullWithoutGradient
    ),
    Mutant("norm not squared", FedAMP, fedamp.check_4_one_step_is_pulled_towards_the_received_model, UnsquaredPull),
    Mutant(
        "trains from u, base is own", FedAMP, fedamp.check_5_the_server_computes_the_gradient, TrainsFromTheCloudModel
    ),
    Mutant(
        "downlink taken for the start",
        FedAMP,
        fedamp.check_5_the_server_computes_the_gradient,
        TakesTheDownlinkForTheStart,
    ),
    Mutant(
        "this round's uploads only",
        FedAMP,
        fedamp.check_the_server_keeps_everybodys_last_upload,
        MixesThisRoundsUploadsOnly,
    ),
    Mutant(
        "sign of the exponent",
        FedAMP,
        fedamp.check_2_the_mixture_follows_the_squared_distance,
        NegativeExponentForgotten,
    ),
]
