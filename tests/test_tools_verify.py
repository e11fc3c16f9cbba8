"""`verify`: planted faults are found, in the right step, with the right cause; what is right is said to be right."""

from __future__ import annotations

import json
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from typer.testing import CliRunner

from breakgraph.cli import app
from breakgraph.errors import ConfigError
from breakgraph.fingerprints import fingerprint
from breakgraph.graph_key import PrefillKey
from breakgraph.replay_program import StepKind
from breakgraph.tools import Cause, Verification, verify, verify_key
from tests import verify_faults
from tests.runner_models import DecodeRig, PrefillModel, PrefillRig
from tests.verify_faults import FAULTS, GPU_FAULTS, ROWS, WIDTH, Planted, fault_line, half


def _verified(planted: Planted, backend: str, device: torch.device) -> Verification:
    def example(number: int) -> dict[str, torch.Tensor]:
        if number:
            planted.change(number)
        generator = torch.Generator().manual_seed(number)
        return {"x": torch.randn(ROWS, WIDTH, generator=generator).to(device)}

    return verify(
        planted.forward,
        example=example,
        live=planted.live,
        valid_rows=planted.valid_rows,
        modules=planted.modules,
        backend=backend,
    )


def _assert_found(planted: Planted, found: Verification) -> None:
    print(found)
    assert found.diagnosis is not None
    assert found.diagnosis.cause is planted.cause
    assert planted.evidence in found.diagnosis.evidence
    step = found.step
    assert step is not None
    if isinstance(planted.step, str):
        assert f"break '{planted.step}'" in found.blamed
    else:
        assert "segment" in found.blamed
        assert sum(kind is not StepKind.SEGMENT for kind in found.kinds[:step]) == planted.step
    if planted.line:
        assert f"{verify_faults.__file__}:{fault_line(planted.line)} " in found.diagnosis.line


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, backend: str, device: torch.device) -> None:
    """Each planted fault: the right cause, the right step, the line, and what is to blame by name."""
    planted = FAULTS[fault](device)
    _assert_found(planted, _verified(planted, backend, device))


@pytest.mark.gpu
@pytest.mark.parametrize("fault", GPU_FAULTS)
def test_a_fault_of_streams_is_found(fault: str) -> None:
    """Work that nobody awaits: bisection over awaited steps names the break that launched it."""
    device = torch.device("cuda")
    planted = GPU_FAULTS[fault](device)
    try:
        found = _verified(planted, "cuda", device)
    finally:
        torch.cuda.synchronize()  # the stray work must not write into memory of the next test
    _assert_found(planted, found)


class Right(nn.Module):
    """Nothing is wrong: declared state, padded rows, a table written before it is read, attributes that stay."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.scale, self.cache = 2.0, torch.zeros(1, device=device)

    def forward(self, x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        """Rows to rows."""
        self.cache.add_(1)
        out = torch.empty_like(x)
        verify_right_break(x * self.scale, out, lengths)
        return half(out + self.cache) + torch.rand(1, device=x.device)


def _attend(q: torch.Tensor, out: torch.Tensor, lengths: list[int]) -> None:
    start = 0
    for length in lengths:
        out[start : start + length] = q[start : start + length].cumsum(0)
        start += length


verify_right_break = verify_faults.eager_on_graph(live=("lengths",), rows=("q", "out"), writes=("out",), name="attend")(
    _attend
)


def test_what_is_right_is_said_to_be_right(backend: str, device: torch.device) -> None:
    """Live data, fewer real rows, declared state and the default generator: every round equals eager."""
    model = Right(device)
    found = verify(
        model,
        example=lambda number: {"x": torch.randn(ROWS, WIDTH).to(device) + number},
        live=lambda number: {"lengths": [[8], [3, 2], [1], [5]][number]},
        valid_rows=lambda number: [None, 5, 1, 5][number],
        state=(model.cache,),
        backend=backend,
    )
    assert found.ok, found
    assert (found.rounds, found.step, found.divergence) == (3, None, None)
    assert str(found) == "Right: 3 replays equal eager, bit for bit"
    assert model.cache.item() == 0


def test_a_report_says_where_why_and_what_to_do() -> None:
    """The text has step, tensor, position, values, cause, line, a cure, and what was ruled out; JSON has them too."""
    found = _verified(FAULTS["frozen_attribute"](torch.device("cpu")), "emulated", torch.device("cpu"))
    text = str(found)
    for part in (
        "argument x of break 'half': 32 of 32 elements differ, the first at [0, 0]: ",
        "likely cause: frozen value at ",
        "aten::mul.Tensor with 2.0 at the capture, with 3.0 now (Scaled.scale)",
        "Put the number into a tensor",
        "ruled out: eager repeats itself",
    ):
        assert part in text
    data = json.loads(json.dumps(found.as_dict()))
    assert (data["ok"], data["step"], data["diagnosis"]["cause"]) == (False, 2, "frozen value")
    assert data["divergence"]["kind"] == "segment"


def test_exceptions_are_the_users() -> None:
    """What forward, example or a break raises comes out as it is, in whichever run."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        verify(forward, example=lambda number: {"x": torch.ones(2)}, backend="emulated")


