"""Declared inputs: declarations, the strict check, and the copy-in that writes whole buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from breakgraph.errors import ConfigError, ReplayError, StaticInputError
from breakgraph.input_set import InputSet
from breakgraph.staging import InputStage, Layout
from breakgraph.static_buffers import REQUESTS, TOKENS, Axis, Extent, Pad, StaticInput

CPU = torch.device("cpu")
JUNK = -12345


def staged(
    inputs: list[StaticInput],
    given_inputs: dict[str, torch.Tensor],
    *,
    real: Extent,
    padded: Extent,
    device: torch.device = CPU,
    dummy: dict[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """Copy a step in over junk and return the static buffers."""
    declared = InputSet(inputs, device=torch.empty(0, device=device).device)
    stage = InputStage(declared)
    layout = Layout(declared, padded)
    stage.reserve([layout])
    buffers = stage.buffers(layout)
    for buffer in buffers.values():
        buffer.fill_(1 if buffer.dtype is torch.bool else 77)
    declared.check(given_inputs, real, where="a step")
    stage.commit(stage.stage(given_inputs, layout, dummy=dummy))
    return buffers


# Declarations.


def test_axes_resolve() -> None:
    """TOKENS and REQUESTS stand for the step's sizes, at any position, and take a constant on top."""
    extent = Extent(tokens=7, requests=3)
    assert StaticInput("x", shape=(3, TOKENS)).resolve(extent) == (3, 7)
    assert StaticInput("x", shape=(REQUESTS + 1, 5)).resolve(extent) == (4, 5)
    assert StaticInput("x", shape=(2, 5)).resolve(extent) == (2, 5)
    assert str(REQUESTS + 1) == "REQUESTS + 1"
    assert Axis("REQUESTS", 1) == REQUESTS + 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shape": (TOKENS, REQUESTS)}, "more than one symbolic axis"),
        ({"shape": (TOKENS, -1)}, "negative length"),
        ({"shape": (TOKENS,), "dtype": torch.int32, "pad": Pad.value(2**40)}, "not representable"),
        ({"shape": (TOKENS,), "dtype": torch.int64, "pad": Pad.value(0.5)}, "not representable"),
        ({"shape": (TOKENS,), "dtype": torch.int32, "default": float("nan")}, "default nan is not representable"),
        ({"shape": (TOKENS,), "source": "disk"}, "source is 'disk'"),
        ({"shape": (TOKENS,), "buffer": torch.zeros(3)}, "only source='device'"),
        ({"source": "device"}, "needs buffer="),
        ({"source": "device", "buffer": torch.zeros(3), "default": 0}, "takes no default"),
        ({"source": "device", "buffer": torch.zeros(3), "shape": (4,)}, r"buffer has shape \(3,\)"),
        ({"source": "device", "buffer": 5}, "buffer is a int; expected a dense tensor"),
        ({"source": "device", "buffer": torch.eye(2).to_sparse()}, "expected a dense tensor"),
        ({"shape": 5}, "shape is 5; expected a tuple"),
        ({"shape": "TOKENS"}, "shape is 'TOKENS'; expected a tuple"),
        ({"shape": ("x",)}, r"shape has lengths \['x'\]"),
        ({"shape": (2.5, True)}, r"shape has lengths \[2.5, True\]"),
        ({"shape": (TOKENS + -1,)}, "negative length or offset"),
        ({"shape": (TOKENS,), "pad": 5}, "pad is 5; expected a padding rule"),
        ({"shape": (TOKENS,), "pad": Pad.value("x")}, "padding value 'x' is not representable"),  # type: ignore[arg-type]
        ({"shape": (TOKENS,), "pad": Pad.keep_out(0.5)}, "padding value 0.5 is not representable"),  # type: ignore[arg-type]
        ({"shape": (TOKENS,), "dtype": "int"}, "dtype is 'int'; expected a torch.dtype"),
        ({"shape": (TOKENS,), "dtype": torch.int8, "default": 1j}, "default 1j is not representable"),
        ({"shape": (TOKENS,), "dtype": torch.int8, "default": 128}, "default 128 is not representable"),
        ({"shape": (TOKENS,), "dtype": torch.float16, "pad": Pad.value(1e6)}, "1000000.0 is not representable"),
    ],
)
def test_contradicting_declarations_are_refused(options: dict[str, Any], message: str) -> None:
    """A declaration that cannot work is a ConfigError naming the input and the problem, when it is made."""
    with pytest.raises(ConfigError, match=message):
        StaticInput("x", **options)


