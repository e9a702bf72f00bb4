"""The round loop: what a round commits, what it leaves alone, and how it fails."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pflsec.algorithms.traditional.fedavg import FedAvg
from pflsec.core.algorithm import Algorithm, Done
from pflsec.core.errors import ConfigError, TrainingError, WireError
from pflsec.core.items import Items
from pflsec.core.local import Local
from pflsec.models import catalogue
from pflsec.runtime.folder import RunFolder
from pflsec.runtime.recorder import Recorder
from pflsec.runtime.rounds import Federated, play
from pflsec.runtime.setup import Setup
from tests import toys
from tests.contracts.cases import every_method

for_every_method = pytest.mark.parametrize("key", every_method())


def quiet(t: int, metrics: Mapping[str, Any]) -> None:
    """Report nothing."""


def run(made: Setup, path: Path) -> tuple[RunFolder, Federated]:
    """Play a run into a folder."""
    folder = RunFolder.create(path, "run")
    return folder, play(made, folder, quiet)


def lines(folder: RunFolder) -> list[dict[str, Any]]:
    """Return metrics.jsonl, refusing NaN and infinities."""
    text = (folder.path / "metrics.jsonl").read_text()

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} in metrics.jsonl")

    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


class Counted(FedAvg):
    """FedAvg whose clients are told at the start how the rows are spread."""

    def enrol(self, server: Items, sizes: Sequence[int]) -> Items:
        return server | {"share": torch.tensor(sizes) / sum(sizes)}

    def init_client(self, fresh: Items, server: Items) -> Items:
        return {"share": server["share"]}

    def downlink(self, server: Items, client: int) -> Items:
        return {k: v for k, v in server.items() if k != "share"}

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        return super().aggregate(server, ups) | {"share": server["share"]}


def test_before_the_first_round_the_server_knows_how_many_rows_each_client_has():
    """So do clients that start from its items, and the log's observer; a capture then sees a state that is public."""
    made = toys.setup(Counted, capture_rounds="first", victim_batch=3)
    federated = Federated(made)
    expected = torch.tensor(toys.TRAIN) / sum(toys.TRAIN)
    kept = [federated.server, made.server_first, *federated.states.values(), *federated.memories.values()]
    assert len(kept) == 10
    assert all(torch.equal(items["share"], expected) for items in kept)
    assert torch.equal(Recorder(made, Any, Any)._public_newcomer["share"], expected)  # type: ignore[arg-type]
    federated.advance()


# --- reproducible


@for_every_method
def test_the_same_seed_gives_the_same_bits(key: str):
    one, two = (toys.play(key, seed=3, participation=0.5)[-1] for _ in range(2))
    assert toys.same(one.next_server, two.next_server)
    assert all(toys.same(one.next_states[c], two.next_states[c]) for c in range(4))
    assert one.metrics["cohort"] == two.metrics["cohort"]


@for_every_method
def test_another_seed_gives_other_bits(key: str):
    one, two = (toys.play(key, seed=seed)[-1] for seed in (3, 4))
    assert not toys.same(one.next_server | one.next_states[0], two.next_server | two.next_states[0])


@for_every_method
def test_torchs_global_generator_makes_no_difference(key: str):
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        turn = toys.play(key, 2)[-1]
        results.append(turn.next_server | turn.next_states[0])
    assert toys.same(*results)


@for_every_method
def test_probes_do_not_change_training(key: str, tmp_path: Path):
    """With captures of every round and with none: equal bits on the server and in every client."""
    ends = []
    for rounds in ("every:1", "none"):
        made = toys.setup(key, capture_rounds=rounds, victims=2, participation=0.5)
        ends.append(run(made, tmp_path / rounds.partition(":")[0])[1])
    assert toys.same(ends[0].server, ends[1].server)
    assert all(toys.same(ends[0].states[c], ends[1].states[c]) for c in range(4))


# --- the round's own settings


def test_every_participant_trains_with_the_rounds_rate():
    """lr * decay^t, also for a client that was away for some rounds."""
    seen: list[tuple[int, float]] = []

    class Spy(FedAvg):
        def local(self, ctx: Local, state: Items, down: Items) -> Done:
            seen.append((ctx.round, ctx.lr))
            return super().local(ctx, state, down)

    toys.play(Spy, 6, participation=0.5, lr=0.2, lr_decay=0.9)
    assert len(seen) == 12
    assert all(lr == pytest.approx(0.2 * 0.9**t) for t, lr in seen)


def test_half_of_four_uploads_are_lost_and_the_others_share_the_weight():
    """The aggregate of the two that arrive, weighted by their own samples; the lost ones are nowhere in it."""
    for turn in toys.play("fedavg", 4, drop_rate=0.5):
        assert len(turn.ups) == len(turn.metrics["lost"]) == 2
        assert sorted([*turn.ups, *turn.metrics["lost"]]) == turn.metrics["cohort"] == [0, 1, 2, 3]
        total = sum(toys.TRAIN[c] for c in turn.ups)
        for name, value in turn.next_server.items():
            mean = sum(toys.TRAIN[c] / total * up[name] for c, up in turn.ups.items())
            assert torch.allclose(value, torch.as_tensor(mean), atol=1e-6)


def test_work_whose_upload_is_lost_shows_nowhere():
    turn = toys.play("fedavg", 1, drop_rate=0.5)[0]
    for client in turn.metrics["lost"]:
        row = turn.rows[client]
        assert not row["uploaded"]
        assert (row["train_loss"], row["last_trained_round"], row["accuracy_post_local"]) == (
            None,
            None,
            None,
        )


