"""How long an attack will take, timed over a few iterations on a capture of a training that has not begun."""

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pflsec.config.attack import AttackConfig, make_attack
from pflsec.core.config import Config, build
from pflsec.core.vault import VaultWriter
from pflsec.runtime import manifest
from pflsec.runtime.folder import RunFolder
from pflsec.runtime.recorder import Recorder
from pflsec.runtime.rounds import Federated
from pflsec.runtime.setup import Setup
from pflsec.session.run import AttackSession
from pflsec.wire.store import CaptureStore

SHARE = 0.005
"""Of an attack's iterations, this share is timed (one at least), and twice as many: the difference is their work alone."""
WORK = ("iterations", "rescue")
"""Settings that say how much an attack searches."""
EVERYTHING = {"rounds": None, "clients": None, "lpips": "none", "lpips_weights": None}


def seconds_per_victim(setup: Setup, name: str, options: Mapping[str, Any]) -> float | None:
    """Return about how long an attack works on one probe if it makes all its iterations: what converges early is quicker. None
    where it is on real uploads, which only a training makes."""
    config = build(AttackConfig, options, "attack").model_copy(update=EVERYTHING)
    if config.kind != "probe":
        return None
    full = make_attack(name, config).cfg
    with tempfile.TemporaryDirectory(prefix="pflsec-") as place:
        folder = _probed(setup, Path(place))
        iterations = getattr(full, "iterations", None) or 1
        least = max(1, round(SHARE * iterations))
        sizes = (least, least, 2 * least)  # the first trial warms up: it imports what it needs
        _, once, twice = (_timed(folder, name, config, full, n / iterations) for n in sizes)
    if not hasattr(full, "iterations"):
        return min(once, twice)
    whole = max(0.0, twice - once) * iterations / least
    return min(once, max(0.0, 2 * once - twice)) + whole * (getattr(full, "restarts", None) or 1)


def _probed(setup: Setup, place: Path) -> RunFolder:
    """Return a run folder with one probe of the first round, and nothing trained."""
    wanted = {"capture_rounds": "first", "capture_clients": "0", "victims": 1, "kind": "probe"}
    small = replace(setup, config=setup.config.model_copy(update=wanted))
    folder = RunFolder.create(place, "timed")
    folder.write_manifest(manifest.describe(small, "timed"))
    federated = Federated(small)
    recorder = Recorder(small, CaptureStore(folder.captures), VaultWriter(folder.vault))
    recorder.write_pool()
    recorder.probes(federated.state(), federated.ledger)
    return folder


def _timed(folder: RunFolder, name: str, config: AttackConfig, full: Config, share: float) -> float:
    """Return the seconds of one attempt with this share of the full work; of several, where the attack sets their number."""
    cut = {k: max(1, round(share * n)) for k in WORK if (n := getattr(full, k, None))}
    once = {"restarts": 1} if getattr(full, "restarts", None) else {}
    rest = {k: v for k, v in config.settings.items() if k not in ("restarts", *WORK)}
    less = {"iterations": None, "restarts": None, "settings": rest | cut | once}
    return AttackSession(folder, config.model_copy(update=less)).trial(name).seconds
