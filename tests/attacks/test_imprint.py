"""A server that chooses the downlink reads whole batches off one exchange, where the network lets it, and no other does."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pflsec import api
from pflsec.attacks.active.imprint import Imprint, ImprintConfig
from pflsec.core.attack import Attack, Reconstruction
from pflsec.core.config import build
from pflsec.core.errors import KnowledgeError, NotApplicable, RunError, WireError
from pflsec.core.knowledge import ThreatModel
from pflsec.leakage.images import psnr
from pflsec.models.catalogue import build as model
from pflsec.models.network import Network
from pflsec.runtime import active, attacking, views
from pflsec.wire.capture import Capture, Record
from tests import toys
from tests.attacks.victims import Victim, victim

SHAPE = (1, 8, 8)


def noise(train: Sequence[int] = (8, 8, 8, 8)) -> Any:
    """Return a dataset of 8x8 noise, a batch of 8 for each client."""
    data = toys.dataset(train)
    rng = torch.Generator().manual_seed(3)
    images = torch.randint(0, 256, (len(data.labels), *SHAPE), generator=rng, dtype=torch.uint8).numpy()
    return replace(data, images=images)


def mlp() -> Network:
    return model("mlp", SHAPE, toys.CLASSES)


def exchange(v: Victim, rng: torch.Generator, **settings: Any) -> Capture:
    """Return the capture of the exchange on the downlink that the attack chooses."""
    attack = Imprint(build(ImprintConfig, settings, "imprint"))
    down = attack.craft(v.capture(), rng)
    client = active.Client(v.x, v.y, v.state, {})
    record = active.exchanged(v.setup.config, v.setup.net, v.setup.algorithm, v.record, down, client)
    return replace(v, record=record).capture()


def imprinted(v: Victim, seed: int = 0, **settings: Any) -> Reconstruction:
    rng = torch.Generator().manual_seed(seed)
    cap = exchange(v, rng, **settings)
    return Imprint(build(ImprintConfig, settings, "imprint")).reconstruct(cap, rng)


def best(v: Victim, x: Tensor | None, images: Tensor | None = None) -> list[float]:
    """Return each true image's PSNR to the reconstruction that is nearest to it."""
    assert x is not None
    pixels = v.record.input.pixels
    true, found = pixels(v.x if images is None else images).double().clamp(0, 1), pixels(x).double().clamp(0, 1)
    return [max(psnr(t, f) for f in found) for t in true]


def batches(steps: int = 1, key: str = "fedavg", clients: Sequence[int] = (0, 1, 2, 3)) -> list[Victim]:
    return [victim(key, client=c, batch=8, steps=steps, net=mlp(), data=noise(), after=1) for c in clients]


def share(victims: Sequence[Victim], level: float, seeds: Sequence[int] = (0, 1, 2, 3), **settings: Any) -> float:
    found = [p >= level for v in victims for s in seeds for p in best(v, imprinted(v, s, **settings).x)]
    return sum(found) / len(found)


def test_nine_of_ten_images_of_a_batch_of_eight_are_read_off_exactly():
    assert share(batches(), 40) >= 0.9


def test_several_local_steps_leave_most_of_them_readable():
    assert share(batches(steps=5), 20, seeds=(0,)) >= 0.5


def test_aggregation_hides_nothing_of_an_imprint():
    """The sum over four clients: each bin that holds one of the 32 images gives it."""
    victims, rng = batches(), torch.Generator().manual_seed(0)
    attack = Imprint(ImprintConfig())
    down = attack.craft(victims[0].capture(), rng)
    told = {}
    for v in victims:
        client = active.Client(v.x, v.y, v.state, {})
        record = active.exchanged(v.setup.config, v.setup.net, v.setup.algorithm, v.record, down, client)
        told[record.id] = replace(v, record=record)

    def make(record: Record) -> Capture:
        return replace(told[record.id], record=record).capture(history=False)

    cap, _ = views.seen(ThreatModel("server-secagg"), [v.record for v in told.values()], None, make)
    found = attack.reconstruct(cap, rng)
    exact = [p >= 40 for p in best(victims[0], found.x, torch.cat([v.x for v in victims]))]
    assert sum(exact) / len(exact) >= 0.7


