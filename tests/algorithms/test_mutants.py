"""Planted bugs: what public implementations got wrong, put into our methods. A check that lets one live checks nothing.

Each row is a bug, the check that must catch it, and how the bug is planted: a subclass of the method, or a patch of the
machinery around it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from pflsec.algorithms.knowledge_distillation.fedproto import FedProto
from pflsec.algorithms.meta_learning.perfedavg import PerFedAvg, moved
from pflsec.algorithms.model_splitting.fedrep import FedRep
from pflsec.algorithms.other.local import Isolated
from pflsec.algorithms.personalized_aggregation.fedala import FedALA
from pflsec.algorithms.personalized_aggregation.fedamp import FedAMP
from pflsec.algorithms.regularization.ditto import Ditto
from pflsec.algorithms.traditional import fedgen as fedgen_module
from pflsec.algorithms.traditional.fedavg import FedAvg
from pflsec.algorithms.traditional.fedgen import FedGen
from pflsec.algorithms.traditional.fedprox import FedProx
from pflsec.algorithms.traditional.scaffold import Scaffold
from pflsec.core.algorithm import Algorithm, Done, mean_of_uploads
from pflsec.core.items import Items, combine, prefixed, select, without_prefix
from pflsec.core.local import Local, Penalty, half_squared_distance
from pflsec.runtime.rounds import Federated
from pflsec.training.local import LocalWork
from tests.algorithms import test_ditto as ditto
from tests.algorithms import test_fedala as fedala
from tests.algorithms import test_fedamp as fedamp
from tests.algorithms import test_fedavg as fedavg
from tests.algorithms import test_fedgen as fedgen
from tests.algorithms import test_fedproto as fedproto
from tests.algorithms import test_fedprox as fedprox
from tests.algorithms import test_fedrep as fedrep
from tests.algorithms import test_local as local
from tests.algorithms import test_perfedavg as perfedavg
from tests.algorithms import test_scaffold as scaffold

Check = Callable[[type[Algorithm[Any]]], None]
Patch = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Mutant:
    """A planted bug, and the check that catches it."""

    bug: str
    original: type[Algorithm[Any]]
    check: Check
    mutant: type[Algorithm[Any]] | None = None
    patch: Patch | None = None

    def __str__(self) -> str:
        return f"{self.original.key}: {self.bug}"


# --- FedAvg


class UniformWeights(FedAvg):
    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        return mean_of_uploads(ups, *self.shared, weighting="uniform")


class DividesByAllClients(FedAvg):
    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        share = len(ups) / self.clients
        return combine(lambda v: share * v, super().aggregate(server, ups))


def drop_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """A last short batch, or all rows of a client smaller than a batch, are not trained on."""
    whole = LocalWork._batches

    def batches(self: LocalWork, *args: Any) -> Iterator[tuple[Tensor, Tensor]]:
        return ((x, y) for x, y in whole(self, *args) if len(y) == self.batch_size)

    monkeypatch.setattr(LocalWork, "_batches", batches)


# --- FedProx


def _penalised(penalty: Callable[[float, Items], Penalty]) -> type[FedProx]:
    class Planted(FedProx):
        def local(self, ctx: Local, state: Items, down: Items) -> Done:
            model = ctx.fit(down, on=ctx.ce, penalty=penalty(self.cfg.mu, down), epochs=self._epochs(ctx))
            return Done(state, up=model | {"num_samples": torch.tensor(ctx.num_samples)})

    return Planted


def _unsquared(mu: float, anchor: Items) -> Penalty:
    def penalty(params: Items, rng: torch.Generator) -> Tensor:
        return mu / 2 * (torch.stack([(p - anchor[k]).square().sum() for k, p in params.items()]).sum() + 1e-30).sqrt()

    return penalty


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


# --- SCAFFOLD


class DividesByTheCohort(Scaffold):
    """Three were asked, two arrived."""

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        shrunk = {
            c: {k: v * len(ups) / 3 if k.startswith("delta.") else v for k, v in up.items()} for c, up in ups.items()
        }
        return super().aggregate(server, shrunk)


class ControlByParticipants(Scaffold):
    """c moves by the mean over participants, not over all clients."""

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        grown = {
            c: {k: v * self.clients / len(ups) if k.startswith("control.") else v for k, v in up.items()}
            for c, up in ups.items()
        }
        return super().aggregate(server, grown)


class NeverKeepsItsControl(Scaffold):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        return Done(state, super().local(ctx, state, down).up)


class InitialLearningRate(Scaffold):
    """Option II divides by the first round's rate although the rate decays."""

    def _control_change(self, ctx: Local, x: Items, y: Items, c: Items, c_i: Items) -> Items:
        return combine(lambda x, y, c: (x - y) / (ctx.steps() * 0.1) - c, x, y, c)


