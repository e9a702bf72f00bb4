"""Who takes part, and whose upload is lost."""

from collections import Counter

import pytest

from pflsec.runtime import cohort


@pytest.mark.parametrize("clients", [1, 2, 3, 7, 20])
@pytest.mark.parametrize("participation", [0.01, 0.1, 0.25, 0.5, 1.0])
def test_a_cohort_has_the_asked_share_and_at_least_one_client(clients: int, participation: float):
    for t in range(5):
        drawn = cohort.draw(0, t, clients, participation)
        assert len(drawn) == max(1, round(participation * clients))
        assert drawn == sorted(set(drawn))
        assert set(drawn) <= set(range(clients))


def test_a_cohort_is_a_function_of_seed_and_round():
    draws = {(seed, t): tuple(cohort.draw(seed, t, 20, 0.5)) for seed in (0, 1) for t in range(10)}
    assert draws == {(seed, t): tuple(cohort.draw(seed, t, 20, 0.5)) for seed, t in draws}
    assert len(set(draws.values())) == 20


def test_every_client_has_its_turn():
    assert {c for t in range(40) for c in cohort.draw(0, t, 20, 0.1)} == set(range(20))


def test_by_size_larger_clients_come_more_often():
    """One client a round, chances 1:3: over 2000 rounds client 1 comes 1500 times, standard deviation 19."""
    counts = Counter(cohort.draw(0, t, 2, 0.5, weights=[1, 3])[0] for t in range(2000))
    assert abs(counts[1] - 1500) < 4 * 19


def test_equal_chances_are_equal():
    """2 of 10 clients in 1000 rounds: 200 times each, standard deviation 13."""
    counts = Counter(c for t in range(1000) for c in cohort.draw(0, t, 10, 0.2))
    assert all(abs(n - 200) < 4 * 13 for n in counts.values())


@pytest.mark.parametrize(("rate", "count"), [(0.0, 0), (0.25, 1), (0.5, 2), (0.9, 4), (1.0, 4)])
def test_the_asked_share_of_uploads_is_lost(rate: float, count: int):
    for t in range(10):
        assert len(cohort.lost(0, t, [2, 3, 5, 7], rate)) == count
        assert cohort.lost(0, t, [2, 3, 5, 7], rate) <= {2, 3, 5, 7}


def test_losses_are_drawn_apart_from_the_cohort():
    lost = {frozenset(cohort.lost(0, t, range(6), 0.5)) for t in range(20)}
    assert len(lost) > 5
    assert cohort.lost(3, 1, range(6), 0.5) == cohort.lost(3, 1, range(6), 0.5)
