"""Attributes that are other ones while graphs are made and replayed, and put back whatever happens."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from types import TracebackType
from typing import Any

import torch

from breakgraph.errors import ConfigError

__all__ = ["LetsThrough", "swapped"]

_MISSING = object()


@contextmanager
def swapped(target: Any, **attributes: Any) -> Iterator[None]:
    """Set attributes of an object inside a `with` block, and put back what was there whatever happens inside.

    For `around=` of a runner: a static cache in place of the model's own one while graphs are made and replayed.

    Args:
        target: The object; of a module also parameters, buffers and submodules, and other values in their place.
        **attributes: Name -> value. One that only the object's class has is taken off the object again.

    Yields:
        Nothing.

    Raises:
        ConfigError: The object has no such attribute of its own or of its class, or reads another value afterwards.
    """
    with ExitStack() as stack:
        for name, value in attributes.items():
            stack.callback(_swap(target, name, value))
            if getattr(target, name, _MISSING) is not value:
                raise ConfigError(
                    f"swapped() set {name!r} of a {type(target).__name__}, which reads another value there afterwards.",
                    why="The forward would go on with the value that was to be replaced.",
                    fix="Set it where it is read: on the inner object of a wrapper, or in __init__ and not on the class.",
                )
        yield


def _swap(target: Any, name: str, value: Any) -> partial[None]:
    """Set one attribute; returns what puts it back."""
    tables = _tables(target)
    table = next((table for table in tables if name in table), None)
    if table is None and getattr(type(target), name, _MISSING) is _MISSING:
        raise ConfigError(
            f"swapped() got {name!r}, which this {type(target).__name__} does not have of its own.",
            why="Nothing would read it, so nothing would be swapped.",
            fix="Name an attribute that the forward reads, on the object that holds it.",
        )
    if table is None and not tables:  # slots
        before = getattr(target, name)
        setattr(target, name, value)
        return partial(setattr, target, name, before)
    held = _MISSING if table is None else table[name]
    undo = partial(_put_back, tables, table, name, held, () if table is None else tuple(table))
    if table is not None and not _takes(target, table, value):
        del table[name]
    try:
        setattr(target, name, value)
    except BaseException:
        undo()
        raise
    return undo


def _put_back(
    tables: tuple[MutableMapping[str, Any], ...],
    table: MutableMapping[str, Any] | None,
    name: str,
    held: Any,
    order: tuple[str, ...],
) -> None:
    for other in tables:
        if other is not table:
            other.pop(name, None)
    if table is None:
        return
    moved = name not in table
    table[name] = held
    if moved:  # to the end: those that came after it go behind it again
        for later in order[order.index(name) + 1 :]:
            if later in table:
                table[later] = table.pop(later)


def _takes(target: Any, table: MutableMapping[str, Any], value: Any) -> bool:
    """Whether a module puts a value in the place of one that lies in this table, and so keeps the order of it."""
    if not isinstance(target, torch.nn.Module):
        return True
    if table is target._modules:
        return isinstance(value, torch.nn.Module)
    if table is target._parameters:
        return isinstance(value, torch.nn.Parameter)
    if table is target._buffers:
        return isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter)
    return not isinstance(value, torch.nn.Module | torch.nn.Parameter)


def _tables(target: Any) -> tuple[MutableMapping[str, Any], ...]:
    """Where attributes of an object can lie."""
    own = getattr(target, "__dict__", None)
    if own is None:
        return ()
    if isinstance(target, torch.nn.Module):
        return own, target._parameters, target._buffers, target._modules
    return (own,)


class LetsThrough(AbstractContextManager[None]):
    """A context manager of the caller's that cannot swallow an exception: a step that failed has no result."""

    def __init__(self, inner: AbstractContextManager[Any]) -> None:
        self._inner = inner

    def __enter__(self) -> None:
        self._inner.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inner.__exit__(kind, error, trace)
