"""An explanation as a table for terminals."""

from __future__ import annotations

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Column, Table
from rich.text import Text

from breakgraph.explanation import Explanation, StepExplained
from breakgraph.replay_program import StepKind

__all__ = ["ExplanationTable"]

_NARROW = 120
_STYLES = {StepKind.SEGMENT: "blue", StepKind.BREAK: "yellow", StepKind.HOISTED: "magenta"}


class ExplanationTable:
    """What `rich` prints of an explanation: a table of the steps, totals, advice.

    Args:
        explanation: Measured or not.
    """

    def __init__(self, explanation: Explanation) -> None:
        self._explanation = explanation

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The parts, one below the other."""
        lines = str(self._explanation).splitlines()
        yield Text(lines[0], style="bold")
        if not self._explanation.steps or options.max_width < _NARROW:
            yield from map(Text, lines[1:])  # a table would fold its names to a few letters a line
            return
        yield self._table()
        yield Text("kernels of the segments", style="bold")
        names = Table(Column("count", justify="right"), Column("name", overflow="ellipsis", no_wrap=True), box=None)
        for name, count in self._explanation.kernels.items():
            names.add_row(str(count), Text(name))
        yield names
        for line in lines[1:]:
            if line.startswith(("  a replay", "  live data", "  * ")) or "of the pool are held" in line:
                yield Text(line.strip())

    def _table(self) -> Table:
        explanation = self._explanation
        right = {"justify": "right", "no_wrap": True}
        table = Table(
            Column("", **right),  # type: ignore[arg-type]
            "kind",
            Column("name", overflow="fold"),
            Column("kernels", **right),  # type: ignore[arg-type]
            Column("bytes in", **right),  # type: ignore[arg-type]
            Column("out", **right),  # type: ignore[arg-type]
            Column("streams", overflow="fold"),
            box=box.SIMPLE_HEAD,
        )
        if explanation.times is not None:
            table.add_column("host us", **right)  # type: ignore[arg-type]
            table.add_column("device us", **right)  # type: ignore[arg-type]
        table.add_column("share", **right)  # type: ignore[arg-type]
        table.add_column("where, and why it ends", overflow="fold")
        for step in explanation.steps:
            table.add_row(*self._cells(step))
        return table

    def _cells(self, step: StepExplained) -> list[Text]:
        share, is_break = self._explanation.share(step), step.kind is not StepKind.SEGMENT
        use = step.streams
        streams = " ".join(
            f"{count} {name}"
            for name, count in (("fork", use.forks), ("join", use.joins), ("wait", use.waits), ("event", use.events))
            if count
        )
        detail = "; ".join(part for part in (f"live {', '.join(step.live)}" if step.live else "", step.returns) if part)
        cells = [
            str(step.index),
            step.kind.value,
            step.name + (f"\n{detail}" if detail else ""),
            "" if step.launches is None else str(step.launches),
            f"{step.traffic.read:,}" if is_break else "",
            f"{step.traffic.written:,}" if is_break else "",
            streams,
        ]
        if self._explanation.times is not None:
            time = step.time
            cells += ["", ""] if time is None else [f"{time.host_us:.1f}", f"{time.device_us:.1f}" + " *" * time.waits]
        cells += ["" if share is None else f"{share:.1%}", step.line + (f"\nends: {step.why}" if step.why else "")]
        return [Text(cell, style=_STYLES[step.kind] if index == 1 else "") for index, cell in enumerate(cells)]
