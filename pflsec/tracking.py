"""Following a training with TensorBoard or MLflow (`--track`). Both are optional packages.

Each round's metrics, the configuration and the final state go to tracking/ in the run's folder; MLflow's go to the server of
MLFLOW_TRACKING_URI instead where that is set. Nothing else leaves the machine: MLflow's telemetry is switched off.
A tracker that fails in mid-training is dropped with a warning: metrics.jsonl has everything.
"""

import importlib.util
import json
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from pflsec.core.errors import ConfigError, PflsecWarning, RunError
from pflsec.core.files import disk_errors, plain, read_json, write_json

METRICS = {
    "accuracy/mean": "personal_accuracy_mean",
    "accuracy/std": "personal_accuracy_std",
    "accuracy/worst10": "personal_accuracy_worst10",
    "accuracy/global": "global_accuracy",
    "loss/train": "train_loss",
    "bytes/up": "bytes_up",
    "bytes/down": "bytes_down",
    "privacy/epsilon": "epsilon",
    "seconds": "seconds",
}
"""What is tracked of a round's metrics, by the name under which it is; what a round does not have is left out."""
MLFLOW_STATES = {"done": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}


class Tracker(Protocol):
    """Follows one run, perhaps over several processes."""

    def round(self, t: int, values: Mapping[str, float]) -> None:
        """Take note of a round's values."""
        ...

    def end(self, state: str) -> None:
        """Take note of how the training ended: done, failed or interrupted."""
        ...


class TensorBoard:
    """Scalars, the configuration as hyper-parameters, and the state as text. Rounds that are played again replace themselves."""

    package, module = "tensorboard", "tensorboard"
    remedy = "Mend that, or leave it out"

    def __init__(self, folder: Path, name: str, params: Mapping[str, str]):
        self.folder, self.params, self.last = folder / "tensorboard", params, 0
        self._writer: Any = None

    def _open(self, t: int) -> Any:
        """Return the writer; events from round t on, of a process that was killed, count no more."""
        if self._writer is None:
            from torch.utils.tensorboard.summary import hparams
            from torch.utils.tensorboard.writer import SummaryWriter

            self._writer = SummaryWriter(str(self.folder), purge_step=t or None)
            for summary in hparams(dict(self.params), {}) if t == 0 else ():
                self._writer.file_writer.add_summary(summary)
        return self._writer

    def round(self, t: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._open(t).add_scalar(name, value, t)
        self._open(t).flush()
        self.last = t

    def end(self, state: str) -> None:
        if self._writer is not None:
            self._writer.add_text("state", state, self.last)
            self._writer.close()


class MLflow:
    """One run of the experiment `pflsec`. A resumed training goes on with it, from the first round that it does not have."""

    package, module = "mlflow-skinny", "mlflow"
    remedy = "Check MLFLOW_TRACKING_URI, or leave it out"

    def __init__(self, folder: Path, name: str, params: Mapping[str, str]):
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # the one local store of the light package
        uri = os.environ.get("MLFLOW_TRACKING_URI") or (folder / "mlflow").absolute().as_uri()
        self.client = import_module("mlflow.tracking").MlflowClient(tracking_uri=uri)
        note = folder / "mlflow.json"
        known = read_json(note, "the note of the MLflow run") if note.exists() else {}
        self.known = -1
        if known.get("uri") == uri:
            self.run = str(known["run"])
            self.client.update_run(self.run, status="RUNNING")
            self.known = max((m.step for m in self.client.get_metric_history(self.run, "seconds")), default=-1)
            return
        experiment = self.client.get_experiment_by_name("pflsec")
        where = experiment.experiment_id if experiment else self.client.create_experiment("pflsec")
        self.run = self.client.create_run(where, run_name=name).info.run_id
        for key, value in params.items():
            self.client.log_param(self.run, key, value)
        write_json(note, {"uri": uri, "run": self.run})

    def round(self, t: int, values: Mapping[str, float]) -> None:
        for name, value in values.items() if t > self.known else ():
            self.client.log_metric(self.run, name, value, step=t)

    def end(self, state: str) -> None:
        self.client.set_tag(self.run, "state", state)
        self.client.set_terminated(self.run, MLFLOW_STATES[state])


TRACKERS: dict[str, type[TensorBoard] | type[MLflow]] = {"tensorboard": TensorBoard, "mlflow": MLflow}


def require(names: Sequence[str]) -> None:
    """Raise ConfigError unless the packages of these trackers are installed."""
    for name in names:
        if importlib.util.find_spec(TRACKERS[name].module) is None:
            raise ConfigError(
                f"--track {name} needs the package {TRACKERS[name].package}, which is not installed. Install it with: "
                f"pip install 'pflsec[{name}]'"
            )


@contextmanager
def following(
    names: Sequence[str], folder: Path, config: Mapping[str, Any]
) -> Iterator[Callable[[int, Mapping[str, Any]], None]]:
    """Yield what is to be called after each round of the run in `folder`, and tell the trackers how it ended.

    Raises RunError when a tracker cannot begin, such as for a server that cannot be reached.
    """
    trackers = {name: _begun(name, folder, config) for name in names}

    def tell(call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(trackers.items()):
            try:
                call(tracker)
            except Exception as error:
                del trackers[name]
                said = f"--track {name} failed ({_line(error)}); the training goes on without it."
                warnings.warn(said, PflsecWarning, stacklevel=2)

    state = "failed"
    try:
        yield lambda t, metrics: tell(lambda tracker: tracker.round(t, tracked(metrics)))
        state = "done"
    except KeyboardInterrupt:
        state = "interrupted"
        raise
    finally:
        tell(lambda tracker: tracker.end(state))


def tracked(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers among a round's metrics, by the names under which they are tracked."""
    found = {name: metrics.get(source) for name, source in METRICS.items()}
    return {k: float(v) for k, v in found.items() if isinstance(v, int | float) and math.isfinite(v)}


def _begun(name: str, folder: Path, config: Mapping[str, Any]) -> Tracker:
    with disk_errors(folder / "tracking"):
        (folder / "tracking").mkdir(mode=0o700, exist_ok=True)
    params = {k: v if isinstance(v, str) else json.dumps(plain(v)) for k, v in config.items()}
    try:
        return TRACKERS[name](folder / "tracking", folder.name, params)
    except RunError:
        raise
    except Exception as error:
        raise RunError(f"--track {name} cannot begin: {_line(error)}. {TRACKERS[name].remedy}.") from error


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]
