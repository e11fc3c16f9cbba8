"""The capture window and the order of the two passes."""

from __future__ import annotations

import gc

import pytest

from breakgraph.capture_window import CaptureProgress, CaptureWindow, KeyWork, two_passes
from breakgraph.errors import CaptureError
from breakgraph.statistics import CapturePhase, KeyReport


class Recorder:
    """Notes every call, and fails where it is told to."""

    def __init__(self, *, fail: tuple[str, int] | None = None, verify: bool = True) -> None:
        self.calls: list[tuple[str, int]] = []
        self.progress: list[CaptureProgress] = []
        self.reports: dict[int, KeyReport] = {}
        self.fail = fail
        self.verify = verify

    def note(self, what: str, key: int) -> None:
        self.calls.append((what, key))
        if self.fail == (what, key):
            error = ValueError(f"{what} of {key} broke")
            error.add_note("a note")
            raise error

    def run(self, keys: list[int]) -> dict[int, str]:
        work = KeyWork[int](
            warm_up=lambda key: self.note("warm-up", key),
            capture=lambda key: self.note("capture", key),
            verify=(lambda key: self.note("verify", key)) if self.verify else None,
            publish=lambda key: self.note("publish", key),
            discard=lambda key: self.note("discard", key),
        )
        return two_passes(
            keys,
            work=work,
            report=lambda key: self.reports.setdefault(key, KeyReport()),
            progress=self.progress.append,
        )


def test_all_keys_run_eagerly_before_the_first_capture() -> None:
    """REQ-D2: pass 1 covers every key, pass 2 captures in the order given and verifies each capture at once."""
    recorder = Recorder()
    assert recorder.run([4, 2]) == {}
    assert recorder.calls == [
        ("warm-up", 4),
        ("warm-up", 2),
        ("capture", 4),
        ("verify", 4),
        ("publish", 4),
        ("capture", 2),
        ("verify", 2),
        ("publish", 2),
    ]


@pytest.mark.parametrize("phase", ["warm-up", "capture", "verify"])
def test_failure_is_atomic_per_key(phase: str) -> None:
    """REQ-D5, FAULT-E4: a key that fails goes no further and keeps its reason; the other keys are captured."""
    recorder = Recorder(fail=(phase, 4))
    failed = recorder.run([8, 4, 2])
    assert set(failed) == {4}
    assert f"{phase}: ValueError: {phase} of 4 broke\na note" in failed[4]
    after = {
        "warm-up": ["warm-up"],
        "capture": ["warm-up", "capture", "discard"],
        "verify": ["warm-up", "capture", "verify", "discard"],
    }
    assert [what for what, key in recorder.calls if key == 4] == after[phase]
    assert ("publish", 2) in recorder.calls


def test_an_interrupt_is_no_failed_key() -> None:
    """Only errors are kept per key: an interrupt leaves the passes at once."""

    def interrupt(key: int) -> None:
        raise KeyboardInterrupt

    work = KeyWork[int](warm_up=interrupt, capture=interrupt, verify=None, publish=interrupt, discard=interrupt)
    with pytest.raises(KeyboardInterrupt):
        two_passes([2, 1], work=work, report=lambda key: KeyReport(), progress=None)


def test_times_and_progress_of_each_phase() -> None:
    """REQ-D8, REQ-D10: each key's time is noted per phase, and progress counts the keys of each phase."""
    recorder = Recorder()
    recorder.run([4, 2])
    assert all(
        set(report.seconds) == set(CapturePhase) - {CapturePhase.INSTANTIATE} for report in recorder.reports.values()
    )
    warm_up = [(step.key, step.done, step.total) for step in recorder.progress if step.phase is CapturePhase.WARM_UP]
    assert warm_up == [(4, 1, 2), (2, 2, 2)]
    assert len(recorder.progress) == 6


def test_without_verification_there_are_two_phases() -> None:
    """verify=None leaves the third phase out."""
    recorder = Recorder(verify=False)
    recorder.run([4])
    assert recorder.calls == [("warm-up", 4), ("capture", 4), ("publish", 4)]


def test_window_is_closed_again_on_an_exception() -> None:
    """REQ-D1: whatever happens inside, the window is closed and garbage collection is as before."""
    window = CaptureWindow()
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), window.open():
        assert window.is_open
        assert not gc.isenabled()
        raise ZeroDivisionError
    assert not window.is_open
    assert gc.isenabled()


def test_windows_of_two_runners_nest() -> None:
    """Two runners may capture in one block; collection comes back when the outer window closes."""
    with CaptureWindow().open():
        with CaptureWindow().open():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_disabled_collection_stays_disabled() -> None:
    """A process that runs without garbage collection still does after the window; nothing was frozen."""
    frozen = gc.get_freeze_count()
    gc.disable()
    try:
        with CaptureWindow().open():
            pass
        assert not gc.isenabled()
        assert gc.get_freeze_count() == frozen
    finally:
        gc.enable()


def test_one_runner_has_one_window() -> None:
    """Opening an open window is refused: the inner one would close the outer."""
    window = CaptureWindow()
    with window.open(), pytest.raises(CaptureError, match="open already"), window.open():
        pass


def test_capture_outside_the_window_is_refused() -> None:
    """REQ-D1: outside the window, a capture is an error that says why and what to do."""
    with pytest.raises(CaptureError, match=r"capture\(\): capture outside the capture window"):
        CaptureWindow().require("capture()")
