"""The semantics of CUDA graphs on a CPU, by recording operators.

A segment runs for real under a dispatch mode that notes every operator; a launch runs the noted operators on the
noted tensors and writes the results into the captured storage. So the two facts that rule CUDA graphs hold here too:
addresses are baked in, and a replay runs no Python of the model.

It refuses what CUDA refuses: host syncs and data-dependent shapes, with the user's line. What it cannot see: memory
read through `data_ptr` or DLPack, writes from C++ that dispatch nothing, work of other threads. It keeps every
intermediate alive, so faults of block reuse cannot show here; they are GPU tests.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import attrs
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from breakgraph.backends.base import Backend
from breakgraph.backends.emulated_rules import (
    UNINITIALISED,
    aliases_of,
    declare_pure,
    fill_with_poison,
    host_read,
    illegal,
    is_composite,
    tensors_in,
    written_by,
)
from breakgraph.backends.emulated_segment import EmulatedSegment, Operator
from breakgraph.call_site import user_line
from breakgraph.errors import CaptureIllegalError
from breakgraph.structure import storage_address

__all__ = ["EmulatedBackend", "EmulatedSegment", "declare_pure"]


@attrs.define(eq=False)
class _Recording:
    """A segment in the making.

    Attributes:
        made: Tensors that it allocated.
        addresses: Their storages.
        operators: What ran.
        refused: What it was refused, in case the model swallows the error: the driver would not forget it either.
    """

    made: list[torch.Tensor]
    addresses: set[int]
    operators: list[Operator] = attrs.field(factory=list)
    refused: CaptureIllegalError | None = None


class EmulatedBackend(Backend):
    """Records operators of the current thread on the CPU."""

    name = "emulated"

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.replay_stream = 0
        self._recording: _Recording | None = None
        self._carried: list[torch.Tensor] = []
        self._written: set[int] = set()
        self._unwritten: set[int] = set()
        self._foreign: dict[int, weakref.ref[EmulatedSegment]] = {}
        self._segments: weakref.WeakSet[EmulatedSegment] = weakref.WeakSet()

    @contextlib.contextmanager
    def on_capture_stream(self) -> Iterator[None]:
        """A CPU has one stream."""
        yield

    @contextlib.contextmanager
    def capturing(self, generators: Iterable[torch.Generator]) -> Iterator[None]:
        """Push the two modes for the whole capture; they only act while a segment is recorded.

        Popping them around each break was rejected: a model may have pushed modes of its own above them.
        """
        self._carried, self._written, self._unwritten = [], set(), set()
        self._foreign = {address: weakref.ref(segment) for segment in self._segments for address in segment.addresses}
        try:
            with _uncompiled(), _RefuseSyncs(self), _RecordOperators(self):
                yield
        finally:
            self._carried = []

    def begin(self) -> None:
        """Begin to record."""
        self._recording = _Recording(self._carried, {storage_address(tensor) for tensor in self._carried})
        self._carried = []

    def end(self) -> EmulatedSegment | None:
        """Stop recording; the operators have already run, once."""
        recording, self._recording = self._recording, None
        if recording is None:
            return None
        if recording.refused is not None:
            raise recording.refused
        if not recording.operators:
            # Allocations alone launch nothing, but a later segment may write and read them.
            self._carried = recording.made
            return None
        segment = EmulatedSegment(recording.operators, made=recording.made, backend=self)
        segment.unwritten = [tensor for tensor in recording.made if storage_address(tensor) in self._unwritten]
        self._segments.add(segment)
        return segment

    def abort(self) -> bool:
        """Drop what was recorded; there is no driver to invalidate anything."""
        self._recording = None
        self._carried = []
        return False

    def begin_break(self) -> None:
        """Nothing to watch on one stream."""

    def end_break(self) -> None:
        """Nothing to join on one stream."""
        return

    def forget(self, segment: EmulatedSegment) -> None:
        """Take a segment that is being reset out of the pool."""
        self._segments.discard(segment)

    def release(self) -> None:
        """Nothing is kept: a segment's tensors went with it."""

    def elsewhere(self) -> None:
        """There is one CPU."""
        return

    def replaying(self) -> None:
        """Nothing to order on one stream."""

    def made_by_a_segment(self, tensor: torch.Tensor) -> bool:
        """True where a segment allocated the tensor's storage."""
        address = storage_address(tensor)
        if not tensor.numel() or not address:
            return False
        if self._recording is not None and address in self._recording.addresses:
            return True
        if any(address == storage_address(carried) for carried in self._carried):
            return True
        return any(address in segment.addresses for segment in self._segments)

    def written_by_a_segment(self, tensor: torch.Tensor) -> bool:
        """True where an operator of the running capture wrote the tensor's storage."""
        return storage_address(tensor) in self._written

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """Another tensor on the same memory where a segment made it, so that `y.t_()` later does not change it."""
        return aliases_of(tensor) if self.made_by_a_segment(tensor) else tensor

    def synchronize(self) -> None:
        """Nothing runs behind the caller's back on a CPU."""

    def poison(self) -> None:
        """Fill every tensor that a segment allocated with NaN, -1 bits, or True."""
        with torch.inference_mode():
            for segment in self._segments:
                for tensor in segment.made:
                    fill_with_poison(tensor)

    def poison_unwritten(self) -> None:
        """Fill what segments allocated without values; the rest every replay computes anew."""
        with torch.inference_mode():
            for segment in self._segments:
                for tensor in segment.unwritten:
                    fill_with_poison(tensor)

    def pool_bytes(self) -> int:
        """Bytes of every intermediate that recorded segments keep."""
        return sum(t.numel() * t.element_size() for segment in self._segments for t in segment.made)

    def live_blocks(self) -> tuple[tuple[int, int], ...]:
        """Nothing: every intermediate has memory of its own, which no other graph writes."""
        return ()

    def free_bytes(self) -> int:
        """A CPU has no memory of its own to watch."""
        return 0

    # Called by the modes below.

    def refuse(self, what: str, *, why: str = "") -> NoReturn:
        """Refuse something in a segment, and remember it: the capture fails even where the model swallows the error."""
        error = CaptureIllegalError(
            f"A segment used {what} at {user_line()}.",
            why=why
            or "A device graph cannot hold it: it makes the host wait for the device, or a shape depend on data; a replay "
            "would use the captured value for ever.",
            fix="Mark the function that does it with @eager_on_graph, or compute it on the device or before the capture.",
        )
        if self._recording is not None:
            self._recording.refused = error
        raise error

    @property
    def is_recording(self) -> bool:
        """True while a segment is recorded."""
        return self._recording is not None

    def _is_foreign(self, address: int) -> bool:
        """True where a segment of another graph, still alive, made what lies at an address."""
        reference = self._foreign.get(address)
        segment = None if reference is None else reference()
        return segment is not None and address in segment.addresses

    def record(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator for real and note it."""
        recording = self._recording
        if recording is None:
            return function(*args, **kwargs)
        refusal = illegal(function, args, kwargs)
        if refusal is not None:
            self.refuse(refusal[0], why=refusal[1])
        inputs = {storage_address(t) for t in tensors_in((args, kwargs)) if t.numel()}
        if self._foreign and any(self._is_foreign(address) for address in inputs):
            self.refuse(
                f"a tensor that a segment of another graph of the pool made (in {function.name()})",
                why="Graphs of one pool share memory: on a GPU that graph's next replay, or this one's own, may overwrite it.",
            )
        result = function(*args, **kwargs)
        outputs = tensors_in(result)
        # Aliases, since an address is what is baked in: `weight.data = other` changes the caller's tensor only.
        fresh = tuple(
            (index, aliases_of(tensor))
            for index, tensor in enumerate(outputs)
            if tensor.numel() and storage_address(tensor) not in inputs
        )
        for _, tensor in fresh:
            recording.made.append(tensor)
            recording.addresses.add(storage_address(tensor))
        if function._schema.is_mutable:
            self._written.update(storage_address(t) for t in written_by(function, args, kwargs) if t.numel())
        if function.overloadpacket in UNINITIALISED:
            self._unwritten.update(storage_address(tensor) for _, tensor in fresh)
        if function.overloadpacket in UNINITIALISED or torch.Tag.inplace_view in function.tags:
            return result  # no kernel: memory without values, or a change of shape and strides
        if fresh or function._schema.is_mutable:
            recording.operators.append(Operator(function, aliases_of(args), aliases_of(kwargs), fresh, user_line()))
        return result


class _RecordOperators(TorchDispatchMode):
    def __init__(self, backend: EmulatedBackend) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._backend = backend

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._backend.is_recording:
            return func(*args, **kwargs)
        if types:
            self._backend.refuse(
                f"a {types[0].__name__}, a tensor subclass with operators of its own,",
                why="Its Python would not be replayed.",
            )
        # In inference mode composites arrive whole and would hide the syncs inside them.
        if is_composite(func):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return self._backend.record(func, args, kwargs)


class _RefuseSyncs(TorchFunctionMode):
    def __init__(self, backend: EmulatedBackend) -> None:
        super().__init__()
        self._backend = backend

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._backend.is_recording:
            read = host_read(func, args, kwargs)
            if read is not None:
                self._backend.refuse(read)
        return func(*args, **kwargs)


@contextlib.contextmanager
def _uncompiled() -> Iterator[None]:
    # A compiled function would run as one opaque call. Asked through sys.modules, since importing dynamo takes seconds.
    if "torch._dynamo" in sys.modules:
        with torch.compiler.set_stance("force_eager"):
            yield
    else:
        yield
