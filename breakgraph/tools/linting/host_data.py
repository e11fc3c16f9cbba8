"""Stand-ins for the host data of example inputs: numbers and lists that report where a forward depends on them.

A replay runs no Python, so a length that decided a branch, a loop or a shape at capture decides it for ever. What is computed
from a stand-in is one as well. `bool` has no subclasses and a string is an option, so both go in as they are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, SupportsIndex

import numpy as np

__all__ = ["has_stand_in", "is_stand_in", "listening", "plain", "stand_in_of"]

Use = Callable[[str], None]


class _Listeners(threading.local):
    """Who is told of uses, in each thread: two threads may run forwards under watch."""

    def __init__(self) -> None:
        self.stack: list[Use] = []


_listeners = _Listeners()


@contextmanager
def listening(use: Use) -> Iterator[None]:
    """Sends what stand-ins report to `use(what)` inside a `with` block.

    Args:
        use: Called on the stack of the code that used the stand-in.
    """
    _listeners.stack.append(use)
    try:
        yield
    finally:
        _listeners.stack.pop()


def _used(what: str) -> None:
    if _listeners.stack:
        _listeners.stack[-1](what)


class _Int(int):
    """A whole number of the inputs."""

    def bit_length(self) -> int:
        return stand_in_of(super().bit_length())  # type: ignore[no-any-return]

    def bit_count(self) -> int:
        return stand_in_of(super().bit_count())  # type: ignore[no-any-return]


class _Float(float):
    """A number of the inputs."""


class _Scalar:
    """A number of an array of the inputs: whatever numpy's own has, this has."""

    scalar: Any

    def __getattr__(self, name: str) -> Any:
        if name == "scalar":
            raise AttributeError(name)
        found = getattr(self.scalar, name)
        if not callable(found) or name == "dtype":
            return found
        return lambda *args, **kwargs: stand_in_of(found(*map(plain, args), **kwargs))


class _NumpyInt(_Scalar, _Int):
    """A whole number of an array of the inputs."""


class _NumpyFloat(_Scalar, _Float):
    """A number of an array of the inputs."""


def _scalar_of(value: np.integer[Any] | np.floating[Any]) -> _NumpyInt | _NumpyFloat:
    found = _NumpyInt(int(value)) if isinstance(value, np.integer) else _NumpyFloat(float(value))
    found.scalar = value
    return found


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

    def copy(self) -> _List:
        return _List(list.__iter__(self))

    def __add__(self, other: Any) -> Any:
        return _List(super().__add__(other))

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
        return map(stand_in_of, super().__iter__())

    def __bool__(self) -> bool:
        _used("a branch on")
        return bool(np.asarray(self))

    def __len__(self) -> int:
        _used("the length of")
        return len(np.asarray(self))

    def __getitem__(self, key: Any) -> Any:
        return stand_in_of(super().__getitem__(key))

    @property
    def shape(self) -> Any:
        return stand_in_of(np.asarray(self).shape)

    @shape.setter
    def shape(self, value: Any) -> None:
        np.ndarray.shape.__set__(self, value)  # type: ignore[attr-defined]

    @property
    def size(self) -> Any:
        return stand_in_of(np.asarray(self).size)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        found = super().__array_function__(function, types, args, kwargs)
        if isinstance(found, bool | np.bool_):  # array_equal(), allclose()
            _used("a comparison with")
        return type(found)(map(stand_in_of, found)) if type(found) in (list, tuple) else stand_in_of(found)

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        found = super().__array_wrap__(array, context, return_scalar)
        bare = np.asarray(found)
        if not bare.ndim and bare.dtype.kind == "b":  # any(), all()
            _used("a comparison with")
        return stand_in_of(bare[()] if not bare.ndim else found)

    def tolist(self) -> Any:
        return stand_in_of(np.asarray(self).tolist())

    def item(self, *args: Any) -> Any:
        return stand_in_of(np.asarray(self).item(*args))


_KINDS: tuple[type, ...] = (_Int, _Float, _NumpyInt, _NumpyFloat, _List, _Tuple, _Array)
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

    def computation(method: Any, name: str) -> Callable[..., Any]:
        def compute(self: Any, *args: Any) -> Any:
            if isinstance(self, _Scalar):
                found = getattr(self.scalar, f"__{name}__", None)
                result = NotImplemented if found is None else found(*map(plain, args))
                return stand_in_of(method(self, *args) if result is NotImplemented else result)
            if name in ("mul", "rmul") and isinstance(args[0], list | tuple | str):
                _used("a repetition by")
            return stand_in_of(method(self, *args))

        return compute

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
            setattr(kind, f"__{name}__", computation(method, name))
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
    if kind is _NumpyInt or kind is _NumpyFloat:
        return value.scalar
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


def stand_in_of(value: Any) -> Any:
    """A stand-in for a number, or for a sequence of numbers; anything else as it is.

    Args:
        value: Any value.
    """
    kind = type(value)
    if kind is int:
        return _Int(value)
    if kind is float:
        return _Float(value)
    if isinstance(value, np.integer | np.floating):
        return _scalar_of(value)
    if kind is np.ndarray:
        return value.view(_Array)
    if (kind is list or kind is tuple) and value and _is_host_data(value):
        items = [stand_in_of(item) for item in value]
        return _List(items) if kind is list else _Tuple(items)
    return value


def _is_host_data(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return type(value) in (list, tuple, _List, _Tuple) and all(map(_is_host_data, value))
    return type(value) in (int, float, _Int, _Float, _NumpyInt, _NumpyFloat)
