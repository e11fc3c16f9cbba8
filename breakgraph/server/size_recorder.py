"""Writes the sizes of steps to a file while a server runs, for `breakgraph tune`."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from breakgraph.serving.engine import Engine
from breakgraph.serving.size_file import write_sizes

__all__ = ["SizeRecorder", "Sizes", "recorded_sizes"]

_LOG = logging.getLogger(__name__)
_SECONDS = 10.0

Sizes = Mapping[str, Mapping[int, int]]
"""Phase to size to count."""


class SizeRecorder:
    """Writes what was counted every so often, and once more at the end, from a thread of its own.

    A step pays for its count alone. A file that cannot be written is a warning, and the next turn tries again: no step
    and no server ends for it. Nothing is written until something was counted, so that a server that never answers leaves
    the file of the one before.

    Args:
        path: The file, from `checked_size_file`.
        sizes: Copies the counts; called in this thread while steps run.
        seconds: Between two looks at them.
    """

    def __init__(self, path: Path, *, sizes: Callable[[], Sizes], seconds: float = _SECONDS) -> None:
        self._path = path
        self._sizes = sizes
        self._seconds = seconds
        self._written: Sizes = {}
        self._failing = self._told = False
        self._seen: int | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="breakgraph-sizes", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; what was counted until now is written."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._failing = False  # the last word is said again
        self._write(again="")

    def _run(self) -> None:
        while not self._ended.wait(self._seconds):
            self._write()

    def _write(self, *, again: str = "; trying again") -> None:
        sizes = self._sizes()
        if sizes == self._written or not any(sizes.values()):
            return
        self._warn_of_others()
        try:
            write_sizes(self._path, sizes=sizes)
        except OSError as error:
            if not self._failing:
                _LOG.warning("the sizes of steps cannot be written to %s: %s%s", self._path, error, again)
            self._failing = True
            return
        self._written, self._failing = sizes, False
        self._seen = self._stamp()

    def _warn_of_others(self) -> None:
        """Say once where another process has replaced the file since our last turn; a file that is gone is nobody's."""
        stamp = self._stamp()
        if not self._told and None not in (stamp, self._seen) and stamp != self._seen:
            self._told = True
            _LOG.warning("%s was replaced by somebody else; give each server a file of its own", self._path)

    def _stamp(self) -> int | None:
        """When the file was written; None where it is not there, which ends no recording."""
        try:
            return self._path.stat().st_mtime_ns
        except OSError:
            return None


@contextmanager
def recorded_sizes(engine: Engine, *, path: Path | None) -> Iterator[None]:
    """Records the sizes of an engine's steps inside a `with` block.

    Args:
        engine: It may run in another thread.
        path: The file, from `checked_size_file`; None records nothing.
    """
    if path is None:
        yield
        return
    counted = {"prefill": engine.prefill.runner.statistics.sizes, "decode": engine.decode.runner.statistics.sizes}
    # dict() of a Counter of ints copies it in one go, without a line of Python: the engine's thread may count meanwhile.
    recorder = SizeRecorder(path, sizes=lambda: {phase: dict(sizes) for phase, sizes in counted.items()})
    recorder.start()
    try:
        yield
    finally:
        recorder.stop()
