"""`tune`: against brute force, on a published setting, with files of every kind, and round the circle from server to runner."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import random
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from breakgraph.buckets import Buckets
from breakgraph.cli import app
from breakgraph.errors import ConfigError
from breakgraph.graph_key import GraphKey
from breakgraph.server.size_recorder import SizeRecorder, recorded_sizes
from breakgraph.server.start_table import start_lines
from breakgraph.serving import LLM, SamplingParams
from breakgraph.serving.size_file import checked_size_file, write_sizes
from breakgraph.statistics import MOST_SIZES, RunnerStatistics
from breakgraph.tools import LadderFigures, Tuning, from_reports, read_ladder, read_measured, read_sizes, tune
from breakgraph.tools.tuning.costs import Costs, CostUnit, Line
from breakgraph.tools.tuning.ladder_file import check_output, write_ladder
from breakgraph.tools.tuning.plot import save_plot
from breakgraph.tools.tuning.rivals import doubling, doubling_above, every, usual_ladders
from tests.runner_models import DecodeRig, PrefillRig
from tests.server_rig import OPTIONS, Rig, serving, speaking_model
from tests.serving_reference import greedy_reference

UNIFORM = dict.fromkeys(range(1, 2049), 1)


# The least cost.


def measured_at(size: int, points: Mapping[int, float], *, rising: bool) -> float:
    """A measured quantity at a size, from the rules as the docs have them, with numpy."""
    known = sorted(points)
    values = [points[one] for one in known]
    if rising:
        values = list(np.maximum.accumulate(values))
    if size <= known[-1]:
        return float(np.interp(size, known, values))
    if len(known) == 1:
        return values[0] * size / known[0]
    slope = max(0.0, (values[-1] - values[-2]) / (known[-1] - known[-2]))
    return float(values[-1] + slope * (size - known[-1]))


@attrs.frozen
class Case:
    """A small problem: sizes and the arguments of `tune`."""

    sizes: dict[int, int]
    options: dict[str, Any]

    @classmethod
    def draw(cls, rng: random.Random) -> Case:
        """Up to eight sizes; measurements that fall and that do not cover; every mixture of limits."""
        sizes = {size: rng.choice([1, 1, 2, 5, 40, 1000]) for size in rng.sample(range(1, 60), rng.randint(1, 8))}

        def points(most: int) -> dict[int, int]:
            return {rng.randint(1, 70): rng.randint(1, most) for _ in range(rng.randint(1, 4))}

        options: dict[str, Any] = {"max_graphs": rng.choice([None, 1, 2, 3, 5, 9])}
        if rng.random() < 0.6:
            options["step_times"] = points(100)
            if rng.random() < 0.5:
                options["eager_times"] = points(300)
        if options["max_graphs"] is None or rng.random() < 0.5:
            options["graph_bytes"] = rng.choice([points(50), points(50), rng.randint(0, 50)])
            options["memory_bytes"] = rng.randint(0, 160)
        return cls(sizes, options)

    def cost(self, ladder: tuple[int, ...]) -> float | None:
        """Mean cost of a step; None where a size has nowhere to run or a limit is passed."""
        options, total = self.options, 0.0
        if len(ladder) > (options["max_graphs"] or math.inf):
            return None
        if "memory_bytes" in options:
            given = options["graph_bytes"]
            each = [given if isinstance(given, int) else math.ceil(self.bytes_at(one)) for one in ladder]
            if sum(each) > options["memory_bytes"]:
                return None
        for size, count in self.sizes.items():
            bucket = min((one for one in ladder if one >= size), default=None)
            if bucket is None and "eager_times" not in options:
                return None
            if bucket is None:
                total += count * measured_at(size, options["eager_times"], rising=False)
            elif "step_times" in options:
                total += count * measured_at(bucket, options["step_times"], rising=True)
            else:
                total += count * bucket
        return total / sum(self.sizes.values())

    def bytes_at(self, size: int) -> float:
        """Bytes of a graph; what numpy's rounding added to a whole number is taken off."""
        return round(measured_at(size, self.options["graph_bytes"], rising=True), 9)

    def best(self) -> tuple[float, int] | None:
        """Least cost of all subsets of the sizes, and the fewest buckets that reach it."""
        subsets = itertools.chain.from_iterable(
            itertools.combinations(sorted(self.sizes), count) for count in range(len(self.sizes) + 1)
        )
        costs = [(cost, len(ladder)) for ladder in subsets if (cost := self.cost(ladder)) is not None]
        if not costs:
            return None
        least = min(costs)[0]
        return least, min(count for cost, count in costs if cost <= least * (1 + 1e-12))


def test_no_ladder_is_cheaper_in_500_small_cases() -> None:
    """REQ-G4: cost and number of buckets are those of the best of all subsets, and where there is none, tune says so."""
    rng, impossible, eager, bound = random.Random(20), 0, 0, 0
    for _ in range(500):
        case = Case.draw(rng)
        expected = case.best()
        if expected is None:
            with pytest.raises(ConfigError):
                tune(case.sizes, **case.options)
            impossible += 1
            continue
        tuning = tune(case.sizes, **case.options)
        assert tuning.tuned.mean_cost == pytest.approx(expected[0], rel=1e-12), case
        assert tuning.tuned.graphs <= expected[1], case
        assert case.cost(tuning.ladder.sizes) == pytest.approx(expected[0], rel=1e-12), case
        assert tuning.tuned.fits
        eager += tuning.tuned.eager_share > 0
        bound += "memory_bytes" in case.options and tuning.tuned.graphs < len(case.sizes)
    assert impossible > 20  # the cases are of all kinds
    assert eager > 20
    assert bound > 50


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.dictionaries(st.integers(1, 300), st.integers(0, 10**6), min_size=1, max_size=30),
    ladder=st.lists(st.integers(1, 300), max_size=12),
)
def test_figures_are_those_of_a_plain_count(sizes: dict[int, int], ladder: list[int]) -> None:
    """Waste, mean and largest padding, eager share and cost are what adding up step by step gives."""
    sizes[300] = 1
    costs = Costs.of(sizes, step_times={1: 1, 300: 300}, eager_times={1: 7.0}, graph_bytes=3)
    found = costs.figures(Buckets.of(ladder), name="some")
    real = sum(size * count for size, count in sizes.items())
    paddings: list[tuple[int, int]] = []
    cost = eager = 0.0
    for size, count in sizes.items():
        above = [bucket for bucket in ladder if bucket >= size]
        if above and count:
            paddings.append((min(above) - size, count))
        cost += count * (min(above) if above else 7.0 * size)
        eager += 0 if above else count
    padded, steps = sum(rows * count for rows, count in paddings), sum(sizes.values())
    assert found.waste == pytest.approx(padded / (padded + real))
    assert found.mean_padding == pytest.approx(padded / steps)
    assert found.largest_padding == max([rows for rows, _ in paddings], default=0)
    assert found.eager_share == pytest.approx(eager / steps)
    assert found.mean_cost == pytest.approx(cost / steps)
    assert found.memory_bytes == 3 * len(set(ladder))


