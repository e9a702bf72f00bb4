"""FedDBE. The checks take the method's class, so that planted bugs can be put to them."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pflsec.algorithms.model_splitting.feddbe import FedDBE
from pflsec.algorithms.traditional.fedavg import FedAvg
from pflsec.core.algorithm import Algorithm, Done
from pflsec.core.items import Items, select
from pflsec.training.local import LocalWork
from tests import toys

MODEL = ("body", "head")
ZBAR = torch.tensor([0.3, -0.2, 0.5, 0.0, -0.4])


def bias(seed: int = 1) -> Tensor:
    return 0.3 * torch.randn(5, generator=torch.Generator().manual_seed(seed))


def done(kind: type[Algorithm], work: LocalWork, z: Tensor | None = None, **settings: Any) -> tuple[Items, Done]:
    """Return the model received, and the result of an exchange of a client that has the common mean."""
    down = work.net.fresh("server")
    state = {"bias": bias() if z is None else z, "global_mean": ZBAR, "told": torch.tensor(True)}
    return down, toys.method(kind, **settings).local(work, state, down)


def model_of(result: Done) -> Items:
    """Return the model and the bias vector after local work."""
    return select(result.up, *MODEL) | select(result.state, "bias")


def objective(kappa: float, mu: float, past: Tensor) -> toys.Loss:
    """Return CE(h(f(x) + z), y) + kappa/(2 d) |(1 - mu) past + mu mean f(x) - zbar|^2."""

    def loss(model: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        z = toys.hand_features(model, x)
        ce = F.cross_entropy((z + model["bias"]) @ model["head.weight"].T + model["head.bias"], y)
        off = (1 - mu) * past + mu * z.mean(0) - ZBAR
        return ce + kappa * sum(0.5 * o**2 for o in off) / 5

    return loss


def check_0_every_step_follows_the_objective(kind: type[Algorithm]) -> None:
    """Two epochs of batches of 4, 4 and 2. The running mean begins at 0, its past has no gradient."""
    settings: list[dict[str, Any]] = [{}, {"kappa": 3.0, "mu": 0.3}, {"kappa": 2.0, "mu": 0.0}]
    for setting in settings:
        work = toys.work(*toys.batch(10), epochs=2, batch_size=4)
        kappa, mu = setting.get("kappa", 50.0), setting.get("mu", 1.0)
        model, past = work.net.fresh("server") | {"bias": bias()}, torch.zeros(5)
        for x, y in toys.work(*toys.batch(10), epochs=2, batch_size=4).batches():
            now = (1 - mu) * past + mu * toys.hand_features(model, x).mean(0)
            model = toys.hand_step(model, toys.hand_gradient(model, x, y, objective(kappa, mu, past)), 0.1)
            past = now
        assert toys.distance(model_of(done(kind, work, **setting)[1]), model) < 1e-13


def check_1_without_pull_and_bias_it_is_fedavg(kind: type[Algorithm]) -> None:
    """After the initial round: the bits of FedAvg's uploads and of its means."""
    made = toys.setup(kind, settings={"kappa": 0.0, "bias_rate": 0.0}, participation=0.75)
    fedavg = toys.method(FedAvg)
    for turn in toys.rounds(made)[1:]:
        alone = {c: fedavg.local(toys.context(made, turn.t, c), {}, select(turn.downs[c], *MODEL)).up for c in turn.ups}
        assert all(toys.same(up, alone[c]) for c, up in turn.ups.items())
        assert toys.same(select(turn.next_server, *MODEL), fedavg.aggregate({}, alone))
        assert not any(state["bias"].any() for state in turn.next_states.values())


def check_2_a_step_of_the_bias_is_read_off_the_head(kind: type[Algorithm]) -> None:
    """d CE / d z = W' mean(p - y), and mean(p - y) is the gradient of the head's bias: (bias_down - bias_up) / lr. The bias
    vector follows the run's learning rate, whatever that is in a round."""
    for rate, lr in ((1.0, 0.1), (0.25, 0.1), (4.0, 0.1), (1.0, 0.02)):
        down, result = done(kind, toys.work(*toys.batch(10), lr=lr), bias_rate=rate)
        step = down["head.weight"].T @ (down["head.bias"] - result.up["head.bias"])
        assert torch.allclose(result.state["bias"], bias() - rate * step, rtol=0, atol=1e-14)
        assert step.abs().max() > 1e-4


