"""Partitions: the invariants that every scheme keeps, and the requests that it refuses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sklearn.model_selection import train_test_split

from pflsec.core.errors import DataError
from pflsec.data import partitions
from pflsec.data.partitions import assign, dirichlet, iid, natural, pathological, pfllib_compat, split

slow = settings(max_examples=60, deadline=None)


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def labels_of(rows: int, classes: int, seed: int = 0) -> np.ndarray:
    """Labels where every class occurs, in random order and of unequal frequency."""
    rng = generator(seed)
    weights = rng.random(classes) + 0.1
    rest = rng.choice(classes, rows - classes, p=weights / weights.sum())
    return rng.permutation(np.concatenate([np.arange(classes), rest]))


def check(parts: list[np.ndarray], rows: int, clients: int, least: int = 2) -> None:
    assert len(parts) == clients
    assert all(part.dtype == np.int64 for part in parts)
    assert all((np.diff(part) > 0).all() for part in parts), "sorted, without repetition"
    assert min(len(part) for part in parts) >= least
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(rows)), "disjoint, and nothing is lost"


def same(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@slow
@given(rows=st.integers(2, 300), clients=st.integers(1, 40), seed=st.integers(0, 99))
def test_iid(rows: int, clients: int, seed: int):
    assume(rows >= 2 * clients)
    labels = generator(seed).integers(0, 5, rows)
    parts = iid(labels, clients, generator(seed))
    check(parts, rows, clients)
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert same(parts, iid(labels, clients, generator(seed)))


@slow
@given(
    clients=st.integers(1, 30),
    classes=st.integers(2, 15),
    k=st.integers(1, 15),
    spare=st.integers(0, 99),
    seed=st.integers(0, 99),
)
def test_pathological(clients: int, classes: int, k: int, spare: int, seed: int):
    assume(k <= classes <= k * clients)
    labels = np.concatenate([np.repeat(np.arange(classes), 2 * clients), np.zeros(spare, dtype=np.int64)])
    labels = generator(seed).permutation(labels) * 3  # gaps between the labels do not matter
    parts = pathological(labels, clients, generator(seed), k)
    check(parts, len(labels), clients)
    held = [set(labels[part].tolist()) for part in parts]
    assert all(len(classes_held) == k for classes_held in held)
    for label in np.unique(labels):
        shares = [int((labels[part] == label).sum()) for part in parts if label in labels[part]]
        assert max(shares) - min(shares) <= 1
    owners = [sum(label in classes_held for classes_held in held) for label in np.unique(labels)]
    assert max(owners) - min(owners) <= 1
    assert same(parts, pathological(labels, clients, generator(seed), k))


@slow
@given(
    rows=st.integers(12, 80),
    clients=st.integers(1, 12),
    classes=st.integers(2, 12),
    k=st.integers(1, 12),
    seed=st.integers(0, 99),
)
def test_pathological_with_few_rows_keeps_its_promises_or_refuses(
    rows: int, clients: int, classes: int, k: int, seed: int
):
    labels = labels_of(rows, classes, seed)
    try:
        parts = pathological(labels, clients, generator(seed), k)
    except DataError:
        limits = np.minimum(np.bincount(labels) // (2 if k == 1 else 1), clients)
        assert (  # one of the documented reasons
            k > classes or k * clients < classes or rows < 2 * clients or limits.sum() < k * clients or not limits.all()
        )
    else:
        check(parts, rows, clients)
        assert all(len(np.unique(labels[part])) == k for part in parts)


def test_pathological_is_random():
    labels = np.repeat(np.arange(10), 40)
    draws = [pathological(labels, 20, generator(seed), 2) for seed in range(40)]
    held = [[frozenset(labels[part].tolist()) for part in draw] for draw in draws]
    assert len({draw[0] for draw in held}) > 15
    assert any(max(draw[0]) < 5 for draw in held), "two classes from the first half can meet"
    assert 0 < sum(draw[0] == draw[1] for draw in held) < 40, "neighbouring clients are nothing special"


@slow
@given(
    rows=st.integers(20, 400),
    clients=st.integers(1, 40),
    classes=st.integers(2, 15),
    alpha=st.sampled_from([5e-324, 1e-300, 1e-6, 0.01, 0.1, 0.5, 1.0, 100.0, 1e300, 1.7e308]),
    share=st.floats(0, 1),
)
def test_dirichlet(rows: int, clients: int, classes: int, alpha: float, share: float):
    seed = rows
    assume(rows >= 2 * clients)
    labels = labels_of(rows, classes, seed)
    parts = dirichlet(labels, clients, generator(seed), alpha)
    check(parts, rows, clients, least=max(2, min(10, rows // (2 * clients))))
    assert same(parts, dirichlet(labels, clients, generator(seed), alpha))
    least = max(2, int(share * rows / clients))
    check(dirichlet(labels, clients, generator(seed), alpha, min_rows=least), rows, clients, least)


def test_dirichlet_skew_follows_alpha():
    labels = np.repeat(np.arange(10), 1000)

    def largest_share(alpha: float) -> float:
        parts = dirichlet(labels, 20, generator(), alpha)
        return float(np.mean([np.bincount(labels[part]).max() / len(part) for part in parts]))

    assert largest_share(1e-6) > 0.95
    assert largest_share(1e-6) > largest_share(0.1) > largest_share(1) > largest_share(100)
    assert largest_share(1e9) == pytest.approx(0.1, abs=0.01)


@pytest.mark.parametrize("alpha", [0.05, 0.5, 5.0])
def test_proportions_have_the_moments_of_a_dirichlet_distribution(alpha: float):
    clients, rng = 5, generator()
    draws = np.stack([partitions._proportions(clients, rng, alpha) for _ in range(20_000)])
    assert np.allclose(draws.sum(1), 1)
    assert draws.mean(0) == pytest.approx(np.full(clients, 0.2), abs=0.015)
    variance = 0.2 * 0.8 / (clients * alpha + 1)
    assert draws.var(0) == pytest.approx(np.full(clients, variance), rel=0.08)


@pytest.mark.parametrize("alpha", [5e-324, 1e-310, 1e-300, 1e-6, 1e6, 1e300, 1.7e308])
def test_proportions_at_the_ends_of_the_range(alpha: float):
    share = partitions._proportions(7, generator(), alpha)
    assert share.sum() == pytest.approx(1)
    assert share.max() == pytest.approx(1 if alpha < 1 else 1 / 7, rel=0.01)


def test_large_requests_end():
    check(dirichlet(labels_of(50_000, 10), 100, generator(), 0.1), 50_000, 100, least=10)
    check(dirichlet(labels_of(50_000, 100), 500, generator(), 0.3), 50_000, 500, least=10)
    check(dirichlet(labels_of(10_000, 10), 50, generator(), 0.01, min_rows=200), 10_000, 50, least=200)


def test_natural_follows_the_ids_in_order():
    ids = np.array([30, -2, 30, 7, -2, 7, 7])
    parts = natural(ids)
    check(parts, 7, 3)
    assert [part.tolist() for part in parts] == [[1, 4], [3, 5, 6], [0, 2]]
    assert same(parts, natural(ids, 3))
    assert same(parts, natural(ids, 0))


TEN = np.repeat(np.arange(10), 10)
REFUSED: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: iid(TEN, 51, generator()),
        "51 clients were asked for, but there are 100 rows.*least 2.*most 50",
    ),
    (lambda: iid(TEN, 0, generator()), "clients must be a whole number of at least 1, but is 0"),
    (lambda: iid(TEN, -3, generator()), "clients must be a whole number of at least 1, but is -3"),
    (lambda: iid(TEN, True, generator()), "clients must be a whole number"),
    (lambda: iid(TEN / 2, 2, generator()), "vector of whole numbers"),
    (lambda: iid(TEN[:, None], 2, generator()), "vector of whole numbers"),
    (lambda: deal(4, 2), "8 places for 10 classes.*at least 5 clients, or 3 classes"),
    (lambda: deal(20, 11), "classes_per_client is 11, but only 10 classes occur"),
    (lambda: deal(20, 0), "classes_per_client must be a whole number of at least 1"),
    (lambda: deal(50, 3), "need 150 shares of classes, but the classes have rows for 100"),
    (lambda: pathological(np.append(TEN, 77), 20, generator(), 1), "class 77 has 1 row.*at least 2 classes"),
    (lambda: dirichlet(TEN, 51, generator(), 0.1), "51 clients were asked for, but there are 100 rows"),
    (lambda: dirichlet(TEN, 20, generator(), 0.1, 6), "20 clients with at least 6 rows each need 120 rows"),
    (lambda: dirichlet(TEN, 20, generator(), 0.1, 1), "min_rows must be a whole number of at least 2"),
    (lambda: natural(TEN, 9), "10 natural clients, but 9 were asked for; ask for 10, or for 0"),
    (lambda: natural(TEN, 11), "10 natural clients, but 11 were asked for"),
    (lambda: natural(np.append(TEN, 42)), "natural client 42 has 1 row.*least 2"),
    (lambda: request("natural", ids=None), "'natural' needs client ids, and the data have none"),
    (lambda: request("dirichle"), "partition 'dirichle' is not known; did you mean dirichlet?"),
    (lambda: request("pfllib-compatt"), "not known; did you mean pfllib-compat?"),
    (lambda: pfllib_compat(TEN, 51, 0, 0.1), "51 clients were asked for, but there are 100 rows"),
    (lambda: pfllib_compat(TEN, 0, 0, 0.1), "clients must be a whole number of at least 1, but is 0"),
    (lambda: pfllib_compat(TEN, 5, 2**32, 0.1), "needs a seed below 2.32, but got 4294967296; PFLlib itself uses 1"),
    (lambda: pfllib_compat(TEN, 5, -1, 0.1), "seed must be a whole number of at least 0"),
    (lambda: pfllib_compat(TEN, 5, 0, 0.0), "alpha must be a positive, finite number"),
    (
        lambda: pfllib_compat(TEN // 5, 3, 0, 1e-300),
        "drawn 1000 times, but never gave each of 3 clients 16 rows.*larger alpha",
    ),
    (lambda: request("iid", clients=None), "clients must be a whole number of at least 1, but is None"),
]


def deal(clients: int, classes_per_client: int) -> list[np.ndarray]:
    return pathological(TEN, clients, generator(), classes_per_client)


def request(scheme: str, **changes: Any) -> list[np.ndarray]:
    options: dict[str, Any] = {
        "labels": TEN,
        "ids": TEN,
        "clients": 10,
        "alpha": 0.1,
        "classes_per_client": 2,
    }
    return assign(scheme, generator(), **(options | changes))


@pytest.mark.parametrize(("ask", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refused(ask: Callable[[], Any], message: str):
    with pytest.raises(DataError, match=message):
        ask()


@pytest.mark.parametrize("alpha", [0, 0.0, -1.0, float("nan"), float("inf"), "0.1", True, None])
def test_alpha_is_positive_and_finite(alpha: Any):
    with pytest.raises(DataError, match=r"alpha must be a positive, finite number.* but is"):
        dirichlet(TEN, 5, generator(), alpha)


@pytest.mark.parametrize("scheme", partitions.SCHEMES)
def test_schemes_by_name(scheme: str):
    check(request(scheme), len(TEN), 10)
    assert same(request(scheme), request(scheme))


# --- PFLlib's partition with PFLlib's split


def test_pfllibs_mnist_row_by_row(shared_data: Path):
    """The clients that PFLlib publishes for MNIST: Dirichlet 0.1, 20 clients, seed 1, in the order of its files."""
    with np.load(shared_data / "mnist" / "mnist70k.npz") as mnist:
        labels = mnist["labels"]
    with np.load(shared_data / "mnist" / "pfllib_dir01_order.npz") as order:
        saved = [(order[f"train_{client}"], order[f"test_{client}"]) for client in range(20)]
    sides = pfllib_compat(labels, 20, 1, 0.1)
    assert len(sides) == 20
    for (train, test), (saved_train, saved_test) in zip(sides, saved, strict=True):
        assert train.tolist() == saved_train.tolist()
        assert test.tolist() == saved_test.tolist()


@slow
@given(
    rows=st.integers(8, 400),
    clients=st.integers(1, 12),
    classes=st.integers(2, 8),
    alpha=st.sampled_from([0.1, 0.5, 10.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_pfllib_compat(rows: int, clients: int, classes: int, alpha: float, seed: int):
    assume(rows >= 2 * clients)
    labels = labels_of(rows, classes, seed)
    try:
        sides = pfllib_compat(labels, clients, seed, alpha)
    except DataError:
        assert alpha < 1, "nearly equal shares are always enough"
        assert clients > 1, "one client has everything"
        return
    parts = [np.concatenate(side) for side in sides]
    check([np.sort(part) for part in parts], rows, clients, least=max(2, min(40, rows // (2 * clients))))
    for (train, test), part in zip(sides, parts, strict=True):
        assert len(train) == int(0.75 * len(part))
        assert len(test) >= 1
    again = pfllib_compat(labels, clients, seed, alpha)
    assert same([np.concatenate(side) for side in again], parts)


def test_pfllib_compat_draws_from_one_stream_and_splits_as_scikit_learn_does():
    labels = labels_of(2000, 10)
    rng = np.random.RandomState(0)
    draws = 0
    while True:
        draws += 1
        parts = partitions._pfllib_draw(labels, 20, rng, 0.4)
        if min(len(part) for part in parts) >= 40:
            break
    assert draws > 1, "the first draw is no good here, and the second goes on with the stream"
    expected: list[Any] = [train_test_split(part, train_size=0.75, shuffle=True, random_state=rng) for part in parts]
    for sides, wanted in zip(pfllib_compat(labels, 20, 0, 0.4), expected, strict=True):
        assert same(list(sides), list(wanted))


def test_pfllib_compat_caps_the_clients_that_have_their_share():
    """Two clients, one class first: who holds half of the rows gets nothing of the second class."""
    labels = np.repeat([0, 1], [900, 100])
    capped = 0
    for seed in range(20):
        held = [np.bincount(labels[np.concatenate(side)], minlength=2) for side in pfllib_compat(labels, 2, seed, 0.5)]
        full = [counts for counts in held if counts[0] >= 500]
        assert all(counts[1] == 0 for counts in full)
        capped += len(full)
    assert capped > 10


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("alpha", [1e-300, 1e-6])
def test_pfllib_compat_ends_where_no_proportions_can_be_drawn(alpha: float):
    with np.errstate(all="raise"), pytest.raises(DataError, match="drawn 1000 times"):
        pfllib_compat(TEN, 5, 0, alpha)
    assert len(pfllib_compat(TEN, 1, 0, alpha)) == 1


# --- one client's rows: training and testing


@slow
@given(
    sizes=st.lists(st.integers(1, 25), min_size=1, max_size=8),
    fraction=st.floats(0.01, 0.99),
    images=st.integers(1, 60),
    seed=st.integers(0, 99),
)
def test_split(sizes: list[int], fraction: float, images: int, seed: int):
    labels = np.repeat(np.arange(len(sizes)), sizes)
    assume(len(labels) >= 2)
    # Copies have the label of their original: the number of an image decides its class.
    groups = generator(seed).integers(0, images, len(labels)) * 100 + labels
    train, test = split(labels, groups, fraction, generator(seed))
    assert np.array_equal(np.sort(np.concatenate([train, test])), np.arange(len(labels)))
    assert len(train)
    assert len(test)
    assert (np.diff(train) > 0).all()
    assert (np.diff(test) > 0).all()
    for label, size in enumerate(sizes):
        in_train, in_test = groups[train][labels[train] == label], groups[test][labels[test] == label]
        if size == 1:
            assert len(in_train) == 1 or max(sizes) == 1
            continue
        assert len(in_train)
        assert len(in_test)
        straddling = set(in_train.tolist()) & set(in_test.tolist())
        assert not straddling or len(set(groups[labels == label].tolist())) == 1
    again = split(labels, groups, fraction, generator(seed))
    assert np.array_equal(again[0], train)


def test_split_is_stratified():
    labels = np.repeat(np.arange(4), [400, 200, 100, 40])
    _, test = split(labels, np.arange(len(labels)), 0.25, generator())
    assert np.bincount(labels[test]).tolist() == [100, 50, 25, 10]


def test_split_of_a_client_with_one_row_of_each_class():
    train, test = split(np.array([4, 9]), np.array([0, 1]), 0.25, generator())
    assert (len(train), len(test)) == (1, 1)


def test_copies_with_different_labels_stay_together():
    labels = np.repeat([0, 1], 20)
    groups = np.tile(np.arange(20), 2)
    train, test = split(labels, groups, 0.25, generator())
    assert not set(groups[train].tolist()) & set(groups[test].tolist())


def test_a_group_that_is_larger_than_the_test_share_is_still_tested_on():
    groups = np.array([1, 1, 1, 1, 1, 2, 2, 2, 2])
    _, test = split(np.zeros(9, dtype=np.int64), groups, 0.25, generator())
    assert test.tolist() == [5, 6, 7, 8]
