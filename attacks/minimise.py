"""Minimisers for attacks: they keep the best iterate, notice divergence, and choose among restarts by objective alone."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from pflsec.core.attack import Status

Free = dict[str, Tensor]
"""The unknowns of an attack by name: x, labels, state.<item>, cotangent."""

Loss = Callable[[Free], tuple[Tensor, Tensor]]
"""(unknowns) -> (what is minimised, the matching part alone), both 0-d."""

BLOW_UP = 10.0  # times the first objective
FAR = 50.0  # no normalised pixel is so large
DECAY = (3 / 8, 5 / 8, 7 / 8)
"""Shares of the iterations at which Inverting Gradients cuts Adam's step by ten (Geiping et al. 2020)."""
STUCK = 3  # LBFGS rounds in a row without any progress
TRACE = 50
EARLY = TRACE // 4  # points of a trace after which an attempt may be given up
HOPELESS = 3.0  # times the objective of the best attempt at the same point


@dataclass(frozen=True)
class Plan:
    """How to descend.

    iterations  outer iterations; one of LBFGS takes up to `inner` inner ones
    tolerance   stop when the matching part is below
    signed      the pixel gradient g counts by its sign alone; soft_sign: by tanh(s g) / s, s falling from 1 to 0
    decay_at    shares of the iterations after which Adam's step is cut by ten; cosine: it falls to 0 along half a cosine
    warm_up     iterations in which Adam's step grows to its full size
    langevin    noise added to the pixel gradient, per unit of step size
    scale       LBFGS descends so many times the loss: torch's leaves out curvature pairs with a product below 1e-10, an
                absolute number, and so forgets all curvature near a solution of a loss of order 1
    """

    optimiser: Literal["lbfgs", "adam"]
    iterations: int
    lr: float
    tolerance: float
    line_search: bool = True
    inner: int = 20
    signed: bool = False
    decay_at: tuple[float, ...] = ()
    state_lr: float = 0.02
    soft_sign: bool = False
    cosine: bool = False
    warm_up: int = 0
    langevin: float = 0.0
    scale: float = 1e6

    def rate(self, step: int) -> float:
        """Return Adam's step size after so many steps, relative to `lr`."""
        ready = min(1.0, (step + 1) / (self.warm_up + 1))
        if self.cosine:
            return ready * (1 + math.cos(math.pi * step / self.iterations)) / 2
        return ready * 0.1 ** sum(step >= round(share * self.iterations) for share in self.decay_at)


@dataclass
class Best:
    """The best iterate so far, paired with the objective that was evaluated at it."""

    objective: float = math.inf
    free: Free = field(default_factory=dict)
    first: float | None = None
    calls: int = 0
    trace: list[float] = field(default_factory=list)
    status: Status = "budget"
    given_up: bool = False

    def see(self, value: float, free: Mapping[str, Tensor]) -> None:
        """Take note of one evaluation."""
        self.calls += 1
        if self.first is None:
            self.first = value
        if value < self.objective:
            self.objective = value
            self.free = {k: v.detach().clone() for k, v in free.items()}


def descend(
    loss: Loss,
    start: Free,
    plans: Sequence[Plan],
    box: tuple[Tensor, Tensor],
    rng: torch.Generator | None = None,
    rival: Sequence[float] = (),
) -> Best:
    """Return the best iterate found from `start` by following the plans in turn, until one converges.

    box    lowest and highest values of x, between which Adam keeps it
    rng    for plans with noise
    rival  trace of a better attempt: Adam gives up once it lies far behind it
    """
    best = Best()
    for plan in plans:
        free = {k: v.detach().clone().requires_grad_() for k, v in (best.free or start).items()}
        if plan.optimiser == "lbfgs":
            best.status = _lbfgs(loss, free, plan, best)
        else:
            best.status = _adam(loss, free, plan, best, box, rng, rival)
        if best.status == "converged":
            break
    if not best.free:
        best.free = {k: v.detach() for k, v in start.items()}
    return best


