"""Which graphs the decode runner has: batch buckets, ends of a step and context buckets, combined."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence

from breakgraph.graph_key import GraphKey, SampleType
from breakgraph.models.attention import Attention
from breakgraph.serving.config import SamplingPaths, Sizes

__all__ = ["CONTEXT", "StepEnd", "context_buckets", "decode_keys"]

CONTEXT = "context"
"""Name of the coordinate of a key that says how long a sequence its graph takes."""


class StepEnd(enum.Enum):
    """How a decode step ends."""

    GREEDY = "greedy"
    SAMPLED = "sampled"
    LOGITS = "logits"
    """Nothing is drawn, and the token table is left alone: both are done with what the step returns."""

    def key(self, batch_size: int, *, context: int) -> GraphKey:
        """The key of a step that ends so.

        Args:
            batch_size: Its requests.
            context: Its context bucket.
        """
        return GraphKey(
            batch_size,
            sample_type=SampleType.FULL if self is StepEnd.LOGITS else SampleType.FAST,
            is_all_greedy_sample=self is StepEnd.GREEDY,
            extra=((CONTEXT, context),),
        )

    @classmethod
    def of(cls, key: GraphKey) -> StepEnd:
        """How a step of this key ends.

        Args:
            key: From `key`.
        """
        if key.sample_type is SampleType.FULL:
            return cls.LOGITS
        return cls.GREEDY if key.is_all_greedy_sample else cls.SAMPLED


def decode_keys(
    sizes: Sizes, *, paths: SamplingPaths, contexts: Mapping[int, Sequence[int]] | None = None
) -> tuple[GraphKey, ...]:
    """Lists the graphs of a decode runner: batch buckets, ends of a step and context buckets, combined.

    Args:
        sizes: The engine's sizes.
        paths: Which ends of a step are captured.
        contexts: Context buckets of each batch bucket; None takes those of `sizes` for all.

    Returns:
        The keys, smallest first.
    """
    ends = {
        SamplingPaths.BOTH: (StepEnd.GREEDY, StepEnd.SAMPLED),
        SamplingPaths.GREEDY: (StepEnd.GREEDY,),
        SamplingPaths.SAMPLED: (StepEnd.SAMPLED,),
        SamplingPaths.ALL: tuple(StepEnd),
    }[paths]
    return tuple(
        sorted(
            end.key(size, context=context)
            for size in sizes.decode.sizes
            for context in (sizes.contexts if contexts is None else contexts[size])
            for end in ends
        )
    )


def context_buckets(sizes: Sizes, attention: Attention, *, batch: int) -> tuple[int, ...]:
    """Context buckets of a batch bucket, ascending.

    Args:
        sizes: The engine's sizes, with the buckets of all.
        attention: May have more.
        batch: The batch bucket.
    """
    own = (context for context in attention.decode_contexts(batch_size=batch) if context < sizes.max_seq_len)
    return tuple(sorted({*sizes.contexts, *own}))
