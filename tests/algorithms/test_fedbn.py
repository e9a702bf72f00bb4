"""FedBN. The checks take the method's class, so that planted bugs can be put to them."""

import warnings
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

from pflsec.algorithms.other.fedbn import FedBN, FedBNConfig
from pflsec.algorithms.traditional.fedavg import FedAvg
from pflsec.core.algorithm import Algorithm
from pflsec.core.errors import ConfigError, PflsecWarning
from pflsec.core.items import Items
from pflsec.models import catalogue
from pflsec.models.network import Network, from_module
from pflsec.runtime import manifest
from pflsec.runtime.replay import newcomer
from tests import toys

LAYERS: dict[str, Any] = {
    "conv": lambda: nn.Conv2d(1, 4, 2), "scale": lambda: nn.BatchNorm2d(4), "act": nn.Tanh, "flatten": nn.Flatten,
    "fc1": lambda: nn.Linear(36, 5), "bn1": lambda: nn.BatchNorm1d(5), "act1": nn.Tanh, "fc": lambda: nn.Linear(5, 3),
}  # fmt: skip


def module() -> nn.Module:
    """Return a network with two BatchNorm layers, one of which has no such name."""
    return nn.Sequential(OrderedDict((name, make()) for name, make in LAYERS.items()))


def net(frozen: bool = False) -> Network:
    return Network(module, toys.SHAPE, toys.CLASSES, frozen=frozen)


NORMS = {f"body.{n}.{k}" for n in ("scale", "bn1") for k in ("weight", "bias", "running_mean", "running_var")}
SHARED = net().shapes.keys() - NORMS


def play(kind: type[Algorithm[Any]], count: int = 3, **options: Any) -> list[toys.Round]:
    return toys.rounds(toys.setup(kind, net=net(), rounds=count, **options))


def plain(items: Items) -> nn.Module:
    """Return torch's own module, in training mode, with these items."""
    made = module()
    made.load_state_dict({k.replace("body.", "").replace("head.", "fc."): v for k, v in items.items()}, strict=False)
    return made


def norms_in(items: Items) -> Items:
    return {k: v for k, v in items.items() if k in NORMS}


def check_1_no_item_of_a_batchnorm_layer_is_on_the_wire(kind: type[Algorithm[Any]]) -> None:
    for turn in play(kind, participation=0.5):
        for message in (*turn.downs.values(), *turn.ups.values()):
            assert message.keys() == SHARED
        assert set(turn.metrics["bytes_by_kind"]["up"]) == {"weights"}


def check_2_the_downlink_changes_no_norm(kind: type[Algorithm[Any]]) -> None:
    """The tested model has the client's own, and local work without a step gives them back, bit for bit."""
    made = toys.setup(kind, net=net())
    for turn in toys.rounds(made):
        for c in range(4):
            own = norms_in(turn.next_states[c])
            assert own.keys() == NORMS
            down = made.algorithm.downlink(turn.next_server, c)
            tested = made.algorithm.deploy(turn.next_states[c], down)
            assert toys.same({k: tested[k] for k in own}, own)
            assert toys.same({k: tested[k] for k in SHARED}, down)
            ctx = toys.context(made, turn.t + 1, c, epochs=0)
            assert toys.same(norms_in(made.algorithm.local(ctx, turn.next_states[c], down).state), own)


def check_3_without_batchnorm_it_is_fedavg(kind: type[Algorithm[Any]]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PflsecWarning)
        for weighting in ("uniform", "samples"):
            ours, theirs = (toys.play(k, settings={"weighting": weighting}, drop_rate=0.3) for k in (kind, FedAvg))
            assert all(toys.same(a.next_server, b.next_server) for a, b in zip(ours, theirs, strict=True))
            assert all(a.metrics["personal_accuracy_mean"] == b.metrics["personal_accuracy_mean"]
                       for a, b in zip(ours, theirs, strict=True))  # fmt: skip


def check_4_shared_items_are_the_mean_of_the_uploads(kind: type[Algorithm[Any]]) -> None:
    """Of those who took part, with equal weights, though they have 5, 8, 3 and 8 rows; all are sent the same."""
    turns = play(kind, participation=0.5)
    for turn in turns:
        assert len(turn.ups) == 2
        mean = {k: torch.stack([up[k] for up in turn.ups.values()]).mean(0) for k in SHARED}
        assert toys.distance({k: turn.next_server[k] for k in SHARED}, mean) < 1e-15
        first = next(iter(turn.downs.values()))
        assert all(toys.same(down, first) for down in turn.downs.values())
    assert any(len({toys.TRAIN[c] for c in turn.ups}) == 2 for turn in turns)


