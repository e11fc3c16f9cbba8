"""An explanation as a Chrome trace: open it in chrome://tracing or Perfetto."""

from __future__ import annotations

from typing import Any

from breakgraph.errors import ConfigError
from breakgraph.explanation import Explanation, StepExplained

__all__ = ["chrome_trace"]

_HOST, _DEVICE = 1, 2


def chrome_trace(explanation: Explanation) -> dict[str, Any]:
    """One replay as trace events: what the host calls, and what the device does.

    Args:
        explanation: A measured one.

    Returns:
        Plain values; `json.dump` them into a file.

    Raises:
        ConfigError: Nothing was measured, so there are no times to show.
    """
    if explanation.times is None:
        raise ConfigError(
            f"chrome_trace: {explanation.name} was explained without times.",
            why="A trace is a picture of times.",
            fix="Use breakgraph.tools.explain(graph, live=...), or breakgraph explain --measure.",
        )
    events: list[dict[str, Any]] = [_name(_HOST, "host"), _name(_DEVICE, explanation.times.device)]
    for step in explanation.steps:
        if step.time is not None:
            time = step.time
            events.append(_event(step, lane=_HOST, begin=time.host_at_us, took=time.host_end_us - time.host_at_us))
            events.append(
                _event(step, lane=_DEVICE, begin=time.device_at_us, took=time.device_end_us - time.device_at_us)
            )
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": {"graph": explanation.name}}


def _name(lane: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "thread_name", "pid": 1, "tid": lane, "args": {"name": name}}


def _event(step: StepExplained, *, lane: int, begin: float, took: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": step.label,
        "cat": step.kind.value,
        "pid": 1,
        "tid": lane,
        "ts": begin,
        "dur": took,
        "args": {"step": step.index, "line": step.line, "ends": step.why, "kernels": dict(step.kernels or {})},
    }
