"""SCAFFOLD. The checks take the method's class, so that planted bugs can be put to them."""

from typing import Any

import torch

from pflsec.algorithms.traditional.fedavg import FedAvg
from pflsec.algorithms.traditional.scaffold import Scaffold
from pflsec.core.algorithm import Algorithm
from pflsec.core.items import Items, select, without_prefix
from tests import toys

PARTIAL: dict[str, Any] = {"participation": 0.75, "drop_rate": 1 / 3}
"""Three of four clients are asked, one of the three uploads is lost."""


def control(items: Items) -> Items:
    """Return a control variate by parameter name."""
    return without_prefix("control", items)


def mean(many: list[Items]) -> Items:
    """Return the plain mean."""
    return {k: torch.stack([m[k] for m in many]).mean(0) for k in many[0]}


def check_1_the_first_round_is_fedavgs(kind: type[Algorithm]) -> None:
    """All control variates start at 0, which adds exactly nothing to a gradient."""
    ours, reference = toys.play(kind, 1)[0], toys.play(FedAvg, 1)[0]
    assert not any(v.any() for items in (ours.server, *ours.states.values()) for v in control(items).values())
    for client, up in ours.ups.items():
        sent = reference.ups[client]
        assert toys.same(without_prefix("delta", up), {k: sent[k] - v for k, v in reference.downs[client].items()})


def check_2_option_ii_keeps_the_mean_raw_gradient(kind: type[Algorithm]) -> None:
    """y_(j+1) = y_j - lr (g_j + c - c_i) summed over K steps: x - y = lr (sum g_j + K c - K c_i). Then
    c_i+ = c_i - c + (x - y)/(K lr) = (1/K) sum g_j. K is the client's own, lr the round's."""
    made = toys.setup(kind, rounds=3, lr_decay=0.5)
    for turn in toys.rounds(made):
        for client in turn.ups:
            y, c, c_i = (
                select(turn.server, "body", "head"),
                control(turn.server),
                control(turn.states[client]),
            )
            gradients = []
            for xb, yb in toys.context(made, turn.t, client).batches():
                g = toys.hand_gradient(y, xb, yb)
                y = {k: y[k] - 0.1 * 0.5**turn.t * (g[k] + c[k] - c_i[k]) for k in y}
                gradients.append(g)
            assert toys.distance(control(turn.next_states[client]), mean(gradients)) < 1e-12
            delta = {k: v - turn.server[k] for k, v in y.items()}
            assert toys.distance(without_prefix("delta", turn.ups[client]), delta) < 1e-14


def check_3_the_server_holds_the_mean_of_all_control_variates(kind: type[Algorithm]) -> None:
    """c moves by 1/N of what the c_i move by, so c = (1/N) sum_i c_i, over all clients, present or not."""
    for turn in toys.play(kind, 5, **PARTIAL):
        states = [control(state) for state in turn.next_states.values()]
        assert toys.distance(control(turn.next_server), mean(states)) < 1e-14
        assert any(v.abs().max() > 0 for v in control(turn.next_server).values())


def check_4_with_everybody_and_one_step_the_corrections_cancel(kind: type[Algorithm]) -> None:
    """mean_i (g_i + c - c_i) = mean_i g_i, since c = mean_i c_i."""
    made = toys.setup(kind, local_epochs=1, batch_size=100)
    for turn in toys.rounds(made):
        x = select(turn.server, "body", "head")
        gradient = mean([toys.hand_gradient(x, *made.federation.train(c)) for c in range(4)])
        new = toys.hand_step(x, gradient, 0.1)
        assert toys.distance(select(turn.next_server, "body", "head"), new) < 1e-14


def check_5_the_log_gives_the_state_away(kind: type[Algorithm]) -> None:
    """The changes of c_i that the server accepted add up to the c_i that the client keeps, to the last bit."""
    total: dict[int, Items] = {}
    for turn in toys.play(kind, 5, **PARTIAL):
        for client, up in turn.ups.items():
            sent = control(up)
            known = total.get(client, {k: torch.zeros_like(v) for k, v in sent.items()})
            total[client] = {k: known[k] + sent[k] for k in sent}
        assert all(toys.same(control(turn.next_states[client]), known) for client, known in total.items())
    assert all(v.abs().max() > 0 for known in total.values() for v in known.values())


