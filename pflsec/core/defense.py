"""A defense: a pure transformation of messages at one of the three seams of the channel."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pflsec.core.config import Config
from pflsec.core.items import Items
from pflsec.core.local import Local, LossPerExample
from pflsec.core.network import Net

if TYPE_CHECKING:
    import numpy

C = TypeVar("C", bound=Config)
D = TypeVar("D", bound="Defense[Any]")

Spend = tuple[float, float, int]
"""Noisy steps of one kind: (noise multiplier, sample rate, number of steps)."""


INDEX = 32  # bits of the place of a coordinate within its item


@dataclass(frozen=True)
class Coding:
    """How the change of an item is written on the wire.

    bits    of a coordinate; None: as many as the tensor's
    scale   bits beside them, once an item
    sparse  coordinates that are zero are left out: the others go with their places, or behind a mask, whichever is shorter
    """

    bits: int | None = None
    scale: int = 0
    sparse: bool = False

    def size(self, change: Tensor) -> int:
        """Return the bytes of one item's change."""
        bits, count = self.bits or 8 * change.element_size(), change.numel()
        sent = int(torch.count_nonzero(change))
        ways = [sent * (bits + INDEX), count + sent * bits] if self.sparse and sent < count else [count * bits]
        return -(-(min(ways) + self.scale) // 8)


class Guard(Protocol):
    """What a defense of the step seam puts between one client's data and its parameters, for one local work.

    While there is one, data are reached through `ctx.fit`, `ctx.step` and `ctx.class_sums` alone: raw passes are refused.
    """

    @property
    def spent(self) -> Sequence[Spend]:
        """What this work has put on the account so far."""
        ...

    def rows(self, epochs: int) -> Iterator[Tensor]:
        """Yield the rows of the data that each step uses, int64; possibly none."""
        ...

    def gradient(self, on: LossPerExample, params: Items, x: Tensor, y: Tensor) -> list[Tensor]:
        """Return the protected mean gradient, one tensor a parameter; x and y may have no rows."""
        ...

    def class_sums(self, rows: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return the protected sums of rows [n, k] over each class [C, k], and counts [C]; target [n, C] is one-hot. Raises
        PrivacyError where nothing protects them."""
        ...


Settings = Config  # in the class below, Config names the attribute


class Defense(Generic[C]):
    """Base of every defense. One file, one subclass and its Config.

    seam      step: inside local training, at each gradient; uplink: on what a client sends, on the client; aggregate: on
              the changes of all accepted uploads, before the method sees any of them
    excludes  keys of defenses with which it cannot be combined
    """

    key: ClassVar[str]
    seam: ClassVar[Literal["step", "uplink", "aggregate"]]
    excludes: ClassVar[tuple[str, ...]] = ()
    Config: ClassVar[type[Settings]] = Settings

    def __init__(self, cfg: C):
        self.cfg = cfg

    @property
    def feedback(self) -> bool:
        """Whether a client adds to its next message what this defense has left out of the last one (error feedback)."""
        return getattr(self.cfg, "feedback", False)

    def protect(self, message: Items, reference: Items, rng: torch.Generator) -> Items:
        """Return the protected message. `reference` holds what each item counts from (pflsec.core.change); items that it
        lacks are left as they are."""
        raise TypeError(f"{type(self).__name__} does not define protect(); every uplink defense must.")

    def coding(self, before: Coding) -> Coding:
        """Return how what `protect` returns is written, given how its argument would be: whole numbers, for most."""
        return Coding()

    def adapt(self, guess: Items, seen: Items) -> Items:
        """Return what this defense makes of the change that a guess would have caused, differentiable: how an attacker who
        knows of the defense replays it. `seen` is the change that was sent."""
        return guess


class AggregateDefense(Defense[C]):
    """Base of defenses that give the server one change in place of every client's: a sum, say.

    hides_clients  the server sees no single client's upload, so that none is captured
    """

    seam = "aggregate"
    hides_clients: ClassVar[bool] = False

    @property
    def least(self) -> int:
        """Fewest uploads of which anything is made; a round with fewer counts as lost."""
        return 1

    def protect(self, message: Items, reference: Items, rng: torch.Generator) -> Items:
        """Return what a client sends, after all defenses of the uplink seam."""
        return message

    def combine(self, changes: Mapping[int, Items], expected: float, rng: torch.Generator) -> Items:
        """Return the change that the server takes in place of each client's.

        expected  number of clients that the cohort has on average
        """
        raise TypeError(f"{type(self).__name__} does not define combine(); every aggregate defense must.")


class UserDefense(AggregateDefense[C]):
    """Base of aggregate defenses that keep a privacy account of whole clients: one noisy sum a round.

    sampling  poisson: every client takes part by chance with the sample rate; fixed: cohorts of one size
    """

    @property
    def budget(self) -> float | None:
        """The epsilon that the run may spend; None: no limit."""
        raise TypeError(f"{type(self).__name__} does not define budget.")

    @property
    def sigma(self) -> float:
        """The noise multiplier."""
        raise TypeError(f"{type(self).__name__} does not define sigma.")

    @property
    def sampling(self) -> Literal["poisson", "fixed"]:
        raise TypeError(f"{type(self).__name__} does not define sampling.")

    def planned(self, clients: int, rate: float, rounds: int) -> "UserDefense[C]":
        """Return this defense with the noise for so many rounds settled."""
        raise TypeError(f"{type(self).__name__} does not define planned().")

    def delta(self, clients: int) -> float:
        """Return the delta at which epsilon is stated."""
        raise TypeError(f"{type(self).__name__} does not define delta().")

    def epsilon(self, account: Sequence[Spend], clients: int) -> float:
        """Return the epsilon that an account amounts to. Reading it changes nothing."""
        raise TypeError(f"{type(self).__name__} does not define epsilon().")

    def bound(self, account: Sequence[Spend], clients: int) -> float:
        """Return an epsilon that an account is certain not to exceed, quickly: what budgets are kept by."""
        raise TypeError(f"{type(self).__name__} does not define bound().")

    def claim(self, rate: float) -> str:
        """Return what is guaranteed at this sample rate, in a few words."""
        raise TypeError(f"{type(self).__name__} does not define claim().")


class ReleaseDefense(Defense[C]):
    """Base of defenses of the class sums and counts that a client gives away (`Local.class_sums`), one Gaussian mechanism
    on all of its records for each. They stand on the account of a StepDefense, without which they guarantee nothing: what is
    summed has passed a model that was fitted to the data."""

    seam = "step"

    @property
    def sigma(self) -> float:
        """The noise multiplier of one release."""
        raise TypeError(f"{type(self).__name__} does not define sigma.")

    @property
    def bound(self) -> float:
        """Norm to which each record's row is clipped, for replays by an attacker who knows it too."""
        raise TypeError(f"{type(self).__name__} does not define bound.")

    def over(self, guard: Guard, *key: int | str) -> Guard:
        """Return a guard that protects class sums, and leaves steps to another; `key` names its noise."""
        raise TypeError(f"{type(self).__name__} does not define over().")


class ShapingDefense(Defense[C]):
    """Base of defenses inside local training that change the gradient of each step by what they see of its batch, and keep no
    account: nothing is guaranteed. Data are reached as ever; what a client sends beside its gradients is left alone."""

    seam = "step"

    def at(self, net: Net) -> "ShapingDefense[C] | None":
        """Return this defense for a network, or None where it changes nothing."""
        raise TypeError(f"{type(self).__name__} does not define at().")

    def gradient(self, on: LossPerExample, params: Items, x: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return mean(on) over this batch, 0-d, and the gradient to step by, one tensor a parameter; `on` is asked once."""
        raise TypeError(f"{type(self).__name__} does not define gradient().")

    def why_not(self, net: Net, x: Tensor, sent: "Callable[[ShapingDefense[Any], Tensor], Items]") -> str | None:
        """Return why it would be of no use, or None where it is of some.

        x     a few inputs
        sent  what the method's client sends if this defense stands in its training on such inputs
        """
        raise TypeError(f"{type(self).__name__} does not define why_not().")


@dataclass(frozen=True, eq=False)
class Mixture:
    """What a step trains on in place of its batch of B rows.

    x, y     inputs [B, ...] and probabilities [B, classes]
    parts    int64 [B, k], the rows that each input is made of, its own first      weights  [B, k], their shares, of sum 1
    """

    x: Tensor
    y: Tensor
    parts: Tensor
    weights: Tensor


def together(many: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return parts and weights [B, k] of several mixtures as one. Rows of fewer parts than others are filled up with their own,
    of weight 0."""
    widest = max(parts.shape[1] for parts, _ in many)
    filled = [torch.cat([p, p[:, :1].expand(-1, widest - p.shape[1])], 1) for p, _ in many]
    return torch.cat(filled), torch.cat([F.pad(w, (0, widest - w.shape[1])) for _, w in many])


class InputDefense(Defense[C]):
    """Base of defenses inside local training that give each step mixtures of the client's own rows in place of its batch, and
    keep no account: nothing is guaranteed. Gradients then speak of mixtures alone; methods whose clients send anything else of
    their inputs are found by playing, and refused (pflsec.runtime.privacy)."""

    seam = "step"

    @property
    def idle(self) -> bool:
        """Whether it changes nothing, bit for bit."""
        raise TypeError(f"{type(self).__name__} does not define idle.")

    def mixed(self, rows: Tensor, among: Tensor, x: Tensor, y: Tensor, rng: "numpy.random.Generator") -> Mixture:
        """Return what a step trains on in place of its batch.

        rows   int64 [B], the batch      among  int64 [m], sorted, the rows that may be mixed in: the batch's own too
        x, y   what they are the rows of: inputs [n, ...] and probabilities [n, classes]
        """
        raise TypeError(f"{type(self).__name__} does not define mixed().")


class ModelDefense(Defense[C]):
    """Base of defenses that put a layer between body and head of every network of a run, and change what the steps of local
    training minimise; they keep no account: nothing is guaranteed."""

    seam = "step"

    def layer(self, features: tuple[int, ...]) -> nn.Module:
        """Return a new layer that keeps the shape of one input's features, its parameters drawn from torch's global
        generator. Raises ConfigError for features that it cannot take."""
        raise TypeError(f"{type(self).__name__} does not define layer().")

    def at(self, net: Net, *key: int | str) -> "ModelDefense[C]":
        """Return this defense for one local work on a network that has its layer; `key` names its noise."""
        raise TypeError(f"{type(self).__name__} does not define at().")

    def known(self, net: Net, said: Items, single: bool) -> "ModelDefense[C]":
        """Return this defense for the replay of a local work by an attacker who knows of it.

        said    what the upload says about the data, as far as the attacker sees it
        single  it was one step on one input
        """
        raise TypeError(f"{type(self).__name__} does not define known().")

    def objective(self, on: LossPerExample, ctx: Local) -> LossPerExample:
        """Return what a step of this local work minimises, where it would minimise `on` without the defense."""
        raise TypeError(f"{type(self).__name__} does not define objective().")


class StepDefense(Defense[C]):
    """Base of defenses inside local training that keep a privacy account.

    A client has `samples` records and takes noisy steps with a noise multiplier, each record taking part by chance with the
    sample rate; its account is the list of those steps.
    """

    seam = "step"

    @property
    def budget(self) -> float | None:
        """The epsilon that a client may spend over the whole run; None: no limit."""
        raise TypeError(f"{type(self).__name__} does not define budget.")

    def delta(self, samples: int) -> float:
        """Return the delta at which a client's epsilon is stated."""
        raise TypeError(f"{type(self).__name__} does not define delta().")

    def epsilon(self, account: Sequence[Spend], samples: int) -> float:
        """Return the epsilon that an account amounts to. Reading it changes nothing."""
        raise TypeError(f"{type(self).__name__} does not define epsilon().")

    def bound(self, account: Sequence[Spend], samples: int) -> float:
        """Return an epsilon that an account is certain not to exceed, quickly: what budgets are kept by."""
        raise TypeError(f"{type(self).__name__} does not define bound().")

    def noise_multiplier(self, samples: int, rate: float, steps: int, beside: Sequence[Spend] = ()) -> float:
        """Return the noise multiplier for so many planned steps.

        beside  what else will stand on the account
        """
        raise TypeError(f"{type(self).__name__} does not define noise_multiplier().")

    def guard(self, samples: int, batch_size: int, noise_multiplier: float, *key: int | str) -> Guard:
        """Return the guard of one local work; `key` names its noise."""
        raise TypeError(f"{type(self).__name__} does not define guard().")

    @property
    def longest(self) -> float | None:
        """Norm to which every example's gradient is clipped, for replays by an attacker who knows it; None: not at all."""
        return None

    def claim(self) -> str:
        """Return what is guaranteed, in a few words."""
        raise TypeError(f"{type(self).__name__} does not define claim().")


def of_kind(defenses: Iterable[Defense[Any]], kind: type[D]) -> D | None:
    """Return the one defense of a kind among a run's, or None."""
    return next((d for d in defenses if isinstance(d, kind)), None)
