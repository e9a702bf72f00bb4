"""Planted bugs of FedGen."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from pflsec.algorithms.traditional import fedgen as fedgen_module
from pflsec.algorithms.traditional.fedgen import FedGen
from pflsec.core.algorithm import Done
from pflsec.core.items import Items, select
from pflsec.core.local import Local
from tests.algorithms import test_fedgen as fedgen
from tests.algorithms.mutants.planted import Mutant


class EnsembleOfTheOldHead(FedGen):
    """As many copies of the head that was sent as there were uploads."""

    def train_generator(self, server: Items, heads: Any, counts: Tensor) -> Items:
        return super().train_generator(server, [heads[0]] * len(heads), counts)


class OwnLabelsOnly(FedGen):
    """Labels for generated features come from the client's own rows."""

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        own = ctx.one_hot(ctx.targets()).sum(0)
        prior = own / own.sum() if down["label_prior"].any() else down["label_prior"]
        return super().local(ctx, state, down | {"label_prior": prior})


class TrustsAGeneratorThatKnowsNothing(FedGen):
    def init_server(self, fresh: Items) -> Items:
        classes = self.net.classes
        return super().init_server(fresh) | {"label_prior": torch.full((classes,), 1 / classes)}


class CountsEverybodyOnce(FedGen):
    """The prior is that of all clients, whoever takes part."""

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        everybody = torch.tensor([9.0, 9.0, 6.0])
        return super().aggregate(server, ups) | {"label_prior": everybody / everybody.sum()}


class CountsBatches(FedGen):
    """A sample is counted once, however many epochs see it."""

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        done = super().local(ctx, state, down)
        return Done(done.state, done.up | {"label_counts": done.up["label_counts"] / ctx.epochs})


def generator_in_training_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """On clients the generator normalises by the batch it makes, as while it is trained."""

    def generate(g: Items, eps: Tensor, label: Tensor) -> Tensor:
        h = fedgen_module.before_norm(g, eps, label)
        return fedgen_module.after_norm(g, h, h.mean(0), h.var(0, correction=0))

    monkeypatch.setattr(fedgen_module, "generate", generate)


class ForgetsAdamsMemory(FedGen):
    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        fresh = select(self.init_server(self.net.fresh(0)), "adam")
        return super().aggregate(server | fresh, ups)


class SendsTheBodyToo(FedGen):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        done = super().local(ctx, state, down)
        return Done(done.state, done.up | select(done.state, "body"))


MUTANTS = [
    Mutant(
        "ensemble of one head",
        FedGen,
        fedgen.check_5_a_step_is_adams_on_the_ensembles_loss,
        EnsembleOfTheOldHead,
    ),
    Mutant("labels of one's own", FedGen, fedgen.check_2_one_step_follows_the_objective, OwnLabelsOnly),
    Mutant(
        "a generator that knows nothing",
        FedGen,
        fedgen.check_2_the_first_round_is_fedavgs,
        TrustsAGeneratorThatKnowsNothing,
    ),
    Mutant(
        "prior of everybody",
        FedGen,
        fedgen.check_4_label_counts_are_the_histogram_of_the_rows_used,
        CountsEverybodyOnce,
    ),
    Mutant("epochs not counted", FedGen, fedgen.check_4_label_counts_are_the_histogram_of_the_rows_used, CountsBatches),
    Mutant(
        "generator in training mode",
        FedGen,
        fedgen.check_2_one_step_follows_the_objective,
        patch=generator_in_training_mode,
    ),
    Mutant("Adam forgets", FedGen, fedgen.check_5_a_step_is_adams_on_the_ensembles_loss, ForgetsAdamsMemory),
    Mutant("body is sent too", FedGen, fedgen.check_6_with_the_head_alone_no_body_is_sent, SendsTheBodyToo),
]
