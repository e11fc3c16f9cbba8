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
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import attrs
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from breakgraph.backends.base import Backend, Segment
from breakgraph.call_site import user_line
from breakgraph.errors import CaptureIllegalError

__all__ = ["EmulatedBackend", "EmulatedSegment", "declare_pure"]

_aten = torch.ops.aten
_UNINITIALISED = frozenset(
    {_aten.empty, _aten.empty_like, _aten.new_empty, _aten.empty_strided, _aten.new_empty_strided, _aten.empty_permuted}
)
_SYNC_METHODS: dict[Any, str] = {
    torch.Tensor.tolist: "Tensor.tolist()",
    torch.Tensor.numpy: "Tensor.numpy()",
    torch.Tensor.__array__: "numpy's conversion of a tensor",
    torch.Tensor.cpu: "Tensor.cpu()",
}
_PYTHON_KEYS = ("CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd", "AutogradCPU", "Autograd")
_pure: set[str] = set()


def declare_pure(operator: Callable[..., Any]) -> None:
    """Say that a custom operator written in Python has no effect but its result, so that it may run at a replay.

    Args:
        operator: What `torch.library.custom_op` returned, or an overload such as `torch.ops.mylib.f.default`.
    """
    name = (
        operator._name if isinstance(operator, torch._ops.OpOverload) else str(getattr(operator, "_qualname", operator))
    )
    _pure.add(name.split(".")[0])


