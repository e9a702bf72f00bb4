"""The generic attack: replay the client's own code on a guess, compare with what was sent, descend, restart."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
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
    dtype = getattr(torch, cfg.precision)
    box = cap.input.box(torch.zeros((), dtype=dtype))
    best: tuple[Best, Problem] | None = None
    endings: Counter[str] = Counter()
    given_up = 0
    for _ in range(cfg.restarts or (ONE if cap.count == 1 else SEVERAL)):
        problem = Problem(cap, cfg.labels, cfg.hidden, rng, dtype)
        for attempt in poses(problem):
            loss = _loss(attempt, distance(attempt.target), prior, pull)
            start = attempt.start(draw) | {f"state.{k}": v.to(dtype) for k, v in (unknowns or {}).items()}
            start["x"] = torch.stack([start["x"], *(draw(cap, rng, dtype) for _ in range(group - 1))])
            rival = best[0].trace if best and len(plans) == 1 else ()
            found = descend(loss, start, plans, box, rng, rival)
            if settle is not None:
                found = _settled(found, loss, settle, plans[-1].tolerance)
            endings[found.status] += 1
            given_up += found.given_up
            if best is None or found.objective < best[0].objective:
                best = (found, attempt)
        assert best is not None
        if best[0].status == "converged":
            break
    found, problem = best  # type: ignore[misc]
    given = f"{given_up} of {sum(endings.values())} attempts were given up early" if given_up else ""
    return Reconstruction(
        x=_member(problem, distance(problem.target), found.free),
        y=problem.found_labels(found.free),
        objective=found.objective,
        status=found.status,
        iterations=found.calls,
        restarts=sum(endings.values()),
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
