"""What the modules of a model do in a forward: which ones read data on the host, and what they receive and return."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import attrs
import torch
from torch import nn

from breakgraph.backends.operator_watch import watched_operators
from breakgraph.replay_context import Frame, MarkedCall, Phase, ReplayContext, install
from breakgraph.structure import flatten, map_leaves

__all__ = ["ModuleCall", "Sync", "Watch", "changed_since", "state_of"]


@attrs.frozen(eq=False)
class Sync:
    """One operation that no graph can hold.

    Attributes:
        stack: The modules that were running, the innermost last.
        what: The operation.
        line: Where in the model's code.
    """

    stack: tuple[nn.Module, ...]
    what: str
    line: str


@attrs.define(eq=False)
class ModuleCall:
    """One call of a module: paths and leaves, a tensor as its shape.

    Attributes:
        given: Of `(args, kwargs)`.
        skeleton: `(args, kwargs)` with the path in place of each leaf.
        returned: Of the result.
    """

    given: list[tuple[str, Any]]
    skeleton: Any
    returned: list[tuple[str, Any]] = attrs.field(factory=list)


class Watch:
    """What was seen while a model ran.

    Args:
        model: Its modules are watched.
        tokens: Rows of the run.
        device: Where it runs.

    Attributes:
        tokens: As given.
        syncs: What no graph can hold, outside of breaks.
        calls: Every call of every module.
        attending: Modules that ran while `attention` was called.
    """

    def __init__(self, model: nn.Module, *, tokens: int, device: torch.device) -> None:
        self.tokens = tokens
        self.syncs: list[Sync] = []
        self.calls: dict[nn.Module, list[ModuleCall]] = defaultdict(list)
        self.attending: set[nn.Module] = set()
        self._model = model
        self._device = device
        self._stack: list[nn.Module] = []
        self._open: list[ModuleCall] = []
        self._paused = False

    def attention(self) -> None:
        """Note an attention call."""
        self.attending.update(self._stack)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch what runs inside a `with` block; bodies of breaks are left out."""
        self._stack.clear()
        self._open.clear()
        frame = install(_Breaks(self._pause))
        try:
            with ExitStack() as stack:
                for module in self._model.modules():
                    stack.callback(module.register_forward_pre_hook(self._begin, with_kwargs=True).remove)
                    stack.callback(module.register_forward_hook(self._end, always_call=True).remove)
                with watched_operators(self._note, device=self._device):
                    yield
        finally:
            install(frame)

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._stack.append(module)
        given = [(path, _seen(leaf)) for path, leaf in flatten((args, kwargs))[0]]
        self._open.append(ModuleCall(given, map_leaves((args, kwargs), lambda path, _: path)))
        self.calls[module].append(self._open[-1])

    def _end(self, module: nn.Module, _: Any, result: Any) -> None:
        self._stack.pop()
        self._open.pop().returned = [(path, _seen(leaf)) for path, leaf in flatten(result)[0]]

    def _note(self, what: str, line: str) -> None:
        if not self._paused:
            self.syncs.append(Sync(tuple(self._stack), what, line))

    @contextmanager
    def _pause(self) -> Iterator[None]:
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before


class _Breaks(Frame):
    """Runs marked functions as they are, with the watch paused."""

    def __init__(self, pause: Callable[[], Any]) -> None:
        self.context = ReplayContext(phase=Phase.EAGER)
        self._pause = pause

    def on_marked_call(self, call: MarkedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._pause():
            return call.call(args, kwargs)

    def on_split(self) -> None:
        return None


def _seen(leaf: Any) -> Any:
    """A leaf as it is kept: only the shape of a tensor, so that nothing of the run stays alive."""
    return tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else leaf


def state_of(model: nn.Module) -> dict[str, Any]:
    """What a forward could leave behind: where tensors are, values of attributes, lengths of containers.

    Args:
        model: The model.
    """
    state: dict[str, Any] = {}
    for path, module in model.named_modules():
        tables = (module._parameters, module._buffers, module.__dict__)
        for name, value in ((name, value) for table in tables for name, value in table.items()):
            if isinstance(value, torch.Tensor):
                seen: Any = (id(value), value.data_ptr() if value.layout is torch.strided else 0)
            elif isinstance(value, bool | int | float | str | type(None)):
                seen = value
            elif isinstance(value, list | dict | set) and not name.startswith("_"):
                seen = len(value)
            else:
                continue
            state[f"{path}.{name}" if path else name] = seen
    return state


def changed_since(model: nn.Module, before: dict[str, Any]) -> list[str]:
    """Names of what is another value, or somewhere else, than it was.

    Args:
        model: The model.
        before: What `state_of` returned.
    """
    now = state_of(model)
    return sorted(name for name in {**before, **now} if before.get(name, ...) != now.get(name, ...))