def check_4_clients_with_shifted_inputs_have_other_statistics(kind: type[Algorithm[Any]]) -> None:
    """Inputs of client 1 are those of client 0, brighter by 1 at the same weights: the convolution's output moves by the
    sum of its weights, and the mean with it, a tenth of the way; the variance does not."""
    made = toys.setup(kind, net=net())
    algorithm, (x, y) = made.algorithm, toys.batch(8)
    fresh = made.server_fresh
    server = algorithm.init_server(fresh)
    states = []
    for shift in (0, 1):
        work = toys.work(x + shift, y, algorithm.net)
        states.append(algorithm.local(work, algorithm.init_client(fresh, server), algorithm.downlink(server, 0)).state)
    moved = states[1]["body.scale.running_mean"] - states[0]["body.scale.running_mean"]
    assert torch.allclose(moved, 0.1 * fresh["body.conv.weight"].sum((1, 2, 3)), rtol=0, atol=1e-14)
    assert torch.allclose(*(s["body.scale.running_var"] for s in states), rtol=0, atol=1e-14)


def check_5_equal_clients_have_equal_norms(kind: type[Algorithm[Any]]) -> None:
    """The same rows in one full batch, so that no order differs."""
    data = toys.dataset([6, 6], [(0, 1, 2)])
    images = data.images.copy()
    images[9:15] = images[:6]
    object.__setattr__(data, "images", images)
    for turn in play(kind, data=data, batch_size=10):
        assert toys.same(turn.next_states[0], turn.next_states[1])
        assert not toys.same(norms_in(turn.next_states[0]), norms_in(turn.states[0]))


def check_6_one_step_gives_the_gradient_at_the_clients_own_norms(kind: type[Algorithm[Any]]) -> None:
    """Against torch's module in training mode; in the second round, when the norms are no longer those of a new layer."""
    made = toys.setup(kind, net=net(), batch_size=100, local_epochs=1)
    turn = toys.rounds(made, 2)[1]
    for c, up in turn.ups.items():
        ctx = toys.context(made, 1, c)
        loss = F.cross_entropy((whole := plain(turn.downs[c] | norms_in(turn.states[c])))(ctx.x), ctx.y)
        names = {k.replace("body.", "").replace("head.", "fc."): k for k in made.net.shapes}
        gradient = torch.autograd.grad(loss, list(whole.parameters()))
        wanted = {names[n]: g for (n, _), g in zip(whole.named_parameters(), gradient, strict=True)}
        seen = made.algorithm.change(turn.states[c], turn.downs[c], up, ctx.lr, 1)
        assert toys.distance(seen, {k: wanted[k] for k in SHARED}) < 1e-12
        assert float(wanted["body.conv.weight"].abs().max()) > 1e-3
        step = {k: turn.states[c][k] - ctx.lr * wanted[k] for k in NORMS if k.endswith(("weight", "bias"))}
        assert toys.distance({k: turn.next_states[c][k] for k in step}, step) < 1e-12
        assert toys.distance(norms_in(turn.next_states[c]), {names[n]: v for n, v in whole.state_dict().items()
                             if names.get(n) in NORMS} | step) < 1e-12  # fmt: skip


def test_fedbn_1_no_item_of_a_batchnorm_layer_is_on_the_wire():
    check_1_no_item_of_a_batchnorm_layer_is_on_the_wire(FedBN)


@pytest.mark.parametrize(
    ("make", "layers"),
    [(torchvision.models.resnet18, 20), (torchvision.models.mobilenet_v2, 52)],
    ids=["resnet18", "mobilenet"],
)
def test_fedbn_1_no_layer_of_a_usual_network_is_forgotten(make: Any, layers: int):
    """Counted in torchvision's own: 20 layers, 3 of them without "bn" in their names; 52, none of them with it."""
    whole = make(num_classes=7)
    if layers == 52:
        whole.classifier = nn.Linear(1280, 7)  # without its dropout
    ours = from_module(whole, (3, 32, 32), 7)
    algorithm = toys.method(FedBN, ours)
    assert len(ours.batchnorms) == layers
    assert len(ours.norms) == 4 * layers
    assert len(ours.norms - ours.buffers) == 2 * layers
    assert algorithm.contract.items("up").keys() == (ours.shapes.keys() - ours.norms) | {"num_samples"}


