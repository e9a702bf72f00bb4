"""The exchange that an active adversary brings about: the client's own work on a downlink that the attack has made."""

from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from pflsec.config.train import TrainConfig
from pflsec.core.algorithm import Algorithm
from pflsec.core.change import increments, origin
from pflsec.core.defense import StepDefense, of_kind
from pflsec.core.errors import NotApplicable
from pflsec.core.items import Items
from pflsec.models.network import Network
from pflsec.runtime.defending import inside, parse_defense
from pflsec.runtime.replay import local_work
from pflsec.training.local import Training, for_method
from pflsec.wire.capture import Record
from pflsec.wire.channel import Channel


class Client(NamedTuple):
    """What the client has and the attack never sees: x [B, C, H, W] as the network sees it, y int64 [B], private items, and
    what its defenses have left out of earlier uploads."""

    x: Tensor
    y: Tensor
    state: Items
    unsent: Items


def exchanged(
    config: TrainConfig, net: Network, algorithm: Algorithm[Any], record: Record, down: Items, client: Client
) -> Record:
    """Return a record as it would be had the client received `down` then, and worked and been defended as in the run.

    Raises NotApplicable under defenses whose noise only the run can draw, WireError for a downlink that breaks the contract.
    """
    defenses = [parse_defense(text) for text in config.defense]
    if private := of_kind(defenses, StepDefense):
        raise NotApplicable(f"the exchange cannot be done again under {private.key}: the run keeps its noise to itself")
    channel = Channel(algorithm.contract, defenses, config.seed, increments(algorithm))
    received = channel.send_down(down, record.round, record.client)
    ctx = local_work(net, record, client.x, client.y, config.seed, Training)
    ctx = inside(ctx, defenses, record.round, record.client, f"active {record.id}")
    sent = algorithm.local(for_method(ctx), client.state, received).up
    begun = origin(algorithm, client.state, received, sent)
    where, probe = (record.round, record.client), f"active {record.id}"
    return replace(record, down=received, up=channel.send_up(sent, begun, *where, probe=probe, unsent=client.unsent).up)
