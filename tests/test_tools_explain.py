"""`explain`: what it says of a graph agrees with the graph, and each way to show it holds the same."""

from __future__ import annotations

import io
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from typer.testing import CliRunner

from breakgraph import BreakableCUDAGraph, BreakableCUDAGraphCapture, break_graph, eager_on_graph
from breakgraph.cli import app
from breakgraph.errors import ConfigError, NoGraphError
from breakgraph.explanation import Explanation
from breakgraph.replay_program import StepKind
from breakgraph.tools import chrome_trace, explain, html_page, measure
from breakgraph.tools.explaining.table import ExplanationTable
from tests.runner_models import PrefillRig

ROWS, WIDTH = 8, 64
LIVE = {"lengths": [(0, 3), (3, 5)]}


class Layer(nn.Module):
    """Every kind of step: a hoistable break, a rows break, a split, a fresh result."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    @eager_on_graph(live=("lengths",))
    def plan(self, lengths: list[tuple[int, int]]) -> torch.Tensor:
        """Depends on live data only."""
        return torch.tensor([end - start for start, end in lengths][:1], device=self.up.weight.device)

    @eager_on_graph(live=("lengths",), rows=("q", "out"), writes=("out",))
    def attend(self, q: torch.Tensor, out: torch.Tensor, lengths: list[tuple[int, int]]) -> None:
        """Writes in place."""
        for start, end in lengths:
            out[start:end] = q[start:end].cumsum(0)

    @eager_on_graph
    def scale(self, x: torch.Tensor) -> torch.Tensor:
        """Returns a fresh tensor."""
        return x / float(x.abs().max())

    def forward(self, x: torch.Tensor, lengths: list[tuple[int, int]]) -> torch.Tensor:
        """The layer."""
        q = self.up(x)
        count = self.plan(lengths)
        out = torch.zeros_like(q)
        self.attend(q, out, lengths)
        y = self.down(out) + count
        break_graph()
        return self.scale(y * 2).relu() + 1


def _captured(backend: str, device: torch.device) -> BreakableCUDAGraph:
    torch.manual_seed(0)
    layer, x = Layer().to(device), torch.randn(ROWS, WIDTH, device=device)
    graph = BreakableCUDAGraph(name="layer")
    with torch.inference_mode():
        layer(x, LIVE["lengths"])
        with BreakableCUDAGraphCapture(graph, backend=backend, live=LIVE):
            layer(x, LIVE["lengths"])
    return graph


def test_numbers_agree_with_the_graph(backend: str, device: torch.device) -> None:
    """Segments, breaks and kernels are counted as the graph counts them, and each step is there with its line."""
    graph = _captured(backend, device)
    found = graph.explain()
    assert len(found.segments) == len(graph.segments)
    assert (
        [step.name for step in found.breaks] == [call.spec.name for call in graph.breaks] == ["plan", "attend", "scale"]
    )
    assert [step.launches for step in found.segments] == [segment.size for segment in graph.segments]
    assert sum(found.kernels.values()) == sum(segment.size for segment in graph.segments)
    assert all("test_tools_explain.py" in step.line for step in found.steps)
    assert [step.index for step in found.steps] == list(range(len(graph.steps)))
    assert sum(found.share(step) or 0.0 for step in found.segments) == pytest.approx(1.0)


def test_segments_say_why_they_end(backend: str, device: torch.device) -> None:
    """Each segment ends at a break, a split or the end of the capture, and says which."""
    why = [step.why for step in _captured(backend, device).explain().segments]
    assert why[0] == "break 'plan' is called"
    assert sum(text.startswith("break_graph() at") and "in forward" in text for text in why) == 1
    assert why[-1] == "the capture ends"


def test_bytes_of_breaks(backend: str, device: torch.device) -> None:
    """Bytes received, written and copied back follow from the tensors of the call."""
    plan, attend, scale = _captured(backend, device).explain().breaks
    row = ROWS * WIDTH * 4
    assert (plan.traffic.read, plan.traffic.written, plan.traffic.copied) == (0, 8, 8)
    assert (attend.traffic.read, attend.traffic.written, attend.traffic.copied) == (2 * row, row, 0)
    assert (scale.traffic.read, scale.traffic.written, scale.traffic.copied) == (row, row, row)


def test_advice_names_what_can_be_better(backend: str, device: torch.device) -> None:
    """Splits that can be merged, breaks that can be hoisted and copies that can be saved are told, with their steps."""
    found = _captured(backend, device).explain()
    by_text = {advice.text.split(" ")[0]: advice for advice in found.advice}
    split = next(step.index for step in found.segments if step.why.startswith("break_graph()"))
    assert by_text["merge"].steps == (split + 1,)
    plan, _, scale = found.breaks
    hoist = [advice for advice in found.advice if advice.text.startswith("hoist")]
    assert [advice.steps for advice in hoist] == [(plan.index,)]
    copies = [advice.steps for advice in found.advice if "returns fresh tensors" in advice.text]
    assert copies == [(scale.index,)]  # the few bytes of a plan are not worth a word


def test_a_hoisted_break_is_not_advised_to_be_hoisted(backend: str, device: torch.device) -> None:
    """What is hoisted already comes first, and the split that it made is told."""

    @eager_on_graph(live=("lengths",), hoist=True)
    def plan(lengths: list[int]) -> None:
        return None

    x = torch.ones(4, device=device)
    graph = BreakableCUDAGraph()
    with torch.no_grad(), BreakableCUDAGraphCapture(graph, backend=backend, live={}):
        y = x + 1
        plan([1])
        y * 2
    found = graph.explain()
    assert found.steps[0].kind is StepKind.HOISTED
    assert not any(advice.text.startswith("hoist") for advice in found.advice)
    assert any("a hoisted break is called between them" in advice.text for advice in found.advice)


def test_breaks_that_must_not_be_hoisted_are_not_advised_to_be(backend: str, device: torch.device) -> None:
    """A break that shares a buffer with another one, returns nothing, takes an object, or comes first is left where it is."""
    buffer = torch.zeros(4, device=device)

    @eager_on_graph
    def fill(x: torch.Tensor, buf: torch.Tensor) -> None:
        buf.copy_(x)

    @eager_on_graph
    def read(buf: torch.Tensor) -> torch.Tensor:
        return buf * 2

    @eager_on_graph
    def tell(note: str) -> None:
        return None

    @eager_on_graph
    def of(holder: Any) -> torch.Tensor:
        return torch.ones(4, device=device)

    x = torch.ones(4, device=device)
    graph = BreakableCUDAGraph()
    with torch.no_grad(), BreakableCUDAGraphCapture(graph, backend=backend):
        first = read(torch.ones(4, device=device))
        fill(x + first, buffer)
        y = read(buffer) + 1
        tell("here")
        of(object()) + y
    assert not [advice for advice in graph.explain().advice if advice.text.startswith("hoist")]


def test_many_steps_are_shown_in_time() -> None:
    """Thousands of steps: page, text and JSON in time that grows with their number."""
    graph = BreakableCUDAGraph(name="long")
    x = torch.ones(2)
    with torch.no_grad(), BreakableCUDAGraphCapture(graph, backend="emulated"):
        for _ in range(1500):
            x = x + 1
            break_graph()
    found = graph.explain()
    begin = time.perf_counter()
    page, text, data = html_page(found), str(found), found.as_dict()
    assert time.perf_counter() - begin < 3
    assert len(data["steps"]) == 1500
    assert len(page) < 2_000_000
    assert text.count("aten::add") >= 1


@pytest.mark.parametrize("times", [0, 2])
def test_a_replay_that_is_none_or_two_is_refused(times: int) -> None:
    """replay= must replay the graph once."""
    graph = _captured("emulated", torch.device("cpu"))

    def replay() -> None:
        for _ in range(times):
            graph.replay(LIVE)

    with pytest.raises(ConfigError, match=f"replayed layer {times} times; expected once"):
        explain(graph, replay=replay)
    with pytest.raises(ConfigError, match="expected a BreakableCUDAGraph"):
        explain(3)  # type: ignore[arg-type]


def test_times_are_of_the_steps(backend: str, device: torch.device) -> None:
    """A break that sleeps has that time on the host; steps follow one another; kernels of breaks are counted."""

    @eager_on_graph
    def slow(x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.003)
        return x * 2

    x = torch.ones(64, device=device)
    graph = BreakableCUDAGraph()
    with torch.no_grad(), BreakableCUDAGraphCapture(graph, backend=backend):
        slow(x + 1) + 1
    found = explain(graph, runs=3)
    assert found.times is not None
    assert found.times.runs == 3
    times = [step.time for step in found.steps]
    assert all(one is not None for one in times)
    host = [one.host_us for one in times if one is not None]
    assert 3000 <= host[1] <= found.times.host_us * 1.5
    begins = [one.host_at_us for one in times if one is not None]
    assert begins == sorted(begins)
    assert all(one.device_end_us >= one.device_at_us for one in times if one is not None)
    assert found.breaks[0].launches is not None
    assert found.breaks[0].launches >= 1
    assert found.share(found.steps[1]) is not None
    assert graph.stats().replays > 6


@pytest.mark.gpu
def test_breaks_that_wait_are_told() -> None:
    """On a GPU each break that waits for the device is told, also the second; one that does not is not."""

    @eager_on_graph
    def waits(x: torch.Tensor) -> torch.Tensor:
        return x / x.abs().max().item()

    @eager_on_graph
    def launches(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    x = torch.randn(1 << 16, device="cuda")
    graph = BreakableCUDAGraph()
    with torch.no_grad(), BreakableCUDAGraphCapture(graph):
        waits(launches(waits(x + 1) + 1) * 3) + 1
    found = explain(graph, runs=3)
    assert [step.time is not None and step.time.waits for step in found.breaks] == [True, False, True]
    assert [step.time is not None and step.time.waits for step in found.segments] == [False] * 4
    assert all(step.launches for step in found.breaks)


def test_observers_leave_nothing_behind(backend: str, device: torch.device) -> None:
    """After a measurement a replay runs the very functions that it ran before, and gives the same."""
    graph = _captured(backend, device)
    graph.replay(LIVE)
    assert graph._program is not None
    before = [getattr(run, "__name__", repr(type(run))) for run in graph._program.runs]
    measure(graph, live=LIVE, runs=1)
    graph.replay(LIVE)
    assert [getattr(run, "__name__", repr(type(run))) for run in graph._program.runs] == before
    assert graph._observers == ()


@pytest.mark.parametrize("runs", [0, -1, True, 1.5])
def test_a_wrong_count_of_runs_is_refused(runs: Any) -> None:
    """Medians need at least one run."""
    graph = _captured("emulated", torch.device("cpu"))
    with pytest.raises(ConfigError, match="whole number, 1 or more"):
        explain(graph, live=LIVE, runs=runs)


def test_an_empty_graph_is_said_to_be_empty() -> None:
    """Nothing captured: explain() says so, measuring refuses."""
    graph = BreakableCUDAGraph(name="none")
    assert str(graph.explain()) == "none: nothing captured"
    assert "Nothing was found" in html_page(graph.explain())
    with pytest.raises(NoGraphError, match="to be measured"):
        explain(graph)


def test_json_and_trace_hold_the_steps(backend: str, device: torch.device) -> None:
    """JSON has every step with kernels and times; the trace two bars a step; both are plain values."""
    graph = _captured(backend, device)
    found = explain(graph, live=LIVE, runs=2)
    data = json.loads(json.dumps(found.as_dict()))
    assert len(data["steps"]) == len(graph.steps)
    assert [step["kind"] for step in data["steps"]] == [step.kind.value for step in graph.steps]
    assert sum(step["launches"] for step in data["steps"] if step["kind"] == "segment") == sum(data["kernels"].values())
    events = json.loads(json.dumps(chrome_trace(found)))["traceEvents"]
    bars = [event for event in events if event["ph"] == "X"]
    assert len(bars) == 2 * len(graph.steps)
    assert {event["args"]["step"] for event in bars} == set(range(len(graph.steps)))
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} == {
        "host",
        found.times and found.times.device,
    }
    with pytest.raises(ConfigError, match="without times"):
        chrome_trace(graph.explain())


def _names(text: str) -> str:
    return text.replace("\n", " ")


def test_the_page_needs_nothing_else(backend: str, device: torch.device) -> None:
    """One file: no address of another one, a policy that forbids loading, data that cannot end their element, names escaped."""
    graph = _captured(backend, device)
    found = explain(graph, live=LIVE, runs=2)
    odd = Explanation(
        name='</script><b>"@TITLE@',
        steps=found.steps,
        times=found.times,
        advice=found.advice,
        totals=found.totals,
    )
    page = html_page(odd)
    assert len(page) < 1_000_000
    assert not re.search(r"(src|href)\s*=|@import|url\(|https?://(?!www\.w3\.org/2000/svg)", page)
    assert "default-src 'none'" in page
    assert page.count("</script>") == 2
    assert "<b>" not in page.partition("<body>")[2].partition("<div class")[0]
    assert "&lt;/script&gt;&lt;b&gt;&quot;@TITLE@" in page
    data = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    bars = json.loads(data[1])
    assert {bar["lane"] for bar in bars} == {0, 1}
    assert len(bars) == 2 * len(found.steps)
    assert page.count("<tr data-step=") == len(found.steps)
    unmeasured = html_page(graph.explain())
    assert "Not measured" in unmeasured


def test_the_table_shows_each_step(backend: str, device: torch.device) -> None:
    """On a terminal every step has a row with its name and line, brackets in names are no markup."""
    found = explain(_captured(backend, device), live=LIVE, runs=2)
    console = Console(width=220, file=io.StringIO())
    with console.capture() as captured:
        console.print(ExplanationTable(found))
    text = captured.get()
    for step in found.breaks:
        assert step.name in text
    assert text.count("test_tools_explain.py") >= len(found.steps)
    assert "merge step" in text


def test_a_runners_graph_is_rehearsed(device: torch.device) -> None:
    """A rehearsal replays a published graph with an example; what forward mutates is put back, counters stay."""
    rig = PrefillRig(device, sizes=(4, 8), measure="never")
    rig.capture()
    key = next(iter(rig.runner.graphs))
    before, cache = rig.runner.statistics.replays, rig.model.cache.clone()
    with rig.runner.rehearsal(key) as rehearsal:
        found = explain(rehearsal.graph, replay=rehearsal.replay, runs=2)
    assert found.times is not None
    assert rig.runner.statistics.replays == before
    assert torch.equal(rig.model.cache, cache)
    with pytest.raises(ConfigError, match="there is no graph of"):
        rig.runner.rehearsal("prefill")


def _run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Writes a module for the command line and returns its file."""
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> str:
        (tmp_path / "mine.py").write_text(text)
        return "mine.py"

    return write


