"""Prefill: token counts are rounded up to a bucket, and each bucket has a breakable graph."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from breakgraph.buckets import Buckets, checked_buckets
from breakgraph.capture_window import ProgressReporter
from breakgraph.errors import StaticInputError
from breakgraph.gates import Gate, Refusal
from breakgraph.graph_key import Extra, PrefillKey
from breakgraph.padding_limit import Times, least_sizes
from breakgraph.policy import CheckAddresses, Fallback, Measure, Policy, Verify
from breakgraph.rank_votes import Agreed, Vote, digest
from breakgraph.ranks import RankAgreement
from breakgraph.runner import GraphRunner
from breakgraph.static_buffers import Extent, StaticInput
from breakgraph.statistics import Reason
from breakgraph.step import Prepared, Result
from breakgraph.verification import Tolerance
from breakgraph.work import CapturedKey, Example, Work

__all__ = ["Example", "PrefillRunner"]

_LOG = logging.getLogger(__name__)


class PrefillRunner(GraphRunner[PrefillKey]):
    """Replays a breakable graph for steps of any token count up to the largest bucket.

    Segments work on all rows of the bucket, breaks on the real rows. `forward` is the captured part: usually the
    decoder's body; embedding and logits can stay outside.

    Args:
        forward: Called as `forward(**inputs, **live)`. Returns tensors whose first axis is that of the tokens.
        inputs: Declared inputs. `TOKENS` is the bucket, `REQUESTS` is `max_requests`.
        buckets: Token counts to capture.
        example: Returns inputs and live data for a key, for as many tokens as the key has (and `max_requests`
            requests, or fewer); other values at each call. Called for warm-up, capture and verification, which asks
            for fewer tokens than the bucket as well.
        device: Device of model and inputs.
        max_requests: Most requests in a step.
        extras: Values of `PrefillKey.extra` to capture each bucket for.
        state: What forward mutates: tensors, or objects with `save()` and `restore(saved)`. Device-fed inputs
            are kept anyway. Verification holds three copies for a while: declare a saver for a large cache.
        generators: The caller's own random generators that forward draws from.
        modules: Modules whose parameters, buffers and submodules are watched.
        gates: The caller's gates.
        override: Names of soft gates to leave out.
        verify: "first": a graph is published when one replay of it equals eager, bit for bit. "always": every
            step is compared, at three runs of its forward and of each break. "never".
        tolerance: Used only where eager differs from itself.
        check_addresses: "first": before the first replay of each graph; "always"; "never".
        fallback: "allow", or "error": a step that cannot use a graph is a NoGraphError.
        expect_breaks: Number of breaks, or names and counts, that each graph must have.
        plan: Host work of a step, called in `prepare` (and for every example) as `plan(key, live, padded_tokens)`;
            for an eager step the key has the real token count, which `padded_tokens` then is as well. A step may be
            prepared before the one before it is launched: device data that graphs read is for hooks to write.
        hooks: Called as `hook(key, live)` after the copy-in and before each replay.
        around: Called as `around(key, live)`; the context manager it returns is entered around warm-up, capture, proof and
            every replay, not around eager steps: for what must be swapped in and, whatever happens, out again.
        measure: When the real size is measured, for each bucket, below which an eager step is cheaper than a padded replay:
            "cuda" (on a CUDA device), "always", "never".
        memory_budget: Most bytes that the graphs may take, of pool, executables and bridges: a key that does not fit is
            dropped with its reason, and smaller ones are still tried. None: no limit.
        progress: Called after each key of each phase of a capture.
        ranks: How the ranks of a model stay on one path: the largest token count decides the bucket. Every rank prepares every
            step, an idle one with `size=0` and inputs without rows. None: there is one rank.
        enabled: False: every step runs eagerly and nothing is captured.

    Raises:
        ConfigError: Options or declarations contradict each other.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        *,
        inputs: Iterable[StaticInput],
        buckets: Buckets,
        example: Callable[[PrefillKey], Example],
        device: torch.device,
        max_requests: int = 1,
        extras: Sequence[Extra] = ((),),
        state: Sequence[Any] = (),
        generators: Sequence[torch.Generator] = (),
        modules: Sequence[torch.nn.Module] = (),
        gates: Sequence[Gate] = (),
        override: Sequence[str] = (),
        verify: Verify | str = Verify.FIRST,
        tolerance: Tolerance | None = None,
        check_addresses: CheckAddresses | str = CheckAddresses.FIRST,
        fallback: Fallback | str = Fallback.ALLOW,
        expect_breaks: int | Mapping[str, int] | None = None,
        plan: Callable[[PrefillKey, Mapping[str, Any], int], None] | None = None,
        hooks: Sequence[Callable[[PrefillKey, Mapping[str, Any]], None]] = (),
        around: Callable[[PrefillKey, Mapping[str, Any]], AbstractContextManager[Any]] | None = None,
        measure: Measure | str = Measure.CUDA,
        memory_budget: int | None = None,
        progress: ProgressReporter | None = None,
        ranks: RankAgreement | None = None,
        enabled: bool = True,
    ) -> None:
        self.buckets = checked_buckets(buckets)
        self._max_requests = max_requests
        self._least_size: dict[PrefillKey, int] = {}
        super().__init__(
            Work(
                forward=forward,
                example=example,
                state=state,
                generators=generators,
                plan=plan,
                hooks=hooks,
                around=around,
                expect_breaks=expect_breaks,
            ),
            policy=Policy(
                modules=modules,
                gates=gates,
                override=override,
                verify=verify,
                tolerance=tolerance,
                check_addresses=check_addresses,
                fallback=fallback,
                measure=measure,
                memory_budget=memory_budget,
                progress=progress,
                ranks=ranks,
                enabled=enabled,
            ),
            inputs=inputs,
            device=device,
            keys=[PrefillKey(tokens, extra) for tokens in buckets.sizes for extra in extras],
        )

    def prepare(
        self,
        inputs: Mapping[str, torch.Tensor],
        *,
        size: int,
        live: Mapping[str, Any] | None = None,
        extra: Extra = (),
        opt_out: str | None = None,
    ) -> Prepared[PrefillKey]:
        """Do all host work of a step: checks, gates, key, planning, staging.

        Host tensors are copied and may be refilled at once; device tensors are read by `launch`.

        Args:
            inputs: One tensor per copied input, with exactly `size` rows on a TOKENS axis.
            size: Real tokens, 1 or more; 0 on an idle rank.
            live: Live data of the step.
            extra: The caller's part of the key.
            opt_out: Why this step must run eagerly, such as "logits of the prompt"; it is counted as OPT_OUT. None: it need
                not.

        Returns:
            The step for `launch`.

        Raises:
            StaticInputError: An input differs from its declaration, or size is below 1.
            NoGraphError: No graph can be used, with `fallback="error"`.
        """
        try:
            if (type(size) is not int or size < 1) and not (size == 0 and self._policy.ranks is not None):
                size = _checked_size(size)
            requests = self._inputs.requests(inputs, most=self._max_requests, where="a prefill step")
            refusal = None if opt_out is None else Refusal.of(Reason.OPT_OUT, opt_out)
            key, extent = PrefillKey(size, extra), Extent(size, requests)
        except Exception:
            self._router.fail()
            raise
        return self._prepare(inputs, key=key, extent=extent, live=live, refusal=refusal)

    def run(
        self,
        inputs: Mapping[str, torch.Tensor],
        *,
        size: int,
        live: Mapping[str, Any] | None = None,
        extra: Extra = (),
        opt_out: str | None = None,
    ) -> Result[PrefillKey]:
        """`prepare`, then `launch`.

        Args:
            inputs: See `prepare`.
            size: See `prepare`.
            live: See `prepare`.
            extra: See `prepare`.
            opt_out: See `prepare`.

        Returns:
            The result of the step.
        """
        return self.launch(self.prepare(inputs, size=size, live=live, extra=extra, opt_out=opt_out))

    def _name(self, key: PrefillKey) -> str:
        return f"prefill[{key.tokens}]" + (f"{dict(key.extra)}" if key.extra else "")

    def _extent(self, key: PrefillKey) -> Extent:
        return Extent(key.tokens, self._max_requests)

    def _extent_of_example(self, key: PrefillKey, inputs: Mapping[str, torch.Tensor]) -> Extent:
        return Extent(key.tokens, self._inputs.requests(inputs, most=self._max_requests, where=f"an example of {key}"))

    def _rounded(self, real: Extent) -> int:
        return real.tokens

    def _smaller(self, key: PrefillKey) -> Iterator[PrefillKey]:
        for tokens in dict.fromkeys((key.tokens * 2 // 3, key.tokens - 1)):
            if tokens > 0:
                yield PrefillKey(tokens, key.extra)

    def _size(self, key: PrefillKey) -> tuple[int, ...]:
        return (key.tokens,)

    def _round_up(self, key: PrefillKey) -> PrefillKey | Refusal:
        tokens = self.buckets.round_up(key.tokens)
        if tokens is None:
            return Refusal.of(
                Reason.ABOVE_LARGEST_BUCKET, f"{key.tokens} tokens; the largest bucket is {self.buckets.largest}"
            )
        return PrefillKey(tokens, key.extra)

    def _too_costly(self, key: PrefillKey, rounded: PrefillKey) -> Refusal | None:
        least = self._least_size.get(rounded, 0)
        if key.tokens >= least:
            return None
        pays = "never to pay" if least > rounded.tokens else f"to pay from {least} tokens on"
        return Refusal.of(Reason.EAGER_IS_CHEAPER, f"{self._name(rounded)} was measured {pays}")

    def _padding(
        self, key: PrefillKey, captured: CapturedKey[PrefillKey]
    ) -> Mapping[str, torch.Tensor] | Refusal | None:
        return None  # padded tokens are the matter of each input's padding rule

    def _vote(self, key: PrefillKey) -> Vote:
        # A prefill graph holds no sampling, so it could not differ in that.
        return Vote(size=key.tokens, coordinates=digest(key.extra) if key.tokens else 0)

    def _can_pad(self, key: PrefillKey) -> bool:
        return True

    def _agreed_key(self, key: PrefillKey, agreed: Agreed) -> PrefillKey | Refusal:
        captured = self._graphs.captured
        if not agreed.size:  # nobody has a token: the graph that was captured last is the smallest, on every rank
            return next(reversed(captured))
        if key.tokens:
            return PrefillKey(agreed.size, key.extra)
        alike = (
            PrefillKey(agreed.size, other.extra) for other in captured if digest(other.extra) == agreed.coordinates
        )
        return next(alike, Refusal.of(Reason.RANK_DISAGREEMENT, "an idle rank has no graph of this variant"))

    def _after_capture(self) -> None:
        self._least_size.clear()
        for report in self.statistics.reports.values():
            report.least_size = 0
        if self._measures():
            self._measure_limits()
        if (ranks := self._policy.ranks) is not None:
            for key in self._graphs.captured:  # the same on every rank, in the same order
                self._least_size[key] = ranks.largest(self._least_size.get(key, 0))

    def _measure_limits(self) -> None:
        captured = self._graphs.captured
        for extra in dict.fromkeys(key.extra for key in captured):  # in one order on every rank
            times: dict[int, Times] = {}
            failure: str | None = None
            try:
                times = {key.tokens: self._graphs.times(key) for key in captured if key.extra == extra}
            except Exception as error:  # a limit that was not found is no reason to serve without graphs
                failure = f"{type(error).__name__}: {error}"
            if self._policy.ranks is not None:
                failure = self._policy.ranks.outcome(failure)
            if failure is not None:
                _LOG.warning("buckets were not measured against eager steps: %s", failure)
                continue
            for tokens, least in least_sizes(times).items():
                key = PrefillKey(tokens, extra)
                self._least_size[key] = self.statistics.reports[key].least_size = least
                if least > tokens:
                    _LOG.warning("%s will not be used: an eager step is cheaper at every size", self._name(key))

    def _measures(self) -> bool:
        measure = self._policy.measure
        if self._policy.fallback is Fallback.ERROR:
            return False  # what is an error must not hang on how fast a machine was
        return measure is Measure.ALWAYS or (measure is Measure.CUDA and self._inputs.device.type == "cuda")


def _checked_size(size: Any) -> int:
    """Accept what is an integer without rounding, such as a numpy scalar, from 1 on."""
    try:
        count = operator.index(size)
    except TypeError:
        count = 0
    if count < 1:
        raise StaticInputError(
            f"size is {size!r}; expected an integer, 1 or more.",
            why="It is the number of real token rows, and a step without tokens has nothing to compute.",
            fix="Pass size=len(token_ids), and do not run a step for an empty batch.",
        )
    return count
