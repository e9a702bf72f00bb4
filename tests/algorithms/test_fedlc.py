"""FedLC. The checks take the method's class, so that planted bugs can be put to them."""

import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pflsec.algorithms.traditional.fedavg import FedAvg
from pflsec.algorithms.traditional.fedlc import FedLC
from pflsec.core.algorithm import Algorithm
from pflsec.core.errors import PflsecWarning
from pflsec.core.items import Items, select
from pflsec.training.local import Training, Unrolled
from tests import toys

PARTIAL: dict[str, Any] = {"participation": 0.75, "drop_rate": 1 / 3}
"""Three of four clients are asked, one of the three uploads is lost."""


def model(items: Items) -> Items:
    """Return the model in a message."""
    return select(items, "body", "head")


def state(*counts: float) -> Items:
    """Return the state of a client with so many rows of each class."""
    return {"counts": torch.tensor(counts), "counted": torch.tensor(True)}


def hand_logits(at: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Return the logits of the tiny network."""
    return F.linear(toys.hand_features(at, x), at["head.weight"], at["head.bias"])


def check_0_one_step_follows_the_objective(kind: type[Algorithm]) -> None:
    """-log(e^(u_y) / sum_i e^(u_i)), u_i = f_i - tau n_i^(-1/4), the sum over all held classes or all of them but y."""
    (x, y), down, n = toys.batch(classes=(0, 2)), toys.tiny().fresh(0), torch.tensor([16.0, 0.0, 1.0])
    for denominator in ("all", "others"):

        def loss(at: Any, x: Tensor, y: Tensor, denominator: str = denominator) -> Tensor:
            e = (hand_logits(at, x)[:, [0, 2]] - 2.0 * torch.tensor([1 / 2, 1.0])).exp()  # 16^(-1/4) = 1/2
            own = torch.where(y == 0, e[:, 0], e[:, 1])
            return -(own / (e.sum(1) if denominator == "all" else e.sum(1) - own)).log().mean()

        algorithm = toys.method(kind, tau=2.0, denominator=denominator)
        found = algorithm.local(toys.work(x, y), state(*n.tolist()), down).up
        expected = toys.hand_step(down, toys.hand_gradient(down, x, y, loss), 0.1)
        assert toys.distance(model(found), expected) < 1e-13


def check_1_without_margins_it_is_fedavg(kind: type[Algorithm]) -> None:
    """Also on clients that lack classes: 0 times an infinite margin must not come in, nor the mask."""
    reference = toys.play(FedAvg, **PARTIAL)
    for settings in ({}, {"missing": "floor"}, {"denominator": "others"}, {"counts": "global"}):
        for turn, other in zip(toys.play(kind, settings={"tau": 0.0, **settings}, **PARTIAL), reference, strict=True):
            assert all(toys.same(model(up), model(other.ups[c])) for c, up in turn.ups.items())
            assert toys.same(model(turn.next_server), other.next_server)


def check_2_equal_counts_change_nothing(kind: type[Algorithm]) -> None:
    """Softmax does not see what is added to every logit."""
    work, down = toys.work(*toys.batch(9), epochs=3, batch_size=4), toys.tiny().fresh(0)
    fresh = toys.method(kind).init_client({}, down)
    ours, other = (
        toys.method(kind, tau=3.0).local(work, fresh, down),
        toys.method(FedAvg).local(toys.work(*toys.batch(9), epochs=3, batch_size=4), {}, down),
    )
    assert toys.distance(ours.up, other.up) < 1e-14


def check_3_the_rows_of_a_missing_class_stand_still(kind: type[Algorithm]) -> None:
    """For any number of steps, to the last bit; those of the classes that the client has do not."""
    for turn in toys.play(kind):
        for c, up in turn.ups.items():
            for k in range(toys.CLASSES):
                still = all(torch.equal(up[n][k], turn.downs[c][n][k]) for n in ("head.weight", "head.bias"))
                assert still == (k not in toys.HELD[c] or len(toys.HELD[c]) == 1)


def check_4_one_class_sends_back_what_it_received(kind: type[Algorithm]) -> None:
    """Its only class has all of the softmax: loss 0, slope 0. Without a rival there is nothing in the other form either."""
    for denominator in ("all", "others"):
        for turn in toys.play(kind, settings={"denominator": denominator}):
            assert toys.same(model(turn.ups[2]), model(turn.downs[2]))


def check_5_margins_are_the_clients_own_and_stay_with_it(kind: type[Algorithm]) -> None:
    """Equal batches of clients with other histograms give other uploads; no message holds a histogram."""
    (x, y), down, algorithm = toys.batch(), toys.tiny().fresh(0), toys.method(kind)
    a, b = (algorithm.local(toys.work(x, y), state(*n), down).up for n in ((90.0, 9.0, 1.0), (1.0, 9.0, 90.0)))
    assert toys.distance(model(a), model(b)) > 1e-4
    for turn in toys.play(kind):
        for message in (*turn.downs.values(), *turn.ups.values()):
            assert message.keys() - {"num_samples"} == toys.tiny().shapes.keys()


def check_5_all_rows_are_counted_once(kind: type[Algorithm]) -> None:
    """Five rows in batches of four: a count by whole batches would miss one. What is kept does not change later."""
    played = toys.play(kind)
    expected = [torch.bincount(toys.setup(kind).federation.train(c)[1], minlength=3).double() for c in range(4)]
    assert [int(n.sum()) for n in expected] == list(toys.TRAIN)
    for turn in played:
        assert all(torch.equal(turn.next_states[c]["counts"], expected[c]) for c in range(4))
    (x, y), algorithm, down = toys.batch(1), toys.method(kind), toys.tiny().fresh(0)
    done = algorithm.local(toys.work(x, y), state(4.0, 2.0, 3.0), down)
    assert toys.same(done.state, state(4.0, 2.0, 3.0))
    assert toys.distance(model(done.up), down) > 1e-3  # by this batch's own counts it would be a client of one class


def check_6_the_model_is_used_without_margins(kind: type[Algorithm]) -> None:
    items, (x, _) = toys.tiny().fresh(0), toys.batch()
    for tau in (0.0, 5.0):
        algorithm = toys.method(kind, tau=tau)
        deployed = algorithm.deploy(state(90.0, 9.0, 0.0), items)
        assert torch.equal(algorithm.scores(deployed, x), algorithm.net.logits(items, x))


def check_large_logits_stay_finite(kind: type[Algorithm]) -> None:
    """e^1000 is no number, but with logits u_c = f_c - tau n_c^(-1/4) so far apart the loss is u_top - u_y, or, without the
    row's own class, the largest of the others less u_y."""
    logits, target = torch.tensor([[1000.0, -1000.0, 0.0]]).repeat(2, 1), torch.tensor([[1.0, 0, 0], [0, 0, 1.0]])
    u = logits - 2.0 * torch.tensor([1 / 2, 1.0, 1.0])
    for denominator, expected in (
        ("all", [0.0, u[1, 0] - u[1, 2]]),
        ("others", [u[0, 2] - u[0, 0], u[1, 0] - u[1, 2]]),
    ):
        algorithm = toys.method(kind, tau=2.0, denominator=denominator)
        assert isinstance(algorithm, FedLC)
        z = logits.clone().requires_grad_()
        found = algorithm.calibrated(z, target, torch.tensor([16.0, 1.0, 1.0]))
        assert torch.allclose(found, torch.tensor([float(v) for v in expected]))
        assert torch.autograd.grad(found.sum(), z)[0].isfinite().all()


def test_fedlc_0_one_step_follows_the_objective():
    check_0_one_step_follows_the_objective(FedLC)


def test_fedlc_1_without_margins_it_is_fedavg():
    check_1_without_margins_it_is_fedavg(FedLC)


def test_fedlc_2_equal_counts_change_nothing():
    check_2_equal_counts_change_nothing(FedLC)


def test_fedlc_3_the_rows_of_a_missing_class_stand_still():
    check_3_the_rows_of_a_missing_class_stand_still(FedLC)


def test_fedlc_4_one_class_sends_back_what_it_received():
    check_4_one_class_sends_back_what_it_received(FedLC)


def test_fedlc_5_margins_are_the_clients_own_and_stay_with_it():
    check_5_margins_are_the_clients_own_and_stay_with_it(FedLC)


def test_fedlc_5_all_rows_are_counted_once():
    check_5_all_rows_are_counted_once(FedLC)


def test_fedlc_6_the_model_is_used_without_margins():
    check_6_the_model_is_used_without_margins(FedLC)


def test_large_logits_stay_finite():
    check_large_logits_stay_finite(FedLC)


def test_a_client_of_one_class_is_warned_about():
    algorithm, down = toys.method(FedLC), toys.tiny().fresh(0)
    with pytest.warns(PflsecWarning, match="one class alone"):
        algorithm.local(toys.work(*toys.batch(classes=(1,))), algorithm.init_client({}, down), down)
    quiet: list[tuple[dict[str, Any], tuple[int, ...]]] = [
        ({"missing": "floor"}, (1,)),
        ({"tau": 0.0}, (1,)),
        ({}, (0, 1)),
    ]
    for settings, classes in quiet:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            work = toys.work(*toys.batch(classes=classes))
            toys.method(FedLC, **settings).local(work, algorithm.init_client({}, down), down)


def test_a_floor_keeps_a_missing_class_as_one_of_a_single_row():
    (x, y), down = toys.batch(classes=(0, 1)), toys.tiny().fresh(0)
    floored = toys.method(FedLC, missing="floor").local(toys.work(x, y), state(3.0, 3.0, 0.0), down).up
    single = toys.method(FedLC).local(toys.work(x, y), state(3.0, 3.0, 1.0), down).up
    assert toys.same(floored, single)
    assert toys.distance({"b": floored["head.bias"][2]}, {"b": down["head.bias"][2]}) > 1e-4


def test_global_counts_are_sent_and_come_back_as_sums():
    """Nobody is counted in round 0, which is FedAvg's; then the margins are common, and the sums of who has been there."""
    made = toys.setup(FedLC, settings={"counts": "global"}, participation=0.5, seed=3)
    known: dict[int, Tensor] = {}
    for turn in toys.rounds(made, 4):
        total = sum(known.values(), torch.zeros(3))
        for c, up in turn.ups.items():
            work = toys.context(made, turn.t, c)
            assert torch.equal(turn.downs[c]["label_counts"], total)
            if not turn.t:
                assert toys.same(model(up), work.fit(model(turn.downs[c]), on=work.ce))
            else:
                down = model(turn.downs[c])
                local = toys.method(FedLC).local(work, {"counts": total, "counted": torch.tensor(True)}, down)
                assert toys.same(model(up), model(local.up))
            known[c] = torch.bincount(work.y, minlength=3).double()
            assert torch.equal(up["label_counts"], known[c])
    assert len(known) > 2


@pytest.mark.parametrize("denominator", ["all", "others"])
def test_a_missing_class_leaves_the_replay_differentiable(denominator: str):
    """No infinity may meet a zero on the way back through two steps."""
    (x, y), down = toys.batch(classes=(0, 2)), toys.tiny().fresh(0)
    algorithm, x = toys.method(FedLC, denominator=denominator), x.requires_grad_()
    sent = algorithm.local(toys.work(x, y, epochs=2, driver=Unrolled()), state(3.0, 0.0, 3.0), down).up
    plain = algorithm.local(toys.work(x, y, epochs=2, driver=Training()), state(3.0, 0.0, 3.0), down).up
    assert toys.distance(sent, plain) < 1e-14
    (slope,) = torch.autograd.grad(torch.stack([v.square().sum() for v in model(sent).values()]).sum(), x)
    assert slope.isfinite().all()
    assert slope.abs().max() > 0
