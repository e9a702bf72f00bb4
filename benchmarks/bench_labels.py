"""Labels restored from one message, as the overlap of their counts with the true ones: MNIST, the CNN, PFLlib's client 0.

    python -m benchmarks.bench_labels DATA [BATCHES]

Marks: the counts with noise for images in the published comparison, 1.00 for untrained networks at every batch size; after
200 steps of SGD 1.00 (one image, by sign), 0.50 (8 images) and 0.54 (32). The faintness of the noise was chosen among four
kinds of dummy images on this very data, so that a mark passed here says less about other data.
"""

import statistics
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import row, table
from benchmarks.victims import message, mnist_of_client_0
from pflsec.attacks.problem import Problem
from pflsec.core.inputs import InputSpec
from pflsec.core.items import Items
from pflsec.core.streams import stream
from pflsec.leakage.labels import overlap
from pflsec.models import catalogue
from pflsec.models.network import Network

SPEC = InputSpec((1, 28, 28), 10, (0.5,), (0.5,))


def trained(net: Network, x: Tensor, y: Tensor, steps: int) -> Items:
    """Return a fresh network after so many steps of SGD on batches of 32 at lr 0.05."""
    items, rng = net.fresh(0), stream(0, "training")
    for _ in range(steps):
        rows = torch.randint(len(y), (32,), generator=rng)
        leaves = {k: v.requires_grad_() for k, v in items.items()}
        slopes = torch.autograd.grad(F.cross_entropy(net.logits(leaves, x[rows]), y[rows]), list(leaves.values()))
        items = {k: (v - 0.05 * g).detach() for (k, v), g in zip(leaves.items(), slopes, strict=True)}
    return items


def main() -> None:
    torch.set_num_threads(1)
    data, batches = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 100
    pixels, y = mnist_of_client_0(data)
    net = catalogue.build("cnn", (1, 28, 28), 10)
    table(f"Overlap of restored labels, mean of {batches} batches", ["steps", "B = 1", "B = 8", "B = 32"], [])
    for steps in (0, 200):
        items = trained(net, SPEC.normalise(pixels), y, steps)
        means = []
        for count in (1, 8, 32):
            found = []
            for i in range(batches):
                rng = stream(i, "batch")
                rows = torch.randint(len(y), (count,), generator=rng)
                cap = message(net, items, SPEC, pixels[rows], y[rows])
                restored = Problem(cap, "restore", "auto", rng, torch.float32).y
                found.append(0.0 if restored is None else overlap(y[rows].tolist(), restored.tolist()))
            means.append(statistics.mean(found))
        row([steps], means)


if __name__ == "__main__":
    main()
