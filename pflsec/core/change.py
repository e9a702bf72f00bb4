"""The change in a message: what a defense on the uplink acts on, by kinds of the wire contract and never by names.

Weights count from what was sent down, or where that holds none, from where local work begins: a reference that both ends
have. What is a difference or a vector by itself (deltas, control variates, gradients, prototypes, logits, statistics)
counts from zero. Counts, label sets, masks and scalars are no vectors: no defense touches them.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pflsec.core.algorithm import Algorithm
from pflsec.core.contract import Contract, kind_of
from pflsec.core.items import Items

FROM_ZERO = ("weights-delta", "gradient", "control variate", "prototypes", "logits", "statistics", "generator")
DELTAS = ("weights-delta", "gradient", "control variate")  # without a shape: of the network's parameters
UNTOUCHED = ("counts", "label set", "mask", "scalar")


def reference(contract: Contract, message: Mapping[str, Tensor], down: Items, start: Items) -> Items:
    """Return the tensor from which each item of an upload counts; items that no defense touches have none.

    start  the parameters with which local work begins (Algorithm.start)
    """
    declared, found = contract.items("up"), {}
    for name, value in message.items():
        kind = kind_of(declared[name]) if name in declared else "scalar"
        if kind in UNTOUCHED or not value.is_floating_point():
            continue
        held = None if kind in FROM_ZERO else down.get(name, start.get(name))
        found[name] = held if held is not None and held.shape == value.shape else torch.zeros_like(value)
    return found


def origin(algorithm: Algorithm[Any], state: Items, down: Items, up: Mapping[str, Tensor]) -> Items:
    """Return what the items of a method's upload count from, given the client's private items and its downlink."""
    return reference(algorithm.contract, up, down, algorithm.start(state, down))


def change(message: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> Items:
    """Return message - reference for the items that have a reference."""
    return {name: message[name] - start for name, start in reference.items()}


def moved(message: Items, reference: Items, by: Mapping[str, Tensor]) -> Items:
    """Return the message with these changes in place of its own."""
    return message | {name: reference[name] + step for name, step in by.items()}


def increments(algorithm: Algorithm[Any]) -> frozenset[str]:
    """Return the items of an upload whose change is this round's work alone, so that changes of several rounds add up: deltas,
    gradients and control variates of the network's parameters; and weights that are always sent down, where work begins there.

    What a client trains further itself (start is its own) is in its next message anyway, and means (prototypes, logits,
    statistics) are made anew.
    """
    contract, begun = algorithm.contract, set[str]()
    if algorithm.starts_at_downlink:
        begun = {name for key in contract.down if not key.endswith("?") for name in contract.names(key)}
    declared = contract.items("up")
    return frozenset(n for n, text in declared.items() if text in DELTAS or (kind_of(text) == "weights" and n in begun))


def untouched(contract: Contract) -> list[str]:
    """Return the declared items of an upload that no defense on the uplink touches."""
    return [key.rstrip("?") for key, text in contract.up.items() if kind_of(text) in UNTOUCHED]
