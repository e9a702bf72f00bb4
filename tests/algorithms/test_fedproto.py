"""FedProto. The checks take the method's class, so that planted bugs can be put to them."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from pflsec.algorithms.knowledge_distillation.fedproto import FedProto
from pflsec.core.algorithm import Algorithm, Done
from pflsec.core.items import Items, select
from tests import toys


def held(labels: Tensor) -> Tensor:
    """Return the mask [C] of the classes in these labels."""
    return torch.bincount(labels, minlength=toys.CLASSES) > 0


def downlink(*classes: int) -> Items:
    """Return global prototypes of these classes."""
    known = torch.zeros(toys.CLASSES, dtype=torch.bool)
    known[list(classes)] = True
    table = torch.randn(toys.CLASSES, 5, generator=torch.Generator().manual_seed(3))
    return {"prototype": table[known], "known": known}


def done(kind: type[Algorithm], down: Items, lam: float, **changes: Any) -> Done:
    """Return one exchange of a client with ten rows of all classes."""
    algorithm = toys.method(kind, lam=lam)
    x, y = toys.batch(10)
    work = toys.work(**({"x": x, "y": y, "net": algorithm.net} | changes))
    state = algorithm.net.fresh(0) | {"held": torch.zeros(toys.CLASSES, dtype=torch.bool)}
    return algorithm.local(work, state, down)


def regularised(down: Items, lam: float) -> toys.Loss:
    """Return CE + lam/(B d) sum_b [y_b known] |f(x_b) - C_(y_b)|^2."""
    table = torch.zeros(toys.CLASSES, 5)
    table[down["known"]] = down["prototype"]

    def loss(model: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        off = (toys.hand_features(model, x) - table[y]).square().sum(1)
        return toys.hand_loss(model, x, y) + lam / (len(y) * 5) * off[down["known"][y]].sum()

    return loss


def check_0_one_step_follows_the_objective(kind: type[Algorithm]) -> None:
    """Also with a class that has no global prototype: its rows add nothing to the sum but stay in the mean."""
    model, (x, y), down = toys.tiny().fresh(0), toys.batch(10), downlink(0, 2)
    expected = toys.hand_step(model, toys.hand_gradient(model, x, y, regularised(down, 2.0)), 0.1)
    assert toys.distance(select(done(kind, down, 2.0).state, "body", "head"), expected) < 1e-14


def check_1_without_the_pull_it_is_isolated_training(kind: type[Algorithm]) -> None:
    made = toys.setup(kind, settings={"lam": 0.0}, participation=0.75)
    for turn in toys.rounds(made):
        for client, up in turn.ups.items():
            model = select(turn.states[client], "body", "head")
            alone = toys.context(made, turn.t, client)
            assert toys.same(select(turn.next_states[client], "body", "head"), alone.fit(model, on=alone.ce))
            assert up["prototype"].abs().max() > 0


def check_2_the_upload_is_prototypes_and_label_set(kind: type[Algorithm]) -> None:
    """(held classes) * d numbers and C bits; nothing that has a parameter's shape (two of three classes are held)."""
    parameters = {shape for shape in toys.tiny().shapes.values() if shape != (toys.CLASSES,)}
    for turn in toys.play(kind):
        for client in (0, 1, 2):
            up, classes = turn.ups[client], len(toys.HELD[client])
            assert {k: tuple(v.shape) for k, v in up.items()} == {
                "prototype": (classes, 5),
                "held": (toys.CLASSES,),
            }
            assert up["held"].dtype == torch.bool
            assert up["held"].nonzero().flatten().tolist() == sorted(toys.HELD[client])
            assert not {tuple(v.shape) for v in up.values()} & parameters


def check_3_a_global_prototype_is_the_plain_mean_over_holders(kind: type[Algorithm]) -> None:
    """|N_k| C_k = sum of the uploaded C_(i,k), N_k being the participants that hold class k."""
    for turn in toys.play(kind):
        for k in range(toys.CLASSES):
            rows = [up["prototype"][int(up["held"][:k].sum())] for up in turn.ups.values() if up["held"][k]]
            assert turn.next_server["known"][k] == bool(rows)
            assert torch.allclose(len(rows) * turn.next_server["table"][k], torch.stack(rows).sum(0), atol=1e-14)


def check_3_by_counts_it_is_the_mean_of_the_pooled_class(kind: type[Algorithm]) -> None:
    """With one extractor for all: sum_i n_ik C_ik / sum_i n_ik is the mean feature of class k over all rows."""
    settings = {"weighting": "count", "private_start": "shared"}
    made = toys.setup(kind, settings=settings, local_epochs=0)
    table = toys.rounds(made, 1)[0].next_server["table"]
    x, y = (torch.cat(parts) for parts in zip(*(made.federation.train(c) for c in range(4)), strict=True))
    features = toys.hand_features(made.server_fresh, x)
    pooled = torch.stack([features[y == k].mean(0) for k in range(toys.CLASSES)])
    assert torch.allclose(table, pooled, atol=1e-14)


def check_4_a_class_of_one_sample_sends_its_feature(kind: type[Algorithm]) -> None:
    x, y = toys.batch(5, classes=(0, 0, 0, 1, 2))
    up = done(kind, downlink(), 1.0, x=x, y=y, epochs=0).up
    features = toys.hand_features(toys.tiny().fresh(0), x)
    assert torch.equal(up["prototype"][1:], features[3:])