GRAPH = """
import torch
from breakgraph import BreakableCUDAGraph, BreakableCUDAGraphCapture, eager_on_graph

@eager_on_graph(live=("n",))
def scale(x, n):
    return x * n

def graph():
    found = BreakableCUDAGraph(name="mine")
    x = torch.ones(4, 4)
    with torch.no_grad(), BreakableCUDAGraphCapture(found, backend="emulated", live={"n": 2}):
        scale(x @ x, 2) + 1
    return found, {"n": 3}

def number():
    return 3

def fails():
    raise KeyError("mine")
"""


def test_the_command_explains_a_graph_of_ones_own(module: Callable[[str], str], tmp_path: Path) -> None:
    """MODULE:FUNCTION: the text, JSON, page and trace of the graph that it returns."""
    target = module(GRAPH) + ":graph"
    status, text, _ = _run("explain", target)
    assert status == 0
    assert text.startswith("mine: 2 segments, 1 break, 2 kernels in segments")
    status, text, said = _run(
        "explain", target, "--measure", "--runs", "2", "--json", "--html", "page.html", "--trace", "trace.json"
    )
    assert status == 0
    assert json.loads(text)["times"]["runs"] == 2
    assert "wrote page.html" in said
    assert "mine.py" in (tmp_path / "page.html").read_text()
    assert len(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) == 2 + 2 * 3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["mine.py:nothing"], "has no attribute 'nothing'"),
        (["mine.py:number"], "returned a int; expected a BreakableCUDAGraph"),
        (["mine.py"], "names no function"),
        (["other.py:graph"], "there is no file other.py"),
        (["no_such_module_here:graph"], "there is no module 'no_such_module_here'"),
        (["mine.py:graph", "--trace", "t.json"], "--trace came without --measure"),
        (["mine.py:graph", "--html", "no/page.html"], "there is no folder no"),
        (["mine.py:graph", "--html", "."], "it is a folder"),
        (["mine.py:graph", "--measure", "--html", "same", "--trace", "same"], "are both same"),
        (["mine.py:graph", "--runs", "0"], "--runs is 0"),
        (["mine.py:graph", "--tokens", "8"], "--tokens came with mine.py:graph"),
        (["--tokens", "0"], "tokens is 0"),
        (["--batch", "2", "--tokens", "4"], "expected one of the two"),
        (["--placement", "inside"], "placement"),
    ],
)
def test_wrong_arguments_end_with_2(module: Callable[[str], str], arguments: list[str], says: str) -> None:
    """What cannot be explained is refused with the reason before anything is loaded."""
    module(GRAPH)
    status, _, said = _run("explain", *arguments)
    assert (status, says in _names(said)) == (2, True), said


