"""Accuracy: what is counted, over whom, and at which moment."""

import csv
import io
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pflsec.algorithms.traditional.fedavg import FedAvg
from pflsec.core.algorithm import Done
from pflsec.core.errors import TrainingError
from pflsec.core.items import Items
from pflsec.core.local import Local
from pflsec.data.federation import Federation
from pflsec.models.network import Network
from pflsec.runtime import evaluate
from pflsec.runtime.executor import Trial
from pflsec.runtime.folder import CLIENT_COLUMNS
from tests import toys

EARLY: dict[str, Any] = {"lr": 0.1, "local_epochs": 1, "seed": 1}
"""A moment at which clients, local models and the global model differ in accuracy."""


def test_means_over_clients_and_over_rows_are_told_apart():
    """Sizes 10 and 90, accuracies 1.0 and 0.5: by rows (10 + 45)/100, by clients 0.75, deviation 0.25."""
    found = evaluate.summary([1.0, 0.5], [10, 90])
    assert found["personal_accuracy_weighted"] == pytest.approx(0.55)
    assert found["personal_accuracy_mean"] == pytest.approx(0.75)
    assert found["personal_accuracy_std"] == pytest.approx(0.25)
    assert found["personal_accuracy_worst10"] == pytest.approx(0.5)


def test_the_worst_tenth_is_a_mean_of_at_least_one_client():
    values = [i / 20 for i in range(20)]
    assert evaluate.summary(values[::-1], [1] * 20)["personal_accuracy_worst10"] == pytest.approx(0.025)
    assert evaluate.summary([0.3], [5])["personal_accuracy_worst10"] == pytest.approx(0.3)


def hand_accuracy(items: Items, x: Tensor, y: Tensor) -> float:
    z = torch.nn.functional.linear(toys.hand_features(items, x), items["head.weight"], items["head.bias"])
    return float((z.argmax(1) == y).double().mean())


def test_both_columns_say_which_moment_they_are_of():
    """post_agg is the aggregate on the client's rows; post_local is what its own training left, before aggregation."""
    made = toys.setup("fedavg", rounds=2, **EARLY)
    turns = toys.rounds(made)
    assert any(row["accuracy_post_agg"] != row["accuracy_post_local"] for row in turns[0].rows)
    for turn in turns:
        for row in turn.rows:
            x, y = made.federation.test(row["client"])
            assert row["accuracy_post_agg"] == pytest.approx(hand_accuracy(turn.next_server, x, y))
            assert row["accuracy_post_local"] == pytest.approx(hand_accuracy(turn.ups[row["client"]], x, y))


def test_without_local_work_both_columns_agree():
    for turn in toys.play("fedavg", local_epochs=0):
        assert [row["accuracy_post_local"] for row in turn.rows] == [row["accuracy_post_agg"] for row in turn.rows]
        assert turn.ups.keys() == {row["client"] for row in turn.rows if row["accuracy_post_local"] is not None}


@pytest.mark.parametrize("key", ["fedavg", "fedrep", "fedproto"])
def test_every_client_is_tested_whether_or_not_it_took_part(key: str):
    """8 clients, a quarter of them a round: 8 rows each time, with the last round whose upload of each one arrived."""
    last: dict[int, int] = {}
    turns = toys.play(key, 4, data=toys.dataset([4] * 8), participation=0.25)
    for turn in turns:
        last |= dict.fromkeys(turn.ups, turn.t)
        assert [row["client"] for row in turn.rows] == list(range(8))
        assert all(0 <= row["accuracy_post_agg"] <= 1 for row in turn.rows)
        assert [row["last_trained_round"] for row in turn.rows] == [last.get(c) for c in range(8)]
        assert [row["accuracy_post_local"] is not None for row in turn.rows] == [c in turn.ups for c in range(8)]
        assert [row["uploaded"] for row in turn.rows] == [c in turn.ups for c in range(8)]
    assert len(last) > 2


def test_rows_have_the_declared_columns():
    assert tuple(toys.play("fedavg", 1)[0].rows[0]) == CLIENT_COLUMNS
    assert next(csv.reader(io.StringIO(",".join(CLIENT_COLUMNS)))) == list(CLIENT_COLUMNS)


def test_accuracies_are_due_every_few_rounds_and_at_the_end():
    turns = toys.play("fedavg", 5, eval_every=2)
    due = ["personal_accuracy_mean" in turn.metrics for turn in turns]
    assert due == [False, True, False, True, True]
    assert [turn.rows[0]["accuracy_post_agg"] is not None for turn in turns] == due


def test_the_global_model_is_tested_on_the_global_rows():
    made = toys.setup("fedavg", rounds=1, **EARLY)
    turn = toys.rounds(made)[0]
    accuracy = hand_accuracy(turn.next_server, *made.federation.global_test_set())
    assert turn.metrics["global_accuracy"] == pytest.approx(accuracy)
    assert accuracy not in [row["accuracy_post_agg"] for row in turn.rows]


