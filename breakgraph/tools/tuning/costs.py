"""What steps and graphs cost, from measurements of some sizes; and what a ladder costs then."""

from __future__ import annotations

import enum
import math
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

from breakgraph.buckets import Buckets
from breakgraph.errors import ConfigError
from breakgraph.tools.tuning.sizes import MOST_COUNT, MOST_ROWS

__all__ = ["CostUnit", "Costs", "LadderFigures", "Line"]


class CostUnit(enum.Enum):
    """What the cost of a step is counted in; the value is the text for people."""

    ROWS = "rows"
    """No times were given: a step costs as many as it computes."""
    MICROSECONDS = "us"


@attrs.frozen(kw_only=True)
class LadderFigures:
    """What is expected of a ladder.

    Attributes:
        name: What it is called.
        ladder: Its buckets.
        mean_cost: Cost of a step on average, in the unit of the tuning.
        mean_padding: Padding rows of a step on average, eager ones included, which have none.
        largest_padding: Most padding rows that a step of these sizes has.
        waste: Share of all computed rows that is padding, 0 to 1.
        eager_share: Share of the steps that run eagerly, 0 to 1.
        memory_bytes: Bytes of all its graphs; None where they are not known.
        fits: Whether it keeps to the limits of the tuning.
    """

    name: str
    ladder: Buckets
    mean_cost: float
    mean_padding: float
    largest_padding: int
    waste: float
    eager_share: float
    memory_bytes: int | None
    fits: bool = True

    @property
    def graphs(self) -> int:
        """How many buckets it has."""
        return len(self.ladder.sizes)


@attrs.frozen
class Line:
    """A quantity that was measured at some sizes.

    Between two of them it is interpolated. Below the smallest it is that of the smallest, since a small step is bound by the
    host. Above the largest the line through the last two goes on; with one measurement it grows in proportion to the rows.

    Attributes:
        sizes: Where it was measured, ascending.
        values: What was measured there.
    """

    sizes: tuple[int, ...]
    values: tuple[float, ...]

    @classmethod
    def of(cls, measured: Mapping[int, float], *, name: str) -> Line:
        """Checks measurements.

        Args:
            measured: Size to number.
            name: What they are called.

        Raises:
            ConfigError: There are none, or a size or a number is out of range.
        """
        if not isinstance(measured, Mapping):
            raise _no_mapping(name, measured)
        measured = _python_numbers(measured)
        for size, value in measured.items():
            number = not isinstance(value, bool) and isinstance(value, int | float) and 0 <= value <= MOST_COUNT
            if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MOST_ROWS or not number:
                raise ConfigError(
                    f"{name} has {value!r} for size {size!r}; expected a number from 0 to {MOST_COUNT:.0e} for an integer"
                    f" from 1 to {MOST_ROWS:,}.",
                    why="What lies between two measured sizes is interpolated, so one wrong number moves many.",
                    fix="Give what was measured, or leave that size out.",
                )
        if not measured:
            raise ConfigError(
                f"{name} is empty; expected what was measured of at least one size.",
                why="Nothing can be interpolated between no measurements.",
                fix=f"Leave {name} out, or measure some sizes.",
            )
        sizes = tuple(sorted(measured))
        return cls(sizes, tuple(float(measured[size]) for size in sizes))

    def rising(self) -> Line:
        """The same with every fall filled up: each value is the largest of those up to it."""
        values: list[float] = []
        for value in self.values:
            values.append(max(value, values[-1]) if values else value)
        return Line(self.sizes, tuple(values))

    def at(self, size: int) -> float:
        """The value at a size.

        Args:
            size: Rows.
        """
        sizes, values = self.sizes, self.values
        index = bisect_left(sizes, size)
        if index < len(sizes) and sizes[index] == size:
            return values[index]
        if index == 0:
            return values[0]
        if index == len(sizes):
            if index == 1:
                return values[0] * size / sizes[0]
            slope = max(values[-1] - values[-2], 0.0) / (sizes[-1] - sizes[-2])
            return values[-1] + slope * (size - sizes[-1])
        below, above = values[index - 1], values[index]
        part = (above - below) * (size - sizes[index - 1]) / (sizes[index] - sizes[index - 1])
        # Rounding must not lift it above the next measurement: a fall there would be refused.
        return min(below + part, max(above, below))

    def bytes_at(self, size: int) -> int:
        """The value at a size, in whole bytes.

        Args:
            size: Rows.
        """
        return math.ceil(self.at(size))


