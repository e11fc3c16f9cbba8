"""Stand-ins for the host data of example inputs: numbers and lists that report where a forward depends on them.

A replay runs no Python, so a length that decided a branch, a loop or a shape at capture decides it for ever. What is computed
from a stand-in is one as well. `bool` has no subclasses and a string is an option, so both go in as they are.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, SupportsIndex

import attrs
import numpy as np
import torch

__all__ = ["StandIns", "has_stand_in", "is_stand_in", "listening", "plain"]

Use = Callable[[str], None]
_listener: list[Use] = []


@contextmanager
def listening(use: Use) -> Iterator[None]:
    """Sends what stand-ins report to `use(what)` inside a `with` block.

    Args:
        use: Called on the stack of the code that used the stand-in.
    """
    _listener.append(use)
    try:
        yield
    finally:
        _listener.pop()


def _used(what: str) -> None:
    if _listener:
        _listener[-1](what)


class _Int(int):
    """A whole number of the inputs."""

    __slots__ = ()


class _Float(float):
    """A number of the inputs."""

    __slots__ = ()


class _List(list[Any]):
    """A list of numbers of the inputs."""

    def __iter__(self) -> Iterator[Any]:
        _used("a loop over")
        return super().__iter__()

    def __len__(self) -> int:
        _used("the length of")
        return super().__len__()

    def __contains__(self, item: object) -> bool:
        _used("a search in")
        return super().__contains__(item)

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        return _List(found) if isinstance(key, slice) else found


class _Tuple(tuple[Any, ...]):
    """A tuple of numbers of the inputs."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Any]:
        _used("a loop over")
        return super().__iter__()

    def __len__(self) -> int:
        _used("the length of")
        return super().__len__()

    def __contains__(self, item: object) -> bool:
        _used("a search in")
        return super().__contains__(item)

    def __getitem__(self, key: SupportsIndex | slice) -> Any:
        found = super().__getitem__(key)
        return _Tuple(found) if isinstance(key, slice) else found


class _Array(np.ndarray[Any, Any]):
    """An array of the inputs."""

    def __iter__(self) -> Iterator[Any]:
        _used("a loop over")
        return map(_stand_in_of, super().__iter__())

    def __bool__(self) -> bool:
        _used("a branch on")
        return bool(np.asarray(self))

    def __len__(self) -> int:
        _used("the length of")
        return len(np.asarray(self))

    def __getitem__(self, key: Any) -> Any:
        return _stand_in_of(super().__getitem__(key))

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        found = super().__array_wrap__(array, context, return_scalar)
        if not np.ndim(found) and np.asarray(found).dtype.kind == "b":  # any(), all()
            _used("a comparison with")
        return _stand_in_of(found[()] if isinstance(found, np.ndarray) and not found.ndim else found)

    def tolist(self) -> Any:
        return _stand_in_of(np.asarray(self).tolist())

    def item(self, *args: Any) -> Any:
        return _stand_in_of(np.asarray(self).item(*args))


_KINDS: tuple[type, ...] = (_Int, _Float, _List, _Tuple, _Array)
_COMPARED = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_COMPUTED = ("add", "sub", "mul", "floordiv", "truediv", "mod", "pow", "divmod", "lshift", "rshift", "and", "or", "xor")
_UNARY = ("neg", "abs", "pos", "invert", "round", "trunc", "ceil", "floor")


def _add_operators(kind: type, base: type) -> None:
    def comparison(name: str, sign: str) -> Callable[[Any, Any], Any]:
        method = getattr(base, f"__{name}__")

        def compare(self: Any, other: Any) -> Any:
            result = method(self, other)
            if result is not NotImplemented:
                _used(f"a comparison ({sign}) with")
            return result

        return compare

    def computation(method: Any) -> Callable[..., Any]:
        return lambda self, *args: _stand_in_of(method(self, *args))

    def conversion(method: Any, name: str) -> Callable[[Any], Any]:
        def convert(self: Any) -> Any:
            _used(f"{name}() of" if name != "bool" else "a branch on")
            return method(self)

        return convert

    for name, sign in _COMPARED.items():
        setattr(kind, f"__{name}__", comparison(name, sign))
    for name in (*_COMPUTED, *(f"r{name}" for name in _COMPUTED), *_UNARY):
        method = getattr(base, f"__{name}__", None)
        if method is not None:
            setattr(kind, f"__{name}__", computation(method))
    for name in ("bool", "int", "float"):
        setattr(kind, f"__{name}__", conversion(getattr(base, f"__{name}__"), name))
    setattr(kind, "__hash__", base.__hash__)  # noqa: B010  # a class with __eq__ and without it cannot be a key


_add_operators(_Int, int)
_add_operators(_Float, float)


def is_stand_in(value: Any) -> bool:
    """True for a number, list or array that stands for one of the inputs, or was computed from one."""
    return type(value) in _KINDS


