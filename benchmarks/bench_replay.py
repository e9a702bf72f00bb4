"""The replay test: distance of the replayed from the real uplink at the truth, relative, for every method.

Marks: below 1e-6 in float32, below 1e-12 in float64.
"""

import torch

from benchmarks.common import table
from pflsec.config.train import resolve
from pflsec.core import registry
from pflsec.core.items import cast, floating
from pflsec.runtime.replay import relative_distance
from pflsec.runtime.rounds import Federated
from pflsec.runtime.setup import prepare
from pflsec.training.local import LocalWork, Training, Unrolled


def residual(run: Federated, images: int, steps: int, dtype: torch.dtype) -> float:
    """Return the residual of one client's exchange under the two interpreters."""
    setup, client = run.setup, 0
    x, y = (t[:images] for t in setup.federation.train(client))
    down = cast(setup.algorithm.downlink(run.server, client), dtype)
    ups = []
    for driver in (Training(), Unrolled()):
        ctx = LocalWork(setup.net, x.to(dtype), y, setup.config.lr, steps, images, 0, 1, client, driver)
        ups.append(floating(setup.algorithm.local(ctx, cast(run.states[client], dtype), down).up))
    return relative_distance(ups[1], ups[0])


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    for name in registry.names("algorithms"):
        run = Federated(prepare(resolve({"algo": name, "rounds": 3, "capture_rounds": "none"})))
        run.advance()
        cells = [residual(run, b, k, d) for d in (torch.float32, torch.float64) for b, k in ((1, 1), (4, 5))]
        rows.append([name, *cells])
    columns = ["method", "f32 B=1 K=1", "f32 B=4 K=5", "f64 B=1 K=1", "f64 B=4 K=5"]
    table("Replay residual after one round, digits, CNN", columns, rows)


if __name__ == "__main__":
    main()
