"""Modules of a model whose own forward syncs, run as breaks: which ones, and how their rows are cut.

A module is looked at from outside: what its calls receive and return at two token counts says which axis of which tensor
is that of the rows. Only its instance is changed, and only while a step runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import attrs
from torch import nn

from breakgraph.break_function import eager_on_graph
from breakgraph.errors import ConfigError
from breakgraph.models.huggingface_watch import ModuleCall, Sync, Watch
from breakgraph.structure import flatten, map_leaves
from breakgraph.swaps import swapped

__all__ = ["Fit", "ModuleBreak", "Still", "choose_breaks"]

Still = tuple[nn.Module, Mapping[str, Any]]
"""A module, and attributes that have another value while it runs in a step."""


@attrs.frozen(eq=False)
class ModuleBreak:
    """A module that runs as a break.

    Attributes:
        module: The instance.
        name: Its path in the model; the break's name.
        calls: How often a forward of the model calls it.
        forward: What takes the place of its `forward` while a step runs.
    """

    module: nn.Module
    name: str
    calls: int
    forward: Callable[..., Any]

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleBreak:
        raise ConfigError(
            f"A decoder whose module {self.name} runs as a break cannot be copied.",
            why="The break computes with the weights of this module, and would in the copy.",
            fix="Copy the model before it is adapted, or adapt the copy: load_transformers(copy.deepcopy(decoder.model)).",
        )


@attrs.frozen(eq=False)
class Fit:
    """How a model is put into graphs.

    Attributes:
        breaks: Modules that run as breaks.
        still: Modules and attributes that have another value while a step runs: what would be found out again at each
            step, on the host, is known before.
        prefill: Why no graph can hold a prefill step; None where one can.
        decode: Why no graph can hold a decode step; None where one can.
    """

    breaks: tuple[ModuleBreak, ...] = ()
    still: tuple[Still, ...] = ()
    prefill: str | None = None
    decode: str | None = None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Have the modules as steps need them inside a `with` block."""
        with ExitStack() as stack, _held(self.still):
            for one in self.breaks:
                stack.enter_context(swapped(one.module, forward=one.forward))
            yield


@contextmanager
def _held(still: Iterable[Still]) -> Iterator[None]:
    with ExitStack() as stack:
        for module, values in still:
            stack.enter_context(swapped(module, **values))
        yield


def choose_breaks(
    small: Watch, large: Watch, *, root: nn.Module, still: Sequence[Still] = ()
) -> tuple[tuple[ModuleBreak, ...], str | None]:
    """Find the modules that must run as breaks, the innermost that can.

    Args:
        small: What was seen of a forward of the body.
        large: The same with more tokens.
        root: Whose paths the modules have.
        still: What breaks must hold, too: they run when the rest of the step does not.

    Returns:
        The breaks, and why some read cannot be put into one; None where all can.
    """
    names = {module: path for path, module in root.named_modules()}
    chosen: dict[nn.Module, ModuleBreak] = {}
    for sync in small.syncs:
        if any(module in chosen for module in sync.stack):
            continue
        why = ""
        for module in reversed(sync.stack):
            if module in small.attending:
                why = f"{why}, and what calls it holds an attention call" if why else "it holds an attention call"
                break
            inside = set(module.modules())
            held = [one for one in still if one[0] in inside]
            found = _break(module, names.get(module, ""), small=small, large=large, still=held)
            if isinstance(found, ModuleBreak):
                chosen[module] = found
                break
            why = why or found
        else:
            module = None
        if module not in chosen:
            return (
                (),
                f"{_described(sync, names)}, and that cannot be a break: {why or 'no module of the body does it'}",
            )
    inner = [m for sync in small.syncs for m in sync.stack[_outermost(sync, chosen) + 1 :] if m in chosen]
    return tuple(one for module, one in chosen.items() if module not in inner), None


def _outermost(sync: Sync, chosen: Iterable[nn.Module]) -> int:
    held = set(chosen)
    return next(index for index, module in enumerate(sync.stack) if module in held)


def _described(sync: Sync, names: Mapping[nn.Module, str]) -> str:
    where = f"{names.get(sync.stack[-1], '')} ({type(sync.stack[-1]).__name__})" if sync.stack else "the model"
    return f"{where} uses {sync.what.rstrip(',')} at {sync.line}"


