"""Puts back what runs of a forward change: tensors, containers of the inputs, random numbers."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from breakgraph.structure import flatten

__all__ = ["modules_of", "restored", "tensors_of"]


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


@contextmanager
def restored(tensors: Iterable[torch.Tensor]) -> Iterator[Callable[[], None]]:
    """Puts tensors and the default random generators of torch, Python and numpy back at the end of a `with` block.

    Args:
        tensors: What the block may write; their values are copied first.

    Yields:
        Puts them back when it is called, for between two runs.
    """
    kept = [(tensor, tensor.detach().clone()) for tensor in tensors if not tensor.is_meta]
    generators = [torch.default_generator, *torch.cuda.default_generators]
    drawn = [generator.get_state() for generator in generators]
    of_python, of_numpy = random.getstate(), np.random.get_state()

    def put_back() -> None:
        with torch.inference_mode():  # the one mode in which normal and inference tensors may both be written
            for tensor, copy in kept:
                # One whose elements share memory, such as an expanded mask, cannot be written, neither here nor by a forward.
                with contextlib.suppress(RuntimeError):
                    if tensor.shape == copy.shape:
                        tensor.copy_(copy)
        for generator, state in zip(generators, drawn, strict=True):
            generator.set_state(state)
        random.setstate(of_python)
        np.random.set_state(of_numpy)

    try:
        yield put_back
    finally:
        put_back()
