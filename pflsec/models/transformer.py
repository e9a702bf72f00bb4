"""A small transformer encoder for texts."""

import torch
from torch import Tensor, nn

from pflsec.core.inputs import PAD

WIDTH, HEADS, HIDDEN = 64, 4, 128


class Words(nn.Embedding):
    """The embeddings of a text's words, [B, T, dim], zeros in places of padding.

    Reads tokens int64 [B, T], or soft ones [B, T, words]: the weights of the words, of which padding's is left out.
    """

    def forward(self, input: Tensor) -> Tensor:
        if input.is_floating_point():
            return input[..., PAD + 1 :] @ self.weight[PAD + 1 :]
        return super().forward(input) * (input != PAD).to(self.weight.dtype)[..., None]


class Positions(nn.Module):
    """A learned vector for each place of a text, [T, dim]."""

    def __init__(self, length: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(length, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)

    def forward(self, embedded: Tensor) -> Tensor:
        return embedded + self.weight


class Attention(nn.Module):
    """Self-attention with several heads, written out: what torch has fused has no second derivatives."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        """Return [B, T, width]; real [B, T] says how much each place counts, 0 for padding."""
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.project(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) / k.shape[-1] ** 0.5
        weights = (scores - scores.detach().amax(-1, keepdim=True)).exp() * real[:, None, None]
        shares = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
        return self.out((shares @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and two linear layers with tanh between, each added to what it read, with LayerNorm before."""

    def __init__(self, width: int, heads: int, hidden: int):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2, self.fc1, self.fc2 = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), real)
        return x + self.fc2(torch.tanh(self.fc1(self.norm2(x))))


class Transformer(nn.Module):
    """Words and positions, one block, and the mean over the places that are no padding; a text of nothing gives zeros."""

    def __init__(self, length: int, classes: int, vocabulary: int):
        super().__init__()
        self.words, self.positions = Words(vocabulary, WIDTH), Positions(length, WIDTH)
        self.block, self.fc = Block(WIDTH, HEADS, HIDDEN), nn.Linear(WIDTH, classes)

    def forward(self, x: Tensor) -> Tensor:
        embedded = self.words(x)
        soft = x.is_floating_point()
        real = x[..., PAD + 1 :].sum(-1) if soft else (x != PAD).to(embedded.dtype)
        found = self.block(self.positions(embedded), real) * real[..., None]
        return self.fc(found.sum(1) / real.sum(1).clamp(min=1)[:, None])


def transformer(shape: tuple[int, ...], classes: int, vocabulary: int) -> nn.Module:
    """One block of a transformer encoder: 64-dimensional words and learned positions, 4 heads, tanh, mean over the places.

    Source   Vaswani et al., NeurIPS 2017, arXiv 1706.03762, section 3.1, with LayerNorm before each part and no dropout.
    Input    texts
    Cut      fc: body up to the mean over the places, head the last layer
    """
    return Transformer(shape[0], classes, vocabulary)
