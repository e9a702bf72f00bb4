"""The program `pflsec`: its commands, and how mistakes, failures and Ctrl-C end it."""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

import pflsec
from pflsec.cli import attack, audit, doctor, frontier, listing, new, report, show, sweep, train
from pflsec.cli.console import say, say_error, show_warnings
from pflsec.core import methodfile
from pflsec.core.errors import PflsecError

INTERRUPTED = 130

app = typer.Typer(
    name="pflsec",
    help="Train federated learning methods, capture what crosses the wire, attack it, and report accuracy and leakage "
    "together.\n\nStart with: pflsec train --algo fedrep --rounds 10, then pflsec attack dlg, then pflsec report.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("train")(train.train)
app.command("attack")(attack.attack)
app.command("report")(report.report)
app.command("frontier")(frontier.frontier)
app.command("audit")(audit.audit)
app.command("sweep")(sweep.sweep)
app.add_typer(new.app, name="new")
app.command("list")(listing.listing)
app.command("show")(show.show)
app.command("doctor")(doctor.doctor)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"pflsec {pflsec.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def common(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Options of the program itself."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(arguments: list[str] | None = None) -> int:
    """Run the program; return its exit code: 0 success, 2 the user's mistake, 1 a failure of ours, 130 Ctrl-C."""
    from typer.main import get_command

    show_warnings()
    command = get_command(app)
    interrupts: list[int] = []
    try:
        with _noting(interrupts):
            code = command.main(args=arguments, prog_name="pflsec", standalone_mode=False)
        if code == INTERRUPTED:  # so typer reports Ctrl-C
            raise KeyboardInterrupt
        return _finish(code if isinstance(code, int) else 0)
    except PflsecError as error:
        say(f"error: {error}") if error.exit_code == 1 else say_error(str(error))
        return _finish(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return _interrupted()
    except typer.Exit as stop:
        return _finish(stop.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _finish(0)
    except OSError as error:
        say_error(f"{error.filename or 'a file'}: {error.strerror or error}. Check path, permissions and free space.")
        return _finish(2)
    except Exception as error:
        if hasattr(error, "format_message"):  # a mistake in the options, as click reports it
            say_error(f"{error.format_message()} See: pflsec --help")  # type: ignore[attr-defined]
            return _finish(2)
        if interrupts:
            return _interrupted()
        if blamed := methodfile.blame(error):
            say(f"error: {blamed}")
            return _finish(1)
        traceback.print_exc()
        say("internal error: this is a fault of pflsec, not yours. Please report it with the lines above.")
        return _finish(1)


@contextmanager
def _noting(interrupts: list[int]) -> Iterator[None]:
    """Note each Ctrl-C: a library that is being imported may swallow it, and break later for lack of its other half."""

    def note(number: int, frame: object) -> None:
        interrupts.append(number)
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _interrupted() -> int:
    say("interrupted: what was finished is kept")
    return _finish(INTERRUPTED)


def _finish(code: int) -> int:
    """Return the exit code once all output is out: a reader that has gone away shows here, not in a message at the exit."""
    sys.stdout.flush()
    return code


if __name__ == "__main__":
    sys.exit(main())
