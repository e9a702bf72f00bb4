"""Cost of the method API: one local epoch through `ctx.fit`, against the same arithmetic on a bare module.

Mark: at most 10 % a step.
"""

import torch
import torch.nn.functional as F

from benchmarks.common import interleaved, ratio, table
from pflsec.models import catalogue
from pflsec.models.cnn import cnn
from pflsec.models.mlp import mlp
from pflsec.training.local import LocalWork

BATCH, LR = 10, 0.05


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    for name, build, shape, samples in (("cnn", cnn, (1, 28, 28), 200), ("mlp", mlp, (1, 28, 28), 4000)):
        x, y = torch.randn(samples, *shape), torch.randint(0, 10, (samples,))
        net = catalogue.build(name, shape, 10)
        items, module = net.fresh(0), build(shape, 10)

        def through_api(net=net, items=items, x=x, y=y) -> None:
            ctx = LocalWork(net, x, y, LR, 1, BATCH, 0, 0, 0)
            ctx.fit(items, on=ctx.ce)

        def bare(module=module, x=x, y=y) -> None:
            parameters = list(module.parameters())
            order = torch.randperm(len(y))
            for a, b in zip(x[order].split(BATCH), y[order].split(BATCH), strict=True):
                gradients = torch.autograd.grad(F.cross_entropy(module(a), b), parameters)
                with torch.no_grad():
                    for p, g in zip(parameters, gradients, strict=True):
                        p.sub_(g, alpha=LR)

        seconds = interleaved({"api": through_api, "bare": bare}, repeats=9)
        steps = samples // BATCH
        rows.append([name, 1e3 * min(seconds["bare"]) / steps, ratio(seconds, "api", "bare"), "<= 1.10"])
    table("Method API against a bare module, batch 10, one thread", ["model", "bare ms/step", "ratio", "mark"], rows)


if __name__ == "__main__":
    main()
