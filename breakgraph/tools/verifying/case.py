"""One step of one graph that can be run again and again, and what was noted of its capture."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch

from breakgraph.capture import BreakableCUDAGraph
from breakgraph.tools.verifying.tape import Entry, record
from breakgraph.verification import Compared, Outcome, StateKeeper

__all__ = ["Case", "PythonState", "plain_attributes"]


def plain_attributes(modules: Iterable[torch.nn.Module]) -> dict[str, Any]:
    """Numbers, strings and the like that modules hold as plain attributes.

    Args:
        modules: Roots.

    Returns:
        By name, such as `Model.layers.0.scale`.
    """
    found: dict[str, Any] = {}
    for root in modules:
        for path, module in root.named_modules():
            start = ".".join(part for part in (type(root).__name__, path) if part)
            for name, value in vars(module).items():
                if name.startswith("_"):
                    continue
                items = value.items() if isinstance(value, dict) else [(None, value)]
                for key, item in items:
                    if isinstance(item, int | float | str | bool | None):
                        found[f"{start}.{name}" + (f"[{key!r}]" if isinstance(value, dict) else "")] = item
    return found


class PythonState:
    """The plain attributes of modules, tensors among them, so that each run begins with those of the first.

    Parameters, buffers and submodules stay what they are. What objects other than modules and closures hold is not seen.

    Args:
        modules: Roots.
    """

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        found = {id(module): module for root in modules for module in root.modules()}
        self._saved = [(module, _plain_table(module)) for module in found.values()]
        self._contents = [
            (value, copy.copy(value))
            for _, table in self._saved
            for value in table.values()
            if type(value) in (dict, list, set)
        ]

    def restore(self) -> None:
        """Put the attributes back, and what dicts, lists and sets among them held."""
        for module, saved in self._saved:
            for name in _plain_table(module).keys() - saved.keys():
                del module.__dict__[name]
            module.__dict__.update(saved)
        for value, held in self._contents:
            value.clear()
            value.extend(held) if isinstance(value, list) else value.update(held)


def _plain_table(module: torch.nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _TABLES}


_TABLES = ("_parameters", "_buffers", "_modules")


@attrs.frozen(eq=False, kw_only=True)
class Case:
    """One step of one graph that can be run again and again.

    Attributes:
        graph: The graph.
        keeper: Saves and restores the state around each run.
        replay: Replays the step.
        eager: Runs its eager twin.
        at_capture: What the forward did in the step of the capture, or in another one.
        attributes: Plain attributes at that time.
        modules: Whose attributes and tensors have names.
        live: Gives the live data of the step; None where that is not known here.
        within: Tensors that belong to every step.
        check: Raises where a watched tensor lies elsewhere than at the capture; None where none is watched.
        python: Attributes with which each run begins.
        compared: Whether the state that runs leave is compared as well as their results.
        raises: The replay raised, so that nothing can be learnt from another one.
    """

    graph: BreakableCUDAGraph
    keeper: StateKeeper
    replay: Callable[[], Any]
    eager: Callable[[], Any]
    at_capture: list[Entry]
    attributes: Mapping[str, Any] = attrs.field(factory=dict)
    modules: Sequence[torch.nn.Module] = ()
    live: Callable[[], Mapping[str, Any]] | None = None
    within: tuple[torch.Tensor, ...] = ()
    check: Callable[[], None] | None = None
    python: PythonState = attrs.field(factory=lambda: PythonState(()))
    compared: Compared = Compared.ALL
    raises: bool = False

    def eager_run(self) -> Any:
        """The eager twin, with the attributes that every run begins with."""
        self.python.restore()
        return self.eager()

    def poisoned_replay(self) -> Any:
        """A replay that finds nothing of what earlier ones computed, with the attributes that every run begins with."""
        self.python.restore()
        if self.graph.pool is not None:
            self.graph.pool.backend.poison()
        return self.replay()

    def outcome_of_replay(self) -> Outcome:
        """Of a poisoned one."""
        return self.keeper.outcome(self.poisoned_replay, compared=self.compared)

    def outcome_of_eager(self) -> Outcome:
        """Of the eager twin."""
        return self.keeper.outcome(self.eager_run, compared=self.compared)

    def tape(self) -> list[Entry]:
        """What the forward does in this step."""
        return record(self.outcome_of_eager, within=self.within)
