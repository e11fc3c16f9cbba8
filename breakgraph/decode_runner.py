"""Decode: batches are padded to a bucket, and each graph key has a graph, usually a whole one.

Padding rows are filled by each input's padding rule, or by the rows of a padding request (a *dummy*) that owns
storage of its own, so that nothing a padding row writes belongs to a live request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import attrs
import torch

from breakgraph.buckets import Buckets, checked_buckets
from breakgraph.capture_window import ProgressReporter
from breakgraph.errors import ConfigError
from breakgraph.gates import Gate, Refusal
from breakgraph.graph_key import GraphKey, SampleType, UnequalRequests, num_tokens
from breakgraph.padding_dummies import DummyProvider, PaddingDummies
from breakgraph.policy import CheckAddresses, Fallback, Policy, Verify
from breakgraph.rank_votes import Agreed, Vote, digest
from breakgraph.ranks import RankAgreement
from breakgraph.runner import GraphRunner
from breakgraph.static_buffers import Extent, StaticInput
from breakgraph.statistics import Reason
from breakgraph.step import Prepared, Result
from breakgraph.verification import Tolerance
from breakgraph.work import CapturedKey, Example, Work

__all__ = ["DecodeRunner", "DummyProvider", "Example"]


class DecodeRunner(GraphRunner[GraphKey]):
    """Replays the graph of a batch's key, with the batch padded to a bucket.

    Args:
        forward: Called as `forward(**inputs, **live)`. Returns tensors whose first axis is that of the tokens or of
            the requests.
        inputs: Declared inputs. `REQUESTS` is the batch size, `TOKENS` is `num_tokens(key)`.
        buckets: Batch sizes that batches are rounded up to.
        example: Returns inputs and live data for a key, for its whole batch; other values at each call. Called for
            warm-up, capture and verification, which asks for fewer requests than the bucket as well.
        device: Device of model and inputs.
        keys: Every key to capture; by default one for each bucket. `GraphKey.product` lists variants.
        beam_width: Beams per request.
        dummies: Gives padding requests storage of their own.
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
            for an eager step the key has the real batch size, and `padded_tokens` is its real token count. A step may be
            prepared before the one before it is launched: device data that graphs read is for hooks to write.
        hooks: Called as `hook(key, live)` after the copy-in and before each replay.
        around: Called as `around(key, live)`; the context manager it returns is entered around warm-up, capture, proof and
            every replay, not around eager steps: for what must be swapped in and, whatever happens, out again.
        memory_budget: Most bytes that the graphs may take, of pool, executables and bridges: a key that does not fit is
            dropped with its reason, and smaller ones are still tried. None: no limit.
        progress: Called after each key of each phase of a capture.
        ranks: How the ranks of a model stay on one path; every rank prepares every step, in one order, an idle one with
            `GraphKey(0)` and inputs without rows. None: there is one rank.
        enabled: False: every step runs eagerly and nothing is captured.

    Raises:
        ConfigError: A key's batch size is no bucket, or options or declarations contradict each other.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        *,
        inputs: Iterable[StaticInput],
        buckets: Buckets,
        example: Callable[[GraphKey], Example],
        device: torch.device,
        keys: Iterable[GraphKey] | None = None,
        beam_width: int = 1,
        dummies: DummyProvider | None = None,
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
        plan: Callable[[GraphKey, Mapping[str, Any], int], None] | None = None,
        hooks: Sequence[Callable[[GraphKey, Mapping[str, Any]], None]] = (),
        around: Callable[[GraphKey, Mapping[str, Any]], AbstractContextManager[Any]] | None = None,
        memory_budget: int | None = None,
        progress: ProgressReporter | None = None,
        ranks: RankAgreement | None = None,
        enabled: bool = True,
    ) -> None:
        self.buckets = checked_buckets(buckets)
        self._beam_width = beam_width
        inputs = list(inputs)
        self._together: dict[tuple[int, ...], GraphKey | Refusal] = {}
        self._dummies = PaddingDummies(dummies, inputs=inputs, beam_width=beam_width)
        keys = [GraphKey(size) for size in buckets.sizes] if keys is None else list(keys)
        _refuse_odd_sizes(keys, buckets)
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
                memory_budget=memory_budget,
                progress=progress,
                ranks=ranks,
                enabled=enabled,
            ),
            inputs=inputs,
            device=device,
            keys=keys,
        )

    def prepare(
        self,
        inputs: Mapping[str, torch.Tensor],
        *,
        key: GraphKey | UnequalRequests,
        live: Mapping[str, Any] | None = None,
        tokens: int | None = None,
        opt_out: str | None = None,
    ) -> Prepared[GraphKey]:
        """Do all host work of a step: checks, gates, key, padding request, planning, staging.

        Host tensors are copied and may be refilled at once; device tensors are read by `launch`.

        Args:
            inputs: One tensor per copied input, with exactly the real rows on its symbolic axis.
            key: The batch's key, with its real batch size; or what `GraphKey.for_batch` found to differ.
            live: Live data of the step.
            tokens: Real tokens of a batch whose requests differ; else `num_tokens(key)` is used.
            opt_out: Why this step must run eagerly, such as "logits of the prompt"; it is counted as OPT_OUT. None: it need
                not.

        Returns:
            The step for `launch`.

        Raises:
            StaticInputError: An input differs from its declaration.
            NoGraphError: No graph can be used, with `fallback="error"`.
        """
        refusal = None if opt_out is None else Refusal.of(Reason.OPT_OUT, opt_out)
        try:
            extent = self._real_extent(key, tokens)
        except Exception:
            self._router.fail()
            raise
        if isinstance(key, UnequalRequests):
            refusal = refusal or Refusal.of(Reason.UNEQUAL_REQUESTS, key.detail)
            key = key.variant
        return self._prepare(inputs, key=key, extent=extent, live=live, refusal=refusal)

    def _real_extent(self, key: GraphKey | UnequalRequests, tokens: int | None) -> Extent:
        if not isinstance(key, GraphKey | UnequalRequests):
            raise ConfigError(
                f"key is {key!r}; expected a GraphKey or what GraphKey.for_batch returned.",
                why="It says how many requests the step has and which graph may serve it.",
                fix="Pass key=GraphKey(batch_size).",
            )
        if isinstance(key, GraphKey):
            extent = self._extent(key)
            if tokens is not None and tokens != extent.tokens:
                raise ConfigError(
                    f"tokens={tokens!r} with {key}, which has {extent.tokens} tokens.",
                    why="The tokens of a batch whose requests agree follow from its key.",
                    fix="Leave tokens= out; or correct the draft length of the key.",
                )
            return extent
        if tokens is not None and (type(tokens) is not int or tokens < 0):
            raise ConfigError(
                f"tokens={tokens!r}; expected an integer of 0 or more.",
                why="It is the number of token rows of a batch whose requests differ.",
                fix="Pass tokens=sum of the tokens of all requests.",
            )
        return Extent(key.batch_size if tokens is None else tokens, key.batch_size)

    def run(
        self,
        inputs: Mapping[str, torch.Tensor],
        *,
        key: GraphKey | UnequalRequests,
        live: Mapping[str, Any] | None = None,
        tokens: int | None = None,
        opt_out: str | None = None,
    ) -> Result[GraphKey]:
        """`prepare`, then `launch`.

        Args:
            inputs: See `prepare`.
            key: See `prepare`.
            live: See `prepare`.
            tokens: See `prepare`.
            opt_out: See `prepare`.

        Returns:
            The result of the step.
        """
        return self.launch(self.prepare(inputs, key=key, live=live, tokens=tokens, opt_out=opt_out))

    @contextmanager
    def suspend_dummies(self) -> Iterator[None]:
        """Give padding requests back while blocks are moved; they are allocated anew at the end.

        A padded step that was prepared before and is launched later is a ReplayError: prepare it again.

        Yields:
            Nothing. A step inside that needs padding runs eagerly, counted as NO_DUMMY.
        """
        with self._dummies.suspended():
            yield

    def release_dummies(self) -> None:
        """Give padding requests back, for example after `clear()`; the next step that needs one takes it again."""
        self._dummies.release()

    def _name(self, key: GraphKey) -> str:
        fields = [f.name for f in attrs.fields(GraphKey) if f.name != "batch_size"]
        odd = [name for name in fields if getattr(key, name) != getattr(GraphKey(key.batch_size), name)]
        return f"decode[{', '.join([str(key.batch_size), *(f'{name}={getattr(key, name)}' for name in odd)])}]"

    def _extent(self, key: GraphKey) -> Extent:
        return Extent(num_tokens(key, beam_width=self._beam_width), key.batch_size)

    def _extent_of_example(self, key: GraphKey, inputs: Mapping[str, torch.Tensor]) -> Extent:
        return self._extent(key)

    def _rounded(self, real: Extent) -> int:
        return real.requests

    def _smaller(self, key: GraphKey) -> Iterator[GraphKey]:
        for size in dict.fromkeys((key.batch_size * 2 // 3, key.batch_size - 1)):
            if size > 0 and size >= key.num_contexts:
                yield attrs.evolve(key, batch_size=size)

    def _padding_turn(self) -> int:
        return self._dummies.turn

    def _size(self, key: GraphKey) -> tuple[int, ...]:
        return (self._extent(key).tokens, key.use_lora_graph, key.num_encoder_tokens)

    def _round_up(self, key: GraphKey) -> GraphKey | Refusal:
        size = self.buckets.round_up(key.batch_size)
        if size is None:
            return Refusal.of(
                Reason.ABOVE_LARGEST_BUCKET, f"{key.batch_size} requests; the largest bucket is {self.buckets.largest}"
            )
        rounded = attrs.evolve(key, batch_size=size)
        if rounded in self._graphs.keys or not key.num_encoder_tokens:
            return rounded
        extents = [
            other.num_encoder_tokens
            for other in self._graphs.keys
            if other.num_encoder_tokens > key.num_encoder_tokens
            and attrs.evolve(other, num_encoder_tokens=key.num_encoder_tokens) == rounded
        ]
        return attrs.evolve(rounded, num_encoder_tokens=min(extents)) if extents else rounded

    def _too_costly(self, key: GraphKey, rounded: GraphKey) -> Refusal | None:
        return None  # the buckets of decode are narrow

    def _padding(self, key: GraphKey, captured: CapturedKey[GraphKey]) -> Mapping[str, torch.Tensor] | Refusal | None:
        if self._dummies.provider is None or key.batch_size == captured.target.key.batch_size:
            return None
        rows = self._dummies.rows(captured.target.key.draft_len)
        return Refusal.of(Reason.NO_DUMMY, self._dummies.missing()) if rows is None else rows

    def _after_capture(self) -> None:
        # While the cache is empty. A graph whose bucket follows the one below it at once is never padded, but for the sake of
        # other ranks.
        together = self._policy.ranks is not None
        padded = {
            key.draft_len
            for key in self._graphs.captured
            if together or (key.batch_size > 1 and key.batch_size - 1 not in self.buckets.sizes)
        }
        for draft_len in sorted(padded):
            self._dummies.rows(draft_len)

    def _vote(self, key: GraphKey) -> Vote:
        return Vote(
            size=key.batch_size,
            samples=key.sample_type is SampleType.FAST and key.batch_size > 0,
            extent=key.num_encoder_tokens,
            coordinates=self._coordinates(key) if key.batch_size else 0,
        )

    def _coordinates(self, key: GraphKey) -> int:
        apart = {"batch_size", "num_encoder_tokens", *self._may_differ()}
        fields = ((f.name, getattr(key, f.name)) for f in attrs.fields(GraphKey) if f.name not in apart)
        # Extents are rounded up, but not from nothing: a graph without cross-attention is another one.
        return digest((*fields, ("has_encoder", key.num_encoder_tokens > 0)))

    def _may_differ(self) -> tuple[str, ...]:
        return () if self._policy.ranks is None else self._policy.ranks.may_differ

    def _can_pad(self, key: GraphKey) -> bool:
        if self._dummies.provider is None:
            return True
        lengths = [key.draft_len] if key.batch_size else {key.draft_len for key in self._graphs.captured}
        return all(self._dummies.rows(draft_len) is not None for draft_len in lengths)

    def _agreed_key(self, key: GraphKey, agreed: Agreed) -> GraphKey | Refusal:
        if not agreed.size:  # nobody has a request: the graph that was captured last is the smallest, on every rank
            return next(reversed(self._graphs.captured))
        at = (self._graphs.version, agreed.size, agreed.extent, agreed.coordinates)
        if at not in self._together:
            self._together[at] = self._common_variant(agreed)
        first = self._together[at]
        if isinstance(first, Refusal) or not key.batch_size:
            return first
        return attrs.evolve(key, batch_size=agreed.size, num_encoder_tokens=agreed.extent)

    def _common_variant(self, agreed: Agreed) -> GraphKey | Refusal:
        """The variant for an idle rank, where all ranks have a graph.

        They may differ in some fields, so each variant may be that of some rank: all have a graph at this size, or none is used.
        """
        alike = [other for other in self._graphs.keys if self._coordinates(other) == agreed.coordinates]
        variants = dict.fromkeys(
            attrs.evolve(other, batch_size=agreed.size, num_encoder_tokens=agreed.extent) for other in alike
        )
        without = [variant for variant in variants if self._round_up(variant) not in self._graphs.captured]
        if without or not variants:
            return Refusal.of(Reason.RANK_DISAGREEMENT, f"not every variant has a graph for this size: {without}")
        return next(iter(variants))


def _refuse_odd_sizes(keys: list[GraphKey], buckets: Buckets) -> None:
    odd = sorted({key.batch_size for key in keys} - set(buckets.sizes))
    if odd:
        raise ConfigError(
            f"keys have batch sizes {odd}, which are no buckets; buckets are {list(buckets.sizes)}.",
            why="Batches are rounded up to a bucket, so such a graph would never be used.",
            fix="Add them to the buckets, or leave the keys out.",
        )
