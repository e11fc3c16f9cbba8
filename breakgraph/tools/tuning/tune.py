"""The ladder of buckets with the least expected cost for the sizes that steps had, and what the usual ladders cost.

`breakgraph.bucket_tuning` finds it exactly; here it is fed from counts and measurements, kept to a time that people wait,
and compared.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

from breakgraph.bucket_tuning import ladders_by_count, tuned_ladder
from breakgraph.buckets import Buckets
from breakgraph.errors import ConfigError
from breakgraph.tools.tuning.costs import Costs, CostUnit, LadderFigures, Line
from breakgraph.tools.tuning.ladder_file import read_ladder
from breakgraph.tools.tuning.reports import MeasuredSteps, from_reports
from breakgraph.tools.tuning.rivals import usual_ladders
from breakgraph.tools.tuning.sizes import read_measured, read_sizes

__all__ = [
    "LadderFigures",
    "MeasuredSteps",
    "Tuning",
    "from_reports",
    "read_ladder",
    "read_measured",
    "read_sizes",
    "tune",
]

_GIB = 1 << 30
_MOST_CELLS = 1_000_000
"""Candidates by graphs that are searched without a limit of bytes: about two seconds."""
_MOST_IN_MEMORY = 192
"""Candidates that are searched within a limit of bytes, which is a knapsack: a few seconds at worst."""


@attrs.frozen(kw_only=True)
class Tuning:
    """The best ladder, and what the usual ones cost. `str` is a table for people.

    Attributes:
        tuned: What is expected of the best ladder.
        rivals: The same of the usual ones, each up to the largest size.
        costs: What both were computed from.
        max_graphs: Most buckets; None: no limit.
        memory_bytes: Most bytes of all graphs; None: no limit.
        notes: What was done to the measurements and to the candidates, for people.
    """

    tuned: LadderFigures
    rivals: tuple[LadderFigures, ...]
    costs: Costs = attrs.field(repr=False)
    max_graphs: int | None
    memory_bytes: int | None
    notes: tuple[str, ...] = ()

    @property
    def ladder(self) -> Buckets:
        """The best ladder, as runners take it."""
        return self.tuned.ladder

    @property
    def unit(self) -> CostUnit:
        """What costs are counted in."""
        return self.costs.unit

    def by_count(self, most: int) -> list[LadderFigures]:
        """The best ladders of at most 1, 2, ... buckets, whatever their memory.

        Args:
            most: How many, at least 1; never more than there are sizes. 64 graphs for 8,192 sizes take two seconds; of more
                sizes than that not all are tried, as in `tune`.
        """
        most = max(most, 1)
        counts = _thinned(self.costs.counts, most=max(_MOST_CELLS // most, most))
        eager = None if self.costs.eager is None else _mean_of_cells(self.costs, self.costs.eager, counts)
        found = ladders_by_count(
            counts,
            most=min(most, len(counts)),
            cost_per_row=self.costs.of_step,
            eager_cost=None if eager is None else eager.__getitem__,
        )
        return [self.costs.figures(one.buckets, name=f"{count} graphs") for count, one in enumerate(found, start=1)]

    def as_dict(self) -> dict[str, Any]:
        """Everything as values that JSON has; `ladder` is what `read_ladder` reads."""
        return {
            "ladder": list(self.ladder.sizes),
            "unit": self.unit.value,
            "steps": sum(self.costs.counts.values()),
            "distinct_sizes": len(self.costs.counts),
            "largest_size": self.costs.largest,
            "max_graphs": self.max_graphs,
            "memory_bytes": self.memory_bytes,
            "tuned": _as_dict(self.tuned),
            "rivals": [_as_dict(rival) for rival in self.rivals],
            "notes": list(self.notes),
        }

    def table(self) -> list[tuple[str, ...]]:
        """Cells of a table for people; the first row is its head. A ladder beyond the limits has a star."""
        timed = self.unit is CostUnit.MICROSECONDS
        head = ["ladder", "graphs", "waste", "mean padding", "largest padding"]
        head += ["mean step, us"] * timed
        head += ["eager"] * (self.costs.eager is not None)
        head += ["memory, GiB"] * (self.costs.memory is not None)
        rows = [tuple(head)]
        for one in (self.tuned, *self.rivals):
            row = [one.name if one.fits else f"{one.name} *", f"{one.graphs:,}", f"{one.waste:.1%}"]
            row += [f"{one.mean_padding:,.1f}", f"{one.largest_padding:,}"]
            row += [f"{one.mean_cost:,.1f}"] * timed
            row += [f"{one.eager_share:.1%}"] * (self.costs.eager is not None)
            row += [] if one.memory_bytes is None else [f"{one.memory_bytes / _GIB:.3f}"]
            rows.append(tuple(row))
        return rows

    def lines(self) -> tuple[list[str], list[str]]:
        """What stands above the table, the ladder ready to be pasted, and what stands below it."""
        sizes, steps = len(self.costs.counts), sum(self.costs.counts.values())
        limits = [] if self.max_graphs is None else [f"at most {self.max_graphs:,} graphs"]
        limits += [] if self.memory_bytes is None else [f"at most {_memory(self.memory_bytes)}"]
        above = [f"{steps:,} steps of {sizes:,} sizes up to {self.costs.largest:,}; {', '.join(limits)}"]
        if self.ladder.sizes:
            above += [
                f"runners: Buckets.of({list(self.ladder.sizes)})",
                f"serve:   --prefill-sizes {','.join(map(str, self.ladder.sizes))} (of decode steps: --decode-sizes)",
            ]
        else:
            above.append("no graph pays: an eager step is cheaper for every size (serve --eager)")
        beyond = [] if all(one.fits for one in self.rivals) else ["* beyond the limits"]
        return above, [*beyond, *(f"note: {note}" for note in self.notes)]

    def __str__(self) -> str:
        above, below = self.lines()
        rows = self.table()
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        table = [
            "  ".join(
                [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
            )
            for row in rows
        ]
        return "\n".join([*above, "", *table, *([""] if below else []), *below])


def tune(
    sizes: Mapping[int, float],
    *,
    max_graphs: int | None = None,
    memory_bytes: int | None = None,
    step_times: Mapping[int, float] | None = None,
    eager_times: Mapping[int, float] | None = None,
    graph_bytes: Mapping[int, float] | int | None = None,
) -> Tuning:
    """Find the ladder with the least expected cost, and compare it with the usual ones.

    The cost of a step is the time of its bucket, or without times the rows of its bucket. The ladder is exact while there are
    not too many sizes: with 58 graphs up to 8,192 of them, 192 where a limit of bytes binds and graphs differ in bytes.
    Beyond that only the largest size of each 2, 4, 8, ... may be a bucket, and a note says so.

    Args:
        sizes: Size to how often it was seen, such as `read_sizes` returns. Sizes are rows, 1 to 1,048,576.
        max_graphs: Most buckets. This, or `memory_bytes`, or both must be given.
        memory_bytes: Most bytes of all graphs together; needs `graph_bytes`.
        step_times: Size to measured microseconds of a replay of so many rows. See `Line` for what is taken between, below and
            above them. Where they fall as sizes grow they are raised to that of the smaller size.
        eager_times: The same of eager steps. With it sizes above the largest bucket run eagerly where that is cheaper; without
            it every size gets a bucket.
        graph_bytes: Size to measured bytes of a graph, read in the same way; or bytes of each graph.

    Returns:
        The ladder and its rivals. Among ladders of equal cost the one with the fewest buckets is taken.

    Raises:
        ConfigError: A number is out of range, no limit was given or one without what it needs, or no ladder keeps to them.
    """
    costs = Costs.of(sizes, step_times=step_times, eager_times=eager_times, graph_bytes=graph_bytes)
    _check_limits(costs, max_graphs=max_graphs, memory_bytes=memory_bytes)
    ladder, notes = _best(costs, max_graphs=max_graphs, memory_bytes=memory_bytes)

    def figures(buckets: Buckets, name: str) -> LadderFigures:
        found = costs.figures(buckets, name=name)
        few = max_graphs is None or found.graphs <= max_graphs
        small = memory_bytes is None or (found.memory_bytes or 0) <= memory_bytes
        return attrs.evolve(found, fits=few and small)

    return Tuning(
        tuned=figures(ladder, "tuned"),
        rivals=tuple(figures(buckets, name) for name, buckets in usual_ladders(costs.largest).items()),
        costs=costs,
        max_graphs=max_graphs,
        memory_bytes=memory_bytes,
        notes=(*costs.notes, *notes),
    )


def _check_limits(costs: Costs, *, max_graphs: int | None, memory_bytes: int | None) -> None:
    if max_graphs is None and memory_bytes is None:
        raise ConfigError(
            "neither a number of graphs nor their memory is limited; expected one of them, or both.",
            why="Without a limit the best ladder has a graph for every size.",
            fix="Give --max-graphs 16 or --memory 0.5 (max_graphs=, memory_bytes= in Python).",
        )
    least = 1 if costs.eager is None else 0
    for name, value, lowest in (("max_graphs", max_graphs, least), ("memory_bytes", memory_bytes, 0)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < lowest):
            raise ConfigError(
                f"{name} is {value!r}; expected an integer of at least {lowest}.",
                why="Without any graph every step runs eagerly, and no eager times were given to say what that costs."
                if value == 0
                else "It limits what graphs may take.",
                fix=f"Raise {name}, or leave it out.",
            )
    if memory_bytes is None:
        return
    if costs.memory is None:
        raise ConfigError(
            "the memory of graphs is limited, but the bytes of a graph are not known.",
            why="A limit of bytes limits nothing then.",
            fix="Give --graph-bytes FILE or --bytes-per-graph BYTES (graph_bytes= in Python), or limit --max-graphs.",
        )
    need = costs.memory.bytes_at(costs.largest)
    if costs.eager is None and need > memory_bytes:
        raise ConfigError(
            f"a graph for the largest size, {costs.largest:,}, takes {need:,} bytes ({_memory(need)}); the limit of all"
            f" graphs is {memory_bytes:,} ({_memory(memory_bytes)}).",
            why="Every size needs a bucket where no eager times say what a step without one costs.",
            fix="Raise the limit; or give --eager-times (eager_times= in Python), and large steps run eagerly.",
        )


def _best(costs: Costs, *, max_graphs: int | None, memory_bytes: int | None) -> tuple[Buckets, list[str]]:
    memory = costs.memory
    if memory is not None and memory_bytes is not None and memory.bytes_at(1) == memory.bytes_at(costs.largest) > 0:
        # Graphs of equal bytes are as many as fit: no knapsack.
        fitting = memory_bytes // memory.bytes_at(1)
        max_graphs, memory_bytes = fitting if max_graphs is None else min(max_graphs, fitting), None
    counts = costs.counts
    most = len(counts) if not max_graphs or max_graphs >= len(counts) else max(_MOST_CELLS // max_graphs, max_graphs)
    free = _thinned(counts, most=most)
    ladder = _tuned(costs, free, max_graphs=max_graphs, memory_bytes=None)
    if memory_bytes is None or (costs.of_graphs(ladder) or 0) <= memory_bytes:
        return ladder, _thinning(counts, free)
    tried = _in_memory(costs)
    ladder = _tuned(costs, tried, max_graphs=max_graphs, memory_bytes=memory_bytes)
    note = f"{len(tried)} of {len(counts)} sizes were tried as buckets within the memory: a better ladder may exist."
    return ladder, [] if len(tried) == len(counts) else [note]


def _in_memory(costs: Costs) -> dict[int, float]:
    """Few candidates that good ladders have: the buckets of the best ones of 1, 2, 3 ... graphs, and the tops of equal cells.

    Cells alone were rejected: where nearly all steps are small, their one cell holds the buckets that matter.
    """
    counts = costs.counts
    if len(counts) <= _MOST_IN_MEMORY:
        return dict(counts)
    found = set(_thinned(counts, most=_MOST_IN_MEMORY // 2))
    shared = _thinned(counts, most=_MOST_CELLS // _MOST_IN_MEMORY)
    eager = None if costs.eager is None else _mean_of_cells(costs, costs.eager, shared)
    ladders = ladders_by_count(
        shared, most=32, cost_per_row=costs.of_step, eager_cost=None if eager is None else eager.__getitem__
    )
    for ladder in ladders:
        if len(found | set(ladder.buckets.sizes)) > _MOST_IN_MEMORY:
            break
        found |= set(ladder.buckets.sizes)
    return {size: counts[size] for size in sorted(found)}


def _tuned(
    costs: Costs, candidates: Mapping[int, float], *, max_graphs: int | None, memory_bytes: int | None
) -> Buckets:
    memory, eager = costs.memory, costs.eager
    return tuned_ladder(
        costs.counts,
        cost_per_row=costs.of_step,
        eager_cost=None if eager is None else eager.at,
        max_graphs=max_graphs,
        memory_budget=memory_bytes,
        graph_bytes=None if memory is None else memory.bytes_at,
        candidates=candidates,
    ).buckets


def _width(counts: Mapping[int, float], *, most: int) -> int:
    """Rows of a cell, as few as bisection finds, so that at most so many cells have a size in them."""
    if len(counts) <= most:
        return 1
    sizes = np.fromiter(counts, dtype=np.int64)
    narrow, wide = 1, -(-int(sizes.max()) // most)
    while wide - narrow > 1:
        middle = (narrow + wide) // 2
        if len(np.unique(-(-sizes // middle))) > most:
            narrow = middle
        else:
            wide = middle
    return wide


def _thinned(counts: Mapping[int, float], *, most: int) -> dict[int, float]:
    """The largest size of each cell, with the weight of the whole cell."""
    width = _width(counts, most=most)
    if width == 1:
        return dict(counts)
    tops = list({-(-size // width): size for size in sorted(counts)}.values())
    thinned = dict.fromkeys(tops, 0.0)
    for size, count in counts.items():
        thinned[tops[bisect_left(tops, size)]] += count
    return thinned


def _mean_of_cells(costs: Costs, eager: Line, cells: Mapping[int, float]) -> dict[int, float]:
    """Mean eager cost of the sizes of each cell, so that a cell costs what its sizes do."""
    tops = list(cells)
    sums = dict.fromkeys(tops, 0.0)
    for size, count in costs.counts.items():
        sums[tops[bisect_left(tops, size)]] += count * eager.at(size)
    return {top: total / cells[top] for top, total in sums.items()}


def _thinning(counts: Mapping[int, float], candidates: Mapping[int, float]) -> list[str]:
    if len(candidates) == len(counts):
        return []
    width = _width(counts, most=len(candidates))  # the same: it found no narrower cells for as many
    return [
        f"{len(candidates)} of {len(counts)} sizes were tried as buckets, the largest of each {width}: a better ladder may exist,"
        f" with buckets up to {width - 1} rows smaller."
    ]


def _memory(nbytes: int) -> str:
    return f"{nbytes / _GIB:.3g} GiB" if nbytes >= _GIB // 100 else f"{nbytes / (1 << 20):.3g} MiB"


def _as_dict(figures: LadderFigures) -> dict[str, Any]:
    values = attrs.asdict(figures, recurse=False)
    del values["ladder"]
    return {**values, "graphs": figures.graphs, "sizes": list(figures.ladder.sizes)}