def check_6_a_lost_upload_leaves_both_control_variates(kind: type[Algorithm]) -> None:
    """c moves by (1/N) times the changes that arrived; whose upload is lost keeps c_i."""
    for turn in toys.play(kind, 5, **PARTIAL):
        (lost,) = turn.metrics["lost"]
        assert toys.same(turn.next_states[lost], turn.states[lost])
        c = control(turn.server)
        arrived = [control(up) for up in turn.ups.values()]
        expected = {k: v + sum(change[k] for change in arrived) / 4 for k, v in c.items()}
        assert toys.distance(control(turn.next_server), expected) < 1e-15


def check_the_model_moves_by_the_mean_of_what_arrived(kind: type[Algorithm]) -> None:
    """x+ = x + server_lr (1/|S|) sum over S of delta_y, S being the uploads that arrived, not the cohort."""
    for turn in toys.play(kind, 5, settings={"server_lr": 0.5}, **PARTIAL):
        assert len(turn.ups) == 2
        delta = mean([without_prefix("delta", up) for up in turn.ups.values()])
        expected = {k: turn.server[k] + 0.5 * delta[k] for k in delta}
        assert toys.distance(select(turn.next_server, "body", "head"), expected) < 1e-15


def test_scaffold_1_the_first_round_is_fedavgs():
    check_1_the_first_round_is_fedavgs(Scaffold)


def test_scaffold_2_option_ii_keeps_the_mean_raw_gradient():
    check_2_option_ii_keeps_the_mean_raw_gradient(Scaffold)


def test_scaffold_3_the_server_holds_the_mean_of_all_control_variates():
    check_3_the_server_holds_the_mean_of_all_control_variates(Scaffold)


def test_scaffold_4_with_everybody_and_one_step_the_corrections_cancel():
    check_4_with_everybody_and_one_step_the_corrections_cancel(Scaffold)


def test_scaffold_5_the_log_gives_the_state_away():
    check_5_the_log_gives_the_state_away(Scaffold)


def test_scaffold_6_a_lost_upload_leaves_both_control_variates():
    check_6_a_lost_upload_leaves_both_control_variates(Scaffold)


def test_the_model_moves_by_the_mean_of_what_arrived():
    check_the_model_moves_by_the_mean_of_what_arrived(Scaffold)


def test_option_i_keeps_the_full_gradient_at_the_downlink():
    """Whatever the number of steps: c_i+ is the gradient over all of the client's data at x."""
    made = toys.setup(Scaffold, settings={"option": "I"})
    for turn in toys.rounds(made):
        x = select(turn.server, "body", "head")
        for client in turn.ups:
            full = toys.hand_gradient(x, *made.federation.train(client))
            assert toys.distance(control(turn.next_states[client]), full) < 1e-14


def test_an_observer_computes_the_mean_raw_gradient_without_the_learning_rate():
    """delta_c + c_i is the mean raw gradient; a wrong lr in `change` makes no difference."""
    made = toys.setup(Scaffold, local_epochs=1, batch_size=100)
    turn = toys.rounds(made)[2]
    x = select(turn.server, "body", "head")
    seen = made.algorithm.change(turn.states[1], turn.downs[1], turn.ups[1], lr=123.0, steps=77)
    assert toys.distance(seen, toys.hand_gradient(x, *made.federation.train(1))) < 1e-14


def test_without_steps_nothing_is_sent_but_zeros():
    turn = toys.play(Scaffold, 2, local_epochs=0)[1]
    sent = [v for up in turn.ups.values() for v in up.values()]
    assert len(sent) == sum(len(up) for up in toys.play(Scaffold, 2)[1].ups.values()) > 0
    assert all(not v.any() for v in sent)


def test_the_first_round_with_equal_clients_gives_fedavgs_model():
    """Equal weights and weights by samples are the same when all clients have as many."""
    data = toys.dataset([6, 6, 6, 6])
    ours, reference = (toys.play(kind, 1, data=data)[0].next_server for kind in (Scaffold, FedAvg))
    assert toys.distance(select(ours, "body", "head"), reference) < 1e-14
