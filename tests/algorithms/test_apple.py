"""APPLE. The checks take the method's class, so that planted bugs can be put to them."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from pflsec.algorithms.other.local import Isolated
from pflsec.algorithms.personalized_aggregation.apple import APPLE
from pflsec.core.algorithm import Algorithm, Done
from pflsec.core.items import Items, select, without_prefix
from pflsec.training.local import LocalWork
from tests import toys

SHARE = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
P = torch.tensor([0.5, -0.2, 0.6, 0.3], dtype=torch.float64)
"""Shares that have moved: one is negative, and their sum is not 1."""


def core(state: Items) -> Items:
    """Return the core of a state or an upload."""
    return select(state, "body", "head")


def cores(count: int = 4) -> list[Items]:
    """Return different cores, one for each client."""
    return [toys.tiny().fresh("core", i) for i in range(count)]


def server(kind: type[Algorithm], **settings: Any) -> Items:
    """Return a server that holds those cores."""
    algorithm, bank = toys.method(kind, **settings), cores()
    first = algorithm.enrol(algorithm.init_server(bank[0]), [40, 30, 20, 10])
    return first | {f"core.{k}": torch.stack([c[k] for c in bank]) for k in bank[0]}


def done(kind: type[Algorithm], work: LocalWork, client: int = 1, p: Tensor = P, **settings: Any) -> Done:
    """Return one exchange of a client with these shares."""
    algorithm = toys.method(kind, **settings)
    down = algorithm.downlink(server(kind, **settings), client)
    return algorithm.local(work, cores()[client] | {"p": p}, down)


def mixed(bank: list[Items], p: Any) -> Items:
    """Return sum_j p_j c_j."""
    return {k: torch.stack([p[j] * c[k] for j, c in enumerate(bank)]).sum(0) for k in bank[0]}


def inner(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
    """Return <a, b> over all parameters."""
    return torch.stack([(a[k] * b[k]).sum() for k in a]).sum()


def check_1_one_share_of_1_is_isolated_training(kind: type[Algorithm]) -> None:
    """theta_i = c_i and p_ii = 1; other cores count nothing, and with p_pace = 0 never will. Also with no download."""
    alone = toys.setup(Isolated, settings={"private_start": "shared"})
    cases: list[dict[str, Any]] = [{"p_pace": 0.0}, {"p_pace": 0.0, "limit": 0}]
    for settings in cases:
        algorithm = toys.method(kind, **settings)
        for client in range(4):
            one = torch.eye(4)[client]
            first = algorithm.enrol(algorithm.init_server(alone.server_fresh), toys.TRAIN)
            state = algorithm.init_client(alone.server_fresh, first) | {"p": one}
            down = algorithm.downlink(first | {k: v + 1 for k, v in first.items() if k.startswith("core.")}, client)
            expected = core(state)
            for t in range(3):
                ctx = toys.context(alone, t, client)
                result = algorithm.local(toys.context(alone, t, client), state, down)
                state, expected = result.state, ctx.fit(expected, on=ctx.ce)
                assert toys.same(core(result.up), expected)
                assert torch.equal(state["p"], one)


def check_1_at_pace_0_the_shares_stay(kind: type[Algorithm]) -> None:
    for turn in toys.play(kind, settings={"p_pace": 0.0}):
        assert all(torch.equal(state["p"], torch.tensor(toys.TRAIN) / 24) for state in turn.next_states.values())


def check_2_one_step_follows_the_objective(kind: type[Algorithm]) -> None:
    """With G the gradient at theta = sum_j p_j c_j:  c_i' = c_i - lr p_i G,
    p_j' = p_j - p_pace lr (<G, c_j> + lam mu (p_j - p_0j)). Autograd of the objective says the same."""
    (x, y), bank = toys.batch(), cores()
    for client, pace, mu in ((1, 0.3, 0.0), (2, 0.3, 0.7), (0, 1.5, 0.7)):
        result = done(kind, toys.work(x, y), client, p_pace=pace, mu=mu)
        g = toys.hand_gradient(mixed(bank, P), x, y)
        assert toys.distance(core(result.up), toys.hand_step(bank[client], g, 0.1 * float(P[client]))) < 1e-14
        slope = torch.stack([inner(g, c) for c in bank]) + mu * (P - SHARE)
        assert torch.allclose(result.state["p"], P - 0.1 * pace * slope, atol=1e-14, rtol=0)

        def objective(at: Mapping[str, Tensor], x: Tensor, y: Tensor, client: int = client, mu: float = mu) -> Tensor:
            used = [core(dict(at)) if j == client else c for j, c in enumerate(bank)]
            return toys.hand_loss(mixed(used, at["p"]), x, y) + mu / 2 * (at["p"] - SHARE).square().sum()

        found = toys.hand_gradient(bank[client] | {"p": P}, x, y, objective)
        assert toys.distance(core(result.up), toys.hand_step(bank[client], found, 0.1)) < 1e-14
        assert torch.allclose(result.state["p"], P - 0.1 * pace * found["p"], atol=1e-14, rtol=0)


