"""FedNTD. The checks take the method's class, so that planted bugs can be put to them."""

from collections.abc import Mapping
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pflsec.algorithms.traditional.fedavg import FedAvg
from pflsec.algorithms.traditional.fedntd import FedNTD
from pflsec.core.algorithm import Algorithm
from pflsec.core.items import Items, select
from tests import toys

PARTIAL: dict[str, Any] = {"participation": 0.75, "drop_rate": 1 / 3}
"""Three of four clients are asked, one of the three uploads is lost."""


def model(items: Items) -> Items:
    """Return the model in a message."""
    return select(items, "body", "head")


def ntd(kind: type[Algorithm], **settings: Any) -> FedNTD:
    """Return the method."""
    return cast(FedNTD, toys.method(kind, **settings))


def logits(classes: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits of a student and of a teacher for six rows, and the rows' classes."""
    student, teacher = (3 * torch.randn(6, classes, generator=torch.Generator().manual_seed(i)) for i in range(2))
    return student, teacher, torch.arange(6) % classes


def slope(kind: type[Algorithm], **settings: Any) -> Tensor:
    """Return the slope of the summed divergence in the student's logits."""
    student, teacher, y = logits()
    student.requires_grad_()
    found = ntd(kind, **settings).divergence(student, teacher, F.one_hot(y, 5).to(student))
    return torch.autograd.grad(found.sum(), student)[0]


def hand_logits(at: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Return the logits of the tiny network."""
    return F.linear(toys.hand_features(at, x), at["head.weight"], at["head.bias"])


def hand_divergence(z: Tensor, g: Tensor, y: Tensor, tau: float) -> Tensor:
    """Return mean_b sum_(c != y) q^g_c log(q^g_c / q_c), row by row and class by class."""
    total = torch.zeros(())
    for row in range(len(y)):
        rest = [c for c in range(z.shape[1]) if c != int(y[row])]
        e, f = (z[row, rest] / tau).exp(), (g[row, rest] / tau).exp()
        q, q_g = e / e.sum(), f / f.sum()
        total = total + (q_g * (q_g / q).log()).sum()
    return total / len(y)


def check_0_steps_follow_the_objective(kind: type[Algorithm]) -> None:
    """CE + beta KL over the not-true classes, with the received model as teacher, by autograd over three steps."""
    (x, y), down = toys.batch(), toys.tiny().fresh(0)
    for squared in (False, True):

        def loss(at: Any, x: Tensor, y: Tensor, squared: bool = squared) -> Tensor:
            apart = hand_divergence(hand_logits(at, x), hand_logits(down, x), y, 2.0)
            return toys.hand_loss(at, x, y) + 3.0 * (4.0 if squared else 1.0) * apart

        algorithm = toys.method(kind, beta=3.0, tau=2.0, tau_squared=squared)
        found, at = algorithm.local(toys.work(x, y, epochs=3, lr=0.5), {}, down).up, down
        for _ in range(3):
            at = toys.hand_step(at, toys.hand_gradient(at, x, y, loss), 0.5)
        assert toys.distance(model(found), at) < 1e-14


def check_1_without_the_divergence_it_is_fedavg(kind: type[Algorithm]) -> None:
    for turn, other in zip(
        toys.play(kind, settings={"beta": 0.0}, **PARTIAL), toys.play(FedAvg, **PARTIAL), strict=True
    ):
        assert all(toys.same(up, other.ups[c]) for c, up in turn.ups.items())
        assert toys.same(turn.next_server, other.next_server)


def check_2_the_first_step_is_fedavgs(kind: type[Algorithm]) -> None:
    """At theta_t student and teacher agree: the divergence is at its minimum. A second step is not FedAvg's."""
    (x, y), down = toys.batch(), toys.tiny().fresh(0)
    for tau in (1.0, 3.0):
        one, two = (
            toys.distance(
                *(
                    model(a.local(toys.work(x, y, epochs=epochs, lr=0.5), {}, down).up)
                    for a in (toys.method(kind, tau=tau), toys.method(FedAvg))
                )
            )
            for epochs in (1, 2)
        )
        assert one < 1e-15
        assert two > 1e-5


def check_3_the_rows_own_class_feels_nothing(kind: type[Algorithm]) -> None:
    """d/dz_c = (q_c - q^g_c)/tau for c != y, exactly 0 for y; both sum to 1, so the slopes of a row sum to 0."""
    student, teacher, y = logits()
    found = slope(kind, tau=2.0)
    assert not found[torch.arange(6), y].any()
    assert found.sum(1).abs().max() < 1e-15
    itself = F.one_hot(y, 5).bool()
    q, q_g = ((z / 2).masked_fill(itself, -torch.inf).softmax(1) for z in (student, teacher))
    assert torch.allclose(found, (q - q_g) / 2, atol=1e-15)


def check_4_two_classes_leave_nothing_to_preserve(kind: type[Algorithm]) -> None:
    """One class is left, with all of the weight on both sides."""
    student, teacher, y = logits(2)
    assert not ntd(kind).divergence(student, teacher, F.one_hot(y, 2).to(student)).any()


def check_5_constants_are_not_seen(kind: type[Algorithm]) -> None:
    """Neither one added to the row's own logit nor one added to all."""
    (student, teacher, y), algorithm = logits(), ntd(kind)
    target = F.one_hot(y, 5).to(student)
    plain = algorithm.divergence(student, teacher, target)
    assert torch.allclose(algorithm.divergence(student + 7 * target, teacher - 3 * target, target), plain, atol=1e-14)
    assert torch.allclose(algorithm.divergence(student + 7, teacher - 3, target), plain, atol=1e-14)
    assert plain.min() > 1e-3


def check_6_the_teacher_is_the_model_received_and_stands_still(kind: type[Algorithm]) -> None:
    """The downlink is the same after local work, bit for bit, and so is the work that is done on it once more."""
    (x, y), down, algorithm = toys.batch(10), toys.tiny().fresh(0), toys.method(kind)
    before = toys.snapshot(down)
    first = algorithm.local(toys.work(x, y, epochs=3, batch_size=4), {}, down)
    assert toys.same(down, before)
    assert not any(v.requires_grad for v in down.values())
    assert toys.same(first.up, algorithm.local(toys.work(x, y, epochs=3, batch_size=4), {}, down).up)


def check_the_mean_is_over_what_arrived(kind: type[Algorithm]) -> None:
    """By rows, or plain; the weights of the uploads that arrived sum to 1."""
    for weighting in ("samples", "uniform"):
        for turn in toys.play(kind, settings={"weighting": weighting}, **PARTIAL):
            sizes = {c: toys.TRAIN[c] if weighting == "samples" else 1 for c in turn.ups}
            mean = {
                k: sum((n / sum(sizes.values()) * turn.ups[c][k] for c, n in sizes.items()), torch.zeros(()))
                for k in turn.server
            }
            assert toys.distance(turn.next_server, mean) < 1e-15


def test_fedntd_0_steps_follow_the_objective():
    check_0_steps_follow_the_objective(FedNTD)


def test_fedntd_1_without_the_divergence_it_is_fedavg():
    check_1_without_the_divergence_it_is_fedavg(FedNTD)


def test_fedntd_2_the_first_step_is_fedavgs():
    check_2_the_first_step_is_fedavgs(FedNTD)


def test_fedntd_3_the_rows_own_class_feels_nothing():
    check_3_the_rows_own_class_feels_nothing(FedNTD)


def test_fedntd_4_two_classes_leave_nothing_to_preserve():
    check_4_two_classes_leave_nothing_to_preserve(FedNTD)


def test_fedntd_5_constants_are_not_seen():
    check_5_constants_are_not_seen(FedNTD)


def test_fedntd_6_the_teacher_is_the_model_received_and_stands_still():
    check_6_the_teacher_is_the_model_received_and_stands_still(FedNTD)


def test_the_mean_is_over_what_arrived():
    check_the_mean_is_over_what_arrived(FedNTD)


def test_probabilities_mean_over_the_class_that_is_left_out():
    student, teacher, _ = logits()
    p = torch.tensor([0.5, 0.3, 0.2, 0.0, 0.0]).expand(6, 5)
    by_class = [ntd(FedNTD).divergence(student, teacher, F.one_hot(torch.full((6,), c), 5).to(p)) for c in range(5)]
    found = ntd(FedNTD).divergence(student, teacher, p)
    assert torch.allclose(found, (p * torch.stack(by_class, 1)).sum(1), atol=1e-14)


@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_confident_logits_stay_finite(scale: float):
    """The row's own class may have all of the probability: the others are renormalised without dividing by it."""
    student, teacher, y = (z.float() if z.is_floating_point() else z for z in logits())
    target = F.one_hot(y, 5).float()
    student = (student + 100 * target).mul(scale).requires_grad_()
    found = ntd(FedNTD).divergence(student, scale * teacher, target)
    assert found.isfinite().all()
    assert torch.autograd.grad(found.sum(), student)[0].isfinite().all()
