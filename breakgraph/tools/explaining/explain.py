"""`explain`: what a graph holds and what each step costs, measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from breakgraph.capture import BreakableCUDAGraph
from breakgraph.explanation import Advice, Explanation
from breakgraph.tools.explaining.measure import measure

__all__ = ["explain"]


def explain(
    graph: BreakableCUDAGraph,
    *,
    live: Mapping[str, Any] | None = None,
    valid_rows: int | None = None,
    replay: Callable[[], Any] | None = None,
    runs: int = 20,
    small: int = 4,
) -> Explanation:
    """`graph.explain()` with times: each step on the host and on the device, and the kernels that breaks launch.

    Args:
        graph: A sealed graph. It is replayed for real; see `measure`.
        live: Live data of each replay.
        valid_rows: Real rows of each replay.
        replay: Replays the graph once, in place of the two above: such as the `replay` of `runner.rehearsal(key)`.
        runs: Replays of each kind; the medians count.
        small: Segments with fewer kernels are marked.

    Returns:
        The explanation; `print()` shows it, `as_dict()` is for JSON, `breakgraph.tools.chrome_trace` and `html_page` make
        a picture of it.

    Raises:
        ConfigError: `runs` is below 1.
        NoGraphError: Nothing was captured.

    Cost: some 60 replays and host syncs, and one replay under torch's profiler.
    """
    measured = measure(graph, live=live, valid_rows=valid_rows, replay=replay, runs=runs)
    plain = graph.explain(small=small, times=measured.steps)
    steps = tuple(
        attrs.evolve(step, kernels=measured.kernels[step.index]) if step.index in measured.kernels else step
        for step in plain.steps
    )
    notes = (Advice(measured.note, ()),) if measured.note else ()
    return attrs.evolve(plain, steps=steps, times=measured.whole, advice=(*plain.advice, *notes))
