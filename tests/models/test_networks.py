"""The networks that come with the package."""

import pytest
import torch
import torchvision
from torch import nn

from pflsec.core import registry
from pflsec.core.errors import ConfigError, ModelError
from pflsec.models import catalogue
from pflsec.models.cnn import cnn, cnn_bn
from pflsec.models.lenet import lenet
from pflsec.models.network import from_module
from pflsec.models.resnet18 import resnet18, resnet18_gn

SHAPES = [(1, 8, 8), (1, 28, 28), (3, 32, 32)]
TEXTS = ["bag", "transformer"]
MODELS = [name for name in registry.names("models") if name not in TEXTS]


def test_the_cnn_has_the_papers_number_of_parameters():
    """McMahan et al.: 832 + 51,264 + 524,800 + 5,130 = 582,026 at 1x28x28 and 10 classes."""
    net = catalogue.build("cnn", (1, 28, 28), 10)
    assert net.size() == 582_026
    assert [torch.Size(s).numel() for s in net.shapes.values()][::2] == [
        32 * 25,
        64 * 32 * 25,
        512 * 1024,
        5120,
    ]


def test_lenets_last_layer_has_the_papers_inputs():
    """Two strides of 2 and 12 channels: 12 * 7 * 7 = 588 at 28x28, 12 * 8 * 8 = 768 at 32x32."""
    assert catalogue.build("lenet", (1, 28, 28), 10).shapes["head.weight"] == (10, 588)
    assert catalogue.build("lenet", (3, 32, 32), 10).shapes["head.weight"] == (10, 768)


def test_lenets_parameters_fill_a_uniform_interval():
    """U(-0.5, 0.5): nothing outside, mean 0, variance 1/12 = 0.0833 (14,000 draws: standard error 0.0006)."""
    values = torch.cat([v.flatten() for v in catalogue.build("lenet", (3, 32, 32), 10).fresh(0).values()])
    assert -0.5 <= float(values.min()) < -0.49
    assert 0.49 < float(values.max()) < 0.5
    assert abs(float(values.mean())) < 0.015
    assert float(values.var()) == pytest.approx(1 / 12, abs=0.004)
    assert all(float(v.min()) < -0.3 for v in catalogue.build("lenet", (1, 28, 28), 10).fresh(0).values())


@pytest.mark.parametrize("name", ["resnet18", "resnet18-gn"])
def test_resnet18_has_the_papers_number_of_parameters(name: str):
    """Stem 3*64*9, convolutions of four stages, norms with 2 numbers a channel, 512*10 + 10: 11,173,962 at 3x32x32.

    Stages: 4*64*64*9; then for (64, 128), (128, 256), (256, 512) each a*b*9 + 3*b*b*9 + a*b. Norms: 2*(64 + 4*64 + 5*(128 +
    256 + 512)).
    """
    stages = 4 * 64 * 64 * 9 + sum(a * b * 9 + 3 * b * b * 9 + a * b for a, b in ((64, 128), (128, 256), (256, 512)))
    by_hand = 3 * 64 * 9 + stages + 2 * (5 * 64 + 5 * (128 + 256 + 512)) + 5130
    assert catalogue.build(name, (3, 32, 32), 10).size() == by_hand == 11_173_962


def test_resnet18_has_twenty_layers_of_batchnorm():
    """One in the stem, two in each of 8 blocks, and one on each of the 3 paths that change the number of channels."""
    net = catalogue.build("resnet18", (3, 32, 32), 10)
    assert len(net.batchnorms) == 1 + 2 * 8 + 3 == 20
    assert (len(net.norms), len(net.buffers)) == (80, 40)
    assert len([name for name in net.batchnorms if "bn" not in name]) == 3


def test_resnet18_with_groupnorm_has_no_statistics_and_groups_that_divide():
    net = catalogue.build("resnet18-gn", (3, 32, 32), 10)
    assert not net.buffers | net.norms
    layers = [m for m in resnet18_gn((3, 32, 32), 10).modules() if isinstance(m, nn.GroupNorm)]
    assert len(layers) == 20
    assert {(m.num_channels, m.num_groups) for m in layers} == {(c, 32) for c in (64, 128, 256, 512)}