def test_the_published_setting() -> None:
    """Sizes 1 to 2048, alike: doubling above 128 pads up to 1,023 rows, every 64 up to 63, and tuned no worse with as many."""
    rivals = {rival.name: rival for rival in tune(UNIFORM, max_graphs=32).rivals}
    assert rivals["every 8 to 128, then doubling"].largest_padding == 1023
    assert rivals["doubling"].largest_padding == 1023
    assert rivals["every 64"].largest_padding == 63
    assert rivals["every 8"].largest_padding == 7
    tuned = tune(UNIFORM, max_graphs=32).tuned
    assert (tuned.graphs, tuned.largest_padding) == (32, 63)
    assert tuned.ladder == every(64, largest=2048)
    assert tuned.waste < rivals["every 8 to 128, then doubling"].waste / 8


def test_the_usual_ladders_are_what_their_names_say() -> None:
    """Their buckets, and that each ends at the largest size and not above."""
    assert doubling(100).sizes == (1, 2, 4, 8, 16, 32, 64, 100)
    assert doubling(1).sizes == (1,)
    assert every(64, largest=130).sizes == (64, 128, 130)
    assert doubling_above(16, rows=8, largest=70).sizes == (8, 16, 32, 64, 70)
    assert doubling_above(128, rows=8, largest=20).sizes == (8, 16, 20)
    for largest in (1, 7, 8, 64, 65, 127, 128, 129, 2048, 4095):
        assert all(ladder.largest == largest for ladder in usual_ladders(largest).values())


def test_many_graphs_need_no_more_than_one_for_each_size() -> None:
    """A limit above the number of sizes gives them all, and no padding; one size needs one bucket."""
    tuning = tune({3: 1, 70: 2}, max_graphs=1000)
    assert tuning.ladder.sizes == (3, 70)
    assert (tuning.tuned.waste, tuning.tuned.largest_padding) == (0.0, 0)
    assert tune({17: 5}, max_graphs=1).ladder.sizes == (17,)


# Measurements.


def test_what_lies_between_measurements() -> None:
    """Interpolated between two, as the smallest below it, on along the last two above, in proportion where there is one."""
    line = Line.of({16: 100, 32: 140, 64: 150}, name="step_times")
    assert [line.at(size) for size in (1, 16, 24, 32, 48, 64, 128)] == [100, 100, 120, 140, 145, 150, 170]
    assert Line.of({16: 100, 32: 40}, name="eager_times").at(64) == 40  # a fall does not go on below zero
    assert Line.of({16: 100}, name="step_times").at(32) == 200
    assert Line.of({1: 10, 4: 11}, name="graph_bytes").bytes_at(2) == 11  # whole bytes, rounded up


@settings(max_examples=100, deadline=None)
@given(points=st.dictionaries(st.integers(1, 50), st.floats(0, 1e9), min_size=1, max_size=6))
def test_filled_up_measurements_never_fall(points: dict[int, float]) -> None:
    """Also between them and by the rounding of floats: the optimiser refuses the least fall."""
    line = Line.of(points, name="step_times").rising()
    values = [line.at(size) for size in range(1, 80)]
    assert values == sorted(values)


def test_what_was_done_to_measurements_is_said() -> None:
    """A fall that was filled up, and sizes beyond the last measurement, are notes; good measurements have none."""
    tuning = tune({10: 1, 90: 1}, max_graphs=1, step_times={8: 50, 16: 40, 64: 60}, graph_bytes={90: 7})
    (fall, beyond) = tuning.notes
    assert "step times fell as sizes grew" in fall
    assert "16 from 40 to 50" in fall
    assert "step times end at size 64; up to 90" in beyond
    assert str(tuning).count("note: ") == 2
    assert tune({10: 1}, max_graphs=1, step_times={8: 50, 16: 60}).notes == ()


def test_large_steps_run_eagerly_where_that_is_cheaper() -> None:
    """With eager times a rare large size gets no graph where the limit has better use for one; without it must have one."""
    sizes, times = {8: 100, 16: 100, 4000: 1}, {1: 10.0, 4000: 4000.0}
    tuning = tune(sizes, max_graphs=2, step_times=times, eager_times={1: 500.0, 4000: 4100.0})
    assert tuning.ladder.sizes == (8, 16)
    assert tuning.tuned.eager_share == pytest.approx(1 / 201)
    assert tune(sizes, max_graphs=2, step_times=times).ladder.largest == 4000
    nothing = tune(sizes, max_graphs=0, step_times=times, eager_times={1: 1.0})
    assert (nothing.ladder.sizes, nothing.tuned.eager_share, nothing.tuned.waste) == ((), 1.0, 0.0)


# Many sizes.


def test_many_sizes_are_exact_with_a_limit_of_graphs_and_quick() -> None:
    """8,192 sizes and 58 graphs, with times: exact, no note, in seconds."""
    sizes = dict.fromkeys(range(1, 8193), 1)
    begin = time.monotonic()
    tuning = tune(sizes, max_graphs=58, step_times={1: 3000, 8192: 60000})
    assert time.monotonic() - begin < 20
    assert tuning.notes == ()
    assert tuning.tuned.graphs == 58
    assert tuning.tuned.largest_padding in (141, 142)  # 8192 / 58 is 141.2: cells of equal width


def test_many_sizes_within_a_limit_of_bytes() -> None:
    """Few candidates are tried, which is said, and the sizes that matter are among them."""
    rng = random.Random(3)
    sizes = Counter(min(2048, max(1, round(rng.lognormvariate(5, 1)))) for _ in range(5000))
    need = {1: 1 << 20, 2048: 40 << 20}
    tuning = tune(sizes, memory_bytes=100 << 20, graph_bytes=need)
    (note,) = tuning.notes
    assert f"of {len(sizes)} sizes were tried as buckets" in note
    assert tuning.tuned.memory_bytes is not None
    assert 60 << 20 < tuning.tuned.memory_bytes <= 100 << 20
    free = tune(sizes, max_graphs=tuning.tuned.graphs).tuned
    assert free.mean_cost <= tuning.tuned.mean_cost
    # Where the limit does not bind, all sizes are tried.
    roomy = tune(sizes, max_graphs=8, memory_bytes=1 << 40, graph_bytes=need)
    assert roomy.notes == ()
    assert roomy.tuned.mean_cost == tune(sizes, max_graphs=8).tuned.mean_cost
    # One size has nearly all the weight, and lies among the 1 % that an equal cut would take for one.
    heavy = {**dict.fromkeys(range(1, 2001), 1), 4: 10**6}
    tuning = tune(heavy, memory_bytes=1001, graph_bytes={1: 1, 4: 1, 5: 1000, 2000: 1000})
    assert tuning.ladder.sizes == (4, 2000)


