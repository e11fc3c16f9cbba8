"""Is a captured graph what eager computes? The proof of a key before it is published, and of a step while it is served."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any, Generic, TypeVar

import attrs
import torch

from breakgraph.divergence import first_divergence
from breakgraph.glances import NO_ALLOCATION, PoisonedAllocations
from breakgraph.graph_builder import GraphBuilder
from breakgraph.staging import Staged
from breakgraph.static_buffers import Extent
from breakgraph.statistics import KeyReport
from breakgraph.verification import Compared, Verdict, judge, same_snapshot, snapshot
from breakgraph.work import CapturedKey, Example, Target

__all__ = ["GraphProof"]

_LOG = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)


class GraphProof(Generic[K]):
    """Compares replays of one runner's graphs with their eager twins.

    Args:
        builder: Made the graphs; runs the twins.
    """

    def __init__(self, builder: GraphBuilder[K]) -> None:
        self._builder = builder

    def verify(self, captured: CapturedKey[K], *, smaller: K | None, report: KeyReport) -> str | None:
        """Prove a graph with a second full example and with a padded step; state and generators are put back.

        The padded step comes first: where it reads padding rows that a break left unwritten, its replay finds poison. It follows
        on its twin at once, since state that is not declared, such as a large cache, is not put back.

        Args:
            captured: The graph.
            smaller: A key of fewer rows that this graph serves; None where it is never padded.
            report: Where what was found is noted.

        Returns:
            What is wrong; None when the graph is proven.
        """
        target = captured.target
        example, real = self._builder.example(target.key)
        with self._builder.pool.on_capture_stream(), torch.no_grad():
            part, skipped = self._smaller_example(target, smaller)
            padded = None
            if part is not None and (other := self._other_plan(captured, part[0])) is not None:
                part, skipped = None, f"a step of example({smaller}) would be eager: {other}"
            if self._anyone(part is None):
                part, skipped = None, skipped or "another rank could not make this step"
            if (other := self._other_plan(captured, example)) is not None:
                return f"example({target.key}) gives live data of another replay signature than at capture: {other}"
            if part is not None:
                padded, skipped = self._judge_padded(captured, *part)
            verdict = self._judge(
                captured,
                partial(self._builder.replay_example, captured, example, real),
                partial(self._builder.twin, captured, example, real),
            )
        mismatch = padded if verdict.mismatch is None else verdict.mismatch
        inputs, frozen = captured.seen or ({}, {})
        report.fresh_inputs = not same_snapshot(inputs, snapshot(example.inputs, most_bytes=0))
        report.fresh_live = not same_snapshot(frozen, snapshot(example.live, most_bytes=0)) if example.live else None
        report.tolerated = verdict.tolerated
        report.padded_rows, report.padded_skipped = None if part is None or skipped else part[1].tokens, skipped
        for what, fresh in (("inputs", report.fresh_inputs), ("live data", report.fresh_live)):
            if fresh is False:
                _LOG.info("%s was verified with the %s of its capture: example(key) repeats them", target.where, what)
        return mismatch

    def run_proven(
        self, captured: CapturedKey[K], *, live: Mapping[str, Any], real: Extent, staged: Staged
    ) -> tuple[Any, str | None]:
        """Compare the replay of a step with its eager twin, then run the one that may be trusted.

        The replay that is compared finds poison where segments allocate without values, as in the proof before: what it reads
        there it must have written.

        Args:
            captured: The graph.
            live: Live data of the step.
            real: Real sizes of the step.
            staged: Its inputs.

        Returns:
            The result's real rows, and what differs: then the result is eager's.

        Raises:
            ConcurrentReplayError: The pool is in use; nothing was changed.
        """

        def replay() -> Any:
            return self._builder.replay(captured, live=live, real=real, staged=staged)

        def poisoned() -> Any:
            with self._builder.pool.used_by(f"the proof of a step of {captured.target.where}"):
                self._builder.pool.backend.poison_unwritten()
            return replay()

        def eager() -> Any:
            # Zeros where the replay finds poison: otherwise both may find the same bits there, by chance.
            with (
                PoisonedAllocations(only=NO_ALLOCATION),
                self._builder.pool.used_by(f"the proof of a step of {captured.target.where}"),
            ):
                self._builder.commit(captured.target, live, staged)
                return captured.outputs.cut(self._builder.eager(captured.target, live, real=real), real)

        with torch.no_grad():
            with self._builder.pool.used_by(f"the proof of a step of {captured.target.where}"):
                pass  # refused here, before the state of a step that is running is saved and put back
            verdict = self._judge(captured, poisoned, eager)
            return (replay() if verdict.mismatch is None else eager()), verdict.mismatch

    def _judge(
        self,
        captured: CapturedKey[K],
        replay: Callable[[], Any],
        eager: Callable[[], Any],
        *,
        compared: Compared = Compared.ALL,
    ) -> Verdict:
        """Compare, and where the two differ, find the first step that does."""
        keeper, tolerance = self._builder.keeper, self._builder.tolerance
        verdict = judge(keeper, replay=replay, eager=eager, tolerance=tolerance, compared=compared, anyone=self._anyone)
        if verdict.mismatch is None or self._builder.work.together is not None:
            return verdict  # other ranks would not join in the runs that look for it
        try:
            found = first_divergence(captured.graph, keeper=keeper, replay=replay, eager=eager, compared=compared)
        except Exception as error:
            _LOG.info("%s: the first step that differs was not found: %s", captured.target.where, error)
            found = None
        return verdict if found is None else attrs.evolve(verdict, mismatch=f"{verdict.mismatch}; {found}")

    def _anyone(self, flag: bool) -> bool:
        """Whether a flag is set on any rank; alone, this one's."""
        return flag if self._builder.work.together is None else self._builder.work.together.anyone(flag)

    def _smaller_example(self, target: Target[K], key: K | None) -> tuple[tuple[Example, Extent] | None, str]:
        if key is None:
            return None, "its graph is never padded"
        try:
            return self._builder.example(key), ""
        except Exception as error:
            _LOG.info("%s was verified without padding: example(%s) failed: %s", target.where, key, error)
            return None, f"example({key}) raised {type(error).__name__}: {error}"

    def _other_plan(self, captured: CapturedKey[K], example: Example) -> str | None:
        self._builder.plan(captured.target.key, example.live, padded_rows=captured.target.extent.tokens)
        return captured.other_plan(example.live)

    def _judge_padded(self, captured: CapturedKey[K], example: Example, real: Extent) -> tuple[str | None, str]:
        """What is wrong with the real rows of a padded step, and why that cannot be said."""
        where = f"with {real.tokens} of {captured.target.extent.tokens} rows"
        self._builder.pool.backend.poison_unwritten()
        replay = partial(self._builder.replay_example, captured, example, real)

        def eager() -> Any:
            with PoisonedAllocations(only=NO_ALLOCATION):  # zeros: see run_proven
                return self._builder.twin(captured, example, real)

        try:
            verdict = self._judge(captured, replay, eager, compared=Compared.RESULT)
        except Exception as error:
            try:
                self._builder.keeper.outcome(eager, compared=Compared.RESULT)
            except Exception as same:  # no matter of the graph, then
                return None, f"eager {where} raised {type(same).__name__}: {same}"
            return f"{where}, the replay raised {type(error).__name__} and eager did not: {error}", ""
        if verdict.mismatch is None:
            return None, ""
        return f"{where}: {verdict.mismatch}; does a segment read rows that a break leaves unwritten (writes=)?", ""
