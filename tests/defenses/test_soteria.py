"""Soteria: which columns it zeroes, where, and attackers who leave its layer out."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from pflsec import api
from pflsec.core.config import build
from pflsec.core.defense import ShapingDefense
from pflsec.core.errors import ConfigError, PrivacyError
from pflsec.core.items import select
from pflsec.core.network import Net
from pflsec.defenses.step.soteria import Prepared, Soteria, SoteriaConfig, sensitivity, slopes
from pflsec.models import catalogue
from pflsec.runtime import privacy
from pflsec.runtime.defending import parse_defense
from pflsec.runtime.replay import capture, local_work, relative_distance
from pflsec.training.local import Training
from pflsec.wire.capture import Capture
from pflsec.wire.store import CaptureStore
from tests import toys
from tests.attacks.victims import Victim, attack, victim

TEXT = "soteria:prune=0.6"  # three of the tiny network's five features


def at(net: Net, **settings: object) -> Prepared:
    made = Soteria(build(SoteriaConfig, settings, "soteria")).at(net)
    assert made is not None
    return made


def sent(v: Victim, text: str = TEXT) -> Victim:
    """Return the victim with the upload of a client that trains under the defense."""
    defense = parse_defense(text)
    assert isinstance(defense, ShapingDefense)
    ctx = local_work(v.setup.net, v.record, v.x, v.y, 0, Training)
    ctx.shaping = defense.at(v.setup.net)
    return v.with_upload(v.setup.algorithm.local(ctx, v.state, v.record.down).up)


def known(v: Victim, *texts: str) -> Capture:
    defenses = [parse_defense(text) for text in texts]
    return capture(v.setup.algorithm, v.setup.net, v.record, history=True, seed=0, labels=v.y, defenses=defenses)


def by_hand(items: dict[str, Tensor], x: Tensor) -> Tensor:
    """Return the mean over the images of |r_j| / |d r_j/dx| in the tiny network, one image and feature after the other."""
    ratio = torch.zeros(5)
    for image in x:
        one = image[None].clone().requires_grad_()
        r = toys.hand_features(items, one)[0]
        for j in range(5):
            ratio[j] += (
                float(r[j].detach().abs()) / float(torch.autograd.grad(r[j], one, retain_graph=True)[0].norm()) / len(x)
            )
    return ratio


@pytest.mark.parametrize("count", [1, 4])
def test_the_columns_with_the_largest_share_of_input_over_slope_are_zeroed_and_nothing_else_is(count: int):
    (x, y), net = toys.batch(count), toys.tiny()
    items = net.fresh("soteria")
    leaves = {k: v.clone().requires_grad_() for k, v in items.items()}
    on = toys.work(x, y, net).ce
    loss, found = at(net, prune=0.6).gradient(on, leaves, x, y)
    plain = toys.hand_gradient(items, x, y)
    zeroed = set(by_hand(items, x).topk(3).indices.tolist())
    assert float(loss) == pytest.approx(float(toys.hand_loss(items, x, y)))
    for (name, right), value in zip(plain.items(), found, strict=True):
        if name == "head.weight":
            assert {j for j in range(5) if not value[:, j].any()} == zeroed
        kept = torch.tensor([float(j not in zeroed) for j in range(5)]) if name == "head.weight" else 1.0
        assert torch.allclose(value, right * kept, atol=1e-6)


def test_a_feature_at_zero_counts_nothing_and_one_that_never_changes_most():
    x = torch.tensor([[1.0, 2.0], [-1.0, 3.0]], requires_grad=True)
    r = torch.stack([x[:, 0].relu(), x[:, 1], 0 * x[:, 0] + 5], 1)
    assert slopes(r, x).tolist() == [[1, 1, 0], [0, 1, 0]]  # type: ignore[union-attr]
    assert sensitivity([r, torch.ones(2, 3)], x).tolist() == [0.5, 2.5, float("inf")]  # type: ignore[union-attr]
    assert sensitivity([torch.ones(2, 3)], x) is None


def test_slopes_are_the_same_through_convolutions_and_in_parts(monkeypatch: pytest.MonkeyPatch):
    net = catalogue.build("cnn", (1, 8, 8), 3)
    x = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    r = net.features(net.fresh("soteria"), x)[:, :7]
    alone = [torch.autograd.grad(r[i, j], x, retain_graph=True)[0].norm() for i in range(2) for j in range(7)]
    for most in (2**24, 3 * x.numel()):
        monkeypatch.setattr("pflsec.defenses.step.soteria.AT_ONCE", most)
        found = slopes(r, x)
        assert found is not None
        assert torch.allclose(found.flatten(), torch.stack(alone), atol=1e-6)


@pytest.mark.parametrize("text", ["soteria:prune=0", "soteria:prune=0.19"])
@pytest.mark.parametrize("key", ["fedprox", "fedpac"])
def test_where_no_column_is_zeroed_training_is_the_same_bit_for_bit(text: str, key: str):
    plain, defended = toys.play(key, 2), toys.play(key, 2, defense=[text])
    assert all(toys.same(a.ups[c], b.ups[c]) for a, b in zip(plain, defended, strict=True) for c in a.ups)
    assert not toys.same(plain[0].ups[1], toys.play(key, 1, defense=[TEXT])[0].ups[1])


def test_a_penalty_passes_beside_it():
    (x, y), net = toys.batch(3), toys.tiny()
    ctx = toys.work(x, y, net, shaping=at(net, prune=1))
    items = net.fresh("soteria")
    moved = ctx.fit(items, ctx.ce, penalty=lambda params, rng: params["head.weight"].sum())
    assert torch.allclose(moved["head.weight"], items["head.weight"] - 0.1, atol=1e-6)


def test_features_of_a_body_that_stands_still_are_judged_by_the_images():
    (x, y), net = toys.batch(3), toys.tiny()
    ctx = toys.work(x, y, net, shaping=at(net, prune=0.6))
    body, head = (select(net.fresh("soteria"), part) for part in ("body", "head"))
    short = ctx.fit(head, on=ctx.head_ce, features_of=body)
    whole = ctx.fit(head, on=lambda h, x, y: ctx.ce(body | h, x, y))
    assert toys.same(short, whole)


@pytest.mark.parametrize("key", ["fedavg", "scaffold", "ditto", "fml"])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_replay_of_the_truth_meets_what_was_sent_for_an_attacker_who_leaves_the_layer_out(key: str, batch: int):
    v = sent(victim(key, batch=batch))
    gaps = [
        relative_distance(known(v, *texts).replay(v.x.double(), v.y, v.state), known(v).target)
        for texts in ((TEXT,), ())
    ]
    assert gaps[0] < 1e-3
    assert gaps[1] > 0.05


def test_an_attacker_who_knows_of_it_gets_the_image_that_a_naive_one_does_not():
    v = sent(victim("fedavg"))
    naive, adapted = (attack("dlg", known(v, *texts), labels="known", iterations=100) for texts in ((), (TEXT,)))
    assert v.psnr(adapted.x) > 30
    assert v.psnr(adapted.x) > v.psnr(naive.x) + 10


def test_another_layer_can_be_named_where_the_last_one_is_not_sent():
    with pytest.raises(PrivacyError, match=r"fedper .* soteria \(head\.weight is not sent\)"):
        privacy.check(toys.setup("fedper", defense=[TEXT]))
    made = toys.setup("fedper", defense=["soteria:prune=0.5,layer=body.fc1"], local_epochs=1, batch_size=8)
    privacy.check(made)
    turn = toys.rounds(made, 1)[0]
    moved = turn.ups[1]["body.fc1.weight"] - turn.downs[1]["body.fc1.weight"]
    assert int((moved == 0).all(0).sum()) == 8


def test_what_it_cannot_follow_is_refused_in_words():
    with pytest.raises(PrivacyError, match=r"apple .* by another way"):
        privacy.check(toys.setup("apple", defense=[TEXT]))
    with pytest.raises(PrivacyError, match="BatchNorm"):
        privacy.check(toys.setup("fedavg", net=toys.normed(), defense=[TEXT]))
    with pytest.raises(PrivacyError, match="texts"):
        privacy.check(
            toys.setup("fedavg", data=(data := toys.texts()), net=toys.bag(data), model="bag", defense=[TEXT])
        )
    with pytest.raises(ConfigError, match=r"no linear layer 'body\.none'\. It has: body\.fc1, head"):
        privacy.check(toys.setup("fedavg", defense=["soteria:layer=body.none"]))
    with pytest.raises(ConfigError, match="soteria cannot be combined with --defense dp-sgd"):
        toys.setup("fedavg", defense=[TEXT, "dp-sgd:noise_multiplier=1"])


def test_probes_and_real_uploads_of_a_run_are_defended(tmp_path: Path):
    run = api.train(
        algo="fedavg", model="mlp", partition="natural", test="given", rounds=1, local_epochs=1, batch_size=8, kind="both",
        capture_rounds="first", capture_clients="1", victims=1, defense=["soteria:prune=0.9"], dataset=toys.dataset(),
        runs_dir=tmp_path,
    )  # fmt: skip
    store = CaptureStore(run.path / "captures")
    assert len(store.ids()) == 2
    for name in store.ids():
        record = store.read(name)
        still = (record.up["head.weight"] == record.down["head.weight"]).all(0)
        assert int(still.sum()) >= int(0.9 * 256)
        assert not (record.up["head.bias"] == record.down["head.bias"]).all()
