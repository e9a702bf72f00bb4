"""Where a message says nothing about the victim, no attack may seem to find it."""

import statistics

import pytest
import torch

from pflsec.core.items import floating
from pflsec.leakage.images import psnr
from tests.attacks.victims import Victim, attack, gradient_norm, victim

SMALL = {
    "idlg": {"iterations": 10, "restarts": 1, "rescue": 0},
    "inverting-gradients": {"iterations": 60, "restarts": 1},
    "grad-inversion": {"iterations": 100},
}
every_attack = pytest.mark.parametrize("name", SMALL)
SLACK = 1.0  # dB


@pytest.fixture(scope="module")
def victims() -> list[Victim]:
    return [victim(client=client, first=first) for client in (1, 3) for first in range(3)]


def blind(v: Victim) -> float:
    """Return the PSNR of the best guess without any message: the mean of all training images."""
    true = v.record.input.pixels(v.x.double())
    return psnr(true[0], torch.as_tensor(v.setup.federation.mean_image()).double())


def gain(victims: list[Victim], name: str, shown: list[Victim]) -> float:
    """Return by how many dB an attack that is shown other messages beats the blind guess, as the median over victims."""
    found = [attack(name, other.capture(), **SMALL[name]) for other in shown]
    return statistics.median(v.psnr(f.x) - blind(v) for v, f in zip(victims, found, strict=True))


@every_attack
def test_the_victims_own_messages_give_far_more_than_a_blind_guess(name: str, victims: list[Victim]):
    assert gain(victims, name, victims) > 10


@every_attack
def test_another_victims_messages_give_no_more_than_a_blind_guess(name: str, victims: list[Victim]):
    assert gain(victims, name, victims[1:] + victims[:1]) <= SLACK


@every_attack
def test_numbers_in_another_order_give_no_more_than_a_blind_guess(name: str, victims: list[Victim]):
    assert gain(victims, name, [shuffled(v) for v in victims]) <= SLACK


@every_attack
def test_noise_of_the_same_size_gives_no_more_than_a_blind_guess(name: str, victims: list[Victim]):
    assert gain(victims, name, [noisy(v) for v in victims]) <= SLACK


def shuffled(v: Victim) -> Victim:
    """Return the victim with the numbers of each item of its change permuted."""
    rng = torch.Generator().manual_seed(1)

    def mix(name: str, sent: torch.Tensor) -> torch.Tensor:
        change = (sent - v.record.down[name]).flatten()
        return v.record.down[name] + change[torch.randperm(len(change), generator=rng)].view_as(sent)

    return _changed(v, mix)


def noisy(v: Victim) -> Victim:
    """Return the victim with noise of the same norm in place of its change."""
    rng = torch.Generator().manual_seed(2)
    change = {k: u - v.record.down[k] for k, u in floating(v.record.up).items()}
    noise = {k: torch.randn(u.shape, generator=rng) for k, u in change.items()}
    scale = gradient_norm(change) / gradient_norm(noise)
    return _changed(v, lambda name, sent: v.record.down[name] + scale * noise[name])


def _changed(v: Victim, fn) -> Victim:
    up = v.record.up
    return v.with_upload({k: fn(k, sent) if sent.is_floating_point() else sent for k, sent in up.items()})
