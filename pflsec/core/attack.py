"""An attack: a function of a capture. It never sees the truth, and never imports a method."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

import torch
from torch import Tensor

from pflsec.core.config import Config
from pflsec.core.items import Items
from pflsec.core.knowledge import Knows

if TYPE_CHECKING:
    from pflsec.wire.capture import Capture

Status = Literal["converged", "budget", "diverged", "nonfinite", "not-applicable"]
C = TypeVar("C", bound=Config)
Settings = Config  # in the class below, Config names the attribute


@dataclass(frozen=True)
class Reconstruction:
    """What an attack returns.

    x          [R, C, H, W] as the network sees it, tokens int64 [R, any length] of texts, or None where only labels were sought
    y          int64 [R], or None
    objective  the attacker's own loss at x, without priors: the only number by which restarts are chosen
    labels, hidden  how labels and the client's private items were treated
    membership      by statistic, a score for each of the capture's candidates, [n] in their order: the higher, the more it looks
                    like an image of the batch
    """

    x: Tensor | None
    y: Tensor | None
    objective: float
    status: Status
    iterations: int
    restarts: int
    labels: str
    hidden: str
    note: str = ""
    trace: list[float] = field(default_factory=list)
    failures: Mapping[str, int] = field(default_factory=dict)
    membership: Mapping[str, Tensor] = field(default_factory=dict)


class Attack(Generic[C]):
    """Base of every attack. One file, one subclass and its Config."""

    key: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    Config: ClassVar[type[Settings]] = Settings
    needs: ClassVar[frozenset[Knows]] = frozenset()

    def __init__(self, cfg: C):
        self.cfg = cfg

    def reconstruct(self, cap: "Capture", rng: torch.Generator) -> Reconstruction:
        """Return the reconstruction of the capture's batch. Raises NotApplicable with the reason where there is nothing
        to work on."""
        raise TypeError(f"{type(self).__name__} does not define reconstruct(); every attack must.")

    def craft(self, cap: "Capture", rng: torch.Generator) -> Items:
        """Return the downlink that the client is to receive in place of the capture's.

        Asked only of attacks that need Knows.DOWNLINK. The runtime does the client's work on it, with the true data and
        defenses, and hands `reconstruct` the capture of that exchange. Raises NotApplicable where none would help.
        """
        raise TypeError(f"{type(self).__name__} does not define craft(); attacks that choose the downlink must.")

    def requirements(self) -> Mapping[str, frozenset[Knows]]:
        """Return {what: knowledge it needs} for this configuration; checked before anything runs."""
        wanted: dict[str, frozenset[Knows]] = {f"attack {self.key}": self.needs}
        choices: dict[tuple[str, str], Knows] = {
            ("labels", "known"): Knows.LABELS,
            ("hidden", "oracle"): Knows.PRIVATE,
            ("hidden", "log"): Knows.HISTORY,
        }
        settings: dict[str, Any] = self.cfg.model_dump()
        for (name, value), need in choices.items():
            if settings.get(name) == value:
                wanted[f"--{name} {value}"] = frozenset({need})
        return wanted
