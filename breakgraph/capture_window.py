"""Where capture is allowed, and in which order: all keys eagerly first, then the captures, largest first.

Capture happens at start-up only. A capture at run time may move a workspace that older graphs read, and they
would then read freed memory, silently. The same reason makes two passes: a smaller key may need the larger
workspace, so every key runs eagerly before the first capture.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

import attrs

from breakgraph.call_site import UNKNOWN_LINE, raised_at
from breakgraph.errors import CaptureError
from breakgraph.statistics import CapturePhase, KeyReport

__all__ = ["CaptureProgress", "CaptureWindow", "KeyWork", "ProgressReporter", "two_passes"]

_LOG = logging.getLogger(__name__)

K = TypeVar("K")


@attrs.frozen
class CaptureProgress:
    """How far a capture is; handed to `progress=` after each key of each phase.

    Attributes:
        phase: The phase. Capture and verification of a key follow each other.
        key: The key just done.
        done: Keys done in this phase.
        total: Keys in this phase.
    """

    phase: CapturePhase
    key: object
    done: int
    total: int


ProgressReporter = Callable[[CaptureProgress], None]
"""What `progress=` takes: called after each key of each phase."""


class CaptureWindow:
    """The span of time in which a runner may capture."""

    def __init__(self) -> None:
        self._open = False

    @property
    def is_open(self) -> bool:
        """Whether capture is allowed now."""
        return self._open

    @contextmanager
    def open(self) -> Iterator[None]:
        """Allow capture inside. Closed again whatever happens.

        Garbage is collected once and collection is off inside: a collection during a capture could run the
        destructor of an older graph. Nothing is frozen: `gc.unfreeze` would thaw what others froze.

        Yields:
            Nothing.

        Raises:
            CaptureError: The window is open already.
        """
        if self._open:
            raise CaptureError(
                "the capture window of this runner is open already.",
                why="The inner window would close the outer one.",
                fix="Open it once around all captures of start-up.",
            )
        gc.collect()
        was_enabled = gc.isenabled()
        gc.disable()
        self._open = True
        try:
            yield
        finally:
            self._open = False
            if was_enabled:
                gc.enable()

    def require(self, what: str) -> None:
        """Refuse to capture outside the window.

        Args:
            what: What was about to be captured.

        Raises:
            CaptureError: The window is closed.
        """
        if not self._open:
            raise CaptureError(
                f"{what}: capture outside the capture window.",
                why="A capture may move a workspace that graphs captured before still read by address.",
                fix="with runner.capture_window(): runner.capture(), at start-up.",
            )


@attrs.frozen
class KeyWork(Generic[K]):
    """What the passes do for one key.

    Attributes:
        warm_up: Run the key eagerly.
        capture: Capture it; nothing is published yet.
        verify: Prove the capture, or raise. None: it is published unproven.
        publish: Let the graph serve.
        discard: Give back what a key has that will not be published; it may have nothing.
        together: Called with the failure of each phase on this rank, or None; returns that of all ranks. None: no ranks.
    """

    warm_up: Callable[[K], None]
    capture: Callable[[K], None]
    verify: Callable[[K], None] | None
    publish: Callable[[K], None]
    discard: Callable[[K], None]
    together: Callable[[str | None], str | None] | None = None


def two_passes(
    keys: Sequence[K],
    *,
    work: KeyWork[K],
    report: Callable[[K], KeyReport],
    progress: ProgressReporter | None,
) -> dict[K, str]:
    """Run pass 1 (all keys eagerly) and pass 2 (captures, each verified at once), in the order given.

    Failure is atomic per key: an exception of one is kept as text, the other keys go on. The text is all that
    is kept: an exception would hold its frames, and they hold the tensors of the failed capture.

    Args:
        keys: Keys, largest first.
        work: What is done for each.
        report: Where times are noted.
        progress: Called after each key of each phase.

    Returns:
        The failed keys and why.
    """
    failed: dict[K, str] = {}

    def attempt(phase: CapturePhase, step: Callable[[K], None], key: K, done: int) -> bool:
        begin = time.perf_counter()
        failure: str | None = None
        try:
            step(key)
        except Exception as error:
            failure = f"{phase.value}: {_text(error)}"
            _LOG.debug("%s of %s", phase.value, key, exc_info=True)
        finally:
            report(key).seconds[phase] = time.perf_counter() - begin
            if progress is not None:
                progress(CaptureProgress(phase, key, done, len(keys)))
        if work.together is not None:
            failure = work.together(failure)
        if failure is not None:
            failed[key] = failure
            _LOG.warning("%s failed and will run eagerly: %s", key, failure)
        return failure is None

    for done, key in enumerate(keys, start=1):
        attempt(CapturePhase.WARM_UP, work.warm_up, key, done)
    for done, key in enumerate(keys, start=1):
        if key in failed:
            continue
        proven = attempt(CapturePhase.CAPTURE, work.capture, key, done) and (
            work.verify is None or attempt(CapturePhase.VERIFY, work.verify, key, done)
        )
        (work.publish if proven else work.discard)(key)
    return failed


def _text(error: Exception) -> str:
    notes = getattr(error, "__notes__", [])
    where = raised_at(error.__traceback__)
    try:
        said = str(error)
    except Exception:  # an exception of the caller's that cannot even be printed
        said = "an exception whose text could not be made"
    lines = [f"{type(error).__name__}: {said}", *notes]
    if where != UNKNOWN_LINE and not any(where in line for line in lines):
        lines.append(f"raised at {where}")
    return "\n".join(lines)
