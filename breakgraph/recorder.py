"""The capture state machine: what a marked function and a split do while a graph is being captured."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from breakgraph.bound_call import BoundCall
from breakgraph.break_function import BreakSpec
from breakgraph.call_site import user_line
from breakgraph.copy_back import learn
from breakgraph.errors import CaptureError, CaptureIllegalError, InternalError, LiveDataError, add_note
from breakgraph.graph_pool import GraphPool
from breakgraph.replay_context import Frame, MarkedCall, Phase, ReplayContext
from breakgraph.replay_program import BreakCall, Modes, Step, StepKind
from breakgraph.structure import flatten, is_changeable_object, map_leaves, same_containers, snapshot, storage_address

__all__ = ["Recorder", "State"]


class State(enum.Enum):
    """States of a capture: idle -> segment -> break -> segment ... -> sealed, or -> failed."""

    IDLE = "idle"
    SEGMENT = "segment"
    BREAK = "break"
    SEALED = "sealed"
    FAILED = "failed"


_MOVES = {
    State.IDLE: {State.SEGMENT, State.FAILED},
    State.SEGMENT: {State.BREAK, State.SEALED, State.FAILED},
    State.BREAK: {State.SEGMENT, State.FAILED},
    State.SEALED: set(),
    State.FAILED: {State.FAILED},
}


class Recorder(Frame):
    """Records one graph.

    Args:
        graph_name: For messages.
        pool: Where segments and bridges go.
        live: Live data of the capture by name.
        padded_rows: Captured length of the token axis, where the caller knows it; else learnt from the first break.
        barrier: Called before each break.
    """

    def __init__(
        self,
        graph_name: str,
        *,
        pool: GraphPool,
        live: Mapping[str, Any],
        padded_rows: int | None,
        barrier: Callable[[], None] | None,
    ) -> None:
        self.context = ReplayContext(phase=Phase.CAPTURE, live=dict(live), padded_rows=padded_rows)
        self.replay_context = ReplayContext(phase=Phase.REPLAY, padded_rows=padded_rows)
        self.modes = Modes.current()
        self.state = State.IDLE
        self.steps: list[Step] = []
        self._graph_name = graph_name
        self._pool = pool
        self._barrier = barrier
        self._segment_line = ""
        self._hoisted: list[tuple[int, int]] = []
        self._held: list[tuple[torch.Tensor, _Layout, str]] = []

    @property
    def is_in_segment(self) -> bool:
        """True while device work is being recorded."""
        return self.state is State.SEGMENT

    # The moves.

    def begin_segment(self, *, line: str | None = None) -> None:
        """Idle or break -> segment.

        Args:
            line: The user's line, where the caller knows it already.
        """
        self._move(State.SEGMENT)
        self._segment_line = line or user_line()
        _forget_casts()
        self._pool.backend.begin()

    def seal(self) -> None:
        """Segment -> sealed: the last segment ends."""
        if self.state is State.FAILED:
            raise CaptureError(
                f"A break of {self._graph_name} raised during the capture, and the exception was swallowed.",
                why="The steps after it were not recorded, so a replay would skip them.",
                fix="Let exceptions of marked functions reach the end of the capture.",
            )
        self._end_segment("the capture ends")
        self._refuse_reshaped()
        self._move(State.SEALED)
        self._held.clear()

    def fail(self) -> bool:
        """Any state -> failed: nothing recorded is kept.

        Returns:
            True where the driver had invalidated the capture.
        """
        try:
            return self._pool.backend.abort()
        finally:
            self.state = State.FAILED
            for step in self.steps:
                if step.segment is not None:
                    step.segment.reset()
            self.steps.clear()
            self._held.clear()
            # After a failure memory is to be where it was; after a reset the pool keeps it for the next capture.
            self._pool.backend.release()

    def _move(self, to: State) -> None:
        if to not in _MOVES[self.state]:
            raise InternalError(f"{self._graph_name}: a capture went from {self.state.value} to {to.value}.")
        self.state = to

    def _end_segment(self, why: str) -> None:
        segment = self._pool.backend.end()
        if segment is not None:
            self.steps.append(
                Step(
                    StepKind.SEGMENT,
                    segment.describe(),
                    line=self._segment_line,
                    bind=segment.bound,
                    order=len(self.steps),
                    why=why,
                    segment=segment,
                )
            )

    # What the model's code reaches.

    def on_split(self) -> None:
        """`break_graph()`: end the segment here and begin another."""
        if self.state is State.SEGMENT:
            line = user_line()
            self._end_segment(f"break_graph() at {line}")
            self._move(State.BREAK)
            self.begin_segment(line=line)

    def on_marked_call(self, call: MarkedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A marked function: end the segment, run the function for real, freeze what it takes and returns."""
        if self.state is State.BREAK:
            return call.call(args, kwargs)  # a marked function inside a running break is part of that break
        if not isinstance(call, BreakSpec):
            raise InternalError(f"{type(call).__name__} reached a recorder.")
        if self.state is not State.SEGMENT:
            raise CaptureError(
                f"break '{call.name}' was called after an earlier break of {self._graph_name} had raised.",
                why="The capture has already failed, so nothing more can be recorded.",
                fix="Let the exception of the marked function reach the end of the capture.",
            )
        line = user_line()
        self._end_segment(f"{'hoisted ' * call.hoist}break '{call.name}' is called")
        self._move(State.BREAK)
        where = f"break '{call.name}' (step {len(self.steps)} of {self._graph_name})"
        try:
            model_value = self._run_break(call, args, kwargs, where=where, line=line)
        except BaseException as error:
            self._move(State.FAILED)
            add_note(error, f"raised at capture in {where}, called at {line}")
            raise
        self.begin_segment(line=line)
        return model_value

    def _run_break(
        self, spec: BreakSpec, args: tuple[Any, ...], kwargs: dict[str, Any], *, where: str, line: str
    ) -> Any:
        if self._barrier is not None:
            self._barrier()
        bound = spec.bind(args, kwargs)
        self._bind_live(spec, bound, where=where)
        leaves, containers = _argument_leaves(bound, where=where)
        tensors: list[torch.Tensor] = []
        for _, leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                tensors.append(leaf)
            elif isinstance(leaf, Iterator):
                raise _iterator_refused(leaf, where=where)
        self._refuse_grad(tensors, where=where)
        if spec.hoist:
            self._refuse_unhoistable(tensors, where=where)
        function = spec.capture_stub or spec.function
        backend = self._pool.backend
        # The model may go on to append to a list that it passed: a replay hands over what the call received.
        kept = bound
        if containers > _OWN_CONTAINERS:
            kept = BoundCall(snapshot(bound.args), snapshot(bound.kwargs), places=bound.places)
        borrow = partial(self._borrow, where=where)
        borrowed = BoundCall(
            [map_leaves(value, borrow, stop=is_changeable_object) for value in kept.args],
            {name: map_leaves(value, borrow, stop=is_changeable_object) for name, value in kept.kwargs.items()},
            places=kept.places,
        )
        _forget_casts()
        backend.begin_break()
        result = function(*bound.args, **bound.kwargs)
        join = backend.end_break()
        if kept is not bound:
            _refuse_changed_containers(kept, bound, where=where, live=spec.live)
        live_values = [bound[parameter] for parameter in spec.live]
        live_leaves = flatten(live_values, stop=is_changeable_object)[0] if live_values else ()
        live_tensors = {id(leaf) for _, leaf in live_leaves}
        # At a replay no frame of the model is on the stack, so messages of the contract carry the line of the call.
        contract, model_value = learn(
            result,
            spec=spec,
            where=f"{where}, called at {line},",
            # Live data is another object at each replay, so a result that shares it cannot stay in place.
            arguments=[tensor for tensor in tensors if id(tensor) not in live_tensors],
            arena=self._pool.arena,
            borrow=backend.borrow,
        )
        break_call = BreakCall(
            spec,
            bound=borrowed,
            contract=contract,
            context=self.replay_context,
            where=f"{where}, called at {line}",
            modes=None if self.modes.in_force() else Modes.current(),
            join=join,
        )
        self._agree_on_rows(break_call)
        if spec.hoist:
            made = [leaf for _, leaf in flatten(model_value)[0] if isinstance(leaf, torch.Tensor)]
            self._hoisted.extend((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in made)
        kind = StepKind.HOISTED if spec.hoist else StepKind.BREAK
        bind, order = break_call.bound_run, len(self.steps)
        self.steps.append(Step(kind, spec.name, line=line, bind=bind, order=order, call=break_call))
        return model_value

    def _bind_live(self, spec: BreakSpec, bound: BoundCall, *, where: str) -> None:
        live = self.context.live
        for parameter, name in spec.live.items():
            value = bound[parameter]
            if name not in live:
                self.context.live = {**live, name: value}
                live = self.context.live
            elif not _is_same_live(live[name], value):
                raise LiveDataError(
                    f"{where} binds another {type(value).__name__} to live data '{name}' than the capture has.",
                    why="A replay rebinds one object to that name, so two different things would become one.",
                    fix="Give the second its own name: live={'"
                    + parameter
                    + "': 'other_name'}; or pass the same object.",
                )

    def _borrow(self, path: str, value: Any, *, where: str) -> Any:
        """What a replay hands over for a leaf: of a tensor made in this capture, an object of our own."""
        if not isinstance(value, torch.Tensor):
            return value
        borrowed = self._pool.backend.borrow(value)
        if borrowed is not value or not value.numel() or not storage_address(value):
            return borrowed
        if self._pool.arena.holds(value):
            return value.detach()
        self._held.append((value, _layout(value), where))
        return value

    def _refuse_reshaped(self) -> None:
        """A tensor that a break holds must look at a replay as it did when the break received it."""
        for tensor, layout, where in self._held:
            if _layout(tensor) != layout:
                raise CaptureError(
                    f"{where} received a tensor of shape {tuple(layout[1])} that then got another shape, other strides or other "
                    f"memory in place: it is {tuple(tensor.shape)} now.",
                    why="The break holds this very tensor, so a replay would hand it over as it is at the end of the capture.",
                    fix="Make a view instead of changing it in place: y = x.t(), not x.t_().",
                )

    def _refuse_grad(self, tensors: list[torch.Tensor], *, where: str) -> None:
        if not torch.is_grad_enabled():
            return
        for tensor in tensors:
            # A parameter is a leaf that a break only reads; a result of captured work carries an autograd graph.
            if tensor.requires_grad and not tensor.is_leaf:
                raise CaptureIllegalError(
                    f"{where} received a tensor of shape {tuple(tensor.shape)} that requires grad, with grad mode on.",
                    why="A replay builds no autograd graph, so its gradients would be those of the capture.",
                    fix="Capture under torch.no_grad() or torch.inference_mode(); graphs here are for inference.",
                )

    def _refuse_unhoistable(self, tensors: list[torch.Tensor], *, where: str) -> None:
        for tensor in tensors:
            address, backend = tensor.data_ptr() if storage_address(tensor) else 0, self._pool.backend
            hoisted = any(start <= address < end for start, end in self._hoisted)
            in_arena = bool(address) and self._pool.arena.holds(tensor) and not hoisted
            if in_arena or backend.made_by_a_segment(tensor) or backend.written_by_a_segment(tensor):
                origin = "made by an ordinary break" if in_arena else "made or written by a segment"
                raise CaptureError(
                    f"{where} is hoisted and received a tensor of shape {tuple(tensor.shape)} {origin}.",
                    why="At a replay it runs before the first segment, so it would read the last step's numbers.",
                    fix="Give it static buffers and live data only, or take hoist=True off.",
                )

    def _agree_on_rows(self, call: BreakCall) -> None:
        lengths = {tensor.shape[axis] for tensor, axis in call.spec.row_arguments(call.bound).values()}
        lengths |= call.contract.row_lengths
        if not lengths:
            return
        expected = self.context.padded_rows
        if expected is None and len(lengths) == 1:
            expected = next(iter(lengths))
            self.context.padded_rows = self.replay_context.padded_rows = expected
        if lengths != {expected}:
            raise CaptureError(
                f"{call.where} has token axes of length {sorted(lengths)}; this graph's is {expected}.",
                why="valid_rows cuts all of them alike, so one graph has one token axis.",
                fix="Leave other axes off rows=, or name the token axis of each with rows={'parameter': axis}.",
            )


def _forget_casts() -> None:
    """Autocast's cache must not carry a cast across a boundary, nor out of the capture.

    A replay would not make the cast anew where the capture found it in the cache; and code of the model may have switched
    the cache on again.
    """
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)


