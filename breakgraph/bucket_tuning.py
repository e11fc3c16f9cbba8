"""The ladder with the least expected cost for the sizes that were seen, within a budget of graphs or of memory.

A ladder is a path: node 0 has no bucket, node j ends with candidate j, an arc serves the sizes between two buckets,
and to stop is to run what is above eagerly. Costs are exact integers: floats are ratios, put on one denominator.

* Without a memory budget a node takes the lowest of lines over the weight below it. Steps rise and weights fall, so a
  queue of the lower hull finds it in O(1) amortised: O(graphs * candidates), O(candidates) when the count is free.
* With one it is a knapsack: Pareto-optimal states (bytes, cost) at each node. A price for a byte (the Lagrangian dual)
  bounds every completion from below, and a state that cannot beat the best known ladder is dropped. At worst
  O(graphs * candidates^2 * states) with states <= memory_budget + 1: meant for some hundred candidates, not thousands.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from math import lcm

import attrs

from breakgraph.buckets import Buckets
from breakgraph.errors import ConfigError

__all__ = ["TunedLadder", "ladders_by_count", "tuned_ladder"]

_MOST = 10**60  # no result overflows a float below it

_Path = tuple[int, ...]
_Line = tuple[int, int, int]  # slope, intercept, node
_State = tuple[int, int, _Path]  # memory, cost, path
_Layer = tuple[list[int | None], list[int]]


@attrs.frozen
class TunedLadder:
    """A ladder and what is expected of it.

    Attributes:
        buckets: The ladder.
        expected_cost: Cost of all steps of the histogram and of the graphs, in the unit of the given costs.
        padded_rows: Padding rows in all steps of the histogram; an eager step has none.
        eager_share: Share of the weight that runs eagerly; 0 when nothing has weight.
    """

    buckets: Buckets
    expected_cost: float
    padded_rows: float
    eager_share: float


def tuned_ladder(
    histogram: Mapping[int, float],
    *,
    cost_per_row: float | Callable[[int], float],
    cost_per_graph: float = 0.0,
    eager_cost: Callable[[int], float] | None = None,
    max_graphs: int | None = None,
    memory_budget: int | None = None,
    graph_bytes: Callable[[int], int] | None = None,
    candidates: Iterable[int] | None = None,
) -> TunedLadder:
    """Find the ladder with the least expected cost, exactly.

    A size is served by the smallest bucket that holds it, and runs eagerly above the largest. Weights are taken as
    they are: with counts, `cost_per_graph` is what a graph costs over the time in which they were counted; with
    shares that sum to 1, it is that cost divided by the steps of that time.

    Args:
        histogram: Size to weight, how often it was seen. A size of weight 0 adds no cost but must be servable. An
            empty histogram gives the empty ladder at cost 0.
        cost_per_row: Cost of a padded row, or a function from a bucket to the cost of a step of that many rows,
            which must not fall as buckets grow.
        cost_per_graph: Cost added once for each bucket.
        eager_cost: From a size to the cost of an eager step; without it every size needs a bucket.
        max_graphs: Most buckets.
        memory_budget: Most bytes of all graphs together.
        graph_bytes: From a bucket to the bytes of its graph; needed with `memory_budget`, not called without.
        candidates: What may be a bucket; the sizes of the histogram by default. They suffice when neither steps nor
            bytes fall as buckets grow: shrink a bucket to the largest size it serves, or leave it out if it serves
            none, and every size runs as before, in no more rows and bytes. A fall is therefore refused.

    Returns:
        The ladder; among equals the one with the fewest buckets, then the first in lexicographic order.

    Raises:
        ConfigError: A number is out of range, steps (or, without `candidates`, bytes) fall as buckets grow,
            `memory_budget` lacks `graph_bytes`, or no ladder within the budget serves every size.
    """
    checked = {_whole(size, name="a size of the histogram"): weight for size, weight in histogram.items()}
    weights = {size: _exact(checked[size], name=f"histogram[{size}]") for size in sorted(checked)}
    buckets = sorted({_whole(bucket, name="a candidate") for bucket in (weights if candidates is None else candidates)})
    eager = None if eager_cost is None else [_exact(eager_cost(size), name=f"eager_cost({size})") for size in weights]
    limit = None if max_graphs is None else _whole(max_graphs, name="max_graphs", least=0)
    ladders = _ladders(
        weights,
        buckets,
        steps=_step_costs(cost_per_row, buckets),
        graph=_exact(cost_per_graph, name="cost_per_graph"),
        eager=eager,
        memory=_graph_memory(graph_bytes, buckets, budget=memory_budget, rising=candidates is None),
    )
    # A limit that cannot bind would only cost a layer for each graph.
    path = _cheapest(ladders, limit=None if limit is None or limit >= len(buckets) else limit, budget=memory_budget)
    if path is None:
        raise ConfigError(
            f"tuned_ladder: no ladder serves size {max(weights)}; got max_graphs={max_graphs}, memory_budget="
            f"{memory_budget}, largest candidate {max(buckets, default=None)}; expected a bucket for every size.",
            why="Without eager_cost a size above the largest bucket could not run at all.",
            fix=f"Raise the budget, add a candidate of {max(weights)} or more, or give eager_cost.",
        )
    return _report(ladders, path, weights=weights)


def ladders_by_count(
    histogram: Mapping[int, float],
    *,
    most: int,
    cost_per_row: Callable[[int], float],
    eager_cost: Callable[[int], float] | None = None,
) -> list[TunedLadder]:
    """What `tuned_ladder` finds for `max_graphs` of 1, 2, ... `most`, at the price of the last: it is one table.

    Args:
        histogram: See `tuned_ladder`; not empty.
        most: The largest `max_graphs`.
        cost_per_row: See `tuned_ladder`; a function.
        eager_cost: See `tuned_ladder`.

    Raises:
        ConfigError: See `tuned_ladder`.
    """
    weights = {_whole(size, name="a size"): _exact(histogram[size], name="a weight") for size in sorted(histogram)}
    eager = None if eager_cost is None else [_exact(eager_cost(size), name=f"eager_cost({size})") for size in weights]
    steps, memory = _step_costs(cost_per_row, list(weights)), [0] * len(weights)
    ladders = _ladders(weights, list(weights), steps=steps, graph=Fraction(0), eager=eager, memory=memory)
    layers = _relaxed(ladders, limit=_whole(most, name="most")).layers
    paths = [_Relaxed(1, 0, layers[: count + 1]).path() for count in range(1, len(layers))]
    return [_report(ladders, path, weights=weights) for path in paths]


def _report(ladders: _Ladders, path: _Path, *, weights: dict[int, Fraction]) -> TunedLadder:
    chosen = Buckets.of(ladders.buckets[node] for node in path)
    padded = sum(weight * ((chosen.round_up(size) or size) - size) for size, weight in weights.items())
    eagerly = sum(weight for size, weight in weights.items() if size > chosen.largest)
    return TunedLadder(
        buckets=chosen,
        expected_cost=float(Fraction(ladders.total(path)[0] - len(path), ladders.unit)),
        padded_rows=float(padded),
        eager_share=float(eagerly / (sum(weights.values()) or 1)),
    )


def _out_of_range(name: str, value: object, *, expected: str) -> ConfigError:
    return ConfigError(
        f"tuned_ladder: {name} is {value!r}; expected {expected}.",
        why="The best ladder has the least sum of weights times costs, so each of them must be known.",
        fix="Give what was counted or measured, converted with int() or float().",
    )


def _whole(value: object, *, name: str, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST:
        raise _out_of_range(name, value, expected=f"an integer >= {least}")
    return value


def _exact(value: object, *, name: str) -> Fraction:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MOST:
        raise _out_of_range(name, value, expected="an int or float from 0 to 1e60")
    return Fraction(value)


def _step_costs(cost_per_row: object, buckets: list[int]) -> list[Fraction]:
    if not callable(cost_per_row):
        rate = _exact(cost_per_row, name="cost_per_row")
        return [rate * bucket for bucket in buckets]
    steps = [_exact(cost_per_row(bucket), name=f"cost_per_row({bucket})") for bucket in buckets]
    _refuse_fall(buckets, steps, name="cost_per_row", fix="Smooth what was measured, for example by a running maximum.")
    return steps


def _graph_memory(
    graph_bytes: Callable[[int], int] | None, buckets: list[int], *, budget: int | None, rising: bool
) -> list[int]:
    if budget is None:
        return [0] * len(buckets)
    _whole(budget, name="memory_budget", least=0)
    if graph_bytes is None:
        raise ConfigError(
            f"tuned_ladder: got memory_budget={budget} without graph_bytes; expected both.",
            why="A budget of bytes limits nothing when the bytes of a graph are unknown.",
            fix="Give graph_bytes, or limit the count with max_graphs.",
        )
    memory = [_whole(graph_bytes(bucket), name=f"graph_bytes({bucket})", least=0) for bucket in buckets]
    if rising:
        _refuse_fall(buckets, memory, name="graph_bytes", fix="Smooth what was measured, or give candidates.")
    return memory


def _refuse_fall(buckets: list[int], values: Sequence[Fraction | int], *, name: str, fix: str) -> None:
    for (low, before), (high, after) in pairwise(zip(buckets, values, strict=True)):
        if after < before:
            raise ConfigError(
                f"tuned_ladder: {name}({low}) is {float(before)} but {name}({high}) is {float(after)}; "
                "expected no fall as buckets grow.",
                why="It could then pay to round up past the next candidate, and the best ladder would be missed.",
                fix=fix,
            )


@attrs.frozen
class _Ladders:
    """All ladders; lists are by node. Each graph adds 1 and `unit` exceeds any count: a tie goes to fewer graphs."""

    buckets: list[int]
    steps: list[int]
    weights: list[int]  # of all sizes up to the bucket
    stops: list[int | None]  # None: something above would have nowhere to run
    memory: list[int]
    graph: int
    unit: int

    def arc(self, start: int, end: int) -> int:
        return self.steps[end] * (self.weights[end] - self.weights[start]) + self.graph

    def total(self, path: _Path) -> tuple[int, int]:
        arcs = sum(self.arc(start, end) for start, end in pairwise((0, *path)))
        return arcs + (self.stops[path[-1] if path else 0] or 0), sum(self.memory[node] for node in path)


def _ladders(
    weights: dict[int, Fraction],
    buckets: list[int],
    *,
    steps: list[Fraction],
    graph: Fraction,
    eager: list[Fraction] | None,
    memory: list[int],
) -> _Ladders:
    per_weight = lcm(*(weight.denominator for weight in weights.values()))
    per_cost = lcm(*(cost.denominator for cost in (graph, *steps, *(eager or ())))) * (len(buckets) + 1)
    counts = [int(weight * per_weight) for weight in weights.values()]
    below = [0, *accumulate(counts)]
    seen = list(weights)
    served = [bisect_right(seen, bucket) for bucket in (0, *buckets)]
    stops = [0 if index == len(seen) else None for index in served]
    if eager is not None:
        eagerly = [0, *accumulate(count * int(cost * per_cost) for count, cost in zip(counts, eager, strict=True))]
        stops = [eagerly[-1] - eagerly[index] for index in served]
    return _Ladders(
        buckets=[0, *buckets],
        steps=[0, *(int(step * per_cost) for step in steps)],
        weights=[below[index] for index in served],
        stops=stops,
        memory=[0, *memory],
        graph=int(graph * per_cost) * per_weight + 1,
        unit=per_weight * per_cost,
    )


@attrs.frozen
class _Relaxed:
    """The ladders without a memory budget, at `scale * cost + price * bytes`.

    Attributes:
        layers: For each node what its cheapest completion costs (None: there is none) and its next node (0: stop).
            Layer k has k graphs to go; when the count is free there is one layer, which leads to itself.
    """

    scale: int
    price: int
    layers: list[_Layer]

    def after(self, graphs: int) -> _Layer:
        return self.layers[max(len(self.layers) - 1 - graphs, 0)]

    def value(self, cost: int, memory: int) -> int:
        return self.scale * cost + self.price * memory

    def path(self) -> _Path:
        path: list[int] = []
        while node := self.after(len(path))[1][path[-1] if path else 0]:
            path.append(node)
        return tuple(path)


def _relaxed(ladders: _Ladders, *, limit: int | None, scale: int = 1, price: int = 0) -> _Relaxed:
    if limit is None:
        return _Relaxed(scale, price, [_layer(ladders, None, scale=scale, price=price)])
    stops = [None if stop is None else scale * stop for stop in ladders.stops]
    layers = [(stops, [0] * len(stops))]
    for _ in range(limit):
        layers.append(_layer(ladders, layers[-1][0], scale=scale, price=price))
    return _Relaxed(scale, price, layers)


def _layer(ladders: _Ladders, after: list[int | None] | None, *, scale: int, price: int) -> _Layer:
    costs = [None if stop is None else scale * stop for stop in ladders.stops]
    following = [0] * len(costs)
    tails = costs if after is None else after
    hull: deque[_Line] = deque()
    for node in reversed(range(len(costs))):
        weight = ladders.weights[node]
        while len(hull) > 1 and hull[1][1] - hull[1][0] * weight <= hull[0][1] - hull[0][0] * weight:
            hull.popleft()
        if hull:
            slope, intercept, end = hull[0]
            cost, stop = intercept - slope * weight, costs[node]
            if stop is None or cost < stop:
                costs[node], following[node] = cost, end
        tail = tails[node]
        if tail is not None:
            slope = scale * ladders.steps[node]
            graph = scale * ladders.graph + price * ladders.memory[node]
            _append(hull, (slope, slope * weight + graph + tail, node))
    return costs, following


def _append(hull: deque[_Line], line: _Line) -> None:
    """Add the line `intercept - slope * x` of the least slope so far; where it is as low as others, it wins."""
    slope, intercept, _ = line
    while hull:
        last_slope, last_intercept, _ = hull[-1]
        if slope == last_slope:
            if intercept > last_intercept:
                return
        elif len(hull) == 1:
            break
        else:
            # The last line stays if it is the lowest one somewhere between the one before it and the new one.
            first_slope, first_intercept, _ = hull[-2]
            passed = (last_intercept - intercept) * (first_slope - last_slope)
            if passed < (first_intercept - last_intercept) * (last_slope - slope):
                break
        hull.pop()
    hull.append(line)


def _cheapest(ladders: _Ladders, *, limit: int | None, budget: int | None) -> _Path | None:
    relaxed = _relaxed(ladders, limit=limit)
    if relaxed.after(0)[0][0] is None:
        return None
    over = relaxed.path()
    if budget is None or ladders.total(over)[1] <= budget:
        return over
    fits = _relaxed(ladders, limit=limit, scale=0, price=1).path()
    if ladders.total(fits)[1] > budget:
        return None
    while True:
        # The chord between the best ladder over the budget and the best within prices a byte. A ladder below the chord
        # replaces one of the two; when there is none, no other price bounds better.
        (cost_over, memory_over), (cost, memory) = ladders.total(over), ladders.total(fits)
        relaxed = _relaxed(ladders, limit=limit, scale=memory_over - memory, price=cost - cost_over)
        path = relaxed.path()
        if relaxed.value(*ladders.total(path)) == relaxed.value(cost, memory):
            return _knapsack(ladders, relaxed, limit=limit, budget=budget, known=fits)
        if ladders.total(path)[1] > budget:
            over = path
        else:
            fits = path


def _knapsack(ladders: _Ladders, relaxed: _Relaxed, *, limit: int | None, budget: int, known: _Path) -> _Path:
    best = (ladders.total(known)[0], known)
    frontier: dict[int, list[_State]] = {0: [(0, 0, ())]}
    for graphs in range(1, len(ladders.buckets) if limit is None else limit + 1):
        bounds = relaxed.after(graphs)[0]
        most = relaxed.value(best[0], budget)
        grown: dict[int, list[_State]] = defaultdict(list)
        for start, states in frontier.items():
            valued = [(relaxed.value(cost, memory), memory, cost, path) for memory, cost, path in states]
            least = min(valued)[0]
            for end in range(start + 1, len(bounds)):
                bound, arc, added = bounds[end], ladders.arc(start, end), ladders.memory[end]
                if bound is None or least > (room := most - bound - relaxed.value(arc, added)):
                    continue
                grown[end] += [
                    (memory + added, cost + arc, (*path, end))
                    for value, memory, cost, path in valued
                    if value <= room and memory + added <= budget
                ]
        frontier = {node: _undominated(states) for node, states in grown.items() if states}
        for node, states in frontier.items():
            stop = ladders.stops[node]
            if stop is not None:
                best = min([best, *((cost + stop, path) for _, cost, path in states)])
    return best[1]


def _undominated(states: list[_State]) -> list[_State]:
    kept: list[_State] = []
    for state in sorted(states):
        if not kept or state[1:] < kept[-1][1:]:
            kept.append(state)
    return kept
