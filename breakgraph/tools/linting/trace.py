"""The lines of a forward as they run: what Python state they write, which functions of the host they call."""

from __future__ import annotations

import ast
import datetime
import gc
import os
import random
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType, FunctionType
from typing import Any

import numpy as np
import torch

from breakgraph.tools.linting.host_data import is_stand_in
from breakgraph.tools.linting.line_uses import Alias, CallOf, GlobalStore, Header, LineUse, Store, With
from breakgraph.tools.linting.places import is_user_file, place_of
from breakgraph.tools.linting.report import Kind, Severity
from breakgraph.tools.linting.source import references, source_of
from breakgraph.tools.linting.state import Changes, is_container
from breakgraph.tools.linting.values import UNKNOWN, evaluate
from breakgraph.tools.linting.watch import Watch

__all__ = ["Tracer"]

_Nested = ast.Attribute | ast.Subscript
_RANDOM = (random.Random, np.random.RandomState, np.random.Generator, np.random.BitGenerator)
_SEEDING_MODULES = frozenset({"torch.random", "torch.cuda.random"})
_SEEDING = re.compile("(manual_seed|seed|set_rng_state)(_all)?|fork_rng")
_FROM_HOST = (torch.from_numpy, torch.as_tensor, torch.tensor)
_SEED_METHODS = frozenset({"manual_seed", "seed", "set_state"})
_OWN_TO_PYTHON = ("<frozen ", "<__array_function__", "<attrs ", "<string>")
_MOST_VISITS = 64
"""Of one line in one run: a loop over thousands of rows does the same each time."""


