"""What the gradient of a table of embeddings says about the words of a batch: a row moves if and only if its word is there."""

import torch
from torch import Tensor

from pflsec.core.errors import NotApplicable
from pflsec.core.inputs import PAD
from pflsec.core.items import cast
from pflsec.wire.capture import Capture


def only_texts(cap: Capture) -> None:
    """Raise NotApplicable where the inputs are no texts, or nothing that is sent depends on the data."""
    if not cap.target:
        raise NotApplicable("nothing that the client sends depends on its data")
    if cap.input.vocabulary is None:
        raise NotApplicable("the inputs are images, and this attack searches for words")


def find_table(cap: Capture) -> Tensor | None:
    """Return what the upload says about the table of embeddings, float64 [vocabulary, dim], or None if that is not sent."""
    for table in sorted(cap.net.embeddings):
        for name, change in cap.target.items():
            if (name == table or name.endswith(f".{table}")) and tuple(change.shape) == tuple(cap.net.shapes[table]):
                return change
    return None


def table_gradient(cap: Capture) -> Tensor:
    """Return the same for attacks that need it. Raises NotApplicable where the inputs are no texts, nothing that is sent
    depends on the data, or no table is sent."""
    only_texts(cap)
    if (found := find_table(cap)) is None:
        raise NotApplicable("no gradient of a table of word embeddings is on the wire")
    return found


def reads_order(cap: Capture) -> bool:
    """Return whether the network's features depend on the order of a text's words."""
    items, rng = cast(cap.net.fresh("order"), torch.float64), torch.Generator().manual_seed(0)
    text = cap.input.noise(1, rng, torch.float64)
    return not torch.allclose(cap.net.features(items, text), cap.net.features(items, text.flip(1)))


def moved_words(cap: Capture, gradient: Tensor) -> Tensor:
    """Return the words whose rows are not zero, int64 [k], sorted; the largest rows where there are more than the batch has
    room for, as where noise was added. Raises NotApplicable where no row has moved."""
    size = gradient.norm(dim=1)
    size[PAD] = 0
    room = min(cap.count * cap.input.shape[0], len(size))
    found = size.topk(room).indices
    found = found[size[found] > 0].sort().values
    if not len(found):
        raise NotApplicable("no row of the table of word embeddings has moved")
    return found