def test_graphs_of_equal_bytes_are_counted() -> None:
    """A limit of bytes for graphs of equal bytes is a limit of graphs: exact for thousands of sizes."""
    limited, counted = tune(UNIFORM, memory_bytes=1650, graph_bytes=100), tune(UNIFORM, max_graphs=16)
    assert limited.ladder == counted.ladder
    assert (limited.tuned.memory_bytes, limited.notes) == (1600, ())
    assert tune(UNIFORM, memory_bytes=1650, max_graphs=4, graph_bytes=100).tuned.graphs == 4


def test_more_sizes_than_can_be_tried_are_thinned() -> None:
    """With 500 graphs and 8,192 sizes each 5th may be a bucket: at most 4 rows a step are lost, and it is said."""
    tuning = tune(dict.fromkeys(range(1, 8193), 1), max_graphs=500)
    assert "the largest of each 5" in tuning.notes[0]
    assert tuning.tuned.graphs == 500
    assert tuning.tuned.mean_padding <= (8192 / 500 - 1) / 2 + 4


@pytest.mark.parametrize("eager", [None, {1: 900.0}])
def test_the_curve_is_what_tune_finds_for_each_number(eager: dict[int, float] | None) -> None:
    """`by_count` has the cost of `tune` for 1, 2, ... graphs, and no more of them than there are sizes."""
    rng = random.Random(5)
    options: dict[str, Any] = {"step_times": {1: 10, 50: 90}, "eager_times": eager}
    tuning = tune({size: rng.randint(1, 50) for size in range(1, 41)}, max_graphs=4, **options)
    curve = tuning.by_count(100)
    assert len(curve) == 40
    for count in (1, 2, 4, 9, 40):
        alone = tune(tuning.costs.counts, max_graphs=count, **options).tuned
        assert curve[count - 1].mean_cost == pytest.approx(alone.mean_cost, rel=1e-12)


def test_the_curve_of_thinned_sizes_is_above_the_exact_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """For more sizes than can be tried it is near the exact optimum, never below, eager steps included."""
    monkeypatch.setattr(sys.modules["breakgraph.tools.tuning.tune"], "_MOST_CELLS", 5_000)
    options: dict[str, Any] = {"step_times": {1: 10, 9000: 9000}, "eager_times": {1: 900, 3000: 3300}}
    rng = random.Random(6)
    tuning = tune({size: rng.randint(1, 9) for size in range(1, 3001, 3)}, max_graphs=4, **options)
    assert tuning.notes == ()
    curve = tuning.by_count(10)  # 500 of 1,000 sizes may be buckets
    assert 0 < tuning.tuned.eager_share < 1
    assert tuning.tuned.mean_cost < curve[3].mean_cost <= tuning.tuned.mean_cost + 8


# What is refused.


