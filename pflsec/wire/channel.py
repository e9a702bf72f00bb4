"""The channel: the one path between client and server. Contract, then defenses, then the ledger and the recorder."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from pflsec.core.change import change, moved
from pflsec.core.contract import Contract, Direction, kind_of
from pflsec.core.defense import AggregateDefense, Coding, Defense
from pflsec.core.errors import WireError
from pflsec.core.items import Items, detached, first_nonfinite, prefixed, size_in_bytes, without_prefix
from pflsec.core.streams import stream


@dataclass
class Ledger:
    """Bytes on the wire by direction and kind of item. Scalars ride in the header and are not counted."""

    bytes: dict[str, dict[str, int]] = field(default_factory=lambda: {"down": defaultdict(int), "up": defaultdict(int)})

    def add(
        self, direction: Direction, contract: Contract, message: Items, coded: Mapping[str, int] | None = None
    ) -> None:
        """Count one message.

        coded  bytes of items that are not written as whole tensors
        """
        for name, value in message.items():
            if size := (coded or {}).get(name, size_in_bytes({name: value})):
                self.bytes[direction][kind_of(contract.items(direction)[name])] += size

    def total(self, direction: Direction) -> int:
        """Return all bytes in one direction."""
        return sum(self.bytes[direction].values())


class Sent(NamedTuple):
    """What became of a client's message: what the server receives, and what the client keeps for its next one, under the key
    of the defense that has left it out: `<defense>.<item>`."""

    up: Items
    unsent: Items


class Channel:
    """Carries messages of one run. What comes out is what left the device: captures are taken from it.

    Defenses act at three seams: `step` (handed to local training by the runtime), `uplink` and `aggregate` (here).

    increments  items whose changes add up over the rounds, so that error feedback makes sense of them (pflsec.core.change)
    """

    def __init__(
        self, contract: Contract, defenses: Sequence[Defense] = (), seed: int = 0, increments: Collection[str] = ()
    ):
        self.contract = contract
        self.seed = seed
        self.increments = increments
        self.at_server = [d for d in defenses if isinstance(d, AggregateDefense)]
        self.uplink = [*(d for d in defenses if d.seam == "uplink"), *self.at_server]

    @property
    def least(self) -> int:
        """Fewest uploads of a round of which the server may make anything."""
        return max((d.least for d in self.at_server), default=1)

    def send_down(self, message: Items, t: int, client: int, ledger: Ledger | None = None) -> Items:
        """Return what the client receives. Raises WireError when the message breaks the contract."""
        return self._carry("down", message, t, client, ledger)

    def send_up(
        self,
        message: Items,
        reference: Items,
        t: int,
        client: int,
        ledger: Ledger | None = None,
        probe: str = "",
        unsent: Items | None = None,
    ) -> Sent:
        """Return what the server receives: checked, then defended in order; and what the client's defenses keep back.

        reference  what the items count from (pflsec.core.change)
        probe      names a message outside the run, whose defenses draw from streams of their own
        unsent     what they have kept back before
        """
        self.contract.check("up", message, f"round {t}, client {client}")
        kept, key = Items(), (t, client, probe) if probe else (t, client)
        for defense in self.uplink:
            rng = stream(self.seed, "defense", defense.key, *key)
            if defense.feedback:
                before = without_prefix(defense.key, unsent or {})
                message, left = self._fed_back(defense, message, reference, before, rng)
                kept |= prefixed(defense.key, left)
            else:
                message = defense.protect(message, reference, rng)
        return Sent(self._carry("up", message, t, client, ledger, self._coded(message, reference)), detached(kept))

    def _fed_back(
        self, defense: Defense, message: Items, reference: Items, before: Items, rng: torch.Generator
    ) -> tuple[Items, Items]:
        """Return what a defense makes of a message with what it has left out before, and what of all that it leaves out:
        e <- g + e - sent. Items of which nothing is left are not kept; those that this message lacks wait."""
        whole = message | {k: message[k] + e for k, e in before.items() if k in message}
        sent = defense.protect(whole, reference, rng)
        left = before | {k: whole[k] - sent[k] for k in self.increments if k in whole}
        return sent, {k: e for k, e in left.items() if e.any()}

    def _coded(self, message: Items, reference: Items) -> dict[str, int]:
        """Return the bytes of the items of a defended upload, as its defenses write their change; 0-d ones are not counted."""
        coding = Coding()
        for defense in self.uplink:
            coding = defense.coding(coding)
        if coding == Coding():
            return {}
        return {k: coding.size(v) for k, v in change(message, reference).items() if v.dim()}

    def gather(
        self, ups: Mapping[int, Items], references: Mapping[int, Items], expected: float, rng: torch.Generator
    ) -> dict[int, Items]:
        """Return the uploads as the method's server step is given them.

        Where a defense of the aggregate seam combines them, each holds its one change, and counts of 1: what the server
        step makes of that is made of the combination alone.
        """
        if not self.at_server:
            return dict(ups)
        changes = {c: change(up, references[c]) for c, up in ups.items()}
        for defense in self.at_server:
            one = defense.combine(changes, expected, rng)
            changes = dict.fromkeys(changes, one)
        counts = {name: torch.ones_like(v) for name, v in next(iter(ups.values())).items() if self._counts(name)}
        return {c: moved(up, references[c], changes[c]) | counts for c, up in ups.items()}

    def _counts(self, name: str) -> bool:
        return self.contract.kind("up", name) == "counts"

    def _carry(
        self,
        direction: Direction,
        message: Items,
        t: int,
        client: int,
        ledger: Ledger | None,
        coded: Mapping[str, int] | None = None,
    ) -> Items:
        where = f"round {t}, client {client}"
        self.contract.check(direction, message, where)
        if bad := first_nonfinite(message):
            raise WireError(f"{where}: item '{bad}' on the way {direction} is not finite. Lower --lr.")
        if ledger is not None:
            ledger.add(direction, self.contract, message, coded)
        return detached(message)
