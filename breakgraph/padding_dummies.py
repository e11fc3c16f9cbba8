"""Padding dummies: requests that fill a bucket, with storage of their own, so that a padding row writes to nobody's.

A *provider* gives one dummy per draft length its storage (a KV block, a slot of recurrent state, a draft cache) and takes
it back. `JoinedDummies` makes one provider of several, for a request whose state lies in several managers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Protocol, runtime_checkable

import torch

from breakgraph.errors import ConfigError, add_note
from breakgraph.static_buffers import Axis, StaticInput

__all__ = ["DummyProvider", "JoinedDummies", "PaddingDummies"]

Rows = Mapping[str, torch.Tensor]


@runtime_checkable
class DummyProvider(Protocol):
    """Gives padding requests storage of their own. One dummy per draft length fills all padding rows of a step."""

    def allocate(self, *, draft_len: int) -> Mapping[str, torch.Tensor] | None:
        """Take storage for one padding request.

        Args:
            draft_len: Draft tokens of the request.

        Returns:
            By input name, the rows of the request on the input's symbolic axis (one on a REQUESTS axis,
            `draft_len + 1` on a TOKENS axis, times the beam width); inputs left out are filled by their padding rule. On
            the host, for inputs that steps give on the host. All padding rows of a step are copies of this one request.
            None: no storage is free now; nothing was taken.
        """
        ...

    def release(self, *, draft_len: int) -> None:
        """Give the storage of the padding request of a draft length back.

        Args:
            draft_len: As in `allocate`.
        """
        ...


class JoinedDummies:
    """One provider made of several, one for each manager that holds a part of a request's state.

    All of them give storage, or none keeps any: what was taken before one had none left, or raised, is given back in
    reverse order, to each once.

    Args:
        managers: In the order in which they are asked.
    """

    def __init__(self, managers: Iterable[DummyProvider]) -> None:
        self.managers: Sequence[DummyProvider] = tuple(managers)

    def allocate(self, *, draft_len: int) -> Mapping[str, torch.Tensor] | None:
        """Take storage from every manager; see `DummyProvider`.

        Args:
            draft_len: Draft tokens of the request.

        Returns:
            The rows of all managers; None where one has no storage.

        Raises:
            ConfigError: Two managers give rows for one input.
        """
        rows: dict[str, torch.Tensor] = {}
        with ExitStack() as undo:
            for manager in self.managers:
                part = manager.allocate(draft_len=draft_len)
                if part is None:
                    return None
                undo.callback(manager.release, draft_len=draft_len)
                if twice := sorted(rows.keys() & part.keys(), key=str):
                    raise ConfigError(
                        f"two managers of padding requests give rows for {twice}; the second is a {type(manager).__name__}.",
                        why="A padding row would use the storage of one and leave that of the other unused.",
                        fix="Let one of them leave these inputs out.",
                    )
                rows.update(part)
            undo.pop_all()
        return rows

    def release(self, *, draft_len: int) -> None:
        """Give storage back to every manager, once each, also where one raises.

        Args:
            draft_len: As in `allocate`.
        """
        with ExitStack() as stack:
            for manager in self.managers:
                stack.callback(manager.release, draft_len=draft_len)


class PaddingDummies:
    """The padding requests that a runner holds now.

    Args:
        provider: Where their storage comes from; None: padding rows are filled by the rules of the inputs.
        inputs: The runner's inputs.
        beam_width: Beams per request.

    Attributes:
        turn: Changes whenever requests are given back.

    Raises:
        ConfigError: The provider has no `allocate` and `release`.
    """

    def __init__(self, provider: DummyProvider | None, *, inputs: Iterable[StaticInput], beam_width: int = 1) -> None:
        if provider is not None and (isinstance(provider, type) or not isinstance(provider, DummyProvider)):
            raise ConfigError(
                f"dummies={provider!r}; expected an object with allocate(draft_len=) and release(draft_len=).",
                why="Padding requests take storage from it and give it back.",
                fix="Pass an instance of such a class, or leave dummies= out.",
            )
        self.provider = provider
        self.turn = 0
        self._inputs = {declared.name: declared for declared in inputs if declared.axis is not None}
        self._beam_width = beam_width
        self._held: dict[int, Rows] = {}
        self._suspended = False
        self._lock = threading.RLock()

    def rows(self, draft_len: int) -> Rows | None:
        """The rows for a draft length; tried again at every step while there is no storage.

        Args:
            draft_len: Draft tokens of the request.
        """
        rows = self._held.get(draft_len)
        if rows is not None or self.provider is None:
            return rows
        with self._lock:  # two threads may prepare, and one of two requests would never be given back
            rows = self._held.get(draft_len)
            if rows is None and not self._suspended:
                rows = self.provider.allocate(draft_len=draft_len)
                if rows is not None:
                    self._check(rows, draft_len)
                    self._held[draft_len] = rows
            return rows

    def missing(self) -> str:
        """Why there are no rows."""
        return "padding requests are given back inside suspend_dummies()" if self._suspended else ""

    def _check(self, rows: Rows, draft_len: int) -> None:
        problem = self._problem(rows, draft_len)
        if not problem:
            return
        error = ConfigError(
            f"allocate(draft_len={draft_len}) of the padding requests returned {problem}.",
            why="They fill the rows beyond the real requests; others would be left out or misaligned, silently.",
            fix="Return {input name: the rows of one request}, for inputs with a symbolic axis; leave the others out.",
        )
        assert self.provider is not None
        try:
            self.provider.release(draft_len=draft_len)
        except Exception as second:
            add_note(error, f"giving it back raised {type(second).__name__}: {second}")
        raise error

    def _problem(self, given: object, draft_len: int) -> str:
        if not isinstance(given, Mapping):
            return f"a {type(given).__name__}; expected a mapping of input names to tensors, or None"
        for name, value in given.items():
            declared = self._inputs.get(name)
            if declared is None:
                return f"rows for {name!r}; inputs with a symbolic axis are {sorted(self._inputs)}"
            if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_meta:
                return f"a {type(value).__name__} for {name!r}; expected a dense tensor"
            expected = self._rows_of_one(declared, draft_len)
            if tuple(value.shape) != expected or value.dtype is not declared.dtype:
                return (
                    f"shape {tuple(value.shape)}, {value.dtype} for {name!r}; one request has {expected}, {declared.dtype} "
                    f"there (declared {declared.shape_text})"
                )
        return ""

    def _rows_of_one(self, declared: StaticInput, draft_len: int) -> tuple[int, ...]:
        """The shape of one request's rows; an offset of the axis, such as that of REQUESTS + 1, is no row of its own."""
        tokens = self._beam_width * (draft_len + 1)
        of_one = {"TOKENS": tokens, "REQUESTS": 1}
        return tuple(of_one[length.of] if isinstance(length, Axis) else length for length in declared.shape)

    def release(self) -> None:
        """Give every padding request back, once."""
        with self._lock, ExitStack() as stack:  # all of them, also where one raises
            self.turn += bool(self._held)  # steps padded with them and not yet launched are refused from here on
            while self._held and self.provider is not None:
                draft_len, _ = self._held.popitem()
                stack.callback(self.provider.release, draft_len=draft_len)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Hold none inside; those that were held are taken again at the end, as far as there is storage.

        Taken again at once, and not when next needed: by then live requests may have taken the last block.
        """
        held, before = tuple(self._held), self._suspended
        self.release()
        self._suspended = True
        try:
            yield
        except BaseException:
            self._suspended = before
            for draft_len in held:
                with suppress(Exception):  # nothing may take the place of the caller's exception
                    self.rows(draft_len)
            raise
        self._suspended = before
        for draft_len in held:
            self.rows(draft_len)