class EpochsForSteps(Scaffold):
    """Option II divides by the number of epochs."""

    def _control_change(self, ctx: Local, x: Items, y: Items, c: Items, c_i: Items) -> Items:
        return combine(lambda x, y, c: (x - y) / (ctx.epochs * ctx.lr) - c, x, y, c)


class StartsWithTheWeights(Scaffold):
    def init_server(self, fresh: Items) -> Items:
        return fresh | prefixed("control", fresh)


def commits_lost_uploads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client whose upload is lost keeps the state that its work left, as if it had arrived."""
    whole = Federated.advance

    def advance(self: Federated) -> Any:
        t, before = self.t, dict(self.states)
        server = self.server
        metrics, rows = whole(self)
        for c in metrics["lost"]:
            down = self.setup.algorithm.downlink(server, c)
            context = scaffold.toys.context(self.setup, t, c)
            self.states[c] = self.setup.algorithm.local(context, before[c], down).state
        return metrics, rows

    monkeypatch.setattr(Federated, "advance", advance)


# --- FedRep


class SkipsTheHeadPhase(FedRep):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        body = ctx.fit(down, on=lambda b, x, y: ctx.ce(b | state, x, y))
        return Done(state=state, up=body)


class BodyMovesInTheHeadPhase(FedRep):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        model = ctx.fit(down | state, on=ctx.ce, epochs=self.cfg.head_epochs, phase="head")
        body, head = select(model, "body"), select(model, "head")
        body = ctx.fit(body, on=lambda b, x, y: ctx.ce(b | head, x, y))
        return Done(state=head, up=body)


class HeadMovesInTheBodyPhase(FedRep):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        head = ctx.fit(state, on=ctx.head_ce, features_of=down, epochs=self.cfg.head_epochs, phase="head")
        model = ctx.fit(down | head, on=ctx.ce)
        return Done(state=select(model, "head"), up=select(model, "body"))


class BodyTrainsUnderTheOldHead(FedRep):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        head = super().local(ctx, state, down).state
        body = ctx.fit(down, on=lambda b, x, y: ctx.ce(b | state, x, y))
        return Done(state=head, up=body)


class WeighsBySamples(FedRep):
    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        counted = {c: up | {"num_samples": torch.tensor(fedrep.toys.TRAIN[c])} for c, up in ups.items()}
        return mean_of_uploads(counted, *self.shared, weighting="samples")


# --- FedProto


class TableOfThisRoundOnly(FedProto):
    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        empty = {"table": torch.zeros_like(server["table"]), "known": torch.zeros_like(server["known"])}
        return super().aggregate(empty, ups)


class AveragesTwice(FedProto):
    """The paper's equation, read literally: 1/|N_k| and n_ik/n_k."""

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        holders = torch.stack([up["held"] for up in ups.values()]).sum(0).clamp(min=1)
        new = super().aggregate(server, ups)
        return new | {"table": new["table"] / holders[:, None]}


class PrototypesOfTheOldModel(FedProto):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        done = super().local(ctx, state, down)
        z, target = ctx.features(state), ctx.one_hot(ctx.targets())
        means = (target.T @ z)[done.up["held"]] / target.sum(0)[done.up["held"], None]
        return Done(done.state, done.up | {"prototype": means})


