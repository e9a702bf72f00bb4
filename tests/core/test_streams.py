"""Named random streams."""

import subprocess
import sys

import numpy as np
import torch

from pflsec.core.streams import numpy_stream, seed_from, seed_of, stream


def test_a_stream_is_a_function_of_its_key():
    assert torch.equal(torch.rand(4, generator=stream(0, "a", 1)), torch.rand(4, generator=stream(0, "a", 1)))
    assert np.array_equal(numpy_stream(0, "a").random(4), numpy_stream(0, "a").random(4))


def test_keys_that_read_alike_are_different_streams():
    """Numbers and words, and where a word ends, make a difference."""
    keys = [
        (1, 2),
        (12,),
        ("1", "2"),
        ("12",),
        (1, "2"),
        ("a", "bc"),
        ("ab", "c"),
        ("abc",),
        ("astr:bc",),
        (),
        ("",),
        (0, -1),
    ]
    assert len({seed_of(*key) for key in keys}) == len(keys)


def test_neighbouring_keys_do_not_resemble_each_other():
    """1000 clients' first draws: distinct, mean 1/2 (standard error 0.009)."""
    first = [float(torch.rand(1, generator=stream(0, "local", 0, client, "batches"))) for client in range(1000)]
    assert len(set(first)) == 1000
    assert abs(np.mean(first) - 0.5) < 4 * 0.0092


def test_a_seed_is_the_same_in_another_process():
    """It does not rest on Python's own hash, which changes from process to process."""
    code = "from pflsec.core.streams import seed_of; print(seed_of(0, 'local', 3, 7))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(found.stdout) == seed_of(0, "local", 3, 7)


def test_seeds_fit_every_generator():
    assert all(0 <= seed_of(i) < 2**63 for i in range(1000))


def test_making_a_stream_moves_no_other():
    state = torch.get_rng_state()
    torch.rand(3, generator=stream("a"))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_seed_of_items_depends_on_names_and_values_alone():
    """Not on their order, and on every bit of them."""
    items = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor(3)}
    assert seed_from(items) == seed_from(dict(reversed(items.items())))
    assert 0 <= seed_from(items) < 2**63
    others = [{"a": items["b"], "b": items["a"]}, {"a": items["a"]}, items | {"a": torch.tensor([1.0, 2.0000002])}]
    assert len({seed_from(other) for other in (items, *others)}) == 4