@pytest.mark.parametrize(
    ("sizes", "options", "said"),
    [
        ({8: 1}, {}, "neither a number of graphs nor their memory is limited"),
        ({8: 1}, {"max_graphs": 0}, "max_graphs is 0; expected an integer of at least 1"),
        ({8: 1}, {"max_graphs": True}, "max_graphs is True"),
        ({8: 1}, {"max_graphs": 2.0}, "max_graphs is 2.0"),
        ({8: 1}, {"memory_bytes": 5}, "the bytes of a graph are not known"),
        ({8: 1}, {"memory_bytes": -1, "graph_bytes": 1}, "memory_bytes is -1"),
        (
            {8: 1, 9: 1},
            {"memory_bytes": 5, "graph_bytes": {8: 1, 9: 6}},
            "a graph for the largest size, 9, takes 6 bytes",
        ),
        ({8: 1}, {"memory_bytes": 0, "graph_bytes": 6}, "a graph for the largest size, 8, takes 6 bytes"),
        ({8: 1}, {"max_graphs": 1, "graph_bytes": -6}, "graph_bytes has -6"),
        ({8: 1}, {"max_graphs": 1, "eager_times": {8: 1}}, "eager times came without step times"),
        ({8: 1}, {"max_graphs": 1, "step_times": {}}, "step_times is empty"),
        ({8: 1}, {"max_graphs": 1, "step_times": {8: math.nan}}, "step_times has nan for size 8"),
        ({8: 1}, {"max_graphs": 1, "step_times": {8: -1}}, "step_times has -1"),
        ({8: 1}, {"max_graphs": 1, "step_times": {0: 1}}, "for size 0"),
        ({}, {"max_graphs": 1}, "sizes counts no step"),
        ({8: 0}, {"max_graphs": 1}, "sizes counts no step"),
        ([8, 9], {"max_graphs": 1}, "sizes is of type list"),
        ({8: 1}, {"max_graphs": 1, "step_times": 5.0}, "step_times is of type float"),
        ({8: 1}, {"max_graphs": 1, "graph_bytes": "2"}, "graph_bytes is of type str"),
        ({0: 1}, {"max_graphs": 1}, "sizes has 1 for size 0"),
        ({8: -1}, {"max_graphs": 1}, "sizes has -1 for size 8"),
        ({8: math.nan}, {"max_graphs": 1}, "sizes has nan"),
        ({8.0: 1}, {"max_graphs": 1}, "for size 8.0"),
        ({True: 1}, {"max_graphs": 1}, "for size True"),
        ({1 << 21: 1}, {"max_graphs": 1}, "for size 2097152"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused(sizes: dict[Any, Any], options: dict[str, Any], said: str) -> None:
    """A ConfigError of three parts, with what was given and what was expected."""
    with pytest.raises(ConfigError) as refused:
        tune(sizes, **options)
    assert said in refused.value.what
    assert refused.value.why
    assert refused.value.fix


# Files.


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.csv", "size,count\n16,3\n8,2\n16,4\n", {8: 2, 16: 7}),
        ("a.csv", "count,size\n3,16\n", {16: 3}),
        ("a.csv", "time,Size, count ,note\n1.5,16,3,x\n", {16: 3}),
        ("a.csv", '\ufeff"size","count"\r\n\r\n"16"," 3 "\r\n', {16: 3}),
        ("a.CSV", "size,count\n16,0\n8,1", {8: 1}),
        ("a.csv", "phase,size,count\nprefill,16,3\nprefill,16,3\n", {16: 6}),
        ("a.jsonl", '{"size": 16}\n{"size": 16}\n\n{"size": 8, "count": 5, "more": [1]}\n', {8: 5, 16: 2}),
        ("a.jsonl", '\ufeff{"phase": "decode", "size": 2}\r\n', {2: 1}),
    ],
    ids=str,
)
def test_good_files(tmp_path: Path, name: str, text: str, expected: dict[int, int]) -> None:
    """Columns in any order, more columns, quotes, spaces, BOM, CRLF, blank lines, repeated sizes, counts of 0, traces."""
    path = tmp_path / name
    path.write_text(text, encoding="utf-8", newline="")
    found = read_sizes(path)
    assert found == expected
    assert list(found) == sorted(found)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", b"", "line 1: the header '' has no column size"),
        ("a.csv", b"16,3\n8,2\n", "line 1: the header '16,3' has no column size"),
        ("a.csv", b"size,times\n", "line 1: the header 'size,times' has no column count"),
        ("a.csv", b"size,size,count\n1,2,3\n", "has 2 columns size"),
        ("a.csv", b"size,count\n", "counts no step"),
        ("a.csv", b"size,count\n16,0\n", "counts no step"),
        ("a.csv", b"size,count\n8,1\n16\n", "line 3: it has 1 cells; expected 2"),
        ("a.csv", b"size,count\n8,1\n\n16,x\n", "line 4: count is 'x'; expected an integer"),
        ("a.csv", b"size,count\n8,\n", "line 2: count is ''"),
        ("a.csv", b"size,count\n3.0,1\n", "line 2: size is '3.0'; expected an integer"),
        ("a.csv", b"size,count\n1_0,1\n", "line 2: size is '1_0'"),
        ("a.csv", "size,count\n\u0663,1\n".encode(), "line 2: size is"),
        ("a.csv", b"size,count\n0,1\n", "line 2: size is 0; expected 1 to 1,048,576"),
        ("a.csv", b"size,count\n-8,1\n", "line 2: size is -8"),
        ("a.csv", b"size,count\n8,-1\n", "line 2: count is -1"),
        ("a.csv", b"size,count\n1048577,1\n", "line 2: size is 1048577"),
        ("a.csv", b"size,count\n8,10000000000000001\n", "line 2: count is 10000000000000001"),
        ("a.csv", b"size,count\n8," + b"9" * 5000 + b"\n", "line 2: count is '999"),
        ("a.csv", b"size,count\nsize,count\n8,1\n", "line 2: size is 'size'"),
        ("a.csv", b'size,count\n"8,1\n', "line 2: unexpected end of data"),
        ("a.csv", b"\x1f\x8b\x08\x00\xff\xfe", "is no text in UTF-8"),
        ("a.csv", b"phase,size,count\nwarm-up,8,1\n", "line 2: phase is 'warm-up'; expected prefill or decode"),
        ("a.csv", b"phase,size,count\nprefill,8,1\ndecode,8,1\n", "has prefill in line 2 and decode in line 3"),
        ("a.csv", b"phase,size,count\nprefill,8,1\n,8,1\n", "has prefill in line 2 and no phase in line 3"),
        ("a.jsonl", b"", "counts no step"),
        ("a.jsonl", b'{"size": 8}\n{"size": 8\n', "line 2: it is no JSON"),
        ("a.jsonl", b"[8, 1]\n", "line 1: it is '[8, 1]'; expected an object with a size"),
        ("a.jsonl", b'{"tokens": 8}\n', "expected an object with a size"),
        ("a.jsonl", b'{"size": 8.0}\n', "line 1: size is 8.0; expected an integer"),
        ("a.jsonl", b'{"size": NaN}\n', "line 1: size is nan"),
        ("a.jsonl", b'{"size": true}\n', "line 1: size is True"),
        ("a.jsonl", b'{"size": "8"}\n', "line 1: size is '8'"),
        ("a.jsonl", b'{"size": 8, "count": null}\n', "line 1: count is None"),
        ("a.jsonl", b'{"size": ' + b"9" * 5000 + b"}\n", "line 1: it is no JSON"),
        ("a.jsonl", b"[" * 100_000 + b"\n", "line 1: it is no JSON"),
        ("a.jsonl", b'{"size": 8, "phase": ["prefill"]}\n', "line 1: phase is ['prefill']"),
        ("a.jsonl", b'{"size": 8, "phase": "prefill"}\n{"size": 1, "phase": "decode"}', "expected one phase"),
        ("a.json", b"{}", "ends in '.json'; expected a .csv or .jsonl file"),
        ("a.csv.gz", b"", "ends in '.gz'"),
        ("a", b"", "ends in ''"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_bad_files_are_refused_with_the_line(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    """Each kind of fault is a ConfigError that names the file, and the line where there is one."""
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        read_sizes(path)
    assert said in refused.value.what
    assert str(path) in refused.value.what
    assert refused.value.fix


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    """A missing file, a folder, and a name that no file can have."""
    (tmp_path / "folder.csv").mkdir()
    for path in (tmp_path / "none.csv", tmp_path / "folder.csv", "null\0.csv"):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_sizes(path)


def test_a_phase_takes_its_lines(tmp_path: Path) -> None:
    """`phase` chooses among lines; one without a phase, a phase without lines, and an unknown one are refused."""
    path = tmp_path / "a.jsonl"
    write_sizes(path, sizes={"prefill": {17: 2, 5: 1}, "decode": {3: 9}})
    assert read_sizes(path, phase="prefill") == {5: 1, 17: 2}
    assert read_sizes(path, phase="decode") == {3: 9}
    with pytest.raises(ConfigError, match="phase is 'both'"):
        read_sizes(path, phase="both")
    write_sizes(path, sizes={"decode": {3: 9}})
    assert read_sizes(path) == {3: 9}
    with pytest.raises(ConfigError, match="counts no step of phase prefill"):
        read_sizes(path, phase="prefill")
    path.write_text('{"size": 4}\n')
    with pytest.raises(ConfigError, match="line 1: it has no phase, but decode steps were asked for"):
        read_sizes(path, phase="decode")


def test_measured_files(tmp_path: Path) -> None:
    """Sizes and one column; a repeated size, a number that is none, another extension and an empty file are refused."""
    path = tmp_path / "times.csv"
    path.write_text("microseconds,size,runs\n2.5,32,9\n1e1,16,9\n")
    assert read_measured(path, column="microseconds") == {16: 10.0, 32: 2.5}
    for text, said in (
        ("size,bytes\n1,1\n", "no column microseconds"),
        ("size,microseconds\n", "no line below its header"),
        ("size,microseconds\n8,1\n8,1\n", "line 3: size 8 came before"),
        ("size,microseconds\n8,nan\n", "line 2: microseconds is 'nan'"),
        ("size,microseconds\n8,inf\n", "line 2: microseconds is 'inf'"),
        ("size,microseconds\n8,-1\n", "line 2: microseconds is '-1'"),
        ("size,microseconds\n8,1_0\n", "line 2: microseconds is '1_0'"),
        ("size,microseconds\n8,\n", "line 2: microseconds is ''"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError) as refused:
            read_measured(path, column="microseconds")
        assert said in refused.value.what
    with pytest.raises(ConfigError, match=r"expected a \.csv file"):
        read_measured(tmp_path / "times.jsonl", column="microseconds")


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.dictionaries(
        st.sampled_from(["prefill", "decode"]),
        st.dictionaries(st.integers(1, 1 << 20), st.integers(1, 10**15), min_size=1, max_size=20),
        min_size=1,
    ),
    kind=st.sampled_from(["jsonl", "csv"]),
)
def test_what_is_recorded_is_read(
    tmp_path_factory: pytest.TempPathFactory, sizes: dict[str, dict[int, int]], kind: str
) -> None:
    """Whatever was counted comes back from both kinds of file."""
    path = tmp_path_factory.getbasetemp() / f"sizes.{kind}"
    write_sizes(path, sizes=sizes)
    assert {phase: read_sizes(path, phase=phase) for phase in sizes} == sizes
    assert [one.name for one in path.parent.glob(".sizes*")] == []


# The command.


@pytest.fixture
def uniform(tmp_path: Path) -> Path:
    """A histogram of the published setting."""
    path = tmp_path / "uniform.csv"
    path.write_text("size,count\n" + "".join(f"{size},1\n" for size in UNIFORM))
    return path


def run(*arguments: object) -> Any:
    """`breakgraph tune` in this process."""
    return CliRunner().invoke(app, ["tune", *map(str, arguments)])


def test_the_command_prints_ladder_and_rivals(uniform: Path) -> None:
    """The published setting: 1,023 and 63 rows stand in the table, and the ladder stands ready to be pasted."""
    done = run("--sizes", uniform, "--max-graphs", 32)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    (published,) = [line for line in lines if line.startswith("every 8 to 128, then doubling ")]
    (narrow,) = [line for line in lines if line.startswith("every 64 ")]
    (tuned,) = [line for line in lines if line.startswith("tuned ")]
    assert published.split()[-4:] == ["20", "24.9%", "339.8", "1,023"]
    assert narrow.split()[2:] == ["32", "3.0%", "31.5", "63"]
    assert tuned.split()[1:] == narrow.split()[2:]
    (pasted,) = [line.removeprefix("runners: ") for line in lines if line.startswith("runners: ")]
    assert eval(pasted) == every(64, largest=2048)
    (served,) = [line for line in lines if line.startswith("serve: ")]
    assert f"--prefill-sizes {','.join(map(str, range(64, 2049, 64)))} " in served


def test_the_command_writes_json_and_the_ladder(uniform: Path, tmp_path: Path) -> None:
    """`--json` and `--output` are one object; a runner's ladder comes back from the file."""
    output = tmp_path / "ladder.json"
    done = run("--sizes", uniform, "--memory", 0.015625, "--bytes-per-graph", 1 << 20, "--output", output, "--json")
    assert done.exit_code == 0, done.output
    values = json.loads(done.stdout)
    assert values == json.loads(output.read_text())
    assert values["ladder"] == values["tuned"]["sizes"] == list(range(128, 2049, 128))
    assert (values["unit"], values["steps"], values["memory_bytes"]) == ("rows", 2048, 1 << 24)
    assert values["tuned"]["memory_bytes"] == 1 << 24
    assert [rival["name"] for rival in values["rivals"]] == list(usual_ladders(2048))
    assert [rival["fits"] for rival in values["rivals"]] == [True, False, False, False]
    assert read_ladder(output) == Buckets.of(range(128, 2049, 128))
    assert read_ladder(output).sizes == tuple(values["ladder"])


def test_measurements_go_through_the_command(tmp_path: Path) -> None:
    """Times, eager times and bytes from files give what the function gives; the table has their columns and the notes."""
    sizes, times = tmp_path / "s.csv", tmp_path / "t.csv"
    eager, memory = tmp_path / "e.csv", tmp_path / "b.csv"
    sizes.write_text("size,count\n10,5\n20,5\n4000,1\n")
    times.write_text("size,microseconds\n16,100\n32,90\n4096,9000\n")
    eager.write_text("size,microseconds\n16,900\n4096,9100\n")
    memory.write_text("size,bytes\n16,1000000\n4096,90000000\n")
    options = ("--step-times", times, "--eager-times", eager, "--graph-bytes", memory)
    done = run("--sizes", sizes, "--max-graphs", 2, "--memory", 0.01, *options)
    assert done.exit_code == 0, done.output
    head = next(line for line in done.stdout.splitlines() if line.startswith("ladder "))
    assert head.endswith("mean step, us  eager  memory, GiB")
    assert "Buckets.of([20])" in done.stdout  # 10 and 20 rows take the same time
    assert "9.1%" in done.stdout
    assert "note: step times fell as sizes grew" in done.stdout
    assert "* beyond the limits" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "neither a number of graphs nor their memory is limited"),
        (["--max-graphs", "0"], "max_graphs is 0"),
        (["--max-graphs", "x"], "--max-graphs"),
        (["--memory", "0"], "--memory is 0.0; expected a number of GiB above 0 and"),
        (["--memory", "nan"], "--memory is nan"),
        (["--memory", "1"], "the bytes of a graph are not known"),
        (["--memory", "0.001", "--bytes-per-graph", "9000000"], "takes 9,000,000 bytes"),
        (["--max-graphs", "4", "--bytes-per-graph", "-1"], "graph_bytes has -1"),
        (["--max-graphs", "4", "--graph-bytes", "b.csv", "--bytes-per-graph", "1"], "were both given"),
        (["--max-graphs", "4", "--step-times", "none.csv"], "none.csv cannot be read"),
        (["--max-graphs", "4", "--phase", "both"], "--phase"),
        (["--max-graphs", "4", "--phase", "decode"], "line 2: it has no phase"),
        (["--max-graphs", "4", "--output", "/no/such/folder/l.json"], "the ladder cannot be written"),
        (["--max-graphs", "4", "--plot", "/no/such/folder/w.png"], "the picture cannot be written"),
        (["--max-graphs", "4", "--plot", "w.pdf"], "expected a name that ends in .png"),
    ],
    ids=str,
)
def test_wrong_input_ends_with_2(uniform: Path, arguments: list[str], said: str) -> None:
    """Status 2, what is wrong on stderr, nothing on stdout, no traceback."""
    done = run("--sizes", uniform, *arguments)
    assert done.exit_code == 2, done.output
    assert said in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