class NeverBackpropagatesThePull(FedProto):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        plain = FedProto(self.cfg.model_copy(update={"lam": 0.0}), self.net, self.clients)
        return plain.local(ctx, state, down)


class PullsUnknownClasses(FedProto):
    """A class without a global prototype is pulled towards zero."""

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        return super().local(ctx, state, {"prototype": self._table(down), "known": torch.ones_like(down["known"])})


class PredictsAnyKnownClass(FedProto):
    def deploy(self, state: Items, down: Items) -> Items:
        return super().deploy(state, down) | {"held": down["known"]}


# --- FedAMP


class PullWithoutGradient(FedAMP):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        model = ctx.fit(self.start(state, down), on=ctx.ce)
        return Done(state=model, up=model)


class UnsquaredPull(FedAMP):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        pull = _unsquared(self.cfg.lam / self.cfg.alpha, down)
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


# --- Per-FedAvg


class OneStepSizeForBoth(PerFedAvg):
    """The flag of the outer step is read and ignored."""

    def _beta(self, lr: float) -> float:
        return self.cfg.alpha


class NoOuterStepMeansTheLearningRate(PerFedAvg):
    def _beta(self, lr: float) -> float:
        return self.cfg.beta or lr


class MovesOnFromTheInnerStep(PerFedAvg):
    """The outer gradient is applied where it was taken."""

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        w = down
        for inner, outer in ctx.row_sets(2):
            w = moved(w, ctx.gradient(w, ctx.ce, inner, phase="inner"), self.cfg.alpha)
            w = moved(w, ctx.gradient(w, ctx.ce, outer), self._beta(ctx.lr))
        return Done(state, up=w)


class CutsTheGraph(PerFedAvg):
    """Second order is announced, but the inner step is no part of what is differentiated."""

    def meta_gradient(self, ctx: Local, w: Items, inner: Tensor, outer: Tensor, third: Tensor | None = None) -> Items:
        return super().meta_gradient(ctx, w, inner, outer)


class CurvatureOfTheInnerBatch(PerFedAvg):
    def meta_gradient(self, ctx: Local, w: Items, inner: Tensor, outer: Tensor, third: Tensor | None = None) -> Items:
        return super().meta_gradient(ctx, w, inner, outer, inner)


class ForwardDifferences(PerFedAvg):
    """The error of one-sided differences falls with delta, not with its square."""

    def _slope(self, ctx: Local, v: Items) -> Any:
        if self.cfg.variant == "exact":
            return super()._slope(ctx, v)
        delta = self.cfg.delta
        return lambda w, x, y: (ctx.ce(moved(w, v, -delta), x, y) - ctx.ce(w, x, y)) / delta


class AdaptsManyTimes(PerFedAvg):
    """Many steps in place of one, on what the tested model has become."""

    def personalise(self, ctx: Local, items: Items) -> Items:
        for (rows,) in ctx.row_sets(1, epochs=3, phase="adapt"):
            items = moved(items, ctx.gradient(items, ctx.ce, rows, phase="adapt"), self.cfg.alpha)
        return items


class MetaModelsBySamples(PerFedAvg):
    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        counted = {c: up | {"num_samples": torch.tensor(perfedavg.toys.TRAIN[c])} for c, up in ups.items()}
        return mean_of_uploads(counted, *self.shared, weighting="samples")


# --- Ditto


def _ditto(anchor_trained: bool = False, phase: str = "personal", share: float = 1.0) -> type[Ditto]:
    class Planted(Ditto):
        def local(self, ctx: Local, state: Items, down: Items) -> Done:
            v = select(state, *self.private)
            w = ctx.fit(down, on=ctx.ce) if phase == "personal" else None
            pull = half_squared_distance(share * self.cfg.lam, w if anchor_trained and w else down)
            v = ctx.fit(v, on=ctx.ce, penalty=pull, epochs=self.cfg.personal_epochs, phase=phase)
            w = ctx.fit(down, on=ctx.ce) if w is None else w
            return Done(v | {"trained": torch.tensor(True)}, w | {"num_samples": torch.tensor(ctx.num_samples)})

    return Planted


