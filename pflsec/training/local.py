"""Local training. The same loop runs under two interpreters, which differ in how a step is taken and nothing else.

Training moves a copy of the parameters in place and keeps no graph. Unrolled makes new parameters at every step and keeps
the graph, so that what a client would send is a differentiable function of its data and of unknown state.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pflsec.core.items import Items
from pflsec.core.local import LossPerExample, Penalty
from pflsec.core.network import Net
from pflsec.core.streams import stream

FEATURE_BATCH = 100  # activations of about this many samples stay in a CPU's cache


class Driver(Protocol):
    """How parameters are held and moved."""

    keeps_graph: bool

    def begin(self, params: Mapping[str, Tensor]) -> Items:
        """Return parameters to differentiate in; the given ones are left alone."""
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

    def begin(self, params: Mapping[str, Tensor]) -> Items:
        return {k: v.detach().clone().requires_grad_() for k, v in params.items()}

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

    def begin(self, params: Mapping[str, Tensor]) -> Items:
        return {k: v if v.requires_grad else v.detach().requires_grad_() for k, v in params.items()}

    def move(self, params: Items, gradients: Sequence[Tensor], lr: float) -> Items:
        return {k: torch.sub(p, g, alpha=lr) for (k, p), g in zip(params.items(), gradients, strict=True)}

    def end(self, params: Items) -> Items:
        return params


@dataclass
class LocalWork:
    """The context of one client's local work (see pflsec.core.local.Local for what a method may rely on).

    x  [n, C, H, W] as the network sees it      y  int64 [n], or probabilities [n, classes]
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
    losses: list[Tensor] = field(default_factory=list)
    """Mean data loss of every step of the main phase."""
    _used: dict[str, int] = field(default_factory=dict)

    @property
    def num_samples(self) -> int:
        return len(self.y)

    def fit(
        self,
        params: Mapping[str, Tensor],
        on: LossPerExample,
        *,
        penalty: Penalty | None = None,
        inputs: Tensor | None = None,
        epochs: int | None = None,
        lr: float | None = None,
        phase: str = "main",
    ) -> Items:
        held = self.driver.begin(params)
        rate = self.lr if lr is None else lr
        draws = self.rng(f"penalty.{phase}")
        for x, y in self._batches(self.x if inputs is None else inputs, epochs, phase):
            loss = on(held, x, y).mean()
            if phase == "main":
                self.losses.append(loss.detach())
            total = loss if penalty is None else loss + penalty(held, draws)
            held = self.driver.move(held, self._gradient(total, held), rate)
        return self.driver.end(held)

    def steps(self, epochs: int | None = None) -> int:
        return (self.epochs if epochs is None else epochs) * -(-self.num_samples // self.batch_size)

    def batches(self, epochs: int | None = None, phase: str = "main") -> Iterator[tuple[Tensor, Tensor]]:
        return self._batches(self.x, epochs, phase)

    def step(
        self, params: Mapping[str, Tensor], on: LossPerExample, x: Tensor, y: Tensor, *, lr: float | None = None
    ) -> Items:
        held = self.driver.begin(params)
        gradients = self._gradient(on(held, x, y).mean(), held)
        return self.driver.end(self.driver.move(held, gradients, self.lr if lr is None else lr))

    def full_gradient(self, params: Mapping[str, Tensor], on: LossPerExample) -> Items:
        held = self.driver.begin(params)
        total = [torch.zeros_like(p) for p in held.values()]
        for x, y in zip(self.x.split(FEATURE_BATCH), self.y.split(FEATURE_BATCH), strict=True):
            part = self._gradient(on(held, x, y).sum(), held)
            total = [t + g for t, g in zip(total, part, strict=True)]
        return {k: t / self.num_samples for k, t in zip(held, total, strict=True)}

    def features(self, body: Mapping[str, Tensor]) -> Tensor:
        if self.driver.keeps_graph:
            return self.net.features(body, self.x)
        with torch.no_grad():
            return torch.cat([self.net.features(body, x) for x in self.x.split(FEATURE_BATCH)])

    def targets(self) -> Tensor:
        return self.y

    def one_hot(self, y: Tensor) -> Tensor:
        return y if y.is_floating_point() else F.one_hot(y, self.net.classes).to(self.x.dtype)

    def ce(self, params: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.net.logits(params, x), y)

    def head_ce(self, head: Mapping[str, Tensor], z: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.net.head(head, z), y)

    def rng(self, purpose: str) -> torch.Generator:
        return stream(self.seed, "local", self.round, self.client, purpose)

    def _gradient(self, loss: Tensor, params: Items) -> list[Tensor]:
        """Return d loss / d params; parameters that the loss does not reach get zeros."""
        if not params:  # a network that is cut at its first layer has an empty body
            return []
        found = torch.autograd.grad(
            loss, list(params.values()), create_graph=self.driver.keeps_graph, allow_unused=True
        )
        return [torch.zeros_like(p) if g is None else g for g, p in zip(found, params.values(), strict=True)]

    def _batches(self, x: Tensor, epochs: int | None, phase: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield minibatches: a fresh order every epoch, the last short batch kept."""
        again = self._used.get(phase, 0)
        self._used[phase] = again + 1
        order = self.rng(f"batches.{phase}.{again}")
        for _ in range(self.epochs if epochs is None else epochs):
            if self.num_samples <= self.batch_size:  # one batch: its order says nothing, and an attacker need not guess it
                yield x, self.y
                continue
            rows = torch.randperm(self.num_samples, generator=order)
            yield from zip(x[rows].split(self.batch_size), self.y[rows].split(self.batch_size), strict=True)


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Return the cross entropy of each example, [B]; y int64 [B] or probabilities [B, classes]."""
    if y.is_floating_point():
        return -(y * F.log_softmax(logits, 1)).sum(1)
    return F.cross_entropy(logits, y, reduction="none")
