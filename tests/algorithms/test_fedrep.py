"""FedRep. The checks take the method's class, so that planted bugs can be put to them."""

from typing import Any

import torch
from torch import Tensor

from pflsec.algorithms.model_splitting.fedrep import FedRep
from pflsec.core.algorithm import Algorithm
from pflsec.core.items import Items, select
from pflsec.training.local import LocalWork
from tests import toys

HEADS: dict[str, Any] = {"head_epochs": 3}


def train(part: str, model: Items, batches: Any, lr: float = 0.1) -> Items:
    """Return the model after SGD on one part of it, the other held fast."""
    for x, y in batches:
        gradient = toys.hand_gradient(model, x, y)
        model = model | toys.hand_step(select(model, part), gradient, lr)
    return model


def head_phase(work: LocalWork, model: Items) -> Items:
    """Return the model after the head phase, worked out by hand."""
    return train("head", model, work.batches(epochs=3, phase="head"))


def done(kind: type[Algorithm], **changes: Any) -> tuple[Items, Items, Items]:
    """Return (model before, head after, body sent) of one exchange; two epochs of batches of 4 unless changed."""
    algorithm, (x, y) = toys.method(kind, **HEADS), toys.batch(10)
    body, head = (select(algorithm.net.fresh(i), part) for i, part in enumerate(("body", "head")))
    work = toys.work(x, y, algorithm.net, **({"epochs": 2, "batch_size": 4} | changes))
    result = algorithm.local(work, head, body)
    return body | head, result.state, result.up


def check_1_only_the_body_is_on_the_wire(kind: type[Algorithm]) -> None:
    body = {name for name in toys.tiny().shapes if name.startswith("body.")}
    for turn in toys.play(kind, participation=0.5):
        for message in (*turn.downs.values(), *turn.ups.values()):
            assert message.keys() == body
        assert all(toys.same(turn.next_states[c], turn.states[c]) for c in range(4) if c not in turn.ups)


def check_2_the_head_phase_moves_the_head_alone(kind: type[Algorithm]) -> None:
    """The head is trained over the body that was sent, and without body epochs that body goes back untouched."""
    model, head, body = done(kind, epochs=0)
    assert toys.same(body, select(model, "body"))
    work = toys.work(*toys.batch(10), batch_size=4)
    assert toys.distance(head, select(head_phase(work, model), "head")) < 1e-13


def check_2_the_body_phase_moves_the_body_alone(kind: type[Algorithm]) -> None:
    """The head that is kept is the head phase's, to the last bit, and the body is trained under it."""
    model, head, body = done(kind)
    assert toys.same(head, done(kind, epochs=0)[1])
    batches = toys.work(*toys.batch(10), batch_size=4).batches(epochs=2)
    assert toys.distance(body, select(train("body", model | head, batches), "body")) < 1e-13


def check_3_one_step_gives_the_bodys_gradient_at_the_new_head(kind: type[Algorithm]) -> None:
    model, head, body = done(kind, epochs=1, batch_size=10)
    algorithm = toys.method(kind)
    seen = algorithm.change(head, select(model, "body"), body, lr=0.1, steps=1)
    gradient = toys.hand_gradient(model | head, *toys.batch(10))
    assert toys.distance(seen, select(gradient, "body")) < 1e-12
    old_head = toys.hand_gradient(model, *toys.batch(10))
    assert toys.distance(seen, select(old_head, "body")) > 1e-3


def check_4_without_head_epochs_it_is_body_only_training(kind: type[Algorithm]) -> None:
    """One frozen head for everybody, bodies averaged by samples: what a method that trains bodies alone would do."""
    settings = {"head_epochs": 0, "private_start": "shared", "weighting": "samples"}
    made = toys.setup(kind, settings=settings)
    head = select(made.server_fresh, "head")
    body = select(made.server_fresh, "body")
    for turn in toys.rounds(made):
        bodies = [select(train("body", body | head, toys.context(made, turn.t, c).batches()), "body") for c in range(4)]
        body = {k: sum((n / 24 * b[k] for n, b in zip(toys.TRAIN, bodies, strict=True)), torch.zeros(())) for k in body}
        assert toys.distance(turn.next_server, body) < 1e-14
        assert all(toys.same(state, head) for state in turn.next_states.values())


