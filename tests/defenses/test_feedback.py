"""Error feedback: what a defense leaves out of a change is added to the client's next one, and is the client's own."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import pflsec
from pflsec.core.change import change, increments
from pflsec.core.contract import Contract
from pflsec.core.errors import ConfigError, RunError
from pflsec.core.items import Items, combine, norm, select, subtract, weighted_mean, without_prefix
from pflsec.core.streams import stream
from pflsec.core.tensors import read_items, write_items
from pflsec.leakage.vault import Vault
from pflsec.runtime.active import Client, exchanged
from pflsec.runtime.defending import parse_defense
from pflsec.runtime.folder import RunFolder
from pflsec.runtime.rounds import Federated, play
from pflsec.session.run import Scores
from pflsec.wire.channel import Channel
from pflsec.wire.store import CaptureStore
from tests import toys

PRUNE = "prune:keep=0.2,feedback=true"


def channel(*texts: str) -> Channel:
    """Return a channel of messages that hold a change `w`, which adds up, and a mean `z`, which does not."""
    contract = Contract("toy", {}, {"w?": "weights-delta [n]", "z?": "prototypes [m]"}, toys.tiny())
    return Channel(contract, [parse_defense(text) for text in texts], 0, {"w"})


def zeros(message: Items) -> Items:
    return {k: torch.zeros_like(v) for k, v in message.items()}


def send(defended: Channel, message: Items, unsent: Items) -> tuple[Items, Items]:
    return defended.send_up(message, zeros(message), 0, 0, unsent=unsent)


def test_what_is_left_out_waits_and_is_sent_once_it_is_among_the_largest():
    """keep = 0.5 of [4, 3]: 4 goes and 3 waits. Then [5, 4]: with 3 the second is 7, which goes, and 5 waits."""
    defended = channel("prune:keep=0.5,feedback=true")
    sent, unsent = send(defended, {"w": torch.tensor([4.0, 3.0])}, {})
    assert (sent["w"].tolist(), unsent["prune.w"].tolist()) == ([4.0, 0.0], [0.0, 3.0])
    sent, unsent = send(defended, {"w": torch.tensor([5.0, 4.0])}, unsent)
    assert (sent["w"].tolist(), unsent["prune.w"].tolist()) == ([0.0, 7.0], [5.0, 0.0])


@pytest.mark.parametrize("text", ["prune:keep=0.1,feedback=true", "sign:feedback=true"])
def test_all_that_was_sent_and_what_waits_are_all_changes_together(text: str, doubles: None):
    """sum of sent + e = sum of changes, whatever the defense: e <- g + e - sent, telescoped."""
    defended, unsent, total, arrived = channel(text), Items(), torch.zeros(50), torch.zeros(50)
    for t in range(20):
        step = torch.randn(50, generator=stream("step", t))
        sent, unsent = send(defended, {"w": step}, unsent)
        total, arrived = total + step, arrived + sent["w"]
    assert torch.allclose(arrived + unsent[f"{text.partition(':')[0]}.w"], total)
    assert float((arrived - total).norm()) > 0.1


def test_a_small_constant_change_arrives_with_feedback_and_never_without():
    """The small coordinate of [1, 0.3] is the largest in every fourth message of one coordinate, or about so."""
    arrived = {}
    for feedback in ("true", "false"):
        defended, unsent = channel(f"prune:keep=0.5,feedback={feedback}"), Items()
        arrived[feedback] = torch.zeros(2)
        for _ in range(40):
            sent, unsent = send(defended, {"w": torch.tensor([1.0, 0.3])}, unsent)
            arrived[feedback] += sent["w"]
    assert arrived["false"].tolist() == [40.0, 0.0]
    assert float(arrived["true"][1]) == pytest.approx(12, abs=1.3)


def test_means_are_pruned_without_feedback():
    message = {"w": torch.tensor([3.0, 1.0]), "z": torch.tensor([4.0, 2.0])}
    _, unsent = send(channel("prune:keep=0.5,scope=item,feedback=true"), message, {})
    assert {k: v.tolist() for k, v in unsent.items()} == {"prune.w": [0.0, 1.0]}


def test_what_waits_outlives_a_message_without_its_item():
    defended, waits = channel("prune:keep=0.5,feedback=true"), {"prune.w": torch.tensor([0.0, 3.0])}
    sent, unsent = send(defended, {"z": torch.ones(2)}, waits)
    assert "w" not in sent
    assert toys.same(unsent, waits)


def test_each_defense_of_a_chain_makes_good_what_itself_leaves_out():
    """[4, 3] becomes [4, 0] by pruning, and signs send [2, 0] of it."""
    _, unsent = send(channel("prune:keep=0.5,feedback=true", "sign:feedback=true"), {"w": torch.tensor([4.0, 3.0])}, {})
    assert {k: v.tolist() for k, v in unsent.items()} == {"prune.w": [0.0, 3.0], "sign.w": [2.0, 0.0]}


@pytest.mark.parametrize("key", ["fedavg", "scaffold", "fedpac"])
def test_pruning_nothing_with_feedback_has_the_bits_of_a_run_without_defenses(key: str):
    plain, defended = (toys.play(key, 3, defense=d) for d in ([], ["prune:keep=1,feedback=true"]))
    assert all(toys.same(a.next_server, b.next_server) for a, b in zip(plain, defended, strict=True))
    made = toys.setup(key, defense=["prune:keep=1,feedback=true"])
    federated = Federated(made)
    federated.advance()
    assert not any(federated.unsent.values())


def test_the_first_round_is_the_same_with_feedback_and_later_ones_are_not():
    without, fed = (toys.play("fedavg", 2, defense=[text]) for text in ("prune:keep=0.2", PRUNE))
    assert toys.same(without[0].next_server, fed[0].next_server)
    assert not toys.same(without[1].next_server, fed[1].next_server)


def test_the_server_of_fedavg_gets_all_changes_sooner_or_later(doubles: None):
    """Uniform mean: server_T + mean of what waits = server_0 + the mean over clients of all their changes."""
    made = toys.setup("fedavg", defense=[PRUNE], settings={"weighting": "uniform"})
    federated, wanted = Federated(made), [made.server_first]

    def add(before: Any, played: Any, server: Items) -> None:
        steps = [subtract(select(o.done.up, "body", "head"), played.downs[c]) for c, o in played.outcomes.items()]
        wanted.append(combine(torch.add, wanted[-1], weighted_mean(steps, [1.0] * 4)))

    federated.on_exchanged = add
    for _ in range(3):
        federated.advance()
    waits = weighted_mean([without_prefix("prune", items) for items in federated.unsent.values()], [1.0] * 4)
    assert toys.distance(combine(torch.add, federated.server, waits), wanted[-1]) < 1e-12
    assert float(norm(waits)) > 0.01


# --- of which methods


@pytest.mark.parametrize(
    ("key", "settings", "fed"),
    [
        ("fedavg", {}, {"body", "head"}),
        ("fedrep", {}, {"body"}),
        ("scaffold", {}, {"delta", "control"}),
        ("fedpac", {}, {"body", "head"}),
        ("fedproto", {}, set()),
        ("fd", {}, set()),
        ("fedkd", {}, set()),
        ("fedmtl", {}, set()),
        ("apple", {}, set()),
        ("fedcac", {}, set()),
    ],
)
def test_changes_add_up_where_they_are_what_a_round_adds_to_what_was_sent(
    key: str, settings: dict[str, Any], fed: set[str]
):
    """FedProto and FD send means, FedKD factors of a matrix; FedMTL, APPLE and FedCAC train models that the client holds."""
    assert {name.partition(".")[0] for name in increments(toys.method(key, **settings))} == fed


@pytest.mark.parametrize("key", ["fedproto", "fedmtl"])
def test_a_method_without_such_changes_is_refused_feedback(key: str):
    with pytest.raises(ConfigError, match=f"prune cannot make good .* uploads of {key}: .* Use feedback=false"):
        toys.setup(key, defense=[PRUNE])
    toys.setup(key, defense=["prune:keep=0.2"])


# --- whose it is


def test_what_waits_is_a_clients_own_and_changes_only_when_its_upload_is_accepted():
    made = toys.setup("fedavg", defense=[PRUNE], rounds=8, participation=0.5, drop_rate=0.5)
    federated, seen = Federated(made), set[str]()
    for _ in range(8):
        before = {c: toys.snapshot(items) for c, items in federated.unsent.items()}
        metrics = federated.advance()[0]
        accepted = set(metrics["cohort"]) - set(metrics["lost"])
        for c, was in before.items():
            assert toys.same(federated.unsent[c], was) == (c not in accepted)
        seen |= {"accepted"} if accepted else set()
        seen |= {"lost"} if metrics["lost"] else set()
    assert seen == {"accepted", "lost"}
    assert not toys.same(federated.unsent[0], federated.unsent[1])


def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(tmp_path: Path):
    made = toys.setup("fedavg", defense=[PRUNE], rounds=4)
    whole, cut = (RunFolder.create(tmp_path, name) for name in ("whole", "cut"))
    straight = play(made, whole, lambda t, metrics: None)
    with pytest.raises(toys.Stop):
        play(made, cut, toys.stopping(1))
    resumed = play(made, cut, lambda t, metrics: None)
    assert toys.same(resumed.server, straight.server)
    assert all(toys.same(resumed.unsent[c], straight.unsent[c]) for c in range(4))
    assert all(norm(straight.unsent[c]) > 0 for c in range(4))


# --- captures and vault


def played(path: Path, capture: str = "both", defense: str = PRUNE) -> tuple[Any, RunFolder, CaptureStore, Vault]:
    made = toys.setup("fedavg", capture_rounds="first,last", defense=[defense] if defense else [])
    made = replace(made, config=made.config.model_copy(update={"kind": capture}))
    folder = RunFolder.create(path, "run")
    play(made, folder, lambda t, metrics: None)
    return made, folder, CaptureStore(folder.captures), Vault(folder.vault)


def test_the_vault_holds_what_waited_and_what_would_have_been_sent(tmp_path: Path):
    """Probe and update of a late round: protect(upload + e) is what was captured, bit for bit; e of the first round is none."""
    made, _, store, vault = played(tmp_path)
    for name in store.ids():
        record, truth = store.read(name), vault.truth(name)
        assert set(truth.up) == set(record.up)
        if record.round == 0:
            assert truth.unsent == {}
        else:
            assert norm(truth.unsent) > 0
        again = made.channel.send_up(truth.up, record.down, record.round, record.client, unsent=truth.unsent)
        assert toys.same(again.up, record.up)
        alone = made.channel.send_up(truth.up, record.down, record.round, record.client).up
        assert toys.same(alone, record.up) == (record.round == 0)


def test_captures_leave_what_waits_alone(tmp_path: Path):
    made, _, _, _ = played(tmp_path)
    plain = Federated(toys.setup("fedavg", defense=[PRUNE]))
    for _ in range(3):
        plain.advance()
    straight = play(made, RunFolder.create(tmp_path, "again"), lambda t, metrics: None)
    assert all(toys.same(plain.unsent[c], straight.unsent[c]) for c in range(4))


@pytest.mark.parametrize("defense", ["clip:bound=0.01", "gaussian:std=0.1", "sign", "fp16", "qsgd:bits=3", "laplace"])
def test_under_every_defense_of_the_wire_the_vault_holds_the_upload_before_it(defense: str, tmp_path: Path):
    """The upload is FedAvg's own: what the same run sends without defenses in its first round."""
    _, _, store, vault = played(tmp_path / "defended", defense=defense)
    _, _, plain, open_vault = played(tmp_path / "plain", defense="")
    for name in [n for n in store.ids() if n.startswith("r000")]:
        assert toys.same(vault.truth(name).up, plain.read(name).up)
        assert not toys.same(store.read(name).up, plain.read(name).up)
        assert open_vault.truth(name).up == {}