@attrs.frozen(kw_only=True)
class Costs:
    """Sizes, and what is known of their steps and graphs.

    Attributes:
        counts: Size to how often it was seen, ascending, none of them 0.
        step: Microseconds of a replay; None counts rows instead.
        eager: Microseconds of an eager step; None: every size needs a bucket.
        memory: Bytes of a graph; None where they are not known.
        notes: What was done to the measurements, for people.
    """

    counts: dict[int, float]
    step: Line | None = None
    eager: Line | None = None
    memory: Line | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        sizes: Mapping[int, float],
        *,
        step_times: Mapping[int, float] | None,
        eager_times: Mapping[int, float] | None,
        graph_bytes: Mapping[int, float] | int | None,
    ) -> Costs:
        """Checks what was given, and fills up falls where a ladder needs that.

        Args:
            sizes: See `tune`.
            step_times: See `tune`.
            eager_times: See `tune`.
            graph_bytes: See `tune`.

        Raises:
            ConfigError: Something is out of range, or there are eager times and no step times.
        """
        counts = _checked_counts(sizes)
        if eager_times is not None and step_times is None:
            raise ConfigError(
                "eager times came without step times; expected both, or step times alone.",
                why="A step would cost rows with a graph and microseconds without one, which cannot be compared.",
                fix="Give --step-times as well (step_times= in Python).",
            )
        if isinstance(graph_bytes, int):
            graph_bytes = dict.fromkeys((1, MOST_ROWS), graph_bytes)
        step = None if step_times is None else Line.of(step_times, name="step_times")
        eager = None if eager_times is None else Line.of(eager_times, name="eager_times")
        memory = None if graph_bytes is None else Line.of(graph_bytes, name="graph_bytes")
        notes = []
        for line, name in ((step, "step times"), (memory, "graph bytes")):
            notes += [] if line is None else _raised(line, name=name)
        for line, name in ((step, "step times"), (eager, "eager times"), (memory, "graph bytes")):
            notes += [] if line is None else _beyond(line, name=name, largest=max(counts))
        return cls(
            counts=counts,
            step=None if step is None else step.rising(),
            eager=eager,
            memory=None if memory is None else memory.rising(),
            notes=tuple(notes),
        )

    @property
    def unit(self) -> CostUnit:
        """What steps cost."""
        return CostUnit.ROWS if self.step is None else CostUnit.MICROSECONDS

    @property
    def largest(self) -> int:
        """The largest size."""
        return next(reversed(self.counts))

    def of_step(self, bucket: int) -> float:
        """Cost of a replay.

        Args:
            bucket: Its rows, padding included.
        """
        return float(bucket) if self.step is None else self.step.at(bucket)

    def of_graphs(self, ladder: Buckets) -> int | None:
        """Bytes of all graphs of a ladder; None where they are not known.

        Args:
            ladder: Its buckets.
        """
        return None if self.memory is None else sum(map(self.memory.bytes_at, ladder.sizes))

    def figures(self, ladder: Buckets, *, name: str) -> LadderFigures:
        """What a ladder costs.

        Args:
            ladder: It has a bucket for every size, unless sizes may run eagerly.
            name: What it is called.
        """
        costs: list[float] = []
        real: list[float] = []
        padding: list[float] = []
        eagerly: list[float] = []
        largest = 0
        for size, count in self.counts.items():
            bucket = ladder.round_up(size)
            real.append(count * size)
            if bucket is None:
                assert self.eager is not None
                costs.append(count * self.eager.at(size))
                eagerly.append(count)
                continue
            costs.append(count * self.of_step(bucket))
            padding.append(count * (bucket - size))
            largest = max(largest, bucket - size)
        steps, padded = math.fsum(self.counts.values()), math.fsum(padding)
        return LadderFigures(
            name=name,
            ladder=ladder,
            mean_cost=math.fsum(costs) / steps,
            mean_padding=padded / steps,
            largest_padding=largest,
            waste=padded / (padded + math.fsum(real)),
            eager_share=math.fsum(eagerly) / steps,
            memory_bytes=self.of_graphs(ladder),
        )


def _python_numbers(values: Mapping[Any, Any]) -> dict[Any, Any]:
    """With numbers of numpy as those of Python, such as `np.unique` counts."""
    return {_python_number(key): _python_number(value) for key, value in values.items()}


def _python_number(value: Any) -> Any:
    return value.item() if isinstance(value, np.integer | np.floating) else value


def _no_mapping(name: str, value: object) -> ConfigError:
    return ConfigError(
        f"{name} is of type {type(value).__name__}; expected a mapping of sizes to numbers.",
        why="A ladder depends on how much there is of each size.",
        fix=f"Give {name} as a dict, such as {{16: 3, 64: 5}}.",
    )


def _checked_counts(sizes: Mapping[int, float]) -> dict[int, float]:
    if not isinstance(sizes, Mapping):
        raise _no_mapping("sizes", sizes)
    sizes = _python_numbers(sizes)
    for size, count in sizes.items():
        number = not isinstance(count, bool) and isinstance(count, int | float) and 0 <= count <= MOST_COUNT
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MOST_ROWS or not number:
            raise ConfigError(
                f"sizes has {count!r} for size {size!r}; expected a number from 0 to {MOST_COUNT:.0e} for an integer from 1"
                f" to {MOST_ROWS:,}.",
                why="Each says how often a step had so many rows.",
                fix="Give what was counted: breakgraph.tools.read_sizes reads it from a file.",
            )
    counts = {size: sizes[size] for size in sorted(sizes) if sizes[size] > 0}
    if not counts:
        raise ConfigError(
            "sizes counts no step.",
            why="The best ladder for no step has no bucket, and the first step would run eagerly.",
            fix="Give a count above 0 for at least one size.",
        )
    return counts


def _raised(line: Line, *, name: str) -> list[str]:
    pairs = zip(line.sizes, line.values, line.rising().values, strict=True)
    raised = [f"{size} from {value:g} to {risen:g}" for size, value, risen in pairs if risen > value]
    if not raised:
        return []
    more = f" and {len(raised) - 3} more" if len(raised) > 3 else ""
    return [f"{name} fell as sizes grew, and were raised to that of a smaller size: {', '.join(raised[:3])}{more}."]


def _beyond(line: Line, *, name: str, largest: int) -> list[str]:
    if largest <= line.sizes[-1]:
        return []
    how = "the line of the last two" if len(line.sizes) > 1 else "proportion to the rows"
    return [f"{name} end at size {line.sizes[-1]}; up to {largest} they go on in {how}, which nobody measured."]
