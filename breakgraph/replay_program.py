"""The steps of a sealed graph: bound launches and bound break calls, run in order at every replay."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch

from breakgraph.backends import Segment
from breakgraph.bound_call import BoundCall, RowViews
from breakgraph.break_function import BreakSpec, live_value
from breakgraph.copy_back import OutputContract
from breakgraph.errors import add_note
from breakgraph.replay_context import ReplayContext

__all__ = ["BreakCall", "Modes", "Step", "StepKind"]

_DEVICE_TYPES = ("cpu", "cuda")


@attrs.frozen
class Modes:
    """Grad, inference and autocast modes: those of the capture are in force at every replay.

    A copy into an inference tensor fails outside inference mode, and with grad on each copy-back would lengthen the
    autograd graph.
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[bool, torch.dtype], ...]
    casts: bool = attrs.field(init=False, eq=False)
    """Any autocast is on."""

    @casts.default
    def _casts(self) -> bool:
        return any(enabled for enabled, _ in self.autocast)

    @classmethod
    def current(cls) -> Modes:
        """The modes of this thread now."""
        # in_force() below asks the same questions without making an object.
        return cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _DEVICE_TYPES),
        )

    def in_force(self) -> bool:
        """True where the thread is in these modes already. Cost: a microsecond."""
        return torch.is_grad_enabled() is self.grad and self.in_force_but_for_grad()

    def in_force_but_for_grad(self) -> bool:
        """True where only the grad mode may differ, which is cheap to set."""
        if torch.is_inference_mode_enabled() is not self.inference:
            return False
        if not self.casts:
            return not (torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"))
        for device_type, (enabled, dtype) in zip(_DEVICE_TYPES, self.autocast, strict=True):
            if torch.is_autocast_enabled(device_type) is not enabled:
                return False
            if enabled and torch.get_autocast_dtype(device_type) is not dtype:
                return False
        return True

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Enter them, and put the thread's own back."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(mode=self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for device_type, (enabled, dtype) in zip(_DEVICE_TYPES, self.autocast, strict=True):
                if enabled != torch.is_autocast_enabled(device_type) or enabled:
                    # The cache of cast weights is off: an entry made in one replay must not outlive it.
                    stack.enter_context(torch.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=False))
            yield


class BreakCall:
    """One call of a break function, bound to the arguments of the capture.

    Args:
        spec: Options of the marked function.
        bound: The captured arguments; a segment's temporaries are borrowed.
        contract: What it must return.
        context: The graph's context, filled anew for every replay.
        where: Name and step, for messages.
        modes: Modes in force when it was captured, where they differ from those of the capture; else None.
        join: Joins the side streams that it used at capture, run after it at every replay; None where it used none.
    """

    __slots__ = (
        "_row_names",
        "_views",
        "_writes",
        "bound",
        "context",
        "contract",
        "join",
        "modes",
        "rows",
        "spec",
        "where",
    )

    def __init__(
        self,
        spec: BreakSpec,
        *,
        bound: BoundCall,
        contract: OutputContract,
        context: ReplayContext,
        where: str,
        modes: Modes | None,
        join: Callable[[], None] | None = None,
    ) -> None:
        self.spec = spec
        self.bound = bound
        self.contract = contract
        self.context = context
        self.where = where
        self.modes = modes
        self.join = join
        row_arguments = spec.row_arguments(bound)
        self._row_names = tuple(row_arguments)
        self._views = RowViews(tuple(row_arguments.values()))
        self._writes = RowViews(tuple(row_arguments[name] for name in spec.writes if name in row_arguments))
        lengths = {tensor.shape[axis] for tensor, axis in row_arguments.values()} | contract.row_lengths
        self.rows: int | None = max(lengths, default=None)

    def bound_run(self) -> Callable[[], None]:
        """What a replay calls: `run`, or for the plainest of breaks a function that has nothing to look up."""
        spec, bound = self.spec, self.bound
        if (
            spec.live
            or self.rows is not None
            or self.modes
            or self.join
            or bound.kwargs
            or not self.contract.returns_none
        ):
            return self.run
        function, args, contract, where = spec.function, tuple(bound.args), self.contract, self.where

        def run() -> None:
            try:
                result = function(*args)
            except BaseException as error:
                add_note(error, f"raised at replay in {where}")
                raise
            if result is not None:
                contract.copy_back(result, rows=None)

        return run

    def run(self) -> None:
        """Call the function with this replay's live data and rows, and copy its result back.

        Raises:
            CopyBackError: It returned something else than at capture.
            BaseException: Whatever the function raised, unchanged, with a note that names the break.
        """
        if self.modes is None:
            self._run()
            return
        with self.modes.entered():
            self._run()

    def arguments(self) -> BoundCall:
        """What the function receives in the step that is running: its live data, views of its real rows."""
        return self._of_this_step(self._valid())

    def _valid(self) -> int | None:
        valid = self.context.valid_rows
        return None if valid is not None and (self.rows is None or valid >= self.rows) else valid

    def _of_this_step(self, valid: int | None) -> BoundCall:
        bound = self.bound.copy()
        for parameter, name in self.spec.live.items():
            bound[parameter] = live_value(self.context.live, name, where=self.where)
        if valid is not None:
            for parameter, view in zip(self._row_names, self._views.heads(valid), strict=True):
                bound[parameter] = view
        return bound

    def _run(self) -> None:
        valid = self._valid()
        bound = self.bound
        if self.spec.live or valid is not None:
            bound = self._of_this_step(valid)
        try:
            result = self.spec.function(*bound.args, **bound.kwargs)
        except BaseException as error:
            add_note(error, f"raised at replay in {self.where}")
            raise
        if self.join is not None:
            self.join()
        if valid is not None:
            self._writes.zero_tails(valid)
        self.contract.copy_back(result, rows=valid)


class StepKind(enum.Enum):
    """What a step of a graph does."""

    SEGMENT = "segment"
    BREAK = "break"
    HOISTED = "hoisted break"


@attrs.frozen(eq=False)
class Step:
    """One step of a sealed graph, as `explain()` shows it.

    Attributes:
        kind: Segment, break or hoisted break.
        name: Name of the break, or what the segment holds.
        line: Where the capture met it.
        bind: Makes the bound launch or bound call.
        order: Its place in the capture; at a replay hoisted breaks come first.
        why: Of a segment, why it ends where it does.
        segment: The segment, for a segment step.
        call: The break call, for a break step.
    """

    kind: StepKind
    name: str
    line: str
    bind: Callable[[], Callable[[], Any]]
    order: int = 0
    why: str = ""
    segment: Segment | None = None
    call: BreakCall | None = None