class SendsThePersonalModel(Ditto):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        done = super().local(ctx, state, down)
        return Done(done.state, done.up | select(done.state, *self.private))


class UnsquaredDitto(Ditto):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        v = select(state, *self.private)
        v = ctx.fit(v, on=ctx.ce, penalty=_unsquared(self.cfg.lam, down), phase="personal")
        return Done(v | {"trained": torch.tensor(True)}, super().local(ctx, state, down).up)


# --- FedALA


class MixesBySumAndDifference(FedALA):
    """old + (new - old) W is not new where W is 1."""

    def start(self, state: Items, down: Items) -> Items:
        return fedala.hand_start(state, select(down, *self.shared)) if state["trained"] else super().start(state, down)


class NewcomersMix(FedALA):
    """A client that joins late mixes with the random model it was born with."""

    def init_client(self, fresh: Items, server: Items) -> Items:
        return super().init_client(fresh, server) | {"trained": torch.tensor(True)}


class ForgetsItsWeights(FedALA):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        done = super().local(ctx, state, down)
        return Done(done.state | select(state, "mix"), done.up)


class CountsTensors(FedALA):
    """The last tensor is a bias: the layer is split."""

    def top(self) -> list[str]:
        return list(self.net.shapes)[-self.cfg.layers :]


class NeverStops(FedALA):
    def settled(self, losses: Any) -> bool:
        return super().settled(losses) and len(losses) > 30


class LosesTheClip(FedALA):
    """W leaves [0, 1], so that the start leaves the segment between the two models."""

    def mix(self, ctx: Local, state: Items, down: Items) -> Items:
        if not self.mixes(state, down):
            return state

        def loss(w: Items, x: Tensor, y: Tensor) -> Tensor:
            return ctx.ce(self.start(state | prefixed("mix", w), down), x, y)

        w = ctx.fit(without_prefix("mix", state), on=loss, epochs=1, lr=self.cfg.mix_lr, phase="mix")
        return state | prefixed("mix", w) | {"mixed": torch.tensor(True)}


class UsesTheModelReceived(FedALA):
    def personalise(self, ctx: Local, items: Items) -> Items:
        return without_prefix("down", items) or items


class TakesUpperLayersForGradients(FedALA):
    def change(self, state: Items, down: Items, up: Items, lr: float, steps: int) -> Items:
        return FedAvg.change(self, state, down, up, lr, steps)  # type: ignore[arg-type]


# --- FedGen


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


# --- isolated training


class StartsAnew(Isolated):
    """Every round begins with the same draw."""

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        return Done(ctx.fit(self.net.fresh(0), on=ctx.ce), up={})


class HandsModelsRound(Isolated):
    """A server that is said to do nothing averages."""

    down: ClassVar = {"body.*": "weights", "head.*": "weights"}
    up: ClassVar = {"body.*": "weights", "head.*": "weights"}

    def init_server(self, fresh: Items) -> Items:
        return fresh

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        model = ctx.fit(down, on=ctx.ce)
        return Done(model, up=model)

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        return mean_of_uploads(ups, "body", "head", weighting="uniform")