def test_names_are_identifiers_and_unique() -> None:
    """Forward gets inputs by keyword, so a name must be an identifier and belong to one input."""
    for name in ("input ids", "class", "", 5):
        with pytest.raises(ConfigError, match="not an identifier"):
            StaticInput(name, shape=(TOKENS,))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="not unique"):
        InputSet([StaticInput("x", shape=(TOKENS,)), StaticInput("x", shape=(TOKENS,))], device=CPU)


def test_values_that_every_float_has_are_accepted() -> None:
    """Infinities, NaN and values that are merely rounded fit every floating type; whole floats fit integers."""
    for value in (float("inf"), float("nan"), 0.1, 65504):
        StaticInput("x", shape=(TOKENS,), dtype=torch.float16, pad=Pad.value(value))
    StaticInput("x", shape=(TOKENS,), dtype=torch.complex64, default=1j)  # type: ignore[arg-type]
    StaticInput("x", shape=[TOKENS, 2], dtype=torch.int8, pad=Pad.value(127.0))  # type: ignore[arg-type]


def test_device_buffer_must_be_on_the_device() -> None:
    """A device-fed buffer elsewhere is refused at construction, not at the first capture."""
    elsewhere = torch.zeros(3, device="meta")
    with pytest.raises(ConfigError, match="meta"):
        InputSet([StaticInput("table", source="device", buffer=elsewhere)], device=CPU)


# The strict check.

DECLARED = [
    StaticInput("ids", shape=(TOKENS,)),
    StaticInput("positions", shape=(1, TOKENS)),
    StaticInput("scale", shape=(TOKENS,), dtype=torch.float32, default=1.0),
    StaticInput("table", source="device", buffer=torch.zeros(4)),
]
SEVEN = Extent(tokens=7, requests=1)
GOOD = {"ids": torch.zeros(7, dtype=torch.int64), "positions": torch.zeros(1, 7, dtype=torch.int64)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": torch.zeros(1, 1, dtype=torch.int64)}, r"'positions'.*shape \(1, 1\).*\(1, 7\)"),
        ({"ids": torch.zeros(6, dtype=torch.int64)}, r"'ids'.*shape \(6,\).*\(7,\)"),
        ({"ids": torch.zeros(8, dtype=torch.int64)}, r"'ids'.*shape \(8,\).*\(7,\)"),
        ({"ids": torch.zeros(7, 1, dtype=torch.int64)}, r"'ids'.*shape \(7, 1\)"),
        ({"ids": torch.zeros(7, dtype=torch.int32)}, "torch.int32.*torch.int64"),
        ({"ids": torch.zeros(7, dtype=torch.int64, device="meta")}, "on meta"),
        ({"ids": [0] * 7}, "is a list"),
        ({"ids": None}, "'ids'.*is None"),
        ({"scale": None}, "'scale'.*is None"),
        ({"extra": torch.zeros(7)}, r"got inputs \['extra'\]"),
        ({"table": torch.zeros(4)}, "device-fed"),
        ({"ids": torch.zeros(7, dtype=torch.int64).to_sparse()}, "'ids'.*torch.sparse_coo"),
        ({7: torch.zeros(7)}, r"got inputs \[7\]"),
    ],
)
def test_an_input_that_differs_is_refused(change: dict[str, Any], message: str) -> None:
    """REQ-E1, REQ-E2, REQ-H7, FAULT-P5: broadcastable, longer, shorter, cast, misplaced, None, unknown: each named."""
    with pytest.raises(StaticInputError, match=message):
        InputSet(DECLARED, device=CPU).check({**GOOD, **change}, SEVEN, where="a step")