@pytest.mark.parametrize(
    ("example", "says"),
    [
        (lambda number: {"x": torch.ones(2 + number)}, "round 0 had"),
        (lambda number: {"x": torch.ones(2), **({"y": torch.ones(2)} if number else {})}, "round 0 had"),
    ],
)
def test_examples_of_another_shape_are_refused(example: Callable[[int], dict[str, torch.Tensor]], says: str) -> None:
    """A captured forward has one shape: another one is an error with both."""
    with pytest.raises(ConfigError, match=says):
        verify(lambda x, **_: half(x) + 1, example=example, backend="emulated")


@pytest.mark.parametrize("rounds", [0, -1, True, 2.5])
def test_a_wrong_count_of_rounds_is_refused(rounds: Any) -> None:
    """At least one step is compared."""
    with pytest.raises(ConfigError, match="whole number, 1 or more"):
        verify(half, example=lambda number: {"x": torch.ones(2)}, rounds=rounds)


def test_graphs_of_runners_are_verified(device: torch.device) -> None:
    """A right graph of each runner, full and padded; afterwards state and counters are as before."""
    prefill, decode = PrefillRig(device, sizes=(4, 8), measure="never"), DecodeRig(device)
    prefill.capture()
    decode.capture()
    for rig in (prefill, decode):
        replays = rig.runner.statistics.replays
        for key in rig.runner.graphs:
            found = verify_key(rig.runner, key, rounds=2)
            assert found.ok, found
        assert rig.runner.statistics.replays == replays


def test_a_moved_weight_of_a_runners_graph_is_named(device: torch.device) -> None:
    """verify_key knows where tensors lay at the capture, and claims nothing that it did not try."""
    model = PrefillModel(device)
    rig = PrefillRig(device, sizes=(8,), model=model, verify="never", measure="never")
    rig.capture()
    kept = model.up.data
    model.up.data = kept + 1
    found = verify_key(rig.runner, PrefillKey(8), modules=(model,))
    assert found.diagnosis is not None
    assert found.diagnosis.cause is Cause.MOVED_BUFFER
    assert "up" in found.diagnosis.evidence


NAMES = types.SimpleNamespace(a=torch.ones(2))


