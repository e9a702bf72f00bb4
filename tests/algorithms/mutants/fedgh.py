"""Planted bugs of FedGH."""

from collections.abc import Mapping

import torch

from pflsec.algorithms.model_splitting.fedgh import FedGH
from pflsec.core.algorithm import Done
from pflsec.core.items import Items, select
from pflsec.core.local import Local
from tests.algorithms import test_fedgh as fedgh
from tests.algorithms.mutants.planted import Mutant


class SharesItsHeadWithClient0(FedGH):
    """The server's tensors are client 0's: its training moves them in place."""

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        done = super().local(ctx, state, down)
        if ctx.client == 0:
            for name, value in down.items():
                value.copy_(done.state[name])
        return done

    def downlink(self, server: Items, client: int) -> Items:
        return {k: v.view_as(v) for k, v in select(server, "head").items()}


class NeverSteps(FedGH):
    """The head is in no optimiser: gradients are taken, and nothing moves."""

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        return super().aggregate(server, ups) | select(server, "head")


class AveragesBatchMeans(FedGH):
    """Means of the means of batches of four, which weigh the last short batch too much."""

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        done = super().local(ctx, state, down)
        z, y = ctx.features(done.state), ctx.one_hot(ctx.targets())
        rows = []
        for c in done.up["held"].nonzero()[:, 0]:
            parts = [a[b[:, c] > 0].mean(0) for a, b in zip(z.split(4), y.split(4), strict=True) if (b[:, c] > 0).any()]
            rows.append(torch.stack(parts).mean(0))
        return Done(done.state, done.up | {"prototype": torch.stack(rows)})


class DropsTheLastBatch(FedGH):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        done = super().local(ctx, state, down)
        whole = max(4, ctx.num_samples // 4 * 4)
        z, y = ctx.features(done.state)[:whole], ctx.one_hot(ctx.targets())[:whole]
        held = y.sum(0) > 0
        prototype = (y.T @ z)[held] / y.sum(0)[held, None]
        return Done(done.state, {"prototype": prototype, "held": held})


class MeansBeforeTraining(FedGH):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        done = super().local(ctx, state, down)
        y = ctx.one_hot(ctx.targets())
        held = done.up["held"]
        prototype = (y.T @ ctx.features(state))[held] / y.sum(0)[held, None]
        return Done(done.state, done.up | {"prototype": prototype})


class KeepsItsOwnHead(FedGH):
    """Training goes on from the client's own head; the received one is left aside."""

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        return super().local(ctx, state, select(state, "head"))


class TakesAllPairsAtOnce(FedGH):
    """All the pairs of a round in one step."""

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        one_step = FedGH(self.cfg.model_copy(update={"server_batch_size": 10**6}), self.net, self.clients)
        return one_step.aggregate(server, ups)


class PredictsWithTheNewestHead(FedGH):
    def deploy(self, state: Items, down: Items) -> Items:
        return select(state, "body") | down


MUTANTS = [
    Mutant("client 0 owns the head", FedGH, fedgh.check_4_local_training_leaves_the_servers_head_alone,
           SharesItsHeadWithClient0),
    Mutant("head is in no optimiser", FedGH, fedgh.check_3_the_head_follows_from_the_wire, NeverSteps),
    Mutant("all pairs in one step", FedGH, fedgh.check_3_the_head_follows_from_the_wire, TakesAllPairsAtOnce),
    Mutant("means of batch means", FedGH, fedgh.check_1_the_upload_is_mean_features_of_held_classes,
           AveragesBatchMeans),
    Mutant("last batch is dropped", FedGH, fedgh.check_1_the_upload_is_mean_features_of_held_classes,
           DropsTheLastBatch),
    Mutant("means before training", FedGH, fedgh.check_1_the_upload_is_mean_features_of_held_classes,
           MeansBeforeTraining),
    Mutant("received head is not used", FedGH, fedgh.check_2_without_a_server_step_clients_are_alone,
           KeepsItsOwnHead),
    Mutant("tested with the newest head", FedGH, fedgh.check_a_client_is_tested_with_its_own_head,
           PredictsWithTheNewestHead),
]  # fmt: skip
