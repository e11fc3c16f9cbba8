"""`BreakableCUDAGraphCapture`: record a forward as segments and breaks.

A capture is one real forward. Each segment runs once as it is recorded, each break runs on real data, and what the
forward changed outside is put back where the caller declared it. A replay then runs a flat tuple of bound launches and
bound break calls, in order.
"""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import TracebackType
from typing import Any, Protocol, Self, runtime_checkable

import attrs
import torch

from breakgraph.call_site import raised_at
from breakgraph.errors import CaptureError, ConfigError, NestedCaptureError, add_note
from breakgraph.graph import BreakableCUDAGraph, GraphStats, Program
from breakgraph.graph_pool import GraphPool
from breakgraph.recorder import Recorder
from breakgraph.replay_context import current_frame, install
from breakgraph.replay_program import Step

__all__ = ["BreakableCUDAGraph", "BreakableCUDAGraphCapture", "GraphPool", "GraphStats", "Saveable"]

_LOCK_TIMEOUT_SECONDS = 60.0
_device_locks: dict[torch.device, threading.Lock] = {}


@runtime_checkable
class Saveable(Protocol):
    """State that a forward changes and that is no tensor: what `state=` accepts besides tensors."""

    def save(self) -> object:
        """A snapshot."""
        ...

    def restore(self, saved: Any, /) -> None:
        """Put a snapshot back."""
        ...


