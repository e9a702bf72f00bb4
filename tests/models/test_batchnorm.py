"""Our BatchNorm against torch's, and the functional view of modules that hold it."""

from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pflsec.core.errors import ModelError
from pflsec.core.network import buffer_in
from pflsec.models import batchnorm
from pflsec.models.batchnorm import BatchNorm, replaced
from pflsec.models.network import Network, from_module
from tests import toys

pytestmark = pytest.mark.usefixtures("doubles")
KINDS: list[tuple[Callable[[int], nn.modules.batchnorm._BatchNorm], tuple[int, ...]]] = [
    (nn.BatchNorm1d, (7, 3)),
    (nn.BatchNorm1d, (4, 3, 5)),
    (nn.BatchNorm2d, (4, 3, 2, 5)),
    (nn.BatchNorm3d, (2, 3, 2, 2, 3)),
]
for_every_kind = pytest.mark.parametrize(("make", "shape"), KINDS, ids=[f"{m.__name__} {s}" for m, s in KINDS])


def drawn(layer: nn.Module) -> nn.Module:
    """Give a layer weights and running statistics that are not those of a new one."""
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for value in [*layer.parameters(), *(b for b in layer.buffers() if b.is_floating_point())]:
            value.copy_(torch.rand(value.shape, generator=rng) + 0.5)
    return layer


def ours_of(theirs: nn.Module) -> BatchNorm:
    made = replaced(theirs)
    assert isinstance(made, BatchNorm)
    return made


# --- the layer


@for_every_kind
def test_outside_training_it_is_torchs_in_evaluation(make: Callable[[int], nn.Module], shape: tuple[int, ...]):
    theirs, x = drawn(make(3)), torch.randn(shape)
    assert torch.allclose(ours_of(theirs)(x), theirs.eval()(x), rtol=0, atol=1e-13)


@for_every_kind
def test_in_training_it_is_torchs_over_several_steps(make: Callable[[int], nn.Module], shape: tuple[int, ...]):
    """Outputs and running statistics; ours are handed on by hand, since the layer itself stays as it is."""
    theirs = drawn(make(3))
    ours = ours_of(theirs)
    for step in range(4):
        x = torch.randn(shape) * (step + 1) + step
        before = toys.snapshot(dict(ours.named_buffers()))
        with batchnorm.training([ours]) as seen:
            out = ours(x)
        assert toys.same(dict(ours.named_buffers()), before)
        assert torch.allclose(out, theirs(x), rtol=0, atol=1e-13)
        for name in batchnorm.STATISTICS:
            old, new = seen[id(getattr(ours, name))]
            assert old is getattr(ours, name)
            assert torch.allclose(new, getattr(theirs, name), rtol=0, atol=1e-12)
            setattr(ours, name, new)


def test_the_last_forward_pass_wins():
    """Each starts at the statistics that were given: a second pass does not build on the first."""
    ours, (x, other) = BatchNorm(3), torch.randn(2, 6, 3)
    with batchnorm.training([ours]) as both:
        assert ours(x).shape == ours(other).shape
    with batchnorm.training([ours]) as last:
        ours(other)
    assert all(torch.equal(both[k][1], last[k][1]) for k in last)


def test_training_ends_with_its_block_also_after_an_error():
    ours, x = BatchNorm(3), torch.randn(6, 3)
    with pytest.raises(RuntimeError), batchnorm.training([ours]):
        ours(torch.randn(6, 4))
    assert torch.allclose(ours(x), x / (1 + ours.eps) ** 0.5)


@pytest.mark.parametrize("shape", [(1, 3), (1, 3, 1, 1)], ids=str)
def test_one_value_a_channel_becomes_the_bias(shape: tuple[int, ...]):
    """x - mean = 0. There is no unbiased variance of one value; the biased one, 0, stands in for it."""
    ours = ours_of(drawn(nn.BatchNorm1d(3)))
    with batchnorm.training([ours]) as seen:
        out = ours(torch.randn(shape))
    assert torch.allclose(out.flatten(), list(ours.parameters())[1], rtol=1e-15)
    assert torch.allclose(seen[id(ours.running_var)][1], 0.9 * ours.running_var, rtol=1e-15)


