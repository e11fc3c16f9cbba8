"""`lint`: planted faults are found at their lines and nothing else is; decoders; what it leaves behind; its command."""

from __future__ import annotations

import functools
import inspect
import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from typer.testing import CliRunner

from benchmarks.small_transformers import small_model
from breakgraph import eager_on_graph
from breakgraph.capture import BreakableCUDAGraph, BreakableCUDAGraphCapture
from breakgraph.cli import app
from breakgraph.cli.lint import print_report
from breakgraph.errors import CaptureIllegalError, ConfigError
from breakgraph.graph_key import PrefillKey
from breakgraph.models.attention import BatchLayout, Placement
from breakgraph.models.config import DecoderConfig
from breakgraph.models.ops import TorchOps
from breakgraph.models.weights import LoadedModel, random_model
from breakgraph.replay_context import current_frame, eager_step
from breakgraph.serving import LLM
from breakgraph.serving.decode_keys import StepEnd
from breakgraph.serving.prefill_step import prefill_body
from breakgraph.tools import Kind, LintReport, Severity, lint
from tests import lint_faults
from tests.lint_faults import FAULTS, live_length, live_length_in_a_break, x
from tests.tiny_models import FAMILIES, SPARSE_FAMILIES, PagedModel, tiny_config

FILE = Path(lint_faults.__file__)
_PLANTED = re.compile(r"# FAULT: (\w+)")


def _planted(used: Callable[..., Any]) -> set[tuple[str, int]]:
    """The (kind, line) of the comments in what the last line of a factory names, or in a function itself."""
    source = FILE.read_text().splitlines()
    names = re.findall(r"\w+", inspect.getsource(used).splitlines()[-1])
    found: set[tuple[str, int]] = set()
    for thing in (used, *(vars(lint_faults).get(name) for name in names)):
        if getattr(thing, "__module__", None) == lint_faults.__name__ and callable(thing):
            lines, first = inspect.getsourcelines(thing)
            for number in range(first, first + len(lines)):
                match = _PLANTED.search(source[number - 1])
                if match:
                    found.add((match[1], number))
    return found


def _failures(report: LintReport) -> set[tuple[str, int]]:
    assert all(finding.path == str(FILE) for finding in report.failures)
    return {(finding.kind.name, finding.lineno) for finding in report.failures}


def _notes(report: LintReport) -> list[tuple[Kind, str]]:
    return [(finding.kind, finding.what) for finding in report.notes]


# Planted faults.


@pytest.mark.parametrize("name", FAULTS)
def test_each_planted_fault_is_found_at_its_line_and_nothing_else(name: str) -> None:
    """REQ-L1: of each forward the failures are the planted ones, by kind and line, and the mended twin has none."""
    planted, mended = FAULTS[name]
    expected = _planted(planted)
    assert expected
    forward, inputs = planted()
    report = lint(forward, *inputs)
    assert _failures(report) == expected
    assert report.unseen == ()
    forward, inputs = mended()
    assert lint(forward, *inputs).failures == ()


def test_there_are_enough_planted_faults_of_every_kind() -> None:
    """REQ-L1: at least 20 forwards, and every kind of finding that fails."""
    kinds = {kind for planted, _ in FAULTS.values() for kind, _ in _planted(planted)}
    assert len(FAULTS) >= 20
    assert kinds == {kind.name for kind in Kind} - {"AUTOCAST"}


def test_live_data_read_outside_of_a_break_is_found() -> None:
    """Live data of the step around lint counts as host data where code outside of breaks reads it; a break may."""
    with eager_step(live={"length": 2}):
        report = lint(live_length, x())
        assert lint(live_length_in_a_break, x()).findings == ()
    assert _failures(report) == _planted(live_length)


