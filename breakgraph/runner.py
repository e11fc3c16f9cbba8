"""What both runners share: gates, routing a step to its graph, prepare and launch, capture, statistics.

A step has two halves. `prepare` does all host work: gates, key, checks, staging, planning. `launch` puts copies,
segments and breaks on the stream. The host may prepare a step while the device still works on the one before.
"""

from __future__ import annotations

import abc
import logging
import threading
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

import attrs
import torch

from breakgraph.capture import BreakableCUDAGraph, GraphPool
from breakgraph.capture_window import CaptureWindow
from breakgraph.errors import ConcurrentReplayError, ConfigError
from breakgraph.gates import Gates, Refusal
from breakgraph.graph_builder import GraphBuilder
from breakgraph.graph_proof import GraphProof
from breakgraph.graph_set import GraphSet, KeyRules
from breakgraph.input_set import InputSet
from breakgraph.policy import CheckAddresses, Fallback, Policy, Verify
from breakgraph.rank_votes import Agreed, Vote
from breakgraph.routing import Router, RouteRules
from breakgraph.static_buffers import Extent, StaticInput
from breakgraph.statistics import Reason, RunnerStatistics
from breakgraph.step import LiveNames, Prepared, Result
from breakgraph.verification import own
from breakgraph.work import CapturedKey, Example, Rehearsal, Work

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
        self._inputs = InputSet(inputs, device=device)
        self._live_names = LiveNames.of(work.forward, inputs=[declared.name for declared in self._inputs.all])
        self._gates = Gates(policy.gates, override=policy.override)
        self._window = CaptureWindow()
        self._launching = threading.Lock()
        if policy.ranks is not None:
            policy = attrs.evolve(policy, ranks=policy.ranks.bound())
            work = attrs.evolve(work, together=policy.ranks)
        self._policy = policy
        self._graphs = GraphSet(
            GraphBuilder(work, inputs=self._inputs, tolerance=policy.tolerance, extent=self._extent_of_example),
            keys=keys,
            rules=KeyRules(
                name=self._name,
                extent=self._extent,
                size=self._size,
                serves=lambda key, other: self._round_up(other) == key,
                smaller=self._smaller,
            ),
            policy=policy,
            statistics=self.statistics,
        )
        self._router = Router(
            RouteRules(
                name=self._name,
                round_up=self._round_up,
                too_costly=self._too_costly,
                padding=self._padding,
                vote=self._vote,
                can_pad=self._can_pad,
                agreed_key=self._agreed_key,
            ),
            graphs=self._graphs,
            gates=self._gates,
            policy=policy,
        )

    # What a kind of runner decides.

    @abc.abstractmethod
    def _name(self, key: K) -> str:
        """The name of a key's graph, for messages."""

    @abc.abstractmethod
    def _extent(self, key: K) -> Extent:
        """The padded sizes of a key."""

    @abc.abstractmethod
    def _extent_of_example(self, key: K, inputs: Mapping[str, torch.Tensor]) -> Extent:
        """The real sizes of an example, which may have fewer requests than its key has room for."""

    @abc.abstractmethod
    def _smaller(self, key: K) -> Iterator[K]:
        """Keys of fewer rows, to try in this order."""

    @abc.abstractmethod
    def _rounded(self, real: Extent) -> int:
        """What of the sizes of a step is rounded up to a bucket."""

    @abc.abstractmethod
    def _size(self, key: K) -> tuple[int, ...]:
        """What memory a key's graph takes, for comparison."""

    @abc.abstractmethod
    def _round_up(self, key: K) -> K | Refusal:
        """The key whose graph serves a step, or why none can."""

    @abc.abstractmethod
    def _too_costly(self, key: K, rounded: K) -> Refusal | None:
        """Why an eager step is cheaper than the graph of `rounded`; None where it is not."""

    @abc.abstractmethod
    def _padding(self, key: K, captured: CapturedKey[K]) -> Mapping[str, torch.Tensor] | Refusal | None:
        """The rows of one padding request for this step, None where the rules of the inputs suffice."""

    @abc.abstractmethod
    def _vote(self, key: K) -> Vote:
        """What this rank says of a step that it can run."""

    @abc.abstractmethod
    def _can_pad(self, key: K) -> bool:
        """Whether a step of this key could be padded now; of an idle rank, of any key."""

    @abc.abstractmethod
    def _agreed_key(self, key: K, agreed: Agreed) -> K | Refusal:
        """The key of a step in which every rank pads to the largest one; or why they cannot all have a graph."""

    def _padding_turn(self) -> int:
        """Changes whenever padding requests are given back."""
        return 0

    @abc.abstractmethod
    def _after_capture(self) -> None:
        """What is left to do at the end of a capture."""

    # Capture.

    def capture_window(self) -> AbstractContextManager[None]:
        """Allow capture inside a `with` block; garbage is collected once and collection is off inside.

        The window closes whatever happens inside.
        """
        return self._window.open()

    def capture(self) -> None:
        """Run every key eagerly, then capture, prove and publish each, largest first.

        A key that fails, here or on another rank, is dropped with its reason (`dropped`), the others go on. Keys
        captured before are left alone, dropped ones are tried again. Random generators are left as they were. Costs two
        forwards for each key, and four more to verify it: replay and eager twin of a full example and of one with fewer rows.

        Raises:
            CaptureError: Outside the capture window; or the ranks are to capture different keys.
            RankError: A rank is gone or in another place.
            MovedBufferError: Parameters moved since an earlier window: graphs captured then cannot be used.
        """
        self._window.require("capture()")
        if not self._policy.enabled:
            _LOG.info("the runner is disabled: nothing is captured")
            return
        self._router.forget()
        with self._graphs.builder.generators_kept():
            self._graphs.capture()
            self._after_capture()
        self._router.forget()  # a step that ran meanwhile was routed without what `_after_capture` found

    def clear(self) -> None:
        """Give all graphs and their pool back; until the next capture every step runs eagerly. Syncs the host.

        Steps prepared for a graph before can no longer be launched. Padding requests stay held, since the next
        capture needs them: `DecodeRunner.release_dummies()` gives them back.
        """
        self._router.forget()
        self._graphs.clear()

    @property
    def dropped(self) -> Mapping[K, str]:
        """Keys whose graph was dropped, and why."""
        return self._graphs.dropped

    @property
    def graphs(self) -> Mapping[K, BreakableCUDAGraph]:
        """The published graphs by key."""
        return {key: captured.graph for key, captured in self._graphs.captured.items()}

    @property
    def enabled(self) -> bool:
        """False: every step runs eagerly and nothing is captured."""
        return self._policy.enabled

    @property
    def pool(self) -> GraphPool:
        """The pool that all graphs of this runner share; another one after `clear()`."""
        return self._graphs.builder.pool

    def rehearsal(self, key: K, *, fewer_rows: bool = False) -> AbstractContextManager[Rehearsal]:
        """Run a published graph for a look at it; declared state and random generators are put back at the end.

        Args:
            key: Its key, one of `graphs`.
            fewer_rows: Take an example of a smaller key that this graph serves, where there is one: a padded step.

        Raises:
            ConfigError: There is no such graph.
        """
        captured = self._graphs.captured.get(key)
        if captured is None:
            why_not = self.dropped.get(key)
            raise ConfigError(
                f"there is no graph of {key}; expected one of {list(self._graphs.captured)}.",
                why=f"It was dropped: {why_not}" if why_not else "Only what was captured can be replayed.",
                fix="Capture it, or ask for another key.",
            )
        served = (other for other in self._smaller(key) if self._round_up(other) == key)
        return self._graphs.builder.rehearsal(captured, smaller=next(served, None) if fewer_rows else None)

    def check_addresses(self) -> None:
        """Raise MovedBufferError where a watched tensor is not where it was at capture."""
        if (watch := self._graphs.watch) is not None:
            watch.check()

    def suspend(self, reason: Reason = Reason.DISABLED) -> AbstractContextManager[None]:
        """Run every step that is launched inside a `with` block eagerly, also one prepared for a graph before.

        Args:
            reason: What the steps are counted under.
        """
        return self._gates.suspend(reason)

    def launch_eagerly(self, reason: Reason = Reason.DEBUGGING) -> AbstractContextManager[None]:
        """Run every step that is launched inside a `with` block eagerly, at the padded shape and in the buffers of its graph.

        It is counted under `reason`.
        """
        return self._gates.launch_eagerly(reason)

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
        try:
            self._inputs.check(inputs, extent, where=type(self).__name__)
            live = self._live_names.taken(live)
            if refusal is None:
                refusal = self._router.refusal(key, live)
        except Exception:
            self._router.fail()
            raise
        turn = self._padding_turn()  # before the padding request is looked up: one given back meanwhile is noticed
        choice = self._router.choose(key, refusal=refusal)
        builder = self._graphs.builder
        try:
            if isinstance(choice, Refusal):
                refusal = choice
                self._plan_eager(key, live, extent=extent, refusal=choice)
            else:
                target = choice[0].target
                builder.plan(target.key, live, padded_rows=target.extent.tokens)
                other = choice[0].other_plan(live)
                refusal = None if other is None else Refusal.of(Reason.OTHER_PLAN, other)
        except Exception:
            self._router.fail(planned=True)
            raise
        confirmed = self._router.confirmed(refusal=refusal)
        if isinstance(choice, Refusal) or confirmed is not None:
            refusal = choice if isinstance(choice, Refusal) else confirmed
            assert refusal is not None
            if refusal is not choice:
                self._plan_eager(key, live, extent=extent, refusal=refusal)
            ready = self._inputs.ready(inputs, extent)
            return Prepared(None, extent, live, refusal, builder, inputs=ready)
        captured, padding = choice
        staged = builder.stage.stage(inputs, captured.target.layout, dummy=padding)
        padding_turn = None if padding is None else turn
        return Prepared(captured.target.key, extent, live, None, builder, captured, staged, padding_turn=padding_turn)

    def _plan_eager(self, key: K, live: Mapping[str, Any], *, extent: Extent, refusal: Refusal) -> None:
        if self._policy.fallback is Fallback.ERROR:
            raise refusal.error(rows=extent.tokens)
        self._graphs.builder.plan(key, live, padded_rows=extent.tokens)

    def launch(self, prepared: Prepared[K], *, copy: bool = False) -> Result[K]:
        """Put a prepared step on the current stream. Never waits for the device, unless a break does.

        With `verify="always"` forward and breaks run three times: replay, eager twin, and the one that is returned.
        Autocast that was on around `capture()` is on in replays, not in eager steps: put it inside forward.

        Args:
            prepared: What `prepare` returned.
            copy: Return own tensors instead of views that the next launch overwrites.

        Returns its result; a step whose graph was dropped or suspended since runs eagerly, at the padded shape.

        Raises:
            MovedBufferError: A watched tensor is not where it was at capture; nothing was run.
            NoGraphError: Its graph was dropped or suspended since, with `fallback="error"`.
            ReplayError: It was launched already; two later steps were prepared since; it is of another runner or from
                before `clear()`; its padding request was given back; or the graph refused. Nothing was run.
        """
        if not isinstance(prepared, Prepared):
            raise ConfigError(
                f"launch() got a {type(prepared).__name__}; expected what prepare() returned.",
                why="It carries the step's inputs and the graph that was chosen for it.",
                fix="launch(prepare(...)), or run(...) for both.",
            )
        if torch.is_grad_enabled():
            # Graphs were captured without; entering their modes in the replay would cost more.
            with torch.no_grad():
                return self.launch(prepared, copy=copy)
        if prepared.captured is None:  # an eager step has tensors of its own
            result = self._launch(prepared, copy=copy)
            prepared.launched = True
            return result
        if not self._launching.acquire(blocking=False):
            raise ConcurrentReplayError(
                "a step was launched while another one of the same runner is, by another thread or around this call.",
                why="Both would use the same static buffers, and one would return the other's rows.",
                fix="Launch from one thread; others may prepare, or use a runner of their own.",
            )
        try:
            result = self._launch(prepared, copy=copy)
            prepared.launched = True
            return result
        finally:
            self._launching.release()

    def _launch(self, prepared: Prepared[K], *, copy: bool) -> Result[K]:
        builder, captured, staged = self._graphs.builder, prepared.captured, prepared.staged
        prepared.check(builder, padding_turn=self._padding_turn())
        if captured is None or staged is None:
            return self._launch_eager(prepared)
        target, live, real = captured.target, prepared.live, prepared.extent
        if (refusal := self._router.withdrawn(captured)) is not None:
            if self._policy.fallback is Fallback.ERROR and refusal.reason is not Reason.DEBUGGING:
                raise refusal.error(rows=real.tokens)
            output = builder.run_staged(captured, live=live, real=real, staged=staged)
            return self._count_eager(output, refusal=refusal, real=real)
        self._check_addresses(captured, live)
        if self._policy.verify is Verify.ALWAYS:
            output, mismatch = GraphProof(builder).run_proven(captured, live=live, real=real, staged=staged)
            self.statistics.compared += 1
            if mismatch is not None:
                return self._drop(captured, output=own(output), mismatch=mismatch, real=real)
        else:
            output = builder.replay(captured, live=live, real=real, staged=staged)
        size, padded = self._rounded(real), target.extent.tokens
        self.statistics.count_replay(target.key, real=real.tokens, padded=padded, size=size)
        return Result(own(output) if copy else output, True, target.key, None)

    def _check_addresses(self, captured: CapturedKey[K], live: Mapping[str, Any]) -> None:
        when = self._policy.check_addresses
        if when is CheckAddresses.NEVER or (when is CheckAddresses.FIRST and captured.addresses_checked):
            return
        if (watch := self._graphs.watch) is not None:
            watch.check()
            watch.check_live(captured.target.key, live)
        captured.addresses_checked = True

    def _launch_eager(self, prepared: Prepared[K]) -> Result[K]:
        refusal = prepared.refusal
        assert refusal is not None
        output = self._graphs.builder.run_unpadded(prepared.inputs, prepared.live, extent=prepared.extent)
        return self._count_eager(output, refusal=refusal, real=prepared.extent)

    def _count_eager(self, output: Any, *, refusal: Refusal, real: Extent) -> Result[K]:
        self.statistics.count_eager(refusal.name, rows=real.tokens, size=self._rounded(real))
        return Result(output, False, None, refusal.reason, refusal.detail)

    def _drop(self, captured: CapturedKey[K], *, output: Any, mismatch: str, real: Extent) -> Result[K]:
        self._router.drop(captured, reason=mismatch)
        refusal = Refusal.of(Reason.DROPPED, f"{captured.target.where}: {mismatch}")
        if self._policy.fallback is Fallback.ERROR:
            raise refusal.error(rows=real.tokens)
        return self._count_eager(output, refusal=refusal, real=real)
