"""The generic attack: replay the client's own code on a guess, compare with what was sent, descend, restart."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from pflsec.attacks.minimise import Best, Free, Loss, Plan, descend
from pflsec.attacks.objectives import Objective
from pflsec.attacks.problem import Draw, Hidden, Labels, Problem
from pflsec.core.attack import Reconstruction
from pflsec.core.config import Config, at_least, option
from pflsec.core.items import Items
from pflsec.wire.capture import Capture

Prior = Callable[[Tensor], Tensor]
"""(images [B, C, H, W]) -> how unlikely they are before any message is seen, 0-d."""
ONE, SEVERAL = 1, 4  # attempts at one image and at a batch


class MatchingConfig(Config):
    """Settings that every matching attack has."""

    restarts: int | None = at_least(
        1, default=None, about="attempts from new starts; the best objective wins; none: 1 for one image, 4 for a batch"
    )
    labels: Labels = option(default="restore", about="restore: by rule where possible; optimise: soft labels; known")
    hidden: Hidden = option(
        default="auto",
        about="the client's private items: log where the wire reveals them, else joint (optimised with the data); guess: drawn "
        "as a newcomer would; cotangent: the unknown gradient at the features in place of a hidden head; oracle: given",
    )
    precision: Literal["float32", "float64"] = option(default="float64", about="arithmetic of the replay")


def given_and_freed(problem: Problem) -> Sequence[Problem]:
    """Return the problem, and where private items are granted also the one in which they are freed from there: given alone
    they are no upper bound, since a search with more freedom may get further."""
    return [problem, problem.joint_from_here()] if problem.hidden == "oracle" else [problem]


def match(
    cap: Capture,
    cfg: MatchingConfig,
    rng: torch.Generator,
    *,
    distance: Callable[[Items], Objective],
    draw: Draw,
    plans: Sequence[Plan],
    prior: Prior | None = None,
    group: int = 1,
    pull: float = 0.0,
    note: str = "",
    unknowns: Items | None = None,
    poses: Callable[[Problem], Sequence[Problem]] = given_and_freed,
    settle: Callable[[Tensor], Tensor] | None = None,
) -> Reconstruction:
    """Return the best of several descents, chosen by the objective alone. Stops early once one has converged.

    distance  from what was seen to the objective, such as `objectives.cosine`
    plans     tried in turn, each from the best point of those before, until one converges
    group     so many descents run as one, each pulled to their mean image by `pull` times the squared distance from it
    unknowns  the attack's own, with where they start: the replay finds them among the private items
    poses     from a restart's problem to those that are searched; may refuse it
    settle    from the x [group, B, ...] where a descent ended to one that inputs can have: attempts are then judged by that
    """
    search = _Search(distance, draw, plans, prior, group, pull, unknowns or {}, settle)
    dtype = getattr(torch, cfg.precision)
    tried: list[_Attempt] = []
    for _ in range(cfg.restarts or (ONE if cap.count == 1 else SEVERAL)):
        for problem in poses(Problem(cap, cfg.labels, cfg.hidden, rng, dtype)):
            rival = _leader(tried).found.trace if tried and len(plans) == 1 else ()
            tried.append(_Attempt(problem, search.descend(problem, rng, rival)))
        if _leader(tried).found.status == "converged":
            break
    return _reconstruction(tried, distance, note)


@dataclass(frozen=True)
class _Attempt:
    """A problem, and what a descent has found of it."""

    problem: Problem
    found: Best


def _leader(tried: Sequence[_Attempt]) -> _Attempt:
    """Return the attempt with the lowest objective, the first of equals."""
    return min(tried, key=lambda attempt: attempt.found.objective)


@dataclass(frozen=True)
class _Search:
    """How one attempt is made: the arguments of `match` that say so."""

    distance: Callable[[Items], Objective]
    draw: Draw
    plans: Sequence[Plan]
    prior: Prior | None
    group: int
    pull: float
    unknowns: Items
    settle: Callable[[Tensor], Tensor] | None

    def descend(self, problem: Problem, rng: torch.Generator, rival: Sequence[float]) -> Best:
        """Return the best point of a descent from a new start. rival  trace of the best attempt so far"""
        cap, dtype = problem.cap, problem.dtype
        loss = _loss(problem, self.distance(problem.target), self.prior, self.pull)
        start = problem.start(self.draw) | {f"state.{k}": v.to(dtype) for k, v in self.unknowns.items()}
        start["x"] = torch.stack([start["x"], *(self.draw(cap, rng, dtype) for _ in range(self.group - 1))])
        box = cap.input.box(torch.zeros((), dtype=dtype))
        found = descend(loss, start, self.plans, box, rng, rival)
        return found if self.settle is None else _settled(found, loss, self.settle, self.plans[-1].tolerance)


def _reconstruction(tried: Sequence[_Attempt], distance: Callable[[Items], Objective], note: str) -> Reconstruction:
    """Return what the best attempt found, and how the others ended."""
    problem, found = _leader(tried).problem, _leader(tried).found
    endings = Counter(attempt.found.status for attempt in tried)
    given_up = sum(attempt.found.given_up for attempt in tried)
    given = f"{given_up} of {len(tried)} attempts were given up early" if given_up else ""
    return Reconstruction(
        x=_member(problem, distance(problem.target), found.free),
        y=problem.found_labels(found.free),
        objective=found.objective,
        status=found.status,
        iterations=found.calls,
        restarts=len(tried),
        labels=problem.labels,
        hidden=problem.hidden,
        note="; ".join(filter(None, (note, given))),
        trace=found.trace,
        failures={k: n for k, n in endings.items() if k in ("diverged", "nonfinite")},
    )


def _loss(problem: Problem, objective: Objective, prior: Prior | None, pull: float) -> Loss:
    def loss(free: Free) -> tuple[Tensor, Tensor]:
        """x is [group, B, C, H, W]; the matching part is that of the member that matches best."""
        members = free["x"].unbind()
        distances = torch.stack([objective(problem.replay({**free, "x": x})) for x in members])
        total = distances.sum()
        if prior is not None:
            total = total + torch.stack([prior(x) for x in members]).sum()
        if pull and len(members) > 1:
            total = total + pull * (free["x"] - free["x"].mean(0)).square().sum()
        return total, distances.detach().min()

    return loss


def _settled(found: Best, loss: Loss, settle: Callable[[Tensor], Tensor], tolerance: float) -> Best:
    """Return what a descent has found with its x settled, and the objective there."""
    free = found.free | {"x": settle(found.free["x"])}
    objective = float(loss(free)[1])
    reached = "converged" if objective < tolerance else "budget" if found.status == "converged" else found.status
    return replace(found, free=free, objective=objective, status=reached)


def _member(problem: Problem, objective: Objective, free: Free) -> Tensor:
    """Return the images [B, C, H, W] of the member of the group that matches best."""
    members = free["x"].unbind()
    if len(members) == 1:
        return members[0]
    distances = [float(objective(problem.replay({**free, "x": x})).detach()) for x in members]
    return members[min(range(len(members)), key=distances.__getitem__)]
