"""The functional view: any module as a pure function of its parameters, cut into body and head."""

import re
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pflsec.core import registry
from pflsec.core.errors import ModelError
from pflsec.core.items import select
from pflsec.models.cnn import cnn
from pflsec.models.network import Network, from_module
from tests import toys

LAYERS = ["conv1", "conv2", "fc1", "fc"]


def digits_cnn(split: str | None = None) -> Network:
    return Network(lambda: cnn((1, 8, 8), 10), (1, 8, 8), 10, split)


def plain(make: Callable[[], nn.Module], key: int) -> nn.Module:
    """Return the module that `fresh(key)` draws, by the rule that fresh draws from a stream of its own."""
    from pflsec.core.streams import seed_of

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(key))
        return make()


class Forked(nn.Module):
    """A network whose halves are no chain of children: a residual body, and a head inside a submodule."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))
        self.inner = nn.Linear(16, 16)
        self.out = nn.Sequential(OrderedDict(norm=nn.LayerNorm(16), last=nn.Linear(16, 3)))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1) * self.scale
        return self.out(x + torch.relu(self.inner(x)))

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.scale)


# --- the cut


@pytest.mark.parametrize("split", [*LAYERS, "relu2", "pool1", "flatten"])
def test_body_and_head_are_disjoint_and_complete_at_every_layer(split: str):
    net, whole = digits_cnn(split), plain(lambda: cnn((1, 8, 8), 10), 0)
    children = [n for n, _ in whole.named_children()]
    behind = set(children[children.index(split) :])

    def expected(name: str) -> str:
        if split == "fc":
            name = name.removeprefix("fc.")  # a head of one layer has that layer's own names
        return ("head." if name.partition(".")[0] in behind | {"weight", "bias"} else "body.") + name

    assert list(net.shapes) == [expected(n) for n, _ in whole.named_parameters()]
    assert list(net.shapes.values()) == [tuple(p.shape) for p in whole.parameters()]
    assert net.fresh(0).keys() == net.shapes.keys()


@pytest.mark.parametrize("split", LAYERS)
def test_the_cut_does_not_change_the_function(split: str):
    net, whole, x = digits_cnn(split), plain(lambda: cnn((1, 8, 8), 10), 0), torch.rand(3, 1, 8, 8)
    items = net.fresh(0)
    assert torch.equal(net.logits(items, x), whole(x))
    assert torch.equal(net.head(items, net.features(items, x)), whole(x))


def test_without_a_split_the_head_is_the_last_layer():
    assert digits_cnn().split == "fc"
    assert [n for n in digits_cnn().shapes if n.startswith("head.")] == ["head.weight", "head.bias"]


@pytest.mark.parametrize("split", ["nope", "head", "fc.weight", "conv"])
def test_a_split_that_is_no_layer_is_answered_with_the_layers(split: str):
    with pytest.raises(ModelError, match=f"no layer '{split}' to cut at.*conv1, conv2, fc1, fc"):
        digits_cnn(split)


def test_a_split_inside_a_fork_is_refused_with_the_layers():
    """The residual path goes around `inner`: body then head would be another function."""
    with pytest.raises(ModelError, match=r"cannot be cut at 'inner'.*: inner, out\.norm, out\.last"):
        Network(Forked, toys.SHAPE, toys.CLASSES, "inner")


@pytest.mark.parametrize("split", ["out", "out.last"])
def test_any_module_can_be_cut_where_a_chain_ends(split: str):
    net, whole, (x, _) = Network(Forked, toys.SHAPE, toys.CLASSES, split), plain(Forked, 0), toys.batch()
    items = net.fresh(0)
    assert torch.equal(net.logits(items, x), whole(x))
    assert torch.equal(net.head(items, net.features(items, x)), whole(x))
    names = {n.partition(".")[2] for n in net.shapes}
    assert len(net.shapes) == len(list(whole.parameters()))
    assert {"scale", "inner.weight", "inner.bias"} <= names


def test_features_are_flat_and_the_head_takes_them_in_their_own_shape():
    net, x = digits_cnn("conv2"), torch.rand(2, 1, 8, 8)
    z = net.features(net.fresh(0), x)
    assert z.shape == (2, net.feature_dim) == (2, 32 * 4 * 4)


def test_the_whole_network_may_be_the_head():
    net, (x, _) = Network(toys.tiny_module, toys.SHAPE, toys.CLASSES, "flatten"), toys.batch()
    assert {n.partition(".")[0] for n in net.shapes} == {"head"}
    assert torch.equal(net.features(net.fresh(0), x), x.flatten(1))
    for key in registry.names("algorithms"):
        made = toys.setup(key, net=net)
        assert len(toys.rounds(made)) == 3


class Burdened(nn.Sequential):
    """A chain with a parameter that belongs to none of its links."""

    def __init__(self):
        super().__init__(OrderedDict(flat=nn.Flatten(), fc=nn.Linear(16, 3)))
        self.scale = nn.Parameter(torch.ones(1))


def test_a_parameter_in_neither_half_is_named():
    with pytest.raises(ModelError, match="leaves scale in neither body nor head"):
        Network(Burdened, toys.SHAPE, toys.CLASSES)


# --- purity


def test_the_functional_view_equals_the_plain_module_in_its_gradients():
    net, whole, (x, y) = toys.tiny(), plain(toys.tiny_module, 0), toys.batch()
    items = {k: v.requires_grad_() for k, v in net.fresh(0).items()}
    ours = torch.autograd.grad(F.cross_entropy(net.logits(items, x), y), list(items.values()))
    reference = torch.autograd.grad(F.cross_entropy(whole(x), y), list(whole.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(ours, reference, strict=True))


def test_a_call_does_not_remember_the_one_before():
    net, (x, _) = toys.tiny(), toys.batch()
    one, two = net.fresh(1), net.fresh(2)
    before = net.logits(one, x)
    net.logits(two, x)
    net.features(two, x)
    assert torch.equal(net.logits(one, x), before)
    assert torch.equal(net.head(one, net.features(one, x)), before)
    assert not torch.equal(net.logits(select(one, "body") | select(two, "head"), x), before)


def test_a_tensor_that_was_moved_in_place_is_seen():
    net, (x, _) = toys.tiny(), toys.batch()
    items = net.fresh(0)
    before = net.logits(items, x)
    items["head.bias"].add_(1)
    assert torch.allclose(net.logits(items, x), before + 1)


def test_parameters_are_read_in_their_own_dtype():
    net, (x, _) = toys.tiny(), toys.batch()
    assert net.logits({k: v.double() for k, v in net.fresh(0).items()}, x.double()).dtype == torch.float64


@pytest.mark.parametrize("make", [toys.tiny, lambda: from_module(toys.tiny_module(), toys.SHAPE, toys.CLASSES)])
def test_fresh_parameters_come_from_their_key_alone(make: Callable[[], Network]):
    torch.manual_seed(5)
    state = torch.get_rng_state()
    net = make()
    one, again, other = net.fresh("init", 1), net.fresh("init", 1), net.fresh("init", 2)
    torch.rand(3)
    later = net.fresh("init", 1)
    torch.set_rng_state(state)
    assert toys.same(one, again)
    assert toys.same(one, later)
    assert not any(torch.equal(one[k], other[k]) for k in one)


def test_drawing_leaves_torchs_global_generator_alone():
    module = toys.tiny_module()
    state = torch.get_rng_state()
    for net in (toys.tiny(), from_module(module, toys.SHAPE, toys.CLASSES)):
        net.fresh(0)
    assert torch.equal(torch.get_rng_state(), state)


def test_fresh_parameters_share_no_memory():
    net = toys.tiny()
    one = net.fresh(0)
    one["head.bias"].zero_()
    assert net.fresh(0)["head.bias"].any()


# --- a module of the user's own


def test_a_users_module_is_drawn_anew_and_left_alone():
    module, (x, _) = Forked(), toys.batch()
    before = toys.snapshot(module.state_dict())
    net = from_module(module, toys.SHAPE, toys.CLASSES)
    assert not torch.equal(net.logits(net.fresh(0), x), net.logits(net.fresh(1), x))
    assert toys.same(module.state_dict(), before)


def test_a_layer_that_cannot_be_drawn_anew_is_named():
    class Stubborn(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(16, 3))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    module = nn.Sequential(OrderedDict(flat=nn.Flatten(), own=Stubborn()))
    with pytest.raises(ModelError, match=r"layer 'own' has parameters but no reset_parameters\(\)"):
        from_module(module, toys.SHAPE, toys.CLASSES)


@pytest.mark.parametrize("last", [nn.ReLU(), nn.LogSoftmax(1)])
def test_a_network_that_does_not_end_in_a_linear_layer_says_so(last: nn.Module):
    """Label rules read the last bias's gradient as softmax minus label; here they must not."""
    layers = OrderedDict(flat=nn.Flatten(), fc=nn.Linear(16, 3), last=last)
    assert Network(lambda: nn.Sequential(layers), toys.SHAPE, 3).last_layer is None


