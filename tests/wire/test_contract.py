"""The wire contract: patterns, kinds, shapes, and refusals that name the item."""

from collections import OrderedDict
from collections.abc import Mapping

import pytest
import torch
from torch import nn

from pflsec.core.contract import KINDS, Contract, kind_of
from pflsec.core.errors import WireError
from pflsec.core.items import Items, prefixed, repeated, select
from pflsec.models.network import Network
from tests import toys

BODY = ["body.fc1.weight", "body.fc1.bias"]
HEAD = ["head.weight", "head.bias"]


def contract(up: Mapping[str, str], net: Network | None = None) -> Contract:
    return Contract("toy", {}, up, net or toys.tiny())


def check(up: Mapping[str, str], message: Items) -> None:
    contract(up).check("up", message, "round 3, client 7")


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("body.*", BODY),
        ("head.*", HEAD),
        ("control.*", [f"control.{n}" for n in BODY + HEAD]),
        ("delta.body.*", [f"delta.{n}" for n in BODY]),
        ("personal.head.*?", [f"personal.{n}" for n in HEAD]),
        ("num_samples", ["num_samples"]),
        ("num_samples?", ["num_samples"]),
    ],
)
def test_a_pattern_stands_for_the_networks_parameters(pattern: str, names: list[str]):
    assert list(contract({pattern: "weights"}).items("up")) == names


def test_an_empty_contract_allows_nothing():
    check({}, {})
    with pytest.raises(WireError, match="its contract allows nothing"):
        check({}, {"w": torch.ones(1)})


def test_a_refusal_names_place_method_item_shape_and_remedy():
    with pytest.raises(WireError) as refused:
        check({"body.*": "weights"}, toys.tiny().fresh(0))
    text = str(refused.value)
    assert text.startswith("round 3, client 7: toy sent the item 'head.weight' [3, 5]; its contract allows body.*.")
    assert "Done.state" in text


def test_every_missing_item_is_named():
    with pytest.raises(WireError, match=r"without body\.fc1\.bias, head\.weight, which it declares"):
        check(
            {"body.*": "weights", "head.*": "weights"},
            select(toys.tiny().fresh(0), "body.fc1.weight", "head.bias"),
        )


def test_an_optional_item_may_be_left_out_but_not_misshapen():
    declared = {"num_samples?": "counts"}
    check(declared, {})
    check(declared, {"num_samples": torch.tensor(3)})
    with pytest.raises(WireError, match=r"'num_samples' of toy has shape \[1\]; it must be \[\]"):
        check(declared, {"num_samples": torch.ones(1)})


def test_an_optional_pattern_may_be_left_out():
    declared = {"body.*": "weights", "personal.*?": "weights"}
    body = select(toys.tiny().fresh(0), "body")
    check(declared, body)
    check(declared, body | prefixed("personal", toys.tiny().fresh(0)))


def test_a_letter_is_one_size_throughout_a_message():
    declared = {"prototype": "prototypes [held, d]", "spread": "statistics [held]", "held": "label set [C]"}
    good = {"prototype": torch.ones(2, 5), "spread": torch.ones(2), "held": torch.ones(3)}
    check(declared, good)
    with pytest.raises(WireError, match=r"'spread' of toy has shape \[1\]; it must be \[2\]"):
        check(declared, good | {"spread": torch.ones(1)})


@pytest.mark.parametrize(
    ("declared", "shape"),
    [
        ("statistics [C, d]", (3, 4)),
        ("statistics [C]", (4,)),
        ("statistics [2]", (3,)),
        ("statistics []", (1,)),
    ],
)
def test_classes_features_and_numbers_are_sizes(declared: str, shape: tuple[int, ...]):
    with pytest.raises(WireError, match="'it' "):
        check({"it": declared}, {"it": torch.ones(shape)})


def test_a_parameter_has_its_own_shape_also_when_another_ones_name_ends_alike():
    """`body.body.scale` is not `body.scale` under a prefix."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))
            self.body = nn.LayerNorm(16, bias=False)
            self.body.scale = nn.Parameter(torch.ones(16))
            self.fc = nn.Linear(16, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(self.body(x.flatten(1)) * self.body.scale * self.scale)

    net = Network(Twice, toys.SHAPE, toys.CLASSES)
    assert {"body.scale", "body.body.scale"} <= net.shapes.keys()
    declared = contract({"body.*": "weights", "delta.*": "weights-delta"}, net)
    declared.check("up", select(net.fresh(0), "body") | prefixed("delta", net.fresh(0)), "here")


def test_an_unknown_kind_is_an_error_that_lists_the_kinds():
    with pytest.raises(WireError, match=r"declares 'w' as 'wieghts'; the kinds are: weights, weights-delta"):
        check({"w": "wieghts"}, {"w": torch.ones(())})


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_can_be_declared(kind: str):
    check({"it": kind}, {"it": torch.ones(())})
    check({"it": f"{kind} [n]"}, {"it": torch.ones(2)})
    assert kind_of(f"{kind} [n]") == kind_of(kind) == contract({"it": f"{kind} [n]"}).kind("up", "it") == kind


def test_names_of_parts_need_no_module_of_that_name():
    net = Network(lambda: nn.Sequential(OrderedDict(flat=nn.Flatten(), fc=nn.Linear(16, 3))), toys.SHAPE, 3)
    assert list(contract({"body.*": "weights"}, net).items("up")) == []
    assert list(contract({"head.*": "weights"}, net).items("up")) == HEAD


def test_one_item_may_hold_a_parameter_of_several_models():
    """The same number of models in every item of a message, each of the network's own shape; also of none."""
    declared = {"peer.*": "weights [m, ...]"}
    for count in (0, 1, 3):
        check(declared, prefixed("peer", repeated(toys.tiny().fresh(0), count)))
    many = prefixed("peer", repeated(toys.tiny().fresh(0), 3))
    with pytest.raises(WireError, match=r"'peer\.head\.bias' of toy has shape \[2, 3\]; it must be \[3, 3\]"):
        check(declared, many | {"peer.head.bias": many["peer.head.bias"][:2]})
    with pytest.raises(WireError, match=r"'peer\.head\.bias' of toy has shape \[3, 2\]; it must be \[3, 3\]"):
        check(declared, many | {"peer.head.bias": many["peer.head.bias"][:, :2]})
    with pytest.raises(WireError, match=r"'peer\.head\.bias' has shape \[3\]; its contract says \[m, \.\.\.\]"):
        check(declared, many | {"peer.head.bias": many["peer.head.bias"][0]})