class _Odd:
    """State that saves a structure of everything."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def save(self) -> Any:
        """What was there."""
        return list(self.values)

    def restore(self, saved: Any) -> None:
        """Put back."""
        self.values = tuple(saved)


@pytest.mark.parametrize(
    "value",
    [float("nan"), object(), np.arange(3), np.array([np.nan]), {"a": float("nan")}, torch.eye(2).to_sparse(), NAMES],
)
def test_state_of_any_kind_accuses_nobody(value: Any) -> None:
    """Arrays, NaN, sparse tensors and objects without equality in saved state or results make no right forward wrong."""
    state = _Odd(value)

    def forward(x: torch.Tensor) -> Any:
        return half(x + 1) * 2, value

    found = verify(forward, example=lambda n: {"x": torch.randn(4)}, state=(state,), backend="emulated", rounds=1)
    assert found.ok, found


def test_an_exception_of_the_replay_alone_is_a_verdict(backend: str, device: torch.device) -> None:
    """Where only the replay raises, the step is wrong, and nothing that needs a replay is said to be ruled out."""
    rows = [4]

    @verify_faults.eager_on_graph
    def shorter(x: torch.Tensor) -> torch.Tensor:
        return x[: rows[0]] * 1

    def example(number: int) -> dict[str, torch.Tensor]:
        rows[0] = 4 - number
        return {"x": torch.ones(4, device=device)}

    found = verify(lambda x: shorter(x + 1).sum(), example=example, backend=backend)
    assert found.diagnosis is not None
    assert "the replay raised CopyBackError and eager did not" in found.difference
    assert "replays repeat themselves" not in found.diagnosis.tried


class KeepsKeys(nn.Module):
    """A break that appends what a segment made."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: list[torch.Tensor] = []

    @verify_faults.eager_on_graph
    def append(self, k: torch.Tensor) -> torch.Tensor:
        """Keep the tensor itself."""
        self.keys.append(k)
        return torch.stack(self.keys[-2:]).sum(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Project and append."""
        return self.append(x * 2) + 1


def test_a_kept_tensor_of_a_segment_weakens_a_verdict(backend: str, device: torch.device) -> None:
    """A list of keys that are one buffer is said, by name, also where each run by itself equals eager."""
    found = verify(KeepsKeys(), example=lambda n: {"x": torch.randn(4, device=device)}, backend=backend)
    assert "KeepsKeys.keys holds a tensor of (4,) that a segment made" in str(found) or not found.ok


def test_nothing_is_left_behind(device: torch.device, backend: str) -> None:
    """Attributes and generators, the declared ones too, are as before; no observer stays on a graph."""
    generator = torch.Generator(device=device)
    model = Counts()

    @verify_faults.eager_on_graph
    def noise(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(x.shape, generator=generator, device=x.device)

    before = torch.get_rng_state(), generator.get_state(), dict(model.seen), model.steps
    verify(
        lambda x: noise(model(x)) + torch.rand(1, device=x.device),
        example=lambda n: {"x": torch.ones(4, device=device)},
        generators=(generator,),
        modules=(model,),
        backend=backend,
    )
    assert torch.equal(before[0], torch.get_rng_state())
    assert torch.equal(before[1], generator.get_state())
    assert (model.seen, model.steps) == before[2:]


class Counts(nn.Module):
    """Counts its calls in Python, and computes nothing with it."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.seen = 0, {"calls": 0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Count."""
        self.steps += 1
        self.seen["calls"] += 1
        return x * 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"forward": 3}, "forward=...*expected a function"),
        ({"example": 3}, "example=...*expected a function"),
        ({"live": 3}, "live=...*expected a function"),
        ({"example": lambda n: [torch.ones(2)]}, "expected a mapping from names to dense tensors"),
        ({"example": lambda n: {"x": [1, 2]}}, "expected a mapping from names to dense tensors"),
        ({"example": lambda n: {"x": torch.eye(2).to_sparse()}}, "expected a mapping from names to dense tensors"),
        ({"live": lambda n: None}, "expected a mapping from names to values"),
        ({"live": lambda n: {"x": 1}}, "are inputs and live data"),
        ({"state": (3,)}, "expected a sequence of tensors or of objects with save"),
        ({"modules": nn.Linear(2, 2)}, "expected a sequence of torch.nn.Module"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], says: str) -> None:
    """Each argument of another kind is refused by name, with what was expected."""
    given: dict[str, Any] = {
        "forward": half,
        "example": lambda n: {"x": torch.ones(2)},
        "backend": "emulated",
        **options,
    }
    with pytest.raises(ConfigError, match=says):
        verify(given.pop("forward"), **given)


def test_something_else_than_a_runner_is_refused() -> None:
    """verify_key wants a runner."""
    with pytest.raises(ConfigError, match="expected a runner"):
        verify_key(3, PrefillKey(8))  # type: ignore[arg-type]


def test_a_wrong_graph_of_a_runner_is_diagnosed(device: torch.device) -> None:
    """A graph that was published without proof and lacks its break: the line of the loop, and the cause."""
    rig = PrefillRig(
        device,
        sizes=(8,),
        model=PrefillModel(device, breaks=False),
        verify="never",
        expect_breaks=None,
        measure="never",
    )
    rig.capture()
    found = verify_key(rig.runner, PrefillKey(8), modules=(rig.model,))
    assert found.diagnosis is not None
    assert found.diagnosis.cause in (Cause.FROZEN_VALUE, Cause.MISSING_BREAK)
    assert "runner_models.py" in found.diagnosis.line
    assert found.step == 0