@attrs.frozen(eq=False, slots=True)
class Operator:
    """One recorded operator call: `fresh` pairs an index into the flat results with the captured tensor."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    fresh: tuple[tuple[int, torch.Tensor], ...]


class EmulatedSegment(Segment):
    """Recorded operators of one segment.

    Args:
        operators: In order; views and uninitialised allocations are not among them, since nothing runs for them.
        made: Every tensor that the segment allocated: its share of the pool.
        backend: Whose pool it is.
    """

    def __init__(self, operators: list[Operator], *, made: list[torch.Tensor], backend: EmulatedBackend) -> None:
        self.operators = operators
        self.made = made
        self._backend = backend

    def launch(self) -> None:
        """Run the operators on the captured tensors; they read and write the captured storage."""
        # What was recorded lies below autograd and autocast, so neither may act again. Inference mode also
        # lets results go into tensors that were made in it; it never changes a tensor that was not.
        if torch.is_autocast_enabled("cpu"):
            with torch.autocast("cpu", enabled=False):
                self._run()
        else:
            self._run()

    def _run(self) -> None:
        with torch.inference_mode():
            for operator in self.operators:
                result = operator.function(*operator.args, **operator.kwargs)
                if not operator.fresh:
                    continue
                if isinstance(result, torch.Tensor):
                    operator.fresh[0][1].copy_(result)
                else:
                    flat = _tensors(result)
                    for index, captured in operator.fresh:
                        captured.copy_(flat[index])

    def reset(self) -> None:
        """Drop the operators and every intermediate."""
        self._backend.forget(self)
        self.operators = []
        self.made = []

    def describe(self) -> str:
        """The count of operators."""
        return f"{len(self.operators)} operators"


class _Recording:
    __slots__ = ("made", "operators")

    def __init__(self, made: list[torch.Tensor]) -> None:
        self.operators: list[Operator] = []
        self.made = made


class EmulatedBackend(Backend):
    """Records operators of the current thread on the CPU."""

    name = "emulated"

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._recording: _Recording | None = None
        self._carried: list[torch.Tensor] = []
        self._storages: set[int] = set()
        self._segments: list[EmulatedSegment] = []

    @contextlib.contextmanager
    def on_capture_stream(self) -> Iterator[None]:
        """A CPU has one stream."""
        yield

    @contextlib.contextmanager
    def capturing(self, generators: Iterable[torch.Generator]) -> Iterator[None]:
        """Push the two modes for the whole capture; they only act while a segment is recorded.

        Popping them around each break was rejected: a model may have pushed modes of its own above them.
        """
        with _uncompiled(), _RefuseSyncs(self), _RecordOperators(self):
            yield

    def begin(self) -> None:
        """Begin to record."""
        self._recording = _Recording(self._carried)
        self._carried = []

    def end(self) -> EmulatedSegment | None:
        """Stop recording; the operators have already run, once."""
        recording, self._recording = self._recording, None
        if recording is None:
            return None
        if not recording.operators:
            # Allocations alone launch nothing, but a later segment may write and read them.
            self._carried = recording.made
            return None
        segment = EmulatedSegment(recording.operators, made=recording.made, backend=self)
        self._segments.append(segment)
        return segment

    def abort(self) -> None:
        """Drop what was recorded."""
        recording, self._recording = self._recording, None
        self._forget_storages(self._carried if recording is None else recording.made)
        self._carried = []

    def forget(self, segment: EmulatedSegment) -> None:
        """Take a segment that is being reset out of the pool."""
        self._segments = [other for other in self._segments if other is not segment]
        self._forget_storages(segment.made)

    def _forget_storages(self, made: list[torch.Tensor]) -> None:
        # By address: once the tensors are gone the allocator may hand the same address to anybody.
        self._storages.difference_update(tensor.untyped_storage().data_ptr() for tensor in made)

    def replaying(self) -> None:
        """Nothing to order on one stream."""

    def made_by_a_segment(self, tensor: torch.Tensor) -> bool:
        """True where a segment allocated the tensor's storage."""
        return tensor.untyped_storage().data_ptr() in self._storages and tensor.numel() > 0

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor: recorded operators keep it alive in any case."""
        return tensor

    def synchronize(self) -> None:
        """Nothing runs behind the caller's back on a CPU."""

    def poison(self) -> None:
        """Fill every tensor that a segment allocated with NaN, -1 bits, or True."""
        with torch.inference_mode():
            for segment in self._segments:
                for tensor in segment.made:
                    if tensor.is_floating_point() or tensor.is_complex():
                        tensor.fill_(float("nan"))
                    elif tensor.dtype is torch.bool:
                        tensor.fill_(value=True)
                    else:
                        tensor.fill_(-1 if tensor.dtype.is_signed else torch.iinfo(tensor.dtype).max)

    def pool_bytes(self) -> int:
        """Bytes of every intermediate that recorded segments keep."""
        return sum(t.numel() * t.element_size() for segment in self._segments for t in segment.made)

    # Called by the modes below.

    @property
    def is_recording(self) -> bool:
        """True while a segment is recorded."""
        return self._recording is not None

    def record(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator for real and note it."""
        recording = self._recording
        if recording is None:
            return function(*args, **kwargs)
        _refuse_illegal(function, args, kwargs)
        inputs = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs)) if t.numel()}
        result = function(*args, **kwargs)
        outputs = _tensors(result)
        # Aliases, since an address is what is baked in: `weight.data = other` changes the caller's tensor only.
        fresh = tuple(
            (index, _aliases(tensor))
            for index, tensor in enumerate(outputs)
            if tensor.numel() and tensor.untyped_storage().data_ptr() not in inputs
        )
        for _, tensor in fresh:
            recording.made.append(tensor)
            self._storages.add(tensor.untyped_storage().data_ptr())
        if function.overloadpacket in _UNINITIALISED or torch.Tag.inplace_view in function.tags:
            return result  # no kernel: memory without values, or a change of shape and strides
        if fresh or function._schema.is_mutable:
            recording.operators.append(Operator(function, _aliases(args), _aliases(kwargs), fresh))
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
        # In inference mode composites arrive whole and would hide the syncs inside them.
        if _is_composite(func):
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
            if func in _SYNC_METHODS:
                _refuse(_SYNC_METHODS[func])
            if func is torch.tensor:
                _refuse("torch.tensor(...) from host data")
            # A device object may be the tensor's own (`y.to(x.device)`), which is no transfer on a GPU either.
            if func is torch.Tensor.to and "cpu" in (
                *[a for a in args[1:] if isinstance(a, str)],
                kwargs.get("device"),
            ):
                _refuse("Tensor.to('cpu')")
        return func(*args, **kwargs)


@contextlib.contextmanager
def _uncompiled() -> Iterator[None]:
    # A compiled function would run as one opaque call. Asked through sys.modules, since importing dynamo takes seconds.
    if "torch._dynamo" in sys.modules:
        with torch.compiler.set_stance("force_eager"):
            yield
    else:
        yield


def _is_composite(function: Any) -> bool:
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return bool(function.has_kernel_for_dispatch_key(key)) or bool(
        torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), key)
    )


def _tensors(value: Any) -> list[torch.Tensor]:
    """Tensors of an operator's arguments or results: these are tuples, lists and dicts only."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [tensor for item in value for tensor in _tensors(item)]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in _tensors(item)]
    return []


def _aliases(value: Any) -> Any:
    """The same nesting with every tensor replaced by another tensor on the same memory."""
    if isinstance(value, torch.Tensor):
        return _aten.alias.default(value)
    if isinstance(value, tuple | list):
        return type(value)(_aliases(item) for item in value)
    if isinstance(value, dict):
        return {key: _aliases(item) for key, item in value.items()}
    return value


def _refuse_illegal(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    packet = function.overloadpacket
    if packet in (_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_):
        masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
        # One value under a mask is a masked fill, which needs no sync.
        if masks and (packet is _aten.index or args[2].numel() != 1):
            _refuse("indexing with a boolean mask")
        return
    # A scalar is lifted by torch itself, for `x[mask] = 0.0`, and goes into a kernel's arguments on a GPU.
    if packet is _aten.lift_fresh and args[0].dim():
        _refuse("torch.tensor(...) from host data")
    if packet is _aten.repeat_interleave and kwargs.get("output_size") is not None:
        return
    tags = function.tags
    if torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags:
        name = {"_local_scalar_dense": "a host read of a tensor: item(), int(), float(), bool() or `if tensor:`"}
        _refuse(name.get(packet.__name__, f"{packet.__name__}, whose result depends on the data,"))
    if function.namespace not in ("aten", "prims", "prim") and _is_python_operator(function):
        qualified = f"{function.namespace}::{packet.__name__}"
        if qualified not in _pure:
            raise CaptureIllegalError(
                f"A segment called the custom operator {qualified}, which is written in Python ({user_line()}).",
                why="A replay runs no Python, so whatever it does beside its result would happen once and never again.",
                fix="Mark the step with @eager_on_graph, or declare_pure(operator) where only its result matters.",
            )


def _is_python_operator(function: Any) -> bool:
    # torch keeps the kernels that Python registered under "namespace/name/key"; a test guards this private table.
    packet = f"{function.namespace}/{function.overloadpacket.__name__}"
    names = (packet, f"{packet}.{function._overloadname}")
    return any(f"{name}/{key}" in torch.library._impls for name in names for key in _PYTHON_KEYS)


def _refuse(what: str) -> None:
    raise CaptureIllegalError(
        f"A segment used {what} at {user_line()}.",
        why="A device graph cannot hold it: it makes the host wait for the device, or a shape depend on data; a replay "
        "would use the captured value for ever.",
        fix="Mark the function that does it with @eager_on_graph, or compute it on the device or before the capture.",
    )
