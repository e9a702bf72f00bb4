"""Probes: the victims, what is captured of them, and what is kept apart in the vault."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from pflsec.algorithms.traditional.fedavg import FedAvg
from pflsec.core.algorithm import Done
from pflsec.core.errors import ConfigError, TrainingError
from pflsec.core.items import Items
from pflsec.core.local import Local
from pflsec.core.tensors import read_items
from pflsec.runtime.folder import RunFolder
from pflsec.runtime.recorder import victim_rows
from pflsec.runtime.replay import capture
from pflsec.runtime.rounds import play
from pflsec.runtime.setup import Setup
from pflsec.wire.capture import Record
from pflsec.wire.store import CaptureStore
from tests import toys
from tests.contracts.cases import every_method

for_every_method = pytest.mark.parametrize("key", every_method())


def captured(key: toys.Method, path: Path, **options: Any) -> tuple[Setup, RunFolder, CaptureStore]:
    """Play a run with captures."""
    made = toys.setup(key, **({"capture_rounds": "first,last", "victims": 2} | options))
    folder = RunFolder.create(path, key if isinstance(key, str) else key.key)
    play(made, folder, lambda t, metrics: None)
    return made, folder, CaptureStore(folder.captures)


# --- victims


def test_victims_are_the_same_for_every_method(tmp_path: Path):
    """Same data and seed: the true batches agree to the last bit, whatever was trained, at whatever rate."""
    truths = []
    for number, key in enumerate(every_method()):
        _, folder, store = captured(key, tmp_path, lr=0.01 * (number + 1), participation=0.5)
        whole = [read_items(folder.vault / f"{name}.safetensors", name) for name in store.ids()]
        truths.append([{k: items[k] for k in ("x", "y", "dataset_index")} for items in whole])
    assert len(truths[0]) == 2 * 4 * 2
    assert all(toys.same(a, b) for other in truths[1:] for a, b in zip(truths[0], other, strict=True))


def test_victims_are_the_clients_own_training_rows():
    made = toys.setup("fedavg", victims=3, victim_batch=2)
    for client in range(4):
        for rows in victim_rows(made, client):
            assert len(set(rows.tolist())) == 2
            assert set(rows.tolist()) <= set(made.federation.shards[client].train.tolist())


def test_victims_take_new_rows_as_long_as_there_are_some():
    """8 rows, 4 batches of 2: every row once. With 6 batches, no row more than twice."""
    made = toys.setup("fedavg", victims=4, victim_batch=2)
    assert len(np.unique(np.concatenate(victim_rows(made, 1)))) == 8
    more = np.concatenate(victim_rows(toys.setup("fedavg", victims=6, victim_batch=2), 1))
    assert max(Counter(more.tolist()).values()) == 2


def test_victims_take_the_classes_in_turn():
    """Client 3 holds three classes: each three victims show all of them."""
    made = toys.setup("fedavg", victims=6)
    labels = [int(made.federation.dataset.labels[rows[0]]) for rows in victim_rows(made, 3)]
    assert set(labels[:3]) == set(labels[3:6]) == {0, 1, 2}


def test_other_seeds_choose_other_victims():
    one, two = (np.concatenate(victim_rows(toys.setup("fedavg", seed=s), 3)).tolist() for s in (0, 1))
    assert one != two


def test_a_batch_larger_than_a_client_is_refused_before_anything_runs():
    with pytest.raises(ConfigError, match="client 2 has 3 training images; a victim batch of 4 does not fit"):
        toys.setup("fedavg", capture_rounds="first", victim_batch=4)
    toys.setup("fedavg", capture_rounds="first", victim_batch=4, capture_clients="1,3")
    toys.setup("fedavg", capture_rounds="none", victim_batch=4)


# --- captures


@for_every_method
def test_every_victim_of_every_chosen_round_is_captured_and_replays(key: str, tmp_path: Path):
    made, folder, store = captured(key, tmp_path, victim_batch=2, victim_steps=3)
    assert store.ids() == [f"r{t:03d}-c{c:02d}-v{v}-probe" for t in (0, 2) for c in range(4) for v in range(2)]
    for name in store.ids():
        record = store.read(name)
        assert (record.algorithm, record.batch, record.steps, record.kind) == (key, 2, 3, "probe")
        assert record.lr == pytest.approx(made.config.lr)
        made.algorithm.contract.check("down", record.down, name)
        made.algorithm.contract.check("up", record.up, name)
        assert json.loads((folder.vault / f"{name}.json").read_text())["replay_residual"] < 1e-6


def test_a_probe_is_one_exchange_with_the_victims_as_the_only_data(tmp_path: Path):
    """FedAvg, one image, one step: up = down - lr * gradient at the image."""
    _, folder, store = captured("fedavg", tmp_path)
    record, truth = (
        store.read("r002-c01-v1-probe"),
        read_items(folder.vault / "r002-c01-v1-probe.safetensors", "truth"),
    )
    gradient = toys.hand_gradient(record.down, truth["x"], truth["y"])
    assert toys.distance({k: record.up[k] for k in record.down}, toys.hand_step(record.down, gradient, 0.1)) < 1e-6
    assert record.up["num_samples"].item() == 1


def test_a_rounds_rate_is_captured(tmp_path: Path):
    _, _, store = captured("fedavg", tmp_path, lr_decay=0.5)
    assert store.read("r002-c00-v0-probe").lr == pytest.approx(0.1 * 0.5**2)


def test_a_broadcast_is_stored_once(tmp_path: Path):
    """Two rounds of FedAvg: two downlinks for sixteen captures."""
    _, folder, store = captured("fedavg", tmp_path)
    downs = {store.header(name)["messages"]["down"] for name in store.ids()}
    assert len(downs) == 2
    assert len(list((folder.captures / "blobs").iterdir())) == 2 + 16 + 1  # and one empty memory


def content(store: CaptureStore) -> dict[str, Record]:
    return {name: store.read(name) for name in store.ids()}


@for_every_method
def test_nothing_of_the_truth_is_among_the_captures(key: str, tmp_path: Path):
    """No file of the captures holds the bytes of a victim's image or labels, its row number, or the client's state, unless
    that is public or the log reveals it."""
    _, folder, store = captured(key, tmp_path, capture_rounds="last")
    files = {path: path.read_bytes() for path in folder.captures.rglob("*") if path.is_file()}
    for name in store.ids():
        truth = read_items(folder.vault / f"{name}.safetensors", name)
        record = store.read(name)
        revealed = toys.method(key).reconstruct_state(record.memory) is not None or record.personal_equals_public
        secrets = {k: v for k, v in truth.items() if v.numel() > 4 and (k == "x" or not revealed)}
        assert "x" in secrets
        for value in secrets.values():
            assert not any(value.numpy().tobytes() in data for data in files.values())
        header = json.dumps(store.header(name))
        for item in (*store.read(name).down, *store.read(name).up):
            header = header.replace(f'"{item}"', "")
        assert "index" not in header
        assert "residual" not in header
        assert "label" not in header.replace("label set", "")


@for_every_method
def test_captures_do_not_need_the_vault(key: str, tmp_path: Path):
    """Deleting the vault changes neither the records nor what an attack is given."""
    made, folder, store = captured(key, tmp_path)
    before = content(store)
    shutil.rmtree(folder.vault)
    for name, record in content(store).items():
        assert toys.same(record.up, before[name].up)
        assert toys.same(record.down, before[name].down)
        cap = capture(made.algorithm, made.net, record, history=True, seed=0)
        assert bool(cap.target) == bool(made.algorithm.up)
        assert cap.labels is None
        assert cap.state is None


def test_a_shared_start_is_marked_as_public_until_the_client_has_trained(tmp_path: Path):
    """Round 0: everybody's head is the public draw. Later it is not."""
    _, _, store = captured("fedrep", tmp_path / "shared", settings={"private_start": "shared"})
    public = {name: record.personal_equals_public for name, record in content(store).items()}
    assert all(flag == name.startswith("r000") for name, flag in public.items())
    _, _, store = captured("fedrep", tmp_path / "apart")
    assert not any(record.personal_equals_public for record in content(store).values())