def check_5_the_mean_is_plain(kind: type[Algorithm]) -> None:
    for turn in toys.play(kind, settings=HEADS):
        mean = {k: torch.stack([up[k] for up in turn.ups.values()]).mean(0) for k in turn.server}
        assert toys.distance(turn.next_server, mean) < 1e-15


def check_6_without_body_epochs_nothing_moves_on_the_wire(kind: type[Algorithm]) -> None:
    for turn in toys.play(kind, settings=HEADS, local_epochs=0):
        assert all(toys.same(up, turn.downs[c]) for c, up in turn.ups.items())
        assert toys.distance(turn.next_server, turn.server) < 1e-15
        assert not any(toys.same(turn.next_states[c], turn.states[c]) for c in turn.ups)


def test_fedrep_1_only_the_body_is_on_the_wire():
    check_1_only_the_body_is_on_the_wire(FedRep)


def test_fedrep_2_the_head_phase_moves_the_head_alone():
    check_2_the_head_phase_moves_the_head_alone(FedRep)


def test_fedrep_2_the_body_phase_moves_the_body_alone():
    check_2_the_body_phase_moves_the_body_alone(FedRep)


def test_fedrep_3_one_step_gives_the_bodys_gradient_at_the_new_head():
    check_3_one_step_gives_the_bodys_gradient_at_the_new_head(FedRep)


def test_fedrep_4_without_head_epochs_it_is_body_only_training():
    check_4_without_head_epochs_it_is_body_only_training(FedRep)


def test_fedrep_5_the_mean_is_plain():
    check_5_the_mean_is_plain(FedRep)


def test_fedrep_5_equal_clients_make_both_weightings_agree():
    data = toys.dataset([6, 6, 6, 6])
    plain, weighted = (
        toys.play(FedRep, settings=HEADS | {"weighting": w}, data=data)[-1].next_server for w in ("uniform", "samples")
    )
    assert toys.distance(plain, weighted) < 1e-15


def test_fedrep_6_without_body_epochs_nothing_moves_on_the_wire():
    check_6_without_body_epochs_nothing_moves_on_the_wire(FedRep)


def test_the_head_phase_has_its_own_learning_rate():
    model, (x, y) = toys.tiny().fresh(0), toys.batch()
    algorithm = toys.method(FedRep, head_epochs=1, head_lr=0.7)
    head = algorithm.local(toys.work(x, y, algorithm.net), select(model, "head"), select(model, "body")).state
    assert toys.distance(head, select(train("head", model, [(x, y)], lr=0.7), "head")) < 1e-14


def test_a_head_phase_of_another_length_does_not_reorder_the_bodys_batches():
    """The main phase has a stream of its own: with a head lr of almost 0, the length makes no difference."""
    model, (x, y) = toys.tiny().fresh(0), toys.batch(10)
    bodies: list[dict[str, Tensor]] = []
    for epochs in (0, 7):
        algorithm = toys.method(FedRep, head_epochs=epochs, head_lr=1e-300)
        work = toys.work(x, y, algorithm.net, epochs=2, batch_size=4)
        bodies.append(algorithm.local(work, select(model, "head"), select(model, "body")).up)
    assert toys.same(*bodies)


def test_heads_start_apart_unless_they_are_told_to_share():
    apart, shared = (toys.play(FedRep, 1, settings={"private_start": start})[0].states for start in ("apart", "shared"))
    assert not toys.same(apart[0], apart[1])
    assert toys.same(shared[0], shared[1])
