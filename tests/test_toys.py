"""The tools of the tests."""

import math

import torch

from tests import toys


def test_a_nan_is_no_small_distance_wherever_it_stands():
    zero, nan = torch.zeros(2), torch.tensor([0.0, math.nan])
    for a in ({"a": zero, "b": nan}, {"a": nan, "b": zero}):
        found = toys.distance(a, {"a": zero, "b": zero})
        assert not found < 1
        assert not found > 1
    assert toys.distance({"a": zero + 1, "b": zero}, {"a": zero, "b": zero}) == 1
    assert toys.distance({"a": zero}, {"b": zero}) == math.inf
    assert toys.distance({}, {}) == 0
