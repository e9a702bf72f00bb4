"""What a method's local work is given: its client's data, the round's settings, and the one loop of SGD."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from pflsec.core.items import Items
from pflsec.core.network import Net

LossPerExample = Callable[[Items, Tensor, Tensor], Tensor]
"""(parameters, x [B, ...], y) -> loss of each example, [B]. The mean over the batch is taken by the loop."""

RowOf = Callable[[Tensor], Tensor]
"""x [B, ...] -> a vector of each example, [B, k], which depends on no other."""

Penalty = Callable[[Items, torch.Generator], Tensor]
"""(parameters, random stream of this step) -> 0-d. Must not look at data: defenses let it pass without noise."""

Projection = Callable[[Items], Items]
"""Parameters -> the nearest parameters that are allowed, applied after every step."""

Stop = Callable[[Sequence[float]], bool]
"""(mean data loss of every epoch so far) -> whether to stop. It looks at data: see `Algorithm.batchable`."""


class Local(Protocol):
    """The context of one client's local work in one exchange.

    The same method code runs under two interpreters: training (in place, no graph) and unrolled (every step keeps its
    graph, so that the uplink is differentiable in the data and in unknown state).
    """

    net: Net
    round: int
    client: int
    lr: float
    """Learning rate of this round."""
    epochs: int
    """Epochs of the phase that produces what is sent (in a probe: its number of steps)."""
    fixed_epochs: bool
    """Whether all of them must be made: in probes and replays, where a slow client's smaller budget has no place."""

    @property
    def num_samples(self) -> int:
        """Number of the client's training rows."""
        ...

    def fit(
        self,
        params: Mapping[str, Tensor],
        on: LossPerExample,
        *,
        penalty: Penalty | None = None,
        project: Projection | None = None,
        until: Stop | None = None,
        features_of: Mapping[str, Tensor] | None = None,
        epochs: int | None = None,
        lr: float | None = None,
        phase: str = "main",
    ) -> Items:
        """Return `params` after minibatch SGD on mean(on) + penalty.

        until        asked after every epoch; `epochs` is then the most that are made

        features_of  a body that stands still: `on` sees its features instead of the inputs; they are computed once
        epochs       default: `self.epochs`
        lr           default: `self.lr`
        phase        names the random stream of the batch order: other phases never shift the main one
        """
        ...

    def steps(self, epochs: int | None = None) -> int:
        """Return the number of SGD steps that `fit` makes in so many epochs."""
        ...

    def batches(self, epochs: int | None = None, phase: str = "main") -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (x, y) as `fit` would see them, for methods with a step rule of their own."""
        ...

    def step(
        self,
        params: Mapping[str, Tensor],
        on: LossPerExample,
        x: Tensor,
        y: Tensor,
        *,
        penalty: Penalty | None = None,
        lr: float | None = None,
        phase: str = "main",
    ) -> Items:
        """Return `params` after one SGD step on one batch, on mean(on) + penalty.

        phase        the main one's losses are reported, as those of `fit` are
        """
        ...

    def row_sets(self, count: int, epochs: int | None = None, phase: str = "main") -> Iterator[tuple[Tensor, ...]]:
        """Yield `count` disjoint minibatches at a time as row numbers, for steps that need independent gradients.

        An epoch has floor(n / (count * batch size)) of them. A client with fewer rows for even one splits all its rows
        into `count` parts; one with fewer rows than parts uses rows again.
        """
        ...

    def gradient(self, params: Mapping[str, Tensor], on: LossPerExample, rows: Tensor, *, phase: str = "main") -> Items:
        """Return the gradient of mean(on) over these rows at `params`; all else that `on` uses counts as constant."""
        ...

    def full_gradient(self, params: Mapping[str, Tensor], on: LossPerExample) -> Items:
        """Return the gradient of mean(on) over all of the client's data at `params`."""
        ...

    def features(self, body: Mapping[str, Tensor]) -> Tensor:
        """Return the body's features of all of the client's inputs, in their order, [n, feature_dim]."""
        ...

    def targets(self) -> Tensor:
        """Return all of the client's labels: int64 [n], or probabilities [n, classes] where an attacker guesses them."""
        ...

    def class_sums(self, of: RowOf) -> tuple[Tensor, Tensor]:
        """Return sums [C, k] of a vector of each of the client's rows over their classes, and counts [C].

        Whatever is said of classes goes this way and no other: here a defense can still clip each row's share, and noise
        sums and counts. Under one, a class may be missing, or be there without a row: its count tells.
        """
        ...

    def class_counts(self) -> Tensor:
        """Return the number of the client's rows of each class [C], float; like `class_sums` without a vector."""
        ...

    def one_hot(self, y: Tensor) -> Tensor:
        """Return labels as probabilities [B, classes]; probabilities pass unchanged."""
        ...

    def ce(self, params: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        """Return the cross entropy of each example, [B]; y int64 [B] or probabilities [B, classes]."""
        ...

    def head_ce(self, head: Mapping[str, Tensor], z: Tensor, y: Tensor) -> Tensor:
        """Return the cross entropy [B] of features z [B, feature_dim] under a head."""
        ...

    def subset(self, share: float, purpose: str) -> "Local":
        """Return the context of the same work on a random share of the client's rows, at least one."""
        ...

    def split(self, share: float, purpose: str) -> tuple["Local", "Local"]:
        """Return the contexts of the same work on a random share of the rows and on the rest: the same ones in every round.

        Each has at least one row; a client with one row has it in both.
        """
        ...

    def constant(self, value: Tensor) -> Tensor:
        """Return a value that depends on the parameters of a step, held constant by that step's gradient (a teacher's
        output). Unlike `detach`, it leaves the upload differentiable through it."""
        ...

    def rng(self, purpose: str) -> torch.Generator:
        """Return the stream of this round and client for an own purpose."""
        ...


def half_squared_distance(weight: float, anchor: Mapping[str, Tensor]) -> Penalty:
    """Return the penalty weight/2 * |params - anchor|^2; its gradient is weight * (params - anchor). The norm is squared."""

    def penalty(params: Items, rng: torch.Generator) -> Tensor:
        return weight / 2 * torch.stack([(p - anchor[k]).square().sum() for k, p in params.items()]).sum()

    return penalty


def linear(slope: Mapping[str, Tensor]) -> Penalty:
    """Return the penalty <slope, params>; its gradient is the slope itself, at every point."""

    def penalty(params: Items, rng: torch.Generator) -> Tensor:
        return torch.stack([(slope[k] * p).sum() for k, p in params.items()]).sum()

    return penalty


def paced(ctx: Local, value: Tensor, ratio: float) -> Tensor:
    """Return a parameter's value; a step's gradient reaches it times `ratio`, so it moves at that multiple of the step's
    learning rate. An upload is differentiable through it as ever."""
    still = ctx.constant(value)
    return still + ratio * (value - still)
