"""The value of an expression at a line that is about to run, without running anything of the code under test."""

from __future__ import annotations

import ast
import functools
import types
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn

__all__ = ["UNKNOWN", "attribute_of", "evaluate", "is_readable"]

UNKNOWN = object()
"""What an expression evaluates to that would have to run code."""

_COMPUTED = (property, functools.cached_property)
_MODULE_TABLES = ("_parameters", "_buffers", "_modules")
_INDEXED = (list, tuple, dict)


def evaluate(expression: ast.expr, frame: FrameType) -> Any:
    """The value of a name, an attribute, or an item of a plain container.

    Args:
        expression: Any expression.
        frame: Where it stands.

    Returns:
        The value, or `UNKNOWN` where it would take a call, a property or an operator of a tensor to know it; `type(x)` and
        `getattr(x, name)` are looked up.
    """
    if isinstance(expression, ast.Constant):
        return expression.value
    if isinstance(expression, ast.Name):
        for scope in (frame.f_locals, frame.f_globals, frame.f_builtins):
            if expression.id in scope:
                return scope[expression.id]
        return UNKNOWN
    if isinstance(expression, ast.Attribute):
        return attribute_of(evaluate(expression.value, frame), expression.attr)
    if isinstance(expression, ast.Subscript):
        container, key = evaluate(expression.value, frame), evaluate(expression.slice, frame)
        return _item(container, key)
    if isinstance(expression, ast.Call):
        return _looked_up(expression, frame)
    if isinstance(expression, ast.JoinedStr):
        parts = [evaluate(part, frame) for part in expression.values]
        return "".join(parts) if all(isinstance(part, str) for part in parts) else UNKNOWN
    if isinstance(expression, ast.FormattedValue) and expression.format_spec is None and expression.conversion < 0:
        return evaluate(expression.value, frame)
    return UNKNOWN


def _looked_up(call: ast.Call, frame: FrameType) -> Any:
    """The value of `type(x)`, `getattr(x, name)` or `super()`, the calls that only look something up."""
    function = evaluate(call.func, frame) if isinstance(call.func, ast.Name) else UNKNOWN
    if function is super and not call.args and frame.f_code.co_argcount:
        return frame.f_locals.get(frame.f_code.co_varnames[0], UNKNOWN)
    if function is type and len(call.args) == 1:
        value = evaluate(call.args[0], frame)
        return UNKNOWN if value is UNKNOWN else type(value)
    if function is getattr and len(call.args) == 2:
        name = evaluate(call.args[1], frame)
        return attribute_of(evaluate(call.args[0], frame), name) if isinstance(name, str) else UNKNOWN
    return UNKNOWN


def attribute_of(value: Any, name: str) -> Any:
    """An attribute that needs no code of the user's to be read; `UNKNOWN` for any other.

    Args:
        value: The object, or `UNKNOWN`.
        name: The attribute's.
    """
    # Of a tensor even `shape` would go through the modes that watch.
    if value is UNKNOWN or isinstance(value, torch.Tensor):
        return UNKNOWN
    if isinstance(value, nn.Module):
        for table in ("__dict__", *_MODULE_TABLES):
            found = value.__dict__ if table == "__dict__" else value.__dict__.get(table, {})
            if name in found:
                return found[name]
    if not is_readable(value, name):
        return UNKNOWN
    if isinstance(value, type):
        return _got(getattr, value, name)
    # The method of a class in C, such as that of `threading.local`, is no code of the user's either.
    getter: Any = type(value).__getattribute__
    is_plain = isinstance(value, types.ModuleType) or not isinstance(getter, types.WrapperDescriptorType)
    return _got(object.__getattribute__ if is_plain else getter, value, name)


def _got(getter: Callable[[Any, str], Any], value: Any, name: str) -> Any:
    try:
        return getter(value, name)
    except Exception:
        return UNKNOWN


def is_readable(value: Any, name: str) -> bool:
    """False for an attribute that code of the user's would have to compute.

    Args:
        value: Any object.
        name: The attribute's.
    """
    if isinstance(value, type | types.ModuleType):
        return True
    return not any(isinstance(base.__dict__.get(name), _COMPUTED) for base in type(value).__mro__)


def _item(container: Any, key: Any) -> Any:
    if key is UNKNOWN or container is UNKNOWN:
        return UNKNOWN
    if isinstance(container, nn.ModuleList | nn.Sequential | nn.ModuleDict):
        names = list(container._modules)
        if isinstance(key, int) and -len(names) <= key < len(names):
            key = names[key]
        return container._modules.get(key, UNKNOWN) if isinstance(key, str) else UNKNOWN
    if type(container) not in _INDEXED:
        return UNKNOWN
    try:
        return container[key]
    except Exception:
        return UNKNOWN
