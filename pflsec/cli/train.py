"""pflsec train."""

import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from pflsec.cli import options
from pflsec.cli.console import duration, megabytes, number, print_json, progress, say
from pflsec.cli.options import option
from pflsec.core.errors import ConfigError, PflsecWarning
from pflsec.core.files import safe_name

HOW = ("executor", "workers", "track")
"""Options that change no result: they alone go with --resume."""


def train(
    algo: Annotated[
        str | None, option("algo", "Method: a key from `pflsec list algorithms`, or FILE.py:Class.")
    ] = None,
    data: options.Data = None,
    download: options.Download = None,
    model: options.Model = None,
    split: Annotated[str | None, option("split", "Layer with which the head begins.")] = None,
    partition: options.Partition = None,
    alpha: options.Alpha = None,
    classes_per_client: options.ClassesPerClient = None,
    test: Annotated[
        str | None, option("test", "split: a quarter of each client; given: the dataset's test rows.")
    ] = None,
    clients: options.Clients = None,
    rounds: options.Rounds = None,
    local_epochs: options.LocalEpochs = None,
    batch_size: options.BatchSize = None,
    lr: options.Lr = None,
    lr_decay: Annotated[float | None, option("lr_decay", "Round t trains with lr * decay^t.")] = None,
    participation: options.Participation = None,
    drop_rate: Annotated[float | None, option("drop_rate", "Share of a cohort whose upload is lost.")] = None,
    settings: Annotated[
        list[str] | None, option("settings", "NAME=VALUE of the method's own settings; repeatable.", "--set")
    ] = None,
    preset: Annotated[str | None, typer.Option(help="paper or pfllib: published settings.", show_default=False)] = None,
    defense: Annotated[list[str] | None, option("defense", "NAME or NAME:k=v,...; in order, repeatable.")] = None,
    capture_rounds: options.CaptureRounds = None,
    capture_clients: options.CaptureClients = None,
    victims: options.Victims = None,
    victim_batch: options.VictimBatch = None,
    victim_steps: options.VictimSteps = None,
    kind: Annotated[str | None, option("kind", "probe, update or both.")] = None,
    dp_seed: Annotated[int | None, option("dp_seed", "Fixes the privacy noise; for tests only, marks the run.")] = None,
    buffers: Annotated[str | None, option("buffers", "aggregate, local or frozen.")] = None,
    seed: Annotated[int | None, option("seed", "Seed of everything that is drawn.")] = None,
    eval_every: Annotated[
        int | None, option("eval_every", "Evaluate every so many rounds, and after the last.")
    ] = None,
    executor: Annotated[str | None, option("executor", "auto, serial, processes or ray.")] = None,
    workers: Annotated[int | None, option("workers", "Worker processes.")] = None,
    device: Annotated[str | None, option("device", "auto or cpu.")] = None,
    track: Annotated[
        str | None, option("track", "Follow the training with tensorboard, mlflow or tensorboard,mlflow.")
    ] = None,
    runs_dir: Annotated[Path, typer.Option(help="Folder of all runs.")] = Path("runs"),
    name: Annotated[str | None, typer.Option(help="Name of this run.", show_default=False)] = None,
    config: Annotated[
        Path | None, typer.Option(help="TOML file with any of these options.", show_default=False)
    ] = None,
    resume: Annotated[
        str | None, typer.Option(help="Go on with this run, as it was set up.", show_default=False)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check, estimate time and disk, and stop.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")] = False,
) -> None:
    """Train a federation and capture what crosses the wire.

    Examples:

      pflsec train --algo fedrep --rounds 10

      pflsec train --algo fedprox --set mu=0.1 --data npz:mnist.npz --alpha 0.5

      pflsec train --algo scaffold --capture-rounds 0,10 --capture-clients random:2

      pflsec train --algo fedrep --track tensorboard

      pflsec train --resume fedrep-digits-s0
    """
    given = {k: v for k, v in locals().items() if v is not None}

    from pflsec import api
    from pflsec.runtime.estimate import best_executor

    setup, start = _again(given) if resume else _anew(given)
    cost = api.estimate(setup)
    say(
        f"{setup.config.algo} on {setup.config.data}: {setup.federation.clients} clients, {setup.config.rounds} rounds, "
        f"{setup.net.size():,} parameters; about {duration(cost.seconds)} and {megabytes(cost.bytes)} on disk"
    )
    _check_space(runs_dir, cost.bytes)
    if dry_run:
        if json:
            print_json({"config": setup.config.model_dump(), "seconds": cost.seconds, "bytes": cost.bytes})
        return
    with progress(setup.config.rounds, "round") as bar:
        run = start(
            on_round=lambda t, metrics: bar.advance(_note(metrics), t + 1),
            executor=best_executor(setup.config.executor, cost.seconds),
        )
    last = run.metrics.iloc[-1].to_dict()
    if json:
        print_json({"run": run.name, "path": str(run.path), "metrics": last})
        return
    say(f"done: {_note(last)}")
    say(f"run {run.path}{_next_step(setup, run.name)}" + _runs_dir(runs_dir))


def _anew(given: Mapping[str, Any]) -> tuple[Any, Callable[..., Any]]:
    """Return the setup of a new run, and what starts it."""
    from pflsec import api
    from pflsec.config.train import TrainConfig, split_assignments

    name = given.get("name")
    if name is not None:
        safe_name(name, "run name")
    options = {k: v for k, v in given.items() if k in TrainConfig.model_fields and k != "settings"}
    assignments = split_assignments(given.get("settings", []))
    setup = api.plan_training(options, preset=given.get("preset"), config=given.get("config"), assignments=assignments)
    return setup, partial(api.run_training, setup, name=name, runs_dir=given["runs_dir"])


def _again(given: Mapping[str, Any]) -> tuple[Any, Callable[..., Any]]:
    """Return the setup of a run that goes on, and what makes it go on. Raises ConfigError for options that would change it."""
    from pflsec import api
    from pflsec.config.train import TrainConfig
    from pflsec.core.config import build

    if given.keys() - {*HOW, "resume", "runs_dir", "dry_run", "json"}:
        raise ConfigError(
            "--resume takes the run's own configuration; of the other options only --executor, --workers, --track and "
            "--runs-dir go with it."
        )
    setup, found = api.plan_resumption(given["resume"], given["runs_dir"])
    how = {k: given[k] for k in HOW if k in given}
    setup = replace(setup, config=build(TrainConfig, setup.config.model_dump() | how, "train"))
    return setup, partial(api.resume_training, setup, found)


def _next_step(setup: Any, run: str) -> str:
    if setup.config.capture_rounds == "none":
        return f", without captures to attack; see it with: pflsec report {run}"
    attack = "dlg" if setup.federation.input.vocabulary is None else "embedding-rows"
    return f"; attack it with: pflsec attack {attack} {run}"


def _check_space(runs_dir: Path, needed: int) -> None:
    """Warn where the run may not fit on the disk. The need is an estimate, so it is no reason to refuse."""
    there = next((p for p in [runs_dir, *runs_dir.absolute().parents] if p.exists()), Path())
    free = shutil.disk_usage(there).free
    if free < needed:
        warnings.warn(
            f"{there} has {megabytes(free)} free, and the run may need {megabytes(needed)}. If the disk fills up, finished "
            "rounds are kept and --resume goes on. Fewer --capture-rounds, --capture-clients or --victims need less.",
            PflsecWarning,
            stacklevel=2,
        )


def _note(metrics: Any) -> str:
    parts = [f"loss {number(metrics.get('train_loss'), 3)}"] if metrics.get("train_loss") is not None else []
    if mean := number(metrics.get("personal_accuracy_mean"), 3):
        parts.append(f"accuracy {100 * float(mean):.1f} % (mean over clients)")
    return ", ".join(parts)


def _runs_dir(folder: Path) -> str:
    return "" if folder == Path("runs") else f" --runs-dir {folder}"