def test_a_ladder_on_a_terminal_is_not_folded(uniform: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table is drawn for the width of the terminal; the ladder stays in one line, to be pasted."""
    from breakgraph.cli import tune as command

    said: list[str] = []
    monkeypatch.setattr("builtins.print", lambda text: said.append(text))
    monkeypatch.setenv("COLUMNS", "60")
    command._print(tune(read_sizes(uniform), max_graphs=32))
    assert f"runners: Buckets.of({list(range(64, 2049, 64))})" in said


# The picture.


@pytest.mark.parametrize("timed", [False, True])
def test_the_picture_is_a_png(tmp_path: Path, timed: bool) -> None:
    """A PNG of the size that was asked for and with colours in it; of one size, and of no graph at all, too."""
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    path = tmp_path / "waste.png"
    options: dict[str, Any] = {"step_times": {1: 5, 64: 9}, "eager_times": {1: 6}} if timed else {}
    for sizes, graphs in ((dict.fromkeys(range(1, 65), 1), 4), ({7: 3}, 1), ({7: 3}, 0 if timed else 1)):
        save_plot(tune(sizes, max_graphs=graphs, **options), path=path)
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        pixels = imread(path)
        assert pixels.shape[:2] == (750, 1200)
        red = (pixels[..., 0] > 0.7) & (pixels[..., 1] < 0.35)
        assert red.sum() > 100  # the chosen ladder, in the legend and in its place
        path.unlink()


def test_a_missing_extra_is_named(uniform: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without matplotlib the command says what to install; the answer can be had without the picture."""
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    done = run("--sizes", uniform, "--max-graphs", 4, "--plot", tmp_path / "w.png")
    assert done.exit_code == 2
    assert "the picture needs matplotlib" in done.stderr
    assert 'pip install -e ".[plot]"' in done.stderr


# The ladder's file.


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"ladder": []}', '{"ladder": 16}', "16", "[0]", '["16"]', "[1.5]"])
def test_a_file_without_a_ladder_is_refused(tmp_path: Path, text: str) -> None:
    """What is no ladder of one bucket or more is a ConfigError; a plain list is one."""
    path = tmp_path / "ladder.json"
    path.write_text(text)
    with pytest.raises(ConfigError):
        read_ladder(path)
    path.write_text("[64, 16]")
    assert read_ladder(path).sizes == (16, 64)


