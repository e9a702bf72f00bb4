"""What becomes of running statistics: sent and averaged, kept on the client, or frozen; and who may train them at all."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pflsec.config.train import TrainConfig, resolve
from pflsec.core import registry
from pflsec.core.algorithm import Algorithm, Done
from pflsec.core.buffers import LocalBuffers
from pflsec.core.config import Config
from pflsec.core.errors import ConfigError, PrivacyError
from pflsec.core.items import Items, combine, prefixed, select, subtract, weighted_mean, without_prefix
from pflsec.core.local import Local
from pflsec.runtime import manifest
from pflsec.runtime.rounds import Federated
from pflsec.runtime.setup import Setup, prepare
from tests import toys

pytestmark = pytest.mark.usefixtures("doubles")
BUFFERS = sorted(toys.normed().buffers)


def made(kind: Any = "fedavg", policy: str = "aggregate", **options: Any) -> Setup:
    """Return a run of a method on the toy federation, with a network that has BatchNorm layers."""
    return toys.setup(kind, net=toys.normed(frozen=policy == "frozen"), buffers=policy, **options)


def batch_moments(items: Items, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and unbiased variance of what the first BatchNorm layer sees, by channel."""
    seen = F.conv2d(x, items["body.conv.weight"], items["body.conv.bias"]).transpose(0, 1).flatten(1)
    return seen.mean(1), seen.var(1)


# --- aggregate


def test_aggregated_statistics_are_averaged_like_weights():
    """FedAvg: by number of samples, 5, 8, 3 and 8 of 24."""
    turn = toys.rounds(made())[0]
    for name in BUFFERS:
        mean = sum(n / 24 * turn.ups[c][name] for c, n in enumerate(toys.TRAIN))
        assert torch.allclose(turn.next_server[name], torch.as_tensor(mean), rtol=0, atol=1e-14)
        assert not torch.equal(turn.ups[0][name], turn.ups[1][name])
    assert all(torch.equal(turn.downs[c][name], turn.server[name]) for c in range(4) for name in BUFFERS)


def test_bytes_of_statistics_are_counted_apart():
    """2 layers of 4 and 5 channels: 18 numbers, each 8 bytes wide, to and from 4 clients."""
    setup = made()
    parameters = setup.net.size()
    for way in toys.rounds(setup)[0].metrics["bytes_by_kind"].values():
        assert way == {"weights": 8 * parameters * 4, "buffers": 8 * 18 * 4}


def test_one_step_gives_the_moments_of_the_batch_away():
    """r' = 0.9 r + 0.1 m, so m = (r' - 0.9 r) / 0.1; what an attack is shown is r' - r = 0.1 (m - r)."""
    setup = made(local_epochs=1, batch_size=100)
    algorithm, start = setup.algorithm, setup.server_fresh
    ctx = toys.context(setup, 0, 3)
    up = algorithm.local(ctx, {}, start).up
    seen = algorithm.change({}, start, up, ctx.lr, 1)
    for key, moment in zip(("running_mean", "running_var"), batch_moments(start, ctx.x), strict=True):
        name = f"body.bn.{key}"
        assert torch.allclose((up[name] - 0.9 * start[name]) / 0.1, moment, rtol=0, atol=1e-12)
        assert torch.allclose(seen[name], 0.1 * (moment - start[name]), rtol=0, atol=1e-13)


def test_one_client_is_plain_training_with_torchs_own_layers():
    """One client, several rounds: nothing is averaged, so the server has what a plain loop would have."""
    setup = made(data=toys.dataset([10], [(0, 1, 2)]), rounds=3)
    module = toys.normed_module()
    names = {k: k.replace("body.", "").replace("head.", "fc.") for k in setup.net.shapes}
    module.load_state_dict({names[k]: v for k, v in setup.server_fresh.items()}, strict=False)
    sgd = torch.optim.SGD(module.parameters(), 0.1)
    for turn in toys.rounds(setup):
        for x, y in toys.context(setup, turn.t, 0).batches():
            sgd.zero_grad()
            F.cross_entropy(module(x), y).backward()
            sgd.step()
        plain = module.state_dict()
        assert toys.distance(turn.next_server, {k: plain[n] for k, n in names.items()}) < 1e-12


def test_the_global_model_is_tested_with_the_servers_statistics():
    setup = made()
    turn = toys.rounds(setup)[-1]
    model = setup.algorithm.global_model(turn.next_server)
    assert model is not None
    assert toys.same(model, turn.next_server)
    assert sorted(k for k in model if k in setup.net.buffers) == BUFFERS
    x, y = setup.federation.global_test_set()
    module = toys.normed_module().eval()
    plain = {k.replace("body.", "").replace("head.", "fc."): v for k, v in model.items()}
    module.load_state_dict(plain, strict=False)
    right = (module(x.to(torch.float64)).argmax(1) == y).double().mean()
    assert turn.metrics["global_accuracy"] == pytest.approx(float(right))