def check_3_the_common_mean_is_by_samples_and_never_changes(kind: type[Algorithm]) -> None:
    """Who comes after the first round does not count in it, and the models trained in that round are thrown away."""
    first, *later = toys.play(kind, 5, participation=0.75)
    total = sum(toys.TRAIN[c] for c in first.ups)
    mean = sum((toys.TRAIN[c] / total * up["mean"] for c, up in first.ups.items()), torch.zeros(5))
    assert torch.allclose(first.next_server["global_mean"], mean, rtol=0, atol=1e-15)
    assert toys.same(select(first.next_server, *MODEL), select(first.server, *MODEL))
    assert set().union(*(turn.ups for turn in later)) > set(first.ups)
    for turn in later:
        assert torch.equal(turn.next_server["global_mean"], first.next_server["global_mean"])
        held = [turn.next_states[c]["global_mean"] for c in turn.ups]
        assert all(torch.equal(h, first.next_server["global_mean"]) for h in held)


def check_3_the_initial_mean_is_of_an_ordinary_training(kind: type[Algorithm]) -> None:
    """Neither bias nor pull; with mu = 1 the last batch's features at the model before its step. One batch: at theta_0."""
    for size in (4, 10):
        algorithm = toys.method(kind, mu=0.7)
        work, again = (toys.work(*toys.batch(10), epochs=2, batch_size=size) for _ in range(2))
        server = algorithm.init_server(work.net.fresh("server"))
        result = algorithm.local(work, algorithm.init_client({}, server), algorithm.downlink(server, 0))
        model, mean = select(server, *MODEL), torch.zeros(5)
        for x, y in again.batches():
            mean = 0.3 * mean + 0.7 * toys.hand_features(model, x).mean(0)
            model = toys.hand_step(model, toys.hand_gradient(model, x, y), 0.1)
        assert torch.allclose(result.up["mean"], mean, rtol=0, atol=1e-14)
        assert result.up.keys() == {"mean", "num_samples"}
        assert toys.same(result.state, algorithm.init_client({}, server))


def check_4_nothing_of_the_bias_is_sent_and_the_mean_once(kind: type[Algorithm]) -> None:
    """The absent, and those whose upload was lost, keep their bias; the latter are told the mean again."""
    turns = toys.play(kind, 9, participation=0.5, drop_rate=0.5, seed=4)
    model = set(toys.tiny().shapes)
    told: set[int] = set()
    for turn in turns[1:]:
        for c, down in turn.downs.items():
            assert down.keys() == model | (set() if c in told else {"global_mean"})
        assert all(up.keys() == model | {"num_samples"} for up in turn.ups.values())
        told |= turn.ups.keys()
        for c, state in turn.next_states.items():
            assert c in turn.ups or toys.same(state, turn.states[c])
    assert any(c in t.downs and c not in t.ups and "global_mean" in t.downs[c] for t in turns[1:] for c in range(4))
    assert len(told) > 1
    assert len([1 for turn in turns[1:] for _ in turn.ups]) > 4


def check_5_the_pull_moves_the_body_alone(kind: type[Algorithm]) -> None:
    """In the first step head and bias do not know kappa: the pull is on features before the bias."""
    (_, plain), (_, pulled) = (done(kind, toys.work(*toys.batch(10)), kappa=kappa) for kappa in (0.0, 50.0))
    assert toys.same(select(model_of(plain), "head", "bias"), select(model_of(pulled), "head", "bias"))
    assert toys.distance(select(plain.up, "body"), select(pulled.up, "body")) > 1e-3


def check_6_with_mu_1_a_batch_knows_nothing_of_those_before(kind: type[Algorithm]) -> None:
    """Three batches in one local training, or in three of one batch each, are the same bits; not so with mu < 1."""
    for mu, alike in ((1.0, True), (0.5, False)):
        x, y = toys.batch(12)
        together = done(kind, toys.work(x, y, batch_size=4), mu=mu)[1]
        down, z = toys.tiny().fresh("server"), bias()
        for a, b in toys.work(x, y, batch_size=4).batches():
            state = {"bias": z, "global_mean": ZBAR, "told": torch.tensor(True)}
            result = toys.method(kind, mu=mu).local(toys.work(a, b), state, down)
            down, z = select(result.up, *MODEL), result.state["bias"]
        assert toys.same(down | {"bias": z}, model_of(together)) == alike


def check_the_tested_model_has_the_bias(kind: type[Algorithm]) -> None:
    algorithm, (x, _), down = toys.method(kind), toys.batch(20), toys.tiny().fresh("later")
    state = {"bias": bias(), "global_mean": ZBAR, "told": torch.tensor(True)}
    expected = (toys.hand_features(down, x) + bias()) @ down["head.weight"].T + down["head.bias"]
    assert torch.allclose(algorithm.scores(algorithm.deploy(state, down), x), expected, rtol=0, atol=1e-14)


