"""ResNet-18, with BatchNorm or with GroupNorm."""

from collections import OrderedDict
from collections.abc import Callable
from math import gcd

import torch
from torch import Tensor, nn

from pflsec.models.batchnorm import BatchNorm

Norm = Callable[[int], nn.Module]
SMALL = 64
"""Inputs up to this side begin with a 3x3 convolution and no pooling."""


def resnet18(shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Eight residual blocks of two 3x3 convolutions each, 64 to 512 channels, BatchNorm, ReLU.

    Source   He et al., CVPR 2016, arXiv 1512.03385; 11,173,962 parameters at 3x32x32 and 10 classes.
    Input    images; up to 64x64 the first convolution is 3x3 and nothing is pooled, above it is 7x7, with pooling after it
    Cut      fc: body up to the 512 averaged channels, head the last layer
    """
    return _resnet18(shape, classes, BatchNorm)


def resnet18_gn(shape: tuple[int, int, int], classes: int) -> nn.Module:
    """ResNet-18 with GroupNorm in place of BatchNorm: no running statistics, each example on its own.

    Source   Hsieh et al., ICML 2020, arXiv 1910.00189, section 5: BatchNorm fails on skewed partitions, GroupNorm does not.
    Input    images, as resnet18
    Cut      fc: body up to the 512 averaged channels, head the last layer
    """
    return _resnet18(shape, classes, lambda channels: nn.GroupNorm(gcd(32, channels), channels))


def _resnet18(shape: tuple[int, int, int], classes: int, norm: Norm) -> nn.Module:
    channels, height, width = shape
    small = max(height, width) <= SMALL
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv2d(channels, 64, 3 if small else 7, 1 if small else 2, 1 if small else 3, bias=False),
        bn1=norm(64),
        relu=nn.ReLU(),
    )
    if not small:
        layers["maxpool"] = nn.MaxPool2d(3, 2, 1)
    for stage, (before, after) in enumerate([(64, 64), (64, 128), (128, 256), (256, 512)], 1):
        stride = 1 if stage == 1 else 2
        layers[f"layer{stage}"] = nn.Sequential(Block(before, after, stride, norm), Block(after, after, 1, norm))
    layers |= OrderedDict(avgpool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), fc=nn.Linear(512, classes))
    network = nn.Sequential(layers)
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return network


class Block(nn.Module):
    """Two convolutions beside a path that goes round them."""

    def __init__(self, before: int, after: int, stride: int, norm: Norm):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = norm(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = norm(after)
        straight = stride == 1 and before == after
        self.downsample = (
            None if straight else nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), norm(after))
        )

    def forward(self, x: Tensor) -> Tensor:
        inner = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(inner + (x if self.downsample is None else self.downsample(x)))
