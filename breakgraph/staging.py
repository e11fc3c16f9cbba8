"""The memory behind static inputs: one device arena, two staging slots on the host, one packed copy per step.

All copied inputs of a key lie next to each other in one arena, the integer ones first, so that whatever comes
from the host reaches the device as one copy. Every key starts at the arena's beginning: replays of a runner
never overlap. `stage` fills a slot on the host and may run while the device still works on the step before;
`commit` puts the copies on the stream. Slots alternate, and an event guards each against being refilled while
its copy is still in flight.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping
from typing import Any

import attrs
import numpy.typing as npt
import torch

from breakgraph.errors import InternalError, ReplayError
from breakgraph.input_set import InputSet
from breakgraph.static_buffers import Extent, Missing, PadKind, StaticInput

__all__ = ["InputStage", "Layout", "Staged"]

_ALIGNMENT = 256  # that of the caching allocator, so kernels choose the same loads as for a tensor of its own
_SLOTS = 2
_SMALL = 1 << 18  # bytes; above it torch's copy, which uses several threads, is faster than numpy's
_NUMPY_DTYPES = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.float32,
        torch.float64,
    }
)

Rows = Mapping[str, torch.Tensor]


@attrs.frozen(eq=False)
class Field:
    """One copied input inside a layout: where it lies and how long its symbolic axis is there."""

    declared: StaticInput
    shape: tuple[int, ...]
    start: int
    stop: int
    axis: int | None

    def view(self, arena: torch.Tensor) -> torch.Tensor:
        """A dense tensor of the padded shape over the arena's bytes."""
        return arena[self.start : self.stop].view(self.declared.dtype).view(self.shape)

    def array(self, view: torch.Tensor) -> npt.NDArray[Any] | None:
        """A host view as a numpy array, whose small copies cost a fifth of torch's; None where torch is better."""
        small = self.stop - self.start <= _SMALL and self.axis in (None, 0)
        return view.numpy() if small and self.declared.dtype in _NUMPY_DTYPES else None

    def write(self, target: torch.Tensor, source: torch.Tensor, *, dummy: torch.Tensor | None) -> None:
        """Fill the whole of `target`: the real rows from `source`, the others by the padding rule.

        Args:
            target: A view of the padded shape.
            source: The real rows, checked.
            dummy: The rows of one padding request, where a provider gave them.
        """
        axis = self.axis
        real = 0 if axis is None else source.shape[axis]
        if axis is None or real == self.shape[axis]:
            target.copy_(source)
            return
        target.narrow(axis, 0, real).copy_(source)
        tail = target.narrow(axis, real, self.shape[axis] - real)
        if dummy is not None:
            self._repeat(tail, dummy, axis)
        elif self.declared.pad.kind is PadKind.REPEAT_LAST and real:
            tail.copy_(source.narrow(axis, real - 1, 1).expand_as(tail))
        else:
            tail.fill_(self.declared.pad.fill)

    def write_array(
        self, target: npt.NDArray[Any], source: npt.NDArray[Any], *, dummy: torch.Tensor | None = None
    ) -> None:
        """Do the same for a small input on the host; the rows of a padding request are on the host as well."""
        if self.axis is None or len(source) == len(target):
            target[...] = source
            return
        real, pad = len(source), self.declared.pad
        target[:real] = source
        if dummy is not None:
            each = self._check_dummy(dummy, tail=len(target) - real, axis=0)
            target[real:].reshape(-1, each, *self.shape[1:])[...] = dummy.numpy()
            return
        target[real:] = source[real - 1] if real and pad.kind is PadKind.REPEAT_LAST else pad.fill

    def _repeat(self, tail: torch.Tensor, dummy: torch.Tensor, axis: int) -> None:
        each = self._check_dummy(dummy, tail=tail.shape[axis], axis=axis)
        tail.view(*self.shape[:axis], -1, each, *self.shape[axis + 1 :]).copy_(dummy.unsqueeze(axis))

    def _check_dummy(self, dummy: torch.Tensor, *, tail: int, axis: int) -> int:
        """Refuse rows of a padding request that do not fill the tail evenly; returns how many they are."""
        each = dummy.shape[axis] if dummy.dim() > axis else 0
        expected = (*self.shape[:axis], each, *self.shape[axis + 1 :])
        if dummy.shape != expected or not each or tail % each:  # `PaddingDummies` has checked what one request has
            raise InternalError(
                f"{tuple(dummy.shape)} rows of a padding request for {tail} rows of {self.declared.name!r}"
            )
        return each


