"""Local training. The same loop runs under two interpreters, which differ in how a step is taken and nothing else.

Training moves a copy of the parameters in place and keeps no graph. Unrolled makes new parameters at every step and keeps
the graph, so that what a client would send is a differentiable function of its data and of unknown state.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from pflsec.core.defense import Guard, ModelDefense, ShapingDefense
from pflsec.core.errors import PrivacyError
from pflsec.core.items import Items, arithmetic
from pflsec.core.local import Local, LossPerExample, Penalty, Projection, RowOf, Stop
from pflsec.core.network import Net, buffer_in
from pflsec.core.prototypes import clipped
from pflsec.core.streams import stream
from pflsec.training.feed import Feed

TINY = 1e-30
FEATURE_BATCH = 100  # activations of about this many samples stay in a CPU's cache


class Driver(Protocol):
    """How parameters are held and moved."""

    keeps_graph: bool

    def begin(self, params: Mapping[str, Tensor], fixed: Collection[str] = ()) -> Items:
        """Return parameters to differentiate in; the given ones are left alone.

        fixed  items that no gradient is taken in, as new tensors like the others
        """
        ...

    def move(self, params: Items, gradients: Sequence[Tensor], lr: float) -> Items:
        """Return params - lr * gradients."""
        ...

    def end(self, params: Items) -> Items:
        """Return the result of a fit."""
        ...


class Training:
    """Fast: one copy, moved in place, no graph kept."""

    keeps_graph = False

    def begin(self, params: Mapping[str, Tensor], fixed: Collection[str] = ()) -> Items:
        return {k: v.detach().clone().requires_grad_(k not in fixed) for k, v in params.items()}

    @torch.no_grad()
    def move(self, params: Items, gradients: Sequence[Tensor], lr: float) -> Items:
        for p, g in zip(params.values(), gradients, strict=True):
            p.sub_(g, alpha=lr)
        return params

    def end(self, params: Items) -> Items:
        return {k: v.detach() for k, v in params.items()}


class Unrolled:
    """Differentiable: every step makes new parameters and keeps its graph."""

    keeps_graph = True

    def begin(self, params: Mapping[str, Tensor], fixed: Collection[str] = ()) -> Items:
        # New nodes of the graph, not the given ones: what else was computed from those is constant in a gradient.
        return {
            k: v.view_as(v) if v.requires_grad else v.detach().requires_grad_(k not in fixed) for k, v in params.items()
        }

    def move(self, params: Items, gradients: Sequence[Tensor], lr: float) -> Items:
        return {k: torch.add(p, g, alpha=-lr) for (k, p), g in zip(params.items(), gradients, strict=True)}

    def end(self, params: Items) -> Items:
        return params


@dataclass
class LocalWork:
    """The context of one client's local work (see pflsec.core.local.Local for what a method may rely on).

    x  [n, C, H, W] as the network sees it, or tokens int64 [n, T]      y  int64 [n], or probabilities [n, classes]
    """

    net: Net
    x: Tensor
    y: Tensor
    lr: float
    epochs: int
    batch_size: int
    seed: int
    round: int
    client: int
    driver: Driver = field(default_factory=Training)
    guard: Guard | None = None
    shaping: ShapingDefense[Any] | None = None
    """What changes the gradient of every step, without an account."""
    feed: Feed | None = None
    """What gives each step other inputs than the rows of its batch, without an account."""
    model_defense: ModelDefense[Any] | None = None
    """What changes the loss of every step, on a network with a layer of its own."""
    longest: float | None = None
    """Norm to which each example's gradient is clipped, in the replay of work that a guard did so; None: not at all."""
    row_bound: float | None = None
    """Norm to which each example's share of a class sum is clipped, likewise."""
    fixed_epochs: bool = False
    losses: list[Tensor] = field(default_factory=list)
    """Mean data loss of every step of the main phase."""
    _used: dict[str, int] = field(default_factory=dict)
    _stepping: bool = False
    _statistics: Items = field(default_factory=dict)
    """New running statistics from the last step, by the item that they follow."""

    @property
    def num_samples(self) -> int:
        return len(self.y)

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
        if until is not None:
            self._refuse_raw("a loop that stops on the loss")
        held = self._begin(params)
        rate = self.lr if lr is None else lr
        draws = self.rng(f"penalty.{phase}")
        if features_of is not None and (self.shaping is not None or self.feed is not None):
            on, features_of = self._after(features_of, on), None
        inputs = self.x if features_of is None else self._features(features_of)
        log: list[Tensor] | None = self.losses if phase == "main" else [] if until else None
        seen: list[float] = []
        for step, (x, y) in enumerate(self._batches(inputs, epochs, phase), 1):
            gradients = self._step_gradient(held, on, x, y, penalty, draws, log)
            held = self.driver.move(held, gradients, rate) | self._statistics
            if project is not None:
                held = self._begin(project(held) | {k: held[k] for k in self._buffers(held)})
            if until is not None and log is not None and step % self.steps(1) == 0:
                seen.append(float(torch.stack(log[-self.steps(1) :]).mean()))
                if until(seen):
                    break
        return self.driver.end(held)

    def steps(self, epochs: int | None = None) -> int:
        return (self.epochs if epochs is None else epochs) * -(-self.num_samples // self.batch_size)

    def batches(self, epochs: int | None = None, phase: str = "main") -> Iterator[tuple[Tensor, Tensor]]:
        self._refuse_raw("ctx.batches")
        return self._batches(self.x, epochs, phase)

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
        held, log = self._begin(params), self.losses if phase == "main" else None
        gradients = self._step_gradient(held, on, x, y, penalty, self.rng("step"), log)
        return self.driver.end(self.driver.move(held, gradients, self.lr if lr is None else lr) | self._statistics)

    def row_sets(self, count: int, epochs: int | None = None, phase: str = "main") -> Iterator[tuple[Tensor, ...]]:
        epochs = self.epochs if epochs is None else epochs
        whole = self.num_samples // (count * self.batch_size)
        if self.guard is not None:
            drawn = self.guard.rows(count * epochs)
            yield from islice(zip(*[drawn] * count, strict=False), epochs * max(1, whole))
            return
        order = self._order(phase)
        for _ in range(epochs):
            rows = torch.randperm(self.num_samples, generator=order)
            if whole:
                sets = rows[: whole * count * self.batch_size].split(self.batch_size)
            else:
                again = -(-count // self.num_samples)
                sets = rows.repeat(again)[: max(count, self.num_samples)].tensor_split(count)
            yield from zip(*[iter(sets)] * count, strict=True)

    def gradient(self, params: Mapping[str, Tensor], on: LossPerExample, rows: Tensor, *, phase: str = "main") -> Items:
        held, log = self._begin(params), self.losses if phase == "main" else None
        x, y = (self.x[rows], self.y[rows]) if self.feed is None else self.feed.batch(rows, phase)
        found = self._step_gradient(held, on, x, y, None, self.rng("gradient"), log)
        return dict(zip(held, found, strict=True))

    def full_gradient(self, params: Mapping[str, Tensor], on: LossPerExample) -> Items:
        self._refuse_raw("ctx.full_gradient")
        held, on, whole = self._begin(params), self._objective(on), (self.x, self.y)
        if self.feed is not None:
            whole = self.feed.batch(torch.arange(self.num_samples), "full gradient")
        if self.shaping is not None:
            return dict(zip(held, self.shaping.gradient(on, held, *whole)[1], strict=True))
        total = [torch.zeros_like(p) for p in held.values()]
        for x, y in zip(*(values.split(FEATURE_BATCH) for values in whole), strict=True):
            part = self._gradient(on(held, x, y).sum(), held)
            total = [t + g for t, g in zip(total, part, strict=True)]
        return {k: t / self.num_samples for k, t in zip(held, total, strict=True)}

    def features(self, body: Mapping[str, Tensor]) -> Tensor:
        self._refuse_raw("ctx.features")
        return self._features(body)

    def _features(self, body: Mapping[str, Tensor]) -> Tensor:
        return self._rows_of(lambda x: self.net.features(body, x))

    def _after(self, body: Mapping[str, Tensor], on: LossPerExample) -> LossPerExample:
        """Return a loss of features as one of inputs, for those who look at how the features follow from them."""
        return lambda params, x, y: on(params, self.net.features(body, x), y)

    def _rows_of(self, of: RowOf) -> Tensor:
        if self.driver.keeps_graph:
            return of(self.x)
        with torch.no_grad():
            return torch.cat([of(x) for x in self.x.split(FEATURE_BATCH)])

    def class_sums(self, of: RowOf) -> tuple[Tensor, Tensor]:
        rows, target = self._rows_of(of), self.one_hot(self.y)
        if self.guard is not None:
            return self.guard.class_sums(rows, target)
        if self.row_bound is not None:
            rows = clipped(rows, self.row_bound)
        return target.T @ rows, target.sum(0)

    def class_counts(self) -> Tensor:
        target = self.one_hot(self.y)
        return target.sum(0) if self.guard is None else self.guard.class_sums(target[:, :0], target)[1]

    def targets(self) -> Tensor:
        self._refuse_raw("ctx.targets")
        return self.y

    def one_hot(self, y: Tensor) -> Tensor:
        # By comparison: F.one_hot looks at the values, which is refused where a guard maps over the examples.
        return y if y.is_floating_point() else (y[..., None] == torch.arange(self.net.classes)).to(arithmetic(self.x))

    def ce(self, params: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.net.logits(params, x), y)

    def head_ce(self, head: Mapping[str, Tensor], z: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.net.head(head, z), y)

    def subset(self, share: float, purpose: str) -> "LocalWork":
        self._refuse_raw("ctx.subset")
        size = max(1, round(share * self.num_samples))
        rows = torch.randperm(self.num_samples, generator=self.rng(f"subset.{purpose}"))[:size].sort().values
        return replace(self._on(rows), losses=[])

    def split(self, share: float, purpose: str) -> tuple["LocalWork", "LocalWork"]:
        self._refuse_raw("ctx.split")
        order = torch.randperm(self.num_samples, generator=stream(self.seed, "split", self.client, purpose))
        size = min(max(1, round(share * self.num_samples)), max(1, self.num_samples - 1))
        parts = order[:size].sort().values, order[size:].sort().values if size < self.num_samples else order
        # What is trained on a part is the client's training: it goes into the one record of losses.
        first, rest = map(self._on, parts)
        return first, rest

    def _on(self, rows: Tensor) -> "LocalWork":
        """Return the same work on some of its rows."""
        feed = self.feed and self.feed.part(rows)
        return replace(self, x=self.x[rows], y=self.y[rows], feed=feed, _used={})

    def constant(self, value: Tensor) -> Tensor:
        return Constant.apply(value, self) if self.driver.keeps_graph else value.detach()

    def rng(self, purpose: str) -> torch.Generator:
        return stream(self.seed, "local", self.round, self.client, purpose)

    def _step_gradient(
        self,
        held: Items,
        on: LossPerExample,
        x: Tensor,
        y: Tensor,
        penalty: Penalty | None,
        draws: torch.Generator,
        log: list[Tensor] | None,
    ) -> list[Tensor]:
        """Return the gradient of one step. A penalty sees no data: where a defense stands, it passes beside it."""
        self._statistics, on = {}, self._objective(on)
        if self.guard is None and self.longest is None and self.shaping is None:
            with self.net.training() as seen:
                loss = on(held, x, y).mean()
            # By identity: a teacher that is asked inside the loss reads other tensors, and is left alone.
            found = {k: seen[id(v)][1] for k, v in held.items() if id(v) in seen}
            self._statistics = found if self.driver.keeps_graph else {k: v.detach() for k, v in found.items()}
            if log is not None:
                log.append(loss.detach())
            return self._gradient(loss if penalty is None else loss + penalty(held, draws), held)
        if self.shaping is not None:
            loss, gradients = self.shaping.gradient(on, held, x, y)
            if log is not None:
                log.append(loss)
        else:
            gradients = self.guard.gradient(on, held, x, y) if self.guard else self._clipped(on, held, x, y)
            if log is not None and len(x):
                with torch.no_grad():
                    log.append(on(held, x, y).mean())
        if penalty is not None:
            pull = self._gradient(penalty(held, draws), held)
            gradients = [g + p for g, p in zip(gradients, pull, strict=True)]
        return gradients

    def _objective(self, on: LossPerExample) -> LossPerExample:
        return on if self.model_defense is None else self.model_defense.objective(on, self)

    def _clipped(self, on: LossPerExample, held: Items, x: Tensor, y: Tensor) -> list[Tensor]:
        """Return the mean over the examples of their gradients, each shortened to `longest`; differentiable."""
        assert self.longest is not None
        total = [torch.zeros_like(p) for p in held.values()]
        for a, b in zip(x.split(1), y.split(1), strict=True):
            own = self._gradient(on(held, a, b).sum(), held)
            size = torch.stack([g.square().sum() for g in own]).sum().clamp(min=TINY).sqrt()
            total = [t + g * (self.longest / size).clamp(max=1) / len(y) for t, g in zip(total, own, strict=True)]
        return total

    def _refuse_raw(self, what: str) -> None:
        if self.guard is not None:
            raise PrivacyError(
                f"{what} hands out raw data, which a defense inside training cannot protect. Use ctx.fit or ctx.step, or "
                "train this method without it."
            )

    def _begin(self, params: Mapping[str, Tensor]) -> Items:
        return self.driver.begin(params, self._buffers(params))

    def _buffers(self, params: Mapping[str, Tensor]) -> list[str]:
        """Return which of the items hold running statistics: these follow the batches, and no gradient moves them."""
        return [k for k in params if buffer_in(self.net, k)] if self.net.buffers else []

    def _gradient(self, loss: Tensor, params: Items) -> list[Tensor]:
        """Return d loss / d params; parameters that the loss does not reach get zeros, and so do buffers."""
        buffers = self._buffers(params)
        leaves = {k: p for k, p in params.items() if k not in buffers}
        if not leaves:  # a network that is cut at its first layer has an empty body
            return [torch.zeros_like(p) for p in params.values()]
        self._stepping = True
        try:
            found = torch.autograd.grad(
                loss, list(leaves.values()), create_graph=self.driver.keeps_graph, allow_unused=True
            )
        finally:
            self._stepping = False
        slopes = dict(zip(leaves, found, strict=True))
        return [torch.zeros_like(p) if (g := slopes.get(k)) is None else g for k, p in params.items()]

    def _batches(self, x: Tensor, epochs: int | None, phase: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield minibatches: a fresh order every epoch, the last short batch kept."""
        if self.guard is not None:
            for rows in self.guard.rows(self.epochs if epochs is None else epochs):
                yield x[rows], self.y[rows]
            return
        order = self._order(phase)
        for _ in range(self.epochs if epochs is None else epochs):
            if self.num_samples <= self.batch_size:
                # One batch: its order says nothing, and an attacker need not guess it.
                yield (x, self.y) if self.feed is None else self.feed.batch(torch.arange(self.num_samples), phase)
                continue
            rows = torch.randperm(self.num_samples, generator=order)
            if self.feed is not None:
                yield from (self.feed.batch(some, phase) for some in rows.split(self.batch_size))
                continue
            yield from zip(x[rows].split(self.batch_size), self.y[rows].split(self.batch_size), strict=True)

    def _order(self, phase: str) -> torch.Generator:
        """Return the stream of the batch order; a phase that is played again gets another one."""
        again = self._used.get(phase, 0)
        self._used[phase] = again + 1
        return self.rng(f"batches.{phase}.{again}")


NAMES = frozenset(name for name in {*dir(Local), *Local.__annotations__} if not name.startswith("_"))
"""What a method may use of its context."""


class Sealed:
    """A context whose data are guarded, as a method sees it: the documented names and nothing else, so no raw rows."""

    def __init__(self, work: LocalWork):
        self.__work = work

    def __getattr__(self, name: str) -> Any:
        if name in NAMES:
            return getattr(self.__work, name)
        if name in LocalWork.__dataclass_fields__:
            raise PrivacyError(
                f"ctx.{name} is no part of what a method may use, and goes round the defense inside training. Use ctx.fit or "
                "ctx.step, or train this method without it."
            )
        raise AttributeError(f"a context has no '{name}'; see pflsec.core.local.Local")


def for_method(work: LocalWork) -> Local:
    """Return the context as it is handed to a method: sealed where a guard stands before the data."""
    return work if work.guard is None else cast(Local, Sealed(work))


class Constant(torch.autograd.Function):
    """The identity. It passes no slope on while local work takes the gradient of a step, and does otherwise."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, work: LocalWork) -> Tensor:  # type: ignore[override]
        ctx.work = work
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, None]:  # type: ignore[override]
        return (None if ctx.work._stepping else slope), None


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Return the cross entropy of each example, [B]; y int64 [B] or probabilities [B, classes]."""
    if y.is_floating_point():
        return -(y * F.log_softmax(logits, 1)).sum(1)
    return F.cross_entropy(logits, y, reduction="none")