@pytest.mark.parametrize("inputs", [None, 5, [torch.zeros(7)]])
def test_inputs_are_a_mapping(inputs: Any) -> None:
    """REQ-E1: a step that gives no mapping of inputs is told what is expected, with all three parts."""
    declared = InputSet([*DECLARED, StaticInput("starts", shape=(REQUESTS,))], device=CPU)
    for call in (
        lambda: declared.check(inputs, SEVEN, where="a step"),
        lambda: declared.requests(inputs, most=2, where="a step"),
    ):
        with pytest.raises(StaticInputError, match="inputs of a step are a .*; expected a mapping") as caught:
            call()
        assert caught.value.why
        assert "'ids'" in caught.value.fix


def test_a_source_with_a_negative_bit_is_copied_by_value() -> None:
    """REQ-E2: a lazily negated view, which numpy cannot see through, arrives with its values."""
    source = torch.complex(torch.ones(3), torch.full((3,), 2.0)).conj().imag
    assert source.is_neg()
    declared = [StaticInput("x", shape=(TOKENS,), dtype=torch.float32)]
    buffers = staged(declared, {"x": source}, real=Extent(3, 1), padded=Extent(4, 1))
    assert buffers["x"].tolist() == [-2.0, -2.0, -2.0, 0.0]


def test_a_missing_input_is_an_error_unless_it_has_a_default() -> None:
    """REQ-E3, FAULT-P6: without a default an omitted input is an error that names it; with one it is accepted."""
    inputs = InputSet(DECLARED, device=CPU)
    inputs.check(GOOD, SEVEN, where="a step")
    with pytest.raises(StaticInputError, match="'positions' of a step is missing"):
        inputs.check({"ids": GOOD["ids"]}, SEVEN, where="a step")


def test_the_number_of_requests_is_read_off_the_inputs() -> None:
    """In prefill the real number of requests comes from the first input with that axis, and may not exceed the most."""
    inputs = InputSet([StaticInput("starts", shape=(REQUESTS + 1,), dtype=torch.int32)], device=CPU)
    starts = torch.zeros(4, dtype=torch.int32)
    assert inputs.requests({"starts": starts}, most=8, where="a step") == 3
    assert inputs.requests({}, most=8, where="a step") == 8
    with pytest.raises(StaticInputError, match="3 requests; expected"):
        inputs.requests({"starts": starts}, most=2, where="a step")


# The copy-in.


@pytest.mark.parametrize("width", [1, 40_000], ids=["small", "large"])
@pytest.mark.parametrize("where", ["host", "on the device"])
@pytest.mark.parametrize(
    ("pad", "tail"), [(Pad.zero(), 0), (Pad.value(5), 5), (Pad.keep_out(9), 9), (Pad.repeat_last(), 2)]
)
def test_the_whole_buffer_is_written(device: torch.device, pad: Pad, tail: int, width: int, where: str) -> None:
    """REQ-C8, FAULT-P3, FAULT-P4: real rows are copied, every other row holds the padding rule, and no junk is left."""
    rows = torch.arange(3, dtype=torch.int64).repeat_interleave(width).view(3, width)
    source = rows if where == "host" else rows.to(device)
    declared = StaticInput("x", shape=(TOKENS, width), pad=pad)
    buffer = staged([declared], {"x": source}, real=Extent(3, 1), padded=Extent(8, 1), device=device)["x"]
    assert torch.equal(buffer[:3].cpu(), rows)
    assert bool((buffer[3:] == tail).all())


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.int32, torch.float16, torch.bfloat16, torch.float64])
def test_every_dtype_is_copied_bit_for_bit(device: torch.device, dtype: torch.dtype) -> None:
    """Inputs of any dtype keep their bits, whichever copy is used for it."""
    source = (torch.arange(5) % 2).to(dtype)
    declared = StaticInput("x", shape=(TOKENS,), dtype=dtype)
    buffer = staged([declared], {"x": source}, real=Extent(5, 1), padded=Extent(9, 1), device=device)["x"]
    assert buffer.dtype is dtype
    assert torch.equal(buffer[:5].cpu(), source)
    assert not bool(buffer[5:].any())


