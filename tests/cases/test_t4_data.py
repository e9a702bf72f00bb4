"""Cases of section T4: partition and preprocessing. Named after the rows of tests/cases/README.md."""

import gc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from pflsec.cli.app import main
from pflsec.config.train import resolve
from pflsec.core.errors import ConfigError
from pflsec.data.partitions import pathological
from pflsec.runtime.rounds import Federated
from pflsec.wire.channel import Channel
from tests import toys


def live_bytes() -> int:
    """Return the bytes of all tensors that are alive, shared storage once."""
    gc.collect()
    alive = (t.untyped_storage() for t in gc.get_objects() if type(t) is Tensor)
    return sum({s.data_ptr(): s.nbytes() for s in alive}.values())


@pytest.mark.parametrize("key", ["fedavg", "scaffold", "fedfomo", "fedproto"])
def test_u040_memory_does_not_grow_with_the_clients_that_have_taken_part(key: str):
    """A quarter of eight clients a round: after round 20 all have, after round 2 at most four."""
    made = toys.setup(key, data=toys.dataset([4] * 8), participation=0.25, rounds=20)
    before = live_bytes()
    federated = Federated(replace(made, channel=Channel(made.algorithm.contract)))  # one that keeps no log
    grown = []
    for rounds in (2, 18):
        for _ in range(rounds):
            federated.advance()
        grown.append(live_bytes() - before)
    assert len(federated.last_trained) > 4
    assert 0 < grown[1] <= 1.1 * grown[0]


def test_u041_shares_of_classes_are_equal_where_the_classes_are():
    """20 clients with 2 of 10 classes of 101 rows: a class has 4 owners, which differ by a row; so clients differ by two."""
    labels = np.repeat(np.arange(10), 101)
    sizes = [len(part) for part in pathological(labels, 20, np.random.default_rng(0), 2)]
    assert sum(sizes) == 1010
    assert max(sizes) - min(sizes) <= 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"partition": "iid", "alpha": 0.5}, "alpha is 0.5, but partition iid does not use it"),
        ({"partition": "natural", "alpha": 5.0}, "alpha is 5.0, but partition natural does not use it"),
        ({"classes_per_client": 3}, "classes_per_client is 3, but partition dirichlet does not use it"),
        ({"partition": "pathological", "alpha": 1.0}, "choose partition dirichlet or pfllib-compat"),
    ],
)
def test_u046_an_option_of_another_partition_is_refused_by_name(options: dict, says: str):
    with pytest.raises(ConfigError, match=says):
        resolve(options)


def test_u046_so_it_is_in_a_file_and_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    tmp_path.joinpath("mine.toml").write_text("partition = 'iid'\nalpha = 0.5\n")
    for words in (["--config", "mine.toml"], ["--partition", "iid", "--alpha", "0.5"]):
        assert main(["train", *words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: train: alpha is 0.5, but partition iid does not use it; leave it out")
    assert [p.name for p in tmp_path.iterdir()] == ["mine.toml"]


def test_u046_options_that_are_used_and_defaults_are_accepted():
    assert resolve({"partition": "dirichlet", "alpha": 0.5}).alpha == 0.5
    assert resolve({"partition": "pfllib-compat", "alpha": 0.5}).alpha == 0.5
    assert resolve({"partition": "pathological", "classes_per_client": 3}).classes_per_client == 3
    listed = resolve({"partition": "iid"})
    assert resolve(listed.model_dump()) == listed
