"""`breakgraph explain`: what a graph holds and what it costs."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    exit_status,
    progress_bars,
    raise_on_interrupt,
    refuse_model_options,
    say,
    stdout_errors,
    write,
)
from breakgraph.errors import ConfigError
from breakgraph.models.via import Via

if TYPE_CHECKING:
    from breakgraph.explanation import Explanation

__all__ = ["explain"]


@app.command()
def explain(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODULE:FUNCTION]",
            help="A function without arguments that returns a captured graph, or (graph, live data). Default: one of --model.",
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
    measure: Annotated[bool, typer.Option("--measure", help="Replay it and take the time of each step.")] = False,
    runs: Annotated[int, typer.Option(help="Replays of each kind, with --measure.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object in place of the table.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page with a timeline, which needs no network.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome trace, with --measure.")] = None,
) -> None:
    """Show the steps of a graph: segments, breaks, kernels, bytes, times, and what could be better."""
    with exit_status(runs_code=target is not None):
        refuse_model_options(target, tokens=tokens, batch=batch)
        if runs < 1:
            raise ConfigError(
                f"--runs is {runs}; expected 1 or more.",
                why="Times are medians over the runs.",
                fix="Leave it out for 20.",
            )
        if trace is not None and not measure:
            raise ConfigError(
                "--trace came without --measure.",
                why="A trace is a picture of times.",
                fix="Add --measure, or use --html, which also shows a graph that was not measured.",
            )
        for path in (html, trace):
            _check_place(path)
        if html is not None and trace is not None and html.resolve() == trace.resolve():
            raise ConfigError(
                f"--html and --trace are both {html}.",
                why="The second would replace the first.",
                fix="Name two files.",
            )
        raise_on_interrupt()
        if target is not None:
            explanation = _of_target(target, runs=runs if measure else None)
        else:
            from breakgraph.tools.model_graph import ModelGraph

            rows = 128 if tokens is None and batch is None else tokens
            wanted = ModelGraph(
                model=model, tokens=rows, batch=batch, via=via, device=device.value, placement=placement
            )
            with progress_bars() as progress:
                captured = wanted.capture(progress=progress)
            if measure:
                from breakgraph.tools.explaining.explain import explain as measured

                with captured.rehearsal() as rehearsal:
                    explanation = measured(captured.graph, replay=rehearsal.replay, runs=runs)
            else:
                explanation = captured.graph.explain()
        _show(explanation, as_json=as_json)
        _keep(explanation, html=html, trace=trace)


def _check_place(path: Path | None) -> None:
    if path is not None and (path.is_dir() or not path.name or not path.parent.is_dir()):
        fault = f"there is no folder {path.parent}" if path.name and not path.parent.is_dir() else "it is a folder"
        raise ConfigError(
            f"{str(path)!r} cannot be written: {fault}.",
            why="It would be found out after everything was captured and measured.",
            fix="Name a file in a folder that is there.",
        )


def _of_target(target: str, *, runs: int | None) -> Explanation:
    from breakgraph.capture import BreakableCUDAGraph
    from breakgraph.tools.explaining.explain import explain as measured
    from breakgraph.tools.targets import call_target

    found = call_target(target)
    graph, live = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    if not isinstance(graph, BreakableCUDAGraph) or not isinstance(live, Mapping | None):
        raise ConfigError(
            f"{target} returned {_kind(found)}; expected a BreakableCUDAGraph, or a pair of one and a mapping of live data.",
            why="It is what is explained; live data are for the replays of --measure.",
            fix="Return the graph behind the `with BreakableCUDAGraphCapture(graph)` block.",
        )
    with contextlib.redirect_stdout(sys.stderr):  # what its breaks print
        return graph.explain() if runs is None else measured(graph, live=live, runs=runs)


def _kind(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(type(item).__name__ for item in value)})"
    return f"a {type(value).__name__}"


def _show(explanation: Explanation, *, as_json: bool) -> None:
    if as_json:
        write(json.dumps(explanation.as_dict(), indent=1) + "\n")
    elif sys.stdout.isatty():
        from rich.console import Console

        from breakgraph.tools.explaining.table import ExplanationTable

        with stdout_errors():
            Console().print(ExplanationTable(explanation))
    else:
        write(f"{explanation}\n")


def _keep(explanation: Explanation, *, html: Path | None, trace: Path | None) -> None:
    from breakgraph.tools.explaining.chrome import chrome_trace
    from breakgraph.tools.explaining.page import html_page

    if html is not None:
        html.write_text(html_page(explanation), encoding="utf-8")
        say(f"wrote {html}")
    if trace is not None:
        trace.write_text(json.dumps(chrome_trace(explanation)), encoding="utf-8")
        say(f"wrote {trace}")