def test_a_vault_of_an_earlier_version_is_read_and_a_damaged_one_is_named(tmp_path: Path):
    _, folder, store, vault = played(tmp_path)
    name = next(n for n in store.ids() if n.startswith("r002"))
    record, path = store.read(name), folder.vault / f"{name}.safetensors"
    shapes = {k: v.shape for k, v in record.up.items()}
    whole = read_items(path, "the truth")

    def check() -> Any:
        return vault.check(name, record.input, record.batch, {}, shapes)

    assert check().up.keys() == record.up.keys()
    for item, value, why in (
        ("up.head.bias", torch.zeros(9), "before its defenses is not like the one after them .*head.bias"),
        ("up.head.bias", torch.full((3,), torch.nan), "'up.head.bias' holds a NaN"),
        ("unsent.prune.head.bias", torch.zeros(9), r"'unsent.prune.head.bias' is \[9\]; .* is \[3\]"),
        ("unsent.prune.head.bias", torch.full((3,), torch.inf), "'unsent.prune.head.bias' holds a NaN or an infinity"),
    ):
        write_items(path, whole | {item: value})
        with pytest.raises(RunError, match=f"the vault is damaged: .*{why}"):
            check()
    write_items(path, {k: v for k, v in whole.items() if not k.startswith(("up.", "unsent."))})
    assert (check().up, check().unsent) == ({}, {})


