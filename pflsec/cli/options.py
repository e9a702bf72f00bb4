"""Options of a training that several commands take."""

from typing import Annotated, Any

import typer

from pflsec.core.errors import ConfigError
from pflsec.core.registry import settings_of

EXECUTORS = ("auto", "serial", "processes", "ray")


def option(name: str, help: str, *flags: str) -> Any:
    """Return a typer option whose help ends with the configuration's default, read from its source: help needs no pydantic."""
    default = next(s.default for s in settings_of("pflsec.config.train", "TrainConfig") if s.name == name)
    shown = "none" if default == "None" else default
    return typer.Option(
        *(flags or (f"--{name.replace('_', '-')}",)), help=f"{help} [default: {shown}]", show_default=False
    )


def check_executor(name: str) -> None:
    """Raise ConfigError for an executor that does not exist."""
    if name not in EXECUTORS:
        raise ConfigError(f"--executor {name} is not known; use {', '.join(EXECUTORS)}.")


Data = Annotated[
    str | None, option("data", "Dataset: a name, npz:PATH (images, labels), pfllib:PATH or text:PATH (CSV).")
]
Download = Annotated[bool | None, option("download", "Fetch the dataset if it is not here.", "--download")]
Model = Annotated[str | None, option("model", "Network: a name, or auto.")]
Partition = Annotated[str | None, option("partition", "iid, pathological, dirichlet, natural or pfllib-compat.")]
Alpha = Annotated[float | None, option("alpha", "Dirichlet concentration; small is heterogeneous.")]
ClassesPerClient = Annotated[int | None, option("classes_per_client", "Classes a client holds (pathological).")]
Clients = Annotated[int | None, option("clients", "Number of clients.")]
Rounds = Annotated[int | None, option("rounds", "Number of rounds.")]
LocalEpochs = Annotated[int | None, option("local_epochs", "Epochs of the phase that produces what is sent.")]
BatchSize = Annotated[int | None, option("batch_size", "Samples in a local batch.")]
Lr = Annotated[float | None, option("lr", "Local learning rate.")]
Participation = Annotated[float | None, option("participation", "Share of the clients asked in a round.")]
CaptureRounds = Annotated[str | None, option("capture_rounds", "first,last | 0,10,20 | every:10 | none.")]
CaptureClients = Annotated[str | None, option("capture_clients", "0,1,2 | random:4.")]
Victims = Annotated[int | None, option("victims", "Victim batches per captured client and round.")]
VictimBatch = Annotated[int | None, option("victim_batch", "Images in a victim batch.")]
VictimSteps = Annotated[int | None, option("victim_steps", "Local steps on a victim batch.")]
