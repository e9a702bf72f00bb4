"""Cases of section T1: whether methods do what their papers say. Named after the rows of tests/cases/README.md."""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pflsec.algorithms.traditional.fedavg import FedAvg
from pflsec.algorithms.traditional.fedprox import FedProx
from pflsec.core import registry
from pflsec.core.algorithm import Algorithm, Done
from pflsec.core.errors import ConfigError, PflsecWarning
from pflsec.core.items import Items, combine, select, subtract
from pflsec.core.local import Local, LossPerExample, Penalty
from pflsec.training.local import LocalWork
from tests import toys
from tests.contracts.cases import Case, exchange

STILL = "local training changed no weight of any client"
for_every_method = pytest.mark.parametrize("key", registry.names("algorithms"))


def alarms(kind: toys.Method, rounds: int, **options: Any) -> list[str]:
    """Return what was warned of about training that moves nothing."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        toys.play(kind, rounds, **options)
    return [str(w.message) for w in caught if STILL in str(w.message)]


class TrainsACopy(FedAvg):
    """Trains, and sends what it received."""

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        ctx.fit(down, on=ctx.ce)
        return Done(state, down | {"num_samples": torch.tensor(ctx.num_samples)})


def test_u004_training_that_changes_nothing_is_said_with_its_round():
    assert [text.partition(":")[0] for text in alarms(TrainsACopy, 2)] == ["round 0", "round 1"]
    assert len(alarms("fedavg", 1, lr=1e-60)) == 1


def test_u004_statistics_that_follow_the_data_are_no_training():
    assert len(alarms("fedavg", 1, net=toys.normed(), lr=1e-60)) == 1


def test_u004_work_that_was_not_asked_for_is_not_missed():
    assert alarms("fedavg", 1, local_epochs=0) == []


@for_every_method
def test_u004_u019_every_method_moves_and_the_norms_of_its_state_are_written(key: str):
    """Half of the clients, so that some states are old; what is written is the norm by hand, part by part."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", f".*{STILL}", PflsecWarning)
        turn = toys.play(key, 2, participation=0.5)[-1]
    found = turn.metrics["norms"]
    assert found["server"] == pytest.approx(hand_norms(turn.next_server))
    clients = [hand_norms(turn.next_states[c]) for c in turn.ups]
    mean = {part: sum(one[part] for one in clients) / len(clients) for part in clients[0]}
    assert found["clients"] == pytest.approx(mean)


def hand_norms(items: Mapping[str, Tensor]) -> dict[str, float]:
    real = {k: v.double() for k, v in items.items() if v.is_floating_point()}
    return {
        part: math.sqrt(sum(float(v.square().sum()) for k, v in real.items() if k.split(".")[0] == part))
        for part in {k.split(".")[0] for k in real}
    }


def test_u019_the_norm_of_feddyns_h_is_of_every_round_and_a_pull_that_is_not_positive_is_refused():
    turns = toys.play("feddyn", 3)
    assert [turn.metrics["norms"]["server"]["drift"] > 0 for turn in turns] == [True] * 3
    for alpha in (0, -0.1):
        with pytest.raises(ConfigError, match=r"alpha is .*; it must be greater than 0"):
            toys.method("feddyn", alpha=alpha)


def test_u006_apfls_weight_is_learnt_by_default_and_otherwise_stays_to_the_last_bit():
    learnt = toys.play("apfl", 1)[0]
    assert all(float(learnt.next_states[c]["alpha"]) != 0.5 for c in learnt.ups)
    assert learnt.metrics["norms"]["clients"]["alpha"] != 0.5
    for turn in toys.play("apfl", 3, settings={"alpha": 0.3, "alpha_lr": 0.0}):
        assert all(torch.equal(state["alpha"], torch.tensor(0.3)) for state in turn.next_states.values())


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_u007_apfl_is_tested_with_its_mixture(alpha: float):
    """Weight 1: the local model; weight 0: the shared one; between them: the model of the mixed weights."""
    made = toys.setup("apfl", settings={"alpha": alpha, "alpha_lr": 0.0, "eval_global": "fresh"}, rounds=2)
    turn, algorithm = toys.rounds(made)[-1], made.algorithm
    for client in turn.ups:
        x, _ = made.federation.test(client)
        w = algorithm.serve(turn.next_server, client)
        v = select(turn.next_states[client], "body", "head")
        model = combine(lambda w, v: (1 - alpha) * w + alpha * v, select(w, "body", "head"), v)
        expected = F.linear(toys.hand_features(model, x), model["head.weight"], model["head.bias"])
        found = algorithm.scores(algorithm.deploy(turn.next_states[client], w), x)
        assert torch.allclose(found, expected, atol=1e-6)
        assert toys.distance(select(w, "body", "head"), v) > 1e-3


