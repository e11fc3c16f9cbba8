"""`@eager_on_graph`: the mark on a step that cannot be captured, and `break_graph()`, the split with no work."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast, overload

import attrs
import torch

from breakgraph.bound_call import BoundCall
from breakgraph.errors import CaptureError, ConfigError, LiveDataError
from breakgraph.replay_context import Around, ReplayContext, check_valid_rows, current_frame
from breakgraph.structure import map_leaves, storage_address

__all__ = ["BreakSpec", "break_graph", "eager_on_graph"]

F = TypeVar("F", bound=Callable[..., Any])

_RETURN = "return"


@attrs.frozen(eq=False)
class BreakSpec:
    """A marked function and its options, validated once when it is decorated.

    Attributes:
        function: What the author wrote.
        name: Shown in errors and in `explain()`.
        live: Parameter -> name of the live data it is rebound to at every replay.
        rows: Parameter (or `return`, `return[0]`, `return.field`) -> its token axis.
        writes: Rows parameters whose tail is zeroed after the break.
        hoist: Runs before the first segment at a replay.
        capture_stub: Called in place of the function during capture.
        signature: Its signature, or None for a builtin that has none.
    """

    function: Callable[..., Any]
    name: str
    live: Mapping[str, str]
    rows: Mapping[str, int]
    writes: tuple[str, ...]
    hoist: bool
    capture_stub: Callable[..., Any] | None
    signature: inspect.Signature | None

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function as if it were not marked."""
        return self.function(*args, **kwargs)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BoundCall:
        """Bind one call's arguments."""
        names = {*self.live, *(name for name in self.rows if not _is_return(name))}
        return BoundCall.bind(self.signature, args, kwargs, names=names)

    def row_arguments(self, bound: BoundCall) -> dict[str, tuple[torch.Tensor, int]]:
        """The rows arguments of a call that are tensors; None is allowed for an optional one.

        Raises:
            CaptureError: One is neither, has no such axis, or two differ in length.
        """
        found: dict[str, tuple[torch.Tensor, int]] = {}
        if not self.rows:
            return found
        for parameter, axis in self.rows.items():
            if _is_return(parameter):
                continue
            value = bound[parameter]
            if value is None:
                continue
            if not isinstance(value, torch.Tensor) or not -value.dim() <= axis < value.dim():
                shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
                raise CaptureError(
                    f"break '{self.name}': rows parameter '{parameter}' is {shape}; a tensor with axis {axis} is needed.",
                    why="Its first real rows are cut out along that axis at every replay.",
                    fix="Take it off rows=, or name the right axis with rows={'parameter': axis}.",
                )
            found[parameter] = (value, axis % value.dim())
        lengths = {name: tensor.shape[axis] for name, (tensor, axis) in found.items()}
        if len(set(lengths.values())) > 1:
            raise CaptureError(
                f"break '{self.name}': its rows arguments have different lengths: {lengths}.",
                why="All of them are cut to the same number of real rows, so they must share one token axis.",
                fix="Name the token axis of each with rows={'parameter': axis}, or leave out the one that has none.",
            )
        return found

    def return_axis(self, path: str) -> int | None:
        """The token axis of the returned leaf at `path`, or None where it has none."""
        best: tuple[int, int] | None = None
        for target, axis in self.rows.items():
            if _is_return(target) and _is_at_or_below(path, target[len(_RETURN) :]):
                best = max(best or (-1, 0), (len(target), axis))
        return None if best is None else best[1]

    def unmatched_returns(self, paths: Sequence[str]) -> list[str]:
        """The targets of `rows` below `return` that name none of the returned leaves."""
        targets = [target for target in self.rows if target.startswith((_RETURN + "[", _RETURN + "."))]
        return [t for t in targets if not any(_is_at_or_below(path, t[len(_RETURN) :]) for path in paths)]

    def call_eagerly(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, context: ReplayContext, around: Around | None = None
    ) -> Any:
        """Call with the semantics of a replay and no graph.

        Args:
            args: Positional arguments.
            kwargs: Keyword arguments.
            context: Live data and row counts of the step.
            around: Calls the function in our place; None: nobody looks.

        Returns:
            What the caller goes on with: returned rows have the captured length again, their tail zero.
        """
        if not self.live and not self.rows:
            return self.function(*args, **kwargs) if around is None else around(self, args, kwargs, context)
        bound = self.bind(args, kwargs)
        for parameter, name in self.live.items():
            bound[parameter] = live_value(context.live, name, where=f"break '{self.name}'")
        row_arguments = self.row_arguments(bound)
        valid = context.valid_rows
        padded = next((tensor.shape[axis] for tensor, axis in row_arguments.values()), context.padded_rows)
        if valid is None or valid == padded or not self.rows:
            return self._called(bound, context, around)
        check_valid_rows(valid, padded_rows=padded, where=f"break '{self.name}'")
        for parameter, (tensor, axis) in row_arguments.items():
            bound[parameter] = tensor.narrow(axis, 0, valid)
        result = self._called(bound, context, around)
        for parameter in self.writes:
            if parameter in row_arguments:
                tensor, axis = row_arguments[parameter]
                tensor.narrow(axis, valid, tensor.shape[axis] - valid).zero_()
        storages = {storage_address(tensor) for tensor, _ in row_arguments.values()} - {0}
        return map_leaves(result, functools.partial(self._pad_rows, valid=valid, padded=padded, storages=storages))

    def _called(self, bound: BoundCall, context: ReplayContext, around: Around | None) -> Any:
        if around is None:
            return self.function(*bound.args, **bound.kwargs)
        return around(self, tuple(bound.args), bound.kwargs, context)

    def _pad_rows(self, path: str, leaf: Any, *, valid: int, padded: int | None, storages: set[int]) -> Any:
        axis = self.return_axis(path)
        if axis is None or padded is None or not isinstance(leaf, torch.Tensor) or not leaf.dim():
            return leaf
        axis %= leaf.dim()
        if leaf.shape[axis] != valid:
            return (
                leaf  # a contract violation: at capture and replay it is an error, here the model's own code meets it
            )
        shape = [*leaf.shape[:axis], padded, *leaf.shape[axis + 1 :]]
        if storage_address(leaf) in storages:
            full = leaf.as_strided(shape, leaf.stride(), leaf.storage_offset())
            full.narrow(axis, valid, padded - valid).zero_()
            return full
        full = leaf.new_zeros(shape)
        full.narrow(axis, 0, valid).copy_(leaf)
        return full


