"""One run of a forward under watch: its operators, functions and breaks, and what was seen at which line."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import attrs
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from breakgraph.backends.emulated_rules import tensors_in
from breakgraph.backends.operator_watch import watched_operators
from breakgraph.replay_context import Frame, MarkedCall, Phase, ReplayContext, current_frame, install
from breakgraph.structure import storage_address
from breakgraph.tools.linting.host_data import has_stand_in, listening, plain
from breakgraph.tools.linting.places import Place, place_of, user_frame
from breakgraph.tools.linting.report import Kind, Severity
from breakgraph.tools.linting.source import source_of
from breakgraph.tools.linting.stand_ins import StandIns
from breakgraph.tools.linting.state import MadeTensors

__all__ = ["HostNames", "Sighting", "Watch"]

_aten = torch.ops.aten
_ALLOCATIONS = frozenset(
    getattr(_aten, name + suffix) for name in ("empty", "zeros", "ones", "full") for suffix in ("", "_like")
) | {_aten.new_empty, _aten.new_zeros, _aten.new_ones, _aten.new_full, _aten.empty_strided, _aten.new_empty_strided}
_BRANCHES = frozenset({torch.Tensor.__bool__, torch.is_nonzero, torch.Tensor.is_nonzero})
_DEPENDS_ON_DATA = ("depends on the data", "boolean mask")
_NO_LINE = Place("<built-in>", 0, "forward", "")
"""Of a forward that is an operator itself."""
_VALUES = ("allclose", "equal")
"""Operators that give the host a value; others with results that depend on data give it a shape."""
_NOT_A_READ = ("the collective", "the custom operator")


@attrs.frozen
class Sighting:
    """Something that was seen at a line.

    Attributes:
        kind: What it is.
        place: The line.
        severity: How bad it is.
        what: What was seen, in words.
        own_generator: Random numbers of a generator of the caller's own.
    """

    kind: Kind
    place: Place
    severity: Severity
    what: str
    own_generator: bool = False


@attrs.frozen
class HostNames:
    """Variables of a function that hold host data.

    Attributes:
        given: Those that hold inputs of the forward, or what such an input holds.
        derived: Those that hold what was computed from them.
    """

    given: set[str] = attrs.field(factory=set)
    derived: set[str] = attrs.field(factory=set)

    def add(self, other: HostNames) -> None:
        """Takes the names of another one in as well."""
        self.given.update(other.given)
        self.derived.update(other.derived)


class Watch(Frame):
    """Watches one run of a forward; bodies of breaks are left out.

    Args:
        device: Where the work is.
        stand_ins: What the inputs were replaced with, where they were.

    Attributes:
        sightings: What was seen, and how often.
        made: The tensors that were made.
        host_names: Variables that held host data where it was used, by (path, function).
        is_paused: True inside a break.
    """

    def __init__(self, *, device: torch.device, stand_ins: StandIns | None = None) -> None:
        self.context = ReplayContext(phase=Phase.EAGER)
        self.sightings: Counter[Sighting] = Counter()
        self.made = MadeTensors()
        self.host_names: dict[tuple[str, str], HostNames] = {}
        self.is_paused = False
        self._device = device
        self._stand_ins = stand_ins
        self._outer: Frame | None = None
        self._outermost: FrameType | None = None
        self._is_branching = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watches what the caller of this runs inside a `with` block."""
        self._outermost = sys._getframe(2)  # above this generator and `contextlib`
        self._outer = current_frame()
        if self._outer is not None:
            self._take_context(self._outer.context)
        install(self)
        try:
            with ExitStack() as stack:
                if "torch._dynamo" in sys.modules:  # a compiled function would run as one call that shows nothing
                    stack.enter_context(torch.compiler.set_stance("force_eager"))
                stack.enter_context(listening(self._on_host_data))
                stack.enter_context(_Operators(self))
                stack.enter_context(watched_operators(self._on_refused, device=self._device))
                stack.enter_context(_Functions(self))
                yield
        finally:
            install(self._outer)
            self._outermost = None

    def saw(
        self,
        kind: Kind,
        what: str,
        *,
        severity: Severity = Severity.FAILS,
        place: Place | None = None,
        own: bool = False,
    ) -> None:
        """Notes something, at the line that runs where no other is given; nothing inside a break.

        Args:
            kind: What it is.
            what: In words.
            severity: How bad it is.
            place: The line.
            own: Random numbers of a generator of the caller's own.
        """
        if self.is_paused:
            return
        self.sightings[Sighting(kind, place or self.line(), severity, what, own)] += 1

    def line(self) -> Place:
        """The line of the forward that runs."""
        frame = user_frame(outermost=self._outermost)
        return _NO_LINE if frame is None else place_of(frame)

    def note_host_names(self, frame: FrameType) -> None:
        """Notes which variables of a frame hold host data: a break gets them as live data.

        Args:
            frame: One that uses host data.
        """
        if self._stand_ins is None:
            return
        place = place_of(frame)
        names = self.host_names.setdefault((place.path, place.function), HostNames())
        for name, value in frame.f_locals.items():
            if self._stand_ins.made(value):
                names.given.add(name)
            elif has_stand_in(value):
                names.derived.add(name)

    # What a frame is asked.

    def on_marked_call(self, call: MarkedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A break: runs as ever, with the caller's own inputs, unwatched."""
        if self.is_paused:
            return call.call(args, kwargs)
        if self._stand_ins is not None:
            args, kwargs = self._stand_ins.original(args), self._stand_ins.original(kwargs)
        self.is_paused = True
        try:
            if self._outer is None:
                return call.call(args, kwargs)
            install(self._outer)
            return self._outer.on_marked_call(call, args, kwargs)
        finally:
            install(self)
            self.is_paused = False

    def on_split(self) -> None:
        """`break_graph()`: nothing to see."""

    def _take_context(self, outer: ReplayContext) -> None:
        live = outer.live if self._stand_ins is None else self._stand_ins.of(dict(outer.live))
        self.context = ReplayContext(phase=outer.phase, live=live, padded_rows=outer.padded_rows)
        self.context.valid_rows = outer.valid_rows
        self.context.scratch = outer.scratch
        self.context.token = outer.token

    # What the modes report.

    def _on_refused(self, what: str, _: str) -> None:
        if self._is_branching:
            self.saw(Kind.HOST_BRANCH, "a branch on the value of a tensor")
        elif not what.startswith(_VALUES) and any(part in what for part in _DEPENDS_ON_DATA):
            self.saw(Kind.DATA_DEPENDENT_SHAPE, what.rstrip(","))
        elif what.startswith(_NOT_A_READ):
            self.saw(Kind.HOST_CODE, what.rstrip(","))
        else:
            self.saw(Kind.HOST_SYNC, what.rstrip(",").split(": item()")[0])

    def _on_host_data(self, what: str) -> None:
        frame = None if self.is_paused else user_frame(outermost=self._outermost)
        if frame is None:  # a break, or another thread
            return
        source = source_of(frame.f_code.co_filename, frame.f_globals)
        if source is not None and what.startswith(("a loop", "the length")) and source.only_unpacks(frame.f_lineno):
            return
        self.note_host_names(frame)
        guard = source is not None and source.is_guard(frame.f_lineno)
        severity = Severity.NOTE if guard else Severity.FAILS
        kind = Kind.HOST_DATA if what.endswith("() of") else Kind.HOST_BRANCH
        self.saw(kind, f"{what} host data of the inputs", severity=severity, place=place_of(frame))

    def on_function(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A function of torch is called.

        Args:
            function: The function.
            args: Its arguments.
            kwargs: Its keyword arguments.
        """
        if self._stand_ins is not None and (has_stand_in(args) or has_stand_in(kwargs)):
            name = getattr(function, "__name__", "an operator")
            frame = user_frame(outermost=self._outermost)
            if frame is not None and not self.is_paused:
                self.note_host_names(frame)
            self.saw(Kind.HOST_DATA, f"host data of the inputs in {name.strip('_')}")
            args, kwargs = plain(args), plain(kwargs)
        if function not in _BRANCHES:
            return function(*args, **kwargs)
        self._is_branching = True
        try:
            return function(*args, **kwargs)
        finally:
            self._is_branching = False

    def on_operator(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operator is called.

        Args:
            function: The overload.
            args: Its arguments.
            kwargs: Its keyword arguments.
        """
        if self.is_paused:
            return function(*args, **kwargs)
        inputs = tensors_in((args, kwargs))
        if torch.Tag.nondeterministic_seeded in function.tags:
            result = self._draw(function, args, kwargs, inputs)
        else:
            result = function(*args, **kwargs)
        made = tensors_in(result)
        if made:
            place = self.line()
            fresh = function.overloadpacket in _ALLOCATIONS
            for tensor in made:
                if any(tensor is each for each in inputs):
                    continue
                address = storage_address(tensor)
                view = any(self.made.is_allocated(t) and storage_address(t) == address for t in inputs)
                self.made.add(tensor, place=place, is_allocated=fresh or view)
        return result

    def _draw(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[torch.Tensor]) -> Any:
        own = next((each for each in (*args, *kwargs.values()) if isinstance(each, torch.Generator)), None)
        default = torch.cuda.default_generators[self._device.index or 0] if self._device.type == "cuda" else None
        default = torch.default_generator if default is None else default
        generator = default if own is None else own
        before, before_default = generator.get_state(), default.get_state()
        result = function(*args, **kwargs)
        if torch.equal(before, generator.get_state()):  # a dropout of probability zero carries the tag as well
            return result
        name = function.overloadpacket.__name__
        # An operator receives another object for a generator than its caller passed, so what was drawn from tells.
        if own is None or not torch.equal(before_default, default.get_state()):
            self.saw(Kind.RANDOM, f"{name} draws from the default generator", severity=Severity.NOTE)
        else:
            self.saw(Kind.RANDOM, f"{name} draws from a generator of its own", own=True)
        return result


class _Functions(TorchFunctionMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._watch.on_function(func, args, kwargs or {})


class _Operators(TorchDispatchMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watch = watch

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._watch.on_operator(func, args, kwargs or {})
