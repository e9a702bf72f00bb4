"""The channel: the one path between client and server. Contract, then defenses, then the ledger and the recorder."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from pflsec.core.contract import Contract, Direction, kind_of
from pflsec.core.defense import Defense
from pflsec.core.errors import WireError
from pflsec.core.items import Items, detached, first_nonfinite, size_in_bytes
from pflsec.core.streams import stream


@dataclass
class Ledger:
    """Bytes on the wire by direction and kind of item. Scalars ride in the header and are not counted."""

    bytes: dict[str, dict[str, int]] = field(default_factory=lambda: {"down": defaultdict(int), "up": defaultdict(int)})

    def add(self, direction: Direction, contract: Contract, message: Items) -> None:
        """Count one message."""
        for name, value in message.items():
            if size := size_in_bytes({name: value}):
                self.bytes[direction][kind_of(contract.items(direction)[name])] += size

    def total(self, direction: Direction) -> int:
        """Return all bytes in one direction."""
        return sum(self.bytes[direction].values())


class Channel:
    """Carries messages of one run. What comes out is what left the device: captures are taken from it.

    Defenses act at three seams: `step` (handed to local training by the runtime), `uplink` and `aggregate` (here).
    """

    def __init__(self, contract: Contract, defenses: Sequence[Defense] = (), seed: int = 0):
        self.contract = contract
        self.seed = seed
        self.uplink = [d for d in defenses if d.seam == "uplink"]
        self.at_server = [d for d in defenses if d.seam == "aggregate"]

    def send_down(self, message: Items, t: int, client: int, ledger: Ledger | None = None) -> Items:
        """Return what the client receives. Raises WireError when the message breaks the contract."""
        return self._carry("down", message, t, client, ledger)

    def send_up(self, message: Items, down: Items, t: int, client: int, ledger: Ledger | None = None) -> Items:
        """Return what the server receives: checked, then defended in order."""
        self.contract.check("up", message, f"round {t}, client {client}")
        for defense in self.uplink:
            message = defense.protect(message, down, stream(self.seed, "defense", defense.key, t, client))
        return self._carry("up", message, t, client, ledger)

    def release(self, aggregate: Items, server: Items, t: int) -> Items:
        """Return the server's new items after the defenses of the aggregate seam."""
        for defense in self.at_server:
            aggregate = defense.protect(aggregate, server, stream(self.seed, "defense", defense.key, t))
        return aggregate

    def _carry(self, direction: Direction, message: Items, t: int, client: int, ledger: Ledger | None) -> Items:
        where = f"round {t}, client {client}"
        self.contract.check(direction, message, where)
        if bad := first_nonfinite(message):
            raise WireError(f"{where}: item '{bad}' on the way {direction} is not finite. Lower --lr.")
        if ledger is not None:
            ledger.add(direction, self.contract, message)
        return detached(message)