def live_value(live: Mapping[str, Any], name: str, *, where: str) -> Any:
    """Live data by name, or an error that lists what there is."""
    try:
        return live[name]
    except KeyError:
        raise LiveDataError(
            f"{where} needs live data '{name}'; given: {sorted(live) or 'none'}.",
            why="The captured value belongs to another step, so using it again would give that step's numbers.",
            fix=f"Pass it with the step: live={{'{name}': ...}}.",
        ) from None


@overload
def eager_on_graph(function: F, /) -> F: ...
@overload
def eager_on_graph(
    *,
    name: str | None = None,
    live: Sequence[str] | Mapping[str, str] = (),
    rows: Sequence[str] | Mapping[str, int] = (),
    writes: Sequence[str] = (),
    hoist: bool = False,
    capture_stub: Callable[..., Any] | None = None,
    enabled: bool = True,
) -> Callable[[F], F]: ...
def eager_on_graph(
    function: Any = None,
    /,
    *,
    name: str | None = None,
    live: Sequence[str] | Mapping[str, str] = (),
    rows: Sequence[str] | Mapping[str, int] = (),
    writes: Sequence[str] = (),
    hoist: bool = False,
    capture_stub: Callable[..., Any] | None = None,
    enabled: bool = True,
) -> Any:
    """Mark a function as a break: it runs eagerly between graph segments, at capture and at every replay.

    Works bare and with options, on functions, methods, static and class methods and callable objects. Outside a
    capture, a replay and an eager step, and under `torch.compile`, the marked function is a plain call.

    Args:
        function: The step that cannot be captured.
        name: Name in errors and in `explain()`; the function's own by default.
        live: Parameters rebound at every replay to `replay(live=...)`; `{"metadata": "sliding"}` maps a parameter to
            another name.
        rows: Parameters whose first axis is the token axis (`{"q": 1}` names another axis); `"return"` stands for every
            returned tensor, `"return[0]"` or `"return.field"` for one. With `valid_rows=n` the break receives the first
            n rows and must return n rows; returned tails are zeroed.
        writes: Rows parameters that the function writes; their tail is zeroed afterwards.
        hoist: The function depends on live data and static buffers only; it runs before the first segment.
        capture_stub: Called in place of the function during capture.
        enabled: False makes the mark do nothing, so the work is captured.

    Returns:
        The marked function.

    Raises:
        ConfigError: An option names a parameter that does not exist, or options contradict each other.
    """
    options: dict[str, Any] = {
        "name": name,
        "live": live,
        "rows": rows,
        "writes": writes,
        "hoist": hoist,
        "capture_stub": capture_stub,
        "enabled": enabled,
    }
    if function is None:
        return functools.partial(_mark, **options)
    return _mark(function, **options)