def test_what_is_allowed_is_a_note() -> None:
    """Numbers of the default generator, autocast, a print, a check of host data and a repeated value do not fail."""

    class Allowed(nn.Module):
        def forward(self, h: torch.Tensor, length: int) -> torch.Tensor:
            if length > 8:
                raise ValueError(length)
            self.width = h.shape[1]
            print("running")
            with torch.autocast("cpu", dtype=torch.bfloat16):
                h = h @ h.T
            return torch.nn.functional.dropout(h.float(), 0.0) + torch.rand(4)

    report = lint(Allowed(), x(), 5)
    assert report.failures == ()
    assert _notes(report) == [
        (Kind.HOST_BRANCH, "a comparison (>) with host data of the inputs"),
        (Kind.ATTRIBUTE, "self.width is assigned"),
        (Kind.HOST_CODE, "print()"),
        (Kind.AUTOCAST, "autocast is switched"),
        (Kind.RANDOM, "rand draws from the default generator"),
    ]


def test_the_default_generator_by_name_is_a_note_and_another_one_names_the_option() -> None:
    """A generator that every capture registers is allowed; one of the caller's own must be declared, and the mend says how."""
    named = lint(lambda h: h + torch.rand(3, generator=torch.default_generator), x())
    assert [finding.severity for finding in named.findings] == [Severity.NOTE]
    forward, inputs = FAULTS["own_generator"][0]()
    assert "generators=(generator,)" in lint(forward, *inputs).failures[0].fix


def test_a_finding_is_counted_and_not_repeated() -> None:
    """One finding for a kind and a line, with how often it was seen in one run; findings come by file and line."""

    def forward(h: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            h = h + h.max().item()
        h.tolist()
        return h

    first, second = lint(forward, x()).findings
    assert (first.times, second.times) == (3, 1)
    assert second.lineno == first.lineno + 1


def test_what_only_the_first_call_does_is_said() -> None:
    """A table that is built once fails, and its reason says that a call before the capture may be enough."""
    forward, inputs = FAULTS["workspace"][0]()
    assert "Only the first of two calls" in lint(forward, *inputs).failures[0].why
    forward, inputs = FAULTS["kept"][0]()
    assert "Only the first of two calls" not in lint(forward, *inputs).failures[0].why


def test_the_holder_of_a_kept_tensor_is_named() -> None:
    """The object and the attribute are named, through buffers, lists and dicts."""

    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.zeros(3))
            self.by_name: dict[str, list[torch.Tensor]] = {"a": []}
            self.flat: dict[str, torch.Tensor] = {}

        def forward(self, h: torch.Tensor) -> torch.Tensor:
            self.table = h * 2
            self.by_name["a"].append(h * 3)
            self.flat["b"] = h * 4
            self.flat["c"] = h * 5
            return h

    table, listed, b, c = lint(Keeping(), x()).failures
    assert "is held by Keeping.table after" in table.what
    assert "is held by Keeping.by_name['a'][...] after" in listed.what
    assert "is held by Keeping.flat['b'] after" in b.what
    assert "is held by Keeping.flat['c'] after" in c.what
    assert [f.lineno - table.lineno for f in (listed, b, c)] == [1, 2, 3]


def test_odd_objects_of_the_forward_do_no_harm() -> None:
    """Lists that hold themselves, objects that raise when they are compared or looked at: the forward runs as without lint."""

    class Odd:
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            raise RuntimeError("never compare")

    class Closed:
        def __getattribute__(self, name: str) -> Any:
            raise RuntimeError("never look")

    class Holding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cycle: list[Any] = []
            self.cycle.append(self.cycle)
            self.odd = Odd()

        def forward(self, h: torch.Tensor, rows: int) -> torch.Tensor:
            self.cycle.append(1)
            self.odd = Odd()
            closed.value = 1
            cycle: list[Any] = [rows]
            cycle.append(cycle)
            return h[:rows]

    closed: Any = Closed()
    report = lint(Holding(), x(), 2)
    assert [finding.kind for finding in report.failures] == [Kind.ATTRIBUTE, Kind.ATTRIBUTE, Kind.HOST_DATA]
    assert len(report.unseen) == 1
    assert "never look" in report.unseen[0]


