"""What worker processes cost beside the work: rounds of a method that does nothing, 20 clients, CNN at 28x28.

Mark: sending 20 clients' items out and back with two workers takes <= 10 ms more than the same in this process.
"""

from contextlib import closing
from pathlib import Path

import numpy as np
import torch

from benchmarks.common import interleaved, table
from pflsec.config.train import resolve
from pflsec.data.datasets import from_arrays
from pflsec.runtime.executor import Executor, Job, Serial
from pflsec.runtime.pool import Processes
from pflsec.runtime.rounds import Federated
from pflsec.runtime.setup import prepare


def main() -> None:
    torch.set_num_threads(1)
    rng, ids = np.random.default_rng(0), np.repeat(np.arange(20), 4)
    images = rng.integers(0, 256, (80, 1, 28, 28), dtype=np.uint8)
    data = from_arrays(images, np.arange(80) % 10, client_ids=ids, is_test=np.arange(80) % 4 == 3, name="few")
    method = f"{Path(__file__).with_name('idle.py')}:Idle"
    setup = prepare(resolve({"algo": method, "partition": "natural", "test": "given", "capture_rounds": "none"}), data)
    run = Federated(setup)
    jobs = [Job(0, c, run.states[c], setup.algorithm.downlink(run.server, c)) for c in range(20)]

    def messages(executor: Executor) -> None:
        ups = {o.client: o.done.up for o in executor.run(jobs)}
        assert len(ups) == len(jobs)

    with closing(Processes(setup, 2)) as pool:
        candidates = {"in this process": lambda: messages(Serial(setup)), "two workers": lambda: messages(pool)}
        seconds = interleaved(candidates, repeats=15)
    rows = [[name, 1e3 * min(found), 1e3 * float(np.median(found))] for name, found in seconds.items()]
    table(f"20 clients x {setup.net.size()} parameters, no work", ["executor", "ms/round, least", "median"], rows)


if __name__ == "__main__":
    main()
