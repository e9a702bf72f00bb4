"""run.json: enough to understand a run and to repeat it."""

import json

import pytest

from pflsec.config.train import TrainConfig
from pflsec.core.files import to_json
from pflsec.runtime import manifest
from tests import toys
from tests.contracts.cases import every_method


@pytest.mark.parametrize("key", every_method())
def test_a_manifest_is_plain_json_and_gives_the_configuration_back(key: str):
    made = toys.setup(key, capture_rounds="first,last")
    text = json.loads(to_json(manifest.describe(made, "run")))
    assert TrainConfig(**text["config"]) == made.config
    assert text["algorithm"]["key"] == key
    assert text["algorithm"]["settings"] == made.algorithm.cfg.model_dump()
    assert text["data"]["partition"] == made.federation.fingerprint()
    assert text["model"]["parameters"] == made.net.size()
    assert text["captures"]["rounds"] == [0, 2]
    assert text["versions"]["torch"]


def test_the_wire_table_counts_tensors_and_numbers():
    """Tiny network: 4 tensors; body 16*5 + 5 = 85, head 5*3 + 3 = 18 numbers."""
    rows = {(r["direction"], r["item"]): r for r in manifest.wire_table(toys.setup("scaffold"))}
    assert {k: (r["tensors"], r["numbers"], r["kind"]) for k, r in rows.items()} == {
        ("down", "body.*"): (2, 85, "weights"),
        ("down", "head.*"): (2, 18, "weights"),
        ("down", "control.*"): (4, 103, "control variate"),
        ("up", "delta.*"): (4, 103, "weights-delta"),
        ("up", "control.*"): (4, 103, "control variate"),
    }


def test_the_wire_table_shows_private_parts_and_shapes():
    rows = {(r["direction"], r["item"]): r for r in manifest.wire_table(toys.setup("fedproto"))}
    assert rows["up", "prototype"]["shape"] == "[held, d]"
    assert rows["up", "counts"]["optional"]
    assert not rows["up", "held"]["optional"]
    assert rows["private", "body.*"]["numbers"] == 85
    assert rows["private", "head.*"]["tensors"] == 2