class Tracer:
    """Follows the lines of one run.

    Args:
        watch: Is told what is seen, and knows when a break runs.
        changes: Is told what is written.

    Attributes:
        unread: What ran and could not be judged, and why.
    """

    def __init__(self, watch: Watch, *, changes: Changes) -> None:
        self.unread: set[str] = set()
        self._watch = watch
        self._changes = changes
        self._uses: dict[tuple[CodeType, int], tuple[LineUse, ...]] = {}
        self._visits: dict[tuple[CodeType, int], int] = {}
        self._young: set[int] = set()
        self._imports = 0
        self._autocast: dict[FrameType, tuple[int, Any]] = {}

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Follows what this thread runs inside a `with` block; a debugger or a coverage tool is left out meanwhile."""
        before = sys.gettrace()
        sys.settrace(self._on_call)
        try:
            yield
        finally:
            sys.settrace(before)
            self._autocast.clear()

    def _on_call(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if code.co_name == "_find_and_load" and code.co_filename.startswith("<frozen importlib"):
            self._imports += 1
            frame.f_trace_lines = False
            return self._on_import
        if self._imports or self._watch.is_paused:
            return None
        if not is_user_file(code.co_filename):
            self._note_generated(code)
            return None
        if source_of(code.co_filename, frame.f_globals) is None:
            if not code.co_name.startswith(("__", "<")):  # those of dataclasses and named tuples are generated
                self.unread.add(f"{code.co_name} in {code.co_filename}: no source")
            return None
        self._watch.note_host_names(frame)
        return self._on_line

    def _note_generated(self, code: CodeType) -> None:
        """Says that code ran which a program has written, as far as that is no method of a data class."""
        name = code.co_filename
        if name.startswith("<") and not name.startswith(_OWN_TO_PYTHON) and not code.co_name.startswith("__"):
            self.unread.add(f"{code.co_name} in {name}: generated code")

    def _on_import(self, _: FrameType, event: str, __: Any) -> Any:
        """What a module does while it is imported is no work of the forward."""
        self._imports -= event == "return"
        return self._on_import

    def _on_line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event != "line" or self._watch.is_paused:
            return self._on_line
        self._after_with(frame)
        key = (frame.f_code, frame.f_lineno)
        uses = self._uses.get(key)
        if uses is None:
            source = source_of(frame.f_code.co_filename, frame.f_globals)
            uses = self._uses[key] = () if source is None else source.uses(frame.f_lineno, frame.f_code)
        if not uses:
            return self._on_line
        visits = self._visits[key] = self._visits.get(key, 0) + 1
        if visits <= _MOST_VISITS:
            for use in uses:
                self._judge(use, frame)
        return self._on_line

    def _judge(self, use: LineUse, frame: FrameType) -> None:
        try:
            self._on_use(use, frame)
        except Exception as error:  # an object of the user's that raises when it is compared or looked at
            self.unread.add(f"{place_of(frame)}: {type(error).__name__}: {error}")

    def _on_use(self, use: LineUse, frame: FrameType) -> None:
        if isinstance(use, Store):
            self._on_store(use, frame)
        elif isinstance(use, Alias):
            value = evaluate(use.value, frame)
            if is_container(value) and self._is_old(use.value, value, frame):
                self._changes.note_old(value)
        elif isinstance(use, GlobalStore):
            self._on_global(use, frame)
        elif isinstance(use, CallOf):
            self._on_call_of(use, frame)
        elif isinstance(use, Header):
            values = [evaluate(name, frame) for name in use.names]
            indexed = None if use.indexed is None else evaluate(use.indexed, frame)
            # An index of a tensor is seen where the tensor is asked.
            if any(map(is_stand_in, values)) and not (indexed is UNKNOWN or isinstance(indexed, torch.Tensor)):
                self._watch.note_host_names(frame)
                self._watch.saw(Kind.HOST_BRANCH, f"{use.what} over host data of the inputs", place=place_of(frame))
        elif isinstance(use, With):
            self._autocast[frame] = (frame.f_lineno, _autocast_state())

    def _on_store(self, store: Store, frame: FrameType) -> None:
        owner = evaluate(store.owner, frame)
        label = _text(store.owner)
        if isinstance(owner, torch.Tensor) and store.name == "data" and self._changes.is_old(owner):
            self._changes.wrote_data(owner, label=f"{label}.data is assigned", place=place_of(frame))
        if owner is UNKNOWN or isinstance(owner, torch.Tensor) or not self._is_old(store.owner, owner, frame):
            return
        if store.name is None:
            if is_container(owner):
                self._changes.wrote(owner, None, label=f"{label} is changed", place=place_of(frame))
            return
        name = store.name if isinstance(store.name, str) else evaluate(store.name, frame)
        if isinstance(name, str):
            self._changes.wrote(owner, name, label=f"{label}.{name} is assigned", place=place_of(frame))

    def _is_old(self, expression: ast.expr, value: Any, frame: FrameType) -> bool:
        """Whether the value of an expression is older than the run; containers of plain values are unknown to the collector."""
        if self._changes.is_old(value):
            return True
        if gc.is_tracked(value):
            return False
        if isinstance(expression, ast.Call) and len(expression.args) > 1:  # getattr(owner, name)
            expression = ast.Attribute(expression.args[0], "", ast.Load())
        if isinstance(expression, _Nested):
            base = evaluate(expression.value, frame)
            return base is not UNKNOWN and self._is_old(expression.value, base, frame)
        if not isinstance(expression, ast.Name) or not is_container(value):
            return False
        name, code = expression.id, frame.f_code
        if name not in frame.f_locals or (name in code.co_freevars and not _is_of_a_caller(name, frame)):
            return True
        if id(value) in self._young:  # no object from before can get the number of one of the run
            return False
        found = self._is_default(value, frame) or self._changes.is_held_by_old(value)
        if found:
            self._changes.note_old(value)
        else:
            self._young.add(id(value))
        return found

    def _is_default(self, value: Any, frame: FrameType) -> bool:
        """True for the default of an argument: a tuple of plain containers is unknown to the collector as well."""
        code = frame.f_code
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if not any(frame.f_locals.get(name) is value for name in names):
            return False
        functions = [each for each in gc.get_referrers(code) if isinstance(each, FunctionType)]
        return any(
            value is default and self._changes.is_old(function)
            for function in functions
            for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        )

    def _on_global(self, store: GlobalStore, frame: FrameType) -> None:
        if store.is_global:
            self._changes.wrote(
                frame.f_globals, store.name, label=f"the global {store.name} is assigned", place=place_of(frame)
            )
        elif not _is_of_a_caller(store.name, frame):
            what = f"{store.name}, of an enclosing function, is assigned"
            self._watch.saw(Kind.ATTRIBUTE, what, place=place_of(frame))

    def _on_call_of(self, call: CallOf, frame: FrameType) -> None:
        function = evaluate(call.function, frame)
        if function is UNKNOWN:
            return
        if function is range and self._has_stand_in(call.arguments, frame):
            self._watch.note_host_names(frame)
            self._watch.saw(Kind.HOST_BRANCH, "a range of host data of the inputs", place=place_of(frame))
        elif function in _FROM_HOST and self._has_stand_in(call.arguments, frame):
            self._watch.note_host_names(frame)
        place, owner = place_of(frame), getattr(function, "__self__", None)
        module = str(getattr(function, "__module__", None) or type(owner).__module__)
        name = str(getattr(function, "__name__", ""))
        if _is_host_random(function, owner, module):
            self._watch.saw(Kind.RANDOM, f"{_text(call.function)}() draws on the host", place=place)
        # By name: torch replaces these functions where a compiler is imported.
        elif (module in _SEEDING_MODULES and _SEEDING.fullmatch(name)) or (
            isinstance(owner, torch.Generator) and name in _SEED_METHODS
        ):
            self._watch.saw(Kind.RANDOM, f"{_text(call.function)}() sets a generator", place=place)
        elif module == "time" or (isinstance(owner, type) and issubclass(owner, datetime.date)):
            self._watch.saw(Kind.HOST_CODE, f"{_text(call.function)}() reads a clock", place=place)
        elif function is print and not any(isinstance(evaluate(a, frame), torch.Tensor) for a in call.arguments):
            self._watch.saw(Kind.HOST_CODE, "print()", severity=Severity.NOTE, place=place)
        elif name == "synchronize" and module.startswith("torch"):
            self._watch.saw(Kind.HOST_SYNC, f"{_text(call.function)}()", place=place)
        elif function is next and call.arguments:
            iterator = evaluate(call.arguments[0], frame)
            if iterator is not UNKNOWN and self._changes.is_old(iterator):
                self._watch.saw(Kind.ATTRIBUTE, f"{_text(call.arguments[0])} is advanced", place=place)

    def _has_stand_in(self, expressions: Sequence[ast.expr], frame: FrameType) -> bool:
        return any(is_stand_in(evaluate(each, frame)) for given in expressions for each in references(given))

    def _after_with(self, frame: FrameType) -> None:
        entered = self._autocast.pop(frame, None)
        now = _autocast_state()
        if entered is not None and now != entered[1] and any(enabled for enabled, _ in now):
            place = place_of(frame)
            place = type(place)(place.path, entered[0], place.function, place.module)
            self._watch.saw(Kind.AUTOCAST, "autocast is switched", severity=Severity.NOTE, place=place)


def _autocast_state() -> tuple[Any, ...]:
    return tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))


def _is_host_random(function: Any, owner: Any, module: str) -> bool:
    if function is os.urandom:
        return True
    if isinstance(owner, _RANDOM) or module == "numpy.random" or module.startswith("numpy.random."):
        return True
    return module in ("random", "secrets", "uuid") and not isinstance(function, type)


def _is_of_a_caller(name: str, frame: FrameType) -> bool:
    """True where a variable of an enclosing function belongs to a call that is still running: it is made anew each time."""
    caller = frame.f_back
    while caller is not None:
        if name in caller.f_code.co_cellvars:
            return is_user_file(caller.f_code.co_filename) and caller.f_trace is not None
        caller = caller.f_back
    return False


def _text(expression: ast.expr) -> str:
    return ast.unparse(expression)