def test_the_honest_downlink_gives_nothing_of_the_kind():
    v = batches(clients=(0,))[0]
    found = Imprint(ImprintConfig()).reconstruct(v.capture(), torch.Generator().manual_seed(0))
    assert max(best(v, found.x)) < 40


def test_another_clients_upload_does_not_give_this_ones_images():
    first, second = batches(clients=(0, 1))
    assert max(best(first, imprinted(second).x)) < 20


def test_two_images_in_one_bin_come_out_as_one_and_the_objective_tells():
    v = batches(clients=(0,))[0]
    twice = replace(v, x=v.x[:1].expand(8, -1, -1, -1), y=v.y[:1].expand(8))
    found = imprinted(twice)
    assert found.x is not None
    assert (len(found.x), found.objective, found.status) == (1, 1 - 1 / 8, "budget")
    assert best(twice, found.x)[0] >= 40


@pytest.mark.parametrize("settings", [{"measure": "mean", "spread": 0.1}, {"gain": 1.0}])
def test_other_measurements_and_sizes_read_images_as_well(settings: dict[str, Any]):
    assert share(batches(clients=(0, 1)), 40, seeds=(0,), **settings) >= 0.5


def test_what_is_sent_has_the_names_shapes_and_types_of_the_real_downlink():
    v = batches(clients=(0,))[0]
    down = Imprint(ImprintConfig()).craft(v.capture(), torch.Generator().manual_seed(0))
    assert {k: (t.shape, t.dtype) for k, t in down.items()} == {k: (t.shape, t.dtype) for k, t in v.record.down.items()}
    changed = {k for k in down if not torch.equal(down[k], v.record.down[k])}
    assert changed == {"body.fc1.weight", "body.fc1.bias", "head.weight"}


def convolution() -> nn.Module:
    return nn.Sequential(
        OrderedDict(conv=nn.Conv2d(1, 2, 3), act=nn.ReLU(), flat=nn.Flatten(), fc=nn.Linear(8, toys.CLASSES))
    )


def linear() -> nn.Module:
    return nn.Sequential(OrderedDict(flat=nn.Flatten(), fc=nn.Linear(16, toys.CLASSES)))


def unbiased() -> nn.Module:
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        flat=nn.Flatten(), fc1=nn.Linear(16, 5, bias=False), act=nn.ReLU(), fc=nn.Linear(5, toys.CLASSES)
    )
    return nn.Sequential(layers)


