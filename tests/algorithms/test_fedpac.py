"""FedPAC. The checks take the method's class, so that planted bugs can be put to them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pflsec.algorithms.knowledge_distillation import fedpac as module
from pflsec.algorithms.knowledge_distillation.fedpac import FedPAC, simplex_minimum
from pflsec.algorithms.model_splitting.fedrep import FedRep
from pflsec.core.algorithm import Algorithm, Done
from pflsec.core.items import Items, select
from tests import toys

PARTIAL: dict[str, Any] = {"participation": 0.75, "drop_rate": 1 / 3}
D = 5


def table(seed: int = 3) -> Tensor:
    """Return prototypes of all classes."""
    return torch.randn(toys.CLASSES, D, generator=torch.Generator().manual_seed(seed))


def downlink(*classes: int) -> Items:
    """Return a model, and global prototypes of these classes."""
    known = torch.zeros(toys.CLASSES, dtype=torch.bool)
    known[list(classes)] = True
    return toys.tiny().fresh("received") | {"prototype": table() * known[:, None], "known": known}


def done(kind: type[Algorithm], down: Items, settings: Mapping[str, Any] | None = None, **changes: Any) -> Done:
    """Return one exchange of a client with ten rows of all classes."""
    algorithm, (x, y) = toys.method(kind, **(settings or {})), toys.batch(10)
    state = algorithm.init_client(down, algorithm.init_server(down))
    return algorithm.local(toys.work(**({"x": x, "y": y, "net": algorithm.net} | changes)), state, down)


def hand_means(items: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    """Return the class means of the features."""
    z = toys.hand_features(items, x)
    return torch.stack([z[y == k].mean(0) for k in range(toys.CLASSES)])


def check_0_one_step_of_each_phase_follows_its_objective(kind: type[Algorithm]) -> None:
    """The head under the body received; then the body under the new head, with
    CE + lam/(B d) sum_b |f(x_b) - c_(y_b)|^2. Class 1 has no global prototype: the client's own mean is its centre."""
    (x, y), down, lam = toys.batch(10), downlink(0, 2), 2.0
    found, model = done(kind, down, {"lam": lam, "head_lr": 0.3}).up, select(down, "body", "head")
    head = toys.hand_step(select(model, "head"), toys.hand_gradient(model, x, y), 0.3)
    assert toys.distance(select(found, "head"), head) < 1e-14
    centre = torch.where(down["known"][:, None], table(), hand_means(model, x, y))

    def loss(body: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        off = (toys.hand_features(body, x) - centre[y]).square().sum()
        return toys.hand_loss({**body, **head}, x, y) + lam / (len(y) * D) * off

    body = toys.hand_step(select(model, "body"), toys.hand_gradient(select(model, "body"), x, y, loss), 0.1)
    assert toys.distance(select(found, "body"), body) < 1e-14


def check_0_the_first_round_aligns_nothing(kind: type[Algorithm]) -> None:
    """There is no global prototype yet; whatever lam, every bit is as without it. From the next round on it counts."""
    plain, pulled = (toys.play(kind, 2, settings={"lam": lam}) for lam in (0.0, 5.0))
    assert all(toys.same(plain[0].ups[c], pulled[0].ups[c]) for c in range(4))
    assert all(
        toys.distance(select(plain[1].ups[c], "body"), select(pulled[1].ups[c], "body")) > 1e-3 for c in range(4)
    )


def check_what_is_sent_about_the_features(kind: type[Algorithm]) -> None:
    """h = class means times shares, and V = (mean |f|^2 - |h|^2)/n, under the body received; prototypes under the trained
    one; counts. A class of one row (2) shows that row's feature; one without any row is zero everywhere."""
    for classes in ((0, 0, 1, 1, 2), (0, 1)):
        x, y = toys.batch(5, classes)
        down, settled = downlink(0), {"x": x, "y": y, "epochs": 2, "batch_size": 2}
        up, z = done(kind, down, **settled).up, toys.hand_features(down, x)
        counts = torch.bincount(y, minlength=toys.CLASSES)
        held = counts > 0
        assert torch.equal(up["label_counts"], counts.double())
        means = torch.stack([z[y == k].mean(0) if held[k] else torch.zeros(D) for k in range(toys.CLASSES)])
        h = means * counts[:, None] / 5
        assert torch.allclose(up["feature_mean"], h, atol=1e-15)
        assert float(up["variance"]) == pytest.approx(float((z.square().sum(1).mean() - h.square().sum()) / 5))
        assert torch.allclose(up["prototype"][held], hand_means(up, x, y)[held], atol=1e-15)
        assert not up["prototype"][~held].any()
        assert int(up["num_samples"]) == 5
        assert held.all() == (len(classes) == 5)
        if held.all():
            assert torch.allclose(5 * up["feature_mean"][2], z[4], atol=1e-14)
            assert torch.allclose(up["prototype"][2], toys.hand_features(up, x)[4], atol=1e-15)


# --- the server: uploads whose heads are constants, so that a mixed head shows the mixture


def upload(value: float, h: Tensor, variance: float, count: int = 4) -> Items:
    """Return an upload whose head is this constant everywhere."""
    fresh = toys.tiny().fresh("upload")
    head = {k: torch.full_like(v, value) for k, v in select(fresh, "head").items()}
    facts = {"feature_mean": h, "variance": torch.tensor(variance), "num_samples": torch.tensor(count)}
    return select(fresh, "body") | head | facts | {"prototype": table(), "label_counts": torch.ones(toys.CLASSES)}


def mixed(kind: type[Algorithm], ups: Mapping[int, Items], clients: int = 4, **settings: Any) -> list[float]:
    """Return the constant that each client's head is after aggregation; a head that has not changed is 7."""
    algorithm = toys.method(kind, clients=clients, **settings)
    server = algorithm.init_server(toys.tiny().fresh("server"))
    server |= {k: torch.full_like(v, 7.0) for k, v in server.items() if k.startswith("mixed")}
    after = algorithm.aggregate(server, ups)
    heads = [algorithm.downlink(after, c) for c in range(clients)]
    assert all(torch.allclose(v, h["head.bias"][0], atol=1e-12) for h in heads for v in select(h, "head").values())
    return [float(h["head.bias"][0]) for h in heads]


def statistics(count: int, seed: int = 0, spread: float = 0.3) -> tuple[list[Tensor], list[float]]:
    """Return random statistics h and V of so many clients."""
    rng = torch.Generator().manual_seed(seed)
    h = [1 + spread * torch.randn(toys.CLASSES, D, generator=rng) for _ in range(count)]
    return h, torch.rand(count, generator=rng).tolist()


def objective(a: Tensor, i: int, h: Sequence[Tensor], v: Sequence[float]) -> float:
    """Return sum_j a_j^2 V_j + |sum_j a_j (h_j - h_i)|^2."""
    drift = sum((a[j] * (h[j] - h[i]) for j in range(len(h))), torch.zeros(toys.CLASSES, D))
    return float((a.square() * torch.tensor(v)).sum() + drift.square().sum())


def check_1_a_mixture_is_the_best_on_the_simplex(kind: type[Algorithm]) -> None:
    """Not worse than the client's own head, the uniform mixture, or any step from it towards another one."""
    for seed, spread in ((0, 0.3), (1, 0.05), (2, 3.0)):
        h, v = statistics(5, seed, spread)
        ups = [upload(0, *pair) for pair in zip(h, v, strict=True)]
        weights = torch.as_tensor(toys.method(kind, cutoff=0.0).mixtures(ups))  # type: ignore[attr-defined]
        for i, a in enumerate(weights):
            assert a.min() >= 0
            assert float(a.sum()) == pytest.approx(1, abs=1e-12)
            least = objective(a, i, h, v)
            for other in (torch.full((5,), 0.2), *torch.eye(5)):
                assert least <= objective(other, i, h, v) + 1e-12
                assert least <= objective(a + 1e-4 * (other - a), i, h, v) + 1e-15


def check_1_of_two_clients_it_is_known_in_closed_form(kind: type[Algorithm]) -> None:
    """a_11 = (V_2 + D)/(V_1 + V_2 + D), D = |h_1 - h_2|^2; the heads are 1 and 0."""
    for seed in range(3):
        h, v = statistics(2, seed, spread=0.1)
        d = float((h[0] - h[1]).square().sum())
        first, second = mixed(kind, {0: upload(1, h[0], v[0]), 2: upload(0, h[1], v[1])})[::2]
        assert first == pytest.approx((v[1] + d) / (v[0] + v[1] + d), abs=1e-9)
        assert second == pytest.approx(v[1] / (v[0] + v[1] + d), abs=1e-9)


def check_3_a_phase_leaves_the_other_part_alone(kind: type[Algorithm]) -> None:
    down = downlink(0, 1, 2)
    head_alone = done(kind, down, epochs=0).up
    assert toys.same(select(head_alone, "body"), select(down, "body"))
    assert toys.distance(select(head_alone, "head"), select(down, "head")) > 1e-4
    body_alone = done(kind, down, {"head_epochs": 0}).up
    assert toys.same(select(body_alone, "head"), select(down, "head"))
    assert toys.distance(select(body_alone, "body"), select(down, "body")) > 1e-4
    both = done(kind, down, epochs=3).up
    assert toys.same(select(both, "head"), select(head_alone, "head"))


def check_4_a_mixture_does_not_depend_on_the_order_of_clients(kind: type[Algorithm]) -> None:
    """The same uploads from clients with other numbers: the same heads, under those numbers; listed in any order."""
    h, v = statistics(4)
    ups = [upload(float(c + 1) ** 2, h[c], v[c]) for c in range(4)]
    straight, turned = mixed(kind, dict(enumerate(ups))), (2, 0, 3, 1)
    assert mixed(kind, {turned[c]: ups[c] for c in range(4)}) == pytest.approx(
        [straight[turned.index(c)] for c in range(4)]
    )
    assert mixed(kind, {c: ups[c] for c in reversed(range(4))}) == straight
    assert len({round(value, 6) for value in straight}) == 4


def check_5_the_body_is_the_mean_by_samples_and_prototypes_are_pooled(kind: type[Algorithm]) -> None:
    """With one body for all (no body epochs), a global prototype is the class mean over all rows of all clients."""
    for turn in toys.play(kind, participation=0.75):
        n = {c: float(toys.TRAIN[c]) for c in turn.ups}
        for k in select(turn.server, "body"):
            mean = sum((n[c] * up[k] for c, up in turn.ups.items()), torch.zeros(())) / sum(n.values())
            assert torch.allclose(turn.next_server[k], mean, atol=1e-14)
    made = toys.setup(kind, local_epochs=0)
    found = toys.rounds(made, 1)[0].next_server["prototype"]
    x, y = (torch.cat(parts) for parts in zip(*(made.federation.train(c) for c in range(4)), strict=True))
    assert torch.allclose(found, hand_means(made.server_fresh, x, y), atol=1e-14)


def check_6_equal_clients_get_the_plain_mean(kind: type[Algorithm]) -> None:
    """Equal h and V: uniform weights, from heads as they were sent: of 1, 2, 3 everybody gets 2."""
    h = statistics(1)[0][0]
    assert mixed(kind, {c: upload(c + 1.0, h, 0.5) for c in range(3)}, clients=3) == pytest.approx([2.0, 2.0, 2.0])
    algorithm: Any = toys.method(kind)
    down, (x, y) = downlink(0, 1, 2), toys.batch(9)
    works = [toys.work(x, y, epochs=2, batch_size=4, client=c) for c in range(3)]
    ups = [algorithm.local(w, algorithm.init_client(down, algorithm.init_server(down)), down).up for w in works]
    assert toys.distance(select(ups[0], "head"), select(ups[1], "head")) > 1e-4  # other batches
    assert torch.allclose(algorithm.mixtures(ups), torch.full((3, 3), 1 / 3, dtype=torch.float64), atol=1e-9)


def test_fedpac_0_one_step_of_each_phase_follows_its_objective():
    check_0_one_step_of_each_phase_follows_its_objective(FedPAC)


def test_fedpac_0_the_first_round_aligns_nothing():
    check_0_the_first_round_aligns_nothing(FedPAC)


def test_what_is_sent_about_the_features():
    check_what_is_sent_about_the_features(FedPAC)


def test_fedpac_1_a_mixture_is_the_best_on_the_simplex():
    check_1_a_mixture_is_the_best_on_the_simplex(FedPAC)


def test_fedpac_1_of_two_clients_it_is_known_in_closed_form():
    check_1_of_two_clients_it_is_known_in_closed_form(FedPAC)


@pytest.mark.parametrize("rows", [1, 2, 4, 8])
def test_fedpac_1_the_programme_is_solved(rows: int):
    """At the minimum of a^T P a over the simplex the slope 2 P a is equal wherever a > 0, and not smaller elsewhere."""
    for seed in range(20):
        root = np.random.default_rng(seed).normal(size=(rows, 6)) + seed % 3
        p = root.T @ root  # of rank at most `rows`
        a = simplex_minimum(p)
        slope = p @ a
        assert a.min() >= 0
        assert a.sum() == pytest.approx(1)
        assert np.all(slope >= slope[a > 1e-9].min() - 1e-7 * np.trace(p))
        assert np.ptp(slope[a > 1e-6]) < 1e-7 * np.trace(p)


def test_fedpac_2_the_programme_is_convex(monkeypatch: pytest.MonkeyPatch):
    """What is solved is diag(V) + G_i as the differences give it, positive semidefinite up to rounding; V is not negative,
    whatever a client holds."""
    solved: list[Tensor] = []

    def recorded(p: np.ndarray) -> np.ndarray:
        solved.append(torch.from_numpy(p))
        return simplex_minimum(p)

    monkeypatch.setattr(module, "simplex_minimum", recorded)
    turns = toys.play(FedPAC, 3, lr=0.5)
    assert len(solved) == 12
    for turn in turns:
        h = [up["feature_mean"] for up in turn.ups.values()]
        v = torch.stack([up["variance"] for up in turn.ups.values()])
        assert v.min() >= 0
        for i in range(len(h)):
            apart = torch.stack([(h[j] - h[i]).flatten() for j in range(len(h))])
            p = solved.pop(0)
            assert torch.allclose(p, v.diag() + apart @ apart.T, rtol=0, atol=1e-12)
            values = torch.linalg.eigvalsh(p)
            assert values.min() >= -1e-8 * values.max()
    x, y = toys.batch(1)
    assert float(done(FedPAC, downlink(), x=x, y=y).up["variance"]) >= 0


def test_fedpac_3_a_phase_leaves_the_other_part_alone():
    check_3_a_phase_leaves_the_other_part_alone(FedPAC)


def test_fedpac_4_a_mixture_does_not_depend_on_the_order_of_clients():
    check_4_a_mixture_does_not_depend_on_the_order_of_clients(FedPAC)


def test_fedpac_5_the_body_is_the_mean_by_samples_and_prototypes_are_pooled():
    check_5_the_body_is_the_mean_by_samples_and_prototypes_are_pooled(FedPAC)


def test_fedpac_6_equal_clients_get_the_plain_mean():
    check_6_equal_clients_get_the_plain_mean(FedPAC)


def test_equal_statistics_weigh_by_one_over_variance():
    h, v = statistics(1)[0] * 3, [0.1, 0.2, 0.4]
    ups = {c: upload(float(c == 0), h[c], v[c]) for c in range(3)}
    assert mixed(FedPAC, ups, clients=3) == pytest.approx([10 / (10 + 5 + 2.5)] * 3)


def test_where_every_mixture_is_best_it_is_uniform():
    """No variance and equal means: P = 0. With two equal clients of three, these two share."""
    h, other = statistics(2)[0]
    assert simplex_minimum(np.zeros((4, 4))) == pytest.approx([0.25] * 4)
    ups = {0: upload(0, h, 0.0), 1: upload(1, h, 0.0), 2: upload(50, other, 0.0)}
    assert mixed(FedPAC, ups, clients=3) == pytest.approx([0.5, 0.5, 50])


def test_small_weights_are_cut_off():
    """h far apart, so that a_2 = V_1/(V_1 + V_2 + D) is below 1e-3; the rest is scaled up."""
    h = statistics(1)[0][0]
    ups = {0: upload(1, h, 0.01), 1: upload(0, h + 2.0, 0.01)}  # D = 60
    assert mixed(FedPAC, ups)[0] == 1.0
    assert mixed(FedPAC, ups, cutoff=0.0)[0] == pytest.approx(60.01 / 60.02, abs=1e-9)
    many = {c: upload(c, h, 1.0) for c in range(20)}  # all weights are 0.05: cutting all of them would leave nothing
    assert mixed(FedPAC, many, clients=20, cutoff=0.1) == pytest.approx([9.5] * 20)


def test_a_client_that_is_alone_or_away_keeps_its_head():
    h, v = statistics(2)
    assert mixed(FedPAC, {2: upload(3, h[0], v[0])}) == [7, 7, 3, 7]
    ups = {c: upload(float(c), h[c], v[c]) for c in range(2)}
    assert mixed(FedPAC, ups, collaborate=False) == [0, 1, 7, 7]


def test_a_programme_without_solution_leaves_the_own_head(monkeypatch: pytest.MonkeyPatch):
    def never(*given: Any) -> Any:
        raise RuntimeError("too many iterations")

    monkeypatch.setattr(module, "nnls", never)
    h, v = statistics(2)
    assert mixed(FedPAC, {c: upload(c + 1.0, h[c], v[c]) for c in range(2)}) == [1, 2, 7, 7]


def test_alone_and_without_alignment_it_is_fedrep():
    """One first head for all, one head epoch, weights by samples: the same bodies and heads, bit for bit."""
    ours = toys.play(FedPAC, 4, settings={"collaborate": False, "lam": 0.0}, **PARTIAL)
    same = {"head_epochs": 1, "weighting": "samples", "private_start": "shared"}
    for turn, other in zip(ours, toys.play(FedRep, 4, settings=same, **PARTIAL), strict=True):
        assert turn.ups.keys() == other.ups.keys()
        for client, up in turn.ups.items():
            assert toys.same(select(up, "body"), select(other.ups[client], "body"))
            assert toys.same(select(up, "head"), other.next_states[client])
        assert toys.same(select(turn.next_server, "body"), other.next_server)


def test_a_class_that_nobody_sent_keeps_its_prototype():
    """Client 2 holds class 0 alone."""
    algorithm, turn = toys.method(FedPAC), toys.play(FedPAC, 1)[0]
    after = algorithm.aggregate(turn.next_server, {2: turn.ups[2]})
    assert after["known"].all()
    assert torch.equal(after["prototype"][1:], turn.next_server["prototype"][1:])
    assert torch.equal(after["prototype"][0], turn.ups[2]["prototype"][0])


@pytest.mark.parametrize("tested", ["trained", "mixed"])
def test_the_tested_model(tested: str):
    """As training left it, or as the next round begins; a client that was never asked has the model it would be sent."""
    made = toys.setup(FedPAC, settings={"tested": tested}, lr=0.5, participation=0.5)
    (turn,) = toys.rounds(made, 1)
    for client in range(4):
        x, y = made.federation.test(client)
        own = tested == "trained" and client in turn.ups
        model = turn.ups[client] if own else made.algorithm.downlink(turn.next_server, client)
        z = F.linear(toys.hand_features(model, x), model["head.weight"], model["head.bias"])
        assert turn.rows[client]["accuracy_post_agg"] == float((z.argmax(1) == y).double().mean())


def test_the_log_reads_as_two_gradients():
    """One batch, one step of each phase: of the head under the body received, and of the body under the head sent."""
    (x, y), down = toys.batch(4), downlink()
    algorithm: Any = toys.method(FedPAC, head_lr=0.3)
    state = algorithm.init_client(down, algorithm.init_server(down))
    up = algorithm.local(toys.work(x, y), state, down).up
    seen, model = algorithm.change(state, down, up, 0.1, 1), select(down, "body", "head")
    assert toys.distance(select(seen, "head"), select(toys.hand_gradient(model, x, y), "head")) < 1e-13
    later = model | select(up, "head")
    assert toys.distance(select(seen, "body"), select(toys.hand_gradient(later, x, y), "body")) < 1e-13
