"""Planted bugs of FedDBE."""

from collections.abc import Mapping

import torch
from torch import Tensor

from pflsec.algorithms.model_splitting.feddbe import FedDBE, RunningMean
from pflsec.core.algorithm import Done, mean_of_uploads, sample_count
from pflsec.core.items import Items, select
from pflsec.core.local import Local, paced
from tests.algorithms import test_feddbe as feddbe
from tests.algorithms.mutants.planted import Mutant


def _feddbe(begin: str = "zero", of_shifted: bool = False, power: float = 1.0, summed: bool = False) -> type[FedDBE]:
    class Planted(FedDBE):
        def local(self, ctx: Local, state: Items, down: Items) -> Done:
            zero, zbar, rate = torch.zeros_like(state["bias"]), state["global_mean"], self.cfg.bias_rate**power
            mean = RunningMean(ctx, self.cfg.mu, zero if begin == "zero" else zbar)

            def loss(model: Items, x: Tensor, y: Tensor) -> Tensor:
                z = self.net.features(model, x)
                shifted = z + paced(ctx, model["bias"], rate)
                off = (mean.update(shifted if of_shifted else z) - zbar).square()
                return ctx.head_ce(model, shifted, y) + self.cfg.kappa / 2 * (off.sum() if summed else off.mean())

            model = ctx.fit(select(down, *self.shared) | select(state, "bias"), on=loss)
            return Done(state | select(model, "bias"), select(model, *self.shared) | sample_count(ctx))

    return Planted


class PlainMeanOfMeans(FedDBE):
    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        new = super().aggregate(server, ups)
        first = "mean" in next(iter(ups.values()))
        mean = mean_of_uploads(ups, "mean", weighting="uniform")["mean"] if first else new["global_mean"]
        return new | {"global_mean": mean}


class KeepsTheInitialModels(FedDBE):
    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        new = super().aggregate(server, ups)
        return new if server["ready"] else new | {"body.fc1.bias": new["body.fc1.bias"] + 0.01}


class SwitchedOff(FedDBE):
    """Feature means are sent and never used: the weight of their distance is 0 whatever is asked for."""

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        off = FedDBE(self.cfg.model_copy(update={"kappa": 0.0}), self.net, self.clients)
        return off.local(ctx, state, down)


class BiasNeverSlowsDown(FedDBE):
    """The bias vector keeps the first learning rate, 0.1, when that of the model is another."""

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        rate = self.cfg.bias_rate * 0.1 / ctx.lr
        return FedDBE(self.cfg.model_copy(update={"bias_rate": rate}), self.net, self.clients).local(ctx, state, down)


class TellsEveryRound(FedDBE):
    def downlink(self, server: Items, client: int) -> Items:
        return select(server, *self.shared, *(["global_mean"] if server["ready"] else []))


class TestsWithoutTheBias(FedDBE):
    def scores(self, items: Items, x: Tensor) -> Tensor:
        return self.net.logits(items, x)


class InitialMeanOfTheNewestModel(FedDBE):
    def first_mean(self, ctx: Local, mean: RunningMean, down: Items) -> Tensor:
        return ctx.features(ctx.fit(down, on=ctx.ce)).mean(0)


MUTANTS = [
    Mutant("mean does not begin at 0", FedDBE, feddbe.check_0_every_step_follows_the_objective, _feddbe("zbar")),
    Mutant("sum over features", FedDBE, feddbe.check_0_every_step_follows_the_objective, _feddbe(summed=True)),
    Mutant("pull switched off", FedDBE, feddbe.check_5_the_pull_moves_the_body_alone, SwitchedOff),
    Mutant(
        "rate of the bias squared", FedDBE, feddbe.check_2_a_step_of_the_bias_is_read_off_the_head, _feddbe(power=2)
    ),
    Mutant(
        "bias keeps the first rate",
        FedDBE,
        feddbe.check_2_a_step_of_the_bias_is_read_off_the_head,
        BiasNeverSlowsDown,
    ),
    Mutant("bias pulled too", FedDBE, feddbe.check_5_the_pull_moves_the_body_alone, _feddbe(of_shifted=True)),
    Mutant(
        "plain mean of the means",
        FedDBE,
        feddbe.check_3_the_common_mean_is_by_samples_and_never_changes,
        PlainMeanOfMeans,
    ),
    Mutant(
        "initial models leave a trace",
        FedDBE,
        feddbe.check_3_the_common_mean_is_by_samples_and_never_changes,
        KeepsTheInitialModels,
    ),
    Mutant(
        "initial mean of the newest model",
        FedDBE,
        feddbe.check_3_the_initial_mean_is_of_an_ordinary_training,
        InitialMeanOfTheNewestModel,
    ),
    Mutant(
        "mean told every round", FedDBE, feddbe.check_4_nothing_of_the_bias_is_sent_and_the_mean_once, TellsEveryRound
    ),
    Mutant("tested without the bias", FedDBE, feddbe.check_the_tested_model_has_the_bias, TestsWithoutTheBias),
]
