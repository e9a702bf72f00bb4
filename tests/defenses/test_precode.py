"""PRECODE: one step by hand, who draws noise and who does not, and attackers who read it off the wire."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pflsec import api
from pflsec.core.config import build
from pflsec.core.errors import ConfigError, PrivacyError
from pflsec.core.files import read_json
from pflsec.core.items import Items, select
from pflsec.core.streams import stream
from pflsec.defenses.step.precode import Bottleneck, Precode, PrecodeConfig, code, divergence
from pflsec.models import catalogue
from pflsec.models.network import Network
from pflsec.runtime import privacy
from pflsec.runtime.defending import inside, parse_defense
from pflsec.runtime.folder import RunFolder
from pflsec.runtime.replay import capture, local_work, relative_distance
from pflsec.training.local import Training
from pflsec.wire.capture import Capture
from pflsec.wire.store import CaptureStore
from tests import toys
from tests.attacks.victims import Victim, attack, victim

WIDTH = 4
TEXT = f"precode:width={WIDTH}"
ADDED = [f"body.precode.{part}.{name}" for part in ("encoder", "decoder") for name in ("weight", "bias")]


def precode(**settings: object) -> Precode:
    return Precode(build(PrecodeConfig, {"width": WIDTH} | settings, "precode"))


def longer(net: Network | None = None) -> Network:
    return (net or toys.tiny()).lengthened("precode", precode().layer)


def hand_code(items: Mapping[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and log variance [B, width] in the longer tiny network."""
    h = toys.hand_features(items, x)
    both = F.linear(h, items["body.precode.encoder.weight"], items["body.precode.encoder.bias"])
    return both[:, :WIDTH], both[:, WIDTH:]


def hand_features(items: Mapping[str, Tensor], x: Tensor, eps: Tensor | float) -> Tensor:
    """Return the features [B, 5] with this noise."""
    mean, log_var = hand_code(items, x)
    z = mean + torch.exp(log_var / 2) * eps
    return F.linear(z, items["body.precode.decoder.weight"], items["body.precode.decoder.bias"])


def hand_loss(items: Mapping[str, Tensor], x: Tensor, y: Tensor, eps: Tensor, beta: float) -> Tensor:
    mean, log_var = hand_code(items, x)
    ours = torch.distributions.Normal(mean, torch.exp(log_var / 2))
    apart = torch.distributions.kl_divergence(ours, torch.distributions.Normal(0.0, 1.0)).sum(1)
    logits = F.linear(hand_features(items, x, eps), items["head.weight"], items["head.bias"])
    return F.cross_entropy(logits, y) + beta * apart.mean()


def sent(v: Victim, *key: int | str) -> Victim:
    """Return the victim with the upload of a client that trains under the run's defenses."""
    ctx = local_work(v.setup.net, v.record, v.x, v.y, v.setup.config.seed, Training)
    return v.with_upload(v.setup.algorithm.local(inside(ctx, v.setup.defenses, *key), v.state, v.record.down).up)


def known(v: Victim, *, naive: bool = False, **options: Any) -> Capture:
    defenses = () if naive else v.setup.defenses
    given: dict[str, Any] = {"labels": v.y} | options
    return capture(v.setup.algorithm, v.setup.net, v.record, history=True, seed=0, defenses=defenses, **given)


def gap(v: Victim, **options: Any) -> float:
    """Return how far the replay of the truth is from what was sent, relative."""
    cap = known(v, **options)
    return relative_distance(cap.replay(v.x.double(), v.y, v.state), cap.target)


@pytest.mark.usefixtures("doubles")
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_a_step_is_the_gradient_of_loss_and_divergence_with_the_noise_of_the_stream(beta: float):
    net, (x, y) = longer(), toys.batch()
    items = net.fresh("start")
    ctx = toys.work(x, y, net, model_defense=precode(beta=beta).at(net, "noise"))
    moved = ctx.fit(items, ctx.ce)
    eps = torch.randn(len(y), WIDTH, generator=stream("noise"))
    right = toys.hand_gradient(items, x, y, lambda p, x, y: hand_loss(p, x, y, eps, beta))
    assert toys.distance(moved, toys.hand_step(items, right, 0.1)) < 1e-12
    assert float(ctx.losses[0]) == pytest.approx(float(hand_loss(items, x, y, eps, beta)))
    whole = toys.work(x, y, net, model_defense=precode(beta=beta).at(net, "noise"))
    assert toys.distance(whole.full_gradient(items, whole.ce), right) < 1e-12