class BreakableCUDAGraphCapture:
    """Capture the body of a `with` block into a graph.

    The body runs for real, once, on both backends. An exception in it reaches the caller unchanged, with a note; the
    graph is then as it was before, and so are streams, hooks and generators.

    Args:
        graph: Where to publish; it must hold nothing.
        pool: A `GraphPool` to share; a new one by default.
        stream: Capture stream of a new pool (CUDA only).
        live: Live data of the capture, by name: for deep code that reads it through `current_replay()`. A break that binds
            one of these names must receive the very same object.
        state: What the forward changes outside and the capture must put back: tensors, or objects with `save()` and
            `restore(saved)`. Cost: a clone of each tensor while the capture lasts.
        generators: The caller's own random generators that segments draw from.
        backend: `"auto"` (CUDA where a CUDA device is the current one, else emulated), `"cuda"`, `"emulated"`.
        barrier: Called before the capture and before each break, so that ranks move together.
        expect_breaks: How many breaks there must be, or names and counts.
        padded_rows: Captured length of the token axis, where no rows break tells it.

    Raises:
        NestedCaptureError: On entry, inside another capture, replay or eager step of this thread.
        CaptureError: On entry, the graph holds a capture, or the device stays busy with another thread's; on exit, the
            body recorded no device work, or other breaks than expected.
    """

    def __init__(
        self,
        graph: BreakableCUDAGraph,
        *,
        pool: GraphPool | None = None,
        stream: torch.cuda.Stream | None = None,
        live: Mapping[str, Any] | None = None,
        state: Iterable[torch.Tensor | Saveable] = (),
        generators: Sequence[torch.Generator] = (),
        backend: str = "auto",
        barrier: Callable[[], None] | None = None,
        expect_breaks: int | Mapping[str, int] | None = None,
        padded_rows: int | None = None,
    ) -> None:
        if isinstance(generators, Iterable):  # read once: an iterator would be empty afterwards
            generators = tuple(generators)
        if isinstance(state, Iterable) and not isinstance(state, torch.Tensor):
            state = tuple(state)
        _check_options(graph, pool=pool, live=live, state=state, generators=generators)
        self.graph = graph
        self._pool = pool
        self._stream = stream
        self._backend = backend
        self._live = dict(live or {})
        self._state = tuple(state)
        self._generators = tuple(generators)
        self._barrier = barrier
        self._expect_breaks = expect_breaks
        self._padded_rows = padded_rows
        self._running: _Running | None = None

    def __enter__(self) -> Self:
        if current_frame() is not None:
            raise NestedCaptureError(
                f"A capture of {self.graph.name} was begun inside another capture, replay or eager step.",
                why="A device graph cannot be captured inside another.",
                fix="Finish the outer one first; mark the inner step with @eager_on_graph to make it a break.",
            )
        if self.graph.sealed:
            raise CaptureError(
                f"{self.graph.name} already holds a captured graph.",
                why="Capturing over it would leave callers with outputs that nothing writes any more.",
                fix="Call reset() first, or capture into a new BreakableCUDAGraph.",
            )
        with ExitStack() as stack:
            pool = self._pool or GraphPool(backend=self._backend, stream=self._stream)
            stack.enter_context(_device_to_ourselves(pool.device, self.graph.name))
            stack.enter_context(pool.used_by(f"a capture of {self.graph.name}"))
            random = _RandomState.save(pool.device, self._generators)
            stack.callback(self._restore, [(item, _save(item)) for item in self._state])
            stack.enter_context(_no_garbage_collection())
            stack.enter_context(_no_autocast_cache())
            if self._barrier is not None:
                self._barrier()
            stack.enter_context(pool.backend.capturing(self._generators))
            pool.arena.rewind()
            recorder = Recorder(
                self.graph.name,
                pool=pool,
                live=self._live,
                padded_rows=self._padded_rows,
                barrier=self._barrier,
            )
            free_before = pool.backend.free_bytes()
            previous = install(recorder)
            stack.callback(install, previous)
            try:
                recorder.begin_segment()
            except BaseException:
                with suppress(Exception):
                    recorder.fail()
                raise
            self._running = _Running(
                pool=pool,
                recorder=recorder,
                random=random,
                stack=stack.pop_all(),
                started=time.perf_counter(),
                free_before=free_before,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        running, self._running = self._running, None
        assert running is not None
        if error is not None:
            # Teardown never replaces what the user's code raised.
            invalidated = running.give_up(error)
            add_note(
                error, f"raised during the capture of {self.graph.name} at {raised_at(trace)}; nothing of it was kept"
            )
            if invalidated:
                add_note(error, _INVALIDATED)
            try:
                running.stack.close()
            except Exception as late:
                _note_late(error, late)
            return
        try:
            # Leaving the stack puts back frame, streams, modes, gc, state and locks, in that order.
            with running.stack:
                try:
                    running.recorder.seal()
                    self._check_breaks(running.recorder.steps, device=running.pool.device)
                except BaseException as failed:
                    if running.give_up(failed):
                        add_note(failed, _INVALIDATED)
                    raise
        except BaseException as failed:
            running.give_up(failed)  # also where putting the state back failed: a second time it does nothing
            raise
        program = Program.seal(
            running.recorder,
            capture_seconds=time.perf_counter() - running.started,
            executable_bytes=max(0, running.free_before - running.pool.backend.free_bytes()),
        )
        self.graph.publish(program, pool=running.pool)

    def _check_breaks(self, steps: list[Step], *, device: torch.device) -> None:
        counts = Counter(step.name for step in steps if step.call is not None)
        expected = self._expect_breaks
        if isinstance(expected, Mapping):
            wrong: object = dict(expected) if dict(counts) != dict(expected) else None
        else:
            wrong = expected if expected is not None and counts.total() != expected else None
        if wrong is not None:
            raise CaptureError(
                f"{self.graph.name}: breaks {dict(counts) or 'none'} were captured; expected {wrong}.",
                why="A step that should run eagerly was captured with the data of this one, or the other way round.",
                fix="Put @eager_on_graph on the step (enabled=True), call it through the marked name, or mend expect_breaks.",
            )
        if not any(step.segment is not None for step in steps):
            raise CaptureError(
                f"{self.graph.name}: no device work was recorded on {device}.",
                why="A replay would do nothing; usually the model lies on another device than the graph.",
                fix="Move model and inputs to the graph's device, or choose backend='emulated' for a CPU model.",
            )

    @staticmethod
    def _restore(saved: list[tuple[torch.Tensor | Saveable, Any]]) -> None:
        failed: Exception | None = None
        for item, value in saved:
            try:
                _put_back(item, value)
            except Exception as error:  # the others are put back all the same
                failed = failed or error
        if failed is not None:
            raise failed


def _put_back(item: torch.Tensor | Saveable, value: Any) -> None:
    if isinstance(item, torch.Tensor):
        with torch.inference_mode():
            item.copy_(value)
    else:
        item.restore(value)


def _check_options(graph: object, *, pool: object, live: object, state: object, generators: object) -> None:
    """Refuse options of another kind, each by name."""
    wrong: tuple[str, object, str] | None = None
    if not isinstance(graph, BreakableCUDAGraph):
        wrong = ("graph", graph, "a BreakableCUDAGraph")
    elif pool is not None and not isinstance(pool, GraphPool):
        wrong = ("pool", pool, "a GraphPool, such as another graph's .pool")
    elif live is not None and not isinstance(live, Mapping):
        wrong = ("live", live, "a mapping from names to values")
    elif not isinstance(state, Iterable) or isinstance(state, torch.Tensor):
        wrong = ("state", state, "a sequence of tensors or of objects with save() and restore(saved)")
    elif not isinstance(generators, Iterable):
        wrong = ("generators", generators, "a sequence of torch.Generator")
    if wrong is None:
        for item in generators if isinstance(generators, Iterable) else ():
            if not isinstance(item, torch.Generator):
                wrong = ("generators", item, "a sequence of torch.Generator")
        for item in state if isinstance(state, Sequence) else ():
            if not isinstance(item, torch.Tensor | Saveable):
                wrong = ("state", item, "a sequence of tensors or of objects with save() and restore(saved)")
    if wrong is not None:
        name, got, expected = wrong
        raise ConfigError(
            f"BreakableCUDAGraphCapture({name}=...) got a {type(got).__name__}; expected {expected}.",
            why="It would fail in the middle of the capture, or be ignored.",
            fix=f"Pass {expected}.",
        )


def _save(item: torch.Tensor | Saveable) -> Any:
    if isinstance(item, torch.Tensor):
        with torch.no_grad():
            return item.detach().clone()
    return item.save()


@attrs.frozen(eq=False)
class _RandomState:
    """States of the generators that a failed capture must put back."""

    device: torch.device
    default: torch.Tensor
    own: list[tuple[torch.Generator, torch.Tensor]]

    @classmethod
    def save(cls, device: torch.device, generators: Sequence[torch.Generator]) -> _RandomState:
        default = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
        return cls(device, default, [(generator, generator.get_state()) for generator in generators])

    def restore(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(self.default, self.device)
        else:
            torch.set_rng_state(self.default)
        for generator, state in self.own:
            generator.set_state(state)


@attrs.frozen(eq=False)
class _Running:
    """What an entered capture must undo or publish."""

    pool: GraphPool
    recorder: Recorder
    random: _RandomState
    stack: ExitStack
    started: float
    free_before: int

    def give_up(self, error: BaseException) -> bool:
        """Drop everything recorded and put the generators back; what raises in here becomes a note of `error`.

        Returns:
            True where the driver had invalidated the capture.
        """
        invalidated = False
        for undo in (self.recorder.fail, self.random.restore):
            try:
                invalidated = bool(undo()) or invalidated
            except Exception as late:  # after an error of the driver that sticks, every call into it raises
                _note_late(error, late)
        return invalidated


_INVALIDATED = (
    "The driver invalidated the capture there: a segment cannot hold what makes the host wait for the device (.item(), "
    ".tolist(), .cpu(), a synchronisation). Mark the function that does it with @eager_on_graph, or compute it on the device."
)


def _note_late(error: BaseException, late: Exception) -> None:
    add_note(error, f"putting things back raised {type(late).__name__} as well: {late}")


@contextmanager
def _device_to_ourselves(device: torch.device, what: str) -> Iterator[None]:
    """One capture a device at a time: another thread waits, with a time-out."""
    lock = _device_locks.setdefault(device, threading.Lock())
    if not lock.acquire(timeout=_LOCK_TIMEOUT_SECONDS):
        raise CaptureError(
            f"The capture of {what} waited {_LOCK_TIMEOUT_SECONDS:.0f} s for another thread's on {device}.",
            why="Two captures on one device would record each other's allocations and stream waits.",
            fix="Capture from one thread, or let the other finish; a body that waits for this thread can never do so.",
        )
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """No automatic collection: a finaliser that frees a graph or a stream would act in the middle of a capture."""
    with _collector.lock:
        _collector.holders += 1
        if _collector.holders == 1:
            _collector.was_enabled = gc.isenabled()
            gc.disable()
    try:
        yield
    finally:
        with _collector.lock:
            _collector.holders -= 1
            if not _collector.holders and _collector.was_enabled:
                gc.enable()


class _Collector:
    """The collector is the process's, and captures on two devices may overlap: the last one puts it back."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.holders = 0
        self.was_enabled = True


_collector = _Collector()


@contextmanager
def _no_autocast_cache() -> Iterator[None]:
    """No cached casts: one made before the capture would be baked in and then freed when its autocast ends."""
    was_enabled = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was_enabled)
