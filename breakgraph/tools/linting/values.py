"""The value of an expression at a line that is about to run, without running anything of the code under test."""

from __future__ import annotations

import ast
import functools
import types
from types import FrameType
from typing import Any

import torch
from torch import nn

__all__ = ["UNKNOWN", "attribute_of", "evaluate"]

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
    """The value of `type(x)` or `getattr(x, name)`, the two calls that only look something up."""
    function = evaluate(call.func, frame) if isinstance(call.func, ast.Name) else UNKNOWN
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
    kind = type(value)
    if not isinstance(value, type | types.ModuleType):
        for base in kind.__mro__:
            if isinstance(base.__dict__.get(name), _COMPUTED):
                return UNKNOWN
    try:
        return object.__getattribute__(value, name) if not isinstance(value, type) else getattr(value, name)
    except Exception:
        return UNKNOWN


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
