"""Threat models: who attacks, and what that adversary knows.

A flag stands here if something in the program changes with it. What else surveys grant an adversary, and why it is no flag:
theta_start (every adversary has the downlinks that its place shows), n_samples (the size of a batch stands in every capture),
personal_buffers (running statistics that a client keeps are private items: personal_params), batch_stats (where statistics
are sent, they are on the wire; where not, the replay makes them from the guess), step_order and rng (the client's draws are
keyed by public names, so the replay repeats them), dp_params (no attack uses the clipping bound or the noise), aux_data (no
attack takes data from elsewhere).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from pflsec.core.errors import ConfigError, KnowledgeError, unknown


class Knows(StrEnum):
    """One thing that an adversary may know. The values are the flags of `--knowledge wire+FLAG`."""

    ARCH = "arch"
    INPUT = "input_stats"
    UPLINK = "uplink"
    HYPER = "hyper"
    HISTORY = "history"
    LABELS = "labels"
    LABEL_HIST = "label_hist"
    PRIVATE = "personal_params"
    DOWNLINK = "downlink"
    CANDIDATES = "candidates"


WORDS = {
    Knows.ARCH: "the architecture and the method's code",
    Knows.INPUT: "shape and normalisation of the inputs",
    Knows.UPLINK: "each captured client's own messages, in both directions",
    Knows.HYPER: "learning rate, batch size and number of local steps",
    Knows.HISTORY: "all earlier messages of the client",
    Knows.LABELS: "the true labels of the batch",
    Knows.LABEL_HIST: "how many images of each class the batch has",
    Knows.PRIVATE: "the client's private items before its local work",
    Knows.DOWNLINK: "the choice of what the client receives",
    Knows.CANDIDATES: "some images with their labels, among them those of the batch",
}
POWERS = frozenset({Knows.DOWNLINK})
"""What an adversary does rather than knows: no flag grants it."""

_COMMON = {Knows.ARCH, Knows.INPUT}
ADVERSARIES: dict[str, frozenset[Knows]] = {
    "server": frozenset(_COMMON | {Knows.UPLINK, Knows.HYPER, Knows.HISTORY}),
    "eavesdropper": frozenset(_COMMON | {Knows.UPLINK}),
    "client": frozenset(_COMMON | {Knows.HYPER}),
    "server-secagg": frozenset(_COMMON | {Knows.HYPER}),
    "malicious-server": frozenset(_COMMON | {Knows.UPLINK, Knows.HYPER, Knows.HISTORY, Knows.DOWNLINK}),
}
INDIRECT = frozenset({"client", "server-secagg"})
"""Adversaries that see no client's own messages, unless `uplink` grants them, but something made of them (runtime.views)."""
WHO = {
    "server": "the server, which follows the protocol and reads all that it receives",
    "eavesdropper": "somebody who taps a client's link and sees plain messages, not the server's settings or memory",
    "client": "another client, which follows the protocol and sees its own downlinks only: single uploads where the method "
    "forwards them, else the mean over the cohort, from which it takes away its own share; not the server's memory",
    "server-secagg": "a server under secure aggregation, which sees the sum over the cohort and never a single upload; the "
    "clients of the cohort are sought as one batch",
    "malicious-server": "a server that reads all that it receives and may also choose what it sends; only attacks that choose "
    "the downlink use this, the others find what the honest server finds",
}
ORACLE = frozenset({Knows.LABELS, Knows.PRIVATE, Knows.CANDIDATES, Knows.HYPER, Knows.HISTORY})


@dataclass(frozen=True)
class Letter:
    """A threat model of the survey on gradient inversion (Carletti et al., USENIX Security 2025), in our words.

    about    what the survey's adversary is
    note     what of it is different here, or "": printed wherever the letter is used
    refused  why it is none of ours, or ""
    """

    about: str
    adversary: str = ""
    knowledge: str = "wire"
    note: str = ""
    refused: str = ""


NO_SURROGATES = "no attack here uses data from elsewhere"
LETTERS = {
    "A": Letter("eavesdropper", "eavesdropper"),
    "B": Letter(
        "server",
        "server",
        note="a server here always knows the training details, having set them: B and C are the same",
    ),
    "C": Letter("server that knows the training details", "server"),
    "D": Letter("C with surrogate data", refused=f"{NO_SURROGATES}, so that D would be C"),
    "E": Letter(
        "server that knows how the client's data are distributed",
        "server",
        "wire+label_hist",
        note="of the distribution, the number of images of each class in the batch is granted; nothing here uses more of it",
    ),
    "F": Letter(
        "C that may also manipulate the model",
        "malicious-server",
        note="attacks that leave the downlink alone find what they find as C",
    ),
    "G": Letter("F with surrogate data", refused=f"{NO_SURROGATES}, so that G would be F"),
    "H": Letter(
        "G that also selects clients",
        refused=f"{NO_SURROGATES}, and every captured client is attacked already, whoever selects: H would be F",
    ),
}


def letter(name: str) -> Letter:
    """Return the survey's threat model with this letter. Raises ConfigError for unknown ones and those that are none here."""
    found = LETTERS.get(name.upper())
    if found is None:
        raise ConfigError(unknown("threat model", name, LETTERS))
    if found.refused:
        usable = ", ".join(key for key, other in LETTERS.items() if not other.refused)
        raise ConfigError(f"threat model {name.upper()} ({found.about}) is none here: {found.refused}. Use {usable}.")
    return found


def letter_words(name: str) -> str:
    """Return what a letter stands for here, in one sentence."""
    found = letter(name)
    what = f"{found.about}, here --adversary {found.adversary} --knowledge {found.knowledge}"
    return f"{what} ({found.note})" if found.note else what


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
                raise KnowledgeError(unknown("knowledge flag", flag, [k.value for k in Knows if k not in POWERS]))
            if Knows(flag) in POWERS:
                raise KnowledgeError(
                    f"{WORDS[Knows(flag)]} is no knowledge; name who has it: --adversary malicious-server."
                )
            granted.add(Knows(flag))
        return frozenset(granted)

    def require(self, needs: Iterable[Knows], what: str) -> None:
        """Raise KnowledgeError unless everything needed is known; the message names the flag that would grant it.

        Who sees no client's own messages attacks what is made of them instead.
        """
        instead = {Knows.UPLINK} if self.adversary in INDIRECT else set()
        missing = [need for need in Knows if need in set(needs) - self.knows - instead]
        if powers := [need for need in missing if need in POWERS]:
            raise KnowledgeError(
                f"{what} needs {WORDS[powers[0]]}, which the adversary '{self.adversary}' does not have: it follows the "
                "protocol. Use --adversary malicious-server."
            )
        if missing:
            words = "; ".join(WORDS[m] for m in missing)
            given = self.knowledge.partition("+")[2]
            flags = ",".join([*filter(None, [given]), *missing])
            raise KnowledgeError(
                f"{what} needs {words}, which the adversary '{self.adversary}' with knowledge '{self.knowledge}' does not "
                f"have. Grant it with --knowledge wire+{flags}, or choose another adversary."
            )
