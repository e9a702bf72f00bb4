"""Seconds a round of every method, relative to fedavg in the same run: digits, 20 clients, the default network."""

import torch

from benchmarks.common import interleaved, ratio, table
from pflsec.config.train import resolve
from pflsec.core import registry
from pflsec.runtime.rounds import Federated
from pflsec.runtime.setup import prepare


def main() -> None:
    torch.set_num_threads(1)
    methods = registry.names("algorithms")
    runs = {
        name: Federated(prepare(resolve({"algo": name, "rounds": 100, "eval_every": 100, "capture_rounds": "none"})))
        for name in methods
    }
    seconds = interleaved({name: run.advance for name, run in runs.items()}, repeats=7)
    rows = [[name, min(seconds[name]), ratio(seconds, name, "fedavg")] for name in methods]
    table("One round, digits, 20 clients, Dirichlet 0.1, CNN, no evaluation", ["method", "s/round", "to fedavg"], rows)


if __name__ == "__main__":
    main()
