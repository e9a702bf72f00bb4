"""A bag of embeddings."""

from collections import OrderedDict

from torch import Tensor, nn

from pflsec.core.inputs import PAD

WIDTH = 64


class Bag(nn.Embedding):
    """The mean of the embeddings of a text's words, [B, dim]; padding counts for nothing, and a text of nothing gives zeros.

    Reads tokens int64 [B, T], or soft ones [B, T, words]: their weights of the words, of which padding's is left out.
    """

    def forward(self, input: Tensor) -> Tensor:
        if input.is_floating_point():
            weights = input.clone()
            weights[..., PAD] = 0
            return (weights.sum(1) @ self.weight) / weights.sum((1, 2)).clamp(min=1)[:, None]
        real = (input != PAD).to(self.weight.dtype)
        total = (super().forward(input) * real[..., None]).sum(1)
        return total / real.sum(1).clamp(min=1)[:, None]


def bag(shape: tuple[int, ...], classes: int, vocabulary: int) -> nn.Module:
    """Mean of 64-dimensional word embeddings, and one linear layer: fastText without n-grams.

    Source   Joulin et al., EACL 2017, arXiv 1607.01759.
    Input    texts
    Cut      fc: body up to the mean embedding, head the last layer
    """
    return nn.Sequential(OrderedDict(words=Bag(vocabulary, WIDTH), fc=nn.Linear(WIDTH, classes)))
