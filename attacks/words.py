"""What the gradient of a table of embeddings says about the words of a batch: a row moves if and only if its word is there."""

from torch import Tensor

from pflsec.core.errors import NotApplicable
from pflsec.core.inputs import PAD
from pflsec.wire.capture import Capture


def table_gradient(cap: Capture) -> Tensor:
    """Return what the upload says about the table of embeddings, float64 [vocabulary, dim].

    Raises NotApplicable where nothing that is sent depends on the data, the inputs are no texts, or no such table is sent.
    """
    if not cap.target:
        raise NotApplicable("nothing that the client sends depends on its data")
    if cap.input.vocabulary is None:
        raise NotApplicable("the inputs are images, and this attack searches for words")
    for table in sorted(cap.net.embeddings):
        for name, change in cap.target.items():
            if (name == table or name.endswith(f".{table}")) and tuple(change.shape) == tuple(cap.net.shapes[table]):
                return change
    raise NotApplicable("no gradient of a table of word embeddings is on the wire")


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
