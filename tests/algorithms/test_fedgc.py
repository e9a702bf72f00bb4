"""FedGC. The checks take the method's class, so that planted bugs can be put to them."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from pflsec.algorithms.model_splitting.fedgc import FedGC
from pflsec.core.algorithm import Algorithm
from pflsec.core.items import Items, select
from tests import toys

BODY = {name for name in toys.tiny().shapes if name.startswith("body.")}
OVERLAP = [[0, 1], [1, 2], [0], [0, 1, 2]]
DISJOINT = [[0], [1], [2], []]


def masks(held: Sequence[Sequence[int]]) -> Tensor:
    """Return which client holds which class, [N, C]."""
    return torch.tensor([[c in classes for c in range(toys.CLASSES)] for classes in held])


def server_with(algorithm: Algorithm[Any], held: Sequence[Sequence[int]], size: float = 1.0) -> Items:
    """Return a server whose clients hold these classes, with random rows."""
    mask = masks(held)
    table = size * torch.randn(*mask.shape, 5, generator=torch.Generator().manual_seed(1))
    body = select(algorithm.net.fresh(0), "body")
    return body | {"table": table * mask[..., None], "held": mask}


def unchanged(server: Items) -> dict[int, Items]:
    """Return uploads of the clients that hold anything, which change nothing."""
    body = select(server, "body")
    return {
        c: body | {"embedding": server["table"][c][mask], "num_samples": torch.tensor(3)}
        for c, mask in enumerate(server["held"])
        if mask.any()
    }


def corrected(kind: type[Algorithm], server: Items, **settings: Any) -> Tensor:
    """Return the rows after a round in which nobody's training moved anything."""
    algorithm = toys.method(kind, **settings)
    return algorithm.aggregate(server, unchanged(server))["table"]


def reg(table: Tensor, held: Tensor, rule: str = "others", own_term: str = "detached", scale: float = 0.0) -> Tensor:
    """Return Reg as a sum over queries, one by one. scale > 0: scaled cosines in place of inner products."""
    pairs = [(int(k), int(i)) for k, i in held.nonzero()]
    rows = {pair: table[pair] / table[pair].norm() if scale else table[pair] for pair in pairs}
    total = 0 * table.sum()
    for k, i in pairs:
        q = rows[k, i].detach()
        others = [v for (z, j), v in rows.items() if z != k and j != i and not (rule == "unheld" and held[k, j])]
        if rule == "mean":
            q = torch.stack([v for (_, j), v in rows.items() if j == i]).mean(0).detach()
            others = [v for (z, _), v in rows.items() if not held[z, i]]
        own = (rows[k, i] if own_term == "full" and rule != "mean" else q) @ q
        scores = (scale or 1.0) * torch.stack([own, *(v @ q for v in others)])
        total = total + scores.logsumexp(0) - scores[0]
    return total


def step_on_reg(server: Items, size: float, **form: Any) -> Tensor:
    """Return the rows after one step on Reg by autograd."""
    table = server["table"].clone().requires_grad_()
    (slope,) = torch.autograd.grad(reg(table, server["held"], **form), table)
    return server["table"] - size * slope


