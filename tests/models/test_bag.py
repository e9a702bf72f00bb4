"""The bag of embeddings: padding counts for nothing, and soft tokens that are certain are tokens."""

import pytest
import torch
import torch.nn.functional as F

from pflsec import api
from pflsec.core.errors import ModelError
from pflsec.models import catalogue
from pflsec.models.bag import Bag
from tests import toys

TOKENS = torch.tensor([[2, 3, 3, 0, 0], [4, 0, 0, 0, 0], [0, 0, 0, 0, 0]])


@pytest.mark.usefixtures("doubles")
def test_the_output_is_the_mean_of_the_words_embeddings():
    bag = Bag(6, 3)
    w = bag.weight
    by_hand = torch.stack([(w[2] + 2 * w[3]) / 3, w[4], torch.zeros(3)])
    assert torch.allclose(bag(TOKENS), by_hand, atol=1e-15)


@pytest.mark.usefixtures("doubles")
def test_certain_soft_tokens_are_tokens():
    bag = Bag(6, 3)
    assert torch.allclose(bag(F.one_hot(TOKENS, 6).double()), bag(TOKENS), atol=1e-15)


@pytest.mark.usefixtures("doubles")
def test_soft_tokens_pass_second_derivatives():
    bag = Bag(5, 3)
    soft = torch.rand(2, 4, 5).softmax(-1).requires_grad_()

    def gradient(x: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(bag(x).pow(3).sum(), bag.weight, create_graph=True)[0]

    assert torch.autograd.gradcheck(gradient, (soft,))


@pytest.mark.usefixtures("doubles")
def test_the_row_of_a_word_has_its_count_times_the_gradient_at_the_mean():
    """mean = sum_w c_w E_w / n, so d loss / d E_w = c_w / n * d loss / d mean; padding's row stands still."""
    net = catalogue.build("bag", (5,), 3, vocabulary=6)
    items = {k: v.requires_grad_() for k, v in net.fresh(0).items()}
    z = net.features(items, TOKENS[:1])
    loss = F.cross_entropy(net.head(items, z), torch.tensor([1]))
    rows, at_mean = torch.autograd.grad(loss, [items["body.words.weight"], z])
    expected = torch.tensor([0, 0, 1, 2, 0, 0])[:, None] / 3 * at_mean
    assert torch.allclose(rows, expected, atol=1e-15)


def test_the_network_names_its_table_and_is_cut_at_the_mean():
    net = catalogue.build("bag", (5,), 4, vocabulary=9)
    assert net.embeddings == {"body.words.weight"}
    assert (net.feature_dim, net.last_layer, net.size()) == (64, "head", 9 * 64 + 64 * 4 + 4)
    assert catalogue.build("cnn", (1, 8, 8), 4).embeddings == frozenset()


def test_auto_is_the_bag_where_inputs_are_texts():
    assert catalogue.build("auto", (5,), 4, vocabulary=9).shapes == catalogue.build("bag", (5,), 4, vocabulary=9).shapes


def test_a_network_of_the_other_kind_is_refused_in_one_line_before_any_work(tmp_path):
    for data, model, words in ((toys.texts(), "cnn", "'cnn' reads images, but the data are texts"),
                               (toys.dataset(), "bag", "'bag' reads texts, but the data are images")):  # fmt: skip
        with pytest.raises(ModelError, match=words) as caught:
            api.train(dataset=data, model=model, partition="iid", clients=2, runs_dir=tmp_path / "runs")
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "runs").exists()


def test_training_on_texts_finds_the_word_that_gives_the_class_away(tmp_path):
    run = api.train(dataset=toys.texts(96), model="bag", partition="iid", clients=2, rounds=40, lr=1.0, batch_size=8,
                    capture_rounds="none", runs_dir=tmp_path)  # fmt: skip
    assert run.metrics["personal_accuracy_mean"].iloc[-1] > 0.9
    assert run.manifest["model"]["name"] == "bag"
    assert run.manifest["data"]["words"][:3] == ["<pad>", "<unk>", "alpha"]
