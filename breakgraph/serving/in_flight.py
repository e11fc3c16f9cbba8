"""A step between its launch and the reading of its tokens, and what reading makes of it."""

from __future__ import annotations

import attrs

from breakgraph.serving.device_state import PendingTokens
from breakgraph.serving.requests import Request, TokenLogprobs
from breakgraph.serving.scheduler import DecodeBatch, PrefillBatch
from breakgraph.serving.step_records import Laps

__all__ = ["InFlight", "Token"]


@attrs.define  # and not frozen, which takes longer to make: a step makes one for each request
class Token:
    """One generated token.

    Attributes:
        request: Whose.
        token_id: The token.
        logprobs: How probable the model found it; None where ``SamplingParams.logprobs`` is.
    """

    request: Request
    token_id: int
    logprobs: TokenLogprobs | None = None


@attrs.define(eq=False)
class InFlight:
    """A launched step whose tokens have not been read.

    Attributes:
        batch: What was launched.
        tokens: On their way; None when the step sampled nothing.
        laps: Its parts so far.
        releases: Requests that ended meanwhile and whose blocks this step may still write.
    """

    batch: PrefillBatch | DecodeBatch
    tokens: PendingTokens | None
    laps: Laps
    releases: list[Request] = attrs.field(factory=list)

    def holds(self, request: Request) -> bool:
        """Whether the step reads or writes the request's blocks."""
        return any(request is other for other in self.batch.requests)
