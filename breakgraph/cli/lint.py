"""`breakgraph lint`."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from breakgraph.cli.application import app
from breakgraph.cli.output import EXIT_FAILED, exit_status, raise_on_interrupt, say, stdout_errors, write
from breakgraph.errors import ConfigError

if TYPE_CHECKING:
    from breakgraph.tools.linting.report import Finding, LintReport

__all__ = ["lint"]


@app.command()
def lint(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help="A function without arguments that returns a forward and its inputs, as a tuple or as a dict of keyword inputs.",
            show_default=False,
        ),
    ],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object in place of the table.")] = False,
) -> None:
    """Run a forward and name the lines that a graph cannot hold; exit status 1 where something would fail.

    Where stdout is no terminal, each finding is a line of file:line, severity, kind and what.
    """
    with exit_status(runs_code=True):
        from breakgraph.tools.linting.lint import lint as run
        from breakgraph.tools.targets import call_target, ended

        raise_on_interrupt()
        forward, inputs, kwargs = _case(call_target(target), target=target)
        try:
            with contextlib.redirect_stdout(sys.stderr):  # what the forward prints
                report = run(forward, *inputs, kwargs=kwargs)
        except SystemExit as error:
            raise ended(target, error) from error
        if as_json:
            write(json.dumps(report.as_dict(), indent=1) + "\n")
        elif sys.stdout.isatty():
            print_report(report)
        else:
            write("".join(f"{_line(finding)}\n" for finding in report.findings))
            say(_rest(report))
        if report.failures:
            raise typer.Exit(EXIT_FAILED)


def _case(returned: Any, *, target: str) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """What the named function returned, as (forward, inputs, keyword inputs)."""
    forward, inputs = returned if isinstance(returned, tuple) and len(returned) == 2 else (None, None)
    if callable(forward) and isinstance(inputs, tuple | list):
        return forward, tuple(inputs), {}
    if callable(forward) and isinstance(inputs, dict) and all(isinstance(name, str) for name in inputs):
        return forward, (), inputs
    got = type(returned).__name__
    if isinstance(returned, tuple):
        got = f"tuple of ({', '.join(type(each).__name__ for each in returned)})"
    raise ConfigError(
        f"{target!r} returned a {got}; expected (forward, inputs): a callable, and its inputs as a tuple or as a dict.",
        why="The forward is run with these inputs to see what it does.",
        fix="Write, for example: return model, (input_ids,).",
    )


def print_report(report: LintReport) -> None:
    """Prints a table of the findings, and below it what to mark.

    Args:
        report: What was found.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    with stdout_errors():
        console = Console()
        if report.findings:
            table = Table(
                Column("line", overflow="fold"), "", "kind", Column("what", overflow="fold"), box=box.SIMPLE_HEAD
            )
            for one in report.findings:
                place = f"{_path(one)}:{one.lineno}"
                table.add_row(
                    *map(Text, (place, one.severity.value, one.kind.value, one.what))
                )  # brackets are no markup
            console.print(table)
        console.print(Text(_rest(report)))


def _line(finding: Finding) -> str:
    times = f" ({finding.times} times)" if finding.times > 1 else ""
    where = f"{_path(finding)}:{finding.lineno}"
    return f"{where}: {finding.severity.value}: {finding.kind.value}: {finding.what}{times} in {finding.function}"


def _path(finding: Finding) -> str:
    """The file, as seen from the current folder where it lies below that."""
    path, here = Path(finding.path), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else finding.path


def _rest(report: LintReport) -> str:
    """What to mark, what was not seen, and the counts."""
    said = [suggestion.text for suggestion in report.suggestions]
    said += [f"not seen: {text}" for text in report.unseen]
    return "\n".join([*said, report.summary()])