_OWN_CONTAINERS = 3  # the pair of args and kwargs, the list, the dict


def _argument_leaves(bound: BoundCall, *, where: str) -> tuple[list[tuple[str, Any]], int]:
    """Leaves of all arguments, and the count of containers around them."""
    try:
        leaves, nodes = flatten((bound.args, bound.kwargs), stop=is_changeable_object)
    except RecursionError:
        raise CaptureError(
            f"{where} received an argument that contains itself, or is nested a thousand levels deep.",
            why="Its tensors are looked up at capture, and there would be no end to it.",
            fix="Pass what the break needs, or keep the object on `self`.",
        ) from None
    return leaves, len(nodes)


def _iterator_refused(leaf: object, *, where: str) -> CaptureError:
    return CaptureError(
        f"{where} received a {type(leaf).__name__}, an iterator.",
        why="It is exhausted after the capture, so every replay would find nothing in it.",
        fix="Pass a tuple or a list.",
    )


_Layout = tuple[int, torch.Size, tuple[int, ...]]


def _layout(tensor: torch.Tensor) -> _Layout:
    """Where a tensor lies and how."""
    return tensor.data_ptr(), tensor.shape, tensor.stride()


_BY_VALUE = (int, float, complex, str, bytes, bool)


def _is_same_live(one: Any, other: Any) -> bool:
    """The same object; of numbers and strings the same value, since whether they are one object is Python's matter."""
    return one is other or (type(one) is type(other) and isinstance(one, _BY_VALUE) and one == other)


def _refuse_changed_containers(kept: BoundCall, bound: BoundCall, *, where: str, live: Mapping[str, str]) -> None:
    """Live data may be changed: each replay brings its own."""
    places = {bound.places[parameter] for parameter in live}
    same = all(same_containers(kept.args[i], bound.args[i]) for i in range(len(kept.args)) if i not in places)
    if not same or not all(
        same_containers(value, bound.kwargs[name]) for name, value in kept.kwargs.items() if name not in places
    ):
        raise CaptureError(
            f"{where} changed a list or dict that it received.",
            why="The model's code that reads the container is not run at a replay, and the next replay would start from the "
            "changed one.",
            fix="Return the values, or hand them to later breaks in current_replay().scratch.",
        )