def test_what_an_import_does_is_no_work_of_the_forward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module imported for the first time inside the forward may build its tables, draw and read a clock."""
    (tmp_path / "imported_by_lint.py").write_text(
        "import random, time\nTABLE = {}\ndef fill():\n    global START\n    START = time.time()\n"
        "    TABLE['x'] = random.random()\nfill()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "imported_by_lint", raising=False)

    def forward(h: torch.Tensor) -> torch.Tensor:
        import imported_by_lint  # type: ignore[import-not-found]

        return h * len(imported_by_lint.TABLE)

    assert lint(forward, x()).findings == ()
    assert "imported_by_lint" in sys.modules


def test_a_body_that_nobody_ran_is_said() -> None:
    """A generator function as the forward only makes an object: that its body was not seen stands in the report."""
    report = lint(_generator, x())
    assert report.findings == ()
    assert "returned a generator" in report.unseen[0]


# Decoders.


def _layout() -> BatchLayout:
    tables = [np.array(table, dtype=np.int32) for table in ([5, 6], [7, 8])]
    return BatchLayout(np.array([4, 3], dtype=np.int32), np.array([0, 2], dtype=np.int32), tables)


def _prefill(paged: PagedModel) -> LintReport:
    batch = paged.attention.plan_prefill(_layout())
    slots = [*paged.slots([5, 6], 0, 4), *paged.slots([7, 8], 2, 5), 0, 0]
    inputs = {"ids": [3, 1, 4, 1, 5, 9, 2, 0, 0], "positions": [0, 1, 2, 3, 2, 3, 4, 0, 0], "slots": slots}

    def forward(*, ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, batch: Any) -> torch.Tensor:
        def attend(layer: int, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(q)
            paged.attention.prefill(q, k_cache, v_cache, out, batch)
            return out

        return paged.decoder(paged.decoder.embed(ids), positions=positions, slots=slots, kv=paged.kv, attend=attend)

    with eager_step(live={"batch": batch}, valid_rows=7, padded_rows=9):
        return lint(forward, kwargs={**{name: torch.tensor(value) for name, value in inputs.items()}, "batch": batch})


def _decode(paged: PagedModel) -> LintReport:
    state = paged.attention.decode_state(batch_size=3, max_context=32)
    tables = np.zeros((3, state.max_blocks), dtype=np.int32)
    tables[:2, :2] = [[5, 6], [7, 8]]
    lengths = np.array([5, 6, 1], dtype=np.int32)
    paged.attention.plan_decode(state, block_tables=tables, seq_lens=lengths)

    def forward(
        ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, tables: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        def attend(layer: int, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
            return paged.attention.decode(q, k_cache, v_cache, state, tables, lengths)

        hidden = paged.decoder.embed(ids)
        return paged.decoder.logits(paged.decoder(hidden, positions=positions, slots=slots, kv=paged.kv, attend=attend))

    ids, positions, slots = (torch.tensor(value) for value in ([1, 2, 0], [4, 5, 0], [24, 33, 0]))
    return lint(forward, ids, positions, slots, torch.from_numpy(tables), torch.from_numpy(lengths))


@pytest.mark.parametrize("family", [*FAMILIES, *SPARSE_FAMILIES])
def test_nothing_is_found_in_our_own_decoders(family: str) -> None:
    """REQ-L2: a padded prefill with attention in breaks and a decode step have no finding at all, in every family."""
    paged = PagedModel(random_model(DecoderConfig.from_transformers(tiny_config(family)), dtype=torch.float32))
    for report in (_prefill(paged), _decode(paged)):
        assert (report.findings, report.unseen) == ((), ())


def test_a_fault_inside_of_our_own_decoders_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clean verdict is no blindness: a host read planted in the norm of every layer is found in both forwards."""

    class Faulty(TorchOps):
        def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
            return super().rms_norm(x, weight, eps) * x.max().item()

    model = random_model(DecoderConfig.from_transformers(tiny_config("llama")), dtype=torch.float32)
    monkeypatch.setattr(model.decoder, "ops", Faulty())
    for report in (_prefill(PagedModel(model)), _decode(PagedModel(model))):
        assert [finding.kind for finding in report.failures] == [Kind.HOST_SYNC]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    """A tiny Llama."""
    return random_model(DecoderConfig.from_transformers(tiny_config("llama")), dtype=torch.float32)


