"""What a run is said to cost: by what its defenses do, and not by where they act."""

from typing import Any

import pytest

from pflsec.core.items import Items
from pflsec.defenses.uplink.clip import Clip
from pflsec.runtime import estimate
from pflsec.training.local import LocalWork
from tests import toys


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every look at the clock be one second after the last: all work takes as long."""
    ticks = iter(range(1000))
    monkeypatch.setattr(estimate.time, "perf_counter", lambda: float(next(ticks)))


def cost(*defense: str) -> estimate.Cost:
    return estimate.estimate(toys.setup("fedavg", defense=list(defense), capture_rounds="last"))


def test_only_noised_steps_count_several_times():
    assert cost("soteria").seconds == cost().seconds
    assert cost("dp-sgd:noise_multiplier=1").seconds == pytest.approx(estimate.PRIVATE * cost().seconds)


@pytest.mark.parametrize("defense", ["clip", "prune:feedback=true"])
def test_an_upload_is_timed_where_the_wire_is_defended(defense: str):
    """A second for each of 4 clients in 3 rounds."""
    assert cost(defense).seconds - cost().seconds == pytest.approx(4 * 3 * estimate.EVALUATION)


def test_what_a_defense_of_the_wire_takes_is_timed(monkeypatch: pytest.MonkeyPatch):
    """It looks at the clock 9 times more."""
    plain, protect = cost("clip").seconds, Clip.protect

    def slow(self: Clip, *rest: Any) -> Items:
        for _ in range(9):
            estimate.time.perf_counter()
        return protect(self, *rest)

    monkeypatch.setattr(Clip, "protect", slow)
    assert cost("clip").seconds - plain == pytest.approx(9 * 4 * 3 * estimate.EVALUATION)


def test_a_defense_that_changes_gradients_works_in_what_is_timed(monkeypatch: pytest.MonkeyPatch):
    seen: list[Any] = []
    fit = LocalWork.fit
    monkeypatch.setattr(LocalWork, "fit", lambda self, *a, **k: (seen.append(self.shaping), fit(self, *a, **k))[1])
    cost("soteria")
    assert seen
    assert all(one is not None for one in seen)


def test_uploads_lie_in_the_vault_too_where_the_wire_is_defended():
    plain, defended = cost(), cost("clip")
    made = toys.setup("fedavg", capture_rounds="last")
    assert defended.bytes - plain.bytes > 4 * 4 * sum(v.numel() for v in made.server_first.values())