def check_4_prototypes_come_from_the_trained_model(kind: type[Algorithm]) -> None:
    """They are class means of the model as it is after all local steps, over all rows."""
    (x, y), result = toys.batch(10), done(kind, downlink(0), 1.0, epochs=3, batch_size=4)
    features = toys.hand_features(result.state, x)
    means = torch.stack([features[y == k].mean(0) for k in range(toys.CLASSES)])
    assert torch.allclose(result.up["prototype"], means, atol=1e-14)


def check_5_an_unknown_class_is_not_pulled(kind: type[Algorithm]) -> None:
    """All rows are of classes without a global prototype: every bit is as without the pull."""
    x, y = toys.batch(6, classes=(0, 1))
    results = [done(kind, downlink(2), lam, x=x, y=y, epochs=2).state for lam in (0.0, 5.0)]
    assert toys.same(*results)


def check_6_the_pull_moves_the_body_alone(kind: type[Algorithm]) -> None:
    """The pull looks at features: in the first step the head's gradient does not know lam, the body's does."""
    plain, pulled = (done(kind, downlink(0, 1, 2), lam).state for lam in (0.0, 5.0))
    assert toys.same(select(plain, "head"), select(pulled, "head"))
    assert toys.distance(select(plain, "body"), select(pulled, "body")) > 1e-3


def check_a_class_that_is_away_keeps_its_prototype(kind: type[Algorithm]) -> None:
    """Client 0 holds classes 0 and 1: after its round alone, class 2 is what it was, bit for bit."""
    algorithm = toys.method(kind)
    turn = toys.play(kind, 1)[0]
    after = algorithm.aggregate(turn.next_server, {0: turn.ups[0]})
    assert after["known"].all()
    assert torch.equal(after["table"][2], turn.next_server["table"][2])
    assert torch.equal(after["table"][:2], turn.ups[0]["prototype"])


def check_prediction_is_the_nearest_prototype_of_a_held_class(kind: type[Algorithm]) -> None:
    """On features (the model's own), with class 1 nearest to all inputs but not held."""
    algorithm, (x, _) = toys.method(kind), toys.batch(30)
    model = algorithm.net.fresh(0)
    z = toys.hand_features(model, x)
    down = {"prototype": torch.stack([z[0], z.mean(0), z[1]]), "known": torch.ones(3, dtype=torch.bool)}
    state = model | {"held": torch.tensor([True, False, True])}
    predicted = algorithm.scores(algorithm.deploy(state, down), x).argmax(1)
    nearer = (z - z[0]).norm(dim=1) < (z - z[1]).norm(dim=1)
    assert torch.equal(predicted, torch.where(nearer, 0, 2))
    assert predicted[0] == 0
    assert predicted[1] == 2


def test_fedproto_0_one_step_follows_the_objective():
    check_0_one_step_follows_the_objective(FedProto)


def test_fedproto_1_without_the_pull_it_is_isolated_training():
    check_1_without_the_pull_it_is_isolated_training(FedProto)


def test_fedproto_2_the_upload_is_prototypes_and_label_set():
    check_2_the_upload_is_prototypes_and_label_set(FedProto)


def test_fedproto_3_a_global_prototype_is_the_plain_mean_over_holders():
    check_3_a_global_prototype_is_the_plain_mean_over_holders(FedProto)


def test_fedproto_3_by_counts_it_is_the_mean_of_the_pooled_class():
    check_3_by_counts_it_is_the_mean_of_the_pooled_class(FedProto)


def test_fedproto_4_a_class_of_one_sample_sends_its_feature():
    check_4_a_class_of_one_sample_sends_its_feature(FedProto)


def test_fedproto_4_prototypes_come_from_the_trained_model():
    check_4_prototypes_come_from_the_trained_model(FedProto)


def test_fedproto_5_an_unknown_class_is_not_pulled():
    check_5_an_unknown_class_is_not_pulled(FedProto)


def test_fedproto_6_the_pull_moves_the_body_alone():
    check_6_the_pull_moves_the_body_alone(FedProto)


def test_a_class_that_is_away_keeps_its_prototype():
    check_a_class_that_is_away_keeps_its_prototype(FedProto)


def test_prediction_is_the_nearest_prototype_of_a_held_class():
    check_prediction_is_the_nearest_prototype_of_a_held_class(FedProto)


def test_before_any_prototype_the_head_predicts():
    algorithm, (x, _) = toys.method(FedProto), toys.batch()
    state = algorithm.net.fresh(0) | {"held": torch.ones(3, dtype=torch.bool)}
    scores = algorithm.scores(algorithm.deploy(state, algorithm.downlink(algorithm.init_server(state), 0)), x)
    assert torch.equal(scores, algorithm.net.logits(state, x))


@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_a_prediction_does_not_depend_on_the_batch_it_is_in(scale: float):
    """Far from the origin, with prototypes close to each other: |z|^2 - 2 z c + |c|^2 would drown in rounding."""
    torch.set_default_dtype(torch.float32)
    algorithm = toys.method(FedProto)
    z = scale + torch.rand(100, 5, generator=torch.Generator().manual_seed(0))
    items = {
        "known": torch.ones(3, dtype=torch.bool),
        "held": torch.ones(3, dtype=torch.bool),
        "table": z[:3],
    }
    algorithm.net.features = lambda items, x: x  # type: ignore[method-assign]
    alone = torch.stack([algorithm.scores(items, row[None]).argmax(1)[0] for row in z])
    assert torch.equal(algorithm.scores(items, z).argmax(1), alone)
