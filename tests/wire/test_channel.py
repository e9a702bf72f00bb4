"""The channel: contract, defenses and ledger, in this order, on the one path between client and server."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from pflsec.core.config import Config
from pflsec.core.contract import Contract
from pflsec.core.defense import AggregateDefense, Defense
from pflsec.core.errors import WireError
from pflsec.core.items import Items, select, subtract
from pflsec.core.vault import VaultWriter
from pflsec.runtime.recorder import Recorder
from pflsec.runtime.rounds import Federated
from pflsec.wire.channel import Channel, Ledger
from pflsec.wire.store import CaptureStore
from tests import toys


class Shrink(Defense[Config]):
    """Send a tenth of the change."""

    key, seam = "shrink", "uplink"

    def protect(self, message: Items, reference: Items, rng: torch.Generator) -> Items:
        return {k: reference[k] + (v - reference[k]) / 10 if k in reference else v for k, v in message.items()}


class Noise(Defense[Config]):
    """Add a standard normal draw."""

    key, seam = "noise", "uplink"

    def protect(self, message: Items, reference: Items, rng: torch.Generator) -> Items:
        return {k: v + torch.randn(v.shape, generator=rng) if v.dim() else v for k, v in message.items()}


class Halfway(AggregateDefense[Config]):
    """Give the server half of the first client's change."""

    key = "halfway"

    def combine(self, changes: Mapping[int, Items], expected: float, rng: torch.Generator) -> Items:
        return {k: v / 2 for k, v in changes[min(changes)].items()}


class Smuggles(Defense[Config]):
    key, seam = "smuggles", "uplink"

    def protect(self, message: Items, reference: Items, rng: torch.Generator) -> Items:
        return message | {"secret": torch.ones(1)}


class Hides(Defense[Config]):
    """Let the downlink's items through and nothing else."""

    key, seam = "hides", "uplink"

    def protect(self, message: Items, reference: Items, rng: torch.Generator) -> Items:
        return {k: message[k] for k in reference}


class Breaks(Defense[Config]):
    key, seam = "breaks", "uplink"

    def protect(self, message: Items, reference: Items, rng: torch.Generator) -> Items:
        return {k: v / 0 for k, v in message.items()}


def channel(*defenses: Defense[Any], up: dict[str, str] | None = None) -> Channel:
    return Channel(Contract("toy", {"w": "weights [n]"}, up or {"w": "weights [n]"}, toys.tiny()), defenses)


def test_without_defenses_messages_arrive_as_they_are():
    message = {"w": torch.tensor([1.0, 2.0])}
    assert toys.same(channel().send_down(message, 0, 0), message)
    assert toys.same(channel().send_up(message, message, 0, 0).up, message)


def test_what_arrives_has_no_graph():
    message = {"w": torch.ones(2, requires_grad=True) * 2}
    assert not channel().send_up(message, {}, 0, 0).up["w"].requires_grad


def test_uplink_defenses_act_in_their_order_on_the_upload_alone():
    """10 relative to 0: shrunk to 1, then noised. The other order would shrink the noise as well."""
    down = {"w": torch.zeros(2)}
    first = channel(Shrink(Config()), Noise(Config())).send_up({"w": torch.full((2,), 10.0)}, down, 4, 1).up
    noise = channel(Noise(Config())).send_up({"w": torch.zeros(2)}, down, 4, 1).up
    assert torch.allclose(first["w"], 1 + noise["w"])
    assert toys.same(channel(Shrink(Config())).send_down(down, 4, 1), down)


def test_a_defenses_noise_is_a_stream_of_its_round_and_client():
    sent = {
        (t, c): channel(Noise(Config())).send_up({"w": torch.zeros(3)}, {}, t, c).up["w"]
        for t in (0, 1)
        for c in (0, 1)
    }
    assert torch.equal(sent[0, 0], channel(Noise(Config())).send_up({"w": torch.zeros(3)}, {}, 0, 0).up["w"])
    assert len({tuple(v.tolist()) for v in sent.values()}) == 4


def test_the_aggregate_seam_acts_on_what_the_server_step_is_given_alone():
    """4 and 9 count from 2 and 3: half of the first change, 1, is what either becomes."""
    defended, draws = channel(Halfway(Config())), torch.Generator()
    ups, starts = ({c: {"w": torch.tensor([v])} for c, v in enumerate(values)} for values in ((4.0, 9.0), (2.0, 3.0)))
    given = defended.gather(ups, starts, 2, draws)
    assert {c: up["w"].tolist() for c, up in given.items()} == {0: [3.0], 1: [4.0]}
    assert defended.send_up(ups[0], starts[0], 0, 0).up["w"].tolist() == [4.0]
    assert channel().gather(ups, starts, 2, draws) == ups