def test_the_divergence_is_that_of_torch():
    rng = torch.Generator().manual_seed(0)
    mean, log_var = (torch.randn(6, WIDTH, generator=rng) for _ in range(2))
    normal = torch.distributions.Normal
    right = torch.distributions.kl_divergence(normal(mean, torch.exp(log_var / 2)), normal(0.0, 1.0)).sum(1)
    assert torch.allclose(divergence(mean, log_var), right, atol=1e-6)
    assert divergence(torch.zeros(2, 3), torch.zeros(2, 3)).tolist() == [0, 0]


def test_outside_of_a_step_the_mean_is_decoded_and_nothing_is_drawn():
    net, (x, y) = longer(), toys.batch()
    items, before = net.fresh("start"), torch.get_rng_state()
    ctx = toys.work(x, y, net, model_defense=precode(beta=0).at(net, "noise"))
    ctx.fit(items, ctx.ce)
    assert torch.equal(ctx.features(select(items, "body")), net.features(items, x))
    assert torch.allclose(net.features(items, x), hand_features(items, x, 0.0), atol=1e-6)
    trained = {k: v.clone().requires_grad_() for k, v in items.items()}
    assert torch.equal(net.logits(trained, x), net.logits(items, x))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_teacher_and_a_body_that_stands_still_decode_the_mean():
    net, (x, y) = longer(), toys.batch()
    items, teacher = net.fresh("start"), net.fresh("teacher")
    heard: list[Tensor] = []

    def on(params: Items, x: Tensor, y: Tensor) -> Tensor:
        heard.extend((net.features(teacher, x), net.features(params, x)))
        return ctx.ce(params, x, y)

    ctx = toys.work(x, y, net, model_defense=precode().at(net, "noise"))
    ctx.fit(items, on)
    assert torch.equal(heard[0], net.features(teacher, x))
    assert not torch.allclose(heard[1], net.features(items, x), atol=1e-3)
    body, head = select(items, "body"), select(items, "head")
    alone = [
        toys.work(x, y, net, model_defense=some).fit(head, on=ctx.head_ce, features_of=body)
        for some in (None, precode().at(net, "noise"))
    ]
    assert toys.same(*alone)


def test_draws_of_all_other_parameters_are_those_of_the_shorter_network():
    short, long = toys.tiny(), longer()
    a, b = short.fresh("start"), long.fresh("start")
    assert [k for k in b if k not in a] == ADDED
    assert toys.same(a, {k: b[k] for k in a})
    assert (long.feature_dim, long.last_layer, long.split) == (short.feature_dim, short.last_layer, short.split)
    assert long.size() == short.size() + 2 * WIDTH * 6 + 5 * (WIDTH + 1)
    assert short.inserted is None
    assert isinstance(long.inserted, Bottleneck)