@pytest.mark.parametrize("placement", list(Placement))
def test_nothing_is_found_in_the_steps_of_the_engine(model: LoadedModel, placement: Placement) -> None:
    """REQ-L2: the forwards that the serving loop hands to its runners, on their own examples: both placements, all three ends."""
    options: dict[str, Any] = {"max_batch_size": 2, "max_num_tokens": 16, "max_seq_len": 32, "block_size": 4}
    engine = LLM(model, placement=placement, sampling="all", graphs="off", **options).engine
    prefill, decode = engine.prefill, engine.decode
    prefill_key = PrefillKey(16)
    example = prefill._example(prefill_key)
    if prefill._captured is not None:
        prefill._captured.plan(prefill_key, example.live, 16)
    body = prefill_body(prefill._state, layers=prefill._state.cache.layers, placement=placement)
    with eager_step(live=example.live, padded_rows=16):
        # What was planned belongs to the graph, so it is bound and no input.
        assert lint(functools.partial(body, **example.live), kwargs=example.inputs).findings == ()
    keys = [end.key(2, context=32) for end in StepEnd]
    for key in keys if placement is Placement.BREAK else ():
        example = decode._example(key)
        decode._plan(key, example.live, 2)
        inputs = {"last_token": prefill._state.last_token, **example.inputs}
        report = lint(functools.partial(decode._forward, **example.live), kwargs=inputs)
        assert (report.findings, report.unseen) == ((), ()), key


def _source_line(function: Any, text: str) -> int:
    """The line of the first statement in the source of something that contains a text."""
    lines, first = inspect.getsourcelines(function)
    return next(number for number, line in enumerate(lines, start=first) if text in line)


def _of_transformers(model: Any) -> LintReport:
    ids = torch.arange(3, 19)[None]
    inputs = {"input_ids": ids, "position_ids": torch.arange(16)[None], "attention_mask": None, "use_cache": False}
    return lint(model, kwargs=inputs)


def _found(report: LintReport, path: str | None) -> dict[int, set[Kind]]:
    found: dict[int, set[Kind]] = {}
    for finding in report.failures:
        if finding.path == path:
            found.setdefault(finding.lineno, set()).add(finding.kind)
    return found


def test_the_eager_experts_of_a_mixtral_are_named() -> None:
    """REQ-L3: which experts were hit is a shape that depends on data, and the loop over them reads the device."""
    from transformers.models.mixtral import modeling_mixtral

    experts = modeling_mixtral.MixtralExperts
    model = small_model("mixtral", num_hidden_layers=1)
    model.set_experts_implementation("eager")
    report = _of_transformers(model)
    found = _found(report, inspect.getsourcefile(experts))
    assert Kind.DATA_DEPENDENT_SHAPE in found[_source_line(experts, ".nonzero()")]
    assert Kind.HOST_BRANCH in found[_source_line(experts, "if expert_idx == ")]
    assert Kind.DATA_DEPENDENT_SHAPE in found[_source_line(experts, "torch.where(")]
    mark = next(each for each in report.suggestions if each.function == "MixtralExperts.forward")
    assert "modeling_mixtral.MixtralExperts.forward = eager_on_graph(" in mark.text


def test_the_dynamic_rope_of_a_llama_is_named() -> None:
    """REQ-L3: dynamic rope branches on the largest position and keeps the frequencies that it computes."""
    from transformers import modeling_rope_utils

    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    model = small_model("llama", num_hidden_layers=1, max_position_embeddings=8, rope_parameters=rope)
    report = _of_transformers(model)
    update = modeling_rope_utils.dynamic_rope_update
    found = _found(report, inspect.getsourcefile(update))
    text = Path(inspect.getsourcefile(update) or "").read_text().splitlines()
    branches = [text[line - 1].strip() for line, kinds in found.items() if Kind.HOST_BRANCH in kinds]
    assert any(branch.startswith("if seq_len > ") for branch in branches), branches
    kept = [f for f in report.failures if f.kind is Kind.KEPT_TENSOR]
    assert any("RotaryEmbedding.inv_freq" in finding.what for finding in kept), kept


