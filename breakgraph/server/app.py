"""The routes."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import attrs
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from breakgraph.server.answers import Answer, merged
from breakgraph.server.bodies import read_json, until_gone
from breakgraph.server.errors import ApiError, api_error
from breakgraph.server.event_stream import DONE, EventStream, event, json_bytes
from breakgraph.server.forms import ChatForm, CompletionForm, Form
from breakgraph.server.prompting import chat_prompt, completion_prompts, default_tokens, sampling_params
from breakgraph.server.protocol import ChatRequest, CompletionRequest, GenerationRequest, parse
from breakgraph.server.service import Service
from breakgraph.serving.sampling_params import SamplingParams

__all__ = ["create_app"]

R = TypeVar("R")

_LOG = logging.getLogger(__name__)

_CLIENT_GONE = 499  # nobody reads it; it is for logs and counters
_GRACE_SECONDS = 5.0  # for the last event of a stream whose time is over


def create_app(service: Service, *, api_key: str | None = None) -> FastAPI:
    """Makes the application; its lifespan starts and stops the service.

    Args:
        service: Not started.
        api_key: What clients must send as `Authorization: Bearer ...` to everything under `/v1`; None lets everybody in.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.stop()

    app = FastAPI(
        title="breakgraph", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False
    )
    app.add_exception_handler(ApiError, _told)
    app.add_exception_handler(HTTPException, _told)
    app.include_router(_api(service, api_key=api_key))

    @app.get("/health")
    async def health() -> Response:
        reason = service.unfit
        return _json({"status": "ok" if reason is None else reason}, status=200 if reason is None else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        text = await service.metrics_text()
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    return app


def _api(service: Service, *, api_key: str | None) -> APIRouter:
    async def authorize(request: Request) -> None:
        if api_key is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not secrets.compare_digest(given.strip().encode(), api_key.encode()):
            raise ApiError(
                "The API key is missing or wrong; send it as Authorization: Bearer KEY.",
                status=401,
                code="invalid_api_key",
            )

    api = APIRouter(prefix="/v1", dependencies=[Depends(authorize)])

    @api.get("/models")
    async def models() -> Response:
        return _json({"object": "list", "data": [_model(service)]})

    @api.get("/models/{name:path}")
    async def model(name: str) -> Response:
        _check_model(service, name)
        return _json(_model(service))

    @api.post("/completions")
    async def completions(request: Request) -> Response:
        return await _counted(service, request, _Completions(service))

    @api.post("/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await _counted(service, request, _Chat(service))

    return api


@attrs.frozen
class _Asked:
    """A request that was checked.

    Attributes:
        request: Its fields.
        prompts: Token ids of each prompt.
        form: Of its answer.
    """

    request: GenerationRequest
    prompts: Sequence[Sequence[int]]
    form: Form


@attrs.frozen
class _Completions:
    """`/v1/completions`."""

    service: Service

    async def ask(self, body: dict[str, Any]) -> _Asked:
        """Checks a body and makes tokens of its prompts."""
        service = self.service
        request = parse(CompletionRequest, body=body)
        _check_model(service, request.model)
        most = service.tokenizing.most_characters(service.room)
        prompts = await service.tokenizing.encode(
            lambda: completion_prompts(request, model=service.model, limits=service.limits, most_characters=most)
        )
        tokens = None if request.logprobs is None else service.tokenizing.tokens
        return _Asked(request, prompts, CompletionForm(model=service.name, tokens=tokens))


@attrs.frozen
class _Chat:
    """`/v1/chat/completions`."""

    service: Service

    async def ask(self, body: dict[str, Any]) -> _Asked:
        """Checks a body and makes tokens of its conversation."""
        service = self.service
        request = parse(ChatRequest, body=body)
        _check_model(service, request.model)
        most = service.tokenizing.most_characters(service.room)
        prompt = await service.tokenizing.encode(
            lambda: chat_prompt(request, model=service.model, most_characters=most)
        )
        tokens = service.tokenizing.tokens if request.logprobs else None
        return _Asked(request, [prompt], ChatForm(model=service.name, tokens=tokens))


async def _counted(service: Service, request: Request, endpoint: _Completions | _Chat) -> Response:
    """Answers, and counts the outcome; a stream counts its own, at its end."""

    def count(outcome: str) -> None:
        service.metrics.request(request.url.path, outcome=outcome)

    try:
        response = await _answer(service, request, endpoint, count)
    except ClientDisconnect:  # in the middle of its body
        response = Response(status_code=_CLIENT_GONE)
    except Exception as error:
        told = api_error(error)
        if told is not error and told.status >= 500:
            _LOG.error("%s failed: %s", request.url.path, told.message, exc_info=error)
        count(str(told.status))
        raise told from error
    if not isinstance(response, EventStream):
        count("disconnect" if response.status_code == _CLIENT_GONE else str(response.status_code))
    return response


async def _answer(
    service: Service, request: Request, endpoint: _Completions | _Chat, count: Callable[[str], None]
) -> Response:
    text = bytearray()
    with service.held(lambda: len(text)) as note:
        body = await read_json(request, limits=service.limits, body=text, note=note)
        begin = time.monotonic()
        asked = await _unless_gone(request, endpoint.ask(body), service=service)
    if asked is None:
        return Response(status_code=_CLIENT_GONE)
    params = _params(asked, service=service)
    left = max(service.limits.request_seconds - (time.monotonic() - begin), 0.0)
    answers = service.admit(asked.prompts, params, seconds=left, streamed=asked.request.streams)
    if asked.request.streams:
        failures: list[ApiError] = []

        def end(outcome: str) -> None:
            service.release(answers)
            count(str(failures[0].status) if failures and outcome == "200" else outcome)

        return EventStream(_events(asked, answers, failures), seconds=left + _GRACE_SECONDS, on_end=end)
    try:
        whole = await _unless_gone(request, _collect(asked, answers), service=service)
    finally:
        service.release(answers)
    return Response(status_code=_CLIENT_GONE) if whole is None else _json(whole)


def _params(asked: _Asked, *, service: Service) -> list[SamplingParams]:
    """The parameters of each prompt: where nothing is said of its answer's length, each has its own room."""
    lengths = [len(prompt) for prompt in asked.prompts]
    made = sampling_params(
        asked.request,
        defaults=service.model.generation,
        model=service.model,
        room=service.room,
        prompt_tokens=max(lengths),
    )
    if len(lengths) == 1 or asked.request.max_tokens is not None:
        return [made] * len(lengths)
    return [
        attrs.evolve(made, max_tokens=default_tokens(room=service.room, prompt_tokens=length)) for length in lengths
    ]


async def _unless_gone(request: Request, work: Coroutine[Any, Any, R], *, service: Service) -> R | None:
    """What work gives, or None where the client goes away meanwhile; then it is cancelled.

    Raises:
        ApiError: It took too long (504).
    """
    working = asyncio.create_task(work)
    gone = asyncio.create_task(until_gone(request))
    try:
        seconds = service.limits.request_seconds + _GRACE_SECONDS  # answers have a time of their own, which is shorter
        done, _ = await asyncio.wait({working, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            raise service.late()
        return working.result() if working.done() else None
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _collect(asked: _Asked, answers: Sequence[Answer]) -> dict[str, Any]:
    async for index, piece in merged(answers):
        asked.form.add(index, piece)
    return asked.form.whole(answers)


async def _events(asked: _Asked, answers: Sequence[Answer], failures: list[ApiError]) -> AsyncIterator[bytes]:
    form, includes_usage = asked.form, asked.request.includes_usage

    def framed(chunk: dict[str, Any]) -> bytes:
        return event(chunk | {"usage": None} if includes_usage else chunk)

    try:
        for chunk in form.opening():
            yield framed(chunk)
        async for index, piece in merged(answers):
            part = form.chunk(index, piece)
            if part is not None:
                yield framed(part)
        if includes_usage:
            yield event(form.usage_chunk(answers))
    except Exception as error:
        failures.append(api_error(error))
        yield event(failures[0].body)
    yield DONE


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "breakgraph",
        "max_model_len": service.room,
    }


def _check_model(service: Service, name: str) -> None:
    if name != service.name:
        raise ApiError(
            f"There is no model {name!r:.120}; this server has {service.name!r}.",
            status=404,
            param="model",
            code="model_not_found",
        )


def _json(value: object, *, status: int = 200) -> Response:
    return Response(json_bytes(value), status_code=status, media_type="application/json")


async def _told(request: Request, error: Exception) -> Response:
    headers = None
    if isinstance(error, HTTPException):  # no such route, or another method
        headers, known = error.headers, "/v1/completions, /v1/chat/completions, /v1/models, /health and /metrics"
        what = f"{request.method} {request.url.path!r:.80}"
        if error.status_code == 405:
            error = ApiError(
                f"{what}: the route takes {(headers or {}).get('Allow', 'another method')}.",
                status=405,
                code="wrong_method",
            )
        else:
            error = ApiError(
                f"{what} is not there. The routes are {known}.", status=error.status_code, code="no_such_route"
            )
    assert isinstance(error, ApiError)
    response = _json(error.body, status=error.status)
    response.headers.update(headers or {})
    if error.status == 401:
        response.headers["www-authenticate"] = "Bearer"
    if error.status == 503:
        response.headers["retry-after"] = "1"
    if error.status in (408, 413):  # the client may still be sending
        response.headers["connection"] = "close"
    return response
