"""pflsec attack."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from pflsec.cli.console import print_json, progress, say
from pflsec.core.errors import ConfigError, first_line


def attack(
    attacks: Annotated[str, typer.Argument(metavar="ATTACKS", help="Names with commas between, or all.")],
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="A run's name or folder; nothing: the newest.")
    ] = None,
    runs_dir: Annotated[Path, typer.Option(help="Folder of all runs.")] = Path("runs"),
    rounds: Annotated[str | None, typer.Option(help="Captured rounds to attack, e.g. 0,9. [default: all]")] = None,
    clients: Annotated[str | None, typer.Option(help="Captured clients to attack. [default: all]")] = None,
    kind: Annotated[str, typer.Option(help="Kind of capture: probe or update.")] = "probe",
    iterations: Annotated[int | None, typer.Option(help="Iterations. [default: the attack's]")] = None,
    restarts: Annotated[int | None, typer.Option(help="Attempts from new starts. [default: the attack's]")] = None,
    adversary: Annotated[
        str | None,
        typer.Option(help="server, eavesdropper, client, server-secagg or malicious-server. [default: server]"),
    ] = None,
    knowledge: Annotated[str | None, typer.Option(help="wire, oracle, or wire+FLAG,FLAG. [default: wire]")] = None,
    threat_model: Annotated[
        str | None, typer.Option(help="A letter A to H of a survey (A eavesdropper ... F malicious server), for both.")
    ] = None,
    labels: Annotated[str | None, typer.Option(help="restore, optimise or known. [default: the attack's]")] = None,
    hidden: Annotated[
        str | None,
        typer.Option(help="Private items: auto, guess, joint, cotangent, log or oracle. [default: the attack's]"),
    ] = None,
    visible: Annotated[
        str | None,
        typer.Option(metavar="PATTERN[,PATTERN]", help="Only these items of the upload are seen, e.g. head.*."),
    ] = None,
    naive: Annotated[
        bool, typer.Option("--naive", help="The attacker does not know of the run's defenses. [default: it adapts]")
    ] = False,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="NAME=VALUE of the attack's own settings; repeatable.")
    ] = None,
    controls: Annotated[
        bool, typer.Option(help="Also attack what must leak, and what says nothing, with the same settings.")
    ] = True,
    lpips: Annotated[str, typer.Option(help="alex, vgg, squeeze or none.")] = "alex",
    lpips_weights: Annotated[Path | None, typer.Option(help="File with the trunk's weights.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the attacker's draws.")] = 0,
    executor: Annotated[str, typer.Option(help="auto, serial, processes or ray: victims at once.")] = "auto",
    workers: Annotated[int | None, typer.Option(help="Worker processes. [default: one per core]")] = None,
    device: Annotated[str, typer.Option(help="auto or cpu.")] = "auto",
    before: Annotated[
        Path | None, typer.Option(help="No run: safetensors file of the weights the client began with.")
    ] = None,
    after: Annotated[Path | None, typer.Option(help="The weights it ended with.")] = None,
    model: Annotated[str | None, typer.Option(help="Their network; see: pflsec list models.")] = None,
    split: Annotated[str | None, typer.Option(help="Layer with which its head begins. [default: the last]")] = None,
    shape: Annotated[str | None, typer.Option(help="Channels, height, width: 1,28,28.")] = None,
    classes: Annotated[int | None, typer.Option(help="Number of classes.")] = None,
    lr: Annotated[float | None, typer.Option(help="The client's learning rate.")] = None,
    mean: Annotated[
        str | None, typer.Option(help="Mean of the inputs' normalisation, 0.5 or a,b,c. [default: 0]")
    ] = None,
    std: Annotated[str | None, typer.Option(help="Its standard deviation. [default: 1]")] = None,
    images: Annotated[int | None, typer.Option(help="Images behind the update. [default: 1]")] = None,
    steps: Annotated[int | None, typer.Option(help="The client's local steps. [default: 1]")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Images in a step. [default: all]")] = None,
    known_labels: Annotated[str | None, typer.Option(help="Their labels, 3,1; with --knowledge wire+labels.")] = None,
    truth: Annotated[Path | None, typer.Option(help=".npz with images and labels, to score with.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for what is found.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check, say what would be attacked, and stop.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the scores as JSON on stdout.")] = False,
) -> None:
    """Attack what a run's captures show, and score what is rebuilt; or, with --before, an update from elsewhere.

    Examples:

      pflsec attack dlg

      pflsec attack dlg,ig my-run --restarts 2

      pflsec attack ig my-run --knowledge oracle --rounds 0

      pflsec attack imprint my-run --threat-model F

      pflsec attack ig --before a.safetensors --after b.safetensors --model mlp --shape 1,28,28 --classes 10 --lr 0.1 --out found
    """
    given = {k: v for k, v in locals().items() if v is not None}

    from pflsec import api
    from pflsec.cli.update import attack_update, describing
    from pflsec.config.attack import AttackConfig, make_attacks
    from pflsec.core.config import build
    from pflsec.runtime.folder import RunFolder

    options = _read(given)
    if describing(options):
        attack_update(attacks, options, dry_run, json)
        return
    config = build(AttackConfig, {k: v for k, v in options.items() if k in AttackConfig.model_fields}, "attack")
    ready = make_attacks(attacks, config)
    session = api.AttackSession(RunFolder.open(run, runs_dir), config)
    _say_plan(session, ready)
    if dry_run:
        if json:
            print_json({"attacks": [one.name for one in ready], "captures": session.captures})
        return
    scores, failures = _run_each(session, ready)
    _print_found(session.folder, scores, json)
    for error in failures.values():
        raise error


def _say_plan(session: Any, ready: Sequence[Any]) -> None:
    """Say what is attacked by whom, and what will be missing from the results."""
    from pflsec.core.knowledge import letter_words

    names, letter = ", ".join(one.name for one in ready), session.config.threat_model
    say(f"{names} on run {session.folder.path.name}: {len(session.captures)} victims each")
    for one in ready:
        if one.refused:
            say(f"note: {one.name} does not apply: {one.refused}")
    if letter:
        say(f"threat model {letter}: {letter_words(letter)}")
    if session.perceptual.status not in ("ok", "off"):
        say(f"note: LPIPS is not available ({session.perceptual.status}). {session.perceptual.remedy}")


def _run_each(session: Any, ready: Sequence[Any]) -> tuple[list[Any], dict[str, Exception]]:
    """Run the attacks under one bar; return scores and failures, each of which is said."""
    each = len(session.captures) + (2 if session.controlled else 0)
    with progress(len(ready) * each, "victim") as bar:
        scores, failures = session.run_each(
            ready,
            lambda *seen: bar.advance(_note(seen[0], seen[3])),
            lambda name, row: bar.advance(_note(f"{name}, {row['control']} control", row)),
        )
    for name, error in failures.items():
        say(f"{name} failed: {first_line(error)}")
    return scores, failures


def _print_found(folder: Any, scores: Sequence[Any], json: bool) -> None:
    from pflsec.cli.scores import print_scores, records

    if json:
        print_json([{"path": str(s.path), "scores": records(s)} for s in scores])
    elif scores:
        print_scores(folder.path, scores)
        say(f"results in {folder.attacks}; make the page with: pflsec report {folder.path.name}")


def _read(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with the lists among them read. Raises ConfigError naming the option."""
    from pflsec.config.train import parse_assignments, split_assignments

    readers = dict.fromkeys(("rounds", "clients", "shape", "known_labels"), _numbers)
    readers |= dict.fromkeys(("mean", "std"), _decimals)
    read = {k: readers[k](v, f"--{k.replace('_', '-')}") if k in readers else v for k, v in given.items()}
    read["settings"] = parse_assignments(split_assignments(given.get("settings", [])))
    return read | ({"lpips_weights": str(given["lpips_weights"])} if "lpips_weights" in given else {})


def _decimals(text: str, flag: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise ConfigError(f"{flag} is '{text}'; use a number, or one for each channel with commas between.") from None


def _numbers(text: str, flag: str) -> list[int]:
    from pflsec.config.train import whole

    numbers = []
    for word in text.split(","):
        if (found := whole(word.strip())) is None:
            raise ConfigError(f"{flag} has '{word}', which is no number >= 0; use numbers, such as 0,9.")
        numbers.append(found)
    return numbers


def _note(name: str, row: Any) -> str:
    psnr = row.get("psnr_capped")
    return f"{name}: {row['status']}" + ("" if psnr is None else f", PSNR {psnr:.1f} dB")