# --- local


def test_local_statistics_are_those_of_the_clients_own_training():
    """Each client's follow its own batches from round to round, at weights that are the federation's."""
    setup = made(policy="local", rounds=3)
    own = {c: {k: v for k, v in setup.server_fresh.items() if k in setup.net.buffers} for c in range(4)}
    for turn in toys.rounds(setup):
        assert all(BUFFERS[0] not in message for message in (*turn.downs.values(), *turn.ups.values()))
        for c in range(4):
            ctx = toys.context(setup, turn.t, c)
            model = ctx.fit(turn.downs[c] | own[c], on=ctx.ce)
            own[c] = {k: v for k, v in model.items() if k in setup.net.buffers}
            assert toys.distance(without_prefix("buffers", turn.next_states[c]), own[c]) < 1e-14
            assert (
                toys.distance({k: turn.ups[c][k] for k in turn.downs[c]}, {k: model[k] for k in turn.downs[c]}) < 1e-14
            )
        assert "buffers" not in turn.metrics["bytes_by_kind"]["up"]
        assert turn.metrics["global_accuracy"] is None


def test_the_tested_model_has_the_clients_own_statistics():
    setup = made(policy="local")
    turn = toys.rounds(setup)[-1]
    down = setup.algorithm.downlink(turn.next_server, 2)
    tested = setup.algorithm.deploy(turn.next_states[2], down)
    assert toys.same(
        {k: v for k, v in tested.items() if k in setup.net.buffers}, without_prefix("buffers", turn.next_states[2])
    )
    assert all(torch.equal(tested[k], v) for k, v in down.items())


def test_an_absent_client_keeps_its_statistics():
    for turn in toys.rounds(made(policy="local", participation=0.5, seed=2)):
        assert all(toys.same(turn.next_states[c], turn.states[c]) for c in range(4) if c not in turn.ups)


class Deltas(Algorithm[Config]):
    """Sends by how much its model moved, running statistics included."""

    key, shared = "deltas", ("body", "head")
    down: ClassVar = {"body.*": "weights", "head.*": "weights"}
    up: ClassVar = {"delta.*": "weights-delta"}
    batchnorm = "yes"

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        return Done(state, prefixed("delta", subtract(ctx.fit(down, on=ctx.ce), down)))

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        mean = weighted_mean(ups.values(), [1.0] * len(ups))
        return combine(torch.add, server, without_prefix("delta", mean))

    def deploy_trained(self, state: Items, down: Items, up: Items) -> Items:
        return combine(torch.add, select(down, *self.shared), without_prefix("delta", up))


def test_local_statistics_of_a_method_that_sends_deltas_move_as_well():
    plain, deltas = (toys.rounds(made(kind, "local"), 1)[0] for kind in ("fedavg", Deltas))
    assert not [k for k in deltas.ups[0] if "running" in k]
    assert deltas.next_states[0].keys() == plain.next_states[0].keys()
    assert toys.distance(deltas.next_states[0], plain.next_states[0]) < 1e-13
    sent = combine(torch.add, deltas.downs[0], without_prefix("delta", deltas.ups[0]))
    assert toys.distance(sent, select(plain.ups[0], "body", "head")) < 1e-13


@pytest.mark.parametrize("policy", ["aggregate", "local", "frozen"])
def test_a_whole_run_is_the_same_with_the_clients_in_another_order(policy: str):
    """Seen from the server: uploads are added up in client order, so that another order changes rounding alone."""
    setup = made(policy=policy)
    turn = toys.rounds(setup)[0]
    backward = setup.algorithm.aggregate(turn.server, {c: turn.ups[c] for c in (3, 2, 1, 0)})
    assert toys.distance(backward, setup.algorithm.aggregate(turn.server, turn.ups)) < 1e-14


# --- frozen


def test_frozen_statistics_are_on_no_message_and_in_no_state():
    for turn in toys.rounds(made(policy="frozen")):
        for items in (turn.server, *turn.downs.values(), *turn.ups.values(), *turn.next_states.values()):
            assert not [k for k in items if "running" in k]


# --- who may train them

OPTIONS = {"model": "cnn-bn", "clients": 4, "alpha": 1.0, "rounds": 2, "capture_rounds": "none"}


def plan(algo: str, **options: Any) -> Setup:
    return prepare(resolve(OPTIONS | {"algo": algo} | options))


@pytest.mark.parametrize(
    ("algo", "policy", "remedy"),
    [
        ("scaffold", "aggregate", "control variates .* Use --buffers frozen, or a model with GroupNorm"),
        ("scaffold", "local", "control variates .* Use --buffers frozen, or"),
        ("perfedavg", "aggregate", "it takes gradients .* Use --buffers frozen, or"),
        ("perfedavg", "local", "it takes gradients .* Use --buffers frozen, or"),
        ("fedamp", "aggregate", "the server measures distances .* Use --buffers local or --buffers frozen, or"),
    ],
)
def test_a_method_that_would_corrupt_statistics_is_refused_with_reason_and_remedy(algo: str, policy: str, remedy: str):
    with pytest.raises(ConfigError, match=f"{algo} .* cnn-bn .first: bn1. with --buffers {policy}: {remedy}"):
        plan(algo, buffers=policy)


