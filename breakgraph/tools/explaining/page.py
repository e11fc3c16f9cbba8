"""An explanation as one page of HTML that needs nothing else: no network, no other file."""

from __future__ import annotations

import html
import json
from collections import Counter
from collections.abc import Iterator
from importlib import resources
from typing import Any

from breakgraph.errors import ConfigError
from breakgraph.explanation import Explanation, StepExplained, duration, short_name
from breakgraph.replay_program import StepKind

__all__ = ["html_page"]

_KINDS = {StepKind.SEGMENT: 0, StepKind.BREAK: 1, StepKind.HOISTED: 2}
_TIPS = 6  # kernels of a step that its tip names
_ROW_NAMES = 3  # and its row
_BROWSABLE = 4000  # bars; above, a page takes seconds to draw


def html_page(explanation: Explanation) -> str:
    """A page with a timeline (host and device lanes), the steps, the kernels and the advice.

    Args:
        explanation: Measured or not; without times a step is as wide as it has kernels, and there is one lane.

    Returns:
        The page, UTF-8, some hundred bytes a step besides 10 kB.
    """
    if not isinstance(explanation, Explanation):
        raise ConfigError(
            f"html_page() got a {type(explanation).__name__}; expected an Explanation.",
            why="The page shows what explain() found.",
            fix="Pass graph.explain(), or breakgraph.tools.explain(graph).",
        )
    bars = list(_measured_bars(explanation) if explanation.times is not None else _unmeasured_bars(explanation))
    left_out = len(bars) - _BROWSABLE
    legend = "scroll to zoom, drag to move, double-click for all, click for the row"
    if left_out > 0:
        bars, legend = bars[:_BROWSABLE], f"the first {_BROWSABLE} of {len(bars)} bars; {legend}"
    values = {
        "TITLE": html.escape(explanation.name),
        "ABOUT": html.escape(_about(explanation)),
        "CARDS": "".join(
            f"<div class='card'><b>{html.escape(value)}</b><span>{html.escape(name)}</span></div>"
            for name, value in _cards(explanation)
        ),
        "LEGEND": html.escape(legend),
        "ADVICE": _advice(explanation),
        "ROWS": "\n".join(_row(explanation, step) for step in explanation.steps),
        "KERNELS": "\n".join(
            f"<tr><td class='n'>{count}</td><td class='kernels'>{html.escape(name)}</td></tr>"
            for name, count in explanation.kernels.items()
        ),
        "UNIT": " us" if explanation.times is not None else "",
        # "</script>" inside of a name must not end the element.
        "DATA": json.dumps(bars, separators=(",", ":")).replace("<", "\\u003c"),
    }
    page = resources.files("breakgraph.tools.explaining").joinpath("page.html").read_text(encoding="utf-8")
    # Split once, so that what looks like a placeholder in somebody's name stays what it is.
    parts = page.split("@")
    return "".join(values.get(part, part) if index % 2 else part for index, part in _placed(parts, values))


def _placed(parts: list[str], values: dict[str, str]) -> Iterator[tuple[int, str]]:
    """Pieces of the page with odd numbers for placeholders; an "@" of CSS is put back."""
    index = 0
    yield 0, parts[0]
    while index + 1 < len(parts):
        index += 1
        if parts[index] in values:
            yield 1, parts[index]
            index += 1
            yield 0, parts[index]
        else:
            yield 0, "@" + parts[index]


def _about(explanation: Explanation) -> str:
    rows = "" if explanation.padded_rows is None else f" of {explanation.padded_rows} rows"
    live = f"live data {', '.join(explanation.live_names)}" if explanation.live_names else "no live data"
    if explanation.times is None:
        return f"A replay{rows}, {live}. Not measured: the timeline shows counts of kernels."
    times = explanation.times
    return (
        f"A replay{rows}, {live}. Measured on {times.device}, medians of {times.runs} replays; the timeline is a replay with a "
        "clock around each step, which takes some time."
    )


