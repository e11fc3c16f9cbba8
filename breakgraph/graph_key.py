"""What chooses a graph: everything that changes the kernels of a step or a launch parameter of one.

Two batches with equal keys run the same kernels with the same launch parameters; anything else belongs in
`extra`. Keys are values: frozen, hashable, ordered.
"""

from __future__ import annotations

import enum
import itertools
import numbers
import operator
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch

from breakgraph.errors import ConfigError

__all__ = ["Extra", "GraphKey", "PrefillKey", "SampleType", "UnequalRequests", "cached_tokens", "num_tokens"]

_COUNTS = ("batch_size", "draft_len", "num_contexts", "context_query_len", "num_encoder_tokens")
_FLAGS = ("short_seq_len_mode", "is_all_greedy_sample", "use_lora_graph")

Extra = tuple[tuple[str, Hashable], ...]
"""What a user's own model adds to a key: pairs of a name and a hashable value."""


class SampleType(enum.Enum):
    """How much of sampling a decode graph holds."""

    FULL = "full"
    """No sampling in the graph: the caller samples from its logits."""
    FAST = "fast"
    """Sampling is captured."""


def _extra(pairs: Extra) -> Extra:
    """Sort by name, so that the order in which a caller lists its fields makes no second key."""
    if pairs == ():
        return ()
    try:
        pairs = tuple(pairs)
        hash(pairs)
        names = [name for name, _ in pairs]
        if not all(isinstance(name, str) and isinstance(pair, tuple) for name, pair in zip(names, pairs, strict=True)):
            raise TypeError("a pair is a tuple, a name is a string")
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"extra is {pairs!r}; expected pairs of a name and a hashable value ({error}).",
            why="It is part of the key by which a graph is looked up.",
            fix='Pass extra=(("name", value),) with values such as numbers, strings and tuples.',
        ) from None
    if len(set(names)) != len(names):
        raise ConfigError(
            f"extra names {names} are not unique.",
            why="A name in `extra` stands for one coordinate of the key.",
            fix="Give each pair its own name.",
        )
    return tuple(sorted(pairs, key=_extra_order))


def _extra_order(pair: tuple[str, Hashable]) -> str:
    return pair[0]