SILENT = """
from pflsec.algorithms.traditional.fedavg import FedAvg
from pflsec.core.algorithm import Algorithm

class Silent(FedAvg):
    key, batchnorm = "silent", Algorithm.batchnorm
"""


@pytest.mark.parametrize("policy", ["aggregate", "local"])
def test_a_method_that_says_nothing_is_refused(policy: str, tmp_path: Path):
    (tmp_path / "mine.py").write_text(SILENT)
    with pytest.raises(ConfigError, match=r"the method does not say .* Use --buffers frozen"):
        plan(f"{tmp_path}/mine.py:Silent", buffers=policy)
    assert plan(f"{tmp_path}/mine.py:Silent", buffers="frozen").algorithm.key == "silent"


@pytest.mark.parametrize("algo", registry.names("algorithms"))
def test_every_method_may_train_with_frozen_statistics_or_without_any(algo: str):
    assert not plan(algo, buffers="frozen").net.buffers
    if algo != "fedbn":  # warns
        assert not plan(algo, model="mlp").net.buffers


def test_the_policy_decides_what_a_run_is_made_of():
    assert isinstance(plan("fedavg", buffers="local").algorithm, LocalBuffers)
    assert not isinstance(plan("fedavg", model="mlp", buffers="local").algorithm, LocalBuffers)
    assert not isinstance(plan("fedavg", buffers="aggregate").algorithm, LocalBuffers)


@pytest.mark.parametrize("policy", ["aggregate", "local"])
def test_private_training_refuses_batchnorm_by_the_layers_name(policy: str):
    setup = plan("fedavg", buffers=policy, defense=["dp-sgd:epsilon=8"])
    with pytest.raises(PrivacyError, match=r"dp-sgd: its layer 'bn1' is BatchNorm, .*--buffers frozen"):
        Federated(setup)


def test_private_training_accepts_frozen_statistics():
    torch.set_default_dtype(torch.float32)
    setup = plan("fedavg", buffers="frozen", defense=["dp-sgd:epsilon=8"], dp_seed=5, rounds=1, batch_size=100)
    metrics, _ = Federated(setup).advance()
    assert 0 < metrics["epsilon"] <= 8


def test_a_network_with_batchnorm_learns_alike_clients():
    """IID: the averaged model comes near to what one client with all rows learns in as many passes."""
    torch.set_default_dtype(torch.float32)
    found = []
    for clients in (4, 1):
        federated = Federated(plan("fedavg", clients=clients, partition="iid", alpha=0.1, batch_size=20))
        federated.advance()
        found.append(federated.advance()[0]["personal_accuracy_weighted"])
    assert min(found) > 0.9
    assert abs(found[0] - found[1]) < 0.05


# --- what is written down


@pytest.mark.parametrize("policy", ["aggregate", "local", "frozen"])
def test_the_manifest_says_which_policy_held(policy: str):
    assert manifest.describe(plan("fedavg", buffers=policy), "run")["model"]["bn_buffers"] == policy


def test_the_manifest_says_that_there_are_no_statistics():
    assert manifest.describe(plan("fedavg", model="mlp"), "run")["model"]["bn_buffers"] == "n/a"


def rows(setup: Setup) -> dict[tuple[str, str, str], tuple[int, int]]:
    return {(r["direction"], r["item"], r["kind"]): (r["tensors"], r["numbers"]) for r in manifest.wire_table(setup)}


def test_the_wire_table_counts_statistics_apart():
    """Body: conv 4 * 4 + 4, fc1 36 * 5 + 5, and two layers of 4 and 5 channels with 2 weights and 2 statistics a channel."""
    body = ("body.*", "weights"), (8, 20 + 185 + 18)
    head = ("head.*", "weights"), (2, 18)
    statistics = ("body.*", "buffers"), (4, 18)
    sent = {(way, *key): size for way in ("down", "up") for key, size in (body, head, statistics)}
    count = {("up", "num_samples", "counts"): (1, None)}
    assert rows(made()) == sent | count
    bare = {k: v for k, v in sent.items() if k[2] != "buffers"}
    assert rows(made(policy="frozen")) == bare | count
    assert rows(made(policy="local")) == bare | count | {("private", "normalisation layers", "buffers"): (4, 18)}


def test_the_option_says_what_its_choices_do():
    about = TrainConfig.model_fields["buffers"].description or ""
    assert all(word in about for word in ("aggregate:", "local:", "frozen:"))
