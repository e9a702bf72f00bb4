"""A control of every table of leakage: methods whose messages tell an attacker what FedAvg's do."""

import torch

from pflsec.attacks.problem import Problem
from pflsec.runtime.replay import capture
from tests import toys
from tests.contracts.cases import Case, exchange
from tests.contracts.test_every_method import _with, probe


def an_attacker_sees_what_fedavg_shows(method: Case, fedavg: Case, history: bool) -> None:
    """The target, the replay and the unknowns are those of FedAvg."""
    problems = []
    for case in (method, fedavg):
        ex = exchange(case)
        record, x, y, up = probe(ex, 4, 3)
        whole = _with(record, up=up, memory=ex.memory)
        cap = capture(ex.setup.algorithm, ex.setup.net, whole, history=history, seed=0)
        problem = Problem(cap, "optimise", "auto", torch.Generator().manual_seed(0), torch.float64)
        assert problem.hidden == "none"
        assert problem.start(lambda *_: torch.ones(1)).keys() == {"x", "labels"}
        problems.append((cap.target, cap.replay(x.flip(0), y, problem.state)))
    (target, replay), (other_target, other_replay) = problems
    assert toys.same(target, other_target)
    assert toys.distance(replay, other_replay) < 1e-15
