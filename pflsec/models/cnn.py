"""The convolutional network of the FedAvg paper."""

from collections import OrderedDict

from torch import nn

from pflsec.models.batchnorm import BatchNorm


def cnn(shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Two 5x5 convolutions, one hidden layer, ReLU: the network of McMahan et al. (AISTATS 2017).

    Source   McMahan et al., AISTATS 2017, section 3; 582,026 parameters at 1x28x28 and 10 classes.
    Input    images, 4x4 or larger; below 16x16 the convolutions pad, from 16x16 on they do not
    Cut      fc: body up to the 512 hidden units, head the last layer
    """
    return _cnn(shape, classes, normed=False)


def cnn_bn(shape: tuple[int, int, int], classes: int) -> nn.Module:
    """The network of McMahan et al. with BatchNorm after each convolution: small, for what BatchNorm does to a method.

    Source   McMahan et al., AISTATS 2017, section 3, for the rest; the convolutions have no bias, which BatchNorm undoes
    Input    images, 4x4 or larger; below 16x16 the convolutions pad, from 16x16 on they do not
    Cut      fc: body up to the 512 hidden units, head the last layer
    """
    return _cnn(shape, classes, normed=True)


def _cnn(shape: tuple[int, int, int], classes: int, normed: bool) -> nn.Module:
    channels, height, width = shape
    padding = 2 if min(height, width) < 16 else 0
    # Pooling first gives the same values as ReLU first, on a quarter of the numbers.
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv2d(channels, 32, 5, padding=padding, bias=not normed),
        bn1=BatchNorm(32) if normed else nn.Identity(),
        pool1=nn.MaxPool2d(2),
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(32, 64, 5, padding=padding, bias=not normed),
        bn2=BatchNorm(64) if normed else nn.Identity(),
        pool2=nn.MaxPool2d(2),
        relu2=nn.ReLU(),
        flatten=nn.Flatten(),
        fc1=nn.Linear(64 * _after(height, padding) * _after(width, padding), 512),
        relu3=nn.ReLU(),
        fc=nn.Linear(512, classes),
    )
    return nn.Sequential(
        OrderedDict((name, layer) for name, layer in layers.items() if not isinstance(layer, nn.Identity))
    )


def _after(side: int, padding: int) -> int:
    """Return the side length after both convolutions and poolings."""
    for _ in range(2):
        side = (side + 2 * padding - 4) // 2
    return max(side, 0)
