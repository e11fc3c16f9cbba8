"""`LLM`: text in, text out, over the engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

import attrs
import torch

from breakgraph.capture_window import CaptureProgress
from breakgraph.errors import ConfigError, InternalError
from breakgraph.models.weights import LoadedModel, load_model
from breakgraph.serving.config import EngineConfig
from breakgraph.serving.engine import Engine, Token
from breakgraph.serving.prompts import encode
from breakgraph.serving.requests import Chunk, Completion, FinishReason, Request, SamplingParams
from breakgraph.serving.startup import build_engine, choose_device
from breakgraph.serving.statistics import Statistics
from breakgraph.serving.text import OutputText

__all__ = ["LLM", "Progress"]

Prompt = str | Sequence[int]
Progress = Callable[[str, int, int], None]
"""``progress(stage, done, total)``, while a model is loaded and graphs are captured."""


@attrs.define(eq=False)
class _Answer:
    """A request and what of its answer has not been handed out.

    Attributes:
        request: The request.
        text: Its text; None for a model without tokenizer.
        chunks: Pieces that wait for the caller.
    """

    request: Request
    text: OutputText | None
    chunks: deque[Chunk] = attrs.field(factory=deque)


class LLM:
    """A model that answers prompts, several at a time, with every step a graph replay.

    The constructor only stores and checks its options; ``start`` loads and captures, and the first prompt does
    so too. Not thread-safe; answers of several streams may be read by turns from one thread.

    Args:
        model: "demo", a path that ``load_model`` takes, or a loaded model.
        device: "auto" (CUDA where there is one), "cpu", "cuda" or "cuda:1"; a loaded model keeps its own.
        dtype: Of the weights; None takes bfloat16 on CUDA and float32 on a CPU. A loaded model keeps its own.
        progress: Told about loading and capturing.
        **options: Fields of ``EngineConfig``: ``max_batch_size``, ``max_num_tokens``, ``max_seq_len``,
            ``graphs`` and so on.

    Raises:
        ConfigError: An option is out of range.
    """

    def __init__(
        self,
        model: str | Path | LoadedModel = "demo",
        *,
        device: str = "auto",
        dtype: torch.dtype | None = None,
        progress: Progress | None = None,
        **options: Any,
    ) -> None:
        self.config = EngineConfig(**options)
        self._source = model
        self._device = device
        self._dtype = dtype
        self._progress = progress
        self._model: LoadedModel | None = None
        self._engine: Engine | None = None
        self._answers: dict[Request, _Answer] = {}

    def start(self) -> None:
        """Loads the model, allocates the cache and captures the graphs; does nothing the second time.

        Raises:
            ConfigError: The model cannot be loaded, or it, the device and the options do not fit together.
        """
        if self._engine is None:
            engine = build_engine(self.model, config=self.config, progress=self._on_capture)
            engine.capture()
            self._engine = engine

    @property
    def model(self) -> LoadedModel:
        """The model; loaded now where it was not yet."""
        if self._model is None:
            if isinstance(self._source, LoadedModel):
                self._model = self._source
            else:
                self._model = load_model(
                    self._source,
                    device=choose_device(self._device),
                    dtype=self._dtype,
                    max_positions=self.config.max_seq_len,
                    progress=self._progress,
                )
        return self._model

    @property
    def engine(self) -> Engine:
        """The engine; started now where it was not yet."""
        self.start()
        assert self._engine is not None
        return self._engine

    @property
    def statistics(self) -> Statistics:
        """What was done since the start."""
        return self.engine.statistics()

    def encode(self, prompt: str, *, chat: bool = False) -> list[int]:
        """Turns a prompt into the tokens that ``generate`` would use.

        Args:
            prompt: Text.
            chat: Put it into the model's chat template, as one message of a user.

        Raises:
            ConfigError: It is empty, or the model has no tokenizer or no template.
        """
        return encode(self.model, prompt, chat=chat)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat: bool = False,
    ) -> list[Completion]:
        """Answers prompts and returns when all are done.

        Args:
            prompts: One text, one list of token ids, or a list of either.
            params: For all of them, or one for each; None takes the defaults of ``SamplingParams``.
            chat: Put each text into the model's chat template.

        Returns:
            One completion for each prompt, in order.

        Raises:
            ConfigError: A prompt cannot be run; then none is.
        """
        batch = _batch(prompts)
        each = [params or SamplingParams()] * len(batch) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(batch):
            raise ConfigError(
                f"{len(batch)} prompts came with {len(each)} sampling parameters.",
                why="Each prompt is answered with its own.",
                fix="Give one SamplingParams for all, or one for each prompt.",
            )
        answers: list[_Answer] = []
        try:
            for prompt, wanted in zip(batch, each, strict=True):
                answers.append(self._submit(prompt, params=wanted, chat=chat))
            while any(answer.request in self._answers for answer in answers):
                self._pump()
        finally:
            self._abandon(answers)
        return [_completion(answer) for answer in answers]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, *, chat: bool = False) -> Iterator[Chunk]:
        """Answers one prompt piece by piece.

        The request is checked and queued at once; it runs while pieces are read, and ends when the iterator is
        closed.

        Args:
            prompt: Text or token ids.
            params: None takes the defaults of ``SamplingParams``.
            chat: Put the text into the model's chat template.

        Returns:
            An iterator over the pieces; the last one has a ``finish_reason``.

        Raises:
            ConfigError: The prompt cannot be run.
        """
        return self._pieces(self._submit(prompt, params=params or SamplingParams(), chat=chat))

    def _pieces(self, answer: _Answer) -> Iterator[Chunk]:
        try:
            while answer.chunks or answer.request in self._answers:
                while answer.chunks:
                    yield answer.chunks.popleft()
                if answer.request in self._answers:
                    self._pump()
        finally:
            self._abandon([answer])

    def _submit(self, prompt: Prompt, *, params: SamplingParams, chat: bool) -> _Answer:
        model = self.model
        ids = encode(model, prompt, chat=chat)
        if params.stop and model.tokenizer is None:
            raise ConfigError(
                f"SamplingParams.stop is {params.stop!r}, but {model.source} has no tokenizer.",
                why="Stop strings are looked for in the text.",
                fix="Use stop_token_ids.",
            )
        request = self.engine.add(ids, params=params)
        tokenizer = model.tokenizer
        text = None if tokenizer is None else OutputText(tokenizer, prompt_ids=ids, stop=params.stop)
        answer = self._answers[request] = _Answer(request, text)
        return answer

    def _pump(self) -> None:
        engine = self.engine
        if not engine.has_work:
            raise InternalError("answers are waited for, and the engine has nothing to do.")
        try:
            tokens = engine.step()
        except BaseException:
            # The step may be half launched: nothing that runs now can be trusted to go on.
            engine.reset()
            for answer in tuple(self._answers.values()):
                self._close(answer, token_ids=(), reason=FinishReason.ABORT)
            raise
        for token in tokens:
            self._take(token)

    def _take(self, token: Token) -> None:
        request = token.request
        answer = self._answers.get(request)
        if answer is None:  # added to the engine directly: its caller finds the token in output_ids
            return
        text = ""
        if answer.text is not None and token.token_id not in request.stop_ids:
            text = answer.text.push(token.token_id)
            if answer.text.stopped:
                self.engine.finish(request, reason=FinishReason.STOP)
                request.finish_reason = FinishReason.STOP  # also where the same token was the last one allowed
        if request.finish_reason is None:
            answer.chunks.append(Chunk(text=text, token_ids=(token.token_id,)))
        else:
            self._close(answer, token_ids=(token.token_id,), reason=request.finish_reason, text=text)

    def _close(self, answer: _Answer, *, token_ids: tuple[int, ...], reason: FinishReason, text: str = "") -> None:
        rest = answer.text.finish() if answer.text is not None else ""
        answer.chunks.append(Chunk(text=text + rest, token_ids=token_ids, finish_reason=reason))
        answer.request.finish_reason = reason
        del self._answers[answer.request]

    def _abandon(self, answers: Sequence[_Answer]) -> None:
        """Ends what of these is still running; where nothing else runs, reads what is in flight and gives all back."""
        engine = self._engine
        if engine is None:  # it could not be started
            return
        for answer in answers:
            if self._answers.pop(answer.request, None) is not None:
                engine.finish(answer.request, reason=FinishReason.ABORT)
        while not self._answers and engine.has_work:
            engine.step()

    def _on_capture(self, runner: str, event: CaptureProgress) -> None:
        if self._progress is not None:
            self._progress(f"{runner} graphs: {event.phase.value}", event.done, event.total)


def _batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    texts: list[Prompt] = []
    tokens: list[int] = []
    for item in prompts:
        if isinstance(item, Integral):  # integers of numpy are no int
            tokens.append(int(item))
        elif not isinstance(item, int):
            texts.append(item)
    if texts and tokens:
        raise ConfigError(
            f"token {tokens[0]} stands among {len(texts)} prompts.",
            why="One prompt is a text or a list of token ids; several are a list of those.",
            fix="Put the token ids of one prompt into a list of their own.",
        )
    return [tokens] if tokens else texts


def _completion(answer: _Answer) -> Completion:
    chunks, request = answer.chunks, answer.request
    if request.finish_reason is None:
        raise InternalError("a request left the engine without a reason.")
    return Completion(
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
        finish_reason=request.finish_reason,
        prompt_token_ids=request.prompt_ids,
    )