def test_the_host_loop_of_a_jetmoe_is_named() -> None:
    """REQ-L3: the counts of the experts go to the host; the mark belongs on the caller, for they are returned."""
    from transformers.models.jetmoe import modeling_jetmoe

    report = _of_transformers(small_model("jetmoe", num_hidden_layers=1))
    gating = modeling_jetmoe.JetMoeTopKGating
    found = _found(report, inspect.getsourcefile(gating))
    assert found == {_source_line(gating, "expert_size.tolist()"): {Kind.HOST_SYNC}}
    mark = next(each for each in report.suggestions if each.function == "JetMoeTopKGating.forward")
    assert "Mark the function that goes on with it" in mark.text


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_nothing_is_found_in_a_llama_of_transformers(attention: str) -> None:
    """A model of transformers that a whole graph can hold has no failure, with either attention."""
    model = small_model("llama", num_hidden_layers=1)
    model.set_attn_implementation(attention)
    ids, mask = torch.arange(3, 11)[None], torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()
    inputs = {"input_ids": ids, "position_ids": torch.arange(8)[None], "attention_mask": mask, "use_cache": False}
    assert lint(model, kwargs=inputs).failures == ()


def _block() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()


def _convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(),
    ).eval()


@pytest.mark.parametrize(
    ("make", "shape"),
    [(_block, (2, 5, 8)), (_convolutions, (2, 3, 8, 8)), (lambda: nn.GRU(8, 4, batch_first=True), (2, 5, 8))],
    ids=["encoder layer", "convolutions", "gru"],
)
def test_nothing_is_found_in_modules_of_torch(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    """Modules of torch that a graph can hold have no finding."""
    assert lint(make(), torch.randn(shape)).findings == ()


# What to mark.


def test_the_lines_to_mark_reach_to_the_last_use_and_name_what_they_need() -> None:
    """A suggestion has the lines from the read to the last use of its result, the names read before and set for later."""

    def forward(h: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        h = h + bias
        count = int(h.gt(0).sum())
        scale = bias * 2
        out = h.clone()
        out[:count] = scale
        return out.sum() + h.sum()

    (mark,) = lint(forward, x(), torch.ones(3)).suggestions
    first = forward.__code__.co_firstlineno
    assert (mark.first, mark.last) == (first + 2, first + 5)
    assert (mark.reads, mark.assigns) == (("h", "bias"), ("out",))
    assert mark.example == "@eager_on_graph def forward_step(h, bias)"
    assert mark.example in str(mark)
    assert "reads: h, bias; sets for later: out" in str(mark)


def test_state_and_kept_tensors_are_not_to_be_marked() -> None:
    """Moving a counter or a kept tensor into a break helps nobody, so there is no suggestion for them alone."""
    for name in ("attribute", "workspace"):
        forward, inputs = FAULTS[name][0]()
        report = lint(forward, *inputs)
        assert report.failures
        assert report.suggestions == ()


def _attend(h: torch.Tensor, lengths: list[tuple[int, int]]) -> torch.Tensor:
    out = torch.empty_like(h)
    for start, end in lengths:
        out[start:end] = h[start:end].mean(0)
    return out * 2


def test_a_mark_that_was_suggested_gives_the_numbers_of_eager() -> None:
    """Lines moved as suggested, host data named as live: lint is content, and replays follow other lengths."""
    (mark,) = lint(_attend, x(), [(0, 1), (1, 4)]).suggestions
    assert mark.example == '@eager_on_graph(live=("lengths",)) def attend_step(lengths, out, h)'
    assert (mark.reads, mark.assigns, mark.live) == (("lengths", "out", "h"), (), ("lengths",))

    @eager_on_graph(live=("lengths",))
    def attend_step(lengths: list[tuple[int, int]], out: torch.Tensor, h: torch.Tensor) -> None:
        for start, end in lengths:
            out[start:end] = h[start:end].mean(0)

    def mended(h: torch.Tensor, lengths: list[tuple[int, int]]) -> torch.Tensor:
        out = torch.empty_like(h)
        attend_step(lengths, out, h)
        return out * 2

    h, lengths = x(), [(0, 1), (1, 4)]
    assert lint(mended, h, lengths).findings == ()
    graph = BreakableCUDAGraph()
    with torch.no_grad(), BreakableCUDAGraphCapture(graph, live={"lengths": lengths}, backend="emulated"):
        result = mended(h, lengths)
    graph.replay(live={"lengths": [(0, 2), (2, 4)]})
    assert torch.equal(result, _attend(h, [(0, 2), (2, 4)]))


def test_a_function_that_returns_what_depends_on_data_is_not_to_be_marked() -> None:
    """A break must return the same shape each time, so the suggestion points at the caller."""
    forward, inputs = FAULTS["nonzero"][0]()
    (mark,) = lint(forward, *inputs).suggestions
    assert "Mark the function that goes on with it" in mark.text
    assert "@eager_on_graph" not in mark.text


def _one_line(h: torch.Tensor, n: int) -> torch.Tensor: return h if n > 2 else -h  # fmt: skip


def _generator(h: torch.Tensor) -> Iterator[torch.Tensor]:
    scale = h.max().item()
    yield h * scale


@pytest.mark.parametrize(
    ("forward", "inputs", "said"),
    [
        (_one_line, (3,), "reads: h, n; sets for later: nothing"),
        (lambda h: list(_generator(h)), (), "a generator cannot be marked"),
    ],
    ids=["a function of one line", "a generator"],
)
def test_functions_of_any_form_get_a_suggestion(forward: Any, inputs: tuple[Any, ...], said: str) -> None:
    """A body on the line of its `def` and a generator are no trouble."""
    (mark,) = lint(forward, x(), *inputs).suggestions
    assert said in mark.text


# What the forward and its caller see.


def _everything() -> tuple[Any, ...]:
    return (
        sys.gettrace(),
        _get_current_function_mode_stack(),
        _get_current_dispatch_mode_stack(),
        current_frame(),
        torch.is_grad_enabled(),
        torch.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state()[1].tolist(),
    )


@pytest.fixture
def tracer() -> Iterator[Callable[..., Any]]:
    """A trace function that was there before, as a debugger's."""

    def trace(frame: FrameType, event: str, argument: Any) -> None:
        return None

    before = sys.gettrace()
    sys.settrace(trace)
    yield trace
    sys.settrace(before)


def _state_of(module: nn.Module) -> dict[str, Any]:
    buffers = {name: (id(buffer), buffer.tolist()) for name, buffer in module.named_buffers()}
    return {**buffers, **{name: repr(value) for name, value in vars(module).items() if name[0] != "_"}}


@pytest.mark.parametrize("raises", [False, True])
def test_everything_is_as_it_was(tracer: Callable[..., Any], raises: bool) -> None:
    """Trace function, modes, frame, generators, inputs, buffers, attributes and lists are as before, also after an exception."""

    class Mutating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))
            self.calls, self.seen, self.table = 0, [1], {"a": 1}

        def forward(self, h: torch.Tensor, lengths: list[int]) -> torch.Tensor:
            self.count += 1
            self.calls += 1
            self.seen.append(self.calls)
            self.table["b"] = h
            self.fresh = h.mul_(2)
            self.register_buffer("late", h * 2)
            lengths.append(3)
            torch.rand(1), random.random(), np.random.rand()
            if raises:
                raise KeyError("mine")
            return h

    module, h, lengths = Mutating(), x(), [1, 2]
    before, state, values = _everything(), _state_of(module), h.tolist()
    if raises:
        with pytest.raises(KeyError, match="mine") as error:
            lint(module, h, lengths)
        assert any("lint" in note for note in error.value.__notes__)
    else:
        assert lint(module, h, lengths).failures
    assert _everything() == before
    assert sys.gettrace() is tracer
    assert (_state_of(module), h.tolist(), lengths) == (state, values, [1, 2])


