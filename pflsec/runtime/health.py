"""What shows early that a run goes wrong: how long its state variables are, and whether local training moves anything."""

import math
import warnings
from collections.abc import Iterable, Sequence

import torch

from pflsec.core.errors import PflsecWarning
from pflsec.core.items import Items, floating
from pflsec.core.network import Net, buffer_in


def norms(items: Items) -> dict[str, float]:
    """Return the Euclidean norm of each part of the items; a part is what a name begins with: body, head, control."""
    found: dict[str, float] = {}
    for name, value in floating(items).items():
        part = name.partition(".")[0]
        found[part] = math.hypot(found.get(part, 0.0), float(torch.linalg.vector_norm(value, dtype=torch.float64)))
    return found


def state_norms(server: Items, states: Sequence[Items]) -> dict[str, dict[str, float]]:
    """Return the norms of the server's parts, and the means over clients of those of their states."""
    held = [norms(state) for state in states]
    parts = dict.fromkeys(part for one in held for part in one)
    return {"server": norms(server), "clients": {p: sum(one.get(p, 0.0) for one in held) / len(held) for p in parts}}


def warn_if_still(net: Net, t: int, lr: float, models: Iterable[tuple[Items, Items]]) -> None:
    """Warn where no weight differs in any of the clients' models (before training, after it), to the last bit.

    Running statistics do not count: they follow the data without any training.
    """
    for before, after in models:
        weights = [k for k in net.shapes if k in before and k in after and not buffer_in(net, k)]
        if not all(torch.equal(before[k], after[k]) for k in weights):
            return
    warnings.warn(
        f"round {t}: local training changed no weight of any client. Raise --lr (now {lr:g}), or look for a gradient "
        "that is zero.",
        PflsecWarning,
        stacklevel=2,
    )