def test_the_last_layer_is_found_inside_a_longer_head():
    assert digits_cnn("fc1").last_layer == "head.fc"
    assert digits_cnn().last_layer == "head"


# --- what is refused


def with_layer(layer: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        OrderedDict(conv=nn.Conv2d(1, 4, 3), odd=layer, flat=nn.Flatten(), fc=nn.Linear(16, 3))
    )


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (nn.BatchNorm2d(4, track_running_stats=False), "'odd' is BatchNorm2d without running statistics"),
        (nn.BatchNorm2d(4, momentum=None), "'odd' is BatchNorm2d with momentum None"),
        (nn.InstanceNorm2d(4, track_running_stats=True), "'odd' is InstanceNorm2d"),
        (nn.Dropout(0.5), "'odd' is Dropout, .*random masks"),
        (nn.Dropout2d(0.5), "'odd' is Dropout2d"),
    ],
    ids=str,
)
def test_a_layer_that_cannot_be_replayed_is_refused_with_the_reason(layer: nn.Module, reason: str):
    with pytest.raises(ModelError, match=reason):
        Network(with_layer(layer), toys.SHAPE, 3)


@pytest.mark.parametrize("value", [torch.zeros(1), torch.tensor(3), torch.tensor([True, False])], ids=str)
def test_a_buffer_that_is_no_running_statistic_is_refused_by_name(value: Tensor):
    """Also where it has no dimensions, or holds whole numbers: it would neither be sent nor kept."""
    layer = nn.Identity()
    layer.register_buffer("seen", value)
    with pytest.raises(ModelError, match=rf"the buffer 'odd\.seen' {re.escape(str(list(value.shape)))}"):
        Network(with_layer(layer), toys.SHAPE, 3)


