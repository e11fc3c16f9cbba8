"""The bodies of requests: which fields there are, of which type, and which of OpenAI's are refused.

Types are strict: a number in quotes is an error. A field that nobody knows is an error too, since a misspelt option would be left
at its default, silently. Fields of OpenAI's interface that this server cannot serve are accepted at the value that asks for
nothing, which clients may send, and refused by name at any other.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, TypeVar

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from breakgraph.server.errors import ApiError, field_error, shown

__all__ = ["ChatRequest", "CompletionRequest", "GenerationRequest", "Message", "StreamOptions", "parse"]


_Count = Annotated[int | None, Field(le=1 << 31)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(_Strict):
    """How a stream looks.

    Attributes:
        include_usage: One more chunk before the end, with the usage of the whole request.
        include_obfuscation: OpenAI's padding against eavesdroppers; only False is served.
    """

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class GenerationRequest(_Strict):
    """What both kinds of requests have. None stands for a field that was left out.

    Attributes:
        model: Name of the model.
        max_tokens: Most tokens to generate.
        temperature: Divides the logits.
        top_p: Share of the probability that is kept.
        top_k: Tokens that are kept; ours, as are the next ones.
        min_p: Least share of the likeliest token's probability.
        repetition_penalty: Divides the logits of tokens that are there already.
        frequency_penalty: Taken off the logits for each time that a token was generated.
        presence_penalty: Taken off the logits of tokens that were generated.
        logit_bias: Token ids, as JSON's strings, to what is added to their logits.
        seed: Makes the draw repeatable.
        stop: One string, or several, that end the text.
        stop_token_ids: Tokens that end it; ours.
        ignore_eos: Go on behind the end-of-sequence token; ours.
        stream: Answer in pieces.
        stream_options: How.
        n: Answers for each prompt; only 1 is served.
        user: Whose request it is; nothing is done with it.
    """

    model: str
    max_tokens: _Count = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], Field(max_length=16, fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=64, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    user: str | None = None

    @property
    def streams(self) -> bool:
        """Whether the answer comes in pieces."""
        return bool(self.stream)

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionRequest(GenerationRequest):
    """Body of `/v1/completions`.

    Attributes:
        prompt: A text, texts, token ids, or lists of them.
        logprobs: How many of the likeliest tokens come with each token; 0 gives its own log-probability alone.
        echo: Prompt and answer; only False is served.
        suffix: What comes behind the answer; not served.
        best_of: Answers to choose from; only 1 is served.
    """

    prompt: Any
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


class Message(_Strict):
    """One message of a conversation.

    Attributes:
        role: Who speaks; the model's chat template says which roles it knows.
        content: A text, or text parts, which are joined with line breaks.
        name: Which of several speakers; templates that know no names leave it out.
        refusal: Of an answer that is sent back: only null is served, as of the other fields that an answer may have.
        annotations: See `refusal`; an empty list is the same.
        audio: See `refusal`.
        function_call: See `refusal`.
        tool_calls: See `annotations`.
    """

    role: str
    content: Any = None
    name: str | None = None
    refusal: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None


class ChatRequest(GenerationRequest):
    """Body of `/v1/chat/completions`.

    Attributes:
        messages: The conversation.
        max_completion_tokens: As `max_tokens`, which OpenAI no longer recommends.
        logprobs: Whether each token comes with its log-probability.
        top_logprobs: How many of the likeliest tokens come with it.
        response_format: Only text is served.
        tools: Not served.
        tool_choice: Only "none" is served.
        functions: Not served.
        function_call: Only "none" is served.
        parallel_tool_calls: Without tools it means nothing.
        modalities: Only text is served.
        audio: Not served.
        prediction: Not served.
        reasoning_effort: Not served.
        verbosity: Not served.
        web_search_options: Not served.
        store: Only False is served.
        metadata: For stored answers; nothing is done with it.
        service_tier: Only "auto" and "default" are served.
    """

    messages: Annotated[list[Message], Field(max_length=2048, fail_fast=True)]
    max_completion_tokens: _Count = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: Any = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    parallel_tool_calls: bool | None = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None
    store: bool | None = None
    metadata: Any = None
    service_tier: Literal["auto", "default"] | None = None


# Fields that are not served, and the values besides null that ask for nothing.
_NOT_SERVED: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "store": (False,),
}

_R = TypeVar("_R", bound=GenerationRequest)


def parse(kind: type[_R], *, body: dict[str, Any]) -> _R:
    """Checks a body.

    Args:
        kind: What it is to be.
        body: The JSON object.

    Raises:
        ApiError: A field is missing, unknown, of another type, or asks for something that is not served; `param` names it.
    """
    _refuse_unknown(body, known=kind.model_fields, place="")
    messages = body.get("messages")
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict):
            _refuse_unknown(message, known=Message.model_fields, place=f"messages[{index}].")
    try:
        request = kind.model_validate(body)
    except pydantic.ValidationError as error:
        raise _explain(error.errors(include_url=False)[0]) from None
    for name, allowed in _NOT_SERVED.items():
        value = body.get(name)
        if value is not None and not any(type(value) is type(one) and value == one for one in allowed):
            raise ApiError(
                f"{name} is {shown(value)}, which is not served here; leave {name} out.",
                param=name,
                code="unsupported_value",
            )
    if request.stream_options is not None:
        if not request.streams:
            raise ApiError("stream_options is only for stream=true.", param="stream_options", code="invalid_value")
        if request.stream_options.include_obfuscation:
            param = "stream_options.include_obfuscation"
            raise ApiError(f"{param} is not served here; leave it out.", param=param, code="unsupported_value")
    return request


_TYPES = {
    "int_type": "Send a whole number, without quotes.",
    "float_type": "Send a number, without quotes.",
    "bool_type": "Send true or false, without quotes.",
    "string_type": "Send a text in quotes.",
}


def _refuse_unknown(fields: Mapping[str, Any], *, known: Iterable[str], place: str) -> None:
    """The first field that is not known: before pydantic, which would list them all, however many there are."""
    known = list(known)
    for name in fields:
        if name not in known:
            raise _unknown(place + name, near=difflib.get_close_matches(name[:64], known, n=1))


def _unknown(param: str, *, near: list[str]) -> ApiError:
    hint = f" Did you mean {near[0]}?" if near else _ELSEWHERE.get(param.rpartition(".")[2], "")
    return ApiError(
        f"There is no field {param!r:.120} here.{hint} What is not known is refused: a misspelt option would be left at its"
        " default, silently.",
        param=param[:200],
        code="unknown_parameter",
    )


_ELSEWHERE = {
    "messages": " Messages go to /v1/chat/completions.",
    "prompt": " Prompts go to /v1/completions.",
    "tool_call_id": " Tools are not served.",
}


def _explain(error: Any) -> ApiError:
    """The first of pydantic's findings, with the field's place."""
    place = [part for part in error["loc"] if isinstance(part, int) or not _is_branch(part)]
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".")
    if error["type"] == "missing":
        return ApiError(f"{param} is missing; it is required.", param=param, code="missing_required_parameter")
    if error["type"] == "extra_forbidden":
        return _unknown(param, near=[])
    expected = str(error["msg"]).removeprefix("Input should be ")
    if param == "logprobs" and expected == "a valid boolean":
        expected = "true or false (how many of the likeliest tokens come with each is top_logprobs)"
    if param == "stop":
        expected = "a string or a list of strings"
    return field_error(param, got=error["input"], expected=expected, why=_TYPES.get(error["type"], ""))


def _is_branch(part: str) -> bool:
    # Where a field may be of several types, pydantic puts the name of the type it tried behind the field's name.
    return part in ("str", "list[str]", "int", "float", "bool")