def test_serve_takes_a_ladder(tmp_path: Path) -> None:
    """`--prefill-sizes` and `--decode-sizes` take sizes or the file of `--output`; anything else ends with 2."""
    from breakgraph.cli.serving import _ladder

    path = tmp_path / "ladder.json"
    path.write_text('{"ladder": [16, 64]}')
    assert _ladder("16, 64,256", option="--prefill-sizes") == (16, 64, 256)
    assert _ladder("[16]", option="--prefill-sizes") == (16,)
    assert _ladder(str(path), option="--prefill-sizes") == (16, 64)
    assert _ladder(None, option="--prefill-sizes") is None
    for wrong in ("", "16,", "0", "-1", "1.5", "x.json", "16 64", "\u0663"):
        with pytest.raises(ConfigError):
            _ladder(wrong, option="--decode-sizes")


# Recording, and the circle.


def test_a_runner_counts_real_sizes() -> None:
    """Replays and eager steps alike, before padding; reset empties it; an idle step, of size 0, is none."""
    rig = PrefillRig(torch.device("cpu"), sizes=(4, 8), verify="never")
    rig.capture()
    assert rig.runner.statistics.sizes == {}
    for size in (3, 3, 8, 20):
        inputs, live = rig.step(size)
        rig.runner.run(inputs, size=size, live=live)
    assert rig.runner.statistics.sizes == {3: 2, 8: 1, 20: 1}
    rig.runner.statistics.reset()
    assert rig.runner.statistics.sizes == {}
    rig.runner.statistics.count_replay("key", real=0, padded=4, size=0)
    assert rig.runner.statistics.sizes == {}


def test_a_decode_step_counts_requests_and_no_draft_tokens() -> None:
    """Buckets of decode are batch sizes: 3 requests of 4 tokens are a 3, with a graph and without one."""
    rig = DecodeRig(torch.device("cpu"), sizes=(4,), keys=[GraphKey(4, draft_len=3)], verify="never")
    rig.capture()
    for key in (GraphKey(3, draft_len=3), GraphKey(3, draft_len=1)):
        inputs = rig.example(key).inputs
        assert rig.runner.run(inputs, key=key).replayed == (key.draft_len == 3)
    assert rig.runner.statistics.sizes == {3: 2}


def test_counting_is_bounded_and_cheap() -> None:
    """Beyond 65,536 distinct sizes no new one is kept, known ones still count; a count takes less than a microsecond."""
    counted = RunnerStatistics()
    for size in range(1, MOST_SIZES + 100):
        counted.count_eager("reason", rows=size, size=size)
    counted.count_eager("reason", rows=5, size=5)
    assert len(counted.sizes) == MOST_SIZES
    assert counted.sizes[5] == 2
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        for size in range(1, 10_001):
            counted._count_size(size)
        seconds.append((time.perf_counter() - begin) / 10_000)
    assert min(seconds) < 1e-6


def test_reports_of_a_runner_become_times_and_bytes() -> None:
    """A captured runner's own measurements tune its ladder; a report of no graph and of no runner are refused."""
    rig = PrefillRig(torch.device("cpu"), sizes=(4, 16), verify="never", measure="always")
    rig.capture()
    measured = from_reports(rig.runner.statistics.reports)
    assert measured.step_times is not None
    assert measured.eager_times is not None
    assert sorted(measured.step_times) == sorted(measured.eager_times) == sorted(measured.graph_bytes) == [4, 16]
    report = rig.runner.statistics.reports[next(iter(rig.runner.graphs))]
    assert report.replay_seconds is not None
    assert report.replay_seconds * 1e6 in measured.step_times.values()
    tuning = tune({3: 5, 16: 1}, max_graphs=1, **attrs.asdict(measured))
    assert tuning.unit is CostUnit.MICROSECONDS
    with pytest.raises(ConfigError, match="no captured graph"):
        from_reports({})
    with pytest.raises(ConfigError, match="expected a PrefillKey or a GraphKey"):
        from_reports({"key": report})


