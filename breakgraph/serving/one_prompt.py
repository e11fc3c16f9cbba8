"""One prompt, one answer: an `LLM` sized for exactly that, so that it starts fast."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import attrs

from breakgraph.buckets import Buckets
from breakgraph.errors import ConfigError
from breakgraph.models.generation import GenerationDefaults
from breakgraph.models.loaded import LoadedModel
from breakgraph.models.via import Via
from breakgraph.models.weights import OpenedModel, open_model
from breakgraph.serving.config import EngineConfig, Graphs, SamplingPaths, token_limit
from breakgraph.serving.llm import LLM, Progress
from breakgraph.serving.prompts import encode, has_chat_template
from breakgraph.serving.requests import Chunk, FinishReason
from breakgraph.serving.sampling_params import SamplingParams
from breakgraph.serving.scheduler import check_prompt
from breakgraph.serving.startup import choose_device

__all__ = ["Choices", "OnePrompt"]

_BLOCK_SIZE = 16
_FIRST_CONTEXT = 256
_CONTEXT_GROWTH = 4


@attrs.frozen(kw_only=True)
class Choices:
    """Sampling options of which each may be left to the model's author.

    Attributes:
        max_tokens: Most tokens to generate.
        temperature: None: the author's, or greedy where they say nothing.
        top_k: None: the author's, or off.
        top_p: None: the author's, or off.
        seed: None: another answer every time, where the temperature is not 0.
    """

    max_tokens: int
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None

    def params(self, defaults: GenerationDefaults) -> SamplingParams:
        """Fills what was left out.

        Raises:
            ConfigError: A value is out of its range.
        """
        author = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        if defaults.do_sample:
            said = {
                "temperature": 1.0 if defaults.temperature is None else defaults.temperature,
                "top_k": defaults.top_k,
                "top_p": defaults.top_p,
                "min_p": defaults.min_p,
            }
            author |= {name: value for name, value in said.items() if value is not None}
        chosen = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        values = author | {name: value for name, value in chosen.items() if value is not None}
        return SamplingParams(max_tokens=self.max_tokens, seed=self.seed, **values)  # type: ignore[arg-type]


@attrs.define(eq=False)
class OnePrompt:
    """One prompt and everything that decides its answer.

    Attributes:
        prompt: The text; it goes into the model's chat template where there is one.
        model: "demo" or a path.
        via: Whose code runs it; see `load_model`.
        device: "auto", "cpu" or "cuda".
        choices: Sampling options.
        graphs: Graphs, or every step eagerly.
        cache_root: Where converted GGUF files are kept; None takes ``~/.cache/breakgraph``.
        progress: Told about loading and capturing.
        llm: The model's engine; None until ``start``.
    """

    prompt: str
    model: str = attrs.field(default="demo", kw_only=True)
    via: Via = attrs.field(default=Via.AUTO, kw_only=True)
    device: str = attrs.field(default="auto", kw_only=True)
    choices: Choices = attrs.field(kw_only=True)
    graphs: Graphs = attrs.field(default=Graphs.ON, kw_only=True)
    cache_root: Path | None = attrs.field(default=None, kw_only=True)
    progress: Progress | None = attrs.field(default=None, kw_only=True)
    llm: LLM | None = attrs.field(default=None, init=False)

    def start(self) -> Iterator[Chunk]:
        """Checks everything, cheap things first, loads, captures, and begins.

        Returns:
            The answer, piece by piece.

        Raises:
            ConfigError: Something was given that cannot work.
        """
        if not self.prompt.strip():
            raise ConfigError(
                "the prompt is empty.", why="There is nothing to answer.", fix='Give one: breakgraph generate "Hello"'
            )
        self.choices.params(GenerationDefaults())
        device = choose_device(self.device)
        opened = open_model(self.model, via=self.via, cache_root=self.cache_root, progress=self.progress)
        params = self.choices.params(opened.generation)
        ids = self._tokens(opened)
        model = opened.load(device=device, progress=self.progress)
        if model.max_positions < opened.max_positions:
            check_prompt(
                len(ids),
                max_seq_len=model.max_positions,
                fix="Shorten the prompt: past this length the model does something that the adapter's probe could not try.",
            )
        self.llm = self._sized(model, prompt_tokens=len(ids), params=params)
        self.llm.start()
        return self.llm.stream(ids, params)

    def cut_off(self, reason: FinishReason, *, tokens: int) -> str | None:
        """Why an answer is shorter than was asked for, though the model had not ended it; None where it is not.

        Args:
            reason: Why the answer ended.
            tokens: Its tokens.
        """
        if reason is not FinishReason.LENGTH or tokens >= self.choices.max_tokens or self.llm is None:
            return None
        model = self.llm.model
        whole = model.config.max_positions
        way_out = "" if model.max_positions >= whole or self.via is Via.ADAPTER else "; --via adapter may go on"
        return (
            f"the answer is cut off: prompt and answer have {model.max_positions} tokens, the most that is served here of the "
            f"model's {whole}{way_out}."
        )

    def _tokens(self, opened: OpenedModel) -> list[int]:
        """The prompt's tokens, known to fit, before the weights are read."""
        if opened.tokenizer is None:
            raise ConfigError(
                f"{opened.source} has no tokenizer.",
                why="The prompt has to become tokens first, and the answer text.",
                fix="Put its tokenizer files (tokenizer.json, tokenizer_config.json) into the folder, or name another model.",
            )
        ids = encode(opened, self.prompt, chat=has_chat_template(opened))
        windowed = opened.config is not None and opened.max_positions < opened.config.max_positions
        check_prompt(
            len(ids),
            max_seq_len=opened.max_positions,
            fix="Shorten the prompt; our decoder ends at the sliding window, --via adapter may go on."
            if windowed
            else "Shorten the prompt, or use a model with more positions.",
        )
        return ids

    def _sized(self, model: LoadedModel, *, prompt_tokens: int, params: SamplingParams) -> LLM:
        """Graphs for the chunks of this prompt and for the contexts that its answer can reach, and no others."""
        chunk = token_limit(EngineConfig(), device_type=model.decoder.device.type)
        longest = min(prompt_tokens + params.max_tokens, model.max_positions)
        ladder = Buckets.prefill(max_batch_size=1, max_seq_len=model.max_positions, max_num_tokens=chunk)
        chunks = {min(prompt_tokens, chunk), prompt_tokens % chunk} - {0}
        contexts = [_FIRST_CONTEXT]
        while contexts[-1] < longest:
            contexts.append(contexts[-1] * _CONTEXT_GROWTH)
        return LLM(
            model,
            progress=self.progress,
            max_batch_size=1,
            max_num_tokens=chunk,
            max_seq_len=longest,
            block_size=_BLOCK_SIZE,
            graphs=self.graphs,
            sampling=SamplingPaths.GREEDY if params.temperature == 0 else SamplingPaths.SAMPLED,
            prefill_sizes=sorted({min(ladder.round_up(tokens) or tokens, longest - 1) for tokens in chunks}),
            contexts=[context for context in contexts if prompt_tokens < context < longest],
        )
