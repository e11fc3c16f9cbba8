"""The function behind a forward, and what its source does with the parameters that are host data.

This is what is left to judge by where the forward does not run with stand-ins for them.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

from breakgraph.tools.linting.places import Place
from breakgraph.tools.linting.report import Kind, Severity
from breakgraph.tools.linting.source import own_nodes, source_of
from breakgraph.tools.linting.stand_ins import StandIns
from breakgraph.tools.linting.watch import Sighting

__all__ = ["code_of", "host_parameters", "parameter_uses"]


def code_of(forward: Any) -> CodeType | None:
    """The code that a call of a forward runs; None where that is not written in Python.

    Args:
        forward: A module, a function, a method, a partial of one, or an object with `__call__`.
    """
    function = _function_of(forward)
    return None if function is None else function.__code__


def _function_of(forward: Any) -> FunctionType | None:
    while True:
        if isinstance(forward, functools.partial):
            forward = forward.func
        elif isinstance(forward, nn.Module):
            found = inspect.getattr_static(type(forward), "forward", None)  # that of a scripted one is found by code
            if not isinstance(found, FunctionType):
                return None
            forward = found
        elif isinstance(forward, MethodType):
            forward = forward.__func__
        elif isinstance(forward, FunctionType):
            function = inspect.unwrap(forward)
            return function if isinstance(function, FunctionType) else None
        else:
            forward = getattr(type(forward), "__call__", None)  # noqa: B004  # to find it, not to ask whether it is there
            if not isinstance(forward, FunctionType):
                return None


def host_parameters(forward: Callable[..., Any], inputs: Sequence[Any], kwargs: dict[str, Any]) -> set[str]:
    """The parameters of a forward that hold host data.

    Args:
        forward: The forward.
        inputs: Its inputs.
        kwargs: Its keyword inputs.
    """
    bare = forward.forward if isinstance(forward, nn.Module) else forward
    try:
        given = inspect.signature(bare).bind(*inputs, **kwargs).arguments
    except (TypeError, ValueError):
        return set()
    return {name for name, value in given.items() if _is_host_data(value)}


def parameter_uses(forward: Callable[..., Any], names: set[str]) -> Iterator[Sighting]:
    """Branches and loops of a forward's own source that name one of its parameters.

    Args:
        forward: The forward.
        names: The parameters.
    """
    function = _function_of(forward)
    source = None if function is None else source_of(function.__code__.co_filename, function.__globals__)
    node = None if function is None or source is None else source.function_at(function.__code__.co_firstlineno + 1)
    if function is None or source is None or node is None:
        return
    code = function.__code__
    for statement in (each for each in ast.walk(node) if isinstance(each, ast.stmt)):
        for decided in _decisions(statement):
            if any(isinstance(each, ast.Name) and each.id in names for each in ast.walk(decided)):
                place = Place(code.co_filename, decided.lineno, code.co_qualname, function.__module__)
                severity = Severity.NOTE if source.is_guard(decided.lineno) else Severity.FAILS
                yield Sighting(Kind.HOST_BRANCH, place, severity, "a branch or loop on host data of the inputs")


def _decisions(statement: ast.stmt) -> Iterator[ast.expr]:
    """The expressions of a statement that decide what runs."""
    for node in own_nodes(statement):
        if isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert):
            yield node.test
        elif isinstance(node, ast.For | ast.comprehension):
            yield node.iter


def _is_host_data(value: Any) -> bool:
    stand_ins = StandIns()
    stand_ins.of(value)
    return stand_ins.count > 0
