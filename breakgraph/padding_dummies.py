"""Padding dummies: requests that fill a bucket, with storage of their own, so that a padding row writes to nobody's.

A *provider* gives one dummy per draft length its storage (a KV block, a slot of recurrent state, a draft cache) and takes
it back. `JoinedDummies` makes one provider of several, for a request whose state lies in several managers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Protocol

import torch

from breakgraph.errors import ConfigError
from breakgraph.static_buffers import StaticInput

__all__ = ["DummyProvider", "JoinedDummies", "PaddingDummies"]

Rows = Mapping[str, torch.Tensor]


class DummyProvider(Protocol):
    """Gives padding requests storage of their own. One dummy per draft length fills all padding rows of a step."""

    def allocate(self, *, draft_len: int) -> Mapping[str, torch.Tensor] | None:
        """Take storage for one padding request.

        Args:
            draft_len: Draft tokens of the request.

        Returns:
            By input name, the rows of the request on the input's symbolic axis (one on a REQUESTS axis,
            `draft_len + 1` on a TOKENS axis); inputs left out are filled by their padding rule. On the host, for inputs
            that steps give on the host. None: no storage is free now; nothing was taken.
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

    Attributes:
        turn: Changes whenever requests are given back.
    """

    def __init__(self, provider: DummyProvider | None, *, inputs: Iterable[StaticInput]) -> None:
        self.provider = provider
        self.turn = 0
        self._names = frozenset(declared.name for declared in inputs if declared.axis is not None)
        self._held: dict[int, Rows] = {}
        self._suspended = False

    def rows(self, draft_len: int) -> Rows | None:
        """The rows for a draft length; tried again at every step while there is no storage.

        Args:
            draft_len: Draft tokens of the request.
        """
        rows = self._held.get(draft_len)
        if rows is None and self.provider is not None and not self._suspended:
            rows = self.provider.allocate(draft_len=draft_len)
            if rows is not None:
                self._held[draft_len] = rows
                self._check(rows)
        return rows

    def _check(self, rows: Rows) -> None:
        odd = {name: value for name, value in rows.items() if name not in self._names or not _is_dense(value)}
        if odd:
            self.release()
            raise ConfigError(
                f"a padding request has rows for {sorted(odd, key=str)}; expected dense tensors for some of "
                f"{sorted(self._names)}, the inputs with a symbolic axis.",
                why="They fill the rows beyond the real requests; others would be left out, silently.",
                fix="Return {input name: rows} from allocate().",
            )

    def release(self) -> None:
        """Give every padding request back, once."""
        self.turn += bool(self._held)  # steps padded with them and not yet launched are refused from here on
        while self._held and self.provider is not None:
            draft_len, _ = self._held.popitem()
            self.provider.release(draft_len=draft_len)

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
        finally:
            self._suspended = before
        for draft_len in held:  # not after an exception of the caller's: nothing here may take its place
            self.rows(draft_len)


def _is_dense(rows: object) -> bool:
    return isinstance(rows, torch.Tensor) and rows.layout is torch.strided
