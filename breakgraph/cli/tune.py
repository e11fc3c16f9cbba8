"""`breakgraph tune`."""

from __future__ import annotations

import enum
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from breakgraph.cli.application import app
from breakgraph.cli.output import exit_status, raise_on_interrupt, stdout_errors, write
from breakgraph.errors import ConfigError

if TYPE_CHECKING:
    from breakgraph.tools.tuning.tune import Tuning

__all__ = ["tune"]


class Phase(enum.StrEnum):
    """Whose steps; the tool has one of its own, which would bring torch along when only --help is asked for."""

    PREFILL = "prefill"
    DECODE = "decode"


@app.command()
def tune(
    *,
    sizes: Annotated[
        Path,
        typer.Option(
            help="How often each size was seen: .csv with columns size and count, or .jsonl with one object a line,"
            " such as serve --record-sizes writes.",
            show_default=False,
        ),
    ],
    phase: Annotated[
        Phase | None, typer.Option(help="Whose lines to take of a file that has both.", show_default=False)
    ] = None,
    max_graphs: Annotated[int | None, typer.Option(help="Most buckets. This, --memory or both.")] = None,
    memory: Annotated[float | None, typer.Option(help="Most memory of all graphs together, GiB.")] = None,
    largest: Annotated[
        int | None,
        typer.Option(
            help="A size that must have a bucket, such as serve's --max-num-batched-tokens: counted as one more step.",
            show_default=False,
        ),
    ] = None,
    step_times: Annotated[
        Path | None,
        typer.Option(
            help="Measured times of replays: .csv with columns size and microseconds. Without, a step costs its rows.",
            show_default=False,
        ),
    ] = None,
    eager_times: Annotated[
        Path | None,
        typer.Option(help="The same of eager steps: large sizes may then have no graph.", show_default=False),
    ] = None,
    graph_bytes: Annotated[
        Path | None,
        typer.Option(help="Measured bytes of graphs: .csv with columns size and bytes.", show_default=False),
    ] = None,
    bytes_per_graph: Annotated[int | None, typer.Option(help="Bytes of a graph, where all take the same.")] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Write ladder and figures as JSON, for serve --prefill-sizes FILE and read_ladder.", show_default=False
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write a picture of waste against graphs, PNG.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object in place of the table.")] = False,
) -> None:
    """Find the buckets with the least expected cost for the sizes that steps had, and compare them with usual ones."""
    with exit_status():
        from breakgraph.tools.tuning.ladder_file import check_output, write_ladder
        from breakgraph.tools.tuning.plot import check_plot, save_plot
        from breakgraph.tools.tuning.tune import read_measured, read_sizes
        from breakgraph.tools.tuning.tune import tune as tuned

        raise_on_interrupt()
        if plot is not None:
            check_plot(plot)
        if output is not None:
            check_output(output, inputs=(sizes, step_times, eager_times, graph_bytes, plot))
        tuning = tuned(
            _with(read_sizes(sizes, phase=phase), largest),
            max_graphs=max_graphs,
            memory_bytes=None if memory is None else _bytes(memory),
            step_times=None if step_times is None else read_measured(step_times, column="microseconds"),
            eager_times=None if eager_times is None else read_measured(eager_times, column="microseconds"),
            graph_bytes=_graph_bytes(graph_bytes, each=bytes_per_graph),
        )
        if output is not None:
            write_ladder(output, values={**tuning.as_dict(), **({} if phase is None else {"phase": phase.value})})
        if plot is not None:
            save_plot(tuning, path=plot)
        if as_json:
            write(json.dumps(tuning.as_dict(), indent=1) + "\n")
        elif sys.stdout.isatty():
            _print(tuning)
        else:
            write(f"{tuning}\n")


def _with(sizes: dict[int, int], largest: int | None) -> dict[int, int]:
    return sizes if largest is None else {**sizes, largest: sizes.get(largest, 0) + 1}


def _bytes(gib: float) -> int:
    if not 0 < gib <= 1e6:
        raise ConfigError(
            f"--memory is {gib}; expected a number of GiB above 0 and up to a million.",
            why="It is what all graphs together may take.",
            fix="Give it like --memory 0.5, or leave it out and limit --max-graphs.",
        )
    return int(gib * 2**30)


def _graph_bytes(path: Path | None, *, each: int | None) -> dict[int, float] | int | None:
    from breakgraph.tools.tuning.tune import read_measured

    if path is None:
        return each
    if each is not None:
        raise ConfigError(
            "--graph-bytes and --bytes-per-graph were both given; expected one of them.",
            why="Both say what a graph takes.",
            fix="Leave one of them out.",
        )
    return read_measured(path, column="bytes")


def _print(tuning: Tuning) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    above, below = tuning.lines()
    head, *rows = tuning.table()
    table = Table(head[0], *(Column(name, justify="right") for name in head[1:]), box=box.SIMPLE_HEAD)
    for index, row in enumerate(rows):
        table.add_row(*map(Text, row), style="bold" if index == 0 else None)
    with stdout_errors():
        console = Console()
        for line in above:
            print(line)  # not the console's: a ladder to be pasted must not be folded
        console.print(table)
        for line in below:
            print(line)
