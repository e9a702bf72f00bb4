"""Looks at runs in a process that has not trained them: `python -m tests.cases.reload FOLDER KEY ...` prints JSON."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pflsec.core.streams import seed_from
from pflsec.runtime import checkpoint, evaluate
from pflsec.runtime.executor import Serial
from pflsec.runtime.folder import RunFolder
from pflsec.runtime.rounds import Federated
from pflsec.runtime.setup import Setup
from tests import toys


def made(key: str) -> Setup:
    """Return the setup that is looked at; the same in both processes."""
    return toys.setup(key, rounds=4, participation=0.5)


def look(setup: Setup, federated: Federated) -> dict[str, Any]:
    """Return every client's accuracy, the global model's, and what stands for all bits of the server and of the clients."""
    personal, _, common = evaluate.everybody(setup, Serial(setup), federated.server, federated.states, {}, federated.t)
    bits: Mapping[str, int] = {str(c): seed_from(state) for c, state in federated.states.items()}
    return {"personal": personal, "global": common, "server": seed_from(federated.server), "clients": bits}


def main(folder: Path, keys: list[str]) -> None:
    """Print {key: look} of the checkpoints in folder/key."""
    torch.set_num_threads(1)
    found = {}
    for key in keys:
        setup = made(key)
        federated, state = Federated(setup), checkpoint.newest(RunFolder(folder / key))
        assert state is not None
        federated.restore(state)
        found[key] = look(setup, federated)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