def test_a_symbolic_axis_in_any_position(device: torch.device) -> None:
    """Positions of shape (3, TOKENS) are padded along their second axis, and the buffer is dense for every bucket."""
    source = torch.arange(6).view(3, 2)
    declared = StaticInput("positions", shape=(3, TOKENS), pad=Pad.repeat_last())
    buffer = staged([declared], {"positions": source}, real=Extent(2, 1), padded=Extent(4, 1), device=device)[
        "positions"
    ]
    assert buffer.is_contiguous()
    assert buffer.cpu().tolist() == [[0, 1, 1, 1], [2, 3, 3, 3], [4, 5, 5, 5]]


def test_an_omitted_input_is_its_default_in_full(device: torch.device) -> None:
    """REQ-E3, FAULT-P6: the whole buffer holds the default, padding included, and nothing of the step before."""
    declared = StaticInput("scale", shape=(TOKENS,), dtype=torch.float32, pad=Pad.zero(), default=2.5)
    buffer = staged([declared], {}, real=Extent(3, 1), padded=Extent(8, 1), device=device)["scale"]
    assert bool((buffer == 2.5).all())


def test_no_real_row_and_repeat_last_gives_zeros() -> None:
    """Repeating the last row of an empty step fills with zeros instead of reading past the source."""
    declared = StaticInput("x", shape=(REQUESTS,), pad=Pad.repeat_last())
    empty = torch.empty(0, dtype=torch.int64)
    buffer = staged([declared], {"x": empty}, real=Extent(0, 0), padded=Extent(4, 4))["x"]
    assert buffer.tolist() == [0, 0, 0, 0]


def test_inputs_that_need_grad_or_are_inference_tensors_are_copied() -> None:
    """Only values are copied: neither autograd history nor inference mode gets into the static buffers."""
    declared = StaticInput("x", shape=(TOKENS,), dtype=torch.float32)
    needs_grad = torch.ones(2, requires_grad=True)
    buffer = staged([declared], {"x": needs_grad}, real=Extent(2, 1), padded=Extent(2, 1))["x"]
    assert not buffer.requires_grad
    with torch.inference_mode():
        inference = torch.ones(2)
        buffer = staged([declared], {"x": inference}, real=Extent(2, 1), padded=Extent(2, 1))["x"]
    assert not buffer.is_inference()
    assert buffer.tolist() == [1.0, 1.0]


def test_mixed_sources_keep_their_own_values(device: torch.device) -> None:
    """One packed copy spans all host inputs; a device tensor that lies between them is not overwritten by it."""
    declared = [StaticInput(name, shape=(TOKENS,)) for name in ("first", "middle", "last")]
    given_inputs = {
        "first": torch.tensor([1, 1]),
        "middle": torch.tensor([2, 2], device=device),
        "last": torch.tensor([3, 3]),
    }
    buffers = staged(declared, given_inputs, real=Extent(2, 1), padded=Extent(4, 1), device=device)
    assert {name: buffer.tolist() for name, buffer in buffers.items()} == {
        "first": [1, 1, 0, 0],
        "middle": [2, 2, 0, 0],
        "last": [3, 3, 0, 0],
    }


def test_integers_are_packed_together_before_floats() -> None:
    """Index arrays of a step are neighbours in the arena, so they reach the device as one copy."""
    declared = InputSet(
        [
            StaticInput("hidden", shape=(TOKENS, 64), dtype=torch.float32),
            StaticInput("ids", shape=(TOKENS,), dtype=torch.int32),
            StaticInput("slots", shape=(TOKENS,), dtype=torch.int64),
        ],
        device=CPU,
    )
    layout = Layout(declared, Extent(8, 1))
    assert [field.declared.name for field in layout.fields] == ["ids", "slots", "hidden"]
    assert [field.start for field in layout.fields] == [0, 256, 512]


