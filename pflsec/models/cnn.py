"""The convolutional network of the FedAvg paper."""

from collections import OrderedDict

from torch import nn


def cnn(shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Two 5x5 convolutions, one hidden layer, ReLU: the network of McMahan et al. (AISTATS 2017).

    Source   McMahan et al., AISTATS 2017, section 3; 582,026 parameters at 1x28x28 and 10 classes.
    Input    images, 4x4 or larger; below 16x16 the convolutions pad, from 16x16 on they do not
    Cut      fc: body up to the 512 hidden units, head the last layer
    """
    channels, height, width = shape
    padding = 2 if min(height, width) < 16 else 0
    # Pooling first gives the same values as ReLU first, on a quarter of the numbers.
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv2d(channels, 32, 5, padding=padding),
        pool1=nn.MaxPool2d(2),
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(32, 64, 5, padding=padding),
        pool2=nn.MaxPool2d(2),
        relu2=nn.ReLU(),
        flatten=nn.Flatten(),
        fc1=nn.Linear(64 * _after(height, padding) * _after(width, padding), 512),
        relu3=nn.ReLU(),
        fc=nn.Linear(512, classes),
    )
    return nn.Sequential(layers)


def _after(side: int, padding: int) -> int:
    """Return the side length after both convolutions and poolings."""
    for _ in range(2):
        side = (side + 2 * padding - 4) // 2
    return max(side, 0)
