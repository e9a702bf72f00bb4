"""pflsec audit."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from pflsec.cli import options
from pflsec.cli.console import out, print_json, progress, say
from pflsec.cli.options import check_executor, option
from pflsec.cli.sweep import paced, say_cells, say_price
from pflsec.core.errors import ConfigError
from pflsec.core.files import safe_name

ATTACKING = ("iterations", "restarts", "adversary", "knowledge", "threat_model")
"""Options of all attacks; `kind` is one of the trainings too."""
OWN = ("method", "against", "attacks", "defenses", "seeds", "seed", "settings", *ATTACKING)
"""Options of the plan that are no options of a training; none of them goes with --resume."""


def audit(
    method: Annotated[
        str | None, typer.Argument(metavar="METHOD", help="A method's name, or FILE.py:Class (one of your own).")
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="Baselines. [default: fedavg,fedrep,ditto, as far as installed]")
    ] = None,
    attacks: Annotated[
        str | None, typer.Option(help="Attacks on all of them. [default: dlg,idlg,inverting-gradients]")
    ] = None,
    defenses: Annotated[
        str | None, typer.Option(help="none and defenses, e.g. none,dp-sgd:epsilon=8. [default: none]")
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Trainings of each method. [default: 1]")] = None,
    seed: Annotated[int | None, typer.Option(help="The first seed. [default: 0]")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="NAME=VALUE of METHOD's own settings; repeatable.")
    ] = None,
    data: options.Data = None,
    download: options.Download = None,
    model: options.Model = None,
    partition: options.Partition = None,
    alpha: options.Alpha = None,
    classes_per_client: options.ClassesPerClient = None,
    clients: options.Clients = None,
    rounds: options.Rounds = None,
    local_epochs: options.LocalEpochs = None,
    batch_size: options.BatchSize = None,
    lr: options.Lr = None,
    participation: options.Participation = None,
    capture_rounds: options.CaptureRounds = None,
    capture_clients: options.CaptureClients = None,
    victims: options.Victims = None,
    victim_batch: options.VictimBatch = None,
    victim_steps: options.VictimSteps = None,
    iterations: Annotated[int | None, typer.Option(help="Iterations of the attacks. [default: each attack's]")] = None,
    restarts: Annotated[int | None, typer.Option(help="Attempts from new starts. [default: each attack's]")] = None,
    kind: Annotated[str | None, option("kind", "What is captured and attacked: probe or update.")] = None,
    adversary: Annotated[
        str | None,
        typer.Option(help="server, eavesdropper, client, server-secagg or malicious-server. [default: server]"),
    ] = None,
    knowledge: Annotated[str | None, typer.Option(help="wire, oracle, or wire+FLAG,FLAG. [default: wire]")] = None,
    threat_model: Annotated[
        str | None, typer.Option(help="A letter of a survey (A eavesdropper ... F malicious server), for both.")
    ] = None,
    executor: Annotated[
        str, typer.Option(help="auto, serial, processes or ray; the results are the same bits.")
    ] = "auto",
    folder: Annotated[Path, typer.Option("--out", help="Folder of all audits.")] = Path("audits"),
    name: Annotated[str | None, typer.Option(help="Name of this audit. [default: of method and data]")] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with the audit in this folder.", show_default=False)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the cells, estimate, and stop.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print audit.json on stdout.")] = False,
) -> None:
    """Train a method and its baselines alike, attack all of them alike, and say what follows.

    Every method gets the same splits, seeds and victims; differences of leakage are paired by victim. The isolated
    training `local` stands beside them as a control. Exit code 1: a cell failed.

    Examples:

      pflsec audit fedrep --rounds 10

      pflsec audit mymethod.py:MyMethod --against fedavg --attacks ig --victims 4

      pflsec audit fedprox --set mu=0.1 --defenses none,dp-sgd:epsilon=8 --seeds 3

      pflsec audit --resume audits/fedrep-digits
    """
    given = {k: v for k, v in locals().items() if v is not None}

    from pflsec.audit.folder import Audit, check
    from pflsec.sweep.plan import price
    from pflsec.sweep.work import How

    check_executor(executor)
    found = _reopened(given) if resume else None
    plan = found.plan if found else _plan(given)
    title = safe_name(name or f"{plan.label}-{plan.training.get('data', 'digits').partition(':')[0]}", "audit name")
    left = found.unfinished() if found else plan.cells()
    cells = check(plan, left)
    cost = price(cells, plan.assaults())
    _say_work(plan, left, cells, cost)
    if dry_run:
        if json:
            seconds = {"seconds": cost.seconds, "attack_seconds": cost.attacking if cost.timed_on else None}
            print_json({"plan": plan.as_dict(), "cells": [cell.name for cell in left], **seconds})
        return
    made = found or Audit.create(folder, title, plan)
    say(f"audit in {made.path}; after Ctrl-C go on with: pflsec audit --resume {made.path}")
    with progress(max(1, cost.units), "step") as bar:
        made.run(How(executor, paces=cost.paces, on_step=paced(bar)), cells)
    print_json(made.record) if json else _print_verdict(made)
    if made.record["verdict"]["failed"]:
        raise typer.Exit(1)


def _training(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of every training."""
    from pflsec.config.train import TrainConfig

    return {k: v for k, v in given.items() if k in TrainConfig.model_fields and k not in (*OWN, "executor")}


def _reopened(given: Mapping[str, Any]) -> Any:
    """Return the audit that goes on. Raises ConfigError for options that would change it."""
    from pflsec.audit.folder import Audit

    if _training(given) or any(k in given for k in (*OWN, "name")):
        raise ConfigError(
            "--resume takes the audit's own plan; of the other options only --executor and --json go with it."
        )
    return Audit.open(given["resume"])


def _say_work(plan: Any, left: Sequence[Any], cells: Sequence[Any], cost: Any) -> None:
    say_cells(cells, plan.assaults())
    for cell in left:
        say(f"  {cell.name}: {cell.algo}, {cell.role}, defense {cell.defense}, seed {cell.seed}")
    say_price(cost)


def _plan(given: Mapping[str, Any]) -> Any:
    """Return the plan of a new audit."""
    from pflsec.audit import plan
    from pflsec.config.train import parse_assignments, split_assignments

    if "method" not in given:
        raise ConfigError("which method is to be audited? Give METHOD, or --resume DIR. See: pflsec audit --help")
    lists = {k: plan.split_names(given[k]) for k in ("against", "attacks") if k in given}
    if "defenses" in given:
        lists["defenses"] = plan.split_defenses(given["defenses"])
    return plan.make(
        given["method"],
        **lists,
        **{k: given[k] for k in ("seeds", "seed") if k in given},
        training=_training(given),
        settings=parse_assignments(split_assignments(given.get("settings", []))),
        attacking={k: given[k] for k in (*ATTACKING, "kind") if k in given},
    )


def _print_verdict(audit: Any) -> None:
    from pflsec.audit.verdict import lines

    for title, rows in lines(audit.record["verdict"]):
        out.print(f"\n{title}", markup=False, style="bold")
        for row in rows:
            out.print(f"- {row}", markup=False)
    say(f"\nverdict in {audit.path / 'verdict.md'}, numbers in {audit.path / 'audit.json'}")
    if (page := audit.path / "report" / "index.html").exists():
        say(f"side by side: {page.resolve()}")