def test_inputs_of_any_layout_can_be_put_back() -> None:
    """Expanded, transposed, sparse, inference and gradient inputs: the forward runs, and what it wrote is as it was."""
    with torch.inference_mode():
        made_there = torch.ones(3)
    written, expanded = torch.zeros(3, 4).T, torch.ones(1, 3).expand(4, 3)
    inputs = (expanded, written, torch.eye(3).to_sparse(), made_there, torch.ones(3, requires_grad=True))

    def forward(*tensors: torch.Tensor) -> torch.Tensor:
        tensors[1].add_(1)
        return tensors[0] + tensors[1] + tensors[3] * tensors[4]

    assert lint(forward, *inputs).findings == ()
    assert written.sum() == 0
    assert inputs[4].is_leaf


def test_a_forward_that_refuses_stand_ins_is_judged_by_its_source() -> None:
    """Code that looks at types runs with the plain numbers: its own branches are found, and the report says what was not seen."""

    def forward(h: torch.Tensor, length: int, scale: torch.Tensor) -> torch.Tensor:
        if type(length) is not int:
            raise TypeError("an int, please")
        for _ in range(length):
            h = h + 1
        return h * scale

    report = lint(forward, x(), 2, torch.ones(()))
    first = forward.__code__.co_firstlineno
    assert [(f.severity, f.lineno - first) for f in report.findings] == [(Severity.NOTE, 1), (Severity.FAILS, 3)]
    assert len(report.unseen) == 1
    assert "an int, please" in report.unseen[0]