def test_only_a_file_that_can_be_written_is_taken(tmp_path: Path) -> None:
    """Checked before anything runs, without touching what is there; a link is followed to its file."""
    there = tmp_path / "there.jsonl"
    there.write_text("old")
    link = tmp_path / "link.jsonl"
    link.symlink_to(there)
    assert checked_size_file(there) == checked_size_file(link) == there.resolve()
    assert there.read_text() == "old"
    (tmp_path / "folder.jsonl").mkdir()
    loop = tmp_path / "loop.jsonl"
    loop.symlink_to(loop)
    for path in ("/no/such/folder/s.jsonl", tmp_path / "folder.jsonl", tmp_path / "s.txt", loop, "nul\0l.csv"):
        with pytest.raises(ConfigError, match="sizes cannot be recorded"):
            checked_size_file(path)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["folder.jsonl", "link.jsonl", "loop.jsonl", "there.jsonl"]


def test_the_recorder_writes_while_steps_run_and_survives_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing before the first step; then what was counted; a write that fails is one warning and is tried again."""
    path, counts = tmp_path / "sizes.jsonl", Counter[int]()
    recorder = SizeRecorder(path, sizes=lambda: {"prefill": dict(counts)}, seconds=0.01)
    recorder.start()
    wait_for(lambda: recorder._thread.is_alive())
    time.sleep(0.05)
    assert not path.exists()
    counts[17] += 1
    wait_for(path.exists)
    assert read_sizes(path) == {17: 1}
    from breakgraph.serving import size_file

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(size_file.os, "replace", full)
    counts[5] += 1
    wait_for(lambda: "No space left" in caplog.text)
    time.sleep(0.05)
    assert caplog.text.count("No space left") == 1
    assert read_sizes(path) == {17: 1}  # the last good file
    assert [one.name for one in tmp_path.iterdir()] == ["sizes.jsonl"]
    monkeypatch.undo()
    recorder.stop()
    assert read_sizes(path) == {5: 1, 17: 1}


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    """While a thread counts and another writes, every reading is whole: totals only grow."""
    path, counts, ended = tmp_path / "sizes.csv", Counter({1: 1}), threading.Event()

    def count() -> None:
        size = 1
        while not ended.is_set():
            size = size % 500 + 1
            counts[size] += 1

    thread = threading.Thread(target=count)
    recorder = SizeRecorder(path, sizes=lambda: {"decode": dict(counts)}, seconds=0.001)
    recorder.start()
    thread.start()
    try:
        wait_for(path.exists)
        totals = [sum(read_sizes(path).values()) for _ in range(60)]
    finally:
        ended.set()
        thread.join()
        recorder.stop()
    assert totals == sorted(totals)
    assert totals[-1] > totals[0]
    assert read_sizes(path) == dict(sorted(counts.items()))


def wait_for(condition: Any) -> None:
    """Waits until something holds."""
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    """A server on a tiny model."""
    with serving(LLM(speaking_model(), **{**OPTIONS, "prefix_reuse": False})) as made:
        yield made


def test_from_a_server_to_a_runner(rig: Rig, tmp_path: Path) -> None:
    """Prompts of known lengths are recorded as such, tuned by the command, and the ladder serves a runner without padding."""
    path, output = tmp_path / "sizes.jsonl", tmp_path / "ladder.json"
    lengths = [3, 11, 3, 7, 11]
    with recorded_sizes(rig.llm.engine, path=checked_size_file(path)):
        for length in lengths:
            body = {"model": "tiny", "prompt": "x" * length, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
            assert rig.post("/v1/completions", body).status_code == 200
        rig.wait_until_idle()
    assert read_sizes(path, phase="prefill") == Counter(lengths)
    assert read_sizes(path, phase="decode") == {
        1: 3 * len(lengths)
    }  # one request at a time; the first token is prefill's
    sizes = rig.llm.statistics.sizes
    assert sizes == {"prefill": Counter(lengths), "decode": {1: 15}}
    assert json.loads(json.dumps(rig.llm.statistics.as_dict()))["prefill_sizes"] == {"3": 2, "7": 1, "11": 2}
    done = run("--sizes", path, "--phase", "prefill", "--max-graphs", 2, "--output", output)
    assert done.exit_code == 0, done.output
    ladder = read_ladder(output)
    assert ladder.sizes == (3, 11)
    runner_rig = PrefillRig(torch.device("cpu"), sizes=ladder.sizes, verify="never")
    runner_rig.capture()
    for length in lengths:
        inputs, live = runner_rig.step(length)
        assert runner_rig.runner.run(inputs, size=length, live=live).replayed
    statistics = runner_rig.runner.statistics
    expected = tune(read_sizes(path, phase="prefill"), max_graphs=2)
    assert statistics.padding_waste == pytest.approx(expected.tuned.waste)
    assert statistics.padded_rows - statistics.real_rows == round(expected.tuned.mean_padding * len(lengths)) == 4


def test_an_engine_takes_tuned_ladders() -> None:
    """Prefill and decode graphs are those of the ladders; a batch above the largest runs eagerly; answers are the same."""
    model, prompts = speaking_model(), [[7, 8, 9], [5] * 11, [1, 2, 3, 4], [60]]
    llm = LLM(model, **{**OPTIONS, "prefill_sizes": [12, 32], "decode_sizes": [2], "sampling": "greedy"})
    assert llm.engine.sizes.decode.sizes == (2,)
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    for prompt, answer in zip(prompts, llm.generate(prompts, params), strict=True):
        assert greedy_reference(model, prompt, max_tokens=6).agrees(answer.token_ids)
    statistics = llm.statistics
    assert statistics.eager == {"ABOVE_LARGEST_BUCKET": statistics.sizes["decode"][4]}
    llm.generate(prompts[:2], params)
    assert llm.statistics.decode_replays > 0
    assert set(llm.statistics.sizes["decode"]) == {2, 4}
    with pytest.raises(ConfigError, match="decode_sizes is an empty list"):
        LLM(model, decode_sizes=[])


def test_the_result_says_what_it_is() -> None:
    """Both types are frozen values whose parts agree with one another."""
    tuning = tune({8: 3, 9: 1}, max_graphs=1)
    assert isinstance(tuning, Tuning)
    assert isinstance(tuning.tuned, LadderFigures)
    assert tuning.ladder is tuning.tuned.ladder
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        tuning.max_graphs = 3  # type: ignore[misc]


def test_the_page_says_what_tune_prints() -> None:
    """The examples of the section run as they stand, the output below the first is true, and its options are there."""
    page = (Path(__file__).resolve().parent.parent / "docs" / "tools.md").read_text()
    section = page[page.index("## Tune") :].split("\n## ", 1)[0]
    first, second = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    (expected,) = re.findall(r"```text\n(.*?)```", section, flags=re.DOTALL)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(first, "docs/tools.md", "exec"), {"__name__": "tools"})
    assert said.getvalue() == expected
    rig = PrefillRig(torch.device("cpu"), sizes=(4, 8), verify="never", measure="always")
    rig.capture()
    inputs, live = rig.step(3)
    rig.runner.run(inputs, size=3, live=live)
    namespace: dict[str, Any] = {"__name__": "tools", "runner": rig.runner}
    exec(compile(second, "docs/tools.md", "exec"), namespace)
    assert namespace["tuning"].unit is CostUnit.MICROSECONDS
    assert namespace["tuning"].ladder.sizes in ((3,), ())  # a model this small may be as quick without a graph
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    known = {name for one in ("tune", "serve") for option in commands[one].params for name in option.opts}
    assert set(re.findall(r"(--[a-z][a-z-]+)", section)) <= known


def test_an_output_that_cannot_be_used_is_refused_before_anything_is_computed(tmp_path: Path) -> None:
    """The ladder goes to a .json that is no input of the run: a trace is never replaced by its ladder."""
    trace = tmp_path / "sizes.csv"
    trace.write_text("size,count\n4,2\n9,1\n")
    for output, says in (("ladder.txt", "ends in .json"), (str(trace), "ends in .json")):
        result = CliRunner().invoke(app, ["tune", "--sizes", str(trace), "--max-graphs", "1", "--output", output])
        assert (result.exit_code, says in result.stderr) == (2, True)
    same = tmp_path / "times.json"
    with pytest.raises(ConfigError, match="is read, or written otherwise"):
        check_output(same, inputs=(None, same))
    assert trace.read_text().startswith("size,count")


def test_a_ladder_knows_its_phase(tmp_path: Path) -> None:
    """A file of prefill steps is refused as a ladder of decode steps."""
    path = tmp_path / "ladder.json"
    write_ladder(path, values={"ladder": [4, 9], "phase": "prefill"})
    assert read_ladder(path, phase="prefill").sizes == (4, 9)
    with pytest.raises(ConfigError, match="has the ladder of prefill steps; expected one of decode steps"):
        read_ladder(path, phase="decode")


def test_a_largest_size_has_a_bucket(tmp_path: Path) -> None:
    """--largest: the ladder covers it, though no step was seen of it."""
    trace = tmp_path / "sizes.csv"
    trace.write_text("size,count\n4,200\n9,100\n")
    result = CliRunner().invoke(app, ["tune", "--sizes", str(trace), "--max-graphs", "3", "--largest", "64", "--json"])
    assert json.loads(result.stdout)["ladder"] == [4, 9, 64]


def test_a_ladder_of_nothing_is_said_in_words() -> None:
    """Where eager is cheaper for every size there is no ladder to paste."""
    tuning = tune({4: 3, 9: 1}, max_graphs=2, step_times={1: 100, 9: 100}, eager_times={1: 1, 9: 1})
    assert tuning.ladder.sizes == ()
    assert "no graph pays: an eager step is cheaper for every size" in str(tuning)
    assert "--prefill-sizes" not in str(tuning)


def test_numbers_of_numpy_are_numbers() -> None:
    """What np.unique counts is taken as it is."""
    sizes, counts = np.unique(np.array([3, 3, 8]), return_counts=True)
    assert tune(dict(zip(sizes, counts, strict=True)), max_graphs=2).ladder.sizes == (3, 8)


def test_a_file_that_somebody_else_replaces_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two servers on one file: each says once that it was replaced; its mode stays."""
    path = tmp_path / "sizes.jsonl"
    write_sizes(path, sizes={"prefill": {1: 1}})
    path.chmod(0o600)
    counts = Counter({4: 1})
    recorder = SizeRecorder(path, sizes=lambda: {"prefill": dict(counts)}, seconds=0.01)
    recorder.start()
    wait_for(lambda: read_sizes(path) == {4: 1})
    assert path.stat().st_mode & 0o777 == 0o600
    time.sleep(0.01)
    write_sizes(path, sizes={"prefill": {7: 9}})
    counts[5] += 1
    wait_for(lambda: read_sizes(path) == {4: 1, 5: 1})
    recorder.stop()
    assert sum("was replaced by somebody else" in record.message for record in caplog.records) == 1


