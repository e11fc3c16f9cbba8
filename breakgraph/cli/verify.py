"""`breakgraph verify`: is a replay what eager computes, and if not, where and why not?"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from breakgraph.cli.application import Device, app
from breakgraph.cli.model_options import (
    BatchOption,
    DeviceOption,
    ModelOption,
    PlacementOption,
    TokensOption,
    ViaOption,
)
from breakgraph.cli.output import (
    EXIT_FAILED,
    exit_status,
    progress_bars,
    raise_on_interrupt,
    refuse_model_options,
    write,
)
from breakgraph.errors import ConfigError
from breakgraph.models.via import Via

if TYPE_CHECKING:
    from breakgraph.tools.verifying.report import Verification

__all__ = ["verify"]


@app.command()
def verify(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODULE:FUNCTION]",
            help="A function that returns the arguments of breakgraph.tools.verify as a dict. Default: a graph of --model.",
            show_default=False,
        ),
    ] = None,
    *,
    model: ModelOption = "demo",
    tokens: TokensOption = None,
    batch: BatchOption = None,
    placement: PlacementOption = "auto",
    via: ViaOption = Via.AUTO,
    device: DeviceOption = Device.AUTO,
    rounds: Annotated[int, typer.Option(help="Steps to compare.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object in place of the text.")] = False,
) -> None:
    """Compare replays with eager, bit for bit; where one differs, name step, tensor and likely cause, and exit with 1."""
    with exit_status(runs_code=target is not None):
        refuse_model_options(target, tokens=tokens, batch=batch)
        if rounds < 1:
            raise ConfigError(
                f"--rounds is {rounds}; expected 1 or more.",
                why="It is the number of steps that are compared.",
                fix="Leave it out for 3.",
            )
        raise_on_interrupt()
        if target is not None:
            found = _of_target(target, rounds=rounds)
        else:
            from breakgraph.tools.model_graph import ModelGraph

            rows = 64 if tokens is None and batch is None else tokens
            wanted = ModelGraph(
                model=model, tokens=rows, batch=batch, via=via, device=device.value, placement=placement
            )
            with progress_bars() as progress:
                captured = wanted.capture(progress=progress)
            found = captured.verify(rounds=rounds)
        write(json.dumps(found.as_dict(), indent=1) + "\n" if as_json else f"{found}\n")
        if not found.ok:
            raise typer.Exit(EXIT_FAILED)


def _of_target(target: str, *, rounds: int) -> Verification:
    from breakgraph.tools.targets import call_target
    from breakgraph.tools.verifying.verify import verify as verified

    given = call_target(target)
    if not isinstance(given, Mapping) or not {"forward", "example"} <= given.keys():
        raise ConfigError(
            f"{target} returned {_kind(given)}; expected a dict with at least 'forward' and 'example'.",
            why="It is what breakgraph.tools.verify is called with.",
            fix="Return dict(forward=model, example=lambda number: {...}, live=..., state=...).",
        )
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what its code prints
            return verified(**{"rounds": rounds, **given})
    except TypeError as error:
        if "verify() got an unexpected keyword" not in str(error):
            raise
        raise ConfigError(
            f"{target} returned {sorted(given)}: {error}.",
            why="It is what breakgraph.tools.verify is called with.",
            fix="Leave out what is no argument of it.",
        ) from None


def _kind(value: object) -> str:
    return f"a dict with {sorted(map(str, value))}" if isinstance(value, Mapping) else f"a {type(value).__name__}"
