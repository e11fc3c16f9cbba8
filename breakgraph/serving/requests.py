"""What a caller asks for, what they get back, and a request's life in between."""

from __future__ import annotations

import enum

import attrs
import numpy as np
import numpy.typing as npt

from breakgraph.serving.sampling_params import SamplingParams

__all__ = [
    "Chunk",
    "Completion",
    "FinishReason",
    "Prefix",
    "Request",
    "RequestState",
    "SamplingParams",
    "TokenLogprobs",
]


class FinishReason(enum.Enum):
    """Why a request ended."""

    STOP = "stop"
    """A stop token, an end-of-sequence token or a stop string."""
    LENGTH = "length"
    """``max_tokens`` were made, or the model's length is reached."""
    ABORT = "abort"
    """The caller gave up."""
    ERROR = "error"
    """A step that it was in raised; the request has the exception."""


class RequestState(enum.Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    """Holds nothing: new, or preempted."""
    PREFILL = "prefill"
    """Holds a row and blocks; part of its tokens is not in the cache yet."""
    DECODE = "decode"
    """All its tokens but the newest are in the cache, or on their way."""
    FINISHED = "finished"
    """Makes no more tokens; its row and blocks may still wait for a step in flight."""


@attrs.frozen
class TokenLogprobs:
    """How probable the model found a token and its most probable alternatives.

    The distribution is the model's own: the logarithm of the softmax, in float32, of its logits before penalties, bias,
    temperature and the cuts of top-k, top-p and min-p. So a token that a penalty or a bias brought about may be improbable here.

    Attributes:
        token_id: The token that was chosen.
        logprob: Its natural logarithm of a probability; at most 0.
        top: The most probable tokens and theirs, as many as were asked for, most probable first, the lower id first among
            equals; the chosen one is among them only where it is one of the most probable.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@attrs.frozen(kw_only=True)
class Completion:
    """The whole answer to one prompt.

    Attributes:
        text: Without special tokens and without the stop string.
        token_ids: Every generated token, a stop token included.
        finish_reason: Why it ended.
        prompt_token_ids: What the model was given.
        logprobs: One for each token of ``token_ids``; None where ``SamplingParams.logprobs`` is.
        cached_tokens: How many of those were not computed, since their keys and values lay in the cache.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    cached_tokens: int = 0


@attrs.frozen(kw_only=True)
class Chunk:
    """A piece of a streamed answer; the texts of all pieces joined are the completion's text.

    Attributes:
        text: New text; empty while a character or a possible stop string is still incomplete.
        token_ids: The tokens since the last piece.
        finish_reason: None until the last piece.
        logprobs: One for each token of ``token_ids``; None where ``SamplingParams.logprobs`` is, or the request was aborted.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None


@attrs.define(eq=False)
class Prefix:
    """What is known of a request's full blocks in `PrefixCache`, which alone changes it.

    Attributes:
        digests: Of its first blocks, as far as they were needed; tokens never change, so they stay right when it starts again.
        published: How many of the blocks that it holds now are shared, or published, or twins of published ones.
        twins: Whether one of them holds what another block was published with before.
        spoilt: Whether a step that was to write its blocks failed: no more of them may be published.
        reused: Tokens that it found when it was first admitted; None before.
    """

    digests: list[bytes] = attrs.field(factory=list)
    published: int = 0
    twins: bool = False
    spoilt: bool = False
    reused: int | None = None


@attrs.define(kw_only=True, eq=False)
class Request:
    """A request inside the engine. The host runs ahead of the device, so launched and known are two counts.

    Attributes:
        prompt_ids: The prompt's tokens.
        params: How to choose tokens.
        seed: ``params.seed``, or the one drawn for it.
        max_new_tokens: ``params.max_tokens``, cut to what the model's length leaves.
        stop_ids: Tokens that end it, the model's own included.
        output_ids: Generated tokens that the host has read.
        launched: Tokens whose sampling has been launched, read or not; at least ``len(output_ids)``.
        computed: Tokens whose keys and values have been launched into the cache.
        blocks: Blocks it holds, in order.
        row: Its row in the engine's tables, None while waiting.
        state: Where it is in its life.
        finish_reason: Set when it is finished.
        error: What ended it, with `FinishReason.ERROR`.
        started: When its first step was launched, `time.perf_counter()`.
        prefix: What is known of its blocks in the prefix cache.
    """

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    max_new_tokens: int
    stop_ids: frozenset[int] = frozenset()
    output_ids: list[int] = attrs.field(factory=list)
    launched: int = 0
    computed: int = 0
    blocks: list[int] = attrs.field(factory=list)
    row: int | None = None
    state: RequestState = RequestState.WAITING
    finish_reason: FinishReason | None = None
    error: BaseException | None = None
    started: float | None = None
    prefix: Prefix = attrs.field(factory=Prefix, repr=False)
    _prompt: npt.NDArray[np.int64] = attrs.field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        self._prompt = np.array(self.prompt_ids, dtype=np.int64)
        self._prompt.setflags(write=False)  # slices of it are handed out

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were in the cache when it was first admitted; 0 before."""
        return self.prefix.reused or 0

    @property
    def known(self) -> int:
        """Tokens of prompt and output that the host has read."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def length(self) -> int:
        """Tokens of prompt and output, those in flight included."""
        return len(self.prompt_ids) + self.launched

    @property
    def wants_token(self) -> bool:
        """Whether one more token may be launched."""
        return self.state is not RequestState.FINISHED and self.launched < self.max_new_tokens

    def known_ids(self, start: int, *, count: int) -> npt.NDArray[np.int64]:
        """Token ids at positions ``start .. start + count - 1``.

        Args:
            start: The first position.
            count: How many; all must have been read by the host.

        Returns:
            ``(count,)`` int64, not to be written: of a prompt it is a view.
        """
        prompt, end = len(self.prompt_ids), start + count
        if end <= prompt:
            return self._prompt[start:end]
        output = np.array(self.output_ids[max(start - prompt, 0) : end - prompt], dtype=np.int64)
        return np.concatenate((self._prompt[start:], output)) if start < prompt else output