def with_rescue(plan: Plan, steps: int) -> list[Plan]:
    """Return the plan, then signed Adam for so many steps, then the plan again: LBFGS stalls on kinks, Adam crosses them."""
    adam = Plan("adam", steps, 0.1, plan.tolerance, signed=True, decay_at=DECAY)
    return [plan, adam, plan] if steps else [plan]


def _evaluate(loss: Loss, free: Free, best: Best, scale: float = 1.0) -> Tensor:
    """Evaluate, differentiate so many times the total into .grad, and remember; that is returned."""
    total, match = loss(free)
    if scale != 1:
        total = scale * total
    gradients = torch.autograd.grad(total, list(free.values()), allow_unused=True)
    for value, gradient in zip(free.values(), gradients, strict=True):
        value.grad = torch.zeros_like(value) if gradient is None else gradient
    best.see(float(match), free)
    return total.detach()


def _lbfgs(loss: Loss, free: Free, plan: Plan, best: Best) -> Status:
    optimiser = torch.optim.LBFGS(
        list(free.values()),
        lr=plan.lr,
        max_iter=plan.inner,
        history_size=100,
        tolerance_grad=0,
        tolerance_change=0,
        line_search_fn="strong_wolfe" if plan.line_search else None,
    )
    same = 0
    for _ in range(plan.iterations):
        before = best.calls
        now = float(optimiser.step(lambda: _evaluate(loss, free, best, plan.scale))) / plan.scale
        best.trace.append(best.objective)
        if status := _verdict(now, free, best, plan):
            return status
        same = same + 1 if len(best.trace) > 1 and best.trace[-2] == best.objective else 0
        if same >= STUCK or best.calls == before:
            break
    return "budget"


def _adam(
    loss: Loss,
    free: Free,
    plan: Plan,
    best: Best,
    box: tuple[Tensor, Tensor],
    rng: torch.Generator | None,
    rival: Sequence[float],
) -> Status:
    groups = [{"params": [v], "lr": plan.lr if k in ("x", "labels") else plan.state_lr} for k, v in free.items()]
    optimiser = torch.optim.Adam(groups)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimiser, plan.rate)
    with torch.no_grad():
        free["x"].clamp_(*box)
    for step in range(plan.iterations):
        now = float(_evaluate(loss, free, best))
        if step % max(1, plan.iterations // TRACE) == 0:
            best.trace.append(best.objective)
            point = len(best.trace) - 1
            if EARLY <= point < len(rival) and best.objective > HOPELESS * rival[point]:
                best.given_up = True
                return "budget"
        if status := _verdict(now, free, best, plan):
            return status
        _bend(free["x"], plan, step, rng)
        optimiser.step()
        with torch.no_grad():
            free["x"].clamp_(*box)
        scheduler.step()
    return "budget"


def _bend(x: Tensor, plan: Plan, step: int, rng: torch.Generator | None) -> None:
    """Make of the pixel gradient what the plan wants of it."""
    assert x.grad is not None
    if plan.langevin:
        noise = torch.randn(x.shape, generator=rng, dtype=x.dtype)
        x.grad.add_(noise, alpha=plan.langevin * plan.lr * plan.rate(step))
    if plan.signed:
        x.grad.sign_()
    if plan.soft_sign:
        sharp = 1 - step / plan.iterations
        x.grad.mul_(sharp).tanh_().div_(sharp)


def _verdict(now: float, free: Free, best: Best, plan: Plan) -> Status | None:
    """Return how the descent ended, or None to go on."""
    if best.objective < plan.tolerance:
        return "converged"
    furthest = float(free["x"].detach().abs().max())
    if not math.isfinite(now + furthest):
        return "nonfinite"
    started = best.first if best.first is not None else now
    if plan.optimiser == "lbfgs" and (now > BLOW_UP * max(started, 1e-12) or furthest > FAR):
        return "diverged"
    return None