def test_the_statistics_are_differentiable_in_the_input():
    """Autograd against central differences, and their slopes against those of the formulas written out."""
    ours, x = ours_of(drawn(nn.BatchNorm1d(3))), torch.randn(4, 3, 2, 2, requires_grad=True)

    def new(name: str) -> Callable[[Tensor], Tensor]:
        def fn(x: Tensor) -> Tensor:
            with batchnorm.training([ours]) as seen:
                ours(x)
            return seen[id(getattr(ours, name))][1]

        return fn

    for name in batchnorm.STATISTICS:
        assert torch.autograd.gradcheck(new(name), (x,))
        assert torch.autograd.gradgradcheck(new(name), (x,))
    mean = torch.autograd.grad(new("running_mean")(x)[0], x)[0]
    assert torch.allclose(mean[:, 0], torch.full((4, 2, 2), 0.1 / 16))
    var = torch.autograd.grad(new("running_var")(x)[0], x)[0]
    assert torch.allclose(var[:, 0], 0.1 * 2 * (x[:, 0] - x[:, 0].mean()) / 15)
    assert not mean[:, 1:].any()


def test_both_modes_have_slopes_of_the_second_order():
    ours, x = ours_of(drawn(nn.BatchNorm1d(3))), torch.randn(4, 3, 2, requires_grad=True)
    w, b = (v.detach().clone().requires_grad_() for v in ours.parameters())
    mean, var = (v.detach().clone().requires_grad_() for v in (ours.running_mean, ours.running_var))

    def trained(*args: Tensor) -> Tensor:
        with batchnorm.training([ours]):
            return torch.func.functional_call(ours, dict(zip(("weight", "bias"), args[1:], strict=True)), args[0])

    def tested(*args: Tensor) -> Tensor:
        names = ("weight", "bias", "running_mean", "running_var")
        return torch.func.functional_call(ours, dict(zip(names, args[1:], strict=True)), args[0])

    for fn, args in ((trained, (x, w, b)), (tested, (x, w, b, mean, var))):
        assert torch.autograd.gradcheck(fn, args)
        assert torch.autograd.gradgradcheck(fn, args)


def test_frozen_statistics_let_each_example_pass_alone():
    """What private training needs: per-sample gradients by vmap."""
    net, (x, y) = toys.normed(frozen=True), toys.batch()

    def loss(items: dict[str, Tensor], a: Tensor, b: Tensor) -> Tensor:
        return nn.functional.cross_entropy(net.logits(items, a[None]), b[None])

    items = net.fresh(0)
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(items, x, y)
    one = torch.func.grad(loss)(items, x[2], y[2])
    assert all(torch.allclose(each[k][2], one[k]) for k in items)


def test_reset_parameters_gives_a_new_layer():
    layer, new = ours_of(drawn(nn.BatchNorm1d(3))), dict(BatchNorm(3).state_dict())
    assert not any(torch.equal(v, new[k]) for k, v in layer.state_dict().items())
    layer.reset_parameters()
    assert toys.same(dict(layer.state_dict()), new)


# --- in place of torch's


class Twice(nn.Module):
    """One layer that stands in two places."""

    def __init__(self):
        super().__init__()
        self.one, self.fc = nn.BatchNorm1d(16), nn.Linear(16, 3)
        self.again = nn.Sequential(nn.Tanh(), self.one)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.again(self.one(x.flatten(1))))


def test_a_layer_in_two_places_stays_one_layer():
    module = replaced(Twice())
    assert isinstance(module, Twice)
    assert module.one is module.again[1]
    assert sum(isinstance(m, BatchNorm) for m in module.modules()) == 1
    assert len(Network(Twice, toys.SHAPE, 3).buffers) == 2


class Stranger(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (Stranger(5), "'bn1' is Stranger, which is not supported: it may do more"),
        (nn.BatchNorm1d(5, momentum=None), "'bn1' is BatchNorm1d with momentum None"),
        (nn.BatchNorm1d(5, track_running_stats=False), "'bn1' is BatchNorm1d without running statistics"),
    ],
    ids=["subclass", "momentum", "no statistics"],
)
def test_what_ours_cannot_stand_for_is_refused_with_the_reason(layer: nn.Module, reason: str):
    def make() -> nn.Module:
        module = toys.normed_module()
        module.bn1 = layer
        return module

    with pytest.raises(ModelError, match=reason):
        Network(make, toys.SHAPE, 3)


def test_settings_and_values_are_taken_over():
    theirs = drawn(nn.BatchNorm1d(4, eps=0.1, momentum=0.3))
    ours = ours_of(theirs)
    assert (ours.eps, ours.momentum) == (0.1, 0.3)
    values = dict(theirs.state_dict())
    del values["num_batches_tracked"]
    assert toys.same(dict(ours.state_dict()), values)
    assert not list(ours_of(nn.BatchNorm1d(4, affine=False)).parameters())