def test_fedbn_2_the_downlink_changes_no_norm():
    check_2_the_downlink_changes_no_norm(FedBN)


def test_fedbn_3_without_batchnorm_it_is_fedavg():
    check_3_without_batchnorm_it_is_fedavg(FedBN)


def test_fedbn_3_without_batchnorm_it_warns_once():
    with pytest.warns(PflsecWarning, match=r"no BatchNorm layer, so this is fedavg with weighting=samples") as seen:
        toys.method(FedBN, weighting="samples")
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        toys.method(FedBN, net())
        toys.method(FedBN, net(frozen=True))


def test_with_batchnorm_it_is_not_fedavg():
    ours, theirs = (play(kind, settings={"weighting": "samples"})[-1] for kind in (FedBN, FedAvg))
    assert toys.distance({k: ours.next_server[k] for k in SHARED}, {k: theirs.next_server[k] for k in SHARED}) > 1e-3


def test_fedbn_4_shared_items_are_the_mean_of_the_uploads():
    check_4_shared_items_are_the_mean_of_the_uploads(FedBN)


def test_fedbn_4_clients_with_shifted_inputs_have_other_statistics():
    check_4_clients_with_shifted_inputs_have_other_statistics(FedBN)


def test_fedbn_5_equal_clients_have_equal_norms():
    check_5_equal_clients_have_equal_norms(FedBN)


def test_fedbn_6_one_step_gives_the_gradient_at_the_clients_own_norms():
    check_6_one_step_gives_the_gradient_at_the_clients_own_norms(FedBN)


def test_a_bias_in_front_of_a_norm_says_nothing():
    """What is added to all of a batch is taken off again: its gradient is zero."""
    made = toys.setup(FedBN, net=net(), batch_size=100, local_epochs=1)
    turn = toys.rounds(made, 1)[0]
    seen = made.algorithm.change(turn.states[0], turn.downs[0], turn.ups[0], 0.1, 1)
    assert float(seen["body.conv.bias"].abs().max()) < 1e-14
    assert float(seen["body.conv.weight"].abs().max()) > 1e-3


# --- clients that are away, and new ones


def test_an_absent_client_keeps_its_norms_and_is_tested_with_the_new_shared_items():
    made = toys.setup(FedBN, net=net(), participation=0.5, seed=2)
    for turn in toys.rounds(made):
        for c in set(range(4)) - turn.ups.keys():
            assert toys.same(turn.next_states[c], turn.states[c])
            tested = made.algorithm.deploy(turn.next_states[c], made.algorithm.downlink(turn.next_server, c))
            assert all(torch.equal(tested[k], turn.next_server[k]) for k in SHARED)


def calibrated(trained: bool, **settings: Any) -> tuple[Items, Items]:
    """Return a client's tested items before and after they are fitted to it."""
    made = toys.setup(FedBN, net=net(), settings=settings)
    state = newcomer(made.algorithm, made.net, torch.Generator().manual_seed(0)) | {"trained": torch.tensor(trained)}
    items = made.algorithm.deploy(state, made.algorithm.init_server(made.server_fresh))
    return items, made.algorithm.personalise(toys.context(made, 0, 1), items)


def test_a_new_clients_statistics_see_its_rows_once_before_it_is_tested():
    """As torch's would in one pass in training mode: 8 rows, two batches."""
    before, after = calibrated(trained=False)
    whole = plain({k: v for k, v in before.items() if k != "trained"})
    made = toys.setup(FedBN, net=net())
    with torch.no_grad():
        for x, _ in toys.context(made, 0, 1).batches(epochs=1, phase="calibrate"):
            whole(x)
    state = {k: whole.state_dict()[k.replace("body.", "").replace("head.", "fc.")] for k in after if k != "trained"}
    assert toys.distance({k: after[k] for k in state}, state) < 1e-12
    assert toys.same({k: after[k] for k in SHARED}, {k: before[k] for k in SHARED})
    assert not torch.equal(after["body.bn1.running_mean"], before["body.bn1.running_mean"])


def test_a_client_that_has_trained_is_tested_as_it_is():
    assert toys.same(*calibrated(trained=True))


