"""Puts back what runs of a forward change: tensors, containers of the inputs, random numbers."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
from collections import UserDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import numpy as np
import torch
from torch import nn

from breakgraph.structure import flatten
from breakgraph.tools.linting.state import is_container, refill
from breakgraph.tools.linting.values import attribute_of

__all__ = ["containers_of", "modules_of", "restored", "tensors_of"]


def modules_of(forward: Any, inputs: Any) -> list[nn.Module]:
    """The modules that a callable can be seen to hold: itself, what it is bound to, partial arguments, its closure.

    Args:
        forward: Any callable.
        inputs: Its example inputs, modules among them as well.
    """
    found: dict[int, nn.Module] = {}
    seen: set[int] = set()
    stack: list[Any] = [forward, *(leaf for _, leaf in flatten(inputs)[0])]
    while stack:
        value = stack.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            found[id(value)] = value
        elif isinstance(value, functools.partial):
            stack += [value.func, *value.args, *value.keywords.values()]
        else:
            stack += [getattr(value, "__self__", None), getattr(value, "__wrapped__", None)]
            for cell in getattr(value, "__closure__", None) or ():
                try:
                    stack.append(cell.cell_contents)
                except ValueError:  # a variable that is not set yet
                    continue
            if not isinstance(value, type) and not callable(getattr(value, "__code__", None)):
                stack += [each for each in getattr(value, "__dict__", {}).values() if isinstance(each, nn.Module)]
    return list(found.values())


def tensors_of(inputs: Any, modules: Iterable[nn.Module]) -> list[torch.Tensor]:
    """The tensors of example inputs, and the buffers of modules, once each; parameters would double the memory of a model.

    Args:
        inputs: A nesting.
        modules: Modules.
    """
    tensors = [leaf for _, leaf in flatten(inputs)[0] if isinstance(leaf, torch.Tensor)]
    for module in modules:
        tensors += module.buffers()
    return list({id(tensor): tensor for tensor in tensors}.values())


def containers_of(inputs: Any) -> list[Any]:
    """The lists, dicts, sets and arrays in a nesting of containers and data classes, once each.

    Args:
        inputs: A nesting; it may hold itself.
    """
    found: list[Any] = []
    seen: dict[int, Any] = {}
    stack: list[Any] = [inputs]
    while stack:
        value = stack.pop()
        if id(value) in seen or isinstance(value, torch.Tensor | nn.Module | type):
            continue
        seen[id(value)] = value
        if is_container(value):
            found.append(value)
        if isinstance(value, dict):
            stack += value.values()
        elif isinstance(value, list | tuple | deque):
            stack += value
        elif isinstance(value, UserDict):
            stack.append(value.data)
        elif attrs.has(type(value)) or dataclasses.is_dataclass(value):
            fields = attrs.fields(type(value)) if attrs.has(type(value)) else dataclasses.fields(value)
            stack += [attribute_of(value, field.name) for field in fields]
    return found


@attrs.frozen(eq=False)
class _Kept:
    """A tensor, its values, and the memory and the places in it that it had."""

    tensor: torch.Tensor
    values: torch.Tensor
    memory: tuple[Any, ...] | None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Kept:
        memory = None
        with contextlib.suppress(RuntimeError, NotImplementedError):  # a sparse one has no memory of its own
            memory = (tensor.untyped_storage(), tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        return cls(tensor, tensor.detach().clone(), memory)

    def put_back(self) -> None:
        if self.tensor.shape != self.values.shape and self.memory is not None:  # `resize_`
            self.tensor.set_(*self.memory)
        if self.tensor.shape == self.values.shape:
            self.tensor.copy_(self.values)


def _items(container: Any) -> Any:
    """A copy of a container, without a constructor of the user's."""
    if isinstance(container, np.ndarray):
        return container.copy()
    return dict(container.items()) if isinstance(container, dict) else list(container)


def _put_back(container: Any, before: Any) -> None:
    """Puts items back where others are in a container; one that nobody has touched is left alone."""
    if not isinstance(container, np.ndarray):
        now = _items(container)
        pairs = (each.items() if isinstance(each, dict) else enumerate(each) for each in (now, before))
        if len(now) == len(before) and all(
            a is b and (k is m or k == m) for (k, a), (m, b) in zip(*pairs, strict=True)
        ):
            return
    refill(container, before)


@contextmanager
def restored(tensors: Iterable[torch.Tensor], *, containers: Iterable[Any]) -> Iterator[Callable[[], None]]:
    """Puts tensors, containers and the default random generators of torch, Python and numpy back at the end of a `with` block.

    Args:
        tensors: What the block may write; their values are copied first.
        containers: Lists, dicts, sets and arrays that it may change.

    Yields:
        Puts them back when it is called, for between two runs.
    """
    kept = [_Kept.of(tensor) for tensor in tensors if not tensor.is_meta]
    held = [(container, _items(container)) for container in containers]
    generators = [torch.default_generator, *torch.cuda.default_generators]
    drawn = [generator.get_state() for generator in generators]
    of_python, of_numpy = random.getstate(), np.random.get_state()

    def put_back() -> None:
        with torch.inference_mode():  # the one mode in which normal and inference tensors may both be written
            for each in kept:
                # One whose elements share memory, such as an expanded mask, cannot be written, neither here nor by a forward.
                with contextlib.suppress(RuntimeError):
                    each.put_back()
        for container, before in held:
            with contextlib.suppress(Exception):  # an array may be read-only
                _put_back(container, before)
        for generator, state in zip(generators, drawn, strict=True):
            generator.set_state(state)
        random.setstate(of_python)
        np.random.set_state(of_numpy)

    try:
        yield put_back
    finally:
        put_back()
