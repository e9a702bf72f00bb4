"""A federation: disjoint clients, one normalisation, an honest table, and test rows kept out of training."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pflsec.core.errors import DataError
from pflsec.core.inputs import InputSpec
from pflsec.data.datasets import Dataset, from_arrays, load
from pflsec.data.federation import Federation, Shard, build

SCHEMES = ("iid", "pathological", "dirichlet", "natural", "pfllib-compat")


def toy(rows: int = 200, channels: int = 3, **more: Any) -> Dataset:
    """Random images, all different, 4 classes, 5 natural clients of unequal size; a fifth are test rows."""
    rng = np.random.default_rng(1)
    images = rng.integers(0, 256, (rows, channels, 4, 5), dtype=np.uint8)
    values: dict[str, Any] = {
        "client_ids": np.concatenate([np.repeat(np.arange(5), 10), rng.integers(0, 5, rows - 50) ** 2 // 4]) + 3,
        "is_test": np.arange(rows) % 5 == 0,
    }
    return from_arrays(images, np.arange(rows) % 4, name="toy", **(values | more))


def make(data: Dataset, **changes: Any) -> Federation:
    options: dict[str, Any] = {"partition": "dirichlet", "clients": 5, "seed": 0, "alpha": 0.5}
    return build(data, **(options | changes))


def all_rows(fed: Federation, side: str) -> np.ndarray:
    return np.concatenate([getattr(shard, side) for shard in fed.shards])


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load("digits")


@pytest.fixture(scope="session")
def mnist(shared_data: Path) -> Dataset:
    return load(f"npz:{shared_data / 'mnist' / 'mnist70k.npz'}")


@pytest.fixture(scope="session")
def cifar(shared_data: Path) -> Dataset:
    return load(f"npz:{shared_data / 'cifar10' / 'cifar10_train10k.npz'}")


# --- who holds what


@pytest.mark.parametrize("partition", SCHEMES)
def test_every_row_has_one_place(partition: str):
    data = toy()
    fed = make(data, partition=partition)
    rows = np.concatenate([all_rows(fed, "train"), all_rows(fed, "test")])
    assert np.array_equal(np.sort(rows), np.arange(200))
    assert fed.clients == 5
    assert all(len(shard.train) and len(shard.test) for shard in fed.shards)
    assert np.array_equal(fed.global_test, np.sort(all_rows(fed, "test")))
    assert fed.sizes() == [len(shard.train) for shard in fed.shards]


@settings(max_examples=25, deadline=None)
@given(
    clients=st.integers(1, 20),
    seed=st.integers(0, 9),
    fraction=st.floats(0.05, 0.95),
    alpha=st.sampled_from([1e-6, 0.1, 10]),
)
def test_any_request_gives_whole_clients(clients: int, seed: int, fraction: float, alpha: float):
    fed = make(toy(), clients=clients, seed=seed, test_fraction=fraction, alpha=alpha)
    assert fed.clients == clients
    assert np.array_equal(np.sort(np.concatenate([all_rows(fed, "train"), all_rows(fed, "test")])), np.arange(200))
    for client in range(clients):
        x, y = fed.train(client)
        assert x.shape == (fed.sizes()[client], 3, 4, 5)
        assert len(x) == len(y) > 0
        assert len(fed.test(client)[1]) > 0


def test_the_same_seed_gives_the_same_federation():
    first, again, other = (make(toy(), seed=seed) for seed in (3, 3, 4))
    assert first.fingerprint() == again.fingerprint()
    assert first.fingerprint() != other.fingerprint()
    assert len(first.fingerprint()) == 64
    assert make(toy(), seed=np.int64(3)).fingerprint() == first.fingerprint()


def test_the_fingerprint_sees_a_row_change_sides():
    fed = make(toy())
    before = fed.fingerprint()
    fed.shards[0].train[0], fed.shards[0].test[0] = fed.shards[0].test[0], fed.shards[0].train[0]
    assert fed.fingerprint() != before
    one, other = (
        replace(fed, shards=(Shard(np.arange(cut), np.arange(cut, 200)),), global_test=np.arange(0))
        for cut in (100, 101)
    )
    assert one.fingerprint() != other.fingerprint()


@pytest.mark.parametrize("partition", SCHEMES)
def test_the_global_generators_are_left_alone(partition: str):
    np.random.seed(987)  # a state that no other test leaves behind
    state, torch_state = str(np.random.get_state()), torch.random.get_rng_state()
    make(toy(), partition=partition).pool(20)
    assert str(np.random.get_state()) == state
    assert torch.equal(torch.random.get_rng_state(), torch_state)


@pytest.mark.parametrize("partition", ["iid", "dirichlet", "pathological"])
def test_the_printed_table_is_what_is_loaded(digits: Dataset, partition: str):
    fed = make(digits, partition=partition, clients=20, alpha=0.1)
    table = json.loads(json.dumps(fed.histogram()))
    for side, loaded in (("train", fed.train), ("test", fed.test)):
        counts = np.array(table[side]["counts"])
        for client in range(20):
            assert counts[client].tolist() == torch.bincount(loaded(client)[1], minlength=10).tolist()
        assert table[side]["per_client"] == counts.sum(1).tolist()
        assert table[side]["per_class"] == counts.sum(0).tolist()
        assert table[side]["total"] == counts.sum()
    assert table["train"]["per_client"] == fed.sizes()
    assert table["train"]["total"] + table["test"]["total"] == 1797
    assert table["global_test"]["per_class"] == torch.bincount(fed.global_test_set()[1], minlength=10).tolist()
    assert table["class_names"] == [str(c) for c in range(10)]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("clients", [10, 20])
def test_a_clients_training_and_test_rows_have_the_same_classes(digits: Dataset, clients: int, seed: int):
    table = make(digits, clients=clients, alpha=0.1, seed=seed).histogram()
    for train, test in zip(np.array(table["train"]["counts"]), np.array(table["test"]["counts"]), strict=True):
        if train.sum() + test.sum() >= 50:
            assert np.abs(train / train.sum() - test / test.sum()).sum() / 2 < 0.1
        assert not (test[train == 0].any() and test.sum() > 1)


def test_the_test_fraction_is_kept(digits: Dataset):
    for fraction in (0.1, 0.25, 0.5):
        fed = make(digits, partition="iid", clients=10, test_fraction=fraction)
        assert len(fed.global_test) / 1797 == pytest.approx(fraction, abs=0.02)


def test_copies_of_an_image_do_not_straddle():
    images = np.repeat(np.random.default_rng(0).integers(0, 256, (60, 4, 4), dtype=np.uint8), 3, axis=0)
    data = from_arrays(images, np.arange(180) // 3 % 3)
    for seed in range(5):
        fed = make(data, partition="iid", clients=4, seed=seed)
        for shard in fed.shards:
            assert not {i.tobytes() for i in data.images[shard.train]} & {i.tobytes() for i in data.images[shard.test]}


# --- test rows that the publisher set aside


@pytest.mark.parametrize("partition", ["iid", "pathological", "dirichlet"])
def test_given_test_rows_are_never_trained_on(partition: str):
    data = toy()
    assert data.is_test is not None
    fed = make(data, partition=partition, test="given")
    assert np.array_equal(fed.global_test, np.flatnonzero(data.is_test))
    dealt = np.concatenate([all_rows(fed, "train"), all_rows(fed, "test")])
    assert np.array_equal(np.sort(dealt), np.flatnonzero(~data.is_test))


def test_the_official_test_set_of_usps_is_kept_apart(shared_data: Path):
    data = load(f"npz:{shared_data / 'usps' / 'usps.npz'}")
    fed = make(data, clients=10, alpha=0.1, test="given")
    assert len(fed.global_test) == 2007
    assert not set(all_rows(fed, "train").tolist()) & set(fed.global_test.tolist())
    assert sum(fed.sizes()) + fed.histogram()["test"]["total"] == 7291
    assert fed.histogram()["global_test"]["total"] == 2007


def test_natural_clients_of_mnist_with_their_given_test_rows(mnist: Dataset):
    assert mnist.client_ids is not None
    assert mnist.is_test is not None
    fed = build(mnist, partition="natural", clients=0, seed=0, test="given")
    assert fed.clients == 20
    for client, shard in enumerate(fed.shards):
        own = mnist.client_ids == client
        assert np.array_equal(shard.train, np.flatnonzero(own & ~mnist.is_test))
        assert np.array_equal(shard.test, np.flatnonzero(own & mnist.is_test))
    assert np.array_equal(fed.global_test, np.flatnonzero(mnist.is_test))
    assert fed.fingerprint() == build(mnist, partition="natural", clients=20, seed=9, test="given").fingerprint()


def test_pfllibs_clients_of_mnist(mnist: Dataset):
    """The file says which client of PFLlib's holds which row, and whether it tests on it."""
    assert mnist.client_ids is not None
    assert mnist.is_test is not None
    fed = build(mnist, partition="pfllib-compat", clients=20, seed=1, alpha=0.1)
    for client, shard in enumerate(fed.shards):
        own = mnist.client_ids == client
        assert np.array_equal(shard.train, np.flatnonzero(own & ~mnist.is_test))
        assert np.array_equal(shard.test, np.flatnonzero(own & mnist.is_test))
    assert np.array_equal(fed.global_test, np.flatnonzero(mnist.is_test))
    natural = build(mnist, partition="natural", clients=0, seed=0, test="given")
    assert fed.fingerprint() == natural.fingerprint()
    assert fed.fingerprint() != build(mnist, partition="pfllib-compat", clients=20, seed=2, alpha=0.1).fingerprint()


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"test": "official"}, "test must be 'split' or 'given', but is 'official'"),
    ({}, {"test_fraction": 0.0}, "test_fraction must lie between 0 and 1"),
    ({}, {"test_fraction": 1}, "test_fraction must lie between 0 and 1"),
    ({}, {"test_fraction": float("nan")}, "test_fraction must lie between 0 and 1"),
    ({}, {"clients": 101}, "101 clients were asked for, but there are 200 rows"),
    ({}, {"clients": 81, "test": "given"}, "81 clients were asked for, but there are 160 rows"),
    ({}, {"clients": 0}, "clients must be a whole number of at least 1"),
    ({}, {"alpha": 0}, "alpha must be a positive"),
    ({}, {"partition": "pfllib-compat", "test": "given"}, "own random quarter of each client, so --test given cannot"),
    ({}, {"partition": "pfllib-compat", "test_fraction": 0.5}, "so test_fraction 0.5 cannot"),
    ({}, {"partition": "pfllib-compat", "clients": None}, "clients must be a whole number of at least 1"),
    ({}, {"partition": "pfllib-compat", "clients": 101}, "101 clients were asked for, but there are 200 rows"),
    ({}, {"partition": "diriclet"}, "did you mean dirichlet"),
    ({}, {"partition": "pathological", "classes_per_client": 5}, "only 4 classes occur"),
    ({}, {"partition": "natural", "clients": 4}, "the data have 5 natural clients, but 4 were asked for"),
    ({"client_ids": None}, {"partition": "natural"}, "needs client ids, and the data have none"),
    ({"is_test": None}, {"test": "given"}, "'toy' marks no test rows, so --test given cannot"),
    ({"is_test": np.zeros(200) > 1}, {"test": "given"}, "'toy' does not have both test and training rows"),
    ({"is_test": np.zeros(200) < 1}, {"test": "given"}, "'toy' does not have both test and training rows"),
    (
        {"client_ids": np.arange(200) % 5},
        {"partition": "natural", "test": "given"},
        "'toy': natural client 0 has no training row",
    ),
    (
        {"client_ids": np.arange(200) % 5 + 10, "is_test": np.arange(200) % 10 == 0},
        {"partition": "natural", "test": "given"},
        "'toy': natural client 11 has no test row",
    ),
]