@pytest.mark.parametrize("layer", [nn.GroupNorm(2, 4), nn.LayerNorm([4, 2, 2])], ids=str)
def test_norms_of_single_samples_are_allowed(layer: nn.Module):
    """They couple no rows: what is said of one image is the same whatever stands beside it."""
    net = Network(with_layer(layer), toys.SHAPE, 3)
    items, (x, _) = net.fresh(0), toys.batch(3)
    assert torch.allclose(net.logits(items, x)[:1], net.logits(items, x[:1]), atol=1e-6)


class Tied(nn.Module):
    """The same weight in two layers."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.fc = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.two(torch.tanh(self.one(x.flatten(1)))))


class TiedAcross(nn.Module):
    """The same weight in body and head."""

    def __init__(self):
        super().__init__()
        self.one, self.fc = nn.Linear(16, 16), nn.Linear(16, 16)
        self.fc.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.tanh(self.one(x.flatten(1))))


class Hoarder(nn.Module):
    """A layer whose weight is read from a list."""

    def __init__(self):
        super().__init__()
        self.one, self.fc = nn.Linear(16, 16), nn.Linear(16, 3)
        self.kept = [self.one.weight]

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.linear(x.flatten(1), self.kept[0], self.one.bias))


@pytest.mark.parametrize(("make", "classes"), [(Tied, 3), (TiedAcross, 16), (Hoarder, 3)])
def test_parameters_that_cannot_be_replaced_from_outside_are_refused(make: Callable[[], nn.Module], classes: int):
    """Or else the network would train while parts of it silently stand still."""
    with pytest.raises(ModelError, match="shared by"):
        Network(make, toys.SHAPE, classes)


class FunctionalDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.dropout(x.flatten(1), 0.5, self.training))


def test_randomness_inside_forward_is_refused():
    with pytest.raises(ModelError):
        Network(FunctionalDropout, toys.SHAPE, 3)


@pytest.mark.parametrize("outputs", [2, 4])
def test_a_wrong_number_of_outputs_is_named(outputs: int):
    with pytest.raises(ModelError, match=rf"returns \[{outputs}\]; it must return \[3\]"):
        Network(lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, outputs)), toys.SHAPE, 3)


def test_a_model_without_parameters_is_refused():
    with pytest.raises(ModelError, match="no layer with parameters"):
        Network(lambda: nn.Sequential(nn.Flatten()), toys.SHAPE, 16)
