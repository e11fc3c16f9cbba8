"""Declared inputs of a graph: their shapes, types and padding rules, and the strict check before a copy-in.

A graph reads its inputs by address, so a runner owns one buffer per input and copies every step's data into
it. `copy_` broadcasts and casts silently: a (1, 1) position would fill a whole row. Therefore each input is
declared once and held to its declaration at every step, and the whole buffer is written every time, the rows
beyond the real ones by the declared padding rule.
"""

from __future__ import annotations

import enum
import keyword
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import attrs
import torch

from breakgraph.errors import ConfigError, StaticInputError

__all__ = ["MISSING", "REQUESTS", "TOKENS", "Axis", "Extent", "InputSet", "Missing", "Pad", "PadKind", "StaticInput"]


class Missing(enum.Enum):
    """The type of `MISSING`: no default was declared."""

    MISSING = "missing"


MISSING = Missing.MISSING


@attrs.frozen
class Extent:
    """The sizes that symbolic axes stand for in one step.

    Attributes:
        tokens: Token rows.
        requests: Requests.
    """

    tokens: int
    requests: int


@attrs.frozen
class Axis:
    """An axis whose length is known only at a step: `TOKENS`, `REQUESTS`, or one of them plus a constant.

    Attributes:
        of: Which size it follows.
        offset: What is added to it, for example 1 for the boundaries of ragged rows.
    """

    of: Literal["TOKENS", "REQUESTS"]
    offset: int = 0

    def __add__(self, more: int) -> Axis:
        return Axis(self.of, self.offset + more)

    def __str__(self) -> str:
        return self.of if not self.offset else f"{self.of} + {self.offset}"

    def length(self, extent: Extent) -> int:
        """Compute the length of this axis.

        Args:
            extent: Sizes of the step.

        Returns:
            The length.
        """
        return (extent.tokens if self.of == "TOKENS" else extent.requests) + self.offset


TOKENS = Axis("TOKENS")
"""The token axis. In decode: all tokens of the batch."""
REQUESTS = Axis("REQUESTS")
"""The request axis. In prefill the padded length is the runner's `max_requests`."""


class PadKind(enum.Enum):
    """How rows beyond the real ones are filled."""

    VALUE = "value"
    REPEAT_LAST = "repeat-last"
    KEEP_OUT = "keep-out"


@attrs.frozen
class Pad:
    """A padding rule. Make one with `Pad.zero()`, `Pad.value(v)`, `Pad.repeat_last()` or `Pad.keep_out(i)`.

    Attributes:
        kind: How rows are filled.
        fill: The value, or the null index of keep-out.
    """

    kind: PadKind
    fill: float | int | bool = 0

    @classmethod
    def zero(cls) -> Pad:
        """Fill with zeros."""
        return cls(PadKind.VALUE, 0)

    @classmethod
    def value(cls, value: float | int | bool) -> Pad:
        """Fill with a value; it must be representable in the input's dtype."""
        return cls(PadKind.VALUE, value)

    @classmethod
    def repeat_last(cls) -> Pad:
        """Repeat the last real row, for example in the boundaries of ragged rows. No real row: zeros."""
        return cls(PadKind.REPEAT_LAST, 0)

    @classmethod
    def keep_out(cls, null_index: int) -> Pad:
        """Fill with an index that belongs to no live request, so that padding rows touch nobody's data."""
        return cls(PadKind.KEEP_OUT, null_index)


def _shape(lengths: Any) -> Any:
    return tuple(lengths) if isinstance(lengths, Iterable) and not isinstance(lengths, str) else lengths


