"""The graphs of one runner: which keys are captured, proven, published or dropped, and what they take."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Generic, TypeVar

import attrs

from breakgraph.addresses import AddressWatch, plain_tensors
from breakgraph.capture_window import KeyWork, two_passes
from breakgraph.errors import CaptureError
from breakgraph.graph_builder import GraphBuilder
from breakgraph.graph_proof import GraphProof
from breakgraph.padding_limit import Times
from breakgraph.policy import Policy, Verify
from breakgraph.rank_votes import digest
from breakgraph.staging import Layout
from breakgraph.static_buffers import Extent
from breakgraph.statistics import CapturePhase, KeyReport, RunnerStatistics
from breakgraph.step import NOTHING
from breakgraph.work import CapturedKey, Target
from breakgraph.written_buffers import versions, written_since

__all__ = ["GraphSet", "KeyRules"]

_LOG = logging.getLogger(__name__)
_MIB = 1 << 20

K = TypeVar("K", bound=Hashable)


@attrs.frozen
class KeyRules(Generic[K]):
    """What a kind of runner decides about its keys.

    Attributes:
        name: The name of a key's graph, for messages.
        extent: The padded sizes of a key.
        size: What memory a key's graph takes, for comparison.
        serves: Whether a graph of the first key serves steps of the second.
        smaller: Keys of fewer rows, to try in this order.
    """

    name: Callable[[K], str]
    extent: Callable[[K], Extent]
    size: Callable[[K], tuple[int, ...]]
    serves: Callable[[K, K], bool]
    smaller: Callable[[K], Iterator[K]]


class GraphSet(Generic[K]):
    """Captures the graphs of a runner and keeps them.

    Args:
        builder: Makes and proves them.
        keys: Every key to capture, in any order.
        rules: About keys.
        policy: How to decide.
        statistics: Where reports of the capture go.

    Attributes:
        builder: Another one, with a pool of its own, after `clear()`.
        keys: Largest first: later captures then find blocks in the pool that are large enough.
        captured: The published graphs.
        dropped: Keys without a graph, and why.
        watch: Addresses at capture; None before the first.
        version: Changes whenever a graph is published or taken out of service.
    """

    def __init__(
        self,
        builder: GraphBuilder[K],
        *,
        keys: Iterable[K],
        rules: KeyRules[K],
        policy: Policy,
        statistics: RunnerStatistics,
    ) -> None:
        self.builder = builder
        # Equal sizes by a number that is the same in every process, so that ranks whose keys come from sets capture in one order.
        self.keys = dict.fromkeys(sorted(keys, key=lambda key: (rules.size(key), digest(key)), reverse=True))
        self.captured: dict[K, CapturedKey[K]] = {}
        self.dropped: dict[K, str] = {}
        self.watch: AddressWatch | None = None
        self.version = 0
        self._rules = rules
        self._policy = policy
        self._statistics = statistics

    def capture(self) -> None:
        """Run every key without a graph eagerly, then capture, prove and publish each; see `GraphRunner.capture`."""
        wanted = [key for key in self.keys if key not in self.captured]
        names = [self._rules.name(key) for key in wanted]
        ranks = self._policy.ranks
        if ranks is not None:
            ranks.same_start(dict(zip(wanted, names, strict=True)), options=self._policy.of_all_ranks())
        layouts = {key: Layout(self.builder.inputs, self._rules.extent(key)) for key in self.keys}
        self._begin(layouts.values())
        _LOG.info("capturing %d graphs, in two passes: %s", len(wanted), names)
        targets = {
            key: Target(key, name, self._rules.extent(key), layouts[key])
            for key, name in zip(wanted, names, strict=True)
        }
        made: dict[K, CapturedKey[K]] = {}
        before = versions(self._policy.modules)

        def capture(key: K) -> None:
            watch = self._watched()
            made[key] = self._capture_one(targets[key])
            watch.note_live(key, made[key].live)

        def verify(key: K) -> None:
            watch = self._watched()
            self._prove(made[key])
            watch.forget_rebound_live(key)

        def discard(key: K) -> None:
            if (captured := made.pop(key, None)) is not None:
                captured.graph.reset()
                if self.watch is not None:
                    self.watch.note_live(key, {})

        self.dropped = two_passes(
            wanted,
            work=KeyWork(
                warm_up=lambda key: self.builder.warm_up(targets[key], other=self._other_count(key)),
                capture=capture,
                verify=None if self._policy.verify is Verify.NEVER else verify,
                publish=lambda key: self._publish(key, made.pop(key)),
                discard=discard,
                together=None if ranks is None else ranks.outcome,
            ),
            report=self._report,
            progress=self._policy.progress,
        )
        self._split_phases()
        if written := written_since(before, declared=self.builder.declared_state):
            _LOG.warning(
                "the capture has changed %s: forward writes them, and they are neither in state= nor device-fed inputs; "
                "declare them, or every capture leaves them changed and a proof compares runs that begin differently",
                written,
            )
        kept = None if self.builder.kept is None else f"capture: the model keeps what a segment of {self.builder.kept}"
        if ranks is not None:
            kept = ranks.outcome(kept)
        if kept is not None:
            _LOG.warning("all graphs are dropped: %s", kept)
            self.withdraw_all(kept)

    def _begin(self, layouts: Iterable[Layout]) -> None:
        """Allocate the static inputs, and compare addresses with those of an earlier window."""
        failure: Exception | None = None
        try:
            self.builder.stage.reserve(layouts)
            if self.watch is not None:
                self.watch.check()
        except Exception as error:
            failure = error
        if (ranks := self._policy.ranks) is not None:
            told = ranks.outcome(None if failure is None else f"{type(failure).__name__}: {failure}")
            if failure is None and told is not None:
                raise CaptureError(
                    f"the capture did not begin. {told}",
                    why="Captures are made by all ranks or by none.",
                    fix="See what that rank says.",
                )
        if failure is not None:
            raise failure

    def withdraw_all(self, reason: str) -> None:
        """Give every graph back and keep the reason for each key.

        Args:
            reason: For keys that were not dropped for a reason of their own.
        """
        dropped = {key: self.dropped.get(key, reason) for key in self.keys}
        self.clear()
        self.dropped = dropped

    def drop(self, captured: CapturedKey[K], *, reason: str) -> None:
        """Take a published graph out of service.

        Args:
            captured: The graph.
            reason: Why.
        """
        _LOG.warning("%s is dropped: %s", captured.target.where, reason)
        self.captured.pop(captured.target.key, None)
        self.version += 1
        self.dropped[captured.target.key] = reason
        captured.graph.reset()

    def times(self, key: K) -> Times:
        """Measure a published graph beside an eager step of the same rows, and note both in its report.

        Args:
            key: Its key.

        Returns:
            The times.
        """
        times, report = self.builder.times(self.captured[key]), self._report(key)
        report.eager_seconds, report.replay_seconds = times.eager, times.replay
        return times

    def clear(self) -> None:
        """Give all graphs and their pool back. Syncs the host."""
        for captured in self.captured.values():
            captured.graph.reset()
        self.captured.clear()
        self.version += 1
        self.dropped.clear()
        self.watch = None
        self.builder = self.builder.fresh()

    @property
    def nbytes(self) -> int:
        """Device memory that the graphs take: pool, executables and bridges."""
        executables = sum(captured.graph.executable_bytes for captured in self.captured.values())
        return self.builder.nbytes + executables

    def _capture_one(self, target: Target[K]) -> CapturedKey[K]:
        """Capture a key, note what it took, and refuse it where that is above the budget."""
        before = self.nbytes
        held = plain_tensors(self._policy.modules)
        captured = self.builder.capture(target)
        captured.held = held
        executables = captured.graph.executable_bytes
        after, budget = self.nbytes + executables, self._policy.memory_budget
        report = self._report(target.key)
        report.memory_bytes, report.executable_bytes = max(0, after - before), executables
        if budget is not None and after > budget:
            captured.graph.reset()
            self.builder.pool.backend.release()
            if not self.captured:
                self.builder.pool.arena.forget()
            raise CaptureError(
                f"{target.where} needs {_size(after - before)}, and the graphs would take {_size(after)} of a budget of "
                f"{_size(budget)}.",
                why="Memory of graphs is not there for KV blocks and activations.",
                fix="Raise memory_budget, or declare fewer or smaller buckets.",
            )
        return captured

    def _split_phases(self) -> None:
        """Instantiation is a part of the capture; reports tell the two apart."""
        for key, captured in self.captured.items():
            seconds = self._report(key).seconds
            if CapturePhase.INSTANTIATE not in seconds and CapturePhase.CAPTURE in seconds:
                seconds[CapturePhase.INSTANTIATE] = captured.graph.instantiate_seconds
                seconds[CapturePhase.CAPTURE] -= captured.graph.instantiate_seconds

    def _report(self, key: K) -> KeyReport:
        return self._statistics.reports.setdefault(key, KeyReport())

    def _publish(self, key: K, captured: CapturedKey[K]) -> None:
        captured.live, captured.seen = NOTHING, None
        self.captured[key] = captured
        self.version += 1

    def _prove(self, captured: CapturedKey[K]) -> None:
        key, rules = captured.target.key, self._rules
        smaller = next((other for other in rules.smaller(key) if rules.serves(key, other)), None)
        mismatch = GraphProof(self.builder).verify(captured, smaller=smaller, report=self._report(key))
        if mismatch is not None:
            raise CaptureError(
                f"{captured.target.where}: {mismatch}.",
                why="The graph would serve wrong results, silently.",
                fix="Look for work on host data outside a break, for state missing in state=, for rows missing in writes=.",
            )

    def _other_count(self, key: K) -> K | None:
        """A key that tells rows of tokens from rows of requests, where this one has as many of each; else None."""

        def alike(key: K) -> bool:
            return (extent := self._rules.extent(key)).tokens == extent.requests

        return next((other for other in self._rules.smaller(key) if not alike(other)), None) if alike(key) else None

    def _watched(self) -> AddressWatch:
        """Note all addresses before the first capture, when warm-up has grown what grows; later, compare them."""
        if self.watch is None:
            inputs = self.builder.inputs
            watched = {"arena of static inputs": self.builder.stage.arena, **inputs.device_fed}
            self.watch = AddressWatch(self._policy.modules, tensors=watched)
        else:
            self.watch.check()
        return self.watch


def _size(nbytes: int) -> str:
    return f"{nbytes / _MIB:.1f} MiB" if nbytes >= 10 * _MIB else f"{nbytes} bytes"