def squared() -> nn.Module:
    class Square(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(1).square()

    layers: OrderedDict[str, nn.Module] = OrderedDict(
        sq=Square(), fc1=nn.Linear(16, 5), act=nn.ReLU(), fc=nn.Linear(5, toys.CLASSES)
    )
    return nn.Sequential(layers)


@pytest.mark.parametrize(
    ("key", "factory", "says"),
    [
        ("fedavg", convolution, "the network begins with body.conv.weight"),
        ("fedavg", linear, "a linear layer behind it"),
        ("fedavg", unbiased, "the network begins with body.fc1.weight"),
        ("fedavg", squared, "and ReLU behind it; body.fc1.weight is none"),
        ("fedavg", toys.tiny_module, "and ReLU behind it; body.fc1.weight is none"),
        ("fedper", None, "head.weight is not among what the client receives"),
        ("lgfedavg", None, "body.fc1.weight is not among what the client receives"),
        ("fedproto", None, "body.fc1.weight is not among what the client receives"),
    ],
)
def test_where_no_imprint_can_be_made_it_is_refused_with_the_reason(key: str, factory: Any, says: str):
    net = Network(factory, toys.SHAPE, toys.CLASSES) if factory else model("mlp", toys.SHAPE, toys.CLASSES)
    with pytest.raises(NotApplicable, match=says) as refusal:
        Imprint(ImprintConfig()).craft(victim(key, net=net, after=1).capture(), torch.Generator().manual_seed(0))
    assert "\n" not in str(refusal.value)


# --- on runs


def attacked(run: api.Run, **options: Any) -> api.Scores:
    common: dict[str, Any] = {"adversary": "malicious-server", "lpips": "none"}
    scores = api.attack(run, "imprint", **(common | options))
    assert isinstance(scores, api.Scores)
    return scores


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> api.Run:
    return api.train(
        dataset=noise(), partition="natural", test="given", model="mlp", rounds=1, lr=0.1, batch_size=8, kind="both",
        capture_rounds="first", victims=1, victim_batch=8, name="made", runs_dir=tmp_path_factory.mktemp("runs"),
    )  # fmt: skip


@pytest.mark.parametrize("adversary", ["server", "eavesdropper", "client", "server-secagg"])
def test_an_adversary_that_does_not_act_is_refused(made: api.Run, adversary: str):
    with pytest.raises(
        KnowledgeError, match=r"needs the choice of what the client receives.*Use --adversary malicious-server"
    ):
        attacked(made, adversary=adversary, knowledge="oracle")


@pytest.mark.parametrize("kind", ["probe", "update"])
def test_a_malicious_server_reads_the_batches_of_a_run(made: api.Run, kind: str):
    table = attacked(made, kind=kind).table
    assert set(table["adversary"]) == {"malicious-server"}
    assert table["psnr_capped"].mean() >= 40
    assert (table["batch"] == 8).all()


def test_the_letter_stands_in_what_is_written(made: api.Run):
    scores = api.attack(made, "imprint", threat_model="f", lpips="none")
    assert isinstance(scores, api.Scores)
    meta = api.load_run(made.path)
    threat = next(a.meta for a in _attacks(meta.path) if a.id == scores.path.name)["threat_model"]
    assert (threat["letter"], threat["adversary"], threat["knowledge"]) == ("F", "malicious-server", "wire")
    assert "downlink" in threat["knows"]


def test_the_report_names_the_letter_and_who_the_adversary_is(made: api.Run):
    from pflsec.reports import tables, threats
    from pflsec.reports.load import load_run

    api.attack(made, "imprint", threat_model="F", lpips="none")
    runs = [load_run(made.path)]
    found = [t for t in threats.threats(runs, tables.leakage_table(runs)) if t.title.startswith("malicious-server")]
    assert len(found) == 1
    assert "threat model F: C that may also manipulate the model" in found[0].title
    assert "may also choose what it sends" in found[0].who
    assert "the choice of what the client receives" in found[0].knows


def _attacks(path: Path) -> Any:
    from pflsec.reports.load import load_run

    return load_run(path).attacks


def test_the_attack_is_given_no_truth(made: api.Run, monkeypatch: pytest.MonkeyPatch):
    seen: list[Capture] = []
    usual = {name: getattr(Imprint, name) for name in ("craft", "reconstruct")}

    def watched(name: str) -> Any:
        def call(self: Attack[Any], cap: Capture, rng: torch.Generator) -> Any:
            seen.append(cap)
            return usual[name](self, cap, rng)

        return call

    for name in usual:
        monkeypatch.setattr(Imprint, name, watched(name))
    attacked(made, clients=[1])
    assert len(seen) == 2
    before, after = seen
    assert all((cap.labels, cap.state, cap.counts) == (None, None, None) for cap in seen)
    assert not toys.same(before.record.down, after.record.down)
    assert not toys.same(before.record.up, after.record.up)


def test_without_the_vault_there_is_no_client_to_send_anything_to(made: api.Run, tmp_path: Path):
    import shutil

    blind = api.Run(shutil.copytree(made.path, tmp_path / "blind"))
    shutil.rmtree(blind.path / "vault")
    with pytest.raises(RunError, match="truth of capture r000-c00-v0-probe is missing"):
        attacked(blind)


def test_a_downlink_that_breaks_the_contract_is_an_error(made: api.Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Imprint, "craft", lambda self, cap, rng: cap.record.down | {"more": torch.zeros(1)})
    with pytest.raises(WireError, match="was sent the item 'more'"):
        attacked(made)


def test_private_training_is_not_done_again(made: api.Run, monkeypatch: pytest.MonkeyPatch):
    usual = attacking.training_config

    def private(folder: Any) -> Any:
        config, spec = usual(folder)
        return config.model_copy(update={"defense": ["dp-sgd:noise_multiplier=1"]}), spec

    monkeypatch.setattr(attacking, "training_config", private)
    table = attacked(made).table
    assert set(table["status"]) == {"not-applicable"}
    assert all("cannot be done again under dp-sgd" in reason for reason in table["reason"])
