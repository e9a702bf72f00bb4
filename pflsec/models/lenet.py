"""The sigmoid LeNet on which gradient leakage was first shown."""

from collections import OrderedDict

import torch
from torch import nn


def lenet(shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Three 5x5 convolutions of 12 channels with sigmoids, all parameters drawn from U(-0.5, 0.5).

    Source   Zhu, Liu, Han, NeurIPS 2019, section 4: smooth activations and wide weights suit the attack.
    Input    images
    Cut      fc: body up to the flattened 12-channel maps, head the last layer
    """
    channels, height, width = shape
    side = [-(-s // 4) for s in (height, width)]
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv2d(channels, 12, 5, stride=2, padding=2),
        act1=nn.Sigmoid(),
        conv2=nn.Conv2d(12, 12, 5, stride=2, padding=2),
        act2=nn.Sigmoid(),
        conv3=nn.Conv2d(12, 12, 5, padding=2),
        act3=nn.Sigmoid(),
        flatten=nn.Flatten(),
        fc=nn.Linear(12 * side[0] * side[1], classes),
    )
    network = nn.Sequential(layers)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.uniform_(-0.5, 0.5)
    return network