# --- failures


class NotFinite(FedAvg):
    """Sends NaN in round 2."""

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        done = super().local(ctx, state, down)
        bad = {"head.bias": done.up["head.bias"] * torch.nan} if ctx.round == 2 and ctx.client == 1 else {}
        return Done(done.state, done.up | bad)


def test_a_rate_that_is_far_too_large_is_named_with_round_client_and_item():
    net = catalogue.build("mlp", toys.SHAPE, toys.CLASSES)
    with pytest.raises(TrainingError) as failed:
        toys.play("fedavg", 9, net=net, lr=1e6, local_epochs=9)
    assert re.match(
        r"round \d, client \d: '(body|head)\.\S+' of the upload is not finite .*Lower --lr \(now 1e\+06\)",
        str(failed.value),
    )
    assert failed.value.exit_code == 1


def test_the_rounds_before_a_failure_can_be_read(tmp_path: Path):
    made = toys.setup(NotFinite, rounds=5)
    folder = RunFolder.create(tmp_path, "run")
    with pytest.raises(TrainingError, match=r"round 2, client 1: 'head\.bias' of the upload"):
        play(made, folder, quiet)
    assert [row["round"] for row in lines(folder)] == [0, 1]
    assert (folder.path / "clients.csv").read_text().count("\n") == 1 + 2 * 4


def test_a_failed_round_leaves_nothing_behind():
    federated = Federated(toys.setup(NotFinite, rounds=5))
    for _ in range(2):
        federated.advance()
    server, states, log = federated.server, dict(federated.states), dict(federated.last_trained)
    with pytest.raises(TrainingError):
        federated.advance()
    assert federated.t == 2
    assert federated.server is server
    assert federated.states == states
    assert federated.last_trained == log


def test_a_state_that_is_not_finite_is_named_too():
    class BadState(FedAvg):
        def local(self, ctx: Local, state: Items, down: Items) -> Done:
            return Done({"memory": torch.tensor(torch.inf)}, super().local(ctx, state, down).up)

    with pytest.raises(TrainingError, match="round 0, client 0: 'memory' of the state is not finite"):
        toys.play(BadState, 1)


def test_an_aggregate_that_is_not_finite_is_named():
    class BadServer(FedAvg):
        def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
            return {k: v / 0 for k, v in super().aggregate(server, ups).items()}

    with pytest.raises(TrainingError, match=r"round 0: item 'body\.fc1\.weight' is not finite after aggregation"):
        toys.play(BadServer, 1)


def test_an_error_in_a_client_is_shown_with_its_number_and_traceback():
    class Raises(FedAvg):
        def local(self, ctx: Local, state: Items, down: Items) -> Done:
            if ctx.client == 2:
                return Done(state, up={"w": torch.ones(2) @ torch.ones(3)})
            return super().local(ctx, state, down)

    with pytest.raises(TrainingError) as failed:
        toys.play(Raises, 1)
    text = str(failed.value)
    assert text.startswith("round 0, client 2: fedavg.local raised RuntimeError: ")
    assert "Traceback (most recent call last):" in text
    assert "torch.ones(2) @ torch.ones(3)" in text
    assert failed.value.exit_code == 1


def test_an_error_for_the_user_keeps_its_kind_and_gains_the_place():
    class Complains(FedAvg):
        def local(self, ctx: Local, state: Items, down: Items) -> Done:
            raise ConfigError("mu is too large.")

    with pytest.raises(ConfigError, match=r"^round 0, client 0: mu is too large\.$"):
        toys.play(Complains, 1)


def test_a_method_that_breaks_its_contract_is_stopped():
    class Chatty(FedAvg):
        def local(self, ctx: Local, state: Items, down: Items) -> Done:
            done = super().local(ctx, state, down)
            return Done(done.state, done.up | {"diary": torch.ones(2)})

    with pytest.raises(WireError, match="round 0, client 0: fedavg sent the item 'diary'"):
        toys.play(Chatty, 1)


@pytest.mark.parametrize("missing", ["local", "aggregate"])
def test_a_method_without_its_functions_says_which(missing: str):
    algorithm: Any = toys.method(type("Empty", (Algorithm,), {"key": "empty"}))
    with pytest.raises(TypeError, match=rf"Empty does not define {missing}\(\)"):
        algorithm.local(None, {}, {}) if missing == "local" else algorithm.aggregate({}, {})


def test_a_run_with_no_local_steps_has_no_loss_and_no_nan(tmp_path: Path):
    folder, _ = run(toys.setup("fedavg", local_epochs=0), tmp_path)
    assert [row["train_loss"] for row in lines(folder)] == [None] * 3


def test_rounds_are_reported_as_they_are_written(tmp_path: Path):
    folder, told = RunFolder.create(tmp_path, "run"), []
    play(
        toys.setup("fedavg"),
        folder,
        lambda t, metrics: told.append((t, metrics["round"], len(lines(folder)))),
    )
    assert told == [(0, 0, 1), (1, 1, 2), (2, 2, 3)]


def test_a_run_uses_one_thread_and_puts_the_number_back(tmp_path: Path):
    """Two threads may add up in another order, and change bits."""
    seen: set[int] = set()

    class Spy(FedAvg):
        def local(self, ctx: Local, state: Items, down: Items) -> Done:
            seen.add(torch.get_num_threads())
            return super().local(ctx, state, down)

    torch.set_num_threads(2)
    run(toys.setup(Spy, rounds=1), tmp_path)
    assert seen == {1}
    assert torch.get_num_threads() == 2
