"""What an adversary is given of the captured exchanges: single uploads, what a client sees in its downlink, or a sum.

A sum over clients is a capture like any other: one batch that is the union of theirs, one replay that is the weighted mean of
theirs, and as private items those of all, each under its client's prefix.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pflsec.core.errors import NotApplicable
from pflsec.core.items import Items, cast, detached, floating, prefixed, weighted_mean, without_prefix
from pflsec.core.knowledge import Knows, ThreatModel
from pflsec.runtime import sight
from pflsec.runtime.replay import relative_distance
from pflsec.wire.capture import MOST_STEPS, Capture, Record

NOT_LINEAR = 1e-6
"""Relative distance beyond which what the uploads say is not a function of their sum."""

Make = Callable[[Record], Capture]
"""(record) -> the capture of that exchange alone, with what the threat model grants."""


@dataclass(frozen=True)
class Member:
    """One client's exchange in a sum."""

    capture: Capture
    weight: float
    """Its part in the mean gradient: all of them sum to 1."""

    @property
    def prefix(self) -> str:
        """What its client's private items stand under."""
        return prefix(self.capture.record.client)


def prefix(client: int) -> str:
    """Return what a client's private items stand under in a sum over several."""
    return f"c{client}"


def groups(threat: ThreatModel, headers: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return which captures are attacked together: one by one, or all that the adversary sees as one sum, in the given order.

    headers  {capture id: its header}. Another client's own upload stands alone: it is no victim of its own.
    """
    found: dict[tuple[Any, ...], list[str]] = {}
    for name, header in headers.items():
        key: tuple[Any, ...] = (name,)
        shown = header["facts"].get("shown", {})
        if threat.adversary not in ("client", "server-secagg") or Knows.UPLINK in threat.knows:
            pass
        elif threat.adversary == "server-secagg":
            key = header["kind"], header["round"], header["victim"]
        elif shown.get("how") == "mean" and header["client"] != shown["to"]:
            key = header["kind"], header["round"]
        found.setdefault(key, []).append(name)
    return [tuple(names) for names in found.values()]


def own_client(threat: ThreatModel, record: Record) -> int | None:
    """Return which client of the cohort the adversary is, where what it sees is a mean with its own share in it."""
    shown = record.facts.get("shown", {})
    sees_means = threat.adversary == "client" and Knows.UPLINK not in threat.knows and shown.get("how") == "mean"
    return int(shown["to"]) if sees_means else None


def own_upload(record: Record, client: int) -> str:
    """Return the id of the capture of a client's upload in the round of another capture."""
    return f"r{record.round:03d}-c{client:02d}-v0-{record.kind}"


def seen(threat: ThreatModel, records: Sequence[Record], own: Record | None, make: Make) -> tuple[Capture, str]:
    """Return what the adversary is given of these exchanges, and a sentence on it for the results' rows.

    own  the adversary's own exchange in that round, where it is a client of the cohort and its upload was captured
    Raises NotApplicable where it sees nothing to work on.
    """
    first = records[0]
    if threat.adversary not in ("client", "server-secagg") or Knows.UPLINK in threat.knows:
        return make(first), ""
    who = ", ".join(str(r.client) for r in records)
    if threat.adversary == "server-secagg":
        _whole_cohort(records)
        if len(records) == 1:
            return make(first), f"the sum over client {who} alone"
        weights = [_weight(r) for r in records]
        up = _mean([(_summable(r.up), w) for r, w in zip(records, weights, strict=True)]) | _counts(records)
        return _sum(records, weights, up, make), f"the sum over clients {who}"
    shown = first.facts.get("shown")
    if shown is None:
        raise NotApplicable("the run did not record what other clients see; train it again")
    if shown.get("how") == "forwarded":
        return make(replace(first, up=first.shown)), f"client {shown['to']} receives this upload in its next downlink"
    if shown.get("how") != "mean":
        raise NotApplicable(f"another client does not see this upload: {shown.get('why', 'nothing is recorded')}")
    return _others(records, own, shown, make)


def _others(records: Sequence[Record], own: Record | None, shown: Mapping[str, Any], make: Make) -> tuple[Capture, str]:
    """Return the cohort without the adversary, as the change of the global model shows it."""
    to, shares = int(shown["to"]), {int(c): float(w) for c, w in shown["weights"].items()}
    if records[0].client == to:
        raise NotApplicable(f"client {to} is the adversary here, and its own upload no secret")
    missing = sorted(shares.keys() - {r.client for r in records} - {to})
    if missing or own is None:
        raise NotApplicable(
            f"the global model shows the sum over {len(shares)} clients, of which client {(missing or [to])[0]} is not among "
            "those attacked; capture the real uploads of all of them (--capture-clients), and leave --clients out"
        )
    up = sight.without(records[0].shown, own.up, sum(shares.values()), shares[to])
    who = ", ".join(str(r.client) for r in records)
    note = f"client {to} sees the sum over clients {who}"
    if len(records) == 1:
        return make(replace(records[0], up=up)), note
    return _sum(records, [shares[r.client] for r in records], up, make), note


def _whole_cohort(records: Sequence[Record]) -> None:
    """Refuse a part of a round's real uploads: their server sees the sum over all of them, and probes have no other cohort."""
    cohort = records[0].facts.get("cohort") if records[0].kind == "update" else [r.client for r in records]
    if cohort is None:
        raise NotApplicable("the run did not record who took part in the round; train it again")
    if missing := sorted(set(cohort) - {r.client for r in records}):
        raise NotApplicable(
            f"the sum is over {len(cohort)} clients, of which client {missing[0]} is not among those attacked; capture all of "
            "them (--capture-clients), and leave --clients out"
        )


def _weight(record: Record) -> float:
    """Return a client's weight in the sum: its number of samples where it sends that."""
    return float(record.up.get("num_samples", 1))


def _summable(up: Items) -> Items:
    """Return the items of an upload of which there is a sum, float64."""
    for name, value in up.items():
        if value.dtype == torch.bool:
            raise NotApplicable(f"the upload has {name}, a set, of which secure aggregation makes no sum")
    return cast(floating(up), torch.float64)


def _counts(records: Sequence[Record]) -> Items:
    """Return the sums of the integers in the uploads: numbers of samples."""
    return {
        k: torch.stack([r.up[k] for r in records]).sum(0) for k, v in records[0].up.items() if not v.is_floating_point()
    }


def _sum(records: Sequence[Record], weights: Sequence[float], up: Items, make: Make) -> Capture:
    """Return the capture of a weighted sum of uploads.

    up  their weighted mean: nothing else of what was sent reaches the capture
    Work of many steps moves a model further: in the mean gradient a client counts by its weight times its steps.
    """
    if (steps := sum(r.steps for r in records)) > MOST_STEPS:
        raise NotApplicable(
            f"the sum is over {len(records)} clients with {steps} local steps in all; unrolling stops at {MOST_STEPS}"
        )
    moves = [w * r.steps for w, r in zip(weights, records, strict=True)]
    shares = [move / sum(moves) for move in moves]
    several = {"summed": len(records)}  # what can be read off one client's upload, such as its noise, stands in no sum
    parts = [replace(r, up=up, facts={**r.facts, **several}) for r in records]
    joined = [Member(make(part), s) for part, s in zip(parts, shares, strict=True)]
    exact = _mean([(_summable(r.up), w) for r, w in zip(records, weights, strict=True)])
    singly, summed = (
        _mean([(make(replace(r, up=r.up | part)).target, s) for r, s in zip(records, shares, strict=True)])
        for part in ({}, exact)
    )
    if not relative_distance(singly, summed) <= NOT_LINEAR:
        raise NotApplicable("what the uploads say about the data is no function of their sum")
    return _joined(joined, up)


def _mean(many: Sequence[tuple[Items, float]]) -> Items:
    try:
        return weighted_mean([items for items, _ in many], [share for _, share in many])
    except (KeyError, RuntimeError):
        raise NotApplicable("the uploads do not fit each other, so there is no sum of what they say") from None


def _joined(members: Sequence[Member], up: Items) -> Capture:
    """Return one capture for all members."""
    captures, records = [m.capture for m in members], [m.capture.record for m in members]
    record = replace(
        records[0],
        id="+".join(r.id for r in records),
        up=up,
        memory={},
        shown={},
        batch=sum(r.batch for r in records),
        batch_size=sum(min(r.batch_size, r.batch) for r in records),
    )
    cohort = _Cohort(members)
    return replace(
        captures[0],
        record=record,
        target=detached(_mean([(m.capture.target, m.weight) for m in members])),
        known=_known(members),
        labels=_together([c.labels for c in captures], torch.cat),
        counts=_together([c.counts for c in captures], lambda many: torch.stack(many).sum(0)),
        state=joined_state({c.record.client: c.state for c in captures}),
        begin_fn=cohort.begin,
        replay_fn=cohort.replay,
        newcomer_fn=cohort.newcomer,
        pullback_fn=cohort.pullback,
    )


@dataclass(frozen=True)
class _Cohort:
    """What a capture of a sum asks of its clients (see Capture for each): their batches lie one after the other in x and y."""

    members: Sequence[Member]

    def begin(self, state: Items) -> Items:
        found = [m.capture.begin_fn(own) for m, own in zip(self.members, self._each(state), strict=True)]
        if any(relative_distance(other, found[0]) for other in found[1:]):
            raise NotApplicable("the clients of the sum do not begin at one model")
        return found[0]

    def replay(self, x: Tensor, y: Tensor, state: Items) -> Items:
        parts = zip(self.members, self._split(x), self._split(y), self._each(state), strict=True)
        return _mean_graph([(m.capture.replay(xs, ys, own), m.weight) for m, xs, ys, own in parts])

    def newcomer(self, rng: torch.Generator) -> Items:
        return {k: v for m in self.members for k, v in prefixed(m.prefix, m.capture.newcomer(rng)).items()}

    def pullback(self, x: Tensor, u: Tensor) -> Items:
        parts = zip(self.members, self._split(x), self._split(u), strict=True)
        return _mean_graph([(m.capture.pullback(xs, us), 1.0) for m, xs, us in parts])

    def _each(self, state: Items) -> list[Items]:
        return [without_prefix(m.prefix, state) for m in self.members]

    def _split(self, rows: Tensor) -> tuple[Tensor, ...]:
        return rows.split([m.capture.record.batch for m in self.members])


def joined_state(states: Mapping[int, Items | None]) -> Items | None:
    """Return the private items of several clients in one, or None unless those of all are given."""
    found: Items = {}
    for client, state in states.items():
        if state is None:
            return None
        found |= prefixed(prefix(client), state)
    return found


def _known(joined: Sequence[Member]) -> Items | None:
    known = {k: v for m in joined for k, v in prefixed(m.prefix, m.capture.known or {}).items()}
    return known if known or all(m.capture.known is not None for m in joined) else None


def _together(values: Sequence[Tensor | None], how: Callable[[list[Tensor]], Tensor]) -> Tensor | None:
    given = [v for v in values if v is not None]
    return how(given) if len(given) == len(values) else None


def _mean_graph(many: Sequence[tuple[Items, float]]) -> Items:
    """Return the weighted sum of items, differentiable in all of them."""
    names = many[0][0].keys()
    return {k: torch.stack([weight * items[k] for items, weight in many]).sum(0) for k in names}