def test_an_exception_of_the_users_function_is_shown(module: Callable[[str], str]) -> None:
    """What the named function raises is shown with its traceback and a note, and the status is not that of a finding."""
    module(GRAPH)
    status, _, said = _run("explain", "mine.py:fails")
    assert status == 2
    assert "KeyError: 'mine'" in said
    assert "called without arguments" in said
    assert "in fails" in said
    assert os.path.join("breakgraph", "cli") not in said


def test_notes_say_where_an_exception_came_from(module: Callable[[str], str]) -> None:
    """What the import raises is not said to come from the call; what the call raises is, an error of this package as well."""
    module("raise KeyError('early')\n")
    status, _, said = _run("explain", "mine.py:graph")
    assert (status, "while mine.py was imported" in said, "was called without arguments" in said) == (2, True, False)
    module("from breakgraph import BreakableCUDAGraph\n\ndef graph():\n    BreakableCUDAGraph(name='n').replay()\n")
    status, _, said = _run("explain", "mine.py:graph")
    assert (status, "n was replayed" in said, "was called without arguments" in said) == (2, True, True)


@pytest.mark.demo
def test_the_demos_prefill_agrees_with_its_graph() -> None:
    """SmolLM2: 30 attention breaks, 31 segments, and the kernels that the graph's segments hold."""
    from breakgraph.tools.model_graph import ModelGraph

    captured = ModelGraph(tokens=16).capture()
    found = captured.graph.explain()
    assert (
        (len(found.breaks), len(found.segments))
        == (30, 31)
        == (len(captured.graph.breaks), len(captured.graph.segments))
    )
    assert sum(found.kernels.values()) == sum(segment.size for segment in captured.graph.segments)
    assert {step.name for step in found.breaks} == {"attention"}
    assert len(html_page(found)) < 1_000_000
