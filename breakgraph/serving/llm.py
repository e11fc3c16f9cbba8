"""`LLM`: text in, text out, over the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import attrs
import torch

from breakgraph.capture_window import CaptureProgress
from breakgraph.errors import ConfigError
from breakgraph.models.arguments import as_dtype
from breakgraph.models.loaded import LoadedModel
from breakgraph.models.via import Via
from breakgraph.models.weights import OpenedModel, open_model
from breakgraph.serving.answer_loop import AnswerLoop
from breakgraph.serving.config import engine_config, sequence_limit
from breakgraph.serving.engine import Engine
from breakgraph.serving.llm_arguments import check_arguments, check_via, checked_params
from breakgraph.serving.prompts import Prompt, encode, prompts_of
from breakgraph.serving.requests import Chunk, Completion
from breakgraph.serving.sampling_params import SamplingParams
from breakgraph.serving.scheduler import check_prompt
from breakgraph.serving.startup import build_engine, choose_device
from breakgraph.serving.statistics import Statistics
from breakgraph.serving.text import OutputText

__all__ = ["LLM", "Progress"]

Progress = Callable[[str, int, int], None]
"""``progress(stage, done, total)``, while a model is loaded and graphs are captured; ``done`` goes up to ``total``."""


class LLM:
    """A model that answers prompts, several at a time, with every step a graph replay.

    The constructor only stores and checks its options; ``start`` loads and captures, and the first prompt does
    so too. Not thread-safe; answers of several streams may be read by turns from one thread.

    Args:
        model: "demo", a path that ``load_model`` takes, or a loaded model.
        via: Whose code runs it. "auto" takes our own decoder where there is one that fits, else transformers' own code through
            the adapter; "fast" and "adapter" insist on one of them. ``model.served`` and the statistics say which it is.
        device: "auto" (CUDA where there is one), "cpu", "cuda" or "cuda:1"; a loaded model keeps its own.
        dtype: Of the weights, a dtype of torch or its name; None takes bfloat16 on CUDA and float32 on a CPU. A
            loaded model keeps its own.
        cache_root: Where converted GGUF files are kept, four bytes a parameter; None takes ``~/.cache/breakgraph``.
        progress: Called as ``progress(stage, done, total)`` while the engine starts. The stages, in order:
            "converting GGUF" (the first time that a GGUF file is used), "loading weights", then for "prefill graphs"
            and for "decode graphs" the phases ": warm-up", ": capture" and ": verify".
        **options: Fields of ``EngineConfig``: ``max_batch_size``, ``max_num_tokens``, ``max_seq_len``,
            ``graphs`` and so on.

    Attributes:
        config: The options.
        progress: As given; may be set until it is started.

    Raises:
        ConfigError: An option is unknown, out of range or of another type.
    """

    def __init__(
        self,
        model: str | Path | LoadedModel = "demo",
        *,
        via: Via | str = Via.AUTO,
        device: str | torch.device = "auto",
        dtype: torch.dtype | str | None = None,
        cache_root: str | Path | None = None,
        progress: Progress | None = None,
        **options: Any,
    ) -> None:
        self.config = engine_config(options)
        check_arguments(model, device=device, cache_root=cache_root, progress=progress)
        self._source = model
        self._via = Via.of(via)
        check_via(model, self._via)
        self._device = str(device)
        self._dtype = as_dtype(dtype)
        self._cache_root = None if cache_root is None else Path(cache_root).expanduser()
        self.progress = progress
        self._opened: OpenedModel | None = None
        self._model: LoadedModel | None = None
        self._engine: Engine | None = None
        self._loop: AnswerLoop | None = None

    def start(self) -> None:
        """Loads the model, allocates the cache and captures the graphs; does nothing the second time.

        Raises:
            ConfigError: The model cannot be loaded, or it, the device and the options do not fit together.
        """
        if self._engine is None:
            engine = build_engine(self.model, config=self.config, progress=self._on_capture)
            engine.capture()
            self._engine, self._loop = engine, AnswerLoop(engine, new_text=self._new_text)

    @property
    def model(self) -> LoadedModel:
        """The model; loaded now where it was not yet."""
        if self._model is None:
            known = self._known
            if isinstance(known, OpenedModel):
                known = known.load(
                    device=choose_device(self._device),
                    dtype=self._dtype,
                    max_positions=self.config.max_seq_len,
                    progress=self.progress,
                )
            self._model = known
        return self._model

    @property
    def _known(self) -> LoadedModel | OpenedModel:
        """The model, or all but its weights: enough to refuse a prompt."""
        if self._model is not None:
            return self._model
        if isinstance(self._source, LoadedModel):
            return self._source
        if self._opened is None:
            choose_device(self._device)  # a wrong device costs nothing to find
            self._opened = open_model(
                self._source,
                via=self._via,
                max_positions=self.config.max_seq_len,
                cache_root=self._cache_root,
                progress=self.progress,
            )
        return self._opened

    @property
    def engine(self) -> Engine:
        """The engine; started now where it was not yet."""
        self.start()
        assert self._engine is not None
        return self._engine

    @property
    def statistics(self) -> Statistics:
        """What was done since the start."""
        return attrs.evolve(self.engine.statistics(), served=self.model.served)

    def encode(self, prompt: str, *, chat: bool = False) -> list[int]:
        """Turns a prompt into the tokens that ``generate`` would use.

        Args:
            prompt: Text.
            chat: Put it into the model's chat template, as one message of a user.

        Raises:
            ConfigError: It is empty, or the model has no tokenizer or no template.
        """
        return encode(self._known, prompt, chat=chat)

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
            ConfigError: A prompt cannot be run, or something is neither prompt nor parameters; then nothing is run.
        """
        batch = prompts_of(prompts)
        several = isinstance(params, (list, tuple))
        given = params if several else [SamplingParams() if params is None else params] * len(batch)
        each = [checked_params(one) for one in cast("Sequence[object]", given)]
        if len(each) != len(batch):
            raise ConfigError(
                f"{len(batch)} prompts came with {len(each)} sampling parameters.",
                why="Each prompt is answered with its own.",
                fix="Give one SamplingParams for all, or one for each prompt.",
            )
        checked = [(self._encoded(prompt, params=one, chat=chat), one) for prompt, one in zip(batch, each, strict=True)]
        for ids, wanted in checked:
            self.engine.check(ids, params=wanted)
        loop, answers = self._answer_loop, []
        try:
            for ids, wanted in checked:
                answers.append(loop.submit(ids, params=wanted, whole=not wanted.stop))
            loop.wait(answers)
        finally:
            loop.abandon(answers)
        return [answer.completion() for answer in answers]

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
        wanted = SamplingParams() if params is None else checked_params(params)
        ids = self._encoded(prompt, params=wanted, chat=chat)
        loop = self._answer_loop
        return loop.pieces(loop.submit(ids, params=wanted, whole=False))

    def _encoded(self, prompt: Prompt, *, params: SamplingParams, chat: bool) -> list[int]:
        known = self._known
        ids = encode(known, prompt, chat=chat)
        if params.stop and known.tokenizer is None:
            raise ConfigError(
                f"SamplingParams.stop is {params.stop!r}, but {known.source} has no tokenizer.",
                why="Stop strings are looked for in the text.",
                fix="Use stop_token_ids.",
            )
        self._check_length(len(ids), known)
        return ids

    def _new_text(self, ids: Sequence[int], params: SamplingParams) -> OutputText | None:
        tokenizer = self._known.tokenizer
        if tokenizer is None:
            return None
        return OutputText(tokenizer, prompt_ids=ids, stop=params.stop)

    @property
    def _answer_loop(self) -> AnswerLoop:
        self.start()
        assert self._loop is not None
        return self._loop

    def _check_length(self, tokens: int, model: LoadedModel | OpenedModel) -> None:
        """Refuses what never fits before weights are read and graphs captured: both take much longer than this."""
        positions = model.max_positions
        if isinstance(model, LoadedModel):
            positions, device = model.config.max_positions, model.decoder.device
        else:
            device = choose_device(self._device)
        limit = sequence_limit(self.config, max_positions=model.max_positions, device_type=device.type)
        larger = f"give a larger max_seq_len (the model has {positions} positions)"
        way_out = larger if limit < positions else "use a model with more positions"
        check_prompt(tokens, max_seq_len=limit, fix=f"Shorten the prompt, or {way_out}.")

    def _on_capture(self, runner: str, event: CaptureProgress) -> None:
        if self.progress is not None:
            self.progress(f"{runner} graphs: {event.phase.value}", event.done, event.total)