def _cards(explanation: Explanation) -> Iterator[tuple[str, str]]:
    yield "segments", str(len(explanation.segments))
    yield "breaks", str(len(explanation.breaks))
    yield "kernels in segments", str(sum(step.launches or 0 for step in explanation.segments))
    if explanation.times is not None:
        yield "host", duration(explanation.times.host_us)
        yield "device", duration(explanation.times.device_us)
    for name, title in (("pool_bytes", "pool"), ("bridge_bytes", "bridges"), ("executable_bytes", "executables")):
        yield title, _bytes(int(explanation.totals.get(name, 0)))


def _bytes(count: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024  # type: ignore[assignment]
    return f"{count:,.2f} GiB"


def _advice(explanation: Explanation) -> str:
    if not explanation.advice:
        return "<p>Nothing was found.</p>"
    return "<ul>" + "".join(f"<li>{html.escape(str(advice))}</li>" for advice in explanation.advice) + "</ul>"


def _row(explanation: Explanation, step: StepExplained) -> str:
    share, time = explanation.share(step), step.time
    detail = [*step.notes, f"ends: {step.why}" if step.why else "", step.returns]
    if step.live:
        detail.append(f"live data {', '.join(step.live)}")
    small = "".join(f"<small>{html.escape(text)}</small>" for text in detail if text)
    names = Counter(step.kernels or {}).most_common()
    kernels = "".join(
        f"<small title='{html.escape(name)}'>{count} x {html.escape(short_name(name, most=44))}</small>"
        for name, count in names[:_ROW_NAMES]
    ) + (f"<small>and {len(names) - _ROW_NAMES} more names</small>" if len(names) > _ROW_NAMES else "")
    cells = (
        f"<td class='n'>{step.index}</td><td>{step.kind.value}</td><td>{html.escape(step.name)}{small}</td>",
        f"<td class='n'>{'' if step.launches is None else step.launches}{kernels}</td>",
        f"<td class='n'>{'' if time is None else f'{time.host_us:.1f}'}</td>",
        f"<td class='n'>{'' if time is None else f'{time.device_us:.1f}'}</td>",
        f"<td class='n'>{'' if share is None else f'{share:.1%}'}</td>",
        f"<td class='n'>{_bytes(step.traffic.read)} / {_bytes(step.traffic.written)}</td>"
        if step.kind is not StepKind.SEGMENT
        else "<td></td>",
        f"<td class='where'>{html.escape(step.line)}</td>",
    )
    return f"<tr data-step='{step.index}'>{''.join(cells)}</tr>"


def _measured_bars(explanation: Explanation) -> Iterator[dict[str, Any]]:
    for step in explanation.steps:
        time = step.time
        if time is not None:
            yield _bar(step, lane=0, begin=time.host_at_us, took=time.host_end_us - time.host_at_us, waits=time.waits)
            yield _bar(step, lane=1, begin=time.device_at_us, took=time.device_end_us - time.device_at_us)


def _unmeasured_bars(explanation: Explanation) -> Iterator[dict[str, Any]]:
    at = 0.0
    for step in explanation.steps:
        wide = float(max(1, step.launches or 0))
        yield _bar(step, lane=1 if step.kind is StepKind.SEGMENT else 0, begin=at, took=wide)
        at += wide


def _bar(step: StepExplained, *, lane: int, begin: float, took: float, waits: bool = False) -> dict[str, Any]:
    lines = [f"{step.index}  {step.kind.value}  {step.name}", step.line]
    if step.time is not None:
        lines.append(f"{duration(step.time.host_us)} of the host, {duration(step.time.device_us)} of the device")
    if step.kernels:
        lines += [f"{count} x {short_name(name, most=100)}" for name, count in Counter(step.kernels).most_common(_TIPS)]
        lines += [f"and {len(step.kernels) - _TIPS} more names"] if len(step.kernels) > _TIPS else []
    lines += [f"ends: {step.why}"] if step.why else []
    return {
        "step": step.index,
        "lane": lane,
        "kind": _KINDS[step.kind],
        "at": round(begin, 3),
        "us": round(took, 3),
        "waits": waits,
        "label": step.label,
        "text": "\n".join(lines),
    }
