"""mixup: what is mixed with what, what the vault and the scores say of it, and attackers who know that labels are soft."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pflsec import api
from pflsec.core.config import build
from pflsec.core.defense import Mixture
from pflsec.core.errors import ConfigError, NotApplicable, PrivacyError, RunError
from pflsec.core.inputs import InputSpec
from pflsec.core.items import select
from pflsec.core.tensors import read_items, write_items
from pflsec.defenses.step.mixup import Mixup, MixupConfig, with_partners
from pflsec.leakage.vault import Vault
from pflsec.runtime import privacy
from pflsec.runtime.defending import parse_defense
from pflsec.runtime.feeding import Log, feed
from pflsec.runtime.replay import capture, local_work, relative_distance
from pflsec.training.local import Training
from pflsec.wire.capture import Capture
from pflsec.wire.store import CaptureStore
from tests import toys
from tests.attacks.victims import Victim, attack, victim
from tests.runtime.test_pool_and_resume import contents, setup


def mixup(**settings: Any) -> Mixup:
    return Mixup(build(MixupConfig, settings, "mixup"))


def drawn(count: int, seed: int = 0, among: int = 6, **settings: Any) -> Mixture:
    """Return mixtures of the first row with others, many times over."""
    x, y = toys.batch(among)
    every = torch.arange(among)
    rows = torch.zeros(count, dtype=torch.int64)
    return mixup(**settings).mixed(rows, every, x, F.one_hot(y, 3).float(), np.random.default_rng(seed))


def mixed_victim(key: str = "fedavg", text: str = "mixup", **options: Any) -> tuple[Victim, Mixture]:
    """Return a victim whose client trained on a mixture in its place, with the upload of that, and the mixture."""
    v, log = victim(key, defense=[text], **options), Log()
    ctx = local_work(v.setup.net, v.record, v.x, v.y, 0, Training)
    places = range(v.record.victim, v.record.victim + v.record.batch)
    ctx.feed = feed(v.setup, 0, v.record.client, "probe", places=places, log=log)
    sent = v.with_upload(v.setup.algorithm.local(ctx, v.state, v.record.down).up)
    return sent, next(made for phase, made in log if phase == "main")


def known(v: Victim, *texts: str, labels: Tensor | None = None) -> Capture:
    defenses = [parse_defense(text) for text in texts]
    return capture(v.setup.algorithm, v.setup.net, v.record, history=True, seed=0, labels=labels, defenses=defenses)


def trained(folder: Path, *defense: str, **options: Any) -> api.Run:
    common: dict[str, Any] = {
        "algo": "fedavg", "model": "mlp", "partition": "natural", "test": "given", "rounds": 1, "batch_size": 4,
        "capture_clients": "1", "victims": 1, "capture_rounds": "first", "defense": list(defense or ("mixup",)),
    }  # fmt: skip
    return api.train(dataset=toys.dataset(), runs_dir=folder, **(common | options))


def inputs(run: api.Run) -> InputSpec:
    return InputSpec.from_dict(run.manifest["data"]["input"])


# --- what is mixed


@pytest.mark.parametrize("key", ["fedprox", "fedrep", "scaffold", "perfedavg"])
def test_one_image_in_a_mixture_is_training_as_it_was_bit_for_bit(key: str):
    plain, defended = toys.play(key, 2), toys.play(key, 2, defense=["mixup:images=1"])
    assert all(toys.same(a.ups[c], b.ups[c]) for a, b in zip(plain, defended, strict=True) for c in a.ups)
    assert not toys.same(plain[0].ups[1], toys.play(key, 1, defense=["mixup"])[0].ups[1])


@pytest.mark.parametrize(("images", "alpha"), [(2, 1.0), (2, 0.3), (3, 2.0)])
def test_weights_have_mean_and_variance_of_the_stated_distribution(images: int, alpha: float):
    """Dirichlet(a, ..., a) of k parts: each weight is Beta(a, (k-1)a), of mean 1/k and variance (k-1) / (k^2 (ka + 1))."""
    weights = drawn(40000, images=images, alpha=alpha).weights.double()
    assert torch.allclose(weights.sum(1), torch.ones(40000, dtype=torch.float64), atol=1e-6)
    variance = (images - 1) / (images**2 * (images * alpha + 1))
    assert torch.allclose(weights.mean(0), torch.full((images,), 1 / images, dtype=torch.float64), atol=0.01)
    assert torch.allclose(weights.var(0), torch.full((images,), variance, dtype=torch.float64), rtol=0.05)


@pytest.mark.parametrize("images", [2, 3, 6])
def test_partners_are_others_each_once_and_all_equally_often(images: int):
    parts = drawn(30000, images=images).parts
    assert (parts[:, 0] == 0).all()
    assert all(len(set(row)) == images for row in parts[:50].tolist())
    often = torch.bincount(parts[:, 1:].flatten(), minlength=6) / 30000
    assert often[0] == 0
    assert torch.allclose(often[1:], torch.full((5,), (images - 1) / 5), atol=0.015)
    ordered = {tuple(row) for row in parts[:, 1:].tolist()}
    assert len(ordered) == np.prod([5 - i for i in range(images - 1)])


def test_partners_come_from_among_those_that_are_allowed():
    allowed = torch.tensor([1, 4, 7, 9])
    parts = with_partners(torch.tensor([7, 1, 9, 4]), allowed, 4, np.random.default_rng(0))
    assert parts[:, 0].tolist() == [7, 1, 9, 4]
    assert all(sorted(row) == [1, 4, 7, 9] for row in parts.tolist())


def test_a_client_with_few_images_mixes_what_it_has_and_one_with_a_single_image_trains_on_it():
    three = drawn(50, among=3, images=8)
    assert three.parts.shape == (50, 3)
    one = drawn(2, among=1)
    x = toys.batch(1)[0]
    assert torch.equal(one.x, torch.cat([x, x]))
    assert one.weights.tolist() == [[1], [1]]
    assert one.y.tolist() == [[1, 0, 0], [1, 0, 0]]


@pytest.mark.parametrize("alpha", [1e-9, 1e9])
def test_weights_stay_finite_at_the_ends(alpha: float):
    weights = drawn(1000, images=4, alpha=alpha).weights
    assert torch.isfinite(weights).all()
    assert torch.allclose(weights.sum(1), torch.ones(1000), atol=1e-5)


def test_a_step_is_autograd_of_soft_cross_entropy_at_the_mixed_batch():
    (x, y), net, log = toys.batch(6), toys.tiny(), Log()
    made = toys.setup("fedavg", defense=["mixup:images=3"])
    ctx = toys.work(x, y, net, feed=feed(made, 0, 0, train=(x, y), log=log))
    items = net.fresh("mixup")
    moved = ctx.fit(items, ctx.ce)
    ((phase, mixed),) = log
    assert phase == "main"
    for i in range(6):
        parts = [w * x[p] for w, p in zip(mixed.weights[i], mixed.parts[i], strict=True)]
        assert torch.allclose(mixed.x[i], torch.stack(parts).sum(0), atol=1e-6)
        for c in range(3):
            share = sum(float(w) for w, p in zip(mixed.weights[i], mixed.parts[i], strict=True) if int(y[p]) == c)
            assert float(mixed.y[i, c]) == pytest.approx(share, abs=1e-6)

    def soft(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        z = F.linear(toys.hand_features(params, x), params["head.weight"], params["head.bias"])
        return (mixed.y * (z.logsumexp(1, keepdim=True) - z)).sum(1).mean()

    gradient = toys.hand_gradient(items, mixed.x, y, soft)  # type: ignore[arg-type]
    assert toys.distance(moved, toys.hand_step(items, gradient, 0.1)) < 1e-6


def test_every_way_to_the_data_is_fed_and_parts_of_the_rows_are_mixed_among_themselves():
    (x, y), net, log = toys.batch(6), toys.tiny(), Log()
    made = toys.setup("fedavg", defense=["mixup"])
    ctx = toys.work(x, y, net, batch_size=2, feed=feed(made, 0, 0, train=(x, y), log=log))
    items = net.fresh("mixup")
    batches = [(a.clone(), b.clone()) for a, b in ctx.batches()]
    assert [len(a) for a, _ in batches] == [2, 2, 2]
    assert sorted(torch.cat([m.parts[:, 0] for _, m in log]).tolist()) == [*range(6)]
    assert all(torch.equal(m.x, a) and torch.equal(m.y, b) for (_, m), (a, b) in zip(log, batches, strict=True))
    ctx.gradient(items, ctx.ce, torch.tensor([3, 5]), phase="inner")
    ctx.full_gradient(items, ctx.ce)
    assert [(phase, m.parts[:, 0].tolist()) for phase, m in log[3:]] == [
        ("inner", [3, 5]),
        ("full gradient", [*range(6)]),
    ]
    for part in (ctx.subset(0.5, "some"), *ctx.split(0.5, "halves")):
        log.clear()
        part.fit(items, ctx.ce)
        rows = {int(r) for _, m in log for r in m.parts[:, 0]}
        assert len(rows) == 3
        assert {int(r) for _, m in log for r in m.parts.flatten()} == rows


def test_features_of_a_body_that_stands_still_are_those_of_the_mixed_images():
    (x, y), net = toys.batch(6), toys.tiny()
    made = toys.setup("fedavg", defense=["mixup"])
    body, head = (select(net.fresh("mixup"), part) for part in ("body", "head"))
    short, whole = (toys.work(x, y, net, feed=feed(made, 0, 0, train=(x, y))) for _ in range(2))
    assert toys.same(
        short.fit(head, on=short.head_ce, features_of=body),
        whole.fit(head, on=lambda h, x, y: whole.ce(body | h, x, y)),
    )


# --- the same bits everywhere


def test_workers_and_resumed_runs_give_the_bits_of_one_process(tmp_path: Path):
    more = {"defense": ["mixup"], "kind": "both", "local_epochs": 1}
    whole = api.run_training(setup("fedrep", **more), name="whole", runs_dir=tmp_path)

    with pytest.raises(toys.Stop):
        api.run_training(setup("fedrep", **more), name="cut", runs_dir=tmp_path, on_round=toys.stopping(0))
    assert contents(api.resume("cut", runs_dir=tmp_path)) == contents(whole)
    spread = api.run_training(setup("fedrep", workers=2, **more), name="w", runs_dir=tmp_path, executor="processes")
    assert contents(spread) == contents(whole)
    assert sum(name.endswith(".mixed.safetensors") for name in contents(whole)) > 4


# --- which methods, and beside what


@pytest.mark.parametrize(
    ("key", "item"),
    [("fedproto", "prototype"), ("fd", "output"), ("fedpac", "prototype"), ("feddbe", "mean"), ("fedfomo", "body")],
)
def test_methods_that_send_more_of_the_images_than_gradients_are_refused_by_item(key: str, item: str):
    with pytest.raises(
        PrivacyError, match=rf"{key} cannot be trained under mixup \({item}\S* says something of"
    ) as refused:
        privacy.check(toys.setup(key, defense=["mixup"]))
    assert "\n" not in str(refused.value)
    privacy.check(toys.setup(key, defense=["mixup:images=1"]))


def test_what_speaks_of_labels_alone_is_no_reason():
    privacy.check(toys.setup("fedlc", defense=["mixup"]))
    privacy.check(toys.setup("fedavg", net=toys.normed(), defense=["mixup"]))


def test_texts_and_defenses_that_do_not_fit_are_refused():
    data = toys.texts()
    with pytest.raises(PrivacyError, match="texts, which cannot be mixed"):
        privacy.check(toys.setup("fedavg", data=data, net=toys.bag(data), model="bag", defense=["mixup"]))
    with pytest.raises(ConfigError, match="mixup cannot be combined with --defense dp-sgd: a record that is mixed"):
        toys.setup("fedavg", defense=["mixup", "dp-sgd:noise_multiplier=1"])
    with pytest.raises(
        ConfigError, match="mixes inputs before all others; write them so: --defense mixup --defense soteria"
    ):
        toys.setup("fedavg", defense=["soteria", "mixup"])
    with pytest.raises(ConfigError, match="images"):
        toys.setup("fedavg", defense=["mixup:images=0"])


def test_beside_others_each_does_what_it_does():
    made = toys.setup("fedavg", defense=["mixup", "soteria:prune=0.6", "clip:bound=0.01"])
    privacy.check(made)
    turn = toys.rounds(made, 1)[0]
    moved = {k: turn.ups[1][k] - turn.downs[1][k] for k in turn.downs[1]}
    assert float(torch.stack([v.square().sum() for v in moved.values()]).sum().sqrt()) == pytest.approx(0.01, rel=1e-3)


# --- attackers


@pytest.mark.parametrize(("key", "batch"), [("fedavg", 1), ("fedavg", 3), ("scaffold", 2), ("ditto", 1), ("fml", 1)])
def test_the_replay_of_the_mixed_batch_with_its_soft_labels_is_what_was_sent(key: str, batch: int):
    v, made = mixed_victim(key, batch=batch)
    cap = known(v, "mixup")
    assert relative_distance(cap.replay(made.x.double(), made.y.double(), v.state), cap.target) < 1e-5
    assert relative_distance(cap.replay(v.x.double(), v.y, v.state), cap.target) > 0.1


@pytest.mark.parametrize("name", ["dlg", "idlg", "inverting-gradients"])
def test_who_knows_of_it_optimises_soft_labels_and_a_naive_attacker_restores_one_class(name: str):
    v, made = mixed_victim()
    adapted, naive = (attack(name, known(v, *texts), iterations=2) for texts in (("mixup",), ()))
    assert adapted.labels == "optimise"
    assert naive.labels == ("optimise" if name == "dlg" else "restore")
    granted = attack(name, known(v, "mixup", labels=made.y), iterations=2, labels="known")
    assert granted.labels == "known"
    assert granted.y is not None
    assert granted.y.tolist() == made.y.argmax(1).tolist()


def test_batches_get_no_counts_of_labels_either():
    v, _ = mixed_victim(batch=3)
    assert attack("ig", known(v, "mixup"), iterations=2).labels == "optimise"
    assert attack("ig", known(v), iterations=2).labels == "restore"


@pytest.mark.parametrize("name", ["dlg", "analytic"])
def test_without_the_labels_that_were_trained_with_the_reason_names_the_vault(name: str):
    v, _ = mixed_victim()
    with pytest.raises(
        NotApplicable, match="not granted to this adversary, or the vault does not hold those that were"
    ):
        attack(name, known(v, "mixup"), labels="known")
    with pytest.raises(NotApplicable, match=r"not granted to this adversary$"):
        attack(name, known(v), labels="known")


def test_the_mixed_image_is_rebuilt_and_the_single_one_is_not():
    v, made = mixed_victim(text="mixup:images=4,alpha=1000")
    assert torch.allclose(made.weights, torch.full((1, 4), 0.25), atol=0.05)  # else one part might be nearly the whole
    found = attack("dlg", known(v, "mixup"), iterations=150)
    assert replace(v, x=made.x).psnr(found.x) > 25
    assert v.psnr(found.x) < 20


# --- what the vault holds, and the scores

QUICK: dict[str, Any] = {"lpips": "none", "restarts": 1, "settings": {"rescue": 0}}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> api.Run:
    """Return a run with probes of two images and one step, and the real uploads of two epochs."""
    return trained(tmp_path_factory.mktemp("mixed"), kind="both", victim_batch=2, local_epochs=2)


def test_the_vault_holds_what_every_step_trained_on_with_the_rows_of_its_parts_and_their_weights(run: api.Run):
    folder, spec = run.path / "vault", inputs(run)
    store, data = CaptureStore(run.path / "captures"), toys.dataset()
    assert len(store.ids()) == 2
    for name in store.ids():
        record, truth = store.read(name), Vault(folder).truth(name)
        found = Vault(folder).mixtures(name, spec)
        assert found is not None
        assert found.step.max() + 1 == record.steps
        assert found.main.all()
        mine = np.flatnonzero((data.client_ids == record.client) & ~data.is_test)  # type: ignore[operator]
        assert set(found.parts.flatten().tolist()) <= set(mine.tolist())
        for step in range(record.steps):
            rows = found.parts[found.step == step]
            assert (rows[:, 0] != rows[:, 1]).all()
        assert sorted(found.parts[:, 0].tolist()) == sorted(truth.dataset_index.tolist() * record.epochs)
        for x, y, parts, weights in zip(found.x, found.y, found.parts, found.weights, strict=True):
            pixels = torch.as_tensor(data.images[parts.numpy()]) / 255
            blend = (weights[:, None, None, None] * spec.normalise(pixels)).sum(0)
            assert torch.allclose(x, blend, atol=1e-5)
            assert torch.allclose(y, weights @ F.one_hot(torch.as_tensor(data.labels[parts.numpy()]), 3).float())
        assert truth.replay_residual is not None
        assert truth.replay_residual < 1e-4
        if record.steps == 1:
            assert truth.mixed_residual is not None
            assert truth.mixed_residual < 1e-4


def test_a_probe_of_one_image_is_mixed_with_the_clients_other_ones(tmp_path: Path):
    made = trained(tmp_path, victim_batch=1)
    found = Vault(made.path / "vault").mixtures("r000-c01-v0-probe", inputs(made))
    assert found is not None
    assert found.parts[0, 0] != found.parts[0, 1]
    assert sorted(found.dataset_index.tolist()) == sorted(found.parts[0].tolist())


def test_labels_that_are_granted_are_those_that_were_trained_with(run: api.Run, tmp_path: Path):
    """At the truth the objective is zero: with any other labels DLG from the same start would not get there."""
    made = trained(tmp_path, "mixup:alpha=50", victim_batch=1)
    scores = api.attack(made, "dlg", knowledge="wire+labels", iterations=8, **QUICK, controls=False)
    naive = api.attack(made, "dlg", knowledge="wire+labels", iterations=8, **QUICK, controls=False, naive=True)
    assert isinstance(scores, api.Scores)
    assert isinstance(naive, api.Scores)
    assert list(scores.table["labels"]) == list(naive.table["labels"]) == ["known"]
    assert scores.mixed["psnr_mixed"].min() > 40
    assert scores.mixed["psnr_mixed"].min() > naive.mixed["psnr_mixed"].max() + 10


def test_the_rows_say_how_well_the_mixed_image_was_rebuilt_and_the_report_too(tmp_path: Path):
    made = trained(tmp_path, "mixup:alpha=50", victim_batch=1)
    scores = api.attack(made, "dlg", iterations=15, **QUICK)
    assert isinstance(scores, api.Scores)
    assert len(scores.mixed) == 1
    for reason, row in zip(scores.table["reason"], scores.mixed.to_dict("records"), strict=True):
        assert f"the mixed image was rebuilt at {row['psnr_mixed']:.1f} dB" in reason
        assert row["psnr_mixed"] > 25
        assert row["psnr_mixed"] > row["psnr_mixed_blind"] + 10
    assert list(scores.table["attack_valid"]) == [True]
    page = api.report(made, out=tmp_path / "out").read_text()
    assert "rebuilt 1 mixed image at" in page
    assert "a low number there is no privacy: see Mixed images" in page
    assert (tmp_path / "out" / "tables" / "mixed.csv").exists()
    meta = api.load_run(made.path).path / "attacks" / scores.path.name / "controls.csv"
    assert "mixed image" not in meta.read_text()


def test_an_upload_of_several_steps_says_that_no_one_mixture_meets_it(tmp_path: Path):
    made = trained(tmp_path, victim_steps=3)
    scores = api.attack(made, "dlg", iterations=2, **QUICK, controls=False)
    assert isinstance(scores, api.Scores)
    assert scores.table["reason"].str.contains("the replay of one mixed batch misses what was sent by").all()
    acted = api.attack(made, "imprint", adversary="malicious-server", lpips="none")
    assert isinstance(acted, api.Scores)
    assert acted.table["reason"].str.contains("cannot be done again under mixup").all()


def test_a_malicious_server_reads_the_mixed_image(tmp_path: Path):
    made = trained(tmp_path, "mixup:alpha=50", victim_batch=1)
    scores = api.attack(made, "imprint", adversary="malicious-server", lpips="none")
    assert isinstance(scores, api.Scores)
    assert scores.mixed["psnr_mixed"].min() > 40
    assert scores.table["psnr"].max() < scores.mixed["psnr_mixed"].min() - 10


DAMAGES: dict[str, tuple[str, Any]] = {
    "holds a NaN": ("x", lambda x: torch.full_like(x, torch.nan)),
    "which sum to 1": ("weights", lambda w: 2 * w),
    "'y' is": ("y", lambda y: y[:-1]),
    "'parts' are": ("parts", lambda p: p + 1000),
    "'main' is": ("main", lambda m: m.long()),
    "'step' is": ("step", lambda s: s.float()),
    "which the run's are not": ("y", lambda y: F.pad(y, (0, 2))),
    "no item 'images'": ("images", None),
}


@pytest.mark.parametrize("why", DAMAGES)
def test_damaged_mixtures_are_one_sentence_before_any_attack(
    run: api.Run, why: str, capsys: pytest.CaptureFixture[str]
):
    path, (name, changed) = run.path / "vault" / "r000-c01-v0-probe.mixed.safetensors", DAMAGES[why]
    before = path.read_bytes()
    items = read_items(path, "mixtures")
    new = items | {name: changed(items[name])} if changed else {k: v for k, v in items.items() if k != name}
    write_items(path, new)
    try:
        with pytest.raises(RunError, match="the vault is damaged") as refused:
            api.attack(run, "dlg", iterations=1, **QUICK)
        assert why in str(refused.value)
        assert "\n" not in str(refused.value)
        path.write_bytes(before[:-30])
        with pytest.raises(RunError, match="what was mixed for capture r000-c01-v0-probe is damaged"):
            api.attack(run, "dlg", iterations=1, **QUICK)
    finally:
        path.write_bytes(before)


def test_without_the_mixtures_the_row_says_so(tmp_path: Path):
    made = trained(tmp_path)
    for path in (made.path / "vault").glob("*.mixed.safetensors"):
        path.unlink()
    scores = api.attack(made, "dlg", iterations=1, **QUICK, controls=False)
    assert isinstance(scores, api.Scores)
    assert scores.table["reason"].str.contains("what was trained on, mixed images, is not in the vault").all()
    assert not (scores.path / "mixed.csv").exists()
    assert scores.mixed.empty
