"""Which reconstruction belongs to which true image: one assignment, for every metric and for the labels."""

import numpy as np

from pflsec.leakage.images import Image, as_array


def assign(truth: Image, rec: Image) -> np.ndarray:
    """Return, for each true image, the index of its reconstruction, or -1 for none: int64 [B].

    truth [B, ...] and rec [R, ...] hold images of one shape. No reconstruction serves twice: the assignment
    minimises the total MSE (Hungarian method, scipy's `linear_sum_assignment`). With R < B, B - R truths stay
    unmatched; with R > B the surplus is ignored. Raises ValueError when shapes differ or a value is not
    finite.
    """
    from scipy.optimize import linear_sum_assignment

    a, b = as_array(truth), as_array(rec)
    if a.shape[1:] != b.shape[1:]:
        raise ValueError(f"images of one shape are needed; got {a.shape[1:]} and {b.shape[1:]}")
    matched = np.full(len(a), -1, dtype=np.int64)
    if len(a) and len(b):
        # Plain differences: expanding the square would leave rounding where equal images must cost exactly 0.
        cost = np.stack([((b - image) ** 2).reshape(len(b), -1).mean(axis=1) for image in a])
        rows, columns = linear_sum_assignment(cost)
        matched[rows] = columns
    return matched
