"""Cases of section T6: whether a run can be repeated. Named after the rows of tests/cases/README.md."""

from pathlib import Path

import pytest

import pflsec
from tests import toys


def checkpoint(run: pflsec.Run) -> bytes:
    return max((run.path / "checkpoints").glob("*.safetensors")).read_bytes()


@pytest.mark.parametrize("algo", ["fedavg", "fedrep"])
def test_u061_the_configuration_in_run_json_makes_the_same_run_again(algo: str, tmp_path: Path):
    """Options, defaults and the method's own settings; the record names versions and the partition."""
    data = toys.dataset()
    first = pflsec.train(
        algo=algo, dataset=data, partition="natural", test="given", model="mlp", rounds=2, lr=0.1, participation=0.5,
        settings={"weighting": "uniform"}, victims=1, seed=3, runs_dir=tmp_path,
    )  # fmt: skip
    again = pflsec.train(dataset=data, **first.manifest["config"], runs_dir=tmp_path)
    assert again.path != first.path
    assert again.manifest["data"]["partition"] == first.manifest["data"]["partition"]
    assert again.manifest["versions"] == first.manifest["versions"]
    assert again.manifest["config"] == first.manifest["config"]
    assert checkpoint(again) == checkpoint(first)
    other = pflsec.train(dataset=data, **first.manifest["config"] | {"seed": 4}, runs_dir=tmp_path)
    assert checkpoint(other) != checkpoint(first)
