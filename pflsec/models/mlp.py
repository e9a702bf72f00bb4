"""A multilayer perceptron."""

from collections import OrderedDict
from math import prod

from torch import nn


def mlp(shape: tuple[int, int, int], classes: int) -> nn.Module:
    """One hidden layer of 256 ReLU units.

    Source   a common baseline; its first layer gives single inputs away exactly.
    Input    any
    Cut      fc: body up to the 256 hidden units, head the last layer
    """
    return nn.Sequential(
        OrderedDict(flatten=nn.Flatten(), fc1=nn.Linear(prod(shape), 256), relu1=nn.ReLU(), fc=nn.Linear(256, classes))
    )
