"""What both runners share: gates, routing a step to its graph, prepare and launch, capture, statistics.

A step has two halves. `prepare` does all host work: gates, key, checks, staging, planning. `launch` puts copies,
segments and breaks on the stream. The host may prepare a step while the device still works on the one before.
"""

from __future__ import annotations

import abc
import logging
from collections.abc import Hashable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

import torch

from breakgraph.addresses import AddressWatch
from breakgraph.capture import BreakableCUDAGraph, GraphPool
from breakgraph.capture_window import CaptureWindow, KeyWork, two_passes
from breakgraph.errors import CaptureError, NoGraphError
from breakgraph.gates import Gates, Refusal
from breakgraph.graph_builder import CapturedKey, Example, GraphBuilder, Target, Work
from breakgraph.policy import CheckAddresses, Fallback, Policy, Verify
from breakgraph.staging import Layout, Staged
from breakgraph.static_buffers import Extent, InputSet, StaticInput
from breakgraph.statistics import KeyReport, Reason, RunnerStatistics
from breakgraph.step import NOTHING, Prepared, Result
from breakgraph.verification import own

__all__ = ["Example", "GraphRunner", "Policy", "Prepared", "Result", "Work"]

_LOG = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)


class GraphRunner(abc.ABC, Generic[K]):
    """Replays a graph where one exists and may be used, and runs eagerly otherwise.

    Args:
        work: What to run.
        policy: How to decide.
        inputs: Declared inputs.
        device: Device of model and inputs.
        keys: Every key to capture, in any order.
    """

    def __init__(
        self, work: Work[K], *, policy: Policy, inputs: Iterable[StaticInput], device: torch.device, keys: Iterable[K]
    ) -> None:
        device = torch.empty(0, device=device).device  # with its index, so that it can be compared
        self.statistics = RunnerStatistics()
        self.dropped: dict[K, str] = {}
        self._policy = policy
        self._inputs = InputSet(inputs, device=device)
        self._builder = GraphBuilder(work, inputs=self._inputs, tolerance=policy.tolerance)
        self._gates = Gates(policy.gates, override=policy.override)
        self._window = CaptureWindow()
        self._watch: AddressWatch | None = None
        # Largest first: later captures then find blocks in the pool that are large enough.
        self._keys = dict.fromkeys(sorted(keys, key=self._size, reverse=True))
        self._captured: dict[K, CapturedKey[K]] = {}
        self._routes: dict[K, CapturedKey[K]] = {}

    # What a kind of runner decides.

    @abc.abstractmethod
    def _name(self, key: K) -> str:
        """The name of a key's graph, for messages."""

    @abc.abstractmethod
    def _extent(self, key: K) -> Extent:
        """The padded sizes of a key."""

    @abc.abstractmethod
    def _size(self, key: K) -> tuple[int, ...]:
        """What memory a key's graph takes, for comparison."""

    @abc.abstractmethod
    def _round_up(self, key: K) -> K | Refusal:
        """The key whose graph serves a step, or why none can."""

    @abc.abstractmethod
    def _padding(self, key: K, captured: CapturedKey[K]) -> Mapping[str, torch.Tensor] | Refusal | None:
        """The rows of one padding request for this step, None where the rules of the inputs suffice."""

    @abc.abstractmethod
    def _after_capture(self) -> None:
        """What is left to do at the end of a capture."""

    # Capture.

    def capture_window(self) -> AbstractContextManager[None]:
        """Allow capture inside a `with` block; garbage is collected once and collection is off inside.

        Returns:
            The context manager. The window closes whatever happens inside.
        """
        return self._window.open()

    def capture(self) -> None:
        """Run every key eagerly, then capture, prove and publish each, largest first.

        A key that fails is dropped with its reason (`dropped`), the others go on. Keys captured before are
        left alone, dropped ones are tried again. Costs two forwards for each key, and three more to verify it.

        Raises:
            CaptureError: Outside the capture window.
            MovedBufferError: Parameters moved since an earlier window: graphs captured then cannot be used.
        """
        self._window.require("capture()")
        if not self._policy.enabled:
            _LOG.info("the runner is disabled: nothing is captured")
            return
        layouts = {key: Layout(self._inputs, self._extent(key)) for key in self._keys}
        self._builder.stage.reserve(layouts.values())
        if self._watch is not None:
            self._watch.check()
        wanted = [key for key in self._keys if key not in self._captured]
        _LOG.info("capturing %d graphs: %s", len(wanted), [self._name(key) for key in wanted])
        targets = {key: Target(key, self._name(key), self._extent(key), layouts[key]) for key in wanted}
        made: dict[K, CapturedKey[K]] = {}

        def capture(key: K) -> None:
            self._watch_addresses()
            made[key] = self._builder.capture(targets[key])
            if self._policy.verify is Verify.NEVER:
                self._publish(key, made.pop(key))

        def verify(key: K) -> None:
            captured = made.pop(key)
            try:
                self._prove(captured)
            except BaseException:
                captured.graph.reset()
                raise
            self._publish(key, captured)

        self._routes.clear()
        self.dropped = two_passes(
            wanted,
            work=KeyWork(
                warm_up=lambda key: self._builder.warm_up(targets[key]),
                capture=capture,
                verify=None if self._policy.verify is Verify.NEVER else verify,
            ),
            report=lambda key: self.statistics.reports.setdefault(key, KeyReport()),
            progress=self._policy.progress,
        )
        self._after_capture()

    def _watch_addresses(self) -> None:
        """Note all addresses before the first capture, when warm-up has grown what grows; later, compare them."""
        if self._watch is None:
            watched = {"arena of static inputs": self._builder.stage.arena, **self._inputs.device_fed}
            self._watch = AddressWatch(self._policy.modules, tensors=watched)
        else:
            self._watch.check()

    def _prove(self, captured: CapturedKey[K]) -> None:
        verdict, fresh = self._builder.verify(captured)
        report = self.statistics.reports[captured.target.key]
        report.fresh_inputs, report.tolerated = fresh, verdict.tolerated
        if not fresh:
            _LOG.info(
                "%s was verified with the inputs of its capture: example(key) repeats itself", captured.target.where
            )
        if verdict.mismatch is not None:
            raise CaptureError(
                f"{captured.target.where}: {verdict.mismatch}.",
                why="The graph would serve wrong results, silently.",
                fix="Look for work that depends on host data and is not in a break, or for state missing in state=.",
            )

    def _publish(self, key: K, captured: CapturedKey[K]) -> None:
        captured.example = None
        self._captured[key] = captured

    def clear(self) -> None:
        """Give all graphs and their pool back; until the next capture every step runs eagerly. Syncs the host."""
        for captured in self._captured.values():
            captured.graph.reset()
        self._captured.clear()
        self._routes.clear()
        self.dropped.clear()
        self._watch = None
        self._builder = GraphBuilder(self._builder.work, inputs=self._inputs, tolerance=self._policy.tolerance)

    @property
    def graphs(self) -> Mapping[K, BreakableCUDAGraph]:
        """The published graphs by key."""
        return {key: captured.graph for key, captured in self._captured.items()}

    @property
    def pool(self) -> GraphPool:
        """The pool that all graphs of this runner share; another one after `clear()`."""
        return self._builder.pool

    def suspend(self, reason: Reason = Reason.DISABLED) -> AbstractContextManager[None]:
        """Run every step inside a `with` block eagerly.

        Args:
            reason: What the steps are counted under.

        Returns:
            The context manager.
        """
        return self._gates.suspend(reason)

    # Steps.

    def _prepare(
        self,
        inputs: Mapping[str, torch.Tensor],
        *,
        key: K,
        extent: Extent,
        live: Mapping[str, Any] | None,
        refusal: Refusal | None = None,
    ) -> Prepared[K]:
        """Do all host work of a step."""
        self._inputs.check(inputs, extent, where=type(self).__name__)
        live = NOTHING if live is None else live
        captured: CapturedKey[K] | None = None
        padding: Mapping[str, torch.Tensor] | None = None
        if refusal is None:
            found = self._choose(key, live)
            if isinstance(found, Refusal):
                refusal = found
            else:
                captured, padding = found
        if captured is None:
            assert refusal is not None
            return self._prepare_eager(inputs, key=key, extent=extent, live=live, refusal=refusal)
        target = captured.target
        self._builder.plan(target.key, live, padded_rows=target.extent.tokens)
        staged = self._builder.stage.stage(inputs, target.layout, dummy=padding)
        return Prepared(target.key, extent, live, None, captured, staged)

    def _choose(
        self, key: K, live: Mapping[str, Any]
    ) -> tuple[CapturedKey[K], Mapping[str, torch.Tensor] | None] | Refusal:
        if not self._policy.enabled:
            return Refusal.of(Reason.DISABLED)
        if (refusal := self._gates.before_key(key, live)) is not None:
            return refusal
        captured = self._routes.get(key)
        if captured is None:
            route = self._route(key)
            if isinstance(route, Refusal):
                return route
            captured = self._routes[key] = route
        if (refusal := self._gates.after_key(key, live)) is not None:
            return refusal
        padding = self._padding(key, captured)
        return padding if isinstance(padding, Refusal) else (captured, padding)

    def _route(self, key: K) -> CapturedKey[K] | Refusal:
        rounded = self._round_up(key)
        if isinstance(rounded, Refusal):
            return rounded
        captured = self._captured.get(rounded)
        if captured is not None:
            return captured
        if rounded in self.dropped:
            return Refusal.of(Reason.DROPPED, f"{self._name(rounded)}: {self.dropped[rounded]}")
        if rounded in self._keys:
            return Refusal.of(Reason.NOT_CAPTURED_YET, f"{self._name(rounded)} was not captured yet")
        return Refusal.of(Reason.NO_GRAPH, f"{rounded} is not among the keys of this runner")

    def _prepare_eager(
        self, inputs: Mapping[str, torch.Tensor], *, key: K, extent: Extent, live: Mapping[str, Any], refusal: Refusal
    ) -> Prepared[K]:
        if self._policy.fallback is Fallback.ERROR:
            raise NoGraphError(
                f"a step of {extent.tokens} tokens cannot use a graph ({refusal.name}): {refusal.detail}.",
                why='It would run eagerly, and fallback="error" forbids that.',
                fix='Capture its key, or pass fallback="allow".',
            )
        self._builder.plan(key, live, padded_rows=extent.tokens)
        return Prepared(None, extent, live, refusal, inputs=self._inputs.ready(inputs, extent))

    def launch(self, prepared: Prepared[K], *, copy: bool = False) -> Result[K]:
        """Put a prepared step on the current stream. Never waits for the device, unless a break does.

        Args:
            prepared: What `prepare` returned.
            copy: Return own tensors instead of views that the next launch overwrites.

        Returns:
            Its result.

        Raises:
            MovedBufferError: A watched tensor is not where it was at capture; nothing was run.
            ReplayError: Two later steps were prepared since, or the graph refused.
        """
        if torch.is_grad_enabled():
            # Graphs were captured without; entering their modes in the replay would cost more.
            with torch.no_grad():
                return self.launch(prepared, copy=copy)
        captured, staged = prepared.captured, prepared.staged
        if captured is None or staged is None:
            return self._launch_eager(prepared)
        self._check_addresses(captured)
        real = prepared.extent
        if self._policy.verify is Verify.ALWAYS:
            output, mismatch = self._builder.run_proven(
                captured, live=prepared.live, real=real, load=lambda: self._load(prepared, captured, staged)
            )
            if mismatch is not None:
                return self._drop(captured, output=own(output), mismatch=mismatch, rows=real.tokens)
        else:
            self._load(prepared, captured, staged)
            captured.graph.replay(prepared.live, valid_rows=real.tokens)
            output = captured.outputs.narrow(real)
        self.statistics.count_replay(captured.target.key, real=real.tokens, padded=captured.target.extent.tokens)
        return Result(own(output) if copy else output, True, captured.target.key, None)

    def _load(self, prepared: Prepared[K], captured: CapturedKey[K], staged: Staged) -> None:
        self._builder.stage.commit(staged)
        for hook in self._builder.work.hooks:
            hook(captured.target.key, prepared.live)

    def _check_addresses(self, captured: CapturedKey[K]) -> None:
        when = self._policy.check_addresses
        if when is CheckAddresses.NEVER or (when is CheckAddresses.FIRST and captured.addresses_checked):
            return
        if self._watch is not None:
            self._watch.check()
        captured.addresses_checked = True

    def _launch_eager(self, prepared: Prepared[K]) -> Result[K]:
        refusal = prepared.refusal
        assert refusal is not None
        output = self._builder.run_unpadded(prepared.inputs, prepared.live, extent=prepared.extent)
        self.statistics.count_eager(refusal.name, rows=prepared.extent.tokens)
        return Result(output, False, None, refusal.reason, refusal.detail)

    def _drop(self, captured: CapturedKey[K], *, output: Any, mismatch: str, rows: int) -> Result[K]:
        key = captured.target.key
        _LOG.warning("%s is dropped: %s", captured.target.where, mismatch)
        self._routes = {real: route for real, route in self._routes.items() if route is not captured}
        self._captured.pop(key, None)
        self.dropped[key] = mismatch
        captured.graph.reset()
        refusal = Refusal.of(Reason.DROPPED, mismatch)
        if self._policy.fallback is Fallback.ERROR:
            raise NoGraphError(
                f"{captured.target.where} was dropped: {mismatch}.",
                why='Its step ran eagerly, and fallback="error" forbids that.',
                fix="Find what the graph does not see: host data outside breaks, moved tensors.",
            )
        self.statistics.count_eager(refusal.name, rows=rows)
        return Result(output, False, None, refusal.reason, refusal.detail)
