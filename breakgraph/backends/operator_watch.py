"""The rules of what a segment may hold, applied to code that is only run: which operators could not be captured, and where.

Nothing is recorded and nothing is refused, so one run finds all of them. The rules look at operators, so they hold on any
device; on CUDA torch itself finds the waits inside its kernels besides.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from breakgraph.backends.emulated_rules import host_read, illegal, is_composite, tensors_in
from breakgraph.call_site import user_line
from breakgraph.structure import storage_address

__all__ = ["watched_operators", "watched_row_numbers"]

_aten = torch.ops.aten
# These take row numbers for places, which they are.
_PLACES = frozenset(
    {
        _aten.index,
        _aten.index_put,
        _aten.index_put_,
        _aten._index_put_impl_,
        _aten.index_select,
        _aten.index_add,
        _aten.index_add_,
        _aten.index_copy,
        _aten.index_copy_,
        _aten.gather,
        _aten.scatter,
        _aten.scatter_,
        _aten.scatter_add,
        _aten.scatter_add_,
    }
)

Report = Callable[[str, str], None]
_WAITED = "synchronizing CUDA operation"


@contextmanager
def watched_operators(report: Report, *, device: torch.device) -> Iterator[None]:
    """Report what could not be captured inside a `with` block, which runs as ever.

    Args:
        report: Called as `report(what, line)`, such as `("Tensor.tolist()", "model.py:12 in forward")`. A read that shows
            as a function and as an operator is reported twice.
        device: Where the work is. On CUDA torch is asked besides, around each operator, to fail where a kernel waits: a wait
            of another thread in that moment would fail as well, so watch before serving begins.
    """
    with _Functions(report), _Operators(report, waits=device.type == "cuda"):
        yield


class _Functions(TorchFunctionMode):
    def __init__(self, report: Report) -> None:
        super().__init__()
        self._report = report

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        read = host_read(func, args, kwargs)
        if read is not None:
            self._report(read, user_line())
        return func(*args, **kwargs)


class _Operators(TorchDispatchMode):
    def __init__(self, report: Report, *, waits: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._report = report
        self._waits = waits

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_composite(func):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        refusal = illegal(func, args, kwargs)
        if refusal is not None:
            self._report(refusal[0], user_line())
        if not self._waits:
            return func(*args, **kwargs)
        result, waited = _run_where_waits_fail(func, args, kwargs)
        if waited and refusal is None:
            self._report(f"{func.overloadpacket.__name__}, which waits for the device,", user_line())
        return result


def _run_where_waits_fail(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, bool]:
    """Run an operator, and say whether it waits for the device; one that does has failed first and is run again."""
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls the mode a prototype, once
            torch.cuda.set_sync_debug_mode("error")
        return func(*args, **kwargs), False
    except RuntimeError as error:
        if _WAITED not in str(error):
            raise
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return func(*args, **kwargs), True


@contextmanager
def watched_row_numbers(report: Callable[[str], None], *, rows: int) -> Iterator[None]:
    """Report where code computes with numbers that it gave the rows of a step itself, inside a `with` block.

    A step packs sequences, and chunks of them: the third row need not be the third token. To index with such numbers is
    right, to make values of them is not.

    Args:
        report: Called with the line that makes floating-point values of row numbers.
        rows: Of the step.
    """
    with _RowNumbers(report, rows=rows):
        yield


class _RowNumbers(TorchDispatchMode):
    def __init__(self, report: Callable[[str], None], *, rows: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._report = report
        self._rows = rows
        self._numbers: dict[int, torch.Tensor] = {}  # held, so that no other tensor gets an address of theirs

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        made = tensors_in(result)
        if func.overloadpacket is _aten.arange:
            follows = result.numel() == self._rows
        else:
            follows = func.overloadpacket not in _PLACES and any(
                storage_address(tensor) in self._numbers for tensor in tensors_in((args, kwargs)) if tensor.numel()
            )
        if follows and any(tensor.is_floating_point() for tensor in made):
            self._report(user_line())
        elif follows:
            self._numbers.update((storage_address(tensor), tensor) for tensor in made if tensor.numel())
        return result
