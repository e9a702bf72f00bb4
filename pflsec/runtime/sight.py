"""What clients get to see of each other: found by looking for an upload in another client's next downlink, item by item.

No method is asked. Either an upload stands there as it was sent, or the next downlink is the mean of the cohort's uploads.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pflsec.core.contract import Contract, kind_of
from pflsec.core.items import Items, cast, combine, floating, weighted_mean
from pflsec.runtime.replay import relative_distance

MEAN_REST = 1e-4
"""Relative distance up to which a downlink is the mean of the uploads: what rounding in float32 leaves."""
PASSENGERS = ("statistics", "counts", "scalar", "mask")
"""Kinds of items that an upload can do without and still be attacked."""


@dataclass(frozen=True)
class Shown:
    """What one client sees of an exchange, as items of the upload; empty with `why` where it sees nothing to work on."""

    items: Items = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)


def unseen(why: str) -> Shown:
    """Return that nothing is seen, with the reason."""
    return Shown(facts={"why": why})


def forwards(contract: Contract) -> bool:
    """Return whether a client may receive single uploads of others: its downlink holds items of several clients."""
    sent: dict[str, int] = {}
    for text in contract.items("up").values():
        sent[kind_of(text)] = max(sent.get(kind_of(text), 0), text.count(","))
    received = [(kind_of(text), text.count(",")) for text in contract.items("down").values()]
    return any(kind in ("weights", "prototypes") and commas > sent.get(kind, commas) for kind, commas in received)


def forwarded(contract: Contract, up: Items, down: Items, sight: Items, own: Items, after: Items, to: int) -> Shown:
    """Return what client `to` sees of one upload.

    up, down     the victim's messages         after  the next downlink of `to`
    sight, own   the downlink of `to` in the victim's round, and its private items: whether it knows what the victim received
    """
    found = {k: row for k, v in floating(up).items() if (row := _find(k, v, after)) is not None}
    held = {k: v for k, v in up.items() if not v.is_floating_point() and _same(v, after.get(k))}
    kinds = contract.items("up")
    if missing := [k for k in up if k not in found | held and kind_of(kinds[k]) not in PASSENGERS]:
        return unseen(f"of the upload, {missing[0]} stands in no other client's next downlink")
    rows = sight | own
    if unknown := [k for k, v in floating(down).items() if v.dim() and not _all_in(k, v, rows)]:
        return unseen(f"client {to} does not know what the victim received: {unknown[0]}")
    return Shown(found | held, {"how": "forwarded", "to": to})


def averaged(
    ups: Mapping[int, Items], downs: Mapping[int, Items], sizes: Mapping[int, int], after: Items, to: int
) -> Shown:
    """Return what client `to` of the cohort sees of all uploads: their mean, as its next downlink.

    downs, sizes  what all clients of the cohort received, and how many rows each has
    """
    if any(not _same(v, downs[c].get(k)) for c in ups for k, v in floating(downs[to]).items()):
        return unseen(f"client {to} does not know what the others received")
    needed = {k for up in ups.values() for k, v in floating(up).items() if v.dim()}
    if missing := sorted(needed - after.keys()):
        return unseen(f"{missing[0]} is not in the next downlink, which others receive")
    if any(not needed <= up.keys() or any(up[k].shape != after[k].shape for k in needed) for up in ups.values()):
        return unseen("the next downlink is no mean of the uploads, which are not alike")
    seen = {k: after[k] for k in sorted(needed)}
    for weights in ({c: sizes[c] for c in ups}, dict.fromkeys(ups, 1)):
        mean = weighted_mean([cast({k: up[k] for k in seen}, torch.float64) for up in ups.values()], weights.values())
        if seen and relative_distance(seen, mean) <= MEAN_REST:
            return Shown(seen, {"how": "mean", "to": to, "weights": {str(c): w for c, w in weights.items()}})
    return unseen("the next downlink is no mean of the uploads")


def _find(name: str, value: Tensor, items: Items) -> Tensor | None:
    """Return where an item of an upload stands in a downlink: whole, or as one row of an item of this name."""
    for key, there in items.items():
        if key != name and not key.endswith(f".{name}"):
            continue
        if _same(there, value):
            return there
        if there.shape[1:] == value.shape:
            for row in there:
                if torch.equal(row, value):
                    return row.clone()
    return None


def _all_in(name: str, value: Tensor, items: Items) -> bool:
    """Return whether an item, or each of its rows, stands among these items under this name or the end of it."""
    tail = name.partition(".")[2]
    places = [v for k, v in items.items() if k in (name, tail)]
    if any(_same(value, place) for place in places):
        return True
    return all(any(_same(row, p) or _row_of(row, p) for p in places) for row in value)


def _row_of(row: Tensor, table: Tensor) -> bool:
    return table.shape[1:] == row.shape and any(torch.equal(row, other) for other in table)


def _same(a: Tensor, b: Tensor | None) -> bool:
    return b is not None and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def without(total: Items, share: Items, everything: float, own: float) -> Items:
    """Return the mean over the others: what is left of a mean when one client's own share is taken away, float64."""
    return combine(
        lambda t, s: (everything * t.double() - own * s.double()) / (everything - own),
        total,
        {k: share[k] for k in total},
    )
