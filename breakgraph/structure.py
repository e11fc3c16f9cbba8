"""Flatten and rebuild what a break receives or returns.

Tuples, lists, dicts, named tuples, everything registered with torch's pytree (such as a model's output class), and
attrs classes and dataclasses, which pytree takes for leaves. Registering those with pytree was rejected: that changes
how the user's classes behave everywhere else.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar, cast

import attrs
import torch
from torch.utils import _pytree as pytree

__all__ = ["flatten", "is_changeable_object", "map_leaves", "same_containers", "snapshot", "storage_address"]

T = TypeVar("T")

_UNSET = object()
_PLAIN = (torch.Tensor, int, float, bool, str, bytes, type(None))


def flatten(value: Any, *, stop: Callable[[Any], bool] | None = None) -> tuple[list[tuple[str, Any]], dict[str, type]]:
    """Flatten a value to leaves with paths, and to the type of every container by path.

    Args:
        value: Any value.
        stop: Tells what is to be one leaf although it could be opened.

    Returns:
        The leaves as (path, leaf), such as `("[0].hidden", tensor)`, in order, and {path: container type}. A value
        that is no container is one leaf with an empty path.
    """
    leaves: list[tuple[str, Any]] = []
    nodes: dict[str, type] = {}
    _walk(value, path="", leaves=leaves, nodes=nodes, stop=stop)
    return leaves, nodes


def map_leaves(value: T, function: Callable[[str, Any], Any], *, stop: Callable[[Any], bool] | None = None) -> T:
    """A copy of `value` with every leaf replaced by `function(path, leaf)`; `value` itself where nothing changed."""
    if isinstance(value, _PLAIN):  # nearly every argument of a break: worth a microsecond each at capture
        return cast(T, function("", value))
    return cast(T, _map(value, function, path="", stop=stop))


def _walk(
    value: Any, *, path: str, leaves: list[tuple[str, Any]], nodes: dict[str, type], stop: Callable[[Any], bool] | None
) -> None:
    children = None if stop is not None and stop(value) else _children(value)
    if children is None:
        leaves.append((path, value))
        return
    nodes[path] = type(value)
    for key, child in children:
        if isinstance(child, _PLAIN):
            leaves.append((path + key, child))
        else:
            _walk(child, path=path + key, leaves=leaves, nodes=nodes, stop=stop)


def _map(value: Any, function: Callable[[str, Any], Any], *, path: str, stop: Callable[[Any], bool] | None) -> Any:
    children = None if stop is not None and stop(value) else _children(value)
    if children is None:
        return function(path, value)
    new = [(key, child, _map(child, function, path=path + key, stop=stop)) for key, child in children]
    if all(child is mapped for _, child, mapped in new):
        return value
    return _rebuilt(value, [mapped for _, _, mapped in new], keys=[key for key, _ in children])


def _children(value: Any) -> list[tuple[str, Any]] | None:
    """(key, child) pairs of a container, or None for a leaf."""
    if isinstance(value, _PLAIN):
        return None
    kind = type(value)
    if kind is tuple or kind is list:
        return [(f"[{index}]", child) for index, child in enumerate(value)]
    if kind is dict:
        return list(zip(_keys(value, len(value)), value.values(), strict=True))
    if _is_named_tuple(value):
        return [(f".{name}", child) for name, child in zip(value._fields, value, strict=True)]
    # The registry, not `tree_flatten`: its recursion leaves a reference cycle that holds the tensors, and with garbage
    # collection off during a capture every break input would keep its block of the pool.
    node = pytree.SUPPORTED_NODES.get(kind)
    if node is not None:
        children, _ = node.flatten_fn(value)
        return list(zip(_keys(value, len(children)), children, strict=True))
    fields = _fields(value)
    return None if fields is None else [(f".{name}", child) for name, child in fields]


def _rebuilt(value: Any, children: list[Any], *, keys: list[str]) -> Any:
    kind = type(value)
    if kind is tuple or kind is list:
        return kind(children)
    if kind is dict:
        return dict(zip(value, children, strict=True))
    if _is_named_tuple(value):
        return kind._make(children)
    node = pytree.SUPPORTED_NODES.get(kind)
    if node is not None:
        _, context = node.flatten_fn(value)
        return node.unflatten_fn(children, context)
    clone = copy.copy(value)
    for key, child in zip(keys, children, strict=True):
        # Frozen and slotted classes refuse setattr; their constructor may validate or convert, so it is not called.
        object.__setattr__(clone, key[1:], child)
    return clone


def _is_named_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and isinstance(getattr(type(value), "_fields", None), tuple)


def _fields(value: Any) -> list[tuple[str, Any]] | None:
    if isinstance(value, type):
        return None
    if attrs.has(type(value)):
        names = [field.name for field in attrs.fields(type(value))]
    elif dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
    else:
        return None
    found = [(name, getattr(value, name, _UNSET)) for name in names]
    return [(name, child) for name, child in found if child is not _UNSET]  # a field may not be set yet


def _keys(value: Any, count: int) -> list[str]:
    if not isinstance(value, dict):
        return [f"[{index}]" for index in range(count)]
    keys = [f"[{key!r}]" for key in value]
    if len(set(keys)) < len(keys):  # two keys of one repr are still two leaves
        return [f"{key}#{index}" for index, key in enumerate(keys)]
    return keys


def snapshot(value: Any) -> Any:
    """Copies of all containers of a nesting; leaves and objects with an identity are the same objects.

    An object with an identity is anything that its class lets others change: an attrs class or dataclass that is not
    frozen is passed as it is, like an object of any other class.
    """
    if isinstance(value, _PLAIN) or is_changeable_object(value):
        return value
    children = _children(value)
    if children is None:
        return value
    return _rebuilt(value, [snapshot(child) for _, child in children], keys=[key for key, _ in children])


def same_containers(value: Any, other: Any) -> bool:
    """True where two nestings hold the very same leaves, in containers of the same kind."""
    if value is other:
        return True
    if type(value) is not type(other) or is_changeable_object(value):
        return False
    mine, theirs = _children(value), _children(other)
    if mine is None or theirs is None or len(mine) != len(theirs):
        return False
    return all(
        key == key_there and same_containers(child, child_there)
        for (key, child), (key_there, child_there) in zip(mine, theirs, strict=True)
    )


def is_changeable_object(value: Any) -> bool:
    """True for an object of an attrs class or dataclass that is not frozen: it has an identity, and is not a value."""
    kind = type(value)
    if attrs.has(kind):
        return getattr(kind.__setattr__, "__name__", "") != "_frozen_setattrs"
    return dataclasses.is_dataclass(kind) and not kind.__dataclass_params__.frozen  # type: ignore[attr-defined]


def storage_address(tensor: torch.Tensor) -> int:
    """Address of a tensor's storage; 0 where it has no storage of its own (sparse, batched, a wrapper subclass)."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0
