"""TAG: words of texts by gradient matching, in their order where the network sees one."""

from typing import Any

import pytest
import torch

from pflsec.attacks import objectives
from pflsec.attacks.optimisation.tag import whole_bags, whole_words
from pflsec.attacks.words import reads_order
from pflsec.core.errors import NotApplicable
from pflsec.leakage.texts import assign, bag
from pflsec.models import catalogue
from tests.attacks.test_controls import shuffled
from tests.attacks.test_texts import DATA, words
from tests.attacks.victims import Victim, attack, victim


def text_victim(model: str, key: str = "fedavg", **options: Any) -> Victim:
    assert DATA.words is not None
    net = catalogue.build(model, DATA.images.shape[1:], DATA.classes, vocabulary=len(DATA.words))
    return victim(key, data=DATA, net=net, model=model, **options)


@pytest.mark.parametrize("policy", ["moved", "all"])
def test_the_words_of_a_text_are_found_as_often_as_they_are_there(policy: str):
    for first in range(3):
        v = text_victim("bag", first=first)
        found = attack("tag", v.capture(), words=policy)
        assert found.status == "converged"
        assert words(found) == bag(v.x[0])
        assert "no order" in found.note
        assert found.y is not None
        assert found.y.tolist() == v.y.tolist()


def test_words_are_found_in_their_order_where_the_network_sees_it():
    for first in range(3):
        v = text_victim("transformer", first=first)
        found = attack("tag", v.capture())
        assert found.status == "converged"
        assert found.x is not None
        assert torch.equal(found.x, v.x)
        assert not found.note


@pytest.mark.parametrize("model", ["bag", "transformer"])
def test_the_words_of_two_texts_are_told_apart(model: str):
    v = text_victim(model, batch=2)
    found = attack("tag", v.capture())
    assert found.x is not None
    order = assign(v.x, found.x)
    assert [bag(found.x[j]) for j in order] == [bag(text) for text in v.x]
    if model == "transformer":
        assert torch.equal(found.x[order], v.x)


@pytest.mark.parametrize("model", ["bag", "transformer"])
def test_a_shuffled_message_gives_no_text(model: str):
    v = text_victim(model)
    found = attack("tag", shuffled(v).capture(), iterations=100)
    assert found.status != "converged"
    assert words(found) != bag(v.x[0])
    assert found.objective > 100 * attack("tag", v.capture()).objective


def test_images_have_no_words():
    with pytest.raises(NotApplicable, match="the inputs are images, and this attack searches for words"):
        attack("tag", victim().capture())


def test_without_any_message_there_is_nothing_to_match():
    with pytest.raises(NotApplicable, match="nothing that the client sends"):
        attack("tag", text_victim("bag", "local").capture())


def test_words_of_a_table_that_the_client_keeps_have_no_names():
    with pytest.raises(NotApplicable, match="keeps its table of embeddings"):
        attack("tag", text_victim("bag", "lgfedavg").capture(history=False))


def test_only_a_network_with_positions_reads_order():
    assert not reads_order(text_victim("bag").capture())
    assert reads_order(text_victim("transformer").capture())


def test_mixtures_become_as_many_words_as_they_add_up_to():
    """1.1 of word 2, 1.9 of word 1: one and two, and the place with most of word 2 gets it."""
    mixtures = torch.tensor([[[0.0, 0.9, 0.1], [0.0, 0.3, 0.7], [0.0, 0.7, 0.3]]])
    assert whole_words(mixtures).argmax(-1).tolist() == [[1, 2, 1]]


def test_shares_of_a_bag_become_the_smallest_counts():
    """Half word 1 and half words 2 and 3 alike, in three of four places' worth: 2, 1, 1 whatever the padding."""
    mixtures = torch.tensor([0.25, 0.375, 0.1875, 0.1875], dtype=torch.float64).expand(1, 4, 4)
    assert sorted(whole_bags(mixtures).argmax(-1)[0].tolist()) == [1, 1, 2, 3]


def test_the_distance_is_relative_in_every_item():
    """(1/4 + 2 * 1/2 + 0 + 0) / 2 for one item that is off by half and one that is right; scales do not matter."""
    seen = {"a": torch.tensor([2.0]), "b": torch.tensor([1e-3, 1e-3])}
    distance = objectives.squared_and_absolute(seen, 2.0)
    assert float(distance({"a": torch.tensor([1.0]), "b": seen["b"]})) == pytest.approx(1.25 / 2)
    assert float(distance(seen)) == 0
