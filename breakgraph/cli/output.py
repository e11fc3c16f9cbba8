"""What every command does with its streams, its signals, its errors and its exit status."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

import typer

from breakgraph.errors import BreakgraphError, ConfigError

if TYPE_CHECKING:
    from breakgraph.serving.llm import Progress

__all__ = [
    "EXIT_BAD_INPUT",
    "EXIT_FAILED",
    "EXIT_INTERRUPTED",
    "end_at_once",
    "exit_status",
    "progress_bars",
    "raise_on_interrupt",
    "refuse_model_options",
    "say",
    "stdout_errors",
    "write",
]

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130  # what a shell reports for a program that SIGINT ended


def refuse_model_options(target: str | None, **options: object) -> None:
    """Refuses options that say which graph of a model is meant, where a function of the user says which graph.

    Args:
        target: What the command line names; None: a graph of a model.
        **options: By name; None where it was not given.

    Raises:
        ConfigError: Both were given.
    """
    given = [f"--{name}" for name, value in options.items() if value is not None]
    if target is not None and given:
        raise ConfigError(
            f"{' and '.join(given)} came with {target}.",
            why="They choose a graph of a model, and the function returns its own.",
            fix="Leave out one of the two.",
        )


def end_at_once(*_: object) -> None:
    """Ends the process while modules are imported: an exception there may be caught, or come out as another one."""
    with contextlib.suppress(OSError):
        os.write(2, b"interrupted\n")
    os._exit(EXIT_INTERRUPTED)


def raise_on_interrupt() -> None:
    """Lets an interrupt be an exception again: what is running cleans up after itself."""
    if signal.getsignal(signal.SIGINT) is end_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def write(text: str) -> None:
    """Writes to stdout at once."""
    with stdout_errors():
        sys.stdout.write(text)
        sys.stdout.flush()


def say(text: str) -> None:
    """Writes a line to stderr; where nobody can read it, an answer is still an answer."""
    try:
        typer.echo(text, err=True)
    except OSError:
        discard(sys.stderr)


@contextmanager
def stdout_errors() -> Iterator[None]:
    """Ends the program where stdout cannot be written, which is no fault of the input."""
    try:
        yield
    except BrokenPipeError:  # the reader has left, as `head` does
        discard(sys.stdout)
        raise SystemExit(EXIT_FAILED) from None
    except OSError as error:
        discard(sys.stdout)
        say(
            f"breakgraph: stdout cannot be written: {error.strerror or error}.\nThe answer goes there and nowhere else.\n"
            "Free space, or redirect it to another place."
        )
        raise SystemExit(EXIT_FAILED) from None


def discard(stream: TextIO) -> None:
    """Sends what a stream still holds nowhere: Python would complain once more when it flushes at exit."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextmanager
def progress_bars() -> Iterator[Progress]:
    """One bar per stage on stderr, gone when all is ready; none where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        tasks: dict[str, TaskID] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield report


@contextmanager
def exit_status(*, runs_code: bool = False) -> Iterator[None]:
    """Turns what can go wrong into a message on stderr and an exit status, without a traceback.

    Args:
        runs_code: The command runs code of the user. What that raises is shown with its traceback, without our own frames,
            and the status is that of bad input: 1 says what the command found.
    """
    try:
        yield
    except KeyboardInterrupt:
        say("interrupted")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except BreakgraphError as error:
        say(f"breakgraph: {_in_options(error)}")
        for note in getattr(error, "__notes__", ()):
            say(f"  {note}")
        bad = isinstance(error, ConfigError) or runs_code
        raise typer.Exit(EXIT_BAD_INPUT if bad else EXIT_FAILED) from None
    except OSError as error:  # of a file that was named; those of stdout end the program where they happen
        if runs_code:
            _show_traceback(error)
        else:
            say(f"breakgraph: {error}")
        raise typer.Exit(EXIT_BAD_INPUT) from None
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        if not runs_code:
            raise
        _show_traceback(error)
        raise typer.Exit(EXIT_BAD_INPUT) from None


_OPTIONS = {  # what the command line calls an option of the engine or the server
    "max_seq_len": "--max-model-len",
    "max_batch_size": "--max-num-seqs",
    "max_num_tokens": "--max-num-batched-tokens",
    **{
        name: "--" + name.replace("_", "-")
        for name in ("memory_fraction", "num_blocks", "sampling", "prefill_sizes", "decode_sizes", "max_queue")
    },
    "max_body_bytes": "--max-body-mb",
    "request_seconds": "--request-timeout",
    "drain_seconds": "--drain-timeout",
}


def _in_options(error: BreakgraphError) -> str:
    """An error's text with an option called what the command line calls it."""
    found = re.match(r"(?:SamplingParams\.)?(\w+)(?= is )", error.what)
    if found is None or (found[0] == found[1] and found[1] not in _OPTIONS):
        return str(error)
    option = _OPTIONS.get(found[1], "--" + found[1].replace("_", "-"))
    return "\n".join((error.what.replace(found[0], option, 1), error.why, error.fix.replace(found[1], option)))


def _show_traceback(error: BaseException) -> None:
    """The user's exception as Python shows it, from the first frame that is not of this package's command line on."""
    shown = traceback.TracebackException.from_exception(error)
    ours = os.sep + os.path.join("breakgraph", "cli") + os.sep
    last = max((index for index, frame in enumerate(shown.stack) if ours in frame.filename), default=-1)
    shown.stack = traceback.StackSummary.from_list(list(shown.stack)[last + 1 :])
    say("".join(shown.format()).rstrip())