def test_feddbe_0_every_step_follows_the_objective():
    check_0_every_step_follows_the_objective(FedDBE)


def test_feddbe_1_without_pull_and_bias_it_is_fedavg():
    check_1_without_pull_and_bias_it_is_fedavg(FedDBE)


def test_feddbe_2_a_step_of_the_bias_is_read_off_the_head():
    check_2_a_step_of_the_bias_is_read_off_the_head(FedDBE)


def test_feddbe_2_in_rounds_of_one_step_the_log_gives_the_bias_away():
    """From 0, by the wire alone, over five rounds with everybody in full batches."""
    followed = {c: torch.zeros(5) for c in range(4)}
    for turn in toys.play(FedDBE, 6, local_epochs=1, batch_size=10)[1:]:
        for c, up in turn.ups.items():
            down = turn.downs[c]
            followed[c] = followed[c] - down["head.weight"].T @ (down["head.bias"] - up["head.bias"])
            assert torch.allclose(followed[c], turn.next_states[c]["bias"], rtol=0, atol=1e-14)
    assert min(float(z.abs().max()) for z in followed.values()) > 1e-2


def test_feddbe_3_the_common_mean_is_by_samples_and_never_changes():
    check_3_the_common_mean_is_by_samples_and_never_changes(FedDBE)


def test_feddbe_3_the_initial_mean_is_of_an_ordinary_training():
    check_3_the_initial_mean_is_of_an_ordinary_training(FedDBE)


def test_feddbe_4_nothing_of_the_bias_is_sent_and_the_mean_once():
    check_4_nothing_of_the_bias_is_sent_and_the_mean_once(FedDBE)


def test_feddbe_5_the_pull_moves_the_body_alone():
    check_5_the_pull_moves_the_body_alone(FedDBE)


def test_feddbe_6_with_mu_1_a_batch_knows_nothing_of_those_before():
    check_6_with_mu_1_a_batch_knows_nothing_of_those_before(FedDBE)


def test_the_tested_model_has_the_bias():
    check_the_tested_model_has_the_bias(FedDBE)


def test_an_exact_initial_mean_is_of_all_rows_under_the_trained_body():
    algorithm, (x, y) = toys.method(FedDBE, init_mean="exact"), toys.batch(10)
    work, again = (toys.work(x, y, epochs=2, batch_size=4) for _ in range(2))
    server = algorithm.init_server(work.net.fresh("server"))
    up = algorithm.local(work, algorithm.init_client({}, server), algorithm.downlink(server, 0)).up
    model = again.fit(select(server, *MODEL), on=again.ce)
    assert torch.allclose(up["mean"], toys.hand_features(model, x).mean(0), rtol=0, atol=1e-14)


@pytest.mark.parametrize(("count", "classes"), [(1, (0,)), (6, (2,))], ids=["one row", "one class"])
def test_small_clients_take_part(count: int, classes: tuple[int, ...]):
    """B = 1: the mean of a batch is the sample's own feature, and with one batch the first upload is that feature."""
    algorithm, (x, y) = toys.method(FedDBE), toys.batch(count, classes)
    server = algorithm.init_server(toys.tiny().fresh("server"))
    state, down = algorithm.init_client({}, server), algorithm.downlink(server, 0)
    up = algorithm.local(toys.work(x, y), state, down).up
    assert torch.allclose(up["mean"], toys.hand_features(down, x).mean(0), rtol=0, atol=1e-15)
    server = algorithm.aggregate(server, {0: up})
    result = algorithm.local(toys.work(x, y, epochs=3), state, algorithm.downlink(server, 0))
    assert all(v.isfinite().all() for v in (result.up | result.state).values())
    assert result.state["bias"].abs().max() > 1e-4


def test_a_log_shows_all_of_a_client_that_has_not_trained_and_no_bias_of_one_that_has():
    turns = toys.play(FedDBE, 2)
    algorithm = toys.method(FedDBE)
    memory = algorithm.init_client({}, turns[0].server)
    for turn, hidden in zip(turns, (set(), {"bias"}), strict=True):
        memory = algorithm.observe(memory, turn.downs[0], turn.ups[0])
        found = algorithm.reconstruct_state(memory)
        assert found is not None
        assert toys.same(found, {k: v for k, v in turn.next_states[0].items() if k not in hidden})
