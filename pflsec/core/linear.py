"""What gradients of a biased linear layer say of what the layer read."""

from torch import Tensor


def single_input(weight: Tensor, bias: Tensor) -> Tensor:
    """Return what a layer read in one pass of one input, [n], from its gradients dW [m, n] and db [m], which is not zero.

    All rows are dW_j = db_j x; of all means of what they say this is the one that noise disturbs least.
    """
    return weight.T @ bias / bias.square().sum()