@pytest.mark.parametrize("size", [32, 64, 96])
def test_resnet18_is_torchvisions(size: int):
    """The same layers under the same names; above 64x64 with its stem, up to there with a 3x3 one and without pooling."""
    theirs, ours = torchvision.models.resnet18(num_classes=7), resnet18((3, size, size), 7)
    if size <= 64:
        theirs.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        theirs.add_module("maxpool", nn.Identity())
    missing = theirs.load_state_dict(ours.state_dict(), strict=False)
    assert not missing.unexpected_keys
    assert all(name.endswith("num_batches_tracked") for name in missing.missing_keys)
    x = torch.randn(2, 3, size, size)
    assert torch.allclose(ours(x), theirs.eval()(x), rtol=1e-4, atol=1e-4)


def test_torchvisions_resnet18_can_be_used_as_it_is():
    net = from_module(torchvision.models.resnet18(num_classes=7), (3, 32, 32), 7)
    assert len(net.batchnorms) == 20
    assert net.shapes == catalogue.build("resnet18", (3, 96, 96), 7).shapes


def test_the_small_network_with_batchnorm_is_the_cnn_with_a_layer_after_each_convolution():
    plain, normed = (dict(make((1, 28, 28), 10).named_modules()) for make in (cnn, cnn_bn))
    assert [n for n in normed if n not in plain] == ["bn1", "bn2"]
    assert normed["conv1"].bias is normed["conv2"].bias is None
    assert catalogue.build("cnn-bn", (1, 28, 28), 10).size() == 582_026 - 96 + 2 * 96


def test_pooling_before_relu_changes_no_value():
    """max(relu(a), relu(b)) = relu(max(a, b)): ours is conv, ReLU, pool, as in the paper."""
    ours, x = cnn((1, 28, 28), 10), torch.randn(2, 1, 28, 28)
    z = x
    for name, layer in ours.named_children():
        if name.startswith("conv"):
            z = torch.max_pool2d(torch.relu(layer(z)), 2)
        elif not name.startswith(("pool", "relu1", "relu2")):
            z = layer(z)
    assert torch.equal(z, ours(x))


def test_lenet_is_smooth_everywhere():
    """Sigmoids only, no pooling: the second derivatives that attacks take exist."""
    kinds = {type(m).__name__ for m in lenet((1, 28, 28), 10).modules()}
    assert kinds == {"Sequential", "Conv2d", "Sigmoid", "Flatten", "Linear"}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_network_runs_on_every_usual_size(name: str, shape: tuple[int, int, int]):
    net = catalogue.build(name, shape, 7)
    items = net.fresh(0)
    x = torch.rand(2, *shape)
    assert net.logits(items, x).shape == (2, 7)
    assert net.features(items, x).shape == (2, net.feature_dim)
    assert net.last_layer == "head"
    assert net.size() == sum(v.numel() for k, v in items.items() if k not in net.buffers)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("side", [1, 2, 3])
def test_an_input_that_is_too_small_is_refused_with_its_shape(side: int):
    with pytest.raises(ModelError, match=rf"does not run on inputs of shape \[1, {side}, {side}\]"):
        catalogue.build("cnn", (1, side, side), 10)


@pytest.mark.parametrize("side", [4, 8, 15, 16, 17, 28, 32, 64])
def test_the_cnn_runs_from_four_by_four_on(side: int):
    net = catalogue.build("cnn", (1, side, side), 10)
    assert net.logits(net.fresh(0), torch.rand(1, 1, side, side)).shape == (1, 10)


def test_auto_is_the_cnn():
    assert catalogue.build("auto", (1, 8, 8), 10).shapes == catalogue.build("cnn", (1, 8, 8), 10).shapes


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean lenet"):
        catalogue.build("lenett", (1, 8, 8), 10)