@pytest.mark.parametrize(("data", "request_", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_refused(data: dict[str, Any], request_: dict[str, Any], message: str):
    with pytest.raises(DataError, match=message):
        make(toy(**data), **request_)


@pytest.mark.parametrize("client", [-1, 5])
def test_clients_are_numbered_from_zero(client: int):
    with pytest.raises(DataError, match=f"no client {client}: the 5 clients"):
        make(toy()).train(client)


# --- one normalisation


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normalising_can_be_undone(dtype: torch.dtype):
    fed = make(toy())
    pixels = torch.rand(50, 3, 4, 5, dtype=dtype)
    x = fed.input.normalise(pixels)
    assert x.dtype == dtype
    assert (fed.input.pixels(x) - pixels).abs().max() < 1e-6
    low, high = fed.input.box(x)
    assert torch.equal(low, fed.input.normalise(torch.zeros(3, 1, 1, dtype=dtype)))
    assert torch.equal(high, fed.input.normalise(torch.ones(3, 1, 1, dtype=dtype)))


def check_channels(fed: Federation) -> None:
    """Over all training rows: mean 0, standard deviation 1, and the pixels come back inside [0, 1]."""
    x = torch.cat([fed.train(client)[0] for client in range(fed.clients)])
    assert x.dtype == torch.float32
    assert x.mean((0, 2, 3)).abs().max() < 1e-3
    assert (x.std((0, 2, 3)) - 1).abs().max() < 1e-3
    for client in (0, fed.clients - 1):
        pixels = fed.input.pixels(fed.train(client)[0])
        assert (pixels - fed.dataset.pixels(fed.shards[client].train)).abs().max() < 1e-6
        assert pixels.min() > -1e-6
        assert pixels.max() < 1 + 1e-6


def test_channel_statistics_of_digits(digits: Dataset):
    check_channels(make(digits, clients=20, alpha=0.1))


def test_channel_statistics_of_cifar(cifar: Dataset):
    fed = make(cifar, clients=20, alpha=0.1)
    check_channels(fed)
    assert fed.input.shape == (3, 32, 32)
    x = torch.cat([fed.test(client)[0] for client in range(20)])
    assert x.mean((0, 2, 3)).abs().max() < 0.02
    assert (x.std((0, 2, 3)) - 1).abs().max() < 0.05


def test_only_training_rows_count_for_the_statistics():
    data = toy(is_test=np.arange(200) >= 150)
    dark = from_arrays(
        np.where(np.arange(200)[:, None, None, None] >= 150, 0, data.images),
        data.labels,
        is_test=data.is_test,
    )
    assert make(data, test="given").input == make(dark, test="given").input
    fed = make(data)
    pixels = data.images[np.sort(all_rows(fed, "train"))] / 255
    assert fed.input.mean == pytest.approx(pixels.mean((0, 2, 3)), abs=1e-6)
    assert fed.input.std == pytest.approx(pixels.std((0, 2, 3)), abs=1e-6)
    assert torch.allclose(fed.mean_image(), torch.from_numpy(pixels.mean(0)).float(), atol=1e-6)
    assert fed.mean_image().dtype == torch.float32


def test_a_constant_channel_is_only_shifted():
    images = toy().images.copy()
    images[:, 1] = 77
    fed = make(from_arrays(images, np.arange(200) % 4))
    assert fed.input.std[1] == 1
    assert fed.train(0)[0][:, 1].abs().max() < 1e-6


def test_the_description_of_the_inputs_survives_a_file():
    spec = make(toy()).input
    assert InputSpec.from_dict(json.loads(json.dumps(spec.as_dict()))) == spec


def test_images_are_made_on_demand_and_are_copies():
    fed = make(toy())
    x, y = fed.train(0)
    x.zero_()
    y.zero_()
    fresh, labels = fed.train(0)
    assert fresh.abs().sum() > 0
    assert labels.tolist() == fed.dataset.labels[fed.shards[0].train].tolist()
    assert fed.dataset.images.dtype == np.uint8


# --- the identification pool


def test_the_pool_holds_the_victims_and_training_rows_only():
    fed = make(toy())
    rows = np.sort(all_rows(fed, "train"))
    victims = rows[[1, 30, 77]].tolist()
    pool = fed.pool(limit=40, include=victims)
    assert len(pool) == 40
    assert (np.diff(pool) > 0).all()
    assert set(victims) <= set(pool.tolist()) <= set(rows.tolist())
    assert np.array_equal(pool, fed.pool(limit=40, include=victims[::-1] + victims))
    assert np.array_equal(fed.pool(), rows), "a small federation is in its pool as a whole"
    assert fed.pool(limit=2, include=victims).tolist() == victims, "victims are never left out"
    assert len(set(fed.pool(limit=40).tolist()) & set(pool.tolist())) >= 37, "victims replace, they do not reshuffle"
    assert not np.array_equal(fed.pool(40), rows[:40])


def test_a_test_row_cannot_be_in_the_pool():
    fed = make(toy())
    row = int(fed.shards[2].test[0])
    with pytest.raises(DataError, match=f"row {row} cannot be in the pool"):
        fed.pool(include=[row])
