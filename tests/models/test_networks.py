"""The networks that come with the package."""

import pytest
import torch

from pflsec.core import registry
from pflsec.core.errors import ConfigError, ModelError
from pflsec.models import catalogue
from pflsec.models.cnn import cnn
from pflsec.models.lenet import lenet

SHAPES = [(1, 8, 8), (1, 28, 28), (3, 32, 32)]
MODELS = registry.names("models")


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
    assert net.size() == sum(v.numel() for v in items.values())


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