def check_0_one_step_among_the_own_classes(kind: type[Algorithm]) -> None:
    """Body and rows by the cross entropy of W b(x) over the classes that the client holds; no bias."""
    algorithm = toys.method(kind)
    server, (x, y) = server_with(algorithm, OVERLAP), toys.batch(6, classes=(1, 2))
    down = algorithm.downlink(server, 1)
    up = algorithm.local(toys.work(x, y, algorithm.net), {"table": torch.zeros(3, 5)}, down).up
    model = select(down, "body", "embedding")

    def loss(model: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        z = toys.hand_features(model, x) @ model["embedding"].T
        return (z.logsumexp(1) - z.gather(1, y[:, None] - 1).squeeze(1)).mean()

    expected = toys.hand_step(model, toys.hand_gradient(model, x, y, loss), 0.1)
    assert toys.distance(select(up, "body", "embedding"), expected) < 1e-14
    seen = algorithm.change({"table": torch.zeros(3, 5)}, down, up, lr=0.1, steps=1)
    assert toys.distance(seen, toys.hand_gradient(model, x, y, loss)) < 1e-12


def check_1_without_correction_the_server_keeps_what_it_got(kind: type[Algorithm]) -> None:
    for turn in toys.play(kind, settings={"correction": 0.0}, participation=0.5):
        share = {c: toys.TRAIN[c] / sum(toys.TRAIN[k] for k in turn.ups) for c in turn.ups}
        mean = {k: torch.stack([share[c] * up[k] for c, up in turn.ups.items()]).sum(0) for k in BODY}
        assert toys.distance(select(turn.next_server, "body"), mean) < 1e-15
        for client in range(4):
            mask = turn.next_server["held"][client]
            kept = turn.next_server["table"][client][mask]
            before = turn.server["table"][client][turn.server["held"][client]]
            assert torch.equal(kept, turn.ups[client]["embedding"] if client in turn.ups else before)


def check_2_a_client_receives_its_own_rows_alone(kind: type[Algorithm]) -> None:
    """One for each class that it holds, none of another client's; before its first exchange none at all."""
    algorithm = toys.method(kind)
    server = server_with(algorithm, OVERLAP)
    for client, classes in enumerate(OVERLAP):
        down = algorithm.downlink(server, client)
        assert down["held"].nonzero().flatten().tolist() == classes
        assert torch.equal(down["embedding"], server["table"][client][classes])
        foreign = server["table"][[c for c in range(4) if c != client]].flatten(0, 1)
        assert not (down["embedding"][:, None] == foreign).all(2).any()
    met: set[int] = set()
    for turn in toys.play(kind, 4, participation=0.75):
        for client, down in turn.downs.items():
            assert down.keys() == (BODY | {"embedding", "held"} if client in met else BODY)
        met |= turn.ups.keys()


def check_2_the_class_set_is_sent_until_it_has_arrived(kind: type[Algorithm]) -> None:
    """Once: with the first upload that is not lost."""
    met: set[int] = set()
    for turn in toys.play(kind, 6, drop_rate=0.5):
        for client, up in turn.ups.items():
            first = set() if client in met else {"held"}
            assert up.keys() == BODY | {"embedding", "num_samples"} | first
            assert up["embedding"].shape == (len(toys.HELD[client]), 5)
        met |= turn.ups.keys()
    assert met == {0, 1, 2, 3}


def check_2_the_class_set_is_of_all_rows(kind: type[Algorithm]) -> None:
    """Also of the last short batch: five rows in batches of four, and the only one of class 2 is the fifth."""
    algorithm = toys.method(kind)
    server = algorithm.init_server(algorithm.net.fresh("server"))
    state, (x, y) = algorithm.init_client(algorithm.net.fresh(0), server), toys.batch(5, classes=(0, 0, 0, 0, 2))
    up = algorithm.local(toys.work(x, y, batch_size=4), state, algorithm.downlink(server, 0)).up
    assert up["held"].tolist() == [True, False, True]
    assert ((up["embedding"] - state["table"][[0, 2]]).abs().amax(1) > 1e-6).all()


def check_3_the_correction_is_a_step_on_reg(kind: type[Algorithm]) -> None:
    """For w_zj the slope is the sum of P(zj | q) q over the queries of other clients and classes; autograd agrees.
    The full form adds -(1 - P) q on the own row."""
    for held in (OVERLAP, DISJOINT):
        server = server_with(toys.method(kind), held)
        for own_term in ("detached", "full"):
            found = corrected(kind, server, correction=0.3, own_term=own_term)
            assert torch.allclose(found, step_on_reg(server, 0.3, own_term=own_term), rtol=0, atol=1e-14)
    assert (corrected(kind, server, correction=0.3) != server["table"]).any(2).equal(server["held"])


def check_3_the_closed_form_of_two_rows(kind: type[Algorithm]) -> None:
    """Two clients, one class each, rows u and v: u moves by -s P q with q = v, P = 1 / (1 + exp(v.v - u.v))."""
    server = server_with(toys.method(kind), [[0], [1], [], []])
    u, v = server["table"][0, 0], server["table"][1, 1]
    found = corrected(kind, server, correction=0.3)
    for row, q, place in ((u, v, (0, 0)), (v, u, (1, 1))):
        p = 1 / (1 + torch.exp(q @ q - row @ q))
        assert torch.allclose(found[place], row - 0.3 * p * q, rtol=0, atol=1e-14)


def check_4_a_client_of_one_class_sends_back_what_it_received(kind: type[Algorithm]) -> None:
    """A softmax over one class is constant: the same bits. At its first exchange it sends the row that it drew."""
    for turn in toys.play(kind):
        down, up = turn.downs[2], turn.ups[2]
        assert toys.same(select(up, "body"), select(down, "body"))
        drawn = turn.states[2]["table"][:1]
        assert torch.equal(up["embedding"], drawn if turn.t == 0 else down["embedding"])


def check_5_without_negatives_the_server_does_nothing(kind: type[Algorithm]) -> None:
    """One client; and where all hold all classes, under the rules that push a query only from classes or clients that
    it has not met: the same bits. Under the default rule other classes of other clients are negatives even then."""
    alone = server_with(toys.method(kind), [[0, 1, 2], [], [], []])
    everywhere = server_with(toys.method(kind), [[0, 1, 2]] * 4)
    for own_term in ("detached", "full"):
        assert torch.equal(corrected(kind, alone, own_term=own_term), alone["table"])
        for rule in ({"negatives": "unheld"}, {"query": "mean"}):
            assert torch.equal(corrected(kind, everywhere, own_term=own_term, **rule), everywhere["table"])
    assert not torch.equal(corrected(kind, everywhere), everywhere["table"])


def check_6_long_rows_overflow_nowhere(kind: type[Algorithm]) -> None:
    """|w|^2 = 200 for all: exp(200) is no float32."""
    torch.set_default_dtype(torch.float32)
    try:
        server = server_with(toys.method(kind), OVERLAP)
        length = server["table"].norm(dim=2, keepdim=True).clamp(min=1e-6)
        server["table"] = server["table"] / length * 200**0.5
        assert torch.isfinite(corrected(kind, server)).all()
        server["table"] = server["table"][:, :, :1].sign() * torch.full((4, 3, 5), 40**0.5)  # all equal or opposite
        assert torch.isfinite(corrected(kind, server)).all()
    finally:
        torch.set_default_dtype(torch.float64)


def check_rows_of_absent_clients_are_corrected_too(kind: type[Algorithm]) -> None:
    """They are last known rows: they take part as queries and as negatives."""
    algorithm = toys.method(kind, correction=0.3)
    server = server_with(algorithm, OVERLAP)
    found = algorithm.aggregate(server, {0: unchanged(server)[0]})["table"]
    assert torch.allclose(found, step_on_reg(server, 0.3), rtol=0, atol=1e-14)


def check_rows_start_apart(kind: type[Algorithm]) -> None:
    """Each client draws rows of its own, and its rows differ from each other."""
    states = toys.play(kind, 1)[0].states
    rows = torch.cat([state["table"] for state in states.values()])
    assert len(torch.unique(rows, dim=0)) == 4 * toys.CLASSES


def check_a_class_that_a_client_lacks_is_never_predicted(kind: type[Algorithm]) -> None:
    """Its test rows count as wrong; a row of zeros would often win."""
    algorithm, (x, _) = toys.method(kind), toys.batch(40)
    server = server_with(algorithm, OVERLAP)
    for client, classes in enumerate(OVERLAP):
        items = algorithm.deploy({"table": torch.zeros(3, 5)}, algorithm.downlink(server, client))
        predicted = algorithm.scores(items, x).argmax(1)
        z = toys.hand_features(server, x) @ server["table"][client].T
        expected = torch.tensor(classes)[z[:, classes].argmax(1)]
        assert torch.equal(predicted, expected)


def test_fedgc_0_one_step_among_the_own_classes():
    check_0_one_step_among_the_own_classes(FedGC)


def test_fedgc_1_without_correction_the_server_keeps_what_it_got():
    check_1_without_correction_the_server_keeps_what_it_got(FedGC)


def test_fedgc_2_a_client_receives_its_own_rows_alone():
    check_2_a_client_receives_its_own_rows_alone(FedGC)


def test_fedgc_2_the_class_set_is_sent_until_it_has_arrived():
    check_2_the_class_set_is_sent_until_it_has_arrived(FedGC)


def test_fedgc_2_the_class_set_is_of_all_rows():
    check_2_the_class_set_is_of_all_rows(FedGC)


def test_fedgc_3_the_correction_is_a_step_on_reg():
    check_3_the_correction_is_a_step_on_reg(FedGC)


def test_fedgc_3_the_closed_form_of_two_rows():
    check_3_the_closed_form_of_two_rows(FedGC)


@pytest.mark.parametrize("held", [OVERLAP, DISJOINT, [[0, 1, 2]] * 4, [[0], [0], [1], []]])
@pytest.mark.parametrize("settings", [{"negatives": "unheld"}, {"query": "mean"}])
def test_fedgc_3_under_the_other_rules(settings: dict[str, Any], held: list[list[int]]):
    server = server_with(toys.method(FedGC), held)
    rule = "mean" if "query" in settings else "unheld"
    for own_term in ("detached", "full"):
        found = corrected(FedGC, server, correction=0.3, own_term=own_term, **settings)
        expected = step_on_reg(server, 0.3, rule=rule, own_term=own_term)
        assert torch.allclose(found, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("rule", ["others", "unheld", "mean"])
def test_fedgc_3_with_cosines_the_own_term_has_no_slope(rule: str):
    """A row's cosine with its own direction is at its maximum: full and detached agree, and autograd with both."""
    settings: dict[str, Any] = {"query": "mean"} if rule == "mean" else {"negatives": rule}
    server = server_with(toys.method(FedGC), OVERLAP)
    for own_term in ("detached", "full"):
        found = corrected(FedGC, server, loss="cosine", scale=3.0, own_term=own_term, correction=0.3, **settings)
        expected = step_on_reg(server, 0.3, rule=rule, own_term="full", scale=3.0)
        assert torch.allclose(found, expected, rtol=0, atol=1e-13)


def test_fedgc_4_a_client_of_one_class_sends_back_what_it_received():
    check_4_a_client_of_one_class_sends_back_what_it_received(FedGC)


def test_fedgc_5_without_negatives_the_server_does_nothing():
    check_5_without_negatives_the_server_does_nothing(FedGC)


def test_fedgc_6_long_rows_overflow_nowhere():
    check_6_long_rows_overflow_nowhere(FedGC)


def test_rows_of_absent_clients_are_corrected_too():
    check_rows_of_absent_clients_are_corrected_too(FedGC)


def test_rows_start_apart():
    check_rows_start_apart(FedGC)


def test_a_class_that_a_client_lacks_is_never_predicted():
    check_a_class_that_a_client_lacks_is_never_predicted(FedGC)


def test_equal_weights_are_an_option():
    turn = toys.play(FedGC, 1, settings={"weighting": "uniform"})[0]
    mean = {k: torch.stack([up[k] for up in turn.ups.values()]).mean(0) for k in BODY}
    assert toys.distance(select(turn.next_server, "body"), mean) < 1e-15


def test_arcface_lays_its_margin_on_the_label_alone():
    """The label's logit is s cos(angle + m) while angle + m < pi, the others' are s cos(angle); none in prediction."""
    algorithm, (x, y) = toys.method(FedGC, loss="arcface", scale=4.0, margin=0.5), toys.batch(9)
    rows, z = torch.randn(3, 5, generator=torch.Generator().manual_seed(2)), torch.nn.functional.one_hot(y, 3).double()
    features = toys.hand_features(algorithm.net.fresh(0), x)
    angle = torch.acos((features / features.norm(dim=1, keepdim=True)) @ (rows / rows.norm(dim=1, keepdim=True)).T)
    assert (angle + 0.5 < torch.pi).all()
    found = algorithm.logits(rows, features, z)  # type: ignore[attr-defined]
    assert torch.allclose(found, 4 * torch.cos(angle + 0.5 * z), atol=1e-12)
    assert torch.allclose(algorithm.logits(rows, features), 4 * torch.cos(angle), atol=1e-12)  # type: ignore[attr-defined]


def test_everybodys_rows_together_are_the_global_classifier():
    """The score of a class is its best row's, whoever holds it."""
    algorithm, (x, _) = toys.method(FedGC), toys.batch(30)
    server = server_with(algorithm, OVERLAP)
    z = toys.hand_features(server, x)
    best = torch.stack(
        [
            (z @ torch.stack([server["table"][k, c] for k in range(4) if server["held"][k, c]]).T).amax(1)
            for c in range(3)
        ],
        1,
    )
    common = algorithm.global_model(server)
    assert common is not None
    assert torch.allclose(algorithm.scores(common, x), best, atol=1e-14)


def test_one_image_shows_its_label_among_the_local_ones():
    """dW_c = (p_c - y_c) h: of the rows, the label's alone points against the features."""
    algorithm = toys.method(FedGC)
    server = server_with(algorithm, OVERLAP)
    down = algorithm.downlink(server, 3)
    for label in range(3):
        x, _ = toys.batch(1)
        up = algorithm.local(toys.work(x, torch.tensor([label]), algorithm.net), {"table": torch.zeros(3, 5)}, down).up
        seen = algorithm.change({"table": torch.zeros(3, 5)}, down, up, lr=0.1, steps=1)["embedding"]
        assert ((seen @ toys.hand_features(server, x)[0]) < 0).tolist() == [c == label for c in range(3)]
