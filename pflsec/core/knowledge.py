"""Threat models: who attacks, and what that adversary knows."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from pflsec.core.errors import KnowledgeError, unknown


class Knows(StrEnum):
    """One thing that an adversary may know. The values are the flags of `--knowledge wire+FLAG`."""

    ARCH = "arch"
    INPUT = "input_stats"
    UPLINK = "uplink"
    HYPER = "hyper"
    HISTORY = "history"
    LABELS = "labels"
    PRIVATE = "personal_params"
    CANDIDATES = "candidates"


WORDS = {
    Knows.ARCH: "the architecture and the method's code",
    Knows.INPUT: "shape and normalisation of the inputs",
    Knows.UPLINK: "each captured client's own messages, in both directions",
    Knows.HYPER: "learning rate, batch size and number of local steps",
    Knows.HISTORY: "all earlier messages of the client",
    Knows.LABELS: "the true labels of the batch",
    Knows.PRIVATE: "the client's private items before its local work",
    Knows.CANDIDATES: "some images with their labels, among them those of the batch",
}

_COMMON = {Knows.ARCH, Knows.INPUT}
ADVERSARIES: dict[str, frozenset[Knows]] = {
    "server": frozenset(_COMMON | {Knows.UPLINK, Knows.HYPER, Knows.HISTORY}),
    "eavesdropper": frozenset(_COMMON | {Knows.UPLINK}),
    "client": frozenset(_COMMON | {Knows.HYPER}),
    "server-secagg": frozenset(_COMMON | {Knows.HYPER, Knows.HISTORY}),
    "malicious-server": frozenset(_COMMON | {Knows.UPLINK, Knows.HYPER, Knows.HISTORY}),
}
WHO = {
    "server": "the server, which follows the protocol and reads all that it receives",
    "eavesdropper": "somebody who taps a client's link and sees plain messages, not the server's settings or memory",
    "client": "another client, which sees its own downlinks only",
    "server-secagg": "a server that sees only sums over the cohort",
    "malicious-server": "a server that may also choose what it sends",
}
ORACLE = frozenset({Knows.LABELS, Knows.PRIVATE, Knows.CANDIDATES, Knows.HYPER, Knows.HISTORY})


@dataclass(frozen=True)
class ThreatModel:
    """An adversary and the knowledge granted to it: `wire` (what it sees), `oracle`, or `wire+FLAG,FLAG`."""

    adversary: str = "server"
    knowledge: str = "wire"

    @property
    def knows(self) -> frozenset[Knows]:
        """Everything this adversary knows. Raises KnowledgeError for an unknown adversary or flag."""
        if self.adversary not in ADVERSARIES:
            raise KnowledgeError(unknown("adversary", self.adversary, ADVERSARIES))
        base, plus, flags = self.knowledge.partition("+")
        if base not in ("wire", "oracle") or (plus and (base == "oracle" or not flags)):
            raise KnowledgeError(f"knowledge '{self.knowledge}' is not known. Use wire, oracle, or wire+FLAG,FLAG.")
        granted = set(ADVERSARIES[self.adversary]) | (ORACLE if base == "oracle" else set())
        for flag in filter(None, flags.split(",")):
            if flag not in list(Knows):
                raise KnowledgeError(unknown("knowledge flag", flag, [k.value for k in Knows]))
            granted.add(Knows(flag))
        return frozenset(granted)

    def require(self, needs: Iterable[Knows], what: str) -> None:
        """Raise KnowledgeError unless everything needed is known; the message names the flag that would grant it."""
        missing = [need for need in Knows if need in set(needs) - self.knows]
        if missing:
            words = "; ".join(WORDS[m] for m in missing)
            given = self.knowledge.partition("+")[2]
            flags = ",".join([*filter(None, [given]), *missing])
            raise KnowledgeError(
                f"{what} needs {words}, which the adversary '{self.adversary}' with knowledge '{self.knowledge}' does not "
                f"have. Grant it with --knowledge wire+{flags}, or choose another adversary."
            )
