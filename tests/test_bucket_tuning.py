"""The ladder with the least expected cost, against brute force."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from breakgraph.bucket_tuning import TunedLadder, tuned_ladder
from breakgraph.buckets import Buckets
from breakgraph.errors import ConfigError

Options = dict[str, Any]

# Costs and weights of few distinct values make ties frequent; 0.1 and 1e-9 make sums of floats inexact.
WEIGHTS = st.sampled_from([0, 0.1, 0.3, 1, 1, 2, 5, 1e-9, 1e6])
SIZES = st.integers(min_value=1, max_value=24)
HISTOGRAMS = st.dictionaries(SIZES, WEIGHTS, max_size=8)
STEPS: dict[str, float | Callable[[int], float]] = {
    "linear": 0.1,
    "whole": 1,
    "free": 0.0,
    "convex": lambda rows: 3 + rows + 0.1 * rows * rows,
    "concave": lambda rows: math.sqrt(rows),
    "tiles of 8": lambda rows: -(-rows // 8) * 0.7,
    "constant": lambda rows: 2,
}
EAGER: dict[str, Callable[[int], float] | None] = {
    "never": None,
    "cheap": lambda rows: 0.1 * rows,
    "dear": lambda rows: 3 + 0.4 * rows,
    "falling": lambda rows: 20 / rows,
}
BYTES: dict[str, Callable[[int], int]] = {
    "affine": lambda bucket: 3 + bucket,
    "equal": lambda bucket: 4,
    "none": lambda bucket: 0,
    "jagged": lambda bucket: bucket * 7 % 11,
}


@st.composite
def all_options(draw: st.DrawFn, *, memory: bool | None = None) -> Options:
    """Everything but the histogram; `memory` says whether there is a budget of bytes, None leaves it open."""
    options: Options = {
        "cost_per_row": STEPS[draw(st.sampled_from(sorted(STEPS)))],
        "cost_per_graph": draw(st.sampled_from([0.0, 0.1, 1, 7.5])),
        "eager_cost": EAGER[draw(st.sampled_from(sorted(EAGER)))],
        "max_graphs": draw(st.none() | st.integers(min_value=0, max_value=6)),
        "candidates": draw(st.none() | st.lists(SIZES, max_size=8)),
    }
    if memory or (memory is None and draw(st.booleans())):
        rising = {"affine", "equal", "none"}
        names = rising if options["candidates"] is None else set(BYTES)
        options["graph_bytes"] = BYTES[draw(st.sampled_from(sorted(names)))]
        options["memory_budget"] = draw(st.integers(min_value=0, max_value=60))
    return options


def cost_of(ladder: Iterable[int], histogram: Mapping[int, float], options: Options) -> Fraction | None:
    """What a ladder costs, from the definition and without rounding; None when a size has nowhere to run."""
    ladder = sorted(ladder)
    step, eager = options["cost_per_row"], options.get("eager_cost")
    cost = Fraction(options.get("cost_per_graph", 0.0)) * len(ladder)
    for size, weight in histogram.items():
        bucket = min((bucket for bucket in ladder if bucket >= size), default=None)
        if bucket is not None:
            cost += Fraction(weight) * (Fraction(step(bucket)) if callable(step) else Fraction(step) * bucket)
        elif eager is not None:
            cost += Fraction(weight) * Fraction(eager(size))
        else:
            return None
    return cost


def brute_force(histogram: Mapping[int, float], options: Options) -> tuple[Fraction, int, tuple[int, ...]] | None:
    """The best of all subsets of the candidates within the budget: least cost, then fewest, then smallest."""
    candidates = options.get("candidates")
    buckets = sorted(set(histogram if candidates is None else candidates))
    most, budget = options.get("max_graphs"), options.get("memory_budget")
    found = []
    for count in range(len(buckets) + 1 if most is None else min(most, len(buckets)) + 1):
        for ladder in itertools.combinations(buckets, count):
            if budget is not None and sum(map(options["graph_bytes"], ladder)) > budget:
                continue
            cost = cost_of(ladder, histogram, options)
            if cost is not None:
                found.append((cost, count, ladder))
    return min(found, default=None)


def table(histogram: Mapping[int, float], options: Options) -> Fraction | None:
    """The least cost by a plain table over (last bucket, graphs, bytes), for ladders too long for brute force."""
    buckets = sorted(histogram)
    most, budget = options.get("max_graphs"), options.get("memory_budget")
    step, graph = options["cost_per_row"], Fraction(options["cost_per_graph"])
    costs = {bucket: Fraction(step(bucket)) if callable(step) else Fraction(step) * bucket for bucket in buckets}
    need = {bucket: options["graph_bytes"](bucket) if budget is not None else 0 for bucket in buckets}
    states: dict[int, dict[tuple[int, int], Fraction]] = {0: {(0, 0): Fraction(0)}}
    for bucket in buckets:
        here: dict[tuple[int, int], Fraction] = {}
        for last, known in states.items():
            weight = sum((Fraction(histogram[size]) for size in buckets if last < size <= bucket), Fraction(0))
            added = weight * costs[bucket] + graph
            for (count, size), cost in known.items():
                key = (count + 1 if most is not None else 0, size + need[bucket])
                if key[0] <= (most or 0) and (budget is None or key[1] <= budget):
                    here[key] = min(here.get(key, cost + added), cost + added)
        states[bucket] = here
    found = []
    for last, known in states.items():
        rest = cost_of((), {size: weight for size, weight in histogram.items() if size > last}, {**options})
        found += [cost + rest for cost in known.values() if rest is not None]
    return min(found, default=None)


def tuned_or_none(histogram: Mapping[int, float], options: Options) -> TunedLadder | None:
    """The tuned ladder, None when no ladder within the budget serves every size."""
    try:
        return tuned_ladder(histogram, **options)
    except ConfigError as error:
        if "no ladder serves size" not in error.what:
            raise
        return None


def check_against_brute_force(histogram: Mapping[int, float], options: Options) -> None:
    """The ladder, its cost, its padding and its eager share are those of the best subset."""
    expected, tuned = brute_force(histogram, options), tuned_or_none(histogram, options)
    if expected is None or tuned is None:
        assert expected is None
        assert tuned is None
        return
    cost, _, ladder = expected
    assert tuned.buckets == Buckets.of(ladder)
    assert tuned.expected_cost == float(cost)
    served = {size: tuned.buckets.round_up(size) for size in histogram}
    padding = [Fraction(histogram[size]) * (bucket - size) for size, bucket in served.items() if bucket is not None]
    assert tuned.padded_rows == float(sum(padding))
    eager = sum((Fraction(histogram[size]) for size, bucket in served.items() if bucket is None), Fraction(0))
    assert tuned.eager_share == float(eager / (sum(map(Fraction, histogram.values())) or 1))


@settings(max_examples=150, deadline=None)
@given(histogram=HISTOGRAMS, options=all_options(memory=False))
def test_no_ladder_is_cheaper(histogram: dict[int, float], options: Options) -> None:
    """REQ-G4: of all subsets of the candidates the cheapest is found, with and without a limit of graphs and eager."""
    check_against_brute_force(histogram, options)


@settings(max_examples=200, deadline=None)
@given(histogram=HISTOGRAMS, options=all_options(memory=True))
def test_no_ladder_within_the_memory_is_cheaper(histogram: dict[int, float], options: Options) -> None:
    """REQ-G4: of all subsets of the candidates within the bytes the cheapest is found, ties included."""
    check_against_brute_force(histogram, options)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(min_value=0, max_value=10**9), options=all_options())
def test_long_ladders_are_as_cheap_as_a_plain_table_finds(seed: int, options: Options) -> None:
    """REQ-G4: with 30 candidates, too many for brute force, the cost is that of a plain dynamic program."""
    rng = random.Random(seed)
    histogram = {size: rng.choice([0, 1, rng.random(), rng.randrange(100)]) for size in rng.sample(range(1, 90), 30)}
    options["candidates"] = None
    if options.get("graph_bytes") is BYTES["jagged"]:
        options["candidates"] = list(histogram)
    expected, tuned = table(histogram, options), tuned_or_none(histogram, options)
    assert (expected is None) == (tuned is None)
    if expected is not None and tuned is not None:
        assert tuned.expected_cost == float(expected)
        assert cost_of(tuned.buckets.sizes, histogram, options) == expected


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(min_value=0, max_value=10**9), limited=st.booleans(), eager=st.booleans())
def test_irregular_bytes_make_it_a_knapsack(seed: int, limited: bool, eager: bool) -> None:
    """REQ-G4: when bytes are unrelated to rows, so that no price of a byte leads to the best ladder, it is found."""
    rng = random.Random(seed)
    histogram = {size: rng.randrange(1, 30) for size in rng.sample(range(1, 40), 9)}
    need = {size: rng.randrange(5, 60) for size in histogram}
    options: Options = {
        "cost_per_row": 1,
        "eager_cost": (lambda rows: rows + 30) if eager else None,
        "max_graphs": 4 if limited else None,
        "memory_budget": need[max(need)] + rng.randrange(20, 150),
        "graph_bytes": need.__getitem__,
        "candidates": list(histogram),
    }
    check_against_brute_force(histogram, options)


@settings(max_examples=60, deadline=None)
@given(histogram=st.dictionaries(st.integers(1, 8), WEIGHTS, max_size=5), options=all_options())
def test_sizes_of_the_histogram_suffice_as_candidates(histogram: dict[int, float], options: Options) -> None:
    """REQ-G4: no bucket between or above the sizes makes a ladder cheaper when steps and bytes do not fall."""
    assume(options.get("graph_bytes") is not BYTES["jagged"])
    expected = brute_force(histogram, {**options, "candidates": range(1, 10)})
    tuned = tuned_or_none(histogram, {**options, "candidates": None})
    assert (expected is None) == (tuned is None)
    if expected is not None and tuned is not None:
        assert tuned.expected_cost == float(expected[0])


@settings(max_examples=90, deadline=None)
@given(
    histogram=HISTOGRAMS,
    options=all_options(memory=True),
    graphs=st.integers(min_value=0, max_value=3),
    memory=st.integers(min_value=0, max_value=20),
)
def test_more_budget_never_costs_more(histogram: dict[int, float], options: Options, graphs: int, memory: int) -> None:
    """REQ-G4: more graphs, more bytes, or no limit at all never make the best ladder dearer or impossible."""
    more = {**options, "memory_budget": options["memory_budget"] + memory}
    if options["max_graphs"] is not None:
        more["max_graphs"] = options["max_graphs"] + graphs
    unlimited = {**options, "memory_budget": None, "max_graphs": None}
    found = [tuned_or_none(histogram, budget) for budget in (options, more, unlimited)]
    costs = [math.inf if tuned is None else tuned.expected_cost for tuned in found]
    assert costs == sorted(costs, reverse=True)


@settings(max_examples=60, deadline=None)
@given(histogram=HISTOGRAMS, options=all_options(), rng=st.randoms(use_true_random=False))
def test_order_of_the_input_does_not_matter(histogram: dict[int, float], options: Options, rng: random.Random) -> None:
    """REQ-G4: the same ladder, whatever the order of the histogram and of the candidates, repeated ones included."""
    items = list(histogram.items())
    rng.shuffle(items)
    shuffled = dict(options)
    if options["candidates"] is not None:
        shuffled["candidates"] = rng.sample(options["candidates"], len(options["candidates"])) * 2
    assert tuned_or_none(dict(items), shuffled) == tuned_or_none(histogram, options)


def test_a_tie_goes_to_fewer_graphs() -> None:
    """REQ-G4: when every step costs the same, one bucket serves all although three would cost no more."""
    tuned = tuned_ladder({4: 1, 8: 1, 16: 1}, cost_per_row=lambda rows: 2.0)
    assert tuned.buckets.sizes == (16,)


@pytest.mark.parametrize("memory", [{}, {"memory_budget": 21, "graph_bytes": lambda bucket: 10}])
def test_a_tie_goes_to_smaller_buckets(memory: Options) -> None:
    """REQ-G4: (1, 3) and (2, 3) cost the same with two graphs; the one whose first bucket is smaller is chosen."""
    tuned = tuned_ladder({1: 5, 2: 5, 3: 1}, cost_per_row=0.1, max_graphs=2, **memory)
    assert tuned.buckets.sizes == (1, 3)


def test_a_tie_within_the_memory_goes_to_smaller_buckets() -> None:
    """REQ-G4: (1, 4), (2, 4) and (3, 4) cost the same; the first is too large, the second just fits, the third is least.

    With one more bucket above, two states of equal cost meet in 4, and the one of more bytes must not be dropped.
    """
    histogram, need = {1: 2, 2: 1, 3: 3, 4: 1}, {1: 10, 2: 5, 3: 1, 4: 1, 8: 1}
    options: Options = {"cost_per_row": 1, "graph_bytes": need.__getitem__, "candidates": need}
    assert tuned_ladder(histogram, max_graphs=2, memory_budget=6, **options).buckets.sizes == (2, 4)
    histogram[8] = 100
    assert tuned_ladder(histogram, max_graphs=3, memory_budget=7, **options).buckets.sizes == (2, 4, 8)


def test_the_tie_break_never_outweighs_a_cost() -> None:
    """REQ-G4: a graph that saves one unit, the least by which whole numbers can differ, is taken."""
    tuned = tuned_ladder({1: 1}, cost_per_row=1, eager_cost=lambda rows: 2)
    assert tuned.buckets.sizes == (1,)
    assert tuned.expected_cost == 1


def test_worked_example() -> None:
    """REQ-G4: graphs that save nothing are left out; at 9 a launch all four pay; a limit leaves the best two, then one."""
    histogram = {10: 3, 20: 6, 30: 1, 1000: 10}
    costs: Options = {"cost_per_row": 0.25, "cost_per_graph": 2}
    assert tuned_ladder(histogram, eager_cost=lambda rows: 0.25 * rows, **costs).buckets.sizes == ()
    costs["eager_cost"] = lambda rows: 9 + 0.25 * rows
    assert tuned_ladder(histogram, **costs).buckets.sizes == (10, 20, 30, 1000)
    tuned = tuned_ladder(histogram, max_graphs=2, **costs)
    assert tuned.buckets.sizes == (30, 1000)
    assert tuned.expected_cost == 10 * 7.5 + 10 * 250 + 2 * 2
    assert tuned.padded_rows == 3 * 20 + 6 * 10
    assert tuned.eager_share == 0
    single = tuned_ladder(histogram, max_graphs=1, **costs)
    # (30,) would cost 77 and (1000,) 5002 where this costs 47, and 16.5 for the step of 30 rows.
    assert single.buckets.sizes == (20,)
    assert single.eager_share == 0.55


def test_the_cost_is_the_exact_sum_rounded_once() -> None:
    """REQ-G4: ten times 0.1 * 0.1 is the exact product of the floats, rounded once, not a sum of rounded terms."""
    tuned = tuned_ladder(dict.fromkeys(range(1, 11), 0.1), cost_per_row=0.1, max_graphs=1)
    assert tuned.expected_cost == float(10 * Fraction(0.1) * Fraction(0.1) * 10)


@pytest.mark.parametrize("budget", [{}, {"max_graphs": 0}, {"memory_budget": 0, "graph_bytes": lambda bucket: 1}])
def test_empty_histogram_needs_no_bucket(budget: Options) -> None:
    """REQ-G4: without any size the ladder is empty and costs nothing, within every budget."""
    tuned = tuned_ladder({}, cost_per_row=1.0, cost_per_graph=5.0, candidates=[4, 8], **budget)
    assert tuned == TunedLadder(buckets=Buckets(), expected_cost=0.0, padded_rows=0.0, eager_share=0.0)


def test_a_size_without_weight_must_be_servable() -> None:
    """REQ-G4: a size of weight 0 costs nothing but still needs a bucket, unless it may run eagerly."""
    histogram = {8: 1.0, 64: 0.0}
    assert tuned_ladder(histogram, cost_per_row=1.0, cost_per_graph=1.0).buckets.sizes == (8, 64)
    eager = tuned_ladder(histogram, cost_per_row=1.0, cost_per_graph=1.0, eager_cost=lambda rows: 1e3)
    assert eager.buckets.sizes == (8,)
    assert eager.eager_share == 0


def test_without_a_budget_of_memory_the_bytes_are_not_asked_for() -> None:
    """REQ-G4: graph_bytes may be given without memory_budget, which is no limit, and is then never called."""

    def unknown(bucket: int) -> int:
        raise AssertionError(bucket)

    assert tuned_ladder({8: 1}, cost_per_row=1.0, graph_bytes=unknown).buckets.sizes == (8,)


def test_the_users_own_error_is_not_replaced() -> None:
    """REQ-G4: what a cost function raises comes out as it is."""
    with pytest.raises(ZeroDivisionError):
        tuned_ladder({8: 1}, cost_per_row=lambda rows: 1 / (rows - 8))


WRONG: list[tuple[dict[Any, Any], Options, str]] = [
    ({0: 1}, {}, "a size of the histogram is 0; expected an integer >= 1"),
    ({True: 1}, {}, "a size of the histogram is True"),
    ({2.0: 1}, {}, r"a size of the histogram is 2\.0"),
    ({"8": 1}, {}, "a size of the histogram is '8'"),
    ({8: -1}, {}, r"histogram\[8\] is -1; expected an int or float from 0 to 1e60"),
    ({8: math.nan}, {}, r"histogram\[8\] is nan"),
    ({8: math.inf}, {}, r"histogram\[8\] is inf"),
    ({8: 10**400}, {}, r"histogram\[8\] is 1000"),
    ({8: True}, {}, r"histogram\[8\] is True"),
    ({8: "1"}, {}, r"histogram\[8\] is '1'"),
    ({8: None}, {}, r"histogram\[8\] is None"),
    ({8: 1}, {"cost_per_row": -0.1}, r"cost_per_row is -0\.1"),
    ({8: 1}, {"cost_per_row": None}, "cost_per_row is None"),
    ({8: 1}, {"cost_per_row": lambda rows: math.nan}, r"cost_per_row\(8\) is nan"),
    ({8: 1}, {"cost_per_row": lambda rows: None}, r"cost_per_row\(8\) is None"),
    (
        {8: 1, 9: 1},
        {"cost_per_row": lambda rows: 9.5 - rows},
        r"cost_per_row\(8\) is 1\.5 but cost_per_row\(9\) is 0\.5",
    ),
    ({8: 1}, {"cost_per_graph": -1}, "cost_per_graph is -1"),
    ({8: 1}, {"cost_per_graph": True}, "cost_per_graph is True"),
    ({8: 1}, {"eager_cost": lambda rows: -1.0}, r"eager_cost\(8\) is -1\.0"),
    ({8: 1}, {"max_graphs": -1}, "max_graphs is -1; expected an integer >= 0"),
    ({8: 1}, {"max_graphs": True}, "max_graphs is True"),
    ({8: 1}, {"max_graphs": 2.0}, r"max_graphs is 2\.0"),
    ({8: 1}, {"candidates": [8, 0]}, "a candidate is 0"),
    ({8: 1}, {"candidates": [True]}, "a candidate is True"),
    ({8: 1}, {"memory_budget": 10}, "got memory_budget=10 without graph_bytes; expected both"),
    ({8: 1}, {"memory_budget": -1, "graph_bytes": lambda bucket: 1}, "memory_budget is -1"),
    ({8: 1}, {"memory_budget": 1.5, "graph_bytes": lambda bucket: 1}, r"memory_budget is 1\.5"),
    ({8: 1}, {"memory_budget": 9, "graph_bytes": lambda bucket: -1}, r"graph_bytes\(8\) is -1"),
    ({8: 1}, {"memory_budget": 9, "graph_bytes": lambda bucket: 0.5}, r"graph_bytes\(8\) is 0\.5"),
    ({8: 1, 9: 1}, {"memory_budget": 9, "graph_bytes": lambda bucket: 9 - bucket}, r"graph_bytes\(8\) is 1\.0 but"),
    ({8: 1}, {"max_graphs": 0}, "no ladder serves size 8; got max_graphs=0"),
    ({8: 1}, {"candidates": []}, "no ladder serves size 8; .* largest candidate None"),
    ({8: 1}, {"candidates": [7]}, "no ladder serves size 8; .* largest candidate 7"),
    ({8: 1}, {"memory_budget": 9, "graph_bytes": lambda bucket: 10}, "no ladder serves size 8; .* memory_budget=9"),
]


@pytest.mark.parametrize(("histogram", "options", "message"), WRONG)
def test_what_cannot_work_is_refused(histogram: dict[Any, Any], options: Options, message: str) -> None:
    """REQ-G4: every number out of range and every impossible budget is a ConfigError of three parts that shows it."""
    with pytest.raises(ConfigError, match=message) as caught:
        tuned_ladder(histogram, **{"cost_per_row": 1.0, **options})
    assert caught.value.what.startswith("tuned_ladder: ")
    assert "expected" in caught.value.what
    assert caught.value.why
    assert caught.value.fix


def prompt_lengths() -> Counter[int]:
    """10,000 log-normal prompt lengths up to 4096: median 400, about 2,000 distinct ones."""
    rng = random.Random(0)
    return Counter(min(4096, max(1, round(rng.lognormvariate(6, 1)))) for _ in range(10_000))


# Seconds: a step reads the weights once and then grows with its rows; eager pays the launches in addition.
MEASURED: Options = {
    "cost_per_row": lambda rows: 0.004 + 20e-6 * rows,
    "eager_cost": lambda rows: 0.016 + 20e-6 * rows,
    "cost_per_graph": 0.3,
}


def test_twelve_tuned_buckets_beat_the_default_ladder() -> None:
    """REQ-G4: on 10,000 prompt lengths, in under 2 s; as many buckets as the default ladder has cost less, as do 12."""
    lengths = prompt_lengths()
    default = Buckets.prefill(max_batch_size=8, max_seq_len=8192, max_num_tokens=4096).sizes
    began = time.perf_counter()
    tuned = tuned_ladder(lengths, max_graphs=12, **MEASURED)
    assert time.perf_counter() - began < 2
    assert len(tuned.buckets.sizes) == 12
    equal = tuned_ladder(lengths, max_graphs=len(default), **MEASURED)
    cost = cost_of(default, lengths, MEASURED)
    assert cost is not None
    assert equal.expected_cost <= tuned.expected_cost < float(cost)


def test_memory_budget_over_a_grid_of_candidates_is_fast() -> None:
    """REQ-G4: 128 candidates within a budget of bytes, which binds, take under 2 s and spend no byte too many."""

    def graph_bytes(bucket: int) -> int:
        return 3_000_000 + 12_345 * bucket

    options = {**MEASURED, "candidates": range(32, 4097, 32), "max_graphs": 12}
    free = tuned_ladder(prompt_lengths(), **options)
    began = time.perf_counter()
    tuned = tuned_ladder(prompt_lengths(), memory_budget=100_000_000, graph_bytes=graph_bytes, **options)
    assert time.perf_counter() - began < 2
    assert sum(map(graph_bytes, tuned.buckets.sizes)) <= 100_000_000 < sum(map(graph_bytes, free.buckets.sizes))
    assert tuned.expected_cost > free.expected_cost
