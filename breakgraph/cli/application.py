"""The application that every command registers with."""

from __future__ import annotations

import enum
from importlib import metadata
from typing import Annotated

import typer

__all__ = ["Device", "app"]

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


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"breakgraph {metadata.version('breakgraph')}")
        raise typer.Exit


@app.callback()
def _commands(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_version)
    ] = False,
) -> None:
    """Breakable CUDA graphs for LLM inference."""
