"""What a forward does outside of its breaks: each operator with its line, its plain arguments, and tensors from outside.

A segment holds the operators, the plain arguments and the addresses of the step that it was captured from. So where the tapes of
two steps differ, the graph does not do for the second what eager does, and the tape has the line.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable
from itertools import zip_longest
from typing import Any

import attrs
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from breakgraph.backends.emulated_rules import is_composite, tensors_in, written_by
from breakgraph.call_site import user_line
from breakgraph.replay_context import MarkedCall, ReplayContext, current_frame, observed_calls
from breakgraph.structure import flatten, storage_address

__all__ = ["Differs", "Entry", "TapeDifference", "record", "tape_difference"]


@attrs.frozen(eq=False)
class Entry:
    """One operator.

    Attributes:
        section: Breaks before it.
        name: Of the operator.
        line: Of the user's code.
        plain: Its arguments that are no tensors.
        layouts: Shapes, strides and offsets of those that are.
        outside: Tensors that the forward did not make.
        written: Of them, those that it writes.
        draws: What it draws random numbers from: a generator, or "default"; None where it draws none.
        in_break: It belongs to a break, and no graph holds it.
        is_view: It chooses a part of a tensor, and computes nothing.
    """

    section: int
    name: str
    line: str
    plain: tuple[Any, ...]
    layouts: tuple[Any, ...]
    outside: tuple[torch.Tensor, ...]
    written: tuple[torch.Tensor, ...]
    draws: torch.Generator | str | None
    in_break: bool
    is_view: bool


Tape = list[Entry]


def record(run: Callable[[], Any], *, within: Iterable[torch.Tensor] = ()) -> Tape:
    """Run a forward eagerly and note its operators.

    Args:
        run: Runs it in an `eager_step`.
        within: Tensors that belong to every step, such as its static inputs: they are not from outside.

    Returns:
        The operators, those of breaks among them.
    """
    taker = _Taker({storage_address(tensor) for tensor in within})
    with observed_calls(taker.around), taker:
        run()
    return taker.tape


class _Taker(TorchDispatchMode):
    def __init__(self, known: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape: Tape = []
        self._known = known
        self._held: list[torch.Tensor] = []  # so that no other tensor gets the address of one that was made here
        self._section = 0
        self._inside = False

    def around(self, call: MarkedCall, args: tuple[Any, ...], kwargs: dict[str, Any], context: ReplayContext) -> Any:
        """A break: its results are known, and what comes behind it is another section."""
        self._inside = True
        try:
            result = call.call(args, kwargs)
        finally:
            self._inside = False
        self._know(leaf for _, leaf in flatten(result)[0] if isinstance(leaf, torch.Tensor))
        self._section += 1
        return result

    def _know(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            self._held.append(tensor)
            self._known.add(storage_address(tensor))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        frame = current_frame()
        if frame is None:  # copies and clones around the forward
            return func(*args, **kwargs)
        if is_composite(func):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        given = tensors_in((args, kwargs))
        result = func(*args, **kwargs)
        made = tensors_in(result)
        addresses = {storage_address(tensor) for tensor in given}
        fresh = [tensor for tensor in made if storage_address(tensor) not in addresses]
        written = written_by(func, args, kwargs) if func._schema.is_mutable else []
        if made or written:
            self.tape.append(
                Entry(
                    self._section,
                    func.name(),
                    user_line(),
                    _plain((args, kwargs)),
                    tuple(_layout(tensor) for tensor in given),
                    tuple(t for t in given if t.numel() and storage_address(t) not in self._known),
                    tuple(t for t in written if t.numel() and storage_address(t) not in self._known),
                    draws=_source(kwargs) if torch.Tag.nondeterministic_seeded in func.tags else None,
                    in_break=frame.is_in_break,
                    is_view=not fresh and not written,
                )
            )
        if not self._inside:  # what a break makes and does not return is from outside
            self._know(fresh)
        return result


def _source(kwargs: dict[str, Any]) -> torch.Generator | str:
    generator = kwargs.get("generator")
    return generator if isinstance(generator, torch.Generator) else "default"


def _plain(value: Any) -> tuple[Any, ...]:
    """Arguments with every tensor and generator replaced by its kind."""
    if isinstance(value, torch.Tensor):
        return ("tensor",)
    if isinstance(value, torch.Generator):
        return ("generator",)
    if isinstance(value, tuple | list):
        return tuple(_plain(item) for item in value)
    if isinstance(value, dict):
        return tuple((key, _plain(item)) for key, item in value.items())
    return (value,)


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.layout is not torch.strided:
        return (tuple(tensor.shape),)
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset()


class Differs(enum.Enum):
    """Kinds of differences between two tapes."""

    OPERATORS = "operators"
    LAYOUTS = "layouts of tensors"
    PLAIN = "plain arguments"
    TENSORS = "tensors"


@attrs.frozen(eq=False)
class TapeDifference:
    """The first difference between the tapes of two steps.

    Attributes:
        kind: One of `Differs`.
        section: Breaks before it.
        line: Of the user's code, in the later step.
        then: What the earlier step did, in words.
        now: What the later one does.
        values: The plain values then and now; empty where it is no value.
        tensors: The tensors then and now; empty where it is no tensor.
    """

    kind: Differs
    section: int
    line: str
    then: str
    now: str
    values: tuple[Any, ...] = ()
    tensors: tuple[torch.Tensor, ...] = ()


def tape_difference(then: Tape, now: Tape) -> TapeDifference | None:
    """The first operator outside of breaks that two steps do not do alike.

    Args:
        then: Of the step that the graph was captured from.
        now: Of another.
    """
    outside = ([entry for entry in tape if not entry.in_break] for tape in (then, now))
    for one, other in zip_longest(*outside):
        if one is None or other is None or (one.name, one.section) != (other.name, other.section):
            present = other or one
            return TapeDifference(Differs.OPERATORS, present.section, present.line, _called(one), _called(other))
        if one.layouts != other.layouts:
            mine, theirs = next(pair for pair in zip(one.layouts, other.layouts, strict=True) if pair[0] != pair[1])
            return TapeDifference(
                Differs.LAYOUTS, other.section, other.line, f"{one.name} of {_seen(mine)}", f"of {_seen(theirs)}"
            )
        if not _equal(one.plain, other.plain):
            value, twin = _first_pair(one.plain, other.plain)
            return TapeDifference(
                Differs.LAYOUTS if other.is_view else Differs.PLAIN,
                other.section,
                other.line,
                f"{one.name} with {value!r}",
                f"{twin!r}",
                (value, twin),
            )
        pairs = zip_longest(one.outside, other.outside)
        for mine, theirs in pairs:
            if mine is None or theirs is None or storage_address(mine) != storage_address(theirs):
                tensors = tuple(tensor for tensor in (mine, theirs) if tensor is not None)
                return TapeDifference(
                    Differs.TENSORS,
                    other.section,
                    other.line,
                    f"{other.name} reads {_at(mine)}",
                    _at(theirs),
                    (),
                    tensors,
                )
    return None


def _seen(layout: tuple[Any, ...]) -> str:
    return f"shape {layout[0]}" + (f" from element {layout[2]} on" if len(layout) > 1 and layout[2] else "")


def _first_pair(one: Any, other: Any) -> tuple[Any, Any]:
    """The innermost first pair of values that differ."""
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        for mine, theirs in zip(one, other, strict=True):
            if not _equal(mine, theirs):
                return _first_pair(mine, theirs)
    return one, other


def _equal(one: Any, other: Any) -> bool:
    """By value, NaN equal to NaN and 0.0 not to -0.0: a kernel tells these apart."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return (one == other and math.copysign(1, one) == math.copysign(1, other)) or (one != one and other != other)
    return type(one) is type(other) and bool(one == other)


def _called(entry: Entry | None) -> str:
    return "nothing more" if entry is None else f"{entry.name} at {entry.line}"


def _at(tensor: torch.Tensor | None) -> str:
    return "no tensor" if tensor is None else f"a tensor of {tuple(tensor.shape)} at {tensor.data_ptr():#x}"
