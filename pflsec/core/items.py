"""Items: the one currency of state, wire and checkpoint, a dict of named tensors. Every function returns a new dict."""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

Items = dict[str, Tensor]


def select(items: Mapping[str, Tensor], *parts: str) -> Items:
    """Return the items named `part` or `part.*` for any of the parts, in their order.

    >>> sorted(select({"body.w": torch.ones(1), "head.b": torch.ones(1)}, "head"))
    ['head.b']
    """
    return {k: v for k, v in items.items() if k.partition(".")[0] in parts or k in parts}


def prefixed(prefix: str, items: Mapping[str, Tensor]) -> Items:
    """Return the items under `prefix.`: {"w": t} becomes {"prefix.w": t}."""
    return {f"{prefix}.{k}": v for k, v in items.items()}


def without_prefix(prefix: str, items: Mapping[str, Tensor]) -> Items:
    """Return the items that stand under `prefix.`, with the prefix taken off."""
    start = prefix + "."
    return {k[len(start) :]: v for k, v in items.items() if k.startswith(start)}


def same_names(*many: Mapping[str, Tensor]) -> None:
    """Raise KeyError naming the items that are not in all of the given dicts."""
    everywhere = set.intersection(*(set(m) for m in many))
    odd = sorted(set().union(*many) - everywhere)
    if odd:
        raise KeyError(f"items not present on both sides: {', '.join(odd)}")


def combine(fn: Callable[..., Tensor], *many: Mapping[str, Tensor]) -> Items:
    """Return {name: fn(a[name], b[name], ...)}; the dicts must hold the same names."""
    same_names(*many)
    return {k: fn(*(m[k] for m in many)) for k in many[0]}


def subtract(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Items:
    """Return a - b, name by name."""
    return combine(torch.sub, a, b)


def squared_distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
    """Return sum over all items of |a - b|^2, 0-d. Squared: no root is taken."""
    same_names(a, b)
    return torch.stack([(a[k] - b[k]).square().sum() for k in a]).sum()


def dot(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
    """Return the inner product of all items seen as one vector, 0-d."""
    same_names(a, b)
    return torch.stack([(a[k] * b[k]).sum() for k in a]).sum()


def norm(items: Mapping[str, Tensor]) -> Tensor:
    """Return the Euclidean norm of all items as one vector, 0-d. Not squared."""
    return dot(items, items).sqrt()


def detached(items: Mapping[str, Tensor]) -> Items:
    """Return the same values cut off from any graph, without a copy."""
    return {k: v.detach() for k, v in items.items()}


def cloned(items: Mapping[str, Tensor]) -> Items:
    """Return copies that share no memory with the originals, cut off from any graph."""
    return {k: v.detach().clone() for k, v in items.items()}


def floating(items: Mapping[str, Tensor]) -> Items:
    """Return the items with a floating-point dtype."""
    return {k: v for k, v in items.items() if v.is_floating_point()}


def cast(items: Mapping[str, Tensor], dtype: torch.dtype) -> Items:
    """Return the items with every floating-point tensor in `dtype`; other dtypes are left alone."""
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in items.items()}


def arithmetic(x: Tensor) -> torch.dtype:
    """Return the dtype in which a network works on inputs x: their own, or torch's default one for token numbers."""
    return x.dtype if x.is_floating_point() else torch.get_default_dtype()


def first_unlike(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> str | None:
    """Return the name of the first item that is not the same in both, bit for bit, or that only one of them has; or None."""
    names = [*one, *(name for name in other if name not in one)]
    return next((k for k in names if k not in one or k not in other or not torch.equal(one[k], other[k])), None)


def first_nonfinite(items: Mapping[str, Tensor]) -> str | None:
    """Return the name of the first item that holds a NaN or an infinity, or None."""
    for k, v in items.items():
        # A sum is ten times faster to look at, and finite only if all of its terms are; it may overflow where they are.
        if v.is_floating_point() and not torch.isfinite(v.sum()) and not torch.isfinite(v).all():
            return k
    return None


def size_in_bytes(items: Mapping[str, Tensor]) -> int:
    """Return the payload in bytes. 0-d items ride in a message's header, with names and shapes, and are not counted."""
    return sum(v.numel() * v.element_size() for v in items.values() if v.dim())


def weighted_mean(many: Iterable[Mapping[str, Tensor]], weights: Iterable[float]) -> Items:
    """Return sum_i w_i x_i / sum_i w_i for each name, accumulated in the given order in the items' own dtype.

    Raises ValueError when the weights do not sum to a positive number.
    """
    many, weights = list(many), [float(w) for w in weights]
    total = sum(weights)
    if not total > 0:
        raise ValueError(f"the weights of a mean sum to {total}; they must sum to a positive number")
    same_names(*many)
    mean = {k: v * (weights[0] / total) for k, v in many[0].items()}
    for items, weight in zip(many[1:], weights[1:], strict=True):
        for k, v in items.items():
            mean[k].add_(v, alpha=weight / total)
    return mean


def repeated(items: Mapping[str, Tensor], count: int) -> Items:
    """Return so many copies of every item in one, [count, ...]: a table with a row for each client, say."""
    return {k: v.expand(count, *v.shape).clone() for k, v in items.items()}


def with_rows(table: Mapping[str, Tensor], rows: Mapping[int, Mapping[str, Tensor]]) -> Items:
    """Return a table of items, [count, ...] each, with these of its rows replaced; at least one."""
    who = torch.tensor(list(rows))
    latest = combine(lambda *many: torch.stack(many), *rows.values())
    return combine(lambda old, new: old.index_copy(0, who, new), table, latest)
