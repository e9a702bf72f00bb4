"""Captures read back as untrusted: whether each is whole, makes sense, and belongs to its run."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pflsec.config.train import TrainConfig
from pflsec.core.algorithm import Algorithm
from pflsec.core.errors import RunError
from pflsec.core.inputs import InputSpec
from pflsec.core.items import first_nonfinite
from pflsec.runtime.folder import RunFolder
from pflsec.wire.capture import Record
from pflsec.wire.store import CaptureStore

YES_OR_NO = ("label set", "mask")
NUMBERS = ("counts", "scalar")


def check_inputs(folder: RunFolder, name: str, spec: InputSpec) -> None:
    """Raise RunError unless a capture has the run's inputs: looked at before a network is built for them."""
    if CaptureStore(folder.captures).input(name) != spec:
        raise _stranger(name, folder)


def read_record(
    folder: RunFolder, name: str, config: TrainConfig, spec: InputSpec, algorithm: Algorithm[Any]
) -> Record:
    """Return a capture's record. Raises PflsecError when it is missing, damaged, or another run's."""
    record, what = CaptureStore(folder.captures).read(name), f"capture '{name}'"
    if record.algorithm != config.algo:
        raise RunError(f"{what} was made by {record.algorithm}; this run trains {config.algo}.")
    _check_place(record, config, what)
    probe = record.kind == "probe"
    size = config.victim_batch if probe else record.batch
    work = (size, config.victim_steps, size) if probe else (size, config.local_epochs, config.batch_size)
    if record.input != spec or (record.batch, record.epochs, record.batch_size) != work:
        raise _stranger(name, folder)
    if not math.isclose(record.lr, config.rate(record.round), rel_tol=1e-9):
        raise RunError(
            f"{what} has the learning rate {record.lr:g}; run '{folder.path.name}' had {config.rate(record.round):g} then."
        )
    algorithm.contract.check("down", record.down, what)
    algorithm.contract.check("up", record.up, what)
    _check_values("downlink", record.down, algorithm.contract.items("down"), what)
    _check_values("uplink", record.up, algorithm.contract.items("up"), what)
    _check_memory(record, algorithm, what)
    return record


def _stranger(name: str, folder: RunFolder) -> RunError:
    return RunError(f"capture '{name}' has other inputs, batches or steps than run '{folder.path.name}' trained with.")


def _check_place(record: Record, config: TrainConfig, what: str) -> None:
    ends = {
        "round": config.rounds, "client": config.clients, "victim": config.victims if record.kind == "probe" else 1,
    }  # fmt: skip
    for name, end in ends.items():
        if (number := getattr(record, name)) >= end:
            raise RunError(f"{what} is damaged: its header has {name} {number}; the run has {name}s 0 to {end - 1}.")


def _check_values(message: str, items: Mapping[str, Tensor], declared: Mapping[str, str], what: str) -> None:
    """Raise RunError for values of another type than their kind's, and for numbers that are none."""
    for name, value in items.items():
        kind = declared[name].partition(" [")[0]
        if kind in YES_OR_NO:
            right, wanted = value.dtype == torch.bool, "yes or no"
        elif kind in NUMBERS:
            right, wanted = not value.is_complex() and value.dtype != torch.bool, "numbers"
        else:
            right, wanted = value.is_floating_point(), "floating-point numbers"
        if not right:
            raise RunError(f"{what} is damaged: '{name}' of its {message} is {value.dtype}; {kind} are {wanted}.")
    if bad := first_nonfinite(items):
        raise RunError(f"{what} is damaged: '{bad}' of its {message} holds a NaN or an infinity. No run sends any.")


def _check_memory(record: Record, algorithm: Algorithm[Any], what: str) -> None:
    if bad := first_nonfinite(record.memory):
        raise RunError(f"{what} is damaged: '{bad}' of its memory of earlier messages holds a NaN or an infinity.")
    try:
        if record.memory:
            algorithm.reconstruct_state(record.memory)
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        raise RunError(
            f"{what} is damaged: its memory of earlier messages is not {record.algorithm}'s ({error})."
        ) from error