def test_one_model_for_all_has_the_accuracy_of_its_rows_together():
    """Where the global rows are the clients' rows, this needs no second pass: it is the weighted mean."""
    early: dict[str, Any] = EARLY | {"lr": 0.02}
    made = toys.setup("fedavg", rounds=1, partition="iid", clients=3, test="split", **early)
    turn = toys.rounds(made)[0]
    accuracy = hand_accuracy(turn.next_server, *made.federation.global_test_set())
    assert turn.metrics["global_accuracy"] == pytest.approx(accuracy)
    assert turn.metrics["personal_accuracy_weighted"] == pytest.approx(accuracy)
    assert turn.metrics["personal_accuracy_mean"] != pytest.approx(accuracy)


class OwnOpinion(FedAvg):
    """One global model, and clients that each add something of their own to its scores."""

    def init_client(self, fresh: Items, server: Items) -> Items:
        return {"opinion": torch.zeros(self.net.classes)}

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        return Done({"opinion": torch.tensor([1e6, 0, 0])}, super().local(ctx, state, down).up)

    def deploy(self, state: Items, down: Items) -> Items:
        return down | state

    def scores(self, items: Items, x: Tensor) -> Tensor:
        return self.net.logits(items, x) + items.get("opinion", torch.zeros(self.net.classes))


def test_the_global_accuracy_is_the_global_models_although_clients_add_to_it():
    """Personal predictions are all class 0; the global model's are not."""
    made = toys.setup(OwnOpinion, rounds=1, partition="iid", clients=3, test="split", lr=0.5, local_epochs=9)
    turn = toys.rounds(made)[0]
    x, y = made.federation.global_test_set()
    assert turn.metrics["personal_accuracy_weighted"] == pytest.approx(float((y == 0).double().mean()))
    assert turn.metrics["global_accuracy"] == pytest.approx(hand_accuracy(turn.next_server, x, y))
    assert turn.metrics["global_accuracy"] != turn.metrics["personal_accuracy_weighted"]


class ServesItsFirstModel(FedAvg):
    """A method whose model to use is another one than the model that it sends."""

    def init_server(self, fresh: Items) -> Items:
        return super().init_server(fresh) | {f"first.{k}": v for k, v in fresh.items()}

    def downlink(self, server: Items, client: int) -> Items:
        return {k: v for k, v in server.items() if not k.startswith("first.")}

    def serve(self, server: Items, client: int) -> Items:
        return {k.removeprefix("first."): v for k, v in server.items() if k.startswith("first.")}

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        return server | super().aggregate(server, ups)


def test_what_is_tested_is_what_the_server_serves_not_what_it_sends():
    """The first model is tested in every round, while training goes on and leaves other models."""
    made = toys.setup(ServesItsFirstModel, rounds=2, **EARLY | {"lr": 0.5, "local_epochs": 9})
    turns = toys.rounds(made)
    for turn in turns:
        for row in turn.rows:
            x, y = made.federation.test(row["client"])
            assert row["accuracy_post_agg"] == pytest.approx(hand_accuracy(made.server_fresh, x, y))
            assert row["accuracy_post_local"] == pytest.approx(hand_accuracy(turn.ups[row["client"]], x, y))
    assert any(row["accuracy_post_agg"] != row["accuracy_post_local"] for row in turns[-1].rows)


@pytest.mark.parametrize(
    ("key", "common"), [("fedavg", True), ("scaffold", True), ("fedrep", False), ("fedamp", False)]
)
def test_methods_without_a_global_model_have_no_global_accuracy(key: str, common: bool):
    assert (toys.play(key, 1)[0].metrics["global_accuracy"] is not None) == common


def test_large_test_sets_are_worked_off_in_pieces():
    made = toys.setup("fedavg", data=toys.dataset([4], test=250))
    items = made.net.fresh(0)
    x, y = made.federation.test(0)
    score = Trial(0, 0, items).do(made)
    assert (score.correct, score.rows) == (round(250 * hand_accuracy(items, x, y)), 250)


def test_what_a_method_raises_while_it_is_tested_names_round_and_client():
    class Blind(FedAvg):
        def scores(self, items: Items, x: Tensor) -> Tensor:
            raise ValueError("cannot see")

    with pytest.raises(TrainingError, match=r"round 1, client 0: fedavg\.scores raised ValueError: cannot see"):
        toys.play(Blind, 1)


def test_a_module_that_cannot_read_channels_last_is_tested_as_it_is_trained():
    """`view` needs the layout in which images come; another layout would end the run at its first test."""

    class Viewing(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.fc = nn.Conv2d(2, 4, 2), nn.Linear(4 * 9, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.conv(x).view(len(x), -1))

    x = torch.randn(5, 2, 4, 4)
    assert Network(Viewing, (2, 4, 4), 3).laid_out(x) is x
    laid = Network(lambda: nn.Sequential(nn.Conv2d(2, 4, 2), nn.Flatten(), nn.Linear(4 * 9, 3)), (2, 4, 4), 3).laid_out(
        x
    )
    assert torch.equal(laid, x)
    assert laid.is_contiguous(memory_format=torch.channels_last)


def test_a_model_that_is_tested_as_it_is_asks_for_no_training_rows(monkeypatch: pytest.MonkeyPatch):
    made = toys.setup("fedavg")

    def train(self: Federation, client: int) -> Any:
        raise AssertionError("training rows were made")

    monkeypatch.setattr(Federation, "train", train)
    assert Trial(0, 1, made.net.fresh(0)).do(made).rows == 3