def check_2_a_shares_slope_is_the_losss(kind: type[Algorithm]) -> None:
    """(F(p + h e_j) - F(p - h e_j)) / 2h for every j, whose own error is of the order of h^2."""
    (x, y), bank, h = toys.batch(), cores(), 1e-5
    moved = (P - done(kind, toys.work(x, y), p_pace=1.0, mu=0.0).state["p"]) / 0.1
    for j in range(4):
        ahead, behind = (toys.hand_loss(mixed(bank, P + s * torch.eye(4)[j]), x, y) for s in (h, -h))
        assert moved[j].item() == pytest.approx(float(ahead - behind) / (2 * h), rel=1e-6, abs=1e-9)


def check_2_later_steps_use_the_new_mixture(kind: type[Algorithm]) -> None:
    """Three batches by hand: after each, the mixture is made anew from the core and the shares as they are."""
    (x, y), bank, p = toys.batch(10), cores(), P
    result = done(kind, toys.work(x, y, batch_size=4), p_pace=0.5, mu=0.4)
    for a, b in toys.work(x, y, batch_size=4).batches():
        g = toys.hand_gradient(mixed(bank, p), a, b)
        slope = torch.stack([inner(g, c) for c in bank]) + 0.4 * (p - SHARE)
        bank = [toys.hand_step(c, g, 0.1 * float(p[1])) if j == 1 else c for j, c in enumerate(bank)]
        p = p - 0.05 * slope
    assert toys.distance(core(result.up), bank[1]) < 1e-14
    assert torch.allclose(result.state["p"], p, atol=1e-14, rtol=0)


def check_3_the_order_of_clients_changes_nothing(kind: type[Algorithm]) -> None:
    """All work on the cores as they were at the start of the round."""
    algorithm, results = toys.method(kind), []
    for order in (range(4), reversed(range(4))):
        held = server(kind)
        made = {}
        for client in order:
            work = toys.work(*toys.batch(seed=client), algorithm.net, client=client)
            made[client] = algorithm.local(work, cores()[client] | {"p": P}, algorithm.downlink(held, client)).up
        results.append(algorithm.aggregate(held, dict(sorted(made.items()))))
    assert toys.same(*results)


def check_4_the_core_is_uploaded_and_nobody_elses_moves(kind: type[Algorithm]) -> None:
    for turn in toys.play(kind, participation=0.5):
        before, after = without_prefix("core", turn.server), without_prefix("core", turn.next_server)
        for client in range(4):
            own = {k: v[client] for k, v in after.items()}
            if client in turn.ups:
                assert toys.same(own, core(turn.ups[client]))
                assert toys.same(own, core(turn.next_states[client]))
            else:
                assert toys.same(own, {k: v[client] for k, v in before.items()})
    up = done(kind, toys.work(*toys.batch())).up
    assert toys.distance(up, cores()[1]) < 0.1 < toys.distance(up, mixed(cores(), P))


def check_5_the_server_follows_the_shares(kind: type[Algorithm]) -> None:
    """One step a round: p_0 is known, G = (c_i - c_i') / (lr p_ii), and the next p follows from G and the cores."""
    settings = {"p_pace": 0.5, "mu": 0.3, "penalty_rounds": 4}
    turns = toys.play(kind, 6, settings=settings, local_epochs=1, batch_size=8, participation=0.75)
    p = dict.fromkeys(range(4), turns[0].server["share"])
    for turn in turns:
        lam = 0.001 ** (turn.t / 4) if turn.t < 4 else 0.0
        bank = [{k: v[j] for k, v in without_prefix("core", turn.server).items()} for j in range(4)]
        for client, up in turn.ups.items():
            own = p[client][client]
            g = {k: (bank[client][k] - up[k]) / (0.1 * own) for k in bank[0]}
            seen = toys.method(kind).change(turn.states[client], turn.downs[client], up, 0.1, 1)
            assert toys.distance(seen, g) < 1e-9
            slope = torch.stack([inner(g, c) for c in bank]) + lam * 0.3 * (p[client] - turn.server["share"])
            p[client] = p[client] - 0.05 * slope
            assert torch.allclose(turn.next_states[client]["p"], p[client], atol=1e-11)
    assert all(float((p[c] - turns[0].server["share"]).abs().max()) > 1e-2 for c in range(4))