class Layout:
    """Where the inputs of one key lie in the arena.

    Args:
        inputs: All declared inputs.
        extent: Padded sizes of the key.
    """

    def __init__(self, inputs: InputSet, extent: Extent) -> None:
        self.extent = extent
        fields = []
        end = 0
        # Integers first: index arrays come from the host, activations usually are on the device already.
        for declared in sorted(inputs.copied, key=lambda d: d.dtype.is_floating_point):
            shape = declared.resolve(extent)
            nbytes = math.prod(shape) * declared.dtype.itemsize
            fields.append(Field(declared, shape, end, end + nbytes, declared.axis))
            end += math.ceil(nbytes / _ALIGNMENT) * _ALIGNMENT
        self.fields = tuple(fields)
        self.nbytes = end


@attrs.define(eq=False)
class Staged:
    """One step's inputs, on their way: filled slot, bytes to copy, tensors that are on the device already."""

    layout: Layout
    slot: _Slot
    ticket: int
    span: tuple[int, int]
    on_device: list[tuple[int, torch.Tensor, torch.Tensor | None]]


class _Slot:
    """One staging buffer on the host, pinned where the runner is on CUDA."""

    def __init__(self, nbytes: int, *, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        self.bytes = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=on_cuda)
        self.event = torch.cuda.Event() if on_cuda else None
        self.ticket = 0
        self.lock = threading.Lock()
        self._views: dict[Layout, tuple[tuple[Field, torch.Tensor, npt.NDArray[Any] | None], ...]] = {}
        self._spans: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def take(self) -> int:
        """Wait until the last copy out of this slot has ended, then hand it to a new step; the lock is held."""
        if self.event is not None:
            self.event.synchronize()
        self.ticket += 1
        return self.ticket

    def views(self, layout: Layout) -> tuple[tuple[Field, torch.Tensor, npt.NDArray[Any] | None], ...]:
        """The slot seen as the inputs of a layout: each as a tensor, and as an array where that is cheaper."""
        views = self._views.get(layout)
        if views is None:
            tensors = [(field, field.view(self.bytes)) for field in layout.fields]
            views = self._views[layout] = tuple((field, view, field.array(view)) for field, view in tensors)
        return views

    def span(self, low: int, high: int, *, arena: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same bytes of the device arena and of this slot."""
        span = self._spans.get((low, high))
        if span is None:
            with torch.inference_mode(mode=False):
                span = self._spans[low, high] = (arena[low:high], self.bytes[low:high])
        return span


class InputStage:
    """Static buffers of a runner and the way into them.

    Args:
        inputs: All declared inputs.
    """

    def __init__(self, inputs: InputSet) -> None:
        self.inputs = inputs
        self._arena = torch.empty(0, dtype=torch.uint8)
        self._slots: list[_Slot] = []
        self._turn = 0
        self._lock = threading.Lock()
        self._views: dict[Layout, tuple[torch.Tensor, ...]] = {}
        self._stream: torch.cuda.Stream | None = None

    def reserve(self, layouts: Iterable[Layout]) -> None:
        """Allocate the arena and the slots for the largest layout, once, before the first capture.

        Args:
            layouts: The layouts of all keys that will ever be captured: addresses must not change afterwards.
        """
        if self._slots:
            return
        nbytes = max((layout.nbytes for layout in layouts), default=0)
        # An inference tensor could not be written outside inference mode.
        with torch.inference_mode(mode=False):
            self._arena = torch.zeros(nbytes, dtype=torch.uint8, device=self.inputs.device)
            self._slots = [_Slot(nbytes, device=self.inputs.device) for _ in range(_SLOTS)]

    @property
    def arena(self) -> torch.Tensor:
        """All static buffers, uint8, on the runner's device."""
        return self._arena

    def buffers(self, layout: Layout) -> dict[str, torch.Tensor]:
        """The arguments of `forward` for a key.

        Args:
            layout: The layout of the key.

        Returns:
            Static buffers by name, and the caller's own tensors for device-fed inputs.
        """
        views = self._static(layout)
        named = {field.declared.name: view for field, view in zip(layout.fields, views, strict=True)}
        return {**named, **self.inputs.device_fed}

    def _static(self, layout: Layout) -> tuple[torch.Tensor, ...]:
        views = self._views.get(layout)
        if views is None:
            if layout.nbytes > self._arena.numel():
                raise InternalError(f"a layout of {layout.nbytes} bytes in an arena of {self._arena.numel()}")
            with torch.inference_mode(mode=False):
                views = self._views[layout] = tuple(field.view(self._arena) for field in layout.fields)
        return views

    def stage(self, inputs: Rows, layout: Layout, *, dummy: Rows | None = None) -> Staged:
        """Fill a slot with a step's host tensors and remember its device tensors.

        Args:
            inputs: Checked inputs of the step.
            layout: The layout of its key.
            dummy: The rows of one padding request by input name.

        Returns:
            What `commit` needs. It stays good until two more steps were staged.
        """
        with self._lock:
            slot = self._slots[self._turn]
            self._turn = (self._turn + 1) % _SLOTS
        # Until the slot is full: two threads may prepare, and one that takes it next would otherwise write among these rows;
        # and `commit` must not find it taken between its look at the ticket and its copy.
        with slot.lock:
            return self._fill(slot, inputs, layout, dummy=dummy)

    def _fill(self, slot: _Slot, inputs: Rows, layout: Layout, *, dummy: Rows | None) -> Staged:
        ticket = slot.take()
        on_device: list[tuple[int, torch.Tensor, torch.Tensor | None]] = []
        low, high = -1, 0
        for index, (field, view, array) in enumerate(slot.views(layout)):
            name = field.declared.name
            source = inputs.get(name)
            rows = None if dummy is None else dummy.get(name)
            if source is None:
                default = field.declared.default
                assert not isinstance(default, Missing)  # InputSet.check() refused it
                if array is None:
                    view.fill_(default)
                else:
                    array.fill(default)
            else:
                if source.requires_grad:
                    source = source.detach()  # only its values are copied, whatever the caller's grad mode
                if not source.is_cpu:
                    on_device.append((index, source, rows))
                    continue
                on_host = rows is None or (rows.is_cpu and not rows.is_neg())
                if array is None or not on_host or source.is_neg():  # numpy knows no negative bit
                    field.write(view, source, dummy=rows)
                else:
                    field.write_array(array, source.numpy(), dummy=rows)
            low = field.start if low < 0 else low
            high = field.stop
        return Staged(layout, slot, ticket, (max(low, 0), high), on_device)

    def commit(self, staged: Staged) -> None:
        """Put the copies of a staged step on the current stream.

        What lies between the first and the last host-fed input is one copy; device tensors follow, so that they
        overwrite what that copy carried in their places. A step launched from another stream than the last
        one first waits for that stream: its replay may still read the static buffers.

        Args:
            staged: What `stage` returned.

        Raises:
            ReplayError: Two later steps were staged since, so the slot holds other data.
        """
        slot = staged.slot
        stream = None if slot.event is None else self._follow_stream()
        low, high = staged.span
        with slot.lock:  # another thread may prepare: it must not refill the slot between this look and the copy
            if slot.ticket != staged.ticket:
                raise ReplayError(
                    "a prepared step was launched after two later steps had been prepared.",
                    why=f"A runner has {_SLOTS} staging slots, so the inputs of this step are gone.",
                    fix="Launch (or drop) a prepared step before preparing the one after the next.",
                )
            if high > low:
                target, source = slot.span(low, high, arena=self._arena)
                target.copy_(source, non_blocking=True)
                if slot.event is not None:
                    slot.event.record(stream)
        if staged.on_device:
            static = self._static(staged.layout)
            for index, tensor, rows in staged.on_device:
                staged.layout.fields[index].write(static[index], tensor, dummy=rows)

    def _follow_stream(self) -> torch.cuda.Stream:
        # torch.cuda.current_stream() takes 3 us, the raw handle, to see that nothing changed, a tenth of that.
        raw = torch._C._cuda_getCurrentRawStream(self.inputs.device.index)
        last = self._stream
        if last is not None and last.cuda_stream == raw:
            return last
        stream = torch.cuda.current_stream(self.inputs.device)
        if last is not None:
            stream.wait_stream(last)
        self._stream = stream
        return stream