@attrs.frozen(order=True, cache_hash=True, repr=False)
class GraphKey:
    """Coordinates of a decode graph.

    Attributes:
        batch_size: Requests in the batch; of a captured graph, a bucket.
        draft_len: Draft tokens per request; a request has `draft_len + 1` tokens in a step.
        short_seq_len_mode: Sparse attention runs dense below a length threshold, with other kernels.
        is_all_greedy_sample: Argmax instead of the full sampling path.
        sample_type: Whether sampling is captured.
        num_contexts: Context rows of an encoder-decoder batch.
        context_query_len: Tokens of each of these.
        num_encoder_tokens: Extent of cross-attention; rounded up to a captured one.
        peft_cache_data_type: Type of the adapter cache, None without adapters.
        use_lora_graph: Whether adapters are in the graph.
        extra: What a user's own model adds, sorted by name.

    Raises:
        ConfigError: A count is negative or no integer, there are more contexts than requests, or `extra` is not
            pairs of a name of its own and a hashable value.
    """

    batch_size: int
    draft_len: int = attrs.field(default=0, kw_only=True)
    short_seq_len_mode: bool = attrs.field(default=False, kw_only=True)
    is_all_greedy_sample: bool = attrs.field(default=False, kw_only=True)
    sample_type: SampleType = attrs.field(default=SampleType.FAST, kw_only=True, order=lambda kind: kind.value)
    num_contexts: int = attrs.field(default=0, kw_only=True)
    context_query_len: int = attrs.field(default=0, kw_only=True)
    num_encoder_tokens: int = attrs.field(default=0, kw_only=True)
    peft_cache_data_type: torch.dtype | None = attrs.field(default=None, kw_only=True, order=str)
    use_lora_graph: bool = attrs.field(default=False, kw_only=True)
    extra: Extra = attrs.field(default=(), kw_only=True, converter=_extra, order=repr)

    def __attrs_post_init__(self) -> None:
        # One test instead of a validator per field: a key is built at every step.
        if not (
            type(self.batch_size) is type(self.draft_len) is type(self.num_contexts) is int
            and type(self.context_query_len) is type(self.num_encoder_tokens) is int
            and 0 <= self.num_contexts <= self.batch_size
            and self.draft_len >= 0
            and self.context_query_len >= 0
            and self.num_encoder_tokens >= 0
            and type(self.short_seq_len_mode) is type(self.is_all_greedy_sample) is type(self.use_lora_graph) is bool
        ):
            self._check_counts()
            self._plain_values()

    def __repr__(self) -> str:
        # Only what is not at its default: keys are read in logs.
        others = ((f.name, getattr(self, f.name), f.default) for f in attrs.fields(GraphKey) if f.name != "batch_size")
        told = [f"{name}={value}" for name, value, default in others if value != default]
        return f"GraphKey({', '.join([str(self.batch_size), *told])})"

    def _check_counts(self) -> None:
        counts = {name: getattr(self, name) for name in _COUNTS}
        fault = ""
        if not all(isinstance(count, numbers.Integral) for count in counts.values()):
            fault = "a count that is no integer"
        elif min(counts.values()) < 0:
            fault = "a negative count"
        elif self.num_contexts > self.batch_size:
            fault = "more context requests than requests"
        if fault:
            raise ConfigError(
                f"GraphKey({', '.join(f'{name}={count!r}' for name, count in counts.items())}) has {fault}.",
                why="The counts of a graph key are numbers of rows and tokens.",
                fix="Build the key from the batch with GraphKey.for_batch.",
            )

    def _plain_values(self) -> None:
        """Take numpy's integers and flags as Python's: a key is compared by its text between ranks."""
        for name in _COUNTS:
            object.__setattr__(self, name, operator.index(getattr(self, name)))
        for name in _FLAGS:
            flag = getattr(self, name)
            if not isinstance(flag, bool | np.bool_):
                raise ConfigError(
                    f"GraphKey({name}={flag!r}); expected True or False.",
                    why="It chooses between two graphs.",
                    fix=f"Pass {name}=bool(...).",
                )
            object.__setattr__(self, name, bool(flag))

    @classmethod
    def for_batch(
        cls,
        draft_lens: Sequence[int],
        *,
        context_query_lens: Sequence[int] = (),
        greedy: Sequence[bool] = (),
        seq_lens: Sequence[int] = (),
        short_threshold: int | None = None,
        encoder_lens: Sequence[int] = (),
        adapters: Sequence[Hashable] = (),
        peft_cache_data_type: torch.dtype | None = None,
        sample_type: SampleType = SampleType.FAST,
        extra: Extra = (),
    ) -> GraphKey | UnequalRequests:
        """Build the key of a batch, if its requests agree with each other.

        Every flag is worked out from the requests of this very step, so none can be left over from the step before.

        Args:
            draft_lens: Draft length of each generation request.
            context_query_lens: Tokens of each context request.
            greedy: Whether each request takes the most probable token; empty: none does.
            seq_lens: Tokens of each request after the step; needed with `short_threshold`.
            short_threshold: Most tokens for which sparse attention runs dense; None: the model has no such mode.
            encoder_lens: Encoder tokens of each request.
            adapters: The adapter of each request, None for a request without; empty: there are none.
            peft_cache_data_type: Type of the adapter cache, where a request has an adapter.
            sample_type: See the attribute.
            extra: See the attribute.

        Returns:
            The key, or what differs: one batch has one draft length and one context length. A runner takes
            either; the latter runs eagerly, counted as UNEQUAL_REQUESTS.

        Raises:
            ConfigError: A sequence has another length than there are requests.
        """
        requests, contexts = len(draft_lens) + len(context_query_lens), len(context_query_lens)
        given = {"greedy": greedy, "seq_lens": seq_lens, "encoder_lens": encoder_lens, "adapters": adapters}
        odd = {name: len(values) for name, values in given.items() if len(values) not in (0, requests)}
        if odd or (short_threshold is not None and len(seq_lens) != requests):
            raise ConfigError(
                f"for_batch() got {odd or {'seq_lens': len(seq_lens)}} values for {requests} requests.",
                why="Flags are worked out from all requests; one that is left out could need another graph.",
                fix="Give one value for each request, context requests included.",
            )
        adapted = any(adapter is not None for adapter in adapters)
        variant = cls(
            requests,
            draft_len=max(draft_lens, default=0),
            short_seq_len_mode=short_threshold is not None and bool(max(seq_lens, default=0) <= short_threshold),
            is_all_greedy_sample=len(greedy) > 0 and all(greedy),
            sample_type=sample_type,
            num_contexts=contexts,
            context_query_len=max(context_query_lens, default=0),
            num_encoder_tokens=max(encoder_lens, default=0),
            peft_cache_data_type=peft_cache_data_type if adapted else None,
            use_lora_graph=adapted,
            extra=extra,
        )
        for what, lengths in (("draft lengths", draft_lens), ("context lengths", context_query_lens)):
            if len(set(lengths)) > 1:
                lengths = sorted({int(length) for length in lengths})
                return UnequalRequests(requests, detail=f"{what} differ: {lengths}", variant=variant)
        return variant

    @classmethod
    def product(cls, batch_sizes: Iterable[int], **variants: Iterable[Any]) -> tuple[GraphKey, ...]:
        """List all combinations of batch sizes and variants of the other fields that a batch can have.

        More contexts than requests, and a context length without contexts or the reverse, are no batch.

        Args:
            batch_sizes: Usually `Buckets.sizes`.
            **variants: For a field of this class, the values it takes, for example `draft_len=(0, 3)`.

        Returns:
            The keys, smallest first.

        Raises:
            ConfigError: No such field.
        """
        known = {field.name for field in attrs.fields(cls)} - {"batch_size"}
        if unknown := sorted(set(variants) - known):
            raise ConfigError(
                f"GraphKey has no field {unknown}; it has {sorted(known)}.",
                why="The variants to capture are the product of values of its fields.",
                fix="Put a coordinate of your own model into extra.",
            )
        single = {name: values for name, values in variants.items() if not isinstance(values, Iterable)}
        if single:
            raise ConfigError(
                f"GraphKey.product() got {single}; expected the values that each field takes.",
                why="Every combination of them is captured.",
                fix="Pass a tuple, such as draft_len=(0, 3).",
            )
        rows = itertools.product(batch_sizes, itertools.product(*variants.values()))
        named = ((size, dict(zip(variants, values, strict=True))) for size, values in rows)
        return tuple(sorted({cls(size, **fields) for size, fields in named if _can_be(size, fields)}))