def _break(module: nn.Module, name: str, *, small: Watch, large: Watch, still: Sequence[Still]) -> ModuleBreak | str:
    """The module as a break, or why it cannot be one."""
    mine, theirs = small.calls[module], large.calls[module]
    if len(mine) != len(theirs):
        return f"{type(module).__name__} is called {len(mine)} or {len(theirs)} times, as the tokens are"
    axes: list[tuple[Mapping[str, int], Mapping[str, int]]] = []
    for one, other in zip(mine, theirs, strict=True):
        given = _axes(one.given, other.given, tokens=(small.tokens, large.tokens))
        returned = _axes(one.returned, other.returned, tokens=(small.tokens, large.tokens))
        for what, found in (("receives", given), ("returns", returned)):
            if isinstance(found, str):
                return f"{type(module).__name__} {what} {found}"
        assert not isinstance(given, str)
        assert not isinstance(returned, str)
        plain = [leaf for _, leaf in one.returned if not isinstance(leaf, tuple) and leaf is not None]
        if plain:
            return f"{type(module).__name__} returns {plain[0]!r:.40}, a value that the segments after it would keep"
        if returned and not given:
            return f"{type(module).__name__} returns rows and receives none"
        axes.append((given, returned))
    paths = [[path for path, _ in call.given] for call in mine]
    if any(pair != axes[0] for pair in axes) or any(other != paths[0] for other in paths):
        return f"{type(module).__name__} is called in different ways"
    forward = _wrapped(module, name or type(module).__name__, call=mine[0], axes=axes[0], still=still)
    return ModuleBreak(module, name or type(module).__name__, len(mine), forward)


def _axes(
    one: Sequence[tuple[str, Any]], other: Sequence[tuple[str, Any]], *, tokens: tuple[int, int]
) -> dict[str, int] | str:
    """The token axis of every tensor that has one, by path; or what stands against it."""
    if [path for path, _ in one] != [path for path, _ in other]:
        return "something else for another number of tokens"
    found: dict[str, int] = {}
    for (path, mine), (_, theirs) in zip(one, other, strict=True):
        if not isinstance(mine, tuple) or not isinstance(theirs, tuple):
            if mine is not theirs and mine != theirs:
                return f"a value that changes with the step ({mine!r:.40})"
            continue
        if mine == theirs:
            continue
        differing = [axis for axis, pair in enumerate(zip(mine, theirs, strict=False)) if pair[0] != pair[1]]
        if len(mine) != len(theirs) or len(differing) != 1 or (mine[differing[0]], theirs[differing[0]]) != tokens:
            return f"a tensor {mine} for {tokens[0]} tokens and {theirs} for {tokens[1]}, whose rows are not those of the step"
        found[path] = differing[0]
    return found


def _wrapped(
    module: nn.Module,
    name: str,
    *,
    call: ModuleCall,
    axes: tuple[Mapping[str, int], Mapping[str, int]],
    still: Sequence[Still],
) -> Callable[..., Any]:
    """The module's forward as a marked function of its leaves: only parameters can be named as rows."""
    inner, (given, returned) = module.forward, axes
    paths = [path for path, _ in call.given]
    parameters = [f"leaf{index}" for index in range(len(paths))]

    def body(*leaves: Any) -> Any:
        by_path = dict(zip(paths, leaves, strict=True))
        args, kwargs = map_leaves(call.skeleton, lambda path, _: by_path[path])
        with _held(still):
            return inner(*args, **kwargs)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    body.__signature__ = inspect.Signature([inspect.Parameter(each, kind) for each in parameters])  # type: ignore[attr-defined]
    rows = {parameters[paths.index(path)]: axis for path, axis in given.items()}
    marked = eager_on_graph(name=name, rows={**rows, **{f"return{path}": axis for path, axis in returned.items()}})(
        body
    )

    def forward(*args: Any, **kwargs: Any) -> Any:
        leaves, _ = flatten((args, kwargs))
        if [path for path, _ in leaves] != paths:
            raise ConfigError(
                f"{name} was called with other arguments than when the model was probed.",
                why="It runs as a break, and which of its arguments are rows was found out then.",
                fix="Use a model whose forward does the same at every step; or its own generate().",
            )
        return marked(*[leaf for _, leaf in leaves])

    return forward