@pytest.mark.parametrize(("key", "remembers"), [("fedavg", False), ("fedrep", False), ("fedproto", False)])
def test_a_memory_that_reveals_nothing_is_not_stored(key: str, remembers: bool, tmp_path: Path):
    _, _, store = captured(key, tmp_path)
    assert any(record.memory for record in content(store).values()) == remembers


@pytest.mark.parametrize("key", ["scaffold", "fedamp"])
def test_a_memory_that_reveals_the_state_is_stored_and_right(key: str, tmp_path: Path):
    made, folder, store = captured(key, tmp_path, rounds=5, participation=0.5, drop_rate=0.5)
    for name, record in content(store).items():
        truth = read_items(folder.vault / f"{name}.safetensors", name)
        state = {k.removeprefix("state."): v for k, v in truth.items() if k.startswith("state.")}
        found = made.algorithm.reconstruct_state(record.memory)
        assert found is not None
        assert toys.distance(found, state) == 0


def test_the_vault_holds_the_batch_and_the_state_before_the_work(tmp_path: Path):
    made, folder, store = captured("fedrep", tmp_path, capture_rounds="first")
    name = store.ids()[0]
    truth = read_items(folder.vault / f"{name}.safetensors", name)
    rows = truth["dataset_index"].numpy()
    assert torch.equal(truth["x"], made.federation.input.normalise(made.federation.dataset.pixels(rows)))
    assert truth["y"].tolist() == made.federation.dataset.labels[rows].tolist()
    head = {k: v for k, v in made.client_fresh(0).items() if k.startswith("head.")}
    assert toys.same({k.removeprefix("state."): v for k, v in truth.items() if k.startswith("state.")}, head)


def test_the_pool_holds_the_victims_and_training_rows_only(tmp_path: Path):
    made, folder, _ = captured("fedavg", tmp_path)
    pool = read_items(folder.vault / "pool.safetensors", "pool")
    training = {int(r) for shard in made.federation.shards for r in shard.train}
    assert set(pool["dataset_index"].tolist()) == training
    assert pool["images"].shape == (len(training), *toys.SHAPE)
    assert 0 <= float(pool["images"].min()) <= float(pool["images"].max()) <= 1


def test_local_work_that_does_not_repeat_itself_is_found_out(tmp_path: Path):
    """A method that counts its calls cannot be replayed, and no attack on it would mean anything."""

    class Moody(FedAvg):
        up: ClassVar = {**FedAvg.up, "mood": "statistics [n]"}

        def local(self, ctx: Local, state: Items, down: Items) -> Done:
            self.calls = getattr(self, "calls", 0) + 1
            done = super().local(ctx, state, down)
            return Done(done.state, done.up | {"mood": torch.ones(self.calls)})

    with pytest.raises(TrainingError, match=r"capture r000-c00-v0-probe: fedavg\.local does not repeat itself"):
        captured(Moody, tmp_path)


def test_random_clients_can_be_chosen_for_capture(tmp_path: Path):
    made, _, store = captured("fedavg", tmp_path, capture_clients="random:2", capture_rounds="1")
    clients = {store.header(name)["client"] for name in store.ids()}
    assert clients == set(made.config.captured_clients())
    assert len(clients) == 2