class Quadratic(LocalWork):
    """Every parameter p has the loss (p - 1)^2 / 2, whatever the data."""

    def ce(self, params: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return torch.stack([(p - 1).square().sum() / 2 for p in params.values()]).sum().expand(len(y))


def test_u010_dittos_personal_step_is_anchored_to_the_model_received():
    """v - lr ((v - 1) + lam (v - w_t)) = 0.5 - 0.1 (-0.5 + 0.5) = 0.5; towards the trained w = 0.1 it would be 0.51."""
    x, y = toys.batch(1)
    ctx = Quadratic(toys.tiny(), x, y, lr=0.1, epochs=1, batch_size=1, seed=0, round=0, client=0)
    w = {k: torch.zeros_like(p) for k, p in toys.tiny().fresh("w").items()}
    state = {k: torch.full_like(p, 0.5) for k, p in w.items()} | {"trained": torch.tensor(True)}
    done = toys.method("ditto", lam=1.0, personal_epochs=1).local(ctx, state, w)
    for name, zeros in w.items():
        assert torch.allclose(done.state[name], zeros + 0.5)
        assert torch.allclose(done.up[name], zeros + 0.1)


@pytest.mark.parametrize(("beta", "expected"), [(1.0, 2.0), (0.5, 1.0)])
def test_u015_pfedmes_server_mixes_once(beta: float, expected: float):
    """Uploads of ones and of threes, a server of zeros: their mean 2, of which the share beta is taken."""
    fresh = toys.tiny().fresh("w")
    server, *ups = ({k: torch.full_like(v, n) for k, v in fresh.items()} for n in (0.0, 1.0, 3.0))
    found = toys.method("pfedme", beta=beta).aggregate(server, dict(enumerate(ups)))
    assert found.keys() == fresh.keys()
    assert all(torch.allclose(v, torch.full_like(v, expected)) for v in found.values())


# --- the gradient of every step is that of the objective


@dataclass
class Tape:
    """What a step held constant, to be held constant when its objective is asked again elsewhere."""

    kept: list[Tensor] = field(default_factory=list)
    played: Iterator[Tensor] | None = None


@dataclass
class Measured(LocalWork):
    """Holds every step's gradient against finite differences of mean(on) + penalty in a random direction."""

    tape: Tape = field(default_factory=Tape)
    errors: list[float] = field(default_factory=list)

    def constant(self, value: Tensor) -> Tensor:
        if self.tape.played is not None:
            return next(self.tape.played)
        self.tape.kept.append(super().constant(value))
        return self.tape.kept[-1]

    def _step_gradient(
        self, held: Items, on: LossPerExample, x: Tensor, y: Tensor, penalty: Penalty | None, draws: Any, log: Any
    ) -> list[Tensor]:
        self.tape.kept.clear()
        before = draws.get_state()
        found = super()._step_gradient(held, on, x, y, penalty, draws, log)
        after = draws.get_state()
        rng = torch.Generator().manual_seed(len(self.errors))
        direction = {k: torch.randn(p.shape, generator=rng, dtype=p.dtype) for k, p in held.items()}

        def objective(h: float) -> float:
            at = {k: p.detach() + h * direction[k] for k, p in held.items()}
            self.tape.played = iter(self.tape.kept)
            draws.set_state(before)
            value = on(at, x, y).mean() + (penalty(at, draws) if penalty else 0)
            self.tape.played = None
            return float(value)

        measured = (objective(1e-5) - objective(-1e-5)) / 2e-5
        slope = float(torch.stack([(g * d).sum() for g, d in zip(found, direction.values(), strict=True)]).sum())
        draws.set_state(after)
        self.errors.append(max(abs(slope - measured) - 1e-8, 0.0) / max(abs(measured), 1e-8))
        return found


def slope_errors(algorithm: Algorithm[Any], key: str) -> Sequence[float]:
    """Return the relative errors of all gradients of one exchange after two rounds, in float64."""
    ex = exchange(Case(key))
    given = ex.context(epochs=2)
    ctx = Measured(**{f.name: getattr(given, f.name) for f in fields(LocalWork)})
    algorithm.local(ctx, ex.state, ex.down)
    return ctx.errors


@for_every_method
def test_u013_every_steps_gradient_is_that_of_its_objective(key: str):
    errors = slope_errors(exchange(Case(key)).setup.algorithm, key)
    assert len(errors) >= 2
    assert max(errors) < 1e-4


def test_u013_a_penalty_that_is_half_lost_is_seen():
    """The case itself: half of the penalty passes no gradient."""

    class HalfLost(FedProx):
        def local(self, ctx: Local, state: Items, down: Items) -> Done:
            def penalty(params: Items, rng: torch.Generator) -> Tensor:
                apart = subtract(params, down)
                both = [(d.square() + d.detach().square()).sum() / 4 for d in apart.values()]
                return torch.stack(both).sum()

            return Done(state, ctx.fit(down, on=ctx.ce, penalty=penalty))

    assert max(slope_errors(toys.method(HalfLost), "fedprox")) > 1e-4
