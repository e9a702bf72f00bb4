"""The generic attack: replay the client's own code on a guess, compare with what was sent, descend, restart."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from pflsec.attacks.minimise import Best, Free, Plan, descend
from pflsec.attacks.objectives import Objective
from pflsec.attacks.problem import Draw, Hidden, Labels, Problem
from pflsec.core.attack import Reconstruction
from pflsec.core.config import Config, at_least, option
from pflsec.core.items import Items
from pflsec.wire.capture import Capture


class MatchingConfig(Config):
    """Settings that every matching attack has."""

    restarts: int = at_least(1, default=1, about="attempts from new starts; the best objective wins")
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
    prior: Callable[[Tensor], Tensor] | None = None,
    unknowns: Items | None = None,
    poses: Callable[[Problem], Sequence[Problem]] = given_and_freed,
) -> Reconstruction:
    """Return the best of several descents, chosen by the objective alone. Stops early once one has converged.

    distance  from what was seen to the objective, such as `objectives.cosine`
    plans     tried in turn, each from the best point of those before, until one converges
    unknowns  the attack's own, with where they start: the replay finds them among the private items
    poses     from a restart's problem to those that are searched; may refuse it
    """
    dtype = getattr(torch, cfg.precision)
    box = cap.input.box(torch.zeros((), dtype=dtype))
    best: tuple[Best, Problem] | None = None
    endings: Counter[str] = Counter()
    for _ in range(cfg.restarts):
        problem = Problem(cap, cfg.labels, cfg.hidden, rng, dtype)
        for attempt in poses(problem):
            start = attempt.start(draw) | {f"state.{k}": v.to(dtype) for k, v in (unknowns or {}).items()}
            found = descend(_loss(attempt, distance(attempt.target), prior), start, plans, box)
            endings[found.status] += 1
            if best is None or found.objective < best[0].objective:
                best = (found, attempt)
        assert best is not None
        if best[0].status == "converged":
            break
    found, problem = best  # type: ignore[misc]
    return Reconstruction(
        x=found.free["x"],
        y=problem.found_labels(found.free),
        objective=found.objective,
        status=found.status,
        iterations=found.calls,
        restarts=sum(endings.values()),
        labels=problem.labels,
        hidden=problem.hidden,
        trace=found.trace,
        failures={k: n for k, n in endings.items() if k in ("diverged", "nonfinite")},
    )


def _loss(problem: Problem, objective: Objective, prior: Callable[[Tensor], Tensor] | None):
    def loss(free: Free) -> tuple[Tensor, Tensor]:
        distance = objective(problem.replay(free))
        return (distance if prior is None else distance + prior(free["x"])), distance.detach()

    return loss
