"""pflsec: what federated learning methods achieve, and what their messages give away.

    run = pflsec.train(algo="fedrep", rounds=10)
    scores = pflsec.attack(run, "dlg")
    pflsec.report([run])

Importing this package imports no torch; the functions below do, when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pflsec.api import Found, Run, Scores, attack, attack_update, load_run, report, resume, train

__version__ = "0.1.0"
__all__ = [
    "Found", "Run", "Scores", "__version__", "attack", "attack_update", "load_run", "report", "resume", "train",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("pflsec.api"), name)
    raise AttributeError(f"module 'pflsec' has no attribute '{name}'")