@attrs.frozen(eq=False)
class StaticInput:
    """The declaration of one input of a graph.

    Attributes:
        name: Keyword under which `forward` receives it.
        shape: Lengths, at most one of them an `Axis`, at any position. Optional with `source="device"`.
        dtype: Type; nothing is ever cast. Ignored with `source="device"`.
        pad: How rows beyond the real ones are filled.
        default: Scalar that fills the whole buffer in a step that omits the input; MISSING: omitting is an error.
        source: "host": given at every step, as a tensor on the host or on the runner's device, and copied in.
            "device": the steps themselves write it on the device; handed to `forward` as it is, never copied.
        buffer: The caller's tensor, with `source="device"` only.

    Raises:
        ConfigError: The declaration contradicts itself.
    """

    name: str
    shape: tuple[int | Axis, ...] = attrs.field(default=(), kw_only=True, converter=_shape)
    dtype: torch.dtype = attrs.field(default=torch.int64, kw_only=True)
    pad: Pad = attrs.field(factory=Pad.zero, kw_only=True)
    default: float | int | bool | Missing = attrs.field(default=MISSING, kw_only=True)
    source: Literal["host", "device"] = attrs.field(default="host", kw_only=True)
    buffer: torch.Tensor | None = attrs.field(default=None, kw_only=True)

    def __attrs_post_init__(self) -> None:
        if problem := self._problem():
            raise ConfigError(
                f"StaticInput {self.name!r}: {problem}.",
                why="A graph reads this input by address, so its shape, type and padding are fixed beforehand.",
                fix="Correct the declaration.",
            )

    def _problem(self) -> str | None:
        given: Any = self  # callers without a type checker give anything
        name, shape, dtype, pad, source = given.name, given.shape, given.dtype, given.pad, given.source
        if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
            return "the name is not an identifier, so forward cannot have a parameter of that name"
        if not isinstance(shape, tuple):
            return f"shape is {shape!r}; expected a tuple of lengths"
        if odd := [length for length in shape if type(length) is not int and not isinstance(length, Axis)]:
            return f"shape has lengths {odd}; expected integers, TOKENS or REQUESTS"
        if not isinstance(dtype, torch.dtype):
            return f"dtype is {dtype!r}; expected a torch.dtype"
        if source not in ("host", "device"):
            return f"source is {source!r}; expected 'host' or 'device'"
        if source == "device":
            return self._device_problem()
        if self.buffer is not None:
            return "a buffer was given; only source='device' takes one"
        if sum(isinstance(length, Axis) for length in self.shape) > 1:
            return f"shape {self.shape_text} has more than one symbolic axis"
        if any((length if isinstance(length, int) else length.offset) < 0 for length in self.shape):
            return f"shape {self.shape_text} has a negative length or offset"
        if not isinstance(pad, Pad):
            return f"pad is {pad!r}; expected a padding rule such as Pad.zero()"
        for what, value in (("padding value", self.pad.fill), ("default", self.default)):
            if not isinstance(value, Missing) and not _fits(value, self.dtype):
                return f"the {what} {value!r} is not representable in {self.dtype}"
        return None

    def _device_problem(self) -> str | None:
        if self.buffer is None:
            return "source='device' needs buffer=, the tensor that the steps write"
        if not isinstance(self.buffer, torch.Tensor) or self.buffer.layout is not torch.strided:
            return f"buffer is a {type(self.buffer).__name__}; expected a dense tensor"
        if self.default is not MISSING:
            return "source='device' takes no default: nothing is ever copied into it"
        if self.shape and tuple(self.buffer.shape) != self.shape:
            return f"buffer has shape {tuple(self.buffer.shape)}; declared {self.shape_text}"
        return None

    @property
    def shape_text(self) -> str:
        """The shape as it was declared, for messages."""
        return f"({', '.join(str(length) for length in self.shape)}{',' if len(self.shape) == 1 else ''})"

    @property
    def axis(self) -> int | None:
        """Position of the symbolic axis, None when every length is fixed."""
        return next((i for i, length in enumerate(self.shape) if isinstance(length, Axis)), None)

    def resolve(self, extent: Extent) -> tuple[int, ...]:
        """Compute the shape for the sizes of a step.

        Args:
            extent: Sizes of the step.

        Returns:
            The shape.
        """
        return tuple([length if isinstance(length, int) else length.length(extent) for length in self.shape])


def _fits(value: Any, dtype: torch.dtype) -> bool:
    if dtype.is_complex:
        return isinstance(value, (bool, int, float, complex))
    if not isinstance(value, (bool, int, float)):
        return False
    if dtype is torch.bool:
        return value in (0, 1)
    if dtype.is_floating_point:
        return not math.isfinite(value) or abs(value) <= torch.finfo(dtype).max
    if isinstance(value, float) and not value.is_integer():
        return False
    limits = torch.iinfo(dtype)
    return limits.min <= value <= limits.max