MUTANTS = [
    Mutant(
        "uniform instead of sample weights", FedAvg, fedavg.check_2_the_server_takes_the_mean_by_samples, UniformWeights
    ),
    Mutant("one and three samples weigh the same", FedAvg, fedavg.check_2_one_and_three_samples, UniformWeights),
    Mutant(
        "divided by all clients", FedAvg, fedavg.check_6_weights_sum_to_one_for_every_drop_pattern, DividesByAllClients
    ),
    Mutant("short batches dropped", FedAvg, fedavg.check_3_full_batch_equals_centralised_sgd, patch=drop_last),
    Mutant("norm not squared", FedProx, fedprox.check_3_two_steps_discount_the_first_gradient, _penalised(_unsquared)),
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
    Mutant(
        "divided by the cohort",
        Scaffold,
        scaffold.check_the_model_moves_by_the_mean_of_what_arrived,
        DividesByTheCohort,
    ),
    Mutant(
        "c by participants",
        Scaffold,
        scaffold.check_3_the_server_holds_the_mean_of_all_control_variates,
        ControlByParticipants,
    ),
    Mutant("c_i never kept", Scaffold, scaffold.check_5_the_log_gives_the_state_away, NeverKeepsItsControl),
    Mutant(
        "c_i kept although the upload is lost",
        Scaffold,
        scaffold.check_6_a_lost_upload_leaves_both_control_variates,
        patch=commits_lost_uploads,
    ),
    Mutant(
        "c is no mean after a loss",
        Scaffold,
        scaffold.check_3_the_server_holds_the_mean_of_all_control_variates,
        patch=commits_lost_uploads,
    ),
    Mutant(
        "initial learning rate", Scaffold, scaffold.check_2_option_ii_keeps_the_mean_raw_gradient, InitialLearningRate
    ),
    Mutant("epochs for steps", Scaffold, scaffold.check_2_option_ii_keeps_the_mean_raw_gradient, EpochsForSteps),
    Mutant("c starts with the weights", Scaffold, scaffold.check_1_the_first_round_is_fedavgs, StartsWithTheWeights),
    Mutant("no head phase", FedRep, fedrep.check_2_the_head_phase_moves_the_head_alone, SkipsTheHeadPhase),
    Mutant(
        "body moves in the head phase",
        FedRep,
        fedrep.check_2_the_head_phase_moves_the_head_alone,
        BodyMovesInTheHeadPhase,
    ),
    Mutant(
        "head moves in the body phase",
        FedRep,
        fedrep.check_2_the_body_phase_moves_the_body_alone,
        HeadMovesInTheBodyPhase,
    ),
    Mutant(
        "body under the old head",
        FedRep,
        fedrep.check_3_one_step_gives_the_bodys_gradient_at_the_new_head,
        BodyTrainsUnderTheOldHead,
    ),
    Mutant("sample weights", FedRep, fedrep.check_5_the_mean_is_plain, WeighsBySamples),
    Mutant(
        "table of this round only",
        FedProto,
        fedproto.check_a_class_that_is_away_keeps_its_prototype,
        TableOfThisRoundOnly,
    ),
    Mutant(
        "averaged twice", FedProto, fedproto.check_3_a_global_prototype_is_the_plain_mean_over_holders, AveragesTwice
    ),
    Mutant(
        "prototypes of the old model",
        FedProto,
        fedproto.check_4_prototypes_come_from_the_trained_model,
        PrototypesOfTheOldModel,
    ),
    Mutant(
        "pull never back-propagated",
        FedProto,
        fedproto.check_6_the_pull_moves_the_body_alone,
        NeverBackpropagatesThePull,
    ),
    Mutant(
        "objective without the pull",
        FedProto,
        fedproto.check_0_one_step_follows_the_objective,
        NeverBackpropagatesThePull,
    ),
    Mutant(
        "unknown classes pulled to zero", FedProto, fedproto.check_5_an_unknown_class_is_not_pulled, PullsUnknownClasses
    ),
    Mutant(
        "predicts classes it does not hold",
        FedProto,
        fedproto.check_prediction_is_the_nearest_prototype_of_a_held_class,
        PredictsAnyKnownClass,
    ),
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
    Mutant("one step size for both", PerFedAvg, perfedavg.check_the_two_step_sizes_are_two, OneStepSizeForBoth),
    Mutant(
        "beta of 0 is the learning rate",
        PerFedAvg,
        perfedavg.check_without_outer_step_nothing_moves,
        NoOuterStepMeansTheLearningRate,
    ),
    Mutant(
        "moves on from the inner step",
        PerFedAvg,
        perfedavg.check_2_one_step_takes_the_gradient_ahead_and_applies_it_at_the_start,
        MovesOnFromTheInnerStep,
    ),
    Mutant("cuts the graph", PerFedAvg, perfedavg.check_3_exact_is_the_gradient_of_the_composed_loss, CutsTheGraph),
    Mutant(
        "cuts the graph with one sample",
        PerFedAvg,
        perfedavg.check_3_one_sample_serves_as_all_three_batches,
        CutsTheGraph,
    ),
    Mutant(
        "curvature of the inner batch",
        PerFedAvg,
        perfedavg.check_3_the_curvature_is_the_third_batchs,
        CurvatureOfTheInnerBatch,
    ),
    Mutant(
        "forward differences",
        PerFedAvg,
        perfedavg.check_4_differences_go_to_the_exact_gradient_with_the_square_of_delta,
        ForwardDifferences,
    ),
    Mutant(
        "adapts many times",
        PerFedAvg,
        perfedavg.check_5_the_tested_model_is_one_step_from_the_shared_one,
        AdaptsManyTimes,
    ),
    Mutant("sample weights", PerFedAvg, perfedavg.check_6_the_mean_is_plain, MetaModelsBySamples),
    Mutant(
        "sample weights without inner step",
        PerFedAvg,
        perfedavg.check_1_without_inner_step_it_is_fedavg_on_every_other_batch,
        MetaModelsBySamples,
    ),
    Mutant("anchor is the trained model", Ditto, ditto.check_3_the_anchor_is_the_model_that_was_received, _ditto(True)),
    Mutant("one batch order for both", Ditto, ditto.check_1_what_is_sent_is_fedavgs, _ditto(phase="main")),
    Mutant("order matters", Ditto, ditto.check_4_the_order_of_the_two_tasks_changes_nothing, _ditto(phase="main")),
    Mutant("no pull at all", Ditto, ditto.check_3_one_personal_step_follows_the_objective, _ditto(share=0.0)),
    Mutant("norm not squared", Ditto, ditto.check_3_one_personal_step_follows_the_objective, UnsquaredDitto),
    Mutant(
        "alone, but on other batches",
        Ditto,
        ditto.check_2_without_the_pull_it_is_isolated_training,
        _ditto(phase="main"),
    ),
    Mutant("personal model is sent", Ditto, ditto.check_5_nothing_of_the_personal_model_is_sent, SendsThePersonalModel),
    Mutant("no lerp", FedALA, fedala.check_1_without_learning_it_is_fedavg, MixesBySumAndDifference),
    Mutant("newcomers mix", FedALA, fedala.check_4_a_clients_first_exchange_is_fedavgs, NewcomersMix),
    Mutant("weights not kept", FedALA, fedala.check_the_weights_are_kept, ForgetsItsWeights),
    Mutant("tensors for layers", FedALA, fedala.check_layers_are_whole, CountsTensors),
    Mutant("no end", FedALA, fedala.check_the_first_mixing_ends_when_the_loss_has_settled, NeverStops),
    Mutant("no clipping", FedALA, fedala.check_2_the_start_lies_between_the_two_models, LosesTheClip),
    Mutant(
        "uses the model received",
        FedALA,
        fedala.check_the_tested_model_is_the_start_of_the_next_round,
        UsesTheModelReceived,
    ),
    Mutant(
        "mixture taken for a gradient",
        FedALA,
        fedala.check_6_lower_layers_show_the_gradient_at_the_start,
        TakesUpperLayersForGradients,
    ),
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
    Mutant("starts anew", Isolated, local.check_each_client_trains_on_from_where_it_was, StartsAnew),
    Mutant("not alone", Isolated, local.check_a_client_does_not_know_the_others, HandsModelsRound),
    Mutant("not silent", Isolated, local.check_nothing_is_on_the_wire, HandsModelsRound),
]


@pytest.mark.parametrize("row", MUTANTS, ids=str)
def test_the_check_catches_the_planted_bug(row: Mutant, monkeypatch: pytest.MonkeyPatch):
    row.check(row.original)
    if row.patch:
        row.patch(monkeypatch)
    with pytest.raises(AssertionError):
        row.check(row.mutant or row.original)
