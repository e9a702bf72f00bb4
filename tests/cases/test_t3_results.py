"""Cases of section T3: what is evaluated, and what is written. Named after the rows of tests/cases/README.md."""

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from pflsec.algorithms.traditional.fedavg import FedAvg
from pflsec.core import registry
from pflsec.core.algorithm import Done
from pflsec.core.errors import PflsecWarning, TrainingError
from pflsec.core.items import Items
from pflsec.core.local import Local
from pflsec.reports.load import CLIENTS, METRICS, load_run
from pflsec.runtime import checkpoint
from pflsec.runtime.folder import RunFolder
from pflsec.runtime.rounds import Federated, play
from tests import toys
from tests.cases import reload


class InfiniteLoss(FedAvg):
    """From round 1 on client 2 has a loss that is infinite, with a gradient that is not."""

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        def on(params: Items, x: Tensor, y: Tensor) -> Tensor:
            return ctx.ce(params, x, y) + (float("inf") if ctx.round and ctx.client == 2 else 0.0)

        return Done(state, ctx.fit(down, on=on) | {"num_samples": super().local(ctx, state, down).up["num_samples"]})


def quiet(t: int, metrics: Any) -> None:
    """Report nothing."""


def test_u034_every_declared_series_is_filled_at_every_evaluation(tmp_path: Path):
    """Five rounds, evaluated after rounds 1, 3 and the last: three values of each series and no gap."""
    folder = RunFolder.create(tmp_path, "run")
    setup = toys.setup("fedavg", rounds=5, eval_every=2)
    play(setup, folder, quiet)
    folder.write_manifest(manifest(setup))
    run = load_run(folder.path)
    tested = run.metrics.dropna(subset=["global_accuracy"])
    assert tested["round"].tolist() == [1, 3, 4]
    for name in set(METRICS) - {"epsilon"}:  # there is none without private training
        assert tested[name].notna().all(), name
    clients = run.clients[run.clients["round"].isin([1, 3, 4])]
    assert len(clients) == 3 * 4
    for name in CLIENTS:
        assert clients[name].notna().all(), name


def manifest(setup: Any) -> dict[str, Any]:
    from pflsec.runtime.manifest import describe

    return describe(setup, "run")


def test_u035_a_loss_that_is_not_finite_is_named_and_earlier_rounds_can_be_read(tmp_path: Path):
    """Its null in the file would look like a round without training."""
    folder = RunFolder.create(tmp_path, "run")
    with pytest.raises(TrainingError, match=r"^round 1, client 2: the training loss is not finite\. Lower --lr"):
        play(toys.setup(InfiniteLoss, rounds=3), folder, quiet)
    (line,) = (folder.path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line, parse_constant=pytest.fail)["round"] == 0


def test_u037_every_method_is_the_same_after_loading_in_another_process(tmp_path: Path):
    """Half of the clients a round, so that some have trained more often than others, or never."""
    keys, expected = registry.names("algorithms"), {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PflsecWarning)
        for key in keys:
            setup = reload.made(key)
            federated = Federated(setup)
            for _ in range(2):
                federated.advance()
            checkpoint.save(RunFolder.create(tmp_path, key), federated.state())
            expected[key] = reload.look(setup, federated)
    child = subprocess.run(
        [sys.executable, "-m", "tests.cases.reload", str(tmp_path), *keys],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert json.loads(child.stdout) == expected
