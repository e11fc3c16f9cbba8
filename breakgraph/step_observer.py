"""What may look at, or replace, the run of each step of a replay: debugging, measuring and comparing are built on it."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

from breakgraph.replay_program import Step

__all__ = ["Run", "StepObserver"]

Run = Callable[[], Any]
"""Runs a step; returns None, or a tuple whose first item is an error code, as `Segment.bound()` does."""


class StepObserver(abc.ABC):
    """Wraps the run of steps. It is asked once when a graph is bound, so that a replay without one pays nothing."""

    @abc.abstractmethod
    def wrap(self, step: Step, *, index: int, run: Run) -> Run:
        """What a replay calls in place of `run`.

        Args:
            step: The step.
            index: Its place in `graph.steps`.
            run: Runs it; it must be called exactly once for the graph to stay what it is.
        """
