"""Serves until a signal comes, then lets the answers that run come to their end."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import attrs
import uvicorn
from fastapi import FastAPI

from breakgraph.errors import ConfigError, InternalError
from breakgraph.server.service import Service

__all__ = ["Running", "bind", "run_server"]

_SWITCH_SECONDS = 0.0005
_AFTER_DRAIN_SECONDS = 10
_TO_TELL_SECONDS = 0.5


def bind(host: str, port: int) -> socket.socket:
    """Takes the address, so that a port in use is known before a model is loaded.

    Args:
        host: Address or name.
        port: 0 takes any that is free.

    Returns:
        A bound socket that does not listen yet.

    Raises:
        ConfigError: It cannot be had.
    """
    if not 0 <= port <= 65535:  # the system's own resolver would take the rest of a division
        raise ConfigError(
            f"port is {port}; expected 0 to 65535.",
            why="There are no others.",
            fix="Give one of them; 0 takes any that is free.",
        )
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, protocol)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
        except BaseException:
            made.close()
            raise
    except (OSError, OverflowError, UnicodeError) as error:
        raise ConfigError(
            f"the server cannot have {host}:{port}: {error}.",
            why="Clients would reach another program, or nothing.",
            fix="Give a --host that is an address of this machine, and a --port that nothing else has (0 takes any).",
        ) from None
    return made


@attrs.frozen
class Running:
    """A server that takes requests.

    Attributes:
        address: Such as ``http://127.0.0.1:8000``.
        stop: Does what the first signal does; for any thread.
    """

    address: str
    stop: Callable[[], None]


def run_server(
    app: FastAPI,
    *,
    service: Service,
    listener: socket.socket,
    on_ready: Callable[[Running], None] | None = None,
    on_drain: Callable[[int], None] | None = None,
) -> None:
    """Serves until SIGINT or SIGTERM, then drains; a second signal ends it at once.

    Answers may go on for `Limits.drain_seconds`; what is left then ends with an error. While it runs, Python's threads take turns
    ten times as often as by default: the engine's thread comes back from a wait for the device, and must not stand behind text
    for 5 ms.

    Args:
        app: From `create_app`.
        service: The app's.
        listener: From `bind`.
        on_ready: Called when requests are taken.
        on_drain: Called when it was told to stop, with the number of answers that still run.

    Raises:
        InternalError: The service could not be started.
    """
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="on",
        server_header=False,
        timeout_graceful_shutdown=int(service.limits.drain_seconds) + _AFTER_DRAIN_SECONDS,
    )
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        _Server(config, service=service, on_ready=on_ready, on_drain=on_drain).run(sockets=[listener])
    except SystemExit:  # uvicorn's, which has logged why; a caller's thread would end without a word
        raise InternalError("the server did not start; uvicorn's log says why.") from None
    finally:
        sys.setswitchinterval(before)
        listener.close()


class _Server(uvicorn.Server):
    """Uvicorn's server, which drains the service when it is told to stop, and does not die of the signal afterwards."""

    def __init__(
        self,
        config: uvicorn.Config,
        *,
        service: Service,
        on_ready: Callable[[Running], None] | None,
        on_drain: Callable[[int], None] | None,
    ) -> None:
        super().__init__(config)
        self._on_drain = on_drain
        self._service = service
        self._on_ready = on_ready
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts listening, then says so."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets=sockets)
        if self.started and self._on_ready is not None and sockets:
            host, port = sockets[0].getsockname()[:2]
            address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            self._on_ready(Running(address, lambda: self.handle_exit(signal.SIGTERM, None)))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains; the next one ends answers with an error, and the server as soon as they are told."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._cut_off if self.should_exit else self._drain)
        self.should_exit = True

    def _drain(self) -> None:
        self._service.drain()
        if self._on_drain is not None:
            self._on_drain(self._service.running)

    def _cut_off(self) -> None:
        self._service.cut_off()
        assert self._loop is not None
        self._loop.call_later(_TO_TELL_SECONDS, self._force)

    def _force(self) -> None:
        self.force_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handles signals while it serves, and puts back the handlers that were there."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {kind: signal.signal(kind, self.handle_exit) for kind in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for kind, handler in before.items():
                signal.signal(kind, handler)
