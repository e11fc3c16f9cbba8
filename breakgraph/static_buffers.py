"""Declared inputs of a graph: their shapes, types and padding rules.

A graph reads its inputs by address, so a runner owns one buffer per input and copies every step's data into
it. `copy_` broadcasts and casts silently: a (1, 1) position would fill a whole row. Therefore each input is
declared once and held to its declaration at every step, and the whole buffer is written every time, the rows
beyond the real ones by the declared padding rule.
"""

from __future__ import annotations

import enum
import keyword
import math
from collections.abc import Iterable
from typing import Any, Literal

import attrs
import torch

from breakgraph.errors import ConfigError

__all__ = ["MISSING", "REQUESTS", "TOKENS", "Axis", "Extent", "Missing", "Pad", "PadKind", "StaticInput"]


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