def forked() -> nn.Module:
    """Return a network whose last layer stands within another."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1 = nn.Linear(16, 5)
            self.end = nn.ModuleDict({"fc": nn.Linear(5, toys.CLASSES)})

        def forward(self, x: Tensor) -> Tensor:
            return self.end["fc"](self.fc1(x.flatten(1)).tanh())

    return Outer()


def row() -> nn.Module:
    """Return a network that is cut in the middle of its row of layers."""
    named: dict[str, nn.Module] = {
        "a": nn.Flatten(),
        "b": nn.Linear(16, 5),
        "c": nn.Tanh(),
        "d": nn.Linear(5, 4),
        "e": nn.Linear(4, 3),
    }
    layers = OrderedDict(named)
    return nn.Sequential(layers)


@pytest.mark.parametrize(
    ("factory", "split", "at"), [(forked, "end.fc", "body.end.fc.precode"), (row, "d", "body.precode")]
)
def test_the_bottleneck_stands_at_the_cut_wherever_that_is(factory: Any, split: str, at: str):
    short = Network(factory, toys.SHAPE, toys.CLASSES, split)
    net, (x, _) = longer(short), toys.batch()
    items = net.fresh("start")
    assert {k for k in items if k.startswith(at)} == items.keys() - short.shapes.keys()
    h = short.features(items, x)
    mean = F.linear(h, items[f"{at}.encoder.weight"], items[f"{at}.encoder.bias"])[:, :WIDTH]
    right = F.linear(mean, items[f"{at}.decoder.weight"], items[f"{at}.decoder.bias"])
    assert torch.allclose(net.features(items, x), right, atol=1e-6)
    assert torch.allclose(net.logits(items, x), short.head(items, right), atol=1e-6)


def test_running_statistics_in_front_of_it_follow_the_batches_as_ever():
    short = toys.normed()
    net, (x, y) = longer(short), toys.batch()
    items = net.fresh("start")
    ctx, plain = toys.work(x, y, net, model_defense=precode().at(net, "noise")), toys.work(x, y, short)
    moved, usual = ctx.fit(items, ctx.ce), plain.fit({k: items[k] for k in short.shapes}, plain.ce)
    assert all(torch.equal(moved[k], usual[k]) for k in short.buffers)
    assert any(not torch.equal(moved[k], items[k]) for k in short.buffers)


def test_the_noise_is_that_of_its_key_alone():
    v = victim(defense=[TEXT])
    first, again, other = (sent(v, *key).record.up for key in ((0, 1), (0, 1), (0, 1, "r000-c01-v0-probe")))
    assert toys.same(first, again)
    assert not toys.same(first, other)
    assert not toys.same(first, v.record.up)


# --- attackers


@pytest.mark.usefixtures("doubles")
@pytest.mark.parametrize("key", ["fedavg", "fedrep", "scaffold", "ditto", "fedntd", "apple", "fedpac", "fedcp"])
def test_the_replay_of_the_truth_meets_what_was_sent_for_one_image(key: str):
    v = sent(victim(key, defense=[TEXT]), "noise")
    assert gap(v) < 1e-9
    assert gap(v, naive=True) > 0.2


@pytest.mark.usefixtures("doubles")
def test_no_noise_is_read_off_a_sum():
    v = sent(victim("fedavg", defense=[TEXT]), "noise")
    summed = replace(v, record=replace(v.record, facts={**v.record.facts, "summed": 2}))
    assert gap(v) < 1e-9
    assert gap(summed) > 0.01


@pytest.mark.usefixtures("doubles")
def test_it_stands_beside_soteria():
    both, alone = (sent(victim(defense=d), "noise") for d in (["soteria:prune=0.4", TEXT], [TEXT]))
    zeroed = (both.record.up["head.weight"] == both.record.down["head.weight"]).all(0)
    assert int(zeroed.sum()) == 2
    assert toys.same(*({k: v for k, v in w.record.up.items() if k != "head.weight"} for w in (both, alone)))
    assert gap(both) < 1e-9


@pytest.mark.usefixtures("doubles")
def test_of_a_batch_the_mean_is_decoded_and_what_the_noise_moves_most_is_left_out():
    v = sent(victim(batch=2, defense=[TEXT]), "noise")
    cap = known(v)
    found = cap.replay(v.x, v.y, v.state)
    right = toys.hand_gradient(
        v.record.down, v.x, v.y, lambda p, x, y: hand_loss(p, x, y, torch.zeros(len(y), WIDTH), 1e-3)
    )
    compared = {"body.fc1.weight", "body.fc1.bias", "head.bias"}
    assert toys.distance(*({k: items[k] for k in compared} for items in (found, right))) < 1e-9
    assert all(torch.equal(found[k], cap.target[k]) for k in found.keys() - compared)
    assert gap(v) < gap(v, naive=True) / 2


@pytest.mark.usefixtures("doubles")
def test_the_noise_is_read_from_what_the_attacker_sees_alone():
    v = sent(victim(defense=[TEXT]), "noise")
    for hidden in ADDED[2:]:
        seen = [k for k in v.record.up if k != hidden]
        assert gap(v, visible=seen) > 0.01
    assert gap(v, visible=[k for k in v.record.up if k not in ADDED[:2]]) < 1e-9


def test_a_code_is_read_where_one_is_behind_the_gradient():
    rng = torch.Generator().manual_seed(0)
    (z, u), (other, w) = ((torch.randn(9, generator=rng), torch.randn(7, generator=rng)) for _ in range(2))
    found = code(torch.outer(u, z), u)
    assert found is not None
    assert torch.allclose(found, z[None], atol=1e-5)
    assert code(torch.outer(u, z) + torch.outer(w, other), u + w) is None
    assert code(torch.zeros(7, 9), torch.zeros(7)) is None


@pytest.mark.usefixtures("doubles")
@pytest.mark.parametrize("batch", [1, 2])
def test_a_replay_is_differentiable_in_the_data(batch: int):
    v = sent(victim(batch=batch, defense=[TEXT]), "noise")
    cap, h, way = known(v), 1e-6, torch.randn(v.x.shape, generator=stream("way"))

    def total(x: Tensor) -> Tensor:
        return torch.stack([g.square().sum() for g in cap.replay(x, v.y, v.state).values()]).sum()

    x = v.x.clone().requires_grad_()
    slope = float((torch.autograd.grad(total(x), x)[0] * way).sum())
    measured = float((total(x + h * way) - total(x - h * way)).detach()) / (2 * h)
    assert slope == pytest.approx(measured, rel=1e-4)


@pytest.mark.usefixtures("doubles")
def test_behind_a_hidden_head_the_true_cotangent_explains_the_body():
    v = sent(victim("fedper", defense=[TEXT]), "noise")
    cap, items = known(v), v.record.down | v.state
    eps = torch.randn(1, WIDTH, generator=stream(v.setup.config.seed, "defense", "precode", "noise"))
    features = hand_features(items, v.x, eps).requires_grad_()
    loss = F.cross_entropy(F.linear(features, items["head.weight"], items["head.bias"]), v.y)
    (u,) = torch.autograd.grad(loss, features)
    assert relative_distance(cap.pullback(v.x, u), cap.target) < 1e-9
    assert relative_distance(known(v, naive=True).pullback(v.x, u), cap.target) > 0.1


def test_an_attacker_who_reads_the_noise_gets_the_image_that_a_naive_one_does_not():
    v = sent(victim(defense=[TEXT]), "noise")
    naive, adapted = (attack("dlg", known(v, naive=n), labels="known", iterations=150) for n in (True, False))
    assert v.psnr(adapted.x) > 25
    assert v.psnr(adapted.x) > v.psnr(naive.x) + 10


def test_a_layer_that_reads_the_image_gives_it_away_whatever_stands_behind():
    v = sent(victim(defense=[TEXT]), "noise")
    assert v.psnr(attack("analytic", known(v, naive=True)).x) > 40


# --- runs


def trained(folder: Path, key: str = "fedavg", **options: Any) -> api.Run:
    common: dict[str, Any] = {
        "algo": key, "model": "mlp", "partition": "natural", "test": "given", "rounds": 2, "batch_size": 4,
        "capture_clients": "0,1", "capture_rounds": "last", "victims": 1, "defense": [TEXT], "name": "run",
    }  # fmt: skip
    return api.train(dataset=toys.dataset(), runs_dir=folder, **(common | options))


def captured(run: api.Run) -> dict[str, Items]:
    store = CaptureStore(run.path / "captures")
    return {name: store.read(name).up for name in store.ids()}


def test_a_run_has_the_same_bits_under_workers_and_after_an_interruption(tmp_path: Path):
    whole = trained(tmp_path / "serial")
    workers = trained(tmp_path / "workers", executor="processes", workers=2)

    with pytest.raises(toys.Stop):
        trained(tmp_path / "cut", on_round=toys.stopping(0))
    resumed = api.resume("run", runs_dir=tmp_path / "cut", dataset=toys.dataset())
    for other in (workers, resumed):
        assert captured(whole).keys() == captured(other).keys()
        assert all(toys.same(up, captured(other)[name]) for name, up in captured(whole).items())
        assert list(whole.metrics["train_loss"]) == list(other.metrics["train_loss"])


def test_a_run_says_what_its_network_has_and_its_replays_are_checked_without_noise(tmp_path: Path):
    run = trained(tmp_path)
    assert [k for k in run.manifest["model"]["shapes"] if "precode" in k] == ADDED
    plain = trained(tmp_path, name="plain", defense=[])
    assert run.manifest["model"]["parameters"] > plain.manifest["model"]["parameters"]
    assert (run.metrics["bytes_up"] > plain.metrics["bytes_up"]).all()
    vault = RunFolder(run.path).vault
    facts = [read_json(vault / f"{name}.json", "vault") for name in captured(run)]
    assert len(facts) == 2
    assert max(f["replay_residual"] for f in facts) < 1e-3


@pytest.mark.parametrize(
    ("key", "name", "options"),
    [
        ("fedrep", "dlg", {"hidden": "cotangent"}),
        ("fedproto", "feature-inversion", {"knowledge": "oracle"}),
        ("fedgen", "dlg", {}),
        ("fedavg", "membership", {"knowledge": "oracle"}),
        ("fedavg", "imprint", {"adversary": "malicious-server"}),
    ],
)
def test_attacks_of_every_kind_run_on_such_a_run(key: str, name: str, options: dict[str, Any], tmp_path: Path):
    quick: dict[str, Any] = {"iterations": 3, "restarts": 1} if name in ("dlg", "feature-inversion") else {}
    scores = api.attack(trained(tmp_path, key), name, lpips="none", controls=False, **(quick | options))
    assert isinstance(scores, api.Scores)
    assert set(scores.table["status"]) <= {"budget", "converged"}


# --- what is refused


def test_private_training_is_refused_with_the_reason():
    with pytest.raises(ConfigError, match=r"precode cannot be combined with --defense dp-sgd: .* noise of its own"):
        toys.setup("fedavg", defense=["dp-sgd:noise_multiplier=1", TEXT])


@pytest.mark.parametrize("key", ["fedpcl", "local"])
def test_methods_whose_uploads_it_cannot_change_are_refused(key: str):
    with pytest.raises(PrivacyError, match=f"{key} cannot be trained under precode .nothing that its clients send"):
        privacy.check(toys.setup(key, defense=[TEXT]))


def test_a_cut_at_images_of_features_is_refused():
    with pytest.raises(ConfigError, match=r"precode: the head reads \[64, 2, 2\] of an input.*--split") as refused:
        toys.setup("fedavg", model="cnn", split="flatten", defense=[TEXT], data=bigger())
    assert "\n" not in str(refused.value)


def bigger() -> Any:
    from pflsec.data.datasets import from_arrays

    data = toys.dataset()
    return from_arrays(
        data.images.repeat(2, 2).repeat(2, 3), data.labels, client_ids=data.client_ids, is_test=data.is_test, name="toy"
    )


@pytest.mark.parametrize("width", ["0", "-1", "wide"])
def test_a_mistaken_width_is_one_line(width: str):
    with pytest.raises(ConfigError, match="width") as refused:
        parse_defense(f"precode:width={width}")
    assert "\n" not in str(refused.value)


def test_texts_are_read_through_it_too():
    data = toys.texts()
    net = longer(toys.bag(data))
    x = torch.as_tensor(data.images[:3])
    assert net.logits(net.fresh("start"), x).shape == (3, toys.CLASSES)
    assert catalogue.build("bag", data.images.shape[1:], data.classes, vocabulary=30).inserted is None
