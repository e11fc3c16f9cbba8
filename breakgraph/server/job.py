"""What `breakgraph serve` does: checks everything, cheap things first, loads, captures, says what there is, and serves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import attrs

from breakgraph.errors import ConfigError
from breakgraph.models.via import Via
from breakgraph.server.app import create_app
from breakgraph.server.limits import Limits
from breakgraph.server.run import Running, bind, run_server
from breakgraph.server.service import Service, require_tokenizer
from breakgraph.server.size_recorder import recorded_sizes
from breakgraph.serving.llm import LLM, Progress
from breakgraph.serving.size_file import checked_size_file
from breakgraph.serving.startup import choose_device

__all__ = ["ServeJob"]

# What is not said is chosen for the device: a GPU serves many, and graphs are cheap there; on a CPU each costs seconds at start.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "cuda": {"max_batch_size": 256, "sampling": "all"},
    "cpu": {"max_batch_size": 4},
}
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@attrs.define(eq=False, kw_only=True)
class ServeJob:
    """A server to be.

    Attributes:
        model: "demo" or a path.
        via: Whose code runs it; see `load_model`.
        device: "auto", "cpu" or "cuda".
        dtype: Of the weights; None takes the device's.
        cache_root: Where converted GGUF files are kept.
        host: Address to listen on.
        port: 0 takes any that is free.
        name: What clients call the model; None takes the name of its folder.
        api_key: What clients must send; None lets everybody in.
        limits: Bounds of the server.
        record_sizes: File for the sizes of steps, a `.jsonl` or `.csv` that `breakgraph tune` reads; None records none.
        options: Fields of `EngineConfig`; those that are None are chosen for the device.
    """

    model: str = "demo"
    via: Via = Via.AUTO
    device: str = "auto"
    dtype: str | None = None
    cache_root: Path | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    name: str | None = None
    api_key: str | None = None
    limits: Limits = attrs.field(factory=Limits)
    record_sizes: Path | None = None
    options: Mapping[str, Any] = attrs.field(factory=dict)

    def run(
        self,
        *,
        bars: Callable[[], AbstractContextManager[Progress]],
        started: Callable[[LLM], None],
        say: Callable[[str], None],
    ) -> None:
        """Serves until a signal comes.

        Args:
            bars: Makes a context in which progress is shown.
            started: Called with the engine behind it, before requests are taken.
            say: Called with lines for people.

        Raises:
            ConfigError: Something was given that cannot work.
        """
        _check_key(self.api_key)
        size_file = None if self.record_sizes is None else checked_size_file(self.record_sizes)
        kind = choose_device(self.device).type
        given = {name: value for name, value in self.options.items() if value is not None}
        llm = LLM(
            self.model,
            via=self.via,
            device=self.device,
            dtype=self.dtype,
            cache_root=self.cache_root,
            **{**_DEFAULTS[kind], **given},
        )
        listener = bind(self.host, self.port)
        try:
            with bars() as progress:
                llm.progress = progress
                llm.start()
            require_tokenizer(llm.model)
            started(llm)
            service = Service(llm.model, engine=llm.engine, name=self.name or self._short_name, limits=self.limits)
            if self.host not in _LOOPBACK and self.api_key is None:
                say(f"breakgraph: everybody who reaches {self.host} may use this server; --api-key asks for a key.")

            def ready(running: Running) -> None:
                say(f"serving {service.name} at {running.address}/v1; Ctrl-C ends it.")

            def draining(running: int) -> None:
                if running:
                    say(
                        f"{running} answers run and may go on for {self.limits.drain_seconds:g} s; Ctrl-C ends them now."
                    )

            app = create_app(service, api_key=self.api_key)
            with recorded_sizes(llm.engine, path=size_file):
                run_server(app, service=service, listener=listener, on_ready=ready, on_drain=draining)
        finally:
            listener.close()

    @property
    def _short_name(self) -> str:
        return self.model if self.model == "demo" else Path(self.model).expanduser().resolve().name


def _check_key(key: str | None) -> None:
    """Refuses keys that no client can send in a header."""
    if key is not None and not (key and key.isascii() and key.isprintable() and key == key.strip()):
        raise ConfigError(
            "the API key is empty, or has characters that a header cannot carry.",
            why="It would let everybody in, or nobody.",
            fix="Give printable ASCII without spaces at its ends, or leave it out.",
        )
