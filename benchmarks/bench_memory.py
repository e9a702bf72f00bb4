"""Memory between rounds: 5,000 clients with personal heads over the process without them, and bytes per client by method.

Mark: 5,000 personal heads (5,130 numbers each) take <= 150 MB.
"""

import gc
import os
import sys
from pathlib import Path

import numpy as np

from benchmarks.common import row, table
from pflsec.config.train import resolve
from pflsec.core import registry
from pflsec.core.items import size_in_bytes
from pflsec.data.datasets import Dataset, from_arrays
from pflsec.runtime.rounds import Federated
from pflsec.runtime.setup import prepare

CLIENTS = 5000


def resident() -> float:
    """Return the memory of this process in MB (Linux)."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def many_clients() -> Dataset:
    """Return 28x28 images for natural clients of two training rows and one test row each."""
    rng, ids = np.random.default_rng(0), np.repeat(np.arange(CLIENTS), 3)
    images = rng.integers(0, 256, (len(ids), 1, 28, 28), dtype=np.uint8)
    labels = np.concatenate([np.arange(10), rng.integers(0, 10, len(ids) - 10)])
    return from_arrays(images, labels, client_ids=ids, is_test=np.arange(len(ids)) % 3 == 2, name="many")


def main() -> None:
    if not sys.platform.startswith("linux"):
        print("skipped: reads /proc, which Linux alone has")
        return
    options = {"algo": "fedrep", "partition": "natural", "test": "given", "capture_rounds": "none"}
    setup = prepare(resolve(options), many_clients())
    before = resident()
    federated = Federated(setup)
    state = sum(size_in_bytes(items) for items in federated.states.values()) / 1e6
    table(
        f"{CLIENTS} clients, fedrep, CNN at 28x28",
        ["states, MB", "process grew by, MB"],
        [[state, resident() - before]],
    )
    table("Bytes a client keeps between rounds, digits, CNN", ["method", "bytes", "in models"], [])
    for key in registry.names("algorithms"):
        setup = prepare(resolve({"algo": key, "capture_rounds": "none"}))
        federated = Federated(setup)
        federated.advance()
        kept = max(size_in_bytes(items) for items in federated.states.values())
        row([key, kept, kept / (4 * setup.net.size())])


if __name__ == "__main__":
    main()