def test_a_file_that_is_taken_away_ends_no_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A file removed the moment it was written, or between two turns, is written anew, and nobody is said to have replaced it."""
    path, counts = tmp_path / "sizes.jsonl", Counter({4: 1})
    removing = [True]

    def write_and_lose(target: Path, *, sizes: Mapping[str, Mapping[int, int]]) -> None:
        write_sizes(target, sizes=sizes)
        if removing[0]:
            target.unlink()

    monkeypatch.setattr("breakgraph.server.size_recorder.write_sizes", write_and_lose)
    recorder = SizeRecorder(path, sizes=lambda: {"prefill": dict(counts)}, seconds=30)
    recorder._write()
    removing[0] = False
    counts[5] += 1
    recorder._write()
    path.unlink()
    counts[6] += 1
    recorder._write()
    assert read_sizes(path) == {4: 1, 5: 1, 6: 1}
    assert not caplog.records


def test_a_start_says_which_steps_have_no_bucket() -> None:
    """Steps above the ladder, and buckets above the steps, are said when a server starts."""
    model = speaking_model()

    def said_with(ladder: Any) -> str:
        options = {**OPTIONS, "prefill_sizes": ladder, "max_num_tokens": 64, "graphs": "on", "verify": "never"}
        return "\n".join(start_lines(LLM(model, **options)))

    said = said_with((4, 4000))
    assert "prefill buckets [4000] are above the most tokens of a step, 64: 64 stands for them" in said
    assert "prefill steps of 10 to 64 tokens run eagerly: the largest bucket is 9" in said_with(Buckets.of([4, 9]))