def has_stand_in(value: Any, *, depth: int = 4) -> bool:
    """True where arguments of an operator hold a stand-in; they are tuples, lists, dicts and slices only.

    Args:
        value: The arguments, or any other value.
        depth: How deep to look: a list of the user's may hold itself.
    """
    if is_stand_in(value):
        return True
    if not depth:
        return False
    items: Iterable[Any] = ()
    kind = type(value)  # `isinstance` would ask an object of the user's for its class, which may be code of theirs
    if issubclass(kind, tuple | list):
        items = value
    elif issubclass(kind, dict):
        items = value.values()
    elif kind is slice:
        items = (value.start, value.stop, value.step)
    return any(has_stand_in(item, depth=depth - 1) for item in items)


def plain(value: Any) -> Any:
    """The same value without stand-ins: numbers, lists, dicts, slices.

    Args:
        value: Arguments of an operator.
    """
    kind = type(value)
    if kind is _Int:
        return int.__int__(value)
    if kind is _Float:
        return float.__float__(value)
    if kind is _Array:
        return value.view(np.ndarray)
    if kind is list or kind is _List:
        return [plain(item) for item in list.__iter__(value)]
    if kind is tuple or kind is _Tuple:
        return tuple([plain(item) for item in tuple.__iter__(value)])
    if kind is dict:
        return {key: plain(item) for key, item in value.items()}
    if kind is slice:
        return slice(plain(value.start), plain(value.stop), plain(value.step))
    return value


def _stand_in_of(value: Any) -> Any:
    """A stand-in for a number, or for a sequence of numbers; anything else as it is."""
    kind = type(value)
    if kind is int:
        return _Int(value)
    if kind is float:
        return _Float(value)
    if isinstance(value, np.integer):
        return _Int(int(value))
    if isinstance(value, np.floating):
        return _Float(float(value))
    if kind is np.ndarray:
        return value.view(_Array)
    if (kind is list or kind is tuple) and value and _is_host_data(value):
        items = [_stand_in_of(item) for item in value]
        return _List(items) if kind is list else _Tuple(items)
    return value


def _is_host_data(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return type(value) in (list, tuple, _List, _Tuple) and all(map(_is_host_data, value))
    return type(value) in (int, float, _Int, _Float)


class StandIns:
    """Makes example inputs with stand-ins in place of their host data.

    Attributes:
        count: How many leaves of the inputs have one.
    """

    def __init__(self) -> None:
        self.count = 0
        self._copies: dict[int, Any] = {}
        self._originals: dict[int, Any] = {}
        self._held: list[Any] = []

    def of(self, value: Any) -> Any:
        """A copy of a nesting: containers, dataclasses and attrs objects are copied, once each; tensors are the same.

        Args:
            value: An input.
        """
        made = _stand_in_of(value)
        if made is not value:
            self.count += 1
            return self._remember(value, made)
        if id(value) in self._copies:
            return self._copies[id(value)]
        kind = type(value)
        if kind is list:
            copied: Any = self._remember(value, [])
            copied.extend(self.of(item) for item in value)
            return copied
        if kind is dict:
            copied = self._remember(value, {})
            copied.update((key, self.of(item)) for key, item in value.items())
            return copied
        if isinstance(value, tuple):
            items = [self.of(item) for item in value]
            if kind is tuple:
                return self._remember(value, tuple(items))
            return self._remember(value, kind._make(items)) if _is_named_tuple(kind) else value
        names = _fields(value)
        if not names:
            return value
        with contextlib.suppress(Exception):  # an object that cannot be copied goes in as it is
            copied = copy.copy(value)
            self._remember(value, copied)
            for name in names:
                object.__setattr__(copied, name, self.of(getattr(value, name)))
            return copied
        return value

    def made(self, value: Any) -> bool:
        """True for a copy of an input that was made here, which holds host data or is next to some.

        Args:
            value: Any object.
        """
        return id(value) in self._originals

    def original(self, value: Any) -> Any:
        """The input that a copy stands for, or the value without stand-ins.

        Args:
            value: An argument of a break.
        """
        if id(value) in self._originals:
            return self._originals[id(value)]
        kind = type(value)
        if kind is not list and kind is not tuple and kind is not dict:
            return plain(value)
        items = list(value.values()) if kind is dict else list(value)
        found = [self.original(item) for item in items]
        if all(item is original for item, original in zip(items, found, strict=True)):
            return value  # the break may write it
        return dict(zip(value, found, strict=True)) if kind is dict else kind(found)

    def _remember(self, original: Any, made: Any) -> Any:
        self._held += (original, made)  # so that their ids stay theirs
        if not isinstance(made, int | float):
            self._copies[id(original)] = made
        self._originals[id(made)] = original
        return made


def _is_named_tuple(kind: type) -> bool:
    """True for a named tuple."""
    return isinstance(getattr(kind, "_fields", None), tuple)


def _fields(value: Any) -> list[str]:
    if isinstance(value, type | torch.Tensor):
        return []
    if attrs.has(type(value)):
        return [field.name for field in attrs.fields(type(value))]
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value)]
    return []