def check_5_the_log_gives_the_shares_until_they_move(kind: type[Algorithm]) -> None:
    """A client that has not taken part is at p_0, which everybody was told, in whatever round that is."""
    for pace in (0.5, 0.0):
        made = toys.setup(kind, settings={"p_pace": pace}, participation=0.5, seed=3)
        turns = toys.rounds(made, 4)
        memories = {c: made.algorithm.init_client(made.server_fresh, made.server_first) for c in range(4)}
        late = 0
        for turn in turns:
            for client, state in turn.states.items():
                found = made.algorithm.reconstruct_state(memories[client])
                assert found is not None
                part = any(client in t.ups for t in turns[: turn.t])
                assert toys.same(found, state if not (part and pace) else core(state))
                late += turn.t > 0 and not part
            for client, up in turn.ups.items():
                memories[client] = made.algorithm.observe(memories[client], turn.downs[client], up)
        assert late


def check_6_the_pull_fades(kind: type[Algorithm]) -> None:
    """lam(0) = 1, lam(t >= L) = 0; in between 0.001^(t/L), or (cos(pi t/L) + 1)/2, in the round that it is."""
    (x, y), bank = toys.batch(), cores()
    g = toys.hand_gradient(mixed(bank, P), x, y)
    free = P - 0.1 * torch.stack([inner(g, c) for c in bank])
    expected = {"exponential": [1, 0.001**0.25, 0.001**0.5, 0.001**0.75, 0, 0], "cosine": [1, None, 0.5, None, 0, 0]}
    for schedule, values in expected.items():
        for t, lam in enumerate(values):
            work = toys.work(x, y, round=t)
            settings = {"p_pace": 1.0, "mu": 2.0, "penalty_rounds": 4, "schedule": schedule}
            moved = done(kind, work, **settings).state["p"]
            if lam is not None:
                assert torch.allclose(moved, free - 0.1 * lam * 2.0 * (P - SHARE), atol=1e-14, rtol=0)


def check_6_a_strong_pull_holds_the_shares(kind: type[Algorithm]) -> None:
    """p' - p_0 = (1 - p_pace lr mu)(p - p_0) - p_pace lr <G, c>: at p_pace lr mu = 1 only the last slope is left."""
    (x, y), bank = toys.batch(), cores()
    g = toys.hand_gradient(mixed(bank, P), x, y)
    moved = done(kind, toys.work(x, y), p_pace=1e-3, mu=1e4).state["p"]
    assert torch.allclose(moved, SHARE - 1e-4 * torch.stack([inner(g, c) for c in bank]), atol=1e-13, rtol=0)
    assert float((moved - SHARE).abs().max()) < 1e-3


def check_7_shares_start_at_the_rows_and_are_not_sent(kind: type[Algorithm]) -> None:
    turns = toys.play(kind, participation=0.5)
    for state in turns[0].states.values():
        assert torch.allclose(state["p"], torch.tensor(toys.TRAIN) / 24, atol=1e-15)
    for turn in turns:
        for client, down in turn.downs.items():
            assert down["cores"].tolist() == [j != client for j in range(4)]
            assert torch.equal(down["share"], turns[0].server["share"])
        assert all(up.keys() == toys.tiny().shapes.keys() for up in turn.ups.values())


def check_the_new_mixture_is_tested(kind: type[Algorithm]) -> None:
    """The cores of the downlink, its own as trained, with the shares as trained."""
    turn = toys.play(kind, settings={"p_pace": 0.5})[-1]
    state, down = turn.next_states[1], turn.downs[1]
    used = toys.method(kind).deploy_trained(state, down, turn.ups[1])
    before = without_prefix("core", turn.server)
    bank = [core(state) if j == 1 else {k: v[j] for k, v in before.items()} for j in range(4)]
    assert toys.distance(used, mixed(bank, state["p"])) < 1e-14


def test_apple_1_one_share_of_1_is_isolated_training():
    check_1_one_share_of_1_is_isolated_training(APPLE)


def test_apple_1_at_pace_0_the_shares_stay():
    check_1_at_pace_0_the_shares_stay(APPLE)


def test_apple_2_one_step_follows_the_objective():
    check_2_one_step_follows_the_objective(APPLE)


def test_apple_2_a_shares_slope_is_the_losss():
    check_2_a_shares_slope_is_the_losss(APPLE)


def test_apple_2_later_steps_use_the_new_mixture():
    check_2_later_steps_use_the_new_mixture(APPLE)


def test_apple_3_the_order_of_clients_changes_nothing():
    check_3_the_order_of_clients_changes_nothing(APPLE)


def test_apple_4_the_core_is_uploaded_and_nobody_elses_moves():
    check_4_the_core_is_uploaded_and_nobody_elses_moves(APPLE)


def test_apple_5_the_server_follows_the_shares():
    check_5_the_server_follows_the_shares(APPLE)


def test_apple_5_the_log_gives_the_shares_until_they_move():
    check_5_the_log_gives_the_shares_until_they_move(APPLE)