@given(data=st.data(), tokens_per_dummy=st.integers(1, 3), real=st.integers(0, 3), padded=st.integers(4, 6))
def test_dummy_rows_fill_the_tail(data: st.DataObject, tokens_per_dummy: int, real: int, padded: int) -> None:
    """REQ-C2: a padding request's rows are repeated over the rows beyond the real requests, on either axis."""
    values = [data.draw(st.integers(0, 99)) for _ in range(tokens_per_dummy)]
    declared = [StaticInput("x", shape=(2, TOKENS), dtype=torch.int32), StaticInput("row", shape=(REQUESTS,))]
    each = tokens_per_dummy
    given_inputs = {
        "x": torch.full((2, real * each), JUNK, dtype=torch.int32),
        "row": torch.full((real,), JUNK),
    }
    dummy = {"x": torch.tensor([values, values], dtype=torch.int32), "row": torch.tensor([7])}
    buffers = staged(
        declared, given_inputs, real=Extent(real * each, real), padded=Extent(padded * each, padded), dummy=dummy
    )
    assert buffers["x"].tolist() == [[JUNK] * real * each + values * (padded - real)] * 2
    assert buffers["row"].tolist() == [JUNK] * real + [7] * (padded - real)


# Two slots.


def test_two_steps_may_wait_and_a_third_takes_the_first_slot() -> None:
    """REQ-E8: the host can stage one step ahead; a step whose slot was taken again is refused, never wrong."""
    declared = InputSet([StaticInput("x", shape=(TOKENS,))], device=CPU)
    stage, layout = InputStage(declared), Layout(declared, Extent(1, 1))
    stage.reserve([layout])
    first, second = (stage.stage({"x": torch.tensor([value])}, layout) for value in (1, 2))
    stage.commit(first)
    assert stage.buffers(layout)["x"].tolist() == [1]
    stage.commit(second)
    assert stage.buffers(layout)["x"].tolist() == [2]
    third = stage.stage({"x": torch.tensor([3])}, layout)
    with pytest.raises(ReplayError, match="two later steps"):
        stage.commit(first)
    stage.commit(third)
    assert stage.buffers(layout)["x"].tolist() == [3]


def test_host_sources_may_be_refilled_after_staging(device: torch.device) -> None:
    """REQ-E8, FAULT-O7: what the caller writes into its own tensor after staging does not reach the step."""
    declared = InputSet([StaticInput("x", shape=(TOKENS,))], device=torch.empty(0, device=device).device)
    stage, layout = InputStage(declared), Layout(declared, Extent(4, 1))
    stage.reserve([layout])
    source = torch.arange(4)
    waiting = stage.stage({"x": source}, layout)
    source.fill_(JUNK)
    stage.commit(waiting)
    assert stage.buffers(layout)["x"].tolist() == [0, 1, 2, 3]


@pytest.mark.gpu
def test_a_slot_waits_for_its_copy() -> None:
    """REQ-E8, FAULT-O7: with a busy device, staging blocks until a slot's copy is done: a thousand steps stay right."""
    device = torch.device("cuda", torch.cuda.current_device())
    declared = InputSet([StaticInput("x", shape=(TOKENS,))], device=device)
    stage, layout = InputStage(declared), Layout(declared, Extent(1024, 1))
    stage.reserve([layout])
    sums = torch.zeros(1000, dtype=torch.int64, device=device)
    for step in range(1000):
        source = torch.full((1024,), step).pin_memory()
        waiting = stage.stage({"x": source}, layout)
        source.fill_(JUNK)
        if step % 50 == 0:
            torch.cuda._sleep(2_000_000)
        stage.commit(waiting)
        sums[step] = stage.buffers(layout)["x"].sum()
    assert torch.equal(sums.cpu(), torch.arange(1000) * 1024)


@pytest.mark.gpu
def test_another_stream_waits_for_the_last_one() -> None:
    """REQ-E8, FAULT-O7: a copy-in from another stream waits for the work that still reads the static buffers."""
    device = torch.device("cuda", torch.cuda.current_device())
    declared = InputSet([StaticInput("x", shape=(TOKENS,))], device=device)
    stage, layout = InputStage(declared), Layout(declared, Extent(4, 1))
    stage.reserve([layout])
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    seen = torch.empty(40, dtype=torch.int64, device=device)
    torch.cuda.synchronize()
    for step in range(40):
        with torch.cuda.stream(streams[step % 2]):
            stage.commit(stage.stage({"x": torch.full((4,), step)}, layout))
            torch.cuda._sleep(500_000)
            seen[step] = stage.buffers(layout)["x"].sum()
    torch.cuda.synchronize()
    assert seen.tolist() == [4 * step for step in range(40)]