def test_calibration_can_be_left_out():
    assert toys.same(*calibrated(trained=False, calibrate_new=False))


def test_the_first_norms_are_public_and_later_ones_hidden():
    """Every client's begin at weight 1, bias 0, mean 0 and variance 1, so the first exchange hides nothing."""
    turns = play(FedBN, 2)
    start = {
        k: torch.full(v.shape, float(k.endswith(("weight", "var")))) for k, v in norms_in(turns[0].states[0]).items()
    }
    for c in range(4):
        assert toys.same(norms_in(turns[0].states[c]), start)
        assert not any(torch.equal(turns[1].states[c][k], v) for k, v in start.items())
    assert toys.method(FedBN, net()).reconstruct_state(turns[1].states[0]) is None


# --- settings, policies, refusals


@pytest.mark.parametrize("policy", ["local", "frozen"])
def test_the_policy_for_statistics_adds_nothing(policy: str):
    """They stay on the client in any case; frozen, only weight and bias do."""
    plain_run = play(FedBN)[-1]
    other = toys.rounds(toys.setup(FedBN, net=net(frozen=policy == "frozen"), buffers=policy))[-1]
    assert other.ups[0].keys() == plain_run.ups[0].keys() == SHARED
    if policy == "local":
        assert toys.same(other.next_server, plain_run.next_server)
        assert all(toys.same(other.next_states[c], plain_run.next_states[c]) for c in range(4))
    else:
        assert norms_in(other.next_states[0]).keys() == {n for n in NORMS if "running" not in n}


def grouped() -> Network:
    """Return the toy network with GroupNorm and LayerNorm in place of BatchNorm."""
    swapped = LAYERS | {"scale": lambda: nn.GroupNorm(2, 4), "bn1": lambda: nn.LayerNorm(5)}
    return Network(
        lambda: nn.Sequential(OrderedDict((n, make()) for n, make in swapped.items())), toys.SHAPE, toys.CLASSES
    )


def kept(network: Network, **settings: Any) -> frozenset[str]:
    """Return what stays on the client."""
    return FedBN(FedBNConfig(**settings), network, 4).kept()


def test_other_norms_are_shared_unless_they_are_personal():
    names = {f"body.{n}.{k}" for n in ("scale", "bn1") for k in ("weight", "bias")}
    with pytest.warns(PflsecWarning, match="no BatchNorm layer"):
        assert kept(grouped()) == frozenset()
    assert kept(grouped(), personal_norms=True) == names
    turn = toys.rounds(toys.setup(FedBN, net=grouped(), settings={"personal_norms": True}))[0]
    assert not names & turn.ups[0].keys()
    assert names <= turn.next_states[0].keys()
    assert kept(net(), personal_norms=True) == NORMS


def test_a_model_of_norms_alone_is_refused():
    only = Network(lambda: nn.Sequential(OrderedDict(flat=nn.Flatten(), bn=nn.BatchNorm1d(16))), toys.SHAPE, 16)
    with pytest.raises(ConfigError, match="nothing is left to share"):
        toys.method(FedBN, only)


def test_there_is_no_global_model_and_the_wire_table_says_what_stays():
    made = toys.setup(FedBN, net=net())
    assert made.algorithm.global_model(made.algorithm.init_server(made.server_fresh)) is None
    rows = [r for r in manifest.wire_table(made) if r["direction"] == "private"]
    found = {(r["item"], r["kind"]): (r["tensors"], r["numbers"]) for r in rows}
    assert found == {("normalisation layers", "weights"): (4, 18), ("normalisation layers", "buffers"): (4, 18)}


def test_a_client_with_one_row_trains():
    """One value a channel: the second layer gives its bias alone, and the variance of one value counts as 0."""
    for turn in play(FedBN, data=toys.dataset([1, 8], [(0,), (0, 1, 2)])):
        state: Tensor = turn.next_states[0]["body.bn1.running_var"]
        assert torch.allclose(state, torch.full((5,), 0.9 ** (2 * (turn.t + 1))))
        assert all(v.isfinite().all() for v in turn.ups[0].values())


def test_it_is_in_the_catalogue_with_small_and_large_networks():
    for name in ("cnn-bn", "resnet18"):
        algorithm = toys.method("fedbn", catalogue.build(name, (1, 8, 8), 10))
        assert algorithm.contract.items("down").keys() == algorithm.net.shapes.keys() - algorithm.net.norms
