"""Cost of dp-sgd: one local epoch with it, against one without, for two networks; batch 10, one thread."""

import torch

from benchmarks.common import interleaved, ratio, table
from pflsec.defenses.step.dp_sgd import DPSGD, DPSGDConfig
from pflsec.models import catalogue
from pflsec.training.local import LocalWork


def main() -> None:
    torch.set_num_threads(1)
    body = []
    for name in ("cnn", "mlp"):
        net = catalogue.build(name, (1, 28, 28), 10)
        items, x, y = net.fresh(0), torch.randn(100, 1, 28, 28), torch.randint(0, 10, (100,))
        dp = DPSGD(DPSGDConfig(noise_multiplier=1.0, sampling="shuffle"))

        def epoch(private: bool, net=net, items=items, x=x, y=y, dp=dp) -> None:
            guard = dp.guard(len(y), 10, 1.0, "bench") if private else None
            ctx = LocalWork(net, x, y, 0.05, 1, 10, 0, 0, 0, guard=guard)
            ctx.fit(items, on=ctx.ce)

        seconds = interleaved({"dp": lambda: epoch(True), "plain": lambda: epoch(False)}, repeats=7)
        body.append([name, 1e3 * min(seconds["plain"]) / 10, ratio(seconds, "dp", "plain")])
    table("dp-sgd against plain training", ["model", "plain ms/step", "ratio"], body)


if __name__ == "__main__":
    main()