def _can_be(batch_size: int, fields: Mapping[str, Any]) -> bool:
    contexts, length = fields.get("num_contexts", 0), fields.get("context_query_len", 0)
    both_given = "num_contexts" in fields and "context_query_len" in fields
    return contexts <= batch_size and (not both_given or bool(contexts) is bool(length))


@attrs.frozen
class UnequalRequests:
    """A batch whose requests differ in what a key has one value for: not eligible for a graph.

    Attributes:
        batch_size: Requests in the batch.
        detail: What differs.
        variant: The key that the batch would have with its largest lengths, for host work that asks for the other fields.
    """

    batch_size: int
    detail: str = attrs.field(default="", kw_only=True)
    variant: GraphKey = attrs.field(kw_only=True)

    @variant.default
    def _variant(self) -> GraphKey:
        return GraphKey(self.batch_size)


@attrs.frozen(order=True, cache_hash=True)
class PrefillKey:
    """Coordinates of a prefill graph.

    Attributes:
        tokens: Token rows; of a captured graph, a bucket.
        extra: What a user's own model adds, sorted by name.
    """

    tokens: int
    extra: Extra = attrs.field(default=(), converter=_extra, order=repr)


def num_tokens(key: GraphKey, *, beam_width: int = 1) -> int:
    """Count the token rows of a decode step.

    Args:
        key: The coordinates of the graph.
        beam_width: Beams per request.

    Returns:
        `num_contexts * context_query_len + (batch_size * beam_width - num_contexts) * (draft_len + 1)`.
    """
    generated = key.batch_size * beam_width - key.num_contexts
    return key.num_contexts * key.context_query_len + generated * (key.draft_len + 1)


def cached_tokens(
    key: GraphKey,
    *,
    max_seq_len: int,
    short_threshold: int | None = None,
    step_tokens: int | None = None,
    context_parallel: int = 1,
    rotary_length: int | None = None,
) -> int:
    """How many tokens a request of a key's example should have in the cache: the most that a step of its graph can meet.

    A short-sequence variant is captured below its threshold, so that the step's own tokens still fit under it; ranks
    that share a sequence hold a part of it each; and no position of the step passes the rotary table.

    Args:
        key: The key.
        max_seq_len: Most tokens of one request.
        short_threshold: Length from which on the dense kernels are not used any more; needed by keys with
            `short_seq_len_mode`.
        step_tokens: Most tokens that one generation step adds; `draft_len + 1` by default (2K for a scheme that
            verifies 2K tokens).
        context_parallel: Ranks that share each sequence.
        rotary_length: Rows of the rotary table; None: as many as `max_seq_len`.

    Returns:
        Tokens before the step, 0 or more.

    Raises:
        ConfigError: A limit is missing or below 1, or the step does not fit under it.
    """
    step = key.draft_len + 1 if step_tokens is None else step_tokens
    limits = {"max_seq_len": max_seq_len, "step_tokens": step, "context_parallel": context_parallel}
    if rotary_length is not None:
        limits["rotary_length"] = rotary_length
    if key.short_seq_len_mode:
        limits["short_threshold"] = 0 if short_threshold is None else short_threshold
    low = {name: value for name, value in limits.items() if type(value) is not int or value < 1}
    if low:
        raise ConfigError(
            f"cached_tokens({key}) got {low}; expected integers of 1 or more.",
            why="The example of a capture stands for the longest sequence that the graph will meet.",
            fix="Pass the limits that the engine enforces; short_threshold too, for a key with short_seq_len_mode.",
        )
    # Positions count through the whole sequence, so the table bounds it before ranks share it.
    longest = -(-min(max_seq_len, limits.get("rotary_length", max_seq_len)) // context_parallel)
    longest = min(longest, limits.get("short_threshold", longest))
    if longest < step:
        raise ConfigError(
            f"cached_tokens({key}): a step of {step} tokens does not fit into {longest}.",
            why="Its positions would pass the end of a sequence, of the rotary table, or of the short-sequence mode.",
            fix="Leave this key out, or raise the limit.",
        )
    return longest - step