def test_an_exchange_that_an_adversary_brings_about_is_defended_with_what_waited(tmp_path: Path):
    made, _, store, vault = played(tmp_path, "probe")
    name = next(n for n in store.ids() if n.startswith("r002"))
    record, truth = store.read(name), vault.truth(name)
    config, net, algorithm = made.config, made.net, made.algorithm

    def up(unsent: Items) -> Items:
        return exchanged(config, net, algorithm, record, record.down, Client(truth.x, truth.y, {}, unsent)).up

    assert toys.same(up(truth.unsent), record.up)
    assert not toys.same(up({}), record.up)


def test_an_attack_does_not_need_what_waits(tmp_path: Path):
    """The rows are the same with the vault's unsent items taken out: no attack reads them."""
    run = pflsec.train(
        algo="fedavg", data="digits", clients=3, rounds=2, defense=["prune:keep=0.3,feedback=true"], runs_dir=tmp_path,
        capture_rounds="last", capture_clients="0", model="mlp", name="run",
    )  # fmt: skip
    options = {"iterations": 3, "restarts": 1, "lpips": "none", "controls": False}
    tables = []
    for _ in range(2):
        scores = pflsec.attack(run, "inverting-gradients", **options)
        assert isinstance(scores, Scores)
        tables.append(scores.table.drop(columns=["seconds"]))
        for path in (run.path / "vault").glob("r*.safetensors"):
            items = read_items(path, "the truth")
            write_items(path, {k: v for k, v in items.items() if not k.startswith("unsent.")})
    assert tables[0].equals(tables[1])


def test_the_change_of_a_pruned_upload_stays_as_sparse_as_it_was():
    """Feedback changes which coordinates go, not how many."""
    made = toys.setup("fedavg", defense=[PRUNE])
    turn = toys.rounds(made, 2)[1]
    step = change({k: turn.ups[0][k] for k in turn.downs[0]}, turn.downs[0])
    share = sum(int((v != 0).sum()) for v in step.values()) / sum(v.numel() for v in step.values())
    assert share == pytest.approx(0.2, abs=0.01)
