"""Cases of section T2: what crosses the wire. Named after the rows of tests/cases/README.md."""

import pytest
import torch
from torch import Tensor, nn

from pflsec.core import registry
from pflsec.core.errors import ModelError
from pflsec.models.network import Network
from tests import toys

SPLITTERS = [k for k in registry.names("algorithms") if registry.card("algorithms", k).family == "model_splitting"]


class Residual(nn.Module):
    """Has neither a body nor a head: a layer, a branch around which the input also passes, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.branch = nn.Conv2d(1, 2, 2), nn.Conv2d(2, 2, 3, padding=1)
        self.classifier = nn.Linear(2 * 9, toys.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.stem(x))
        return self.classifier((z + torch.tanh(self.branch(z))).flatten(1))


def test_u027_the_methods_that_split_a_model_are_all_here():
    assert len(SPLITTERS) == 12


@pytest.mark.parametrize("key", SPLITTERS)
def test_u027_a_residual_network_without_body_or_head_trains_under_every_method_that_splits(key: str):
    net = Network(Residual, toys.SHAPE, toys.CLASSES)
    body, head = ({n for n in net.shapes if n.startswith(f"{part}.")} for part in ("body", "head"))
    assert {n.partition(".")[2] for n in body} == {f"{m}.{p}" for m in ("stem", "branch") for p in ("weight", "bias")}
    assert head == {"head.weight", "head.bias"}
    turns = toys.play(key, 2, net=net)
    assert any(turn.metrics["train_loss"] is not None for turn in turns)
    assert all(0 <= row["accuracy_post_agg"] <= 1 for row in turns[-1].rows)


def test_u027_a_cut_that_the_residual_path_goes_around_is_refused_with_the_layers():
    with pytest.raises(ModelError, match=r"cannot be cut at 'branch'.*: .*classifier"):
        Network(Residual, toys.SHAPE, toys.CLASSES, "branch")
