"""The `diffrate` command: its list of commands, and what happens when one of them fails."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import warnings
from types import TracebackType
from typing import Annotated, Any, NoReturn

import typer

import diffrate
from diffrate.cli import (
    bench,
    comparison,
    cosearch,
    demo,
    evaluation,
    export,
    models,
    profile,
    report,
    schedules,
    search,
    segment,
    train,
    visualize,
)
from diffrate.cli.last_word import REFUSED, answer_sigterm, say
from diffrate.cli.output import note
from diffrate.errors import DiffRateError
from diffrate.models import first_line

# Torch's words, in a plain RuntimeError, where a worker of a loader is gone.
DEAD_WORKER = "DataLoader worker"
# What fails without harm where a dead process breaks a loader off: torch puts it away, a thread of it starts.
BROKEN_OFF = ("_MultiProcessingDataLoaderIter.__del__", "Thread._bootstrap")
INTERRUPTED = 130  # the exit code, as shells have it

app = typer.Typer(
    name="diffrate",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command("models")(models.models)
app.command("schedules")(schedules.schedules)
app.command("macs")(schedules.macs)
app.command("compress")(schedules.compress)
app.command("search")(search.search_command)
app.command("cosearch")(cosearch.cosearch_command)
app.command("profile")(profile.profile_command)
app.command("eval")(evaluation.eval_command)
app.command("methods")(comparison.methods)
app.command("compare")(comparison.compare_command)
app.command("bench")(bench.bench_command)
app.command("finetune")(train.finetune_command)
app.command("export")(export.export_command)
app.command("train")(train.train_command)
app.command("visualize")(visualize.visualize_command)
app.command("report")(report.report_command)
app.command("demo")(demo.demo)
app.add_typer(segment.app, name="segment")


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"diffrate {diffrate.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """Compress vision transformers by pruning and merging tokens, block by block."""


def main() -> None:
    """Run the command line; a mistake of the user ends in one sentence and exit code 2."""
    warnings.showwarning = _show_warning
    sys.excepthook = _show_uncaught
    sys.unraisablehook = _show_unraisable
    _end_when_interrupted_twice()
    answer_sigterm()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a name that the terminal cannot show is no reason to end
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        _run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except DiffRateError as error:
        _refuse(str(error))
    except OSError as error:  # a full disk, a folder that is read-only, a name too long
        about = f" {error.filename}" if error.filename else ""
        _refuse(f"the system refused{about}: {error.strerror or error}")
    except (MemoryError, RuntimeError) as error:
        if DEAD_WORKER in str(error):
            _refuse_at_once(
                f"a process that reads images has died ({first_line(error)}), perhaps for lack of memory: try fewer "
                "--workers; a search or training goes on with --resume"
            )
        from diffrate.portions import out_of_memory  # here alone: it is slow to import

        if not isinstance(error, MemoryError) and not out_of_memory(error):
            raise
        _refuse(
            "this takes more memory than there is: try a smaller batch size, image size or model; in a training "
            "--accumulate runs the same batch in parts"
        )


def _run() -> None:
    """The command that was asked for, without the hook that calling `app` would set for what is uncaught."""
    typer.main.get_command(app)(prog_name="diffrate")


def _end_when_interrupted_twice() -> None:
    """The first Ctrl-C lets what runs clean up behind itself; the second ends at once, and shows no traceback.

    A terminal sends it to the processes that read images too: those wait for what this one does.
    """
    own = os.getpid()

    def interrupted(*_: Any) -> None:
        if os.getpid() != own:
            sys.excepthook = _silent
            return
        sys.unraisablehook = _silent  # of what was half made when this came
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, interrupted)


def _silent(*_: Any) -> None:
    pass


def _refuse(sentence: str) -> NoReturn:
    say(sentence)
    sys.exit(REFUSED)


def _refuse_at_once(sentence: str) -> NoReturn:
    """Refuse, and end as this stands: torch breaks a loader off wherever it was, and then may wait for it for ever."""
    say(sentence)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(REFUSED)


def _show_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Of what nobody caught, all but a thread that hands images over to a process which is gone.

    Processes that read images have such a thread, and tell of it on the way out, after the sentence.
    """
    if not isinstance(error, ConnectionError) or threading.current_thread() is threading.main_thread():
        sys.__excepthook__(kind, error, trace)


def _show_unraisable(what: sys.UnraisableHookArgs) -> None:
    """Of what was raised where nobody can catch it, all but what is left of a loader that was broken off."""
    if getattr(what.object, "__qualname__", None) not in BROKEN_OFF:
        sys.__unraisablehook__(what)


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    note(str(message))