def test_apple_6_the_pull_fades():
    check_6_the_pull_fades(APPLE)


def test_apple_6_a_strong_pull_holds_the_shares():
    check_6_a_strong_pull_holds_the_shares(APPLE)


def test_apple_7_shares_start_at_the_rows_and_are_not_sent():
    check_7_shares_start_at_the_rows_and_are_not_sent(APPLE)


def test_the_new_mixture_is_tested():
    check_the_new_mixture_is_tested(APPLE)


def test_a_limited_download_takes_new_cores_first_and_keeps_the_old_ones():
    """Two of five others a round: after three exchanges all have been seen once, each as it was when it came."""
    algorithm = toys.method(APPLE, clients=6, limit=2)
    first = algorithm.enrol(algorithm.init_server(toys.tiny().fresh(0)), [1] * 6)
    bank, state, asked = first, algorithm.init_client(toys.tiny().fresh(0), first), []
    expected = without_prefix("core", first)
    for t in range(5):
        bank = bank | {k: torch.full_like(v, t) for k, v in bank.items() if k.startswith("core.")}
        down = algorithm.downlink(bank, 3)
        assert down["cores"].sum() == (2 if t else 0)
        expected = {k: torch.where(down["cores"].view(6, *[1] * (v.dim() - 1)), t, v) for k, v in expected.items()}
        result = algorithm.local(toys.work(*toys.batch(), algorithm.net, round=t, client=3), state, down)
        bank, state = algorithm.aggregate(bank, {3: result.up}), result.state
        assert toys.same(without_prefix("seen", state), expected)
        assert torch.equal(state["known"], down["cores"] | (asked[-1][1] if asked else False))
        asked.append((result.up["wanted"], state["known"]))
        assert result.up["wanted"].sum() == 2
        assert not result.up["wanted"][3]
        assert torch.equal(bank["wanted"][3], result.up["wanted"])
    assert (asked[0][0] | asked[1][0] | asked[2][0]).sum() == 5
    assert not (asked[0][0] & asked[1][0]).any()


def test_with_a_limit_cores_that_count_more_are_asked_for_more_often():
    """chance ~ 1.5^|p_j|: shares of -8 and 1 stand as 1.5^8 to 1.5, that is as 26 : 1.5, whatever the sign."""
    algorithm = toys.method(APPLE, clients=3, limit=1)
    assert isinstance(algorithm, APPLE)
    state = {"known": torch.ones(3).bool(), "p": torch.tensor([9.0, -8.0, 1.0])}
    work = [toys.work(*toys.batch(), seed=seed) for seed in range(400)]
    asked = torch.stack([algorithm.wanted(ctx, state, 0) for ctx in work]).sum(0)
    share = 1.5**8 / (1.5**8 + 1.5)
    assert asked.tolist() == [0, pytest.approx(400 * share, abs=20), pytest.approx(400 * (1 - share), abs=20)]


def test_with_a_limit_choices_sharpen_with_the_downloads():
    """In round 11 each of three cores was downloaded 12/3 times at a limit of 1: 4^0.5 to 4^0, that is 2 : 1."""
    algorithm = toys.method(APPLE, clients=3, limit=1)
    assert isinstance(algorithm, APPLE)
    state = {"known": torch.ones(3).bool(), "p": torch.tensor([9.0, 0.5, 0.0])}
    work = [toys.work(*toys.batch(), seed=seed, round=11) for seed in range(600)]
    asked = torch.stack([algorithm.wanted(ctx, state, 0) for ctx in work]).sum(0)
    assert asked.tolist() == [0, pytest.approx(400, abs=35), pytest.approx(200, abs=35)]


def test_a_client_alone_mixes_its_core_with_itself():
    """N = 1: p_0 = 1, nothing is downloaded, and the step is isolated training's."""
    algorithm, (x, y) = toys.method(APPLE, clients=1, p_pace=0.0), toys.batch()
    first = algorithm.enrol(algorithm.init_server(toys.tiny().fresh(0)), [6])
    state, ctx = algorithm.init_client(toys.tiny().fresh(0), first), toys.work(x, y)
    up = algorithm.local(toys.work(x, y), state, algorithm.downlink(first, 0)).up
    assert toys.same(up, ctx.fit(core(state), on=ctx.ce))


def test_what_a_core_without_a_share_sends_says_nothing():
    """p_ii = 0 stops the core."""
    p = torch.tensor([0.5, 0.0, 0.5, 0.0])
    algorithm, result = toys.method(APPLE), done(APPLE, toys.work(*toys.batch()), p=p)
    assert toys.same(core(result.up), cores()[1])
    state, down = cores()[1] | {"p": p}, algorithm.downlink(server(APPLE), 1)
    assert algorithm.change(state, down, result.up, 0.1, 1) == {}