def test_a_defense_cannot_send_what_the_method_does_not_declare():
    with pytest.raises(WireError, match="'secret'"):
        channel(Smuggles(Config())).send_up({"w": torch.ones(2)}, {}, 0, 0)


def test_a_defense_does_not_hide_a_message_that_breaks_the_contract():
    with pytest.raises(WireError, match="round 5, client 2: toy sent the item 'other'"):
        channel(Hides(Config())).send_up({"w": torch.ones(2), "other": torch.ones(2)}, {"w": torch.ones(2)}, 5, 2)


def test_a_message_that_is_not_finite_is_refused_by_round_client_and_item():
    with pytest.raises(WireError, match="round 5, client 2: item 'w' on the way up is not finite"):
        channel(Breaks(Config())).send_up({"w": torch.ones(2)}, {}, 5, 2)
    with pytest.raises(WireError, match="round 5, client 2: item 'w' on the way down is not finite"):
        channel().send_down({"w": torch.tensor([torch.inf])}, 5, 2)


def test_the_server_learns_what_the_defense_let_through():
    """One client: the next model is theta + (theta_up - theta)/10, then halfway back: a twentieth of the change."""
    plain, both = (
        toys.play("fedavg", 1, data=toys.dataset([7]), defenses=defenses)[0]
        for defenses in ([], [Shrink(Config()), Halfway(Config())])
    )
    change, defended = (subtract(turn.next_server, turn.server) for turn in (plain, both))
    assert toys.distance({k: v / 20 for k, v in change.items()}, defended) < 1e-6


def test_captures_hold_what_left_the_device(tmp_path: Any):
    """Defended, the captured change is a tenth of the plain one; the replay check looks at what came before."""
    changes: list[Items] = []
    for defenses in ([], [Shrink(Config())]):
        made = toys.setup("fedavg", defenses=defenses, capture_rounds="first", victims=1)
        federated, store = Federated(made), CaptureStore(tmp_path / f"captures {len(defenses)}")
        prober = Recorder(made, store, VaultWriter(tmp_path / f"vault {len(defenses)}"))
        prober.probes(federated.state())
        record = store.read("r000-c00-v0-probe")
        changes.append(subtract(select(record.up, "body", "head"), record.down))
        facts = json.loads((prober.vault.folder / f"{record.id}.json").read_text())
        assert facts["replay_residual"] < 1e-6
    assert toys.distance({k: v / 10 for k, v in changes[0].items()}, changes[1]) < 1e-7
    assert max(float(v.abs().max()) for v in changes[0].values()) > 1e-3


# --- bytes


def test_fedavg_costs_eight_bytes_a_parameter_client_and_direction_in_two_rounds():
    """m float32 parameters are 4m bytes; K clients and 2 rounds make 8mK each way. Sample counts ride in the header."""
    made = toys.setup("fedavg", rounds=2)
    parameters, clients = made.net.size(), made.federation.clients
    turns = toys.rounds(made)
    for direction in ("down", "up"):
        assert sum(turn.metrics[f"bytes_{direction}"] for turn in turns) == 8 * parameters * clients
    assert turns[0].metrics["bytes_by_kind"] == {
        "down": {"weights": 4 * parameters * clients},
        "up": {"weights": 4 * parameters * clients},
    }


def test_a_lost_upload_costs_a_downlink_only():
    made = toys.setup("fedavg", drop_rate=0.5)
    turn = toys.rounds(made, 1)[0]
    assert turn.metrics["bytes_down"] == 4 * made.net.size() * 4
    assert turn.metrics["bytes_up"] == 4 * made.net.size() * 2


def test_bytes_are_counted_by_kind_and_by_width():
    """FedProto, all clients: held * d float32 up, C one-byte flags; round 0 sends no prototype down."""
    turn = toys.play("fedproto", 1)[0]
    rows = sum(len(held) for held in toys.HELD)
    assert turn.metrics["bytes_by_kind"] == {
        "down": {"label set": 4 * 3},
        "up": {"prototypes": rows * 5 * 4, "label set": 4 * 3},
    }


def test_a_ledger_adds_up_its_kinds():
    ledger, contract = Ledger(), Contract("toy", {}, {"w": "weights [n]", "n": "counts"}, toys.tiny())
    ledger.add("up", contract, {"w": torch.ones(3, dtype=torch.float64), "n": torch.tensor(1)})
    ledger.add("up", contract, {"w": torch.ones(2, dtype=torch.float64), "n": torch.tensor(1)})
    assert ledger.bytes == {"down": {}, "up": {"weights": 40}}
    assert (ledger.total("down"), ledger.total("up")) == (0, 40)
