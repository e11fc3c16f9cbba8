"""Hooks on what a thread does with streams and events while it captures.

torch's methods call one another (`wait_stream` records an event and waits for it), so each hook acts on the outermost
call only. Hooks are shared by threads, counted, and taken off by the last user; in a thread without a capture they cost one
attribute read. `torch.Stream` and `torch.Event` are types of C that take no hook: what is done through their own methods is
not seen.
"""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["Watcher", "unwatched", "watched"]


class Watcher(abc.ABC):
    """What is told of a thread's streams. Methods that return True have done the work: torch's own must not run."""

    @abc.abstractmethod
    def on_wait_stream(self, waiter: torch.cuda.Stream, waited: torch.Stream) -> bool:
        """`waiter.wait_stream(waited)`."""

    @abc.abstractmethod
    def on_wait_event(self, waiter: torch.cuda.Stream, event: torch.Event) -> bool:
        """`waiter.wait_event(event)`."""

    @abc.abstractmethod
    def on_record(self, event: torch.cuda.Event, stream: torch.cuda.Stream) -> bool:
        """`event.record(stream)`."""

    @abc.abstractmethod
    def on_switch(self, left: torch.Stream, entered: torch.Stream) -> None:
        """The current stream has changed."""


class _Thread(threading.local):
    watcher: Watcher | None = None
    depth = 0


_thread = _Thread()


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Tell `watcher` what this thread does with streams and events."""
    _hooks.install()
    previous, _thread.watcher = _thread.watcher, watcher
    try:
        yield
    finally:
        _thread.watcher = previous
        _hooks.remove()


@contextmanager
def unwatched() -> Iterator[None]:
    """What we or torch do within a call is no news to the watcher."""
    _thread.depth += 1
    try:
        yield
    finally:
        _thread.depth -= 1


class _Hooks:
    """Methods of torch.cuda that are replaced while at least one capture runs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._saved: list[tuple[Any, str, Any]] = []

    def install(self) -> None:
        """Replace the methods, for the first user."""
        with self._lock:
            self._users += 1
            if self._users > 1:
                return
            stream, event = torch.cuda.Stream, torch.cuda.Event
            waits = _around(stream.wait_stream, lambda w, s, other: w.on_wait_stream(s, other), parameter="stream")
            waits_event = _around(stream.wait_event, lambda w, s, e: w.on_wait_event(s, e), parameter="event")
            self._replace(stream, "wait_stream", waits)
            self._replace(stream, "wait_event", waits_event)
            self._replace(event, "record", _around_event(event.record, lambda w, e, s: w.on_record(e, s)))
            self._replace(event, "wait", _around_event(event.wait, lambda w, e, s: w.on_wait_event(s, e)))
            self._replace(stream, "__enter__", _entering(stream.__enter__))
            self._replace(stream, "__exit__", _leaving(stream.__exit__))
            self._replace(torch.cuda, "set_stream", _set_stream(torch.cuda.set_stream))

    def remove(self) -> None:
        """Put the methods back exactly, for the last user: also those that a class had only inherited."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
            for owner, name, original in reversed(self._saved):
                if original is _INHERITED:
                    delattr(owner, name)
                else:
                    setattr(owner, name, original)
            self._saved.clear()

    def _replace(self, owner: Any, name: str, hook: Callable[..., Any]) -> None:
        self._saved.append((owner, name, owner.__dict__.get(name, _INHERITED)))
        setattr(owner, name, hook)


_INHERITED = object()
_hooks = _Hooks()


def _outermost() -> Watcher | None:
    """The watcher of this thread, where the call at hand is not made by torch or by us inside another."""
    watcher = _thread.watcher
    return None if watcher is None or _thread.depth else watcher


def _around(
    original: Callable[..., Any], tell: Callable[[Watcher, Any, Any], bool], *, parameter: str
) -> Callable[..., Any]:
    """A hook on a method with one argument, which may be given by name."""

    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        watcher = _outermost()
        given = args or tuple(value for name, value in kwargs.items() if name == parameter)
        if watcher is None or len(given) != 1 or len(args) + len(kwargs) != 1:
            return original(self, *args, **kwargs)  # with wrong arguments: torch says so
        with unwatched():
            return None if tell(watcher, self, given[0]) else original(self, *args, **kwargs)

    return hook


def _around_event(original: Callable[..., Any], tell: Callable[[Watcher, Any, Any], bool]) -> Callable[..., Any]:
    def hook(self: Any, stream: Any = None) -> Any:
        watcher = _outermost()
        if watcher is None:
            return original(self, stream)
        if stream is None:
            stream = torch.cuda.current_stream()
        with unwatched():
            return None if tell(watcher, self, stream) else original(self, stream)

    return hook


def _set_stream(original: Callable[..., Any]) -> Callable[..., Any]:
    def hook(stream: Any) -> Any:
        watcher = _outermost()
        if watcher is None or stream is None:
            return original(stream)
        left = torch.cuda.current_stream()
        with unwatched():
            result = original(stream)
        watcher.on_switch(left, stream)  # after the switch: the error must not leave the wrong stream current
        return result

    return hook


def _entering(original: Callable[..., Any]) -> Callable[..., Any]:
    def hook(self: Any) -> Any:
        watcher = _outermost()
        if watcher is None:
            return original(self)
        left = torch.cuda.current_stream()
        with unwatched():
            result = original(self)
        watcher.on_switch(left, self)
        return result

    return hook


def _leaving(original: Callable[..., Any]) -> Callable[..., Any]:
    def hook(self: Any, *error: Any) -> Any:
        watcher = _outermost()
        if watcher is None:
            return original(self, *error)
        with unwatched():
            result = original(self, *error)
        watcher.on_switch(self, torch.cuda.current_stream())
        return result

    return hook
