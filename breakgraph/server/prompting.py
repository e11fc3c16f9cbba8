"""From a checked request to what the engine takes: token ids and sampling parameters."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from breakgraph.errors import BreakgraphError, ConfigError
from breakgraph.models.generation import GenerationDefaults
from breakgraph.models.loaded import LoadedModel
from breakgraph.server.errors import ApiError, api_error, field_error
from breakgraph.server.limits import Limits
from breakgraph.server.protocol import ChatRequest, CompletionRequest, GenerationRequest, Message
from breakgraph.serving.prompts import encode, encode_chat, prompts_of
from breakgraph.serving.sampling_params import SamplingParams
from breakgraph.serving.scheduler import check_prompt

__all__ = ["chat_prompt", "completion_prompts", "default_tokens", "sampling_params"]

_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's
_MOST_LOGPROBS = 20
_LONGEST_STOP = 256
_MOST_BIASED = 1024
_SAME_NAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "seed",
    "ignore_eos",
)


def completion_prompts(
    request: CompletionRequest, *, model: LoadedModel, limits: Limits, most_characters: int
) -> list[list[int]]:
    """Token ids of each prompt.

    Args:
        request: Checked.
        model: Its tokenizer does the work.
        limits: Of the number of prompts.
        most_characters: Longer texts cannot fit, however few tokens they make.

    Raises:
        ApiError: `prompt` is no text, no token ids and no list of those, is empty, or is out of the vocabulary.
    """
    given = request.prompt
    if given is None or given == []:
        raise ApiError("prompt is missing or empty.", param="prompt", code="missing_required_parameter")
    try:
        prompts = prompts_of(given)
        if len(prompts) > limits.max_prompts:
            raise ApiError(
                f"prompt has {len(prompts)} prompts; expected at most {limits.max_prompts}. Send several requests.",
                param="prompt",
                code="invalid_value",
            )
        for prompt in prompts:
            if isinstance(prompt, str):
                _check_text(len(prompt), most=most_characters, param="prompt")
        encoded = [encode(model, prompt, chat=False) for prompt in prompts]
        for ids in encoded:
            check_prompt(
                len(ids), max_seq_len=sys.maxsize
            )  # a text may have no tokens; how long it may be is another question
        return encoded
    except ConfigError as error:
        raise _about("prompt", error) from None


def chat_prompt(request: ChatRequest, *, model: LoadedModel, most_characters: int) -> list[int]:
    """Token ids of a conversation in the model's chat template.

    Args:
        request: Checked.
        model: With the template.
        most_characters: See `completion_prompts`.

    Raises:
        ApiError: There is no template, or it refuses these messages; content is not text.
    """
    if not request.messages:
        raise ApiError("messages is empty; there is nothing to answer.", param="messages", code="invalid_value")
    messages = [_message(message, place=f"messages[{index}]") for index, message in enumerate(request.messages)]
    _check_text(sum(len(message["content"]) for message in messages), most=most_characters, param="messages")
    try:
        return encode_chat(model, messages)
    except ConfigError as error:
        raise _about("messages", error) from None


def _check_text(characters: int, *, most: int, param: str) -> None:
    """Refuses a text before it keeps the tokenizer busy, and everybody who waits for it."""
    if characters > most:
        raise ApiError(
            f"The text has {characters} characters; one of more than {most} does not fit, whatever its tokens. Shorten it.",
            param=param,
            code="context_length_exceeded",
        )


def _message(message: Message, *, place: str) -> dict[str, str]:
    if message.role in ("tool", "function"):
        raise field_error(f"{place}.role", got=message.role, expected="another role", why="Tools are not served here.")
    made = {"role": message.role, "content": _content(message.content, place=f"{place}.content")}
    return made if message.name is None else made | {"name": message.name}


def _content(content: object, *, place: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise field_error(
            place, got=content, expected="a text or a list of text parts", why="Only text is served here."
        )
    texts = []
    for index, part in enumerate(content):
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            expected = 'a part such as {"type": "text", "text": "..."}'
            raise field_error(f"{place}[{index}]", got=part, expected=expected, why="Only text is served here.")
        texts.append(text)
    return "\n".join(texts)


def sampling_params(
    request: GenerationRequest, *, defaults: GenerationDefaults, model: LoadedModel, room: int, prompt_tokens: int
) -> SamplingParams:
    """How the answer is drawn. What a request leaves out is the model author's choice; temperature is 1 where they say nothing.

    Args:
        request: Checked.
        defaults: The author's.
        model: Whose tokens they are.
        room: Most tokens of prompt and answer.
        prompt_tokens: Tokens of its longest prompt.

    Raises:
        ApiError: A value is out of its range, or prompt and answer do not fit.
    """
    values = _author(defaults) | {name: value for name in _SAME_NAME if (value := getattr(request, name)) is not None}
    if request.stop is not None:
        values["stop"] = _stop(request.stop)
    if request.stop_token_ids is not None:
        values["stop_token_ids"] = request.stop_token_ids
        wrong = [token for token in request.stop_token_ids if not 0 <= token < model.vocab_size]
        if wrong:
            expected = f"tokens from 0 to {model.vocab_size - 1}"
            raise field_error("stop_token_ids", got=wrong[0], expected=expected, why="It could never be generated.")
    if request.logit_bias is not None:
        if len(request.logit_bias) > _MOST_BIASED:
            raise ApiError(
                f"logit_bias has {len(request.logit_bias)} tokens; at most {_MOST_BIASED} are taken, since they are added at"
                " every step.",
                param="logit_bias",
                code="invalid_value",
            )
        values["logit_bias"] = _logit_bias(request.logit_bias)
    values["max_tokens"] = _max_tokens(request, room=room, prompt_tokens=prompt_tokens)
    values["logprobs"] = _logprobs(request)
    try:
        return SamplingParams(**values)
    except ConfigError as error:
        raise api_error(error) from None


def _author(defaults: GenerationDefaults) -> dict[str, Any]:
    said = {
        "top_k": defaults.top_k,
        "top_p": defaults.top_p,
        "min_p": defaults.min_p,
        "temperature": defaults.temperature,
    }
    made: dict[str, Any] = {"temperature": 1.0}
    if defaults.do_sample:
        made |= {name: value for name, value in said.items() if value is not None}
    if defaults.repetition_penalty is not None:
        made["repetition_penalty"] = defaults.repetition_penalty
    return made


def default_tokens(*, room: int, prompt_tokens: int) -> int:
    """Tokens of a completion of which nothing is said.

    Args:
        room: Most tokens of prompt and answer.
        prompt_tokens: Of the prompt.
    """
    return min(_DEFAULT_COMPLETION_TOKENS, max(room - prompt_tokens, 1))


def _max_tokens(request: GenerationRequest, *, room: int, prompt_tokens: int) -> int:
    name, asked = "max_tokens", request.max_tokens
    if isinstance(request, ChatRequest):
        if request.max_completion_tokens is not None:
            if asked is not None and asked != request.max_completion_tokens:
                raise ApiError(
                    f"max_tokens is {asked} and max_completion_tokens is {request.max_completion_tokens}; give one of them.",
                    param="max_completion_tokens",
                    code="invalid_value",
                )
            name, asked = "max_completion_tokens", request.max_completion_tokens
    elif asked is None:
        asked = default_tokens(room=room, prompt_tokens=prompt_tokens)
    if asked is not None and asked < 1:
        raise field_error(name, got=asked, expected="an integer of at least 1", why="Nothing would be generated.")
    if prompt_tokens >= room:
        raise ApiError(
            f"The prompt has {prompt_tokens} tokens; at most {room - 1} fit, since prompt and answer share {room}. Shorten it.",
            param="messages" if isinstance(request, ChatRequest) else "prompt",
            code="context_length_exceeded",
        )
    if asked is None:
        return room - prompt_tokens
    if prompt_tokens + asked > room:
        raise ApiError(
            f"The prompt has {prompt_tokens} tokens and {name} is {asked}, together {prompt_tokens + asked}; at most {room} fit."
            f" Shorten the prompt, or give {name} of at most {room - prompt_tokens}.",
            param=name,
            code="context_length_exceeded",
        )
    return asked


def _logprobs(request: GenerationRequest) -> int | None:
    name, count = "logprobs", None
    if isinstance(request, CompletionRequest):
        count = request.logprobs
    elif isinstance(request, ChatRequest):
        name, count = "top_logprobs", request.top_logprobs
        if count is not None and not request.logprobs:
            raise ApiError("top_logprobs needs logprobs=true.", param="top_logprobs", code="invalid_value")
        if request.logprobs and count is None:
            count = 0
    if count is not None and not 0 <= count <= _MOST_LOGPROBS:
        raise field_error(
            name,
            got=count,
            expected=f"an integer from 0 to {_MOST_LOGPROBS}",
            why="It counts tokens beside each token.",
        )
    return count


def _stop(given: str | list[str]) -> list[str]:
    strings = [given] if isinstance(given, str) else given
    longest = max(map(len, strings), default=0)
    if longest > _LONGEST_STOP:
        raise ApiError(
            f"stop has a string of {longest} characters; at most {_LONGEST_STOP} are taken: it is looked for at every token.",
            param="stop",
            code="invalid_value",
        )
    return strings


def _logit_bias(given: Mapping[str, float]) -> dict[int, float]:
    made: dict[int, float] = {}
    for token, value in given.items():
        if not (token.isascii() and token.isdecimal() and len(token) < 10 and str(int(token)) == token):
            raise field_error(
                "logit_bias", got=token, expected="token ids", why="Each is the token whose logit is changed."
            )
        made[int(token)] = value
    return made


def _about(param: str, error: BreakgraphError) -> ApiError:
    told = api_error(error)
    return ApiError(told.message, status=told.status, param=param, code=told.code)