def _mark(function: Any, *, enabled: bool, **options: Any) -> Any:
    if isinstance(function, staticmethod | classmethod):
        return type(function)(_mark(function.__func__, enabled=enabled, **options))
    if not callable(function):
        raise ConfigError(
            f"@eager_on_graph was put on {function!r}, which is not callable.",
            why="A break is a call: its function runs at every replay.",
            fix="Put the mark on a function, a method or an object with __call__.",
        )
    target = inspect.unwrap(function)
    if inspect.iscoroutinefunction(target) or inspect.isgeneratorfunction(target) or inspect.isasyncgenfunction(target):
        raise ConfigError(
            f"@eager_on_graph was put on '{_name_of(function)}', a generator or coroutine function.",
            why="Calling it only makes an object; its body would run later, inside a segment.",
            fix="Mark a plain function that does the work and returns the result.",
        )
    if not enabled:
        return function
    spec = _spec(function, **options)

    def marked(*args: Any, **kwargs: Any) -> Any:
        # Asked first: torch.compile folds it to True and never meets the thread-local.
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        frame = current_frame()
        if frame is None:
            return function(*args, **kwargs)
        return frame.on_marked_call(spec, args, kwargs)

    wrapper = functools.update_wrapper(marked, function)
    wrapper.__dict__["break_spec"] = spec
    return wrapper


def _spec(
    function: Callable[..., Any],
    *,
    name: str | None,
    live: Sequence[str] | Mapping[str, str],
    rows: Sequence[str] | Mapping[str, int],
    writes: Sequence[str],
    hoist: bool,
    capture_stub: Callable[..., Any] | None,
) -> BreakSpec:
    for option, value in (("live", live), ("rows", rows), ("writes", writes)):
        if isinstance(value, str):
            raise ConfigError(
                f"@eager_on_graph({option}={value!r}): a string.",
                why="Its letters would be taken for parameter names.",
                fix=f"Write {option}=({value!r},).",
            )
    try:
        # Not that of a function wrapped by another decorator: the wrapper may take and pass other arguments.
        signature: inspect.Signature | None = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        signature = None
    spec = BreakSpec(
        function=function,
        name=name or _name_of(function),
        live=dict(live) if isinstance(live, Mapping) else {parameter: parameter for parameter in live},
        rows=dict(rows) if isinstance(rows, Mapping) else dict.fromkeys(rows, 0),
        writes=tuple(writes),
        hoist=hoist,
        capture_stub=capture_stub,
        signature=signature,
    )
    _check_options(spec)
    return spec


def _check_options(spec: BreakSpec) -> None:
    parameters = {} if spec.signature is None else dict(spec.signature.parameters)
    named = [name for name in spec.rows if not _is_return(name)]
    for option, names in (("live", list(spec.live)), ("rows", named), ("writes", list(spec.writes))):
        for name in names:
            parameter = parameters.get(name)
            if parameter is None or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise ConfigError(
                    f"@eager_on_graph({option}=...) on '{spec.name}' names '{name}'; its parameters are {list(parameters)}.",
                    why="The option would silently do nothing.",
                    fix="Name a parameter of the function (for rows also 'return'; *args and **kwargs cannot be named). Below "
                    "another decorator the parameters are that decorator's: put @eager_on_graph directly on the function.",
                )
    for name in spec.writes:
        if name not in spec.rows:
            raise ConfigError(
                f"@eager_on_graph(writes=...) on '{spec.name}' names '{name}', which is not in rows.",
                why="Only a tensor with a token axis has a tail to zero.",
                fix=f"Add '{name}' to rows, or take it off writes.",
            )
    both = sorted(set(spec.live) & set(spec.rows))
    if both:
        raise ConfigError(
            f"@eager_on_graph on '{spec.name}': {both} stand in both live and rows.",
            why="Live data already has its real size, so it must not be cut.",
            fix="Name each parameter in one of them.",
        )


def _is_return(target: str) -> bool:
    return target == _RETURN or target.startswith((_RETURN + "[", _RETURN + "."))


def _is_at_or_below(path: str, prefix: str) -> bool:
    return path.startswith(prefix) and (len(path) == len(prefix) or not prefix or path[len(prefix)] in "[.")


def _name_of(function: Any) -> str:
    return str(getattr(function, "__name__", None) or type(function).__name__)


def break_graph() -> None:
    """Split the graph here, with no work between the segments; does nothing outside a capture."""
    frame = current_frame()
    if frame is not None:
        frame.on_split()


def spec_of(function: Callable[..., Any]) -> BreakSpec | None:
    """The options of a marked function, or None where it is not marked."""
    return cast(BreakSpec | None, getattr(function, "__dict__", {}).get("break_spec"))
