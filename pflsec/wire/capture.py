"""A capture: the frozen record of one exchange, and all that an attack is given."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pflsec.core.errors import NotApplicable
from pflsec.core.inputs import InputSpec
from pflsec.core.items import Items, cast
from pflsec.core.network import Net

MOST_STEPS = 50
"""Unrolling more local steps than this is neither checked nor attacked: memory grows with every step."""

KINDS = ("probe", "update")
"""A probe is the method's local work on a victim batch; an update the real upload of the round."""

ReplayFn = Callable[[Tensor, Tensor, Items], Items]
BeginFn = Callable[[Items], Items]
NewcomerFn = Callable[[torch.Generator], Items]
PullbackFn = Callable[[Tensor, Tensor], Items]


def capture_id(round: int, client: int, victim: int, kind: str) -> str:
    """Return the name of a capture, by which it lies in its folder."""
    return f"r{round:03d}-c{client:02d}-v{victim}-{kind}"


@dataclass(frozen=True)
class Record:
    """What was on the wire in one exchange, with the public facts. Stored; contains nothing private.

    batch      number of images behind the upload
    epochs, batch_size  local work went over the batch so often, in minibatches of this size
    down, up  the messages, exactly as received and as sent        memory  the fold of the client's earlier exchanges
    shown      what of this exchange stands in another client's next downlink; facts["shown"] says to whom, and how
    """

    id: str
    algorithm: str
    round: int
    client: int
    victim: int
    kind: str
    down: Items
    up: Items
    memory: Items
    input: InputSpec
    batch: int
    epochs: int
    batch_size: int
    lr: float
    personal_equals_public: bool
    facts: Mapping[str, Any] = field(default_factory=dict)
    shown: Items = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """Number of local steps behind the upload."""
        return max(1, self.epochs * -(-self.batch // max(1, self.batch_size)))


@dataclass(frozen=True)
class Capture:
    """A record, with what the threat model grants on top, and the client's own code to replay.

    labels, state  the truth, where granted; None otherwise. Labels are int64 [B], or probabilities [B, classes] where those
                   were trained with
    soft_labels    the adversary knows of a defense that trains on several classes an image: no rule for one class, and no
                   count of images, tells what was trained with
    counts         the true number of images of each class, int64 [classes], where granted; None otherwise
    by_chance      names of what the upload says that follow the client's own draws too, so that no replay meets them: they are
                   not in the target
    candidates     where granted, images [n, C, H, W] as the network sees them and their labels int64 [n]: those of the batch
                   and others of the same classes, in an order that says nothing; None otherwise
    known          the client's private items as far as the adversary can tell: all or some; {} if there are none, None if
                   all are hidden
    net            the architecture, as a function of its items
    kinds          kind of every item of the upload, by name (see pflsec.core.contract)
    """

    record: Record
    target: Items
    """What the upload says about the data (Algorithm.change), float64: the thing to match."""
    known: Items | None
    labels: Tensor | None
    state: Items | None
    net: Net
    kinds: Mapping[str, str]
    last_layer: str | None
    begin_fn: BeginFn
    replay_fn: ReplayFn
    newcomer_fn: NewcomerFn
    pullback_fn: PullbackFn = lambda x, u: {}
    counts: Tensor | None = None
    candidates: tuple[Tensor, Tensor] | None = None
    by_chance: tuple[str, ...] = ()
    soft_labels: bool = False

    @property
    def input(self) -> InputSpec:
        return self.record.input

    @property
    def count(self) -> int:
        """Number of images in the batch."""
        return self.record.batch

    @property
    def held_classes(self) -> Tensor | None:
        """The classes in the batch, int64 [k], where a label set is on the wire; None otherwise."""
        held = self.record.up.get("held")
        return None if held is None or held.dtype != torch.bool else held.nonzero().flatten()

    @property
    def label_counts(self) -> Tensor | None:
        """The number of images of each class in the batch, int64 [classes], where it is granted or a histogram is on the wire."""
        if self.counts is not None:
            return self.counts
        counts = self.record.up.get("label_counts")
        if counts is None or bool((counts < 0).any()) or not counts.sum() > 0:
            return None
        return (counts / counts.sum() * self.count).round().long()  # several epochs count every image several times

    def began(self, state: Items) -> Items:
        """Return all items of the network with which the local work that is sent begins, float64.

        state  the client's private items. Raises NotApplicable where that work trains no whole network.
        """
        items = self.begin_fn(cast(state, torch.float64))
        if missing := [name for name in self.net.shapes if name not in items]:
            raise NotApplicable(f"no whole network is trained in what is sent: it has no {missing[0]}")
        return {name: items[name] for name in self.net.shapes}

    def ended(self, state: Items) -> Items:
        """Return `began` as the upload says that it ended, float64: items that are not sent stay as they began."""
        items, up = self.began(state), self._sent
        for name in items:
            if name in up:
                items[name] = up[name]
            elif (delta := up.get(f"delta.{name}")) is not None:
                items[name] = items[name] + delta
        return items

    def only(self, *kinds: str) -> "Capture":
        """Return the same capture, but of what the upload says about the data only the items of these kinds."""
        return self.comparing({name for name in self.target if self.kinds.get(name) in kinds})

    def comparing(self, names: Collection[str]) -> "Capture":
        """Return the same capture, but of what the upload says about the data only these items."""

        def among(items: Items) -> Items:
            return {name: value for name, value in items.items() if name in names}

        return replace(
            self,
            target=among(self.target),
            replay_fn=lambda x, y, state: among(self.replay_fn(x, y, state)),
            pullback_fn=lambda x, u: among(self.pullback_fn(x, u)),
        )

    @cached_property
    def _sent(self) -> Items:
        return cast(self.record.up, torch.float64)

    def replay(self, x: Tensor, y: Tensor, state: Items) -> Items:
        """Return what the client would have sent for this batch, as `target` shows it; differentiable in all arguments.

        x [B, C, H, W] as the network sees it, any float dtype; of texts tokens [B, T], or soft ones [B, T, vocabulary];
        y int64 [B] or probabilities [B, classes]; state: the client's private items.
        """
        return self.replay_fn(x, y, state)

    def pullback(self, x: Tensor, u: Tensor) -> Items:
        """Return the gradient of sum_i <u_i, body(x_i)> in the body with which local work begins, differentiable in both.

        Whatever the head and the loss are, one step's gradient of the body is this for some u [B, feature_dim]. Empty where
        local work begins with no body that the adversary has. Raises NotApplicable where the body is moved by more than its
        features.
        """
        return self.pullback_fn(x, u)

    def newcomer(self, rng: torch.Generator) -> Items:
        """Return private items as a client that has just joined would draw them."""
        return self.newcomer_fn(rng)
