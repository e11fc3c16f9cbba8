"""Runs a forward and says which lines a graph cannot hold, and what to put into functions marked with `@eager_on_graph`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from breakgraph.errors import CaptureIllegalError, ConfigError
from breakgraph.replay_context import current_frame
from breakgraph.tools.linting.breaks import suggestions
from breakgraph.tools.linting.findings import findings_of
from breakgraph.tools.linting.parameters import code_of, host_parameters, parameter_uses
from breakgraph.tools.linting.report import LintReport
from breakgraph.tools.linting.restore import containers_of, modules_of, restored, tensors_of
from breakgraph.tools.linting.runs import Run, run
from breakgraph.tools.linting.stand_ins import StandIns
from breakgraph.tools.linting.watch import HostNames

__all__ = ["lint"]


def lint(forward: Callable[..., Any], /, *inputs: Any, kwargs: Mapping[str, Any] | None = None) -> LintReport:
    """Finds what keeps a forward from being captured, or makes its replays wrong, with file and line.

    The forward runs for real, twice with the inputs as they are and once more where they hold numbers on the host: then with
    stand-ins for these that report where a branch, a loop, a shape or an operator depends on them. Functions marked with
    `@eager_on_graph` run unwatched. Inside `eager_step(live=..., valid_rows=...)` they run as in a replay, and live data that
    other code reads through `current_replay()` counts as host data.

    Put back afterwards: tensors among the inputs, buffers of the modules that `forward` can be seen to hold, Python state that
    was seen to change, and the default random generators. Not put back: parameters written in place, state inside of C++
    or of breaks, files, generators of your own.

    Args:
        forward: A module, a function, a method, or any other callable.
        *inputs: Its positional inputs, such as a step would give. What differs between steps is host data; bind what is the
            same for all replays of one graph beforehand, with `functools.partial`.
        kwargs: Its keyword inputs.

    Returns:
        The findings by file and line, and what to mark. Only what ran is judged: branches that these inputs do not take are
        not seen. Cost: two or three runs, each tens of times as slow as without lint where tensors are tiny, and a copy of inputs
        and buffers.

    Raises:
        ConfigError: `forward` cannot be called, or `kwargs` is no mapping from names.
        CaptureIllegalError: Called inside a capture.
        BaseException: Whatever the forward raised, unchanged, with a note.
    """
    named = _checked(forward, kwargs)
    stand_ins = StandIns()
    try:
        modules = modules_of(forward, (inputs, named))
        tensors = tensors_of((inputs, named), modules)
        given, given_named = stand_ins.of(tuple(inputs)), stand_ins.of(named)
    except RecursionError:
        raise ConfigError(
            "lint() got inputs that hold themselves, or containers nested hundreds deep; expected nestings that end.",
            why="They are opened to find their tensors and the host data in them.",
            fix="Hand over the tensors and numbers that the forward needs, or bind the object with functools.partial.",
        ) from None
    devices = [tensor.device for tensor in (*tensors, *(p for module in modules for p in module.parameters()))]
    device = next((device for device in devices if device.type == "cuda"), torch.device("cpu"))
    outer = current_frame()
    if outer is not None:
        stand_ins.of(dict(outer.context.live))  # counted; the run makes the same ones
    runs: list[Run] = []
    unseen: list[str] = []
    try:
        with restored(tensors, containers=containers_of((inputs, named))) as put_back:
            for _ in range(2):
                put_back()
                runs.append(run(forward, inputs, named, device=device))
            if stand_ins.count:
                put_back()
                try:
                    runs.append(run(forward, given, given_named, device=device, stand_ins=stand_ins))
                except Exception as error:  # the code looks at types, or hands numbers to C++: it ran well without
                    unseen.append(
                        f"host data beyond the forward's own source: with stand-ins it raised {_short(error)}"
                    )
                    names = host_parameters(forward, inputs, named)
                    uses = list(parameter_uses(forward, names))
                    runs[-1].sightings.update(uses)
                    runs[-1].host_names.update({(use.place.path, use.place.function): HostNames(names) for use in uses})
        found = findings_of(runs)
    finally:
        for each in reversed(runs):
            each.changes.undo()
    unseen += [f"host data in inputs of type {name}: no stand-ins" for name in sorted(stand_ins.unfollowed)]
    unseen += sorted({text for each in runs for text in each.unread})
    host_names = {place: names for each in runs for place, names in each.host_names.items()}
    marks = suggestions(found, forward=code_of(forward), host_names=host_names)
    return LintReport(found, suggestions=marks, unseen=tuple(unseen), device=device.type)


def _checked(forward: Any, kwargs: Any) -> dict[str, Any]:
    if not callable(forward):
        raise ConfigError(
            f"lint() got a {type(forward).__name__}; expected a callable, such as a module or a function.",
            why="It is called with the inputs.",
            fix="Write lint(model, inputs) or lint(model.forward, inputs).",
        )
    if kwargs is not None and not (isinstance(kwargs, Mapping) and all(isinstance(key, str) for key in kwargs)):
        raise ConfigError(
            f"lint(kwargs=...) is a {type(kwargs).__name__}; expected a mapping from names to inputs.",
            why="They are handed to the forward as keyword arguments.",
            fix="Write kwargs={'positions': positions}.",
        )
    frame = current_frame()
    if frame is not None and frame.is_in_segment:
        raise CaptureIllegalError(
            "lint() was called inside a segment of a capture.",
            why="It runs the forward several times, and each run would be recorded.",
            fix="Call it before the capture.",
        )
    return dict(kwargs or {})


def _short(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