def test_code_without_source_is_run_and_named() -> None:
    """What its operators do is found, at the line of the code; that its statements could not be read is said."""
    namespace: dict[str, Any] = {}
    exec("def forward(h):\n    seen.append(1)\n    return h.tolist()\nseen = []", namespace)
    report = lint(namespace["forward"], x())
    assert [(f.kind, f.path, f.lineno) for f in report.findings] == [(Kind.HOST_SYNC, "<string>", 3)]
    assert report.unseen == ("forward in <string>: no source",)


def test_breaks_receive_what_the_caller_gave() -> None:
    """Inside a break the inputs are the caller's own objects and plain numbers, whatever stands for them outside."""
    received: list[Any] = []

    @eager_on_graph
    def look(metadata: Any, numbers: Any, length: Any) -> None:
        received.append((metadata, type(numbers), type(numbers[0]), type(length)))

    def forward(h: torch.Tensor, metadata: Any, numbers: list[int]) -> torch.Tensor:
        look(metadata, numbers, numbers[0])
        return h

    metadata = lint_faults.Metadata((1, 2), 2)
    assert lint(forward, x(), metadata, [4, 5]).findings == ()
    assert len(received) == 3
    assert all(each[0] is metadata and each[1:] == (list, int, int) for each in received)


def test_wrong_arguments_are_refused_in_three_parts() -> None:
    """What cannot be called, keyword inputs that are no mapping, and a call inside a capture are named."""
    with pytest.raises(ConfigError, match=r"lint\(\) got a int; expected a callable"):
        lint(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"lint\(kwargs=...\) is a list"):
        lint(lambda: 0, kwargs=[1])  # type: ignore[arg-type]
    with (
        torch.no_grad(),
        pytest.raises(CaptureIllegalError, match="inside a segment"),
        BreakableCUDAGraphCapture(BreakableCUDAGraph(), backend="emulated"),
    ):
        lint(lambda: 0)


# The command.


CASES = """
import torch

def forward(x, n):
    y = x * 2
    y = y[y > 0]
    return y.sum() + torch.rand(())

def failing():
    return forward, (torch.ones(3), True)

def by_name():
    return torch.nn.Linear(3, 3), {"input": torch.ones(2, 3)}

def raising():
    return (lambda x: x / []), (torch.ones(3),)

def wrong():
    return forward, torch.ones(3)
"""


@pytest.fixture
def cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module with functions to name, in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = tmp_path / "lint_cases.py"
    path.write_text(CASES)
    return path


def _run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["lint", *arguments])


def test_the_command_prints_lines_and_fails(cases: Path) -> None:
    """Findings are lines of file:line on stdout, what to mark and the counts go to stderr, and the status is 1."""
    result = _run("lint_cases.py:failing")
    assert result.exit_code == 1
    shape, random_numbers = result.stdout.splitlines()
    assert shape == "lint_cases.py:6: fails: data-dependent shape: indexing with a boolean mask in forward"
    assert random_numbers.startswith("lint_cases.py:7: note: random numbers: rand draws from the default generator")
    assert result.stderr.splitlines()[-1] == "1 failure, 1 note on cpu."
    assert "@eager_on_graph" in result.stderr


def test_the_command_prints_json(cases: Path) -> None:
    """--json is one object with every field of the findings, and the same status."""
    result = _run("lint_cases.py:failing", "--json")
    assert result.exit_code == 1
    said = json.loads(result.stdout)
    assert (said["device"], said["failures"], said["unseen"]) == ("cpu", 1, [])
    first = said["findings"][0]
    assert (first["kind"], first["severity"], first["lineno"]) == ("data-dependent shape", "fails", 6)
    assert (first["path"], first["function"], first["module"]) == (str(cases), "forward", "lint_cases")
    assert first["why"]
    assert first["fix"]
    assert said["suggestions"][0]["reads"] == ["y"]


