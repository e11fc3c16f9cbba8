"""What the emulated backend refuses in a segment, because CUDA could not capture it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = [
    "UNINITIALISED",
    "aliases_of",
    "declare_pure",
    "fill_with_poison",
    "host_read",
    "illegal",
    "is_composite",
    "tensors_in",
    "written_by",
]

_aten = torch.ops.aten
_INDEXING = (_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_)
_PYTHON_KEYS = ("CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd", "AutogradCPU", "Autograd")
UNINITIALISED = frozenset(
    {_aten.empty, _aten.empty_like, _aten.new_empty, _aten.new_empty_strided, _aten.empty_strided, _aten.empty_permuted}
)
"""Operators that allocate memory without values."""
_pure: set[str] = set()
_SYNC_METHODS: dict[Any, str] = {
    torch.Tensor.tolist: "Tensor.tolist()",
    torch.Tensor.numpy: "Tensor.numpy()",
    torch.Tensor.__array__: "numpy's conversion of a tensor",
    torch.Tensor.cpu: "Tensor.cpu()",
    torch.Tensor.__repr__: "the printing of a tensor",
    torch.Tensor.__format__: "the formatting of a tensor",
    torch.Tensor.apply_: "Tensor.apply_()",
    torch.Tensor.map_: "Tensor.map_()",
    torch.tensor: "torch.tensor(...) from host data",
    torch.frombuffer: "torch.frombuffer(...) from host data",
}
_SPLITS = (torch.Tensor.tensor_split, torch.tensor_split)


def declare_pure(operator: Callable[..., Any]) -> None:
    """Say that a custom operator written in Python has no effect but its result, so that it may run at a replay.

    Args:
        operator: What `torch.library.custom_op` returned, or an overload such as `torch.ops.mylib.f.default`.
    """
    name = (
        operator._name if isinstance(operator, torch._ops.OpOverload) else str(getattr(operator, "_qualname", operator))
    )
    _pure.add(name.split(".")[0])


def host_read(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """What a function of torch is that hands data to the host or takes it from there, or None where it does neither.

    These dispatch no operator that would show it.

    Args:
        function: What a `TorchFunctionMode` received.
        args: Its arguments.
        kwargs: Its keyword arguments.
    """
    if function in _SYNC_METHODS:
        return _SYNC_METHODS[function]
    # A device object may be the tensor's own (`y.to(x.device)`), which is no transfer on a GPU either.
    if function is torch.Tensor.to and "cpu" in (*[a for a in args[1:] if isinstance(a, str)], kwargs.get("device")):
        return "Tensor.to('cpu')"
    # It reads the places itself, on the host, and dispatches nothing for that.
    if function in _SPLITS and any(isinstance(each, torch.Tensor) for each in (*args[1:], *_other_than_input(kwargs))):
        return "tensor_split(...) at places that a tensor holds"
    return None


def _other_than_input(kwargs: dict[str, Any]) -> list[Any]:
    return [value for name, value in kwargs.items() if name != "input"]


def illegal(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, str] | None:
    """Why CUDA could not capture an operator, as (what, why), or None where it could.

    Args:
        function: The overload.
        args: Its arguments.
        kwargs: Its keyword arguments.

    Returns:
        What it is, and why it matters where the usual reason (a sync, a shape that depends on data) is not the one.
    """
    packet = function.overloadpacket
    if packet in _INDEXING:
        masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
        # One value under a mask is a masked fill, which needs no sync.
        return (
            ("indexing with a boolean mask", "") if masks and (packet is _aten.index or args[2].numel() != 1) else None
        )
    # A scalar is lifted by torch itself, for `x[mask] = 0.0`, and goes into a kernel's arguments on a GPU.
    if packet is _aten.lift_fresh and args[0].dim():
        return "host data made into a tensor (torch.tensor, from_numpy, an index by a list)", ""
    if packet is _aten.repeat_interleave and kwargs.get("output_size") is not None:
        return None
    if torch.Tag.data_dependent_output in function.tags or torch.Tag.dynamic_output_shape in function.tags:
        if packet is _aten._local_scalar_dense:
            return "a host read of a tensor: item(), int(), float(), bool() or `if tensor:`", ""
        return f"{packet.__name__}, whose result depends on the data,", ""
    if packet is _aten._linalg_check_errors:
        return (
            "the check for errors of torch.linalg (inv, cholesky, solve)",
            "On a GPU it waits for the device; the variants that end in _ex do not.",
        )
    if function.namespace == "c10d":
        return f"the collective {packet.__name__}", "Its wait is Python, and a replay runs no Python."
    qualified = f"{function.namespace}::{packet.__name__}"
    if function.namespace not in ("aten", "prims", "prim") and _is_python_operator(function) and qualified not in _pure:
        return (
            f"the custom operator {qualified}, which is written in Python,",
            "A replay runs no Python, so whatever it does beside its result would happen once and never again. Where only "
            "its result matters, say so: declare_pure(operator).",
        )
    return None


def _is_python_operator(function: Any) -> bool:
    # torch keeps the kernels that Python registered under "namespace/name/key"; a test guards this private table.
    packet = f"{function.namespace}/{function.overloadpacket.__name__}"
    names = (packet, f"{packet}.{function._overloadname}")
    return any(f"{name}/{key}" in torch.library._impls for name in names for key in _PYTHON_KEYS)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Tensors of an operator's arguments or results: these are tuples, lists and dicts only."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [tensor for item in value for tensor in tensors_in(item)]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in tensors_in(item)]
    return []


def written_by(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operator writes in place, by its schema.

    Args:
        function: An overload of an operator.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    written: list[torch.Tensor] = []
    for position, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += tensors_in(args[position] if position < len(args) else kwargs.get(argument.name))
    return written


def fill_with_poison(tensor: torch.Tensor) -> None:
    """Fill a tensor with NaN, -1 bits or True; a quantized one has no such value and is left alone."""
    if tensor.is_quantized:
        return
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype is torch.bool:
        tensor.fill_(value=True)
    else:
        tensor.fill_(-1 if tensor.dtype.is_signed else torch.iinfo(tensor.dtype).max)


def aliases_of(value: Any) -> Any:
    """The same nesting with every tensor replaced by another tensor on the same memory."""
    if isinstance(value, torch.Tensor):
        return _aten.alias.default(value)
    if isinstance(value, tuple | list):
        return type(value)(aliases_of(item) for item in value)
    if isinstance(value, dict):
        return {key: aliases_of(item) for key, item in value.items()}
    return value


def is_composite(function: Any) -> bool:
    """True for an operator that torch itself takes apart; in inference mode it would arrive whole."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return bool(function.has_kernel_for_dispatch_key(key)) or bool(
        torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), key)
    )
