"""Seconds a round of every method against its cost on paper: digits, 20 clients, the CNN, one thread.

The cost is counted in FedAvg's passes (a forward and a backward pass of the network over all rows; a forward pass alone is a
third of one). Mark: <= 1.3 times that.

    python -m benchmarks.bench_rounds [METHOD ...]
"""

import sys

import torch

from benchmarks.common import interleaved, ratio, table
from pflsec.config.train import resolve
from pflsec.core import registry
from pflsec.runtime.rounds import Federated
from pflsec.runtime.setup import prepare

FORWARD = 1 / 3
PASSES = {
    "apfl": 2.0, "apple": 1.0, "ditto": 2.0, "fd": 1.0, "fedala": 1.5, "fedamp": 1.0, "fedbabu": 1.0, "fedbn": 1.0,
    "fedcac": 1.0, "fedcp": 1.4, "feddbe": 1.0, "feddyn": 1.0, "fedfomo": 0.8 + 0.2 * 7 * FORWARD, "fedgc": 1.0,
    "fedgen": 1.0, "fedgh": 1 + FORWARD, "fedkd": 2.0, "fedlc": 1.0, "fedmtl": 1.0, "fedntd": 1 + FORWARD,
    "fedpac": 2.0, "fedpcl": 1 + FORWARD, "fedper": 1.0, "fedphp": 1 + FORWARD, "fedproto": 1 + FORWARD, "fedprox": 1.0,
    "fedrep": 1 + FORWARD, "fedrod": 1.0, "fml": 2.0, "gpfl": 1.1, "lgfedavg": 1.0, "local": 1.0, "moon": 1 + 2 * FORWARD,
    "perfedavg": 1.0, "pfedme": 5.0, "pflda": 1.3, "scaffold": 1.0,
}  # fmt: skip
"""From each method's source: passes of a round at one local epoch."""


def main(words: list[str]) -> None:
    torch.set_num_threads(1)
    methods = ["fedavg", *(key for key in words or registry.names("algorithms") if key != "fedavg")]
    options = {"rounds": 100, "eval_every": 100, "capture_rounds": "none"}
    runs = {key: Federated(prepare(resolve({"algo": key, **options}))) for key in methods}
    seconds = interleaved({key: run.advance for key, run in runs.items()}, repeats=5)
    rows = []
    for key in methods:
        measured, cost = ratio(seconds, key, "fedavg"), PASSES.get(key, 1.0)
        rows.append([key, min(seconds[key]), measured, cost, measured / cost])
    columns = ["method", "s/round", "to fedavg", "passes", "time over passes"]
    table("One round, digits, 20 clients, Dirichlet 0.1, CNN, no evaluation", columns, rows)


if __name__ == "__main__":
    main(sys.argv[1:])