def test_a_failed_proof_names_the_step(device: torch.device) -> None:
    """The reason for which a graph is dropped names the first step that differs, the tensor, its place and both values."""
    rig = PrefillRig(device, sizes=(8,), model=_Frozen(device), measure="never")
    rig.capture()
    reason = rig.runner.dropped[PrefillKey(8)]
    assert "the first step that differs is step 0, segment of" in reason
    assert "argument hidden of break 'attend'" in reason


class _Frozen(PrefillModel):
    """A factor that Python holds is baked into the first segment."""

    calls = 0

    def forward(self, x: torch.Tensor, slots: torch.Tensor, meta: Any) -> torch.Tensor:
        """The forward with a number of its own."""
        return super().forward(x * meta.factor, slots, meta)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 40), st.integers(0, 39), st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8])
)
def test_a_fingerprint_sees_every_bit(count: int, place: int, dtype: torch.dtype) -> None:
    """Equal tensors have equal fingerprints; one changed element, or two that change places, another one."""
    tensor = (torch.arange(count) % 100).to(dtype)
    same = fingerprint(tensor.clone())
    assert same is not None
    assert torch.equal(same, fingerprint(tensor) or torch.zeros(()))
    changed = tensor.clone()
    changed[place % count] += 1
    assert not torch.equal(same, fingerprint(changed) or torch.zeros(()))
    if count > 1:
        swapped = tensor.flip(0)
        assert torch.equal(swapped, tensor) or not torch.equal(same, fingerprint(swapped) or torch.zeros(()))


def test_fingerprints_of_large_and_odd_tensors() -> None:
    """Chunks are told apart, views are read as they look, scalars and empty tensors have one, sparse ones none."""
    large = torch.zeros((1 << 23) + 3, dtype=torch.uint8)
    other = large.clone()
    other[-1] = 1
    assert not torch.equal(_print(large), _print(other))
    square = torch.arange(12.0).view(3, 4)
    assert torch.equal(_print(square.t()), _print(square.t().contiguous()))
    assert not torch.equal(_print(square.t()), _print(square))
    assert _print(torch.tensor(1.0)).item() != _print(torch.tensor(2.0)).item()
    assert _print(torch.empty(0)).item() == 0
    assert fingerprint(torch.eye(3).to_sparse()) is None


def _print(tensor: torch.Tensor) -> torch.Tensor:
    found = fingerprint(tensor)
    assert found is not None
    return found


CASES = """
import torch
from breakgraph import eager_on_graph

@eager_on_graph
def half(x):
    return x / 2

class Model(torch.nn.Module):
    factor = 2.0
    def __init__(self):
        super().__init__()
        self.factor = 2.0
    def forward(self, x):
        return half(x * self.factor) + 1

def right():
    return {"forward": Model(), "example": lambda number: {"x": torch.randn(4)}, "backend": "emulated"}

def wrong():
    model = Model()
    def example(number):
        model.factor = number + 1.0
        return {"x": torch.randn(4)}
    return {"forward": model, "example": example, "backend": "emulated"}

def incomplete():
    return {"forward": Model()}

def unknown():
    return {**right(), "speed": 3}
"""


@pytest.mark.parametrize(
    ("name", "status", "says"),
    [
        ("right", 0, "3 replays equal eager, bit for bit"),
        ("wrong", 1, "likely cause: frozen value"),
        ("incomplete", 2, "expected a dict with at least 'forward' and 'example'"),
        ("unknown", 2, "unexpected keyword argument 'speed'"),
    ],
)
def test_the_command_ends_with_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, status: int, says: str
) -> None:
    """0 where all is equal, 1 where a replay differs, 2 where the arguments are wrong."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cases.py").write_text(CASES)
    result = CliRunner().invoke(app, ["verify", f"cases.py:{name}"])
    assert (result.exit_code, says in (result.stdout + result.stderr).replace("\n", " ")) == (status, True), (
        result.output
    )
    if status < 2:
        as_json = CliRunner().invoke(app, ["verify", f"cases.py:{name}", "--json"])
        assert json.loads(as_json.stdout)["ok"] is (status == 0)


@pytest.mark.demo
def test_the_demos_graphs_are_verified() -> None:
    """SmolLM2: replays of its decode, full and padded, equal eager."""
    result = CliRunner().invoke(app, ["verify", "--batch", "2", "--rounds", "2"])
    assert (result.exit_code, "2 replays equal eager" in result.stdout) == (0, True), result.output
