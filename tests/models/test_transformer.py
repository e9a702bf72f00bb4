"""The transformer: padding counts for nothing, order counts, and soft tokens that are certain are tokens."""

import pytest
import torch
import torch.nn.functional as F

from pflsec.models import catalogue
from pflsec.models.transformer import Attention, Transformer

TOKENS = torch.tensor([[2, 3, 3, 0, 0], [4, 5, 0, 0, 0], [0, 0, 0, 0, 0]])

pytestmark = pytest.mark.usefixtures("doubles")


def made() -> Transformer:
    torch.manual_seed(0)
    return Transformer(5, 3, 6)


def test_attention_is_torchs_with_padding_masked():
    """Against the fused function, which takes -inf at the masked keys."""
    torch.manual_seed(0)
    ours, x, real = Attention(8, 2), torch.randn(3, 5, 8), torch.tensor([[1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1] * 5])
    q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in ours.project(x).chunk(3, -1))
    theirs = F.scaled_dot_product_attention(q, k, v, real.bool()[:, None, None])
    assert torch.allclose(ours(x, real.double()), ours.out(theirs.transpose(1, 2).flatten(2)), atol=1e-12)


def test_certain_soft_tokens_are_tokens():
    net = made()
    assert torch.allclose(net(F.one_hot(TOKENS, 6).double()), net(TOKENS), atol=1e-12)


def test_what_stands_in_padding_changes_nothing():
    net = made()
    before = net(TOKENS)
    with torch.no_grad():
        net.positions.weight[3:] += 1
        net.words.weight[0] += 1
    assert torch.allclose(net(TOKENS), before, atol=1e-12)


def test_a_text_of_nothing_has_the_bias_as_its_logits():
    net = made()
    assert torch.equal(net(TOKENS)[2], net.fc.bias)


def test_the_order_of_words_counts():
    net = made()
    assert float((net(TOKENS[:1]) - net(TOKENS[:1, [1, 0, 2, 3, 4]])).abs().max()) > 1e-3


def test_soft_tokens_pass_second_derivatives():
    net, soft = made(), torch.rand(1, 5, 6).softmax(-1).requires_grad_()

    def gradient(x: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(net(x).pow(3).sum(), net.block.fc1.bias, create_graph=True)[0]

    assert torch.autograd.gradcheck(gradient, (soft,))


def test_the_network_names_its_table_and_is_cut_at_the_mean():
    net = catalogue.build("transformer", (5,), 4, vocabulary=9)
    assert net.embeddings == {"body.words.weight"}
    assert (net.feature_dim, net.last_layer) == (64, "head")