class InputSet:
    """All declared inputs of a runner and the strict check of what a step gives.

    Args:
        inputs: The declarations; names must be unique.
        device: Device of the runner, with an index on CUDA.

    Raises:
        ConfigError: Two inputs share a name, or a device buffer lies elsewhere.
    """

    def __init__(self, inputs: Iterable[StaticInput], *, device: torch.device) -> None:
        self.all = tuple(inputs)
        self.device = device
        self.copied = tuple(declared for declared in self.all if declared.source == "host")
        self.device_fed = {d.name: d.buffer for d in self.all if d.buffer is not None}
        axes = [(d, d.axis, d.shape[d.axis]) for d in self.copied if d.axis is not None]
        self._by_request = tuple(
            (d, position, axis) for d, position, axis in axes if isinstance(axis, Axis) and axis.of == "REQUESTS"
        )
        self.has_requests = bool(self._by_request)
        names = [declared.name for declared in self.all]
        if len(set(names)) != len(names):
            raise ConfigError(
                f"static inputs {names} are not unique.",
                why="forward receives them by keyword.",
                fix="Give each input its own name.",
            )
        odd = {name: buffer.device for name, buffer in self.device_fed.items() if buffer.device != device}
        if odd:
            raise ConfigError(
                f"buffers of device-fed inputs are on {odd}; the runner is on {device}.",
                why="The graph reads and writes them by address.",
                fix="Allocate them on the runner's device.",
            )

    def requests(self, inputs: Mapping[str, torch.Tensor], *, most: int, where: str) -> int:
        """Read the real number of requests off the first given input that has a REQUESTS axis.

        Args:
            inputs: What the step gives.
            most: The runner's `max_requests`.
            where: Name of the step, for the message.

        Returns:
            The number of requests; `most` when no given input has that axis.

        Raises:
            StaticInputError: More requests than `most`, or less than none.
        """
        self._check_kind(inputs, where)
        for declared, position, axis in self._by_request:
            tensor = inputs.get(declared.name)
            if not isinstance(tensor, torch.Tensor) or tensor.dim() <= position:
                continue  # check() says what is wrong with it
            found = tensor.shape[position] - axis.offset
            if 0 <= found <= most:
                return found
            raise StaticInputError(
                f"input {declared.name!r} of {where} has shape {tuple(tensor.shape)}, that is {found} requests; "
                f"expected {declared.shape_text} with 0 to {most} requests.",
                why="Its static buffer has room for max_requests.",
                fix="Raise max_requests, or put fewer requests into a step.",
            )
        return most

    def check(self, inputs: Mapping[str, torch.Tensor], extent: Extent, *, where: str) -> None:
        """Hold what a step gives to the declarations. Changes nothing.

        Args:
            inputs: What the step gives: tensors on the host or on the runner's device.
            extent: Real sizes of the step.
            where: Name of the step, for messages.

        Raises:
            StaticInputError: An input is missing and has no default, is unknown, is not a tensor, or has
                another shape, dtype or device. Costs about 0.6 us per input.
        """
        self._check_kind(inputs, where)
        found = 0
        for declared in self.copied:
            tensor = inputs.get(declared.name)
            if tensor is None:
                if declared.default is MISSING or declared.name in inputs:
                    self._refuse_absent(declared, inputs, where)
                continue
            found += 1
            if not (
                isinstance(tensor, torch.Tensor)
                and tensor.shape == declared.resolve(extent)
                and tensor.dtype is declared.dtype
                and tensor.layout is torch.strided
                and (tensor.is_cpu or tensor.device == self.device)
            ):
                self._refuse(declared, tensor, extent, where)
        if found != len(inputs):
            self._refuse_unknown(inputs, where)

    def ready(self, inputs: Mapping[str, torch.Tensor], extent: Extent) -> dict[str, torch.Tensor]:
        """Make the arguments of an unpadded eager run: own copies of host tensors, defaults filled in.

        Host tensors are copied, since the caller may refill them before the step is launched.

        Args:
            inputs: Checked inputs of the step.
            extent: Real sizes of the step.

        Returns:
            One tensor on the runner's device for each declared input.
        """
        return {**dict(self._ready(inputs, extent)), **self.device_fed}

    def _ready(self, inputs: Mapping[str, torch.Tensor], extent: Extent) -> Iterator[tuple[str, torch.Tensor]]:
        for declared in self.copied:
            tensor = inputs.get(declared.name)
            if tensor is None:
                fill = declared.default
                assert not isinstance(fill, Missing)  # check() refused it
                tensor = torch.full(declared.resolve(extent), fill, dtype=declared.dtype, device=self.device)
            elif tensor.is_cpu:
                tensor = tensor.to(self.device, copy=True)
            yield declared.name, tensor

    def _check_kind(self, inputs: Any, where: str) -> None:
        if type(inputs) is dict or isinstance(inputs, Mapping):  # the first is ten times as fast
            return
        raise StaticInputError(
            f"the inputs of {where} are a {type(inputs).__name__}; expected a mapping of names to tensors.",
            why="Each declared input has a static buffer of its own.",
            fix=f"Pass one tensor for each of {[declared.name for declared in self.copied]}.",
        )

    def _refuse_absent(self, declared: StaticInput, inputs: Mapping[str, torch.Tensor], where: str) -> None:
        given = "is None" if declared.name in inputs else f"is missing; given: {sorted(inputs, key=str)}"
        raise StaticInputError(
            f"input {declared.name!r} of {where} {given}.",
            why="Its static buffer would keep the values of an earlier step.",
            fix="Give it, or omit it where its declaration has a default.",
        )

    def _refuse_unknown(self, inputs: Mapping[str, torch.Tensor], where: str) -> None:
        known = [declared.name for declared in self.copied]
        unknown = [name for name in inputs if name not in known]
        fed = [name for name in unknown if name in self.device_fed]
        raise StaticInputError(
            f"{where} got inputs {unknown}; declared are {known}.",
            why="The graph would not see them." if not fed else f"{fed} are device-fed: the steps write them.",
            fix="Declare a StaticInput for each, or pass what only breaks need through live=.",
        )

    def _refuse(self, declared: StaticInput, tensor: object, extent: Extent, where: str) -> None:
        expected = f"shape {declared.resolve(extent)}, {declared.dtype}, on {self.device} or the host"
        got = type(tensor).__name__
        if isinstance(tensor, torch.Tensor):
            dense = "" if tensor.layout is torch.strided else f"{tensor.layout}, "
            got = f"shape {tuple(tensor.shape)}, {dense}{tensor.dtype}, on {tensor.device}"
        raise StaticInputError(
            f"input {declared.name!r} of {where} has {got}; expected {expected} (declared {declared.shape_text}).",
            why="copy_ would broadcast or cast it into the static buffer, silently.",
            fix="Give exactly the declared shape for the real size of this step, in the declared dtype.",
        )