def test_a_users_module_keeps_torchs_layers():
    """Only the copies from which values are drawn are changed."""
    module = toys.normed_module()
    net = from_module(module, toys.SHAPE, 3)
    assert type(module.bn) is nn.BatchNorm2d
    assert net.buffers == toys.normed().buffers


# --- the functional view

NORMS = [f"body.{layer}.{key}" for layer in ("bn", "bn1") for key in ("weight", "bias", *batchnorm.STATISTICS)]


def test_buffers_are_items_in_their_place():
    net = toys.normed()
    body = ["body.conv.weight", "body.conv.bias", *NORMS[:4], "body.fc1.weight", "body.fc1.bias", *NORMS[4:]]
    assert list(net.shapes) == list(net.fresh(0)) == [*body, "head.weight", "head.bias"]
    assert net.norms == set(NORMS)
    assert net.buffers == {n for n in NORMS if "running" in n}
    assert net.batchnorms == ("bn", "bn1")
    assert net.size() == sum(p.numel() for p in toys.normed_module().parameters())
    assert {k: v.shape for k, v in net.fresh(0).items()} == net.shapes


def test_buffers_begin_at_zero_and_one():
    fresh = toys.normed().fresh(3)
    assert all(
        torch.equal(fresh[n], torch.full_like(fresh[n], float(n.endswith("var")))) for n in toys.normed().buffers
    )


def test_buffers_are_named_by_the_half_they_stand_in():
    assert {n.partition(".")[0] for n in toys.normed("bn1").buffers} == {"body", "head"}
    assert {n.partition(".")[0] for n in toys.normed("bn").buffers} == {"head"}


def test_frozen_buffers_are_no_items():
    net, (x, _) = toys.normed(frozen=True), toys.batch()
    assert net.buffers == frozenset()
    assert net.norms == {n for n in NORMS if "running" not in n}
    assert net.shapes.keys() == net.fresh(0).keys() == toys.normed().shapes.keys() - toys.normed().buffers
    items = net.fresh(0)
    before = net.logits(items, x)
    with net.training() as seen:
        assert torch.equal(net.logits(items, x), before)
    assert not seen
    assert torch.equal(toys.normed().logits(toys.normed().fresh(0), x), before)
    assert net.logits({k: v.float() for k, v in items.items()}, x.float()).dtype == torch.float32


def test_a_network_without_the_layer_has_neither_buffers_nor_norms():
    net = toys.tiny()
    assert net.buffers == net.norms == frozenset()
    assert net.batchnorms == ()
    layers: OrderedDict[str, nn.Module] = OrderedDict(flat=nn.Flatten(), bn=nn.LayerNorm(16), fc=nn.Linear(16, 3))
    named = Network(lambda: nn.Sequential(layers), toys.SHAPE, 3)
    assert named.norms == frozenset()


def test_norms_are_known_by_their_type_whatever_they_are_called():
    def make() -> nn.Module:
        module = nn.Sequential(nn.Flatten(), nn.Linear(16, 4))
        module.add_module("scale", nn.BatchNorm1d(4))
        module.add_module("fc", nn.Linear(4, 3))
        return module

    norms = Network(make, toys.SHAPE, 3).norms
    assert norms == {f"body.scale.{key}" for key in ("weight", "bias", *batchnorm.STATISTICS)}


def test_statistics_are_recorded_under_the_tensors_that_were_read():
    net, (x, _) = toys.normed(), toys.batch()
    one, two = net.fresh(1), net.fresh(2)
    with net.training() as seen:
        net.logits(one, x)
    assert seen.keys() == {id(one[k]) for k in net.buffers}
    assert not seen.keys() & {id(v) for v in two.values()}


def test_the_mode_ends_with_the_block():
    net, (x, _) = toys.normed(), toys.batch()
    items = net.fresh(1)
    before = net.logits(items, x)
    with net.training():
        assert not torch.allclose(net.logits(items, x), before)
    assert torch.equal(net.logits(items, x), before)


def test_an_item_under_a_prefix_is_the_buffer_that_its_name_ends_with():
    net = toys.normed()
    assert buffer_in(net, "body.bn.running_mean") == buffer_in(net, "v.body.bn.running_mean") == "body.bn.running_mean"
    assert buffer_in(net, "bn.running_mean") is buffer_in(net, "body.bn.weight") is None
    assert buffer_in(toys.tiny(), "body.bn.running_mean") is None