def test_the_command_is_silent_where_nothing_is_found(cases: Path) -> None:
    """A clean forward, with keyword inputs: status 0 and nothing on stdout."""
    result = _run("lint_cases.py:by_name")
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == "Nothing found in this forward on cpu.\n"


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("lint_cases.py:wrong", "returned a tuple of (function, Tensor); expected (forward, inputs)"),
        ("lint_cases.py:missing", "has no attribute 'missing'"),
        ("lint_cases", "names no function"),
        ("no_such_file.py:f", "there is no file no_such_file.py"),
    ],
)
def test_bad_targets_are_refused_in_three_lines(cases: Path, target: str, said: str) -> None:
    """Status 2, three lines on stderr, nothing on stdout."""
    result = _run(target)
    assert (result.exit_code, result.stdout) == (2, "")
    assert len(result.stderr.strip().splitlines()) == 3
    assert said in result.stderr


def test_an_exception_of_the_forward_is_shown(cases: Path) -> None:
    """The command shows it with its traceback and a note; the status is not that of a finding."""
    result = _run("lint_cases.py:raising")
    assert result.exit_code == 2
    assert "TypeError: unsupported operand" in result.stderr
    assert "raised in the forward" in result.stderr


def test_a_terminal_gets_a_table(
    cases: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table has a row for each finding, and what to mark below it."""
    monkeypatch.setenv("COLUMNS", "160")
    namespace: dict[str, Any] = {}
    exec(compile(CASES, str(cases), "exec"), namespace)
    forward, inputs = namespace["failing"]()
    print_report(lint(forward, *inputs))
    said = capsys.readouterr().out
    assert re.search(r"lint_cases.py:6 +fails +data-dependent shape +indexing with a boolean mask", said)
    assert said.rstrip().endswith("1 failure, 1 note on cpu.")


def test_the_report_reads_as_text(cases: Path) -> None:
    """str() has each finding with its line, the reason of a kind once, the marks, and the counts at the end."""
    forward, inputs = FAULTS["numpy_random"][0]()
    text = str(lint(forward, *inputs))
    assert text.count(f"{FILE}:") >= 2
    assert text.count("A replay runs no Python, so it uses the numbers of the capture for ever.") == 1
    assert text.splitlines()[-1] == "2 failures, 0 notes on cpu."


def test_the_example_of_the_docs_says_what_stands_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of docs/tools.md under Lint, run by the command below it, gives the lines below that."""
    page = (Path(__file__).parent.parent / "docs" / "tools.md").read_text()
    section = re.search(r"^## Lint\n(.*?)(?=^## |\Z)", page, flags=re.DOTALL | re.MULTILINE)
    assert section is not None
    (code,) = re.findall(r"```python\n# attention.py\n(.*?)```", section[1], flags=re.DOTALL)
    (shown,) = re.findall(r"```\n\$ breakgraph lint (.*?)```", section[1], flags=re.DOTALL)
    (tmp_path / "attention.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    target, _, said = shown.partition("\n")
    result = _run(target)
    assert result.exit_code == 1
    assert result.stdout + result.stderr.replace(f"{tmp_path}/", "") == said
    exec(compile(code, "docs/tools.md", "exec"), {"__name__": "__main__"})


@pytest.mark.gpu
def test_on_a_gpu_torch_is_asked_which_operators_wait() -> None:
    """A fault is found on the device, the debug mode is as before, and the report says where the work was."""
    mode = torch.cuda.get_sync_debug_mode()
    report = lint(lambda h: h[h > 0].sum() + h.sum().item(), torch.ones(4, 3, device="cuda"))
    assert report.device == "cuda"
    assert {finding.kind for finding in report.failures} == {Kind.HOST_SYNC, Kind.DATA_DEPENDENT_SHAPE}
    assert lint(lambda h: h * 2, torch.ones(4, 3, device="cuda")).findings == ()
    assert torch.cuda.get_sync_debug_mode() == mode
