"""What an upload says that follows the client's own draws is not compared: no replay can meet it."""

from pathlib import Path

import pytest
import torch

from pflsec import api
from tests.attacks.victims import attack, victim


def test_fedgens_head_follows_the_noise_of_its_generator_and_the_rest_is_found_exactly():
    v = victim("fedgen", after=3)
    cap = v.capture()
    assert cap.by_chance == ("head.bias", "head.weight")
    assert cap.target.keys() == {name for name in v.setup.net.shapes if name.startswith("body.")}
    found = attack("inverting-gradients", cap, iterations=300, restarts=1)
    assert v.psnr(found.x) > 60  # 49 dB where the head counts with noise of the attacker's own


def test_before_the_generator_is_used_its_noise_moves_nothing():
    assert victim("fedgen").capture().by_chance == ()


@pytest.mark.parametrize("key", ["fedavg", "fedrep", "scaffold"])
def test_work_without_draws_is_compared_whole(key: str):
    assert victim(key, after=2).capture().by_chance == ()


def test_where_draws_move_all_that_speaks_of_the_data_all_is_compared():
    cap = victim("fedfomo", batch=2).capture()  # it sets a part of its rows aside, at random
    assert cap.by_chance == ()
    assert "head.weight" in cap.target


def test_only_some_items_of_a_capture_are_compared_everywhere():
    v = victim("fedavg")
    cap = v.capture().comparing({"head.bias"})
    x = v.x.double()
    assert cap.target.keys() == cap.replay(x, v.y, v.state).keys() == {"head.bias"}
    assert cap.pullback(x, torch.ones(1, v.setup.net.feature_dim, dtype=torch.float64)) == {}


def test_a_row_says_what_was_not_compared(tmp_path: Path):
    run = api.train(
        algo="fedgen",
        model="mlp",
        clients=4,
        rounds=3,
        capture_rounds="2",
        capture_clients="0",
        victims=1,
        runs_dir=tmp_path,
    )
    scores = api.attack(run, "inverting-gradients", iterations=2, restarts=1, controls=False, lpips="none")
    assert not isinstance(scores, list)
    assert (
        "not compared, since it follows the client's own draws: head.bias, head.weight"
        in scores.table["reason"].iloc[0]
    )
