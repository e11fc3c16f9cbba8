"""What goes wrong at a server: bad requests, clients that leave, a failing break, full queues, shutting down."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from breakgraph.errors import ConfigError, InternalError
from breakgraph.server import Limits, Service, create_app, run_server
from breakgraph.server.run import bind
from breakgraph.serving import LLM, SamplingParams
from breakgraph.serving.text import OutputText
from tests.server_rig import OPTIONS, Rig, serving, speaking_model
from tests.serving_reference import tiny_model

COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": "hi", "max_tokens": 4, "temperature": 0}
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
LONG: dict[str, Any] = {
    "model": "tiny",
    "prompt": "a long one",
    "max_tokens": 110,
    "temperature": 0,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    """One server for the requests that it refuses."""
    with serving(LLM(speaking_model(), **OPTIONS), limits=Limits(max_body_bytes=20_000, body_seconds=1.0)) as made:
        yield made
        made.wait_until_idle()


@pytest.fixture(autouse=True)
def still_serves(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test did, the server answers the next request."""
    yield
    if "rig" in request.fixturenames:
        rig: Rig = request.getfixturevalue("rig")
        assert rig.post("/v1/completions", COMPLETION).status_code == 200


def _error(response: httpx.Response) -> dict[str, Any]:
    """The error of a response; its shape is always the same."""
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]  # type: ignore[no-any-return]


BAD_COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": None}, "prompt", "missing"),
    ({"prompt": []}, "prompt", "empty"),
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": [[]]}, "prompt", "no tokens"),
    ({"prompt": 5}, "prompt", "type int"),
    ({"prompt": [1, "a"]}, "prompt", "stands among"),
    ({"prompt": [1.5]}, "prompt", "type float"),
    ({"prompt": [True]}, "prompt", "type bool"),
    ({"prompt": [999]}, "prompt", "0 to 256"),
    ({"prompt": [-1]}, "prompt", "0 to 256"),
    ({"prompt": ["x"] * 513}, "prompt", "at most 512"),
    ({"prompt": "x" * 128}, "prompt", "at most 127 fit"),
    ({"prompt": "x" * 128 * 5 * 4 + "x"}, "prompt", "2561 characters"),
    ({"max_tokens": 127}, "max_tokens", "at most 126"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"max_tokens": "5"}, "max_tokens", "valid integer"),
    ({"max_tokens": 5.0}, "max_tokens", "valid integer"),
    ({"max_tokens": True}, "max_tokens", "valid integer"),
    ({"max_tokens": 10**30}, "max_tokens", "less than"),
    ({"temperature": -0.1}, "temperature", "at least 0"),
    ({"temperature": "hot"}, "temperature", "valid number"),
    ({"top_p": 0}, "top_p", r"\(0, 1\]"),
    ({"top_p": 1.1}, "top_p", r"\(0, 1\]"),
    ({"top_k": -1}, "top_k", "at least 0"),
    ({"min_p": 2}, "min_p", r"\[0, 1\]"),
    ({"repetition_penalty": 0}, "repetition_penalty", "above 0"),
    ({"frequency_penalty": 3}, "frequency_penalty", r"\[-2, 2\]"),
    ({"presence_penalty": -3}, "presence_penalty", r"\[-2, 2\]"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "100"),
    ({"logit_bias": {"257": 1}}, "logit_bias", "0 to 256"),
    ({"logit_bias": [1]}, "logit_bias", "valid dictionary"),
    ({"logprobs": 21}, "logprobs", "0 to 20"),
    ({"logprobs": -1}, "logprobs", "0 to 20"),
    ({"logprobs": True}, "logprobs", "valid integer"),
    ({"seed": -1}, "seed", "2\\*\\*63"),
    ({"seed": 2**63}, "seed", "2\\*\\*63"),
    ({"stop": ""}, "stop", "not empty"),
    ({"stop": [1]}, "stop", "a list of strings"),
    ({"stop": ["a"] * 17}, "stop", "stop is"),
    ({"stop": "a" * 257}, "stop", "257 characters"),
    ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias", "at most 1024"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids[0]", "valid integer"),
    ({"stream": "yes"}, "stream", "valid boolean"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "no field"),
    ({"n": 2}, "n", "not served"),
    ({"n": 0}, "n", "not served"),
    ({"best_of": 3}, "best_of", "not served"),
    ({"echo": True}, "echo", "not served"),
    ({"suffix": "end"}, "suffix", "not served"),
    ({"temprature": 1}, "temprature", "Did you mean temperature"),
    ({"model": 5}, "model", "valid string"),
]


@pytest.mark.parametrize(("change", "param", "message"), BAD_COMPLETIONS, ids=lambda value: str(value)[:40])
def test_a_bad_completion_request_is_a_400_that_names_the_field(
    rig: Rig, change: dict[str, Any], param: str, message: str
) -> None:
    """Every wrong value is refused before anything runs, with the field, what was got and what is expected."""
    response = rig.post("/v1/completions", {**COMPLETION, **change})
    assert response.status_code == 400, response.text
    error = _error(response)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert re.search(message, error["message"]), error["message"]


BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x", "colour": "red"}]}, "messages[0].colour"),
    ({"messages": [{"role": "user", "content": "x" * 200}]}, "messages"),
    ({"max_tokens": 4, "max_completion_tokens": 5}, "max_completion_tokens"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 3}, "logprobs"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"n": 3}, "n"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"prompt": "x"}, "prompt"),
]


@pytest.mark.parametrize(("change", "param"), BAD_CHATS, ids=lambda value: str(value)[:40])
def test_a_bad_chat_request_is_a_400_that_names_the_field(rig: Rig, change: dict[str, Any], param: str) -> None:
    """As for completions; what the chat template refuses is the client's to mend, too."""
    response = rig.post("/v1/chat/completions", {**CHAT, **change})
    assert response.status_code == 400, response.text
    assert _error(response)["param"] == param


@pytest.mark.parametrize(
    "change",
    [
        {"n": 1, "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "user": "me", "store": False},
        {"stream": False, "stop": None, "logit_bias": None, "metadata": {"a": "b"}, "service_tier": "auto"},
    ],
)
def test_fields_that_ask_for_nothing_are_taken(rig: Rig, change: dict[str, Any]) -> None:
    """Clients may send the fields that are not served at the value that stands for their absence."""
    assert rig.post("/v1/chat/completions", {**CHAT, **change}).status_code == 200


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"model": "tiny", "prompt": "hi", "temperature": NaN}', "NaN"),
        (b'{"model": "tiny", "prompt": "hi", "temperature": 1e999}', "finite"),
        (b'{"model": "tiny", "prompt": "a", "prompt": "b"}', "twice"),
        (b'{"model": "tiny", "prompt": "\\ud800"}', "surrogate"),
        (b"[1, 2]", "expected an object"),
        (b"null", "expected an object"),
        (b'{"model": "tiny", "prompt": "\xff"}', "not valid JSON"),
        (b"[" * 15_000, "nested too deeply"),
        (b'{"model": "tiny", "prompt": ' + b"[" * 5_000 + b"]" * 5_000 + b"}", ""),
        (b'{"model": "tiny", "seed": ' + b"9" * 6_000 + b"}", "not valid JSON"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_no_json_object_is_a_400(rig: Rig, body: bytes, message: str) -> None:
    """Malformed, deeply nested, doubled or impossible values are told apart, and never reach the engine."""
    response = rig.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert message in _error(response)["message"]


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_that_is_too_long_is_a_413(rig: Rig, declared: bool) -> None:
    """Also without a content length; the client gets the answer although it was still sending."""
    body = b'{"prompt": "' + b"x" * 500_000 + b'"}'

    def parts() -> Iterator[bytes]:
        for start in range(0, len(body), 10_000):
            yield body[start : start + 10_000]

    content = body if declared else parts()
    response = rig.http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert response.status_code == 413
    assert "20000 bytes" in _error(response)["message"]


def test_fifty_megabytes_are_a_413() -> None:
    """With the default bound the client gets its answer, and the server goes on."""
    with serving(LLM(speaking_model(), **{**OPTIONS, "graphs": False})) as rig:
        body = b'{"prompt": "' + b"x" * 50_000_000 + b'"}'
        response = rig.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        assert response.status_code == 413
        assert rig.post("/v1/completions", COMPLETION).status_code == 200


def test_a_body_that_does_not_come_is_a_408(rig: Rig) -> None:
    """A client that sends half of what it promised is answered and cut off; it holds nothing meanwhile."""
    host, port = rig.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as client:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
        client.sendall(head)
        assert b" 408 " in client.recv(4096).split(b"\r\n")[0]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_only_json_is_taken(rig: Rig, kind: str) -> None:
    """A web page may post the other types to a server on loopback without asking it first."""
    headers = {"content-type": kind} if kind else {}
    response = rig.http.post("/v1/completions", content=json.dumps(COMPLETION), headers=headers)
    assert response.status_code == 415


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/v1/completions", 405), ("POST", "/v1/embeddings", 404), ("GET", "/", 404)]
)
def test_other_routes_have_the_same_form_of_error(rig: Rig, method: str, path: str, status: int) -> None:
    """A route that is not there, or another method, is told like any other error."""
    response = rig.http.request(method, path)
    assert response.status_code == status
    _error(response)


def test_another_model_is_a_404(rig: Rig) -> None:
    """The client sees which model there is."""
    with pytest.raises(openai.NotFoundError, match="this server has 'tiny'") as error:
        rig.openai.completions.create(**{**COMPLETION, "model": "huge"})
    assert error.value.code == "model_not_found"


def test_an_api_key_is_asked_for() -> None:
    """Under /v1 nothing is answered without it, health and metrics are; a wrong key is 401 with a challenge."""
    with serving(LLM(speaking_model(), **{**OPTIONS, "graphs": False}), api_key="s3cret") as rig:
        assert rig.openai.completions.create(**COMPLETION).usage is not None
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "Basic s3cret"},
            {"authorization": "Bearer é"},
        ):
            raw = {name: value.encode("utf-8") for name, value in headers.items()}
            for path in ("/v1/models", "/v1/models/tiny"):
                response = httpx.get(rig.url + path, headers=raw)
                assert response.status_code == 401
                assert response.headers["www-authenticate"] == "Bearer"
        assert httpx.get(rig.url + "/health").status_code == httpx.get(rig.url + "/metrics").status_code == 200


# What an attack on the server found.


def test_an_answer_can_be_sent_back(rig: Rig) -> None:
    """The message of an answer, with the fields that it has at null, is taken as part of the next request."""
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    first = rig.openai.chat.completions.create(model="tiny", messages=messages, max_tokens=4, temperature=0)
    messages += [first.choices[0].message, {"role": "user", "content": "and"}]
    assert rig.openai.chat.completions.create(model="tiny", messages=messages, max_tokens=4, temperature=0).choices


@pytest.mark.parametrize(
    ("body", "seconds"),
    [
        (b"{" + b",".join(b'"k%d": 1' % n for n in range(90_000)) + b', "k0": 2}', 2.0),
        (b'{"model": "tiny", "prompt": "x", ' + b",".join(b'"k%d": 1' % n for n in range(90_000)) + b"}", 2.0),
        (b'{"model": "tiny", "prompt": "x", "stop_token_ids": [' + b'"a",' * 300_000 + b'"a"]}', 2.0),
        (b'{"model": "tiny", "messages": [' + b"{}," * 300_000 + b"{}]}", 2.0),
        (b'{"model": "tiny", "prompt": "' + b"x" * 900_000 + b'"}', 2.0),
        (b'{"model": "tiny", "prompt": "x", "' + b"y" * 900_000 + b'": 1}', 2.0),
    ],
    ids=["doubled", "unknown", "wrong tokens", "wrong messages", "long text", "long name"],
)
def test_a_large_wrong_body_is_refused_at_once(body: bytes, seconds: float) -> None:
    """However many faults a body has, it is refused for the first one; nobody else waits for the search."""
    with serving(LLM(speaking_model(), **{**OPTIONS, "graphs": False})) as made:
        begin = time.monotonic()
        for path in ("/v1/completions", "/v1/chat/completions"):
            response = made.http.post(path, content=body, headers={"content-type": "application/json"})
            assert response.status_code == 400
            assert len(_error(response)["message"]) < 2100
        assert time.monotonic() - begin < 2 * seconds


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"model": "tiny", "prompt": "\xed\xa0\x80"}', "invalid_json"),
        ('{"model": "tiny", "prompt": "x"}'.encode("utf-16"), "invalid_json"),
        (b'{"model": "tiny", "prompt": ' + b"[" * 950 + b'"\\u0041"' + b"]" * 950 + b"}", "invalid_value"),
        (b'{"model": "tiny", "prompt": "x", "max_tokens": ' + b"9" * 4300 + b"}", "invalid_value"),
    ],
    ids=["half a pair", "utf-16", "deep", "4300 digits"],
)
def test_what_broke_the_form_of_errors_is_a_400(rig: Rig, body: bytes, code: str) -> None:
    """Each of these was a bare 500 once."""
    response = rig.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    assert _error(response)["code"] in (code, "invalid_json")


def test_a_text_with_a_token_beyond_the_embedding_is_a_400() -> None:
    """A tokenizer with more tokens than the model: the request that has one is refused, and nobody else's step dies."""
    model = speaking_model()
    model.tokenizer.add_tokens(["<extra>"])
    with serving(LLM(model, **{**OPTIONS, "graphs": False})) as made:
        response = made.post("/v1/completions", {**COMPLETION, "prompt": "a<extra>b"})
        assert response.status_code == 400
        assert "token 257; the model's tokens are 0 to 256" in _error(response)["message"]
        assert made.post("/v1/completions", COMPLETION).status_code == 200


def test_a_panic_in_a_tokenizer_ends_its_answer(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no Exception, such as a panic in Rust, is told like one: whole answers do not wait for ever."""

    class Panic(BaseException):
        pass

    def panics(self: OutputText, *tokens: int) -> str:
        raise Panic("at the disco")

    with monkeypatch.context() as patched:
        patched.setattr(OutputText, "push", panics)
        response = rig.post("/v1/completions", COMPLETION)
        assert response.status_code == 500
        assert "Panic: at the disco" in _error(response)["message"]
        assert "Panic" in rig.post("/v1/completions", {**COMPLETION, "stream": True}).text
    rig.wait_until_idle()


def test_a_tokenizer_that_raises_is_a_500_in_the_same_form(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever goes wrong behind the checks has the form of all errors, is counted, and names no path of this machine."""

    def breaks(*_: object, **__: object) -> None:
        raise ValueError("no idea")

    before = rig.metric("requests_total", endpoint="/v1/completions", outcome="500")
    with monkeypatch.context() as patched:
        patched.setattr("breakgraph.server.prompting.encode", breaks)
        response = rig.post("/v1/completions", COMPLETION)
    assert response.status_code == 500
    assert "ValueError: no idea" in _error(response)["message"]
    assert rig.metric("requests_total", endpoint="/v1/completions", outcome="500") == before + 1


def test_one_prompt_of_several_that_fails_leaves_nothing_behind(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text of the second of three cannot be begun: the first is ended, and no slot of the queue is lost."""
    begin, calls = OutputText.__init__, iter(range(100))

    def breaks(self: OutputText, *args: Any, **kwargs: Any) -> None:
        if next(calls) == 1:
            raise ValueError("no text")
        begin(self, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(OutputText, "__init__", breaks)
        assert rig.post("/v1/completions", {**COMPLETION, "prompt": ["a", "b", "c"]}).status_code == 500
    assert rig.service.running == 0


def test_a_client_that_leaves_in_its_body_is_a_disconnect(rig: Rig) -> None:
    """No traceback and no error: it is counted as one that has gone."""
    before = rig.metric("requests_total", endpoint="/v1/completions", outcome="disconnect")
    host, port = rig.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as client:
        client.sendall(_raw(json.dumps(COMPLETION).encode())[:-5])
        time.sleep(0.1)
    rig.wait_for(lambda: rig.metric("requests_total", endpoint="/v1/completions", outcome="disconnect") == before + 1)


def test_a_stream_that_ends_in_an_error_is_counted_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its status was 200 when it began; the metrics say how it ended."""
    with serving(LLM(speaking_model(), **OPTIONS), limits=Limits(request_seconds=0.3)) as made:
        _slowly(made, monkeypatch, seconds=0.05)
        assert "timeout" in made.post("/v1/completions", {**LONG, "stream": True}).text
        made.wait_for(lambda: made.metric("requests_total", endpoint="/v1/completions", outcome="504") == 1)


def test_a_second_signal_tells_before_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole answers get a 503 and streams an event and `[DONE]`, though the drain had time left."""
    with serving(LLM(speaking_model(), **OPTIONS), limits=Limits(drain_seconds=60.0)) as made:
        _slowly(made, monkeypatch, seconds=0.2)
        seen: list[tuple[int, str]] = []

        def ask(stream: bool) -> None:
            response = made.post("/v1/completions", {**LONG, "stream": stream})
            seen.append((response.status_code, response.text))

        threads = [threading.Thread(target=ask, args=(stream,)) for stream in (True, False)]
        for thread in threads:
            thread.start()
        made.wait_for(lambda: made.metric("requests_running") == 2)
        begin = time.monotonic()
        made.stop()
        made.stop()
        for thread in threads:
            thread.join(20)
        assert time.monotonic() - begin < 10
        assert sorted(status for status, _ in seen) == [200, 503]
        assert all("shutting_down" in text for _, text in seen)
        assert any(text.endswith("data: [DONE]\n\n") for _, text in seen)


def test_long_bodies_together_are_bounded() -> None:
    """Sixteen of the largest are read or made into tokens at a time; what comes on top is told to come again."""
    with serving(LLM(speaking_model(), **{**OPTIONS, "graphs": False}), limits=Limits(max_body_bytes=1000)) as made:
        host, port = made.url.removeprefix("http://").split(":")
        head = _raw(b"x" * 1000)[:-1]
        clients = [socket.create_connection((host, int(port)), timeout=10) for _ in range(16)]
        try:
            for client in clients:
                client.sendall(head)
            made.wait_for(lambda: sum(made.service._held.values()) == 16 * 999)
            response = made.post("/v1/completions", {**COMPLETION, "prompt": "y" * 100})
            assert (response.status_code, _error(response)["code"]) == (503, "queue_full")
        finally:
            for client in clients:
                client.close()
        made.wait_for(lambda: not made.service._held)
        assert made.post("/v1/completions", COMPLETION).status_code == 200


def test_a_model_without_tokenizer_is_not_served() -> None:
    """Every answer would be empty."""
    mute = tiny_model(max_positions=128)
    engine = LLM(mute, **{**OPTIONS, "graphs": False}).engine
    service = Service(mute, engine=engine, name="mute", limits=Limits())
    with pytest.raises(ConfigError, match="mute has no tokenizer"):
        asyncio.run(service.start())


def test_a_server_that_cannot_start_says_so() -> None:
    """Its service refuses to start: the call raises, and does not return as after a good end; the port is free again."""
    mute = tiny_model(max_positions=128)
    engine = LLM(mute, **{**OPTIONS, "graphs": False}).engine
    service = Service(mute, engine=engine, name="mute", limits=Limits())
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    with pytest.raises(InternalError, match="did not start"):
        run_server(create_app(service), service=service, listener=listener)
    bind("127.0.0.1", port).close()


# Requests that run.


@pytest.fixture
def fresh() -> Iterator[Rig]:
    """A server of its own, whose engine a test may disturb."""
    with serving(LLM(speaking_model(), **OPTIONS), limits=Limits(max_queue=3, drain_seconds=3.0)) as made:
        yield made


def _slowly(rig: Rig, monkeypatch: pytest.MonkeyPatch, *, seconds: float = 0.02) -> None:
    """Makes each decode step take a while, so that there is time to do something during an answer."""
    launch = rig.llm.engine.decode.launch

    def slow(step: Any) -> Any:
        time.sleep(seconds)
        return launch(step)

    monkeypatch.setattr(rig.llm.engine.decode, "launch", slow)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_blocks(fresh: Rig, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    """Its request ends long before its answer would have, and is counted as a disconnect."""
    _slowly(fresh, monkeypatch)
    host, port = fresh.url.removeprefix("http://").split(":")
    body = json.dumps({**LONG, "stream": stream}).encode()
    with socket.create_connection((host, int(port)), timeout=10) as client:
        client.sendall(_raw(body))
        fresh.wait_for(lambda: fresh.metric("requests_running") == 1)
    fresh.wait_until_idle()
    assert fresh.metric("step_tokens_total", phase="decode") < 100
    fresh.wait_for(lambda: fresh.metric("requests_total", endpoint="/v1/completions", outcome="disconnect") == 1)


def test_a_failing_break_ends_its_step_and_nothing_else(fresh: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A break that raises in a prefill gives that request a 500 with the exception; a stream that decodes goes on, unharmed."""
    whole = fresh.openai.completions.create(**_asked(LONG))
    _slowly(fresh, monkeypatch, seconds=0.005)
    attention = fresh.llm.engine.state.attention
    attend = attention.attend

    def fails(*args: Any, **kwargs: Any) -> None:
        if armed.is_set():
            armed.clear()
            raise RuntimeError("the break is broken")
        attend(*args, **kwargs)

    armed = threading.Event()
    monkeypatch.setattr(attention, "attend", fails)
    stream = fresh.openai.completions.create(stream=True, **_asked(LONG))
    texts = [next(stream).choices[0].text]
    armed.set()
    response = fresh.post("/v1/completions", {**COMPLETION, "prompt": "something else entirely"})
    assert response.status_code == 500
    assert "RuntimeError: the break is broken" in _error(response)["message"]
    texts += [chunk.choices[0].text for chunk in stream]
    assert "".join(texts) == whole.choices[0].text
    fresh.wait_until_idle()
    assert fresh.metric("failed_steps_total") == 1
    assert fresh.http.get("/health").status_code == 200


def test_an_error_inside_a_stream_is_an_event(fresh: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """What breaks behind the first chunk is told as an event, and the stream still ends with `[DONE]`."""
    launch = fresh.llm.engine.decode.launch
    steps = iter(range(1000))

    def fails(step: Any) -> Any:
        if next(steps) == 5:
            raise RuntimeError("out of luck")
        return launch(step)

    monkeypatch.setattr(fresh.llm.engine.decode, "launch", fails)
    events = fresh.post("/v1/completions", {**LONG, "stream": True}).text.strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    error = json.loads(events[-2].removeprefix("data: "))["error"]
    assert (error["type"], error["code"]) == ("server_error", "server_error")
    assert "RuntimeError: out of luck" in error["message"]
    with pytest.raises(openai.APIError):
        steps = iter([5] * 9)
        list(fresh.openai.completions.create(stream=True, **_asked(LONG)))
    fresh.wait_until_idle()


def test_a_full_queue_is_a_503(fresh: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four run, three wait, the next is told to come again; those that were taken are all answered."""
    _slowly(fresh, monkeypatch, seconds=0.01)
    results: list[int] = []
    threads = [
        threading.Thread(
            target=lambda: results.append(fresh.post("/v1/completions", {**LONG, "max_tokens": 60}).status_code)
        )
        for _ in range(7)
    ]
    for thread in threads:
        thread.start()
    fresh.wait_for(lambda: fresh.metric("requests_running") + fresh.metric("requests_waiting") == 7)
    response = fresh.post("/v1/completions", COMPLETION)
    assert (response.status_code, _error(response)["code"]) == (503, "queue_full")
    assert response.headers["retry-after"]
    response = fresh.post("/v1/completions", {**COMPLETION, "prompt": ["a"] * 8})
    assert response.status_code == 400  # so many never fit, however often it is tried
    assert "at most 7 wait or run" in _error(response)["message"]
    for thread in threads:
        thread.join()
    assert results == [200] * 7


def test_an_answer_that_takes_too_long_is_a_504(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole: the status; streamed: an event; in both cases the blocks are back."""
    with serving(LLM(speaking_model(), **OPTIONS), limits=Limits(request_seconds=0.3)) as rig:
        _slowly(rig, monkeypatch, seconds=0.05)
        response = rig.post("/v1/completions", LONG)
        assert (response.status_code, _error(response)["code"]) == (504, "timeout")
        events = rig.post("/v1/completions", {**LONG, "stream": True}).text.strip().split("\n\n")
        assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "timeout"
        rig.wait_until_idle()


def test_a_client_that_does_not_read_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its request ends when its time is over; others do not wait for it."""
    with serving(LLM(speaking_model(), **OPTIONS), limits=Limits(request_seconds=0.5)) as rig:
        _slowly(rig, monkeypatch, seconds=0.02)
        host, port = rig.url.removeprefix("http://").split(":")
        body = json.dumps({**LONG, "stream": True}).encode()
        with socket.create_connection((host, int(port)), timeout=10) as client:
            client.sendall(_raw(body))
            rig.wait_for(lambda: rig.metric("requests_running") == 1)
            assert rig.post("/v1/completions", COMPLETION).status_code == 200
            rig.wait_until_idle()


def test_a_request_that_never_fits_is_refused_with_the_numbers() -> None:
    """The cache is smaller than the model's length: the room that there is bounds a request, and the error says so."""
    with serving(LLM(speaking_model(), **{**OPTIONS, "num_blocks": 12, "graphs": False})) as rig:
        assert rig.service.room == 11 * 4 + 1
        response = rig.post("/v1/completions", {**COMPLETION, "prompt": "x" * 40, "max_tokens": 10})
        assert response.status_code == 400
        assert "40 tokens and max_tokens is 10, together 50; at most 45" in _error(response)["message"]
        whole = rig.post(
            "/v1/completions", {**COMPLETION, "prompt": "x" * 40, "max_tokens": 5, "ignore_eos": True}
        ).json()
        assert whole["usage"]["completion_tokens"] == 5


def test_blocks_that_run_out_delay_and_lose_nothing() -> None:
    """Six requests that together need more blocks than there are: some are preempted, all answer as they do alone."""
    small = {**OPTIONS, "num_blocks": 30, "prefix_reuse": False}
    prompts = [f"request number {index}" for index in range(6)]
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    expected = [one.text for one in LLM(speaking_model(), **{**small, "graphs": False}).generate(prompts, params)]
    with serving(LLM(speaking_model(), **small)) as rig:
        answer = rig.openai.completions.create(
            model="tiny", prompt=prompts, max_tokens=60, temperature=0, extra_body={"ignore_eos": True}
        )
        assert [choice.text for choice in answer.choices] == expected
        assert rig.metric("preemptions_total") > 0


def test_stopping_lets_answers_come_to_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that runs when the server is told to stop gets all its text and `[DONE]`; new connections are refused."""
    with serving(LLM(speaking_model(), **OPTIONS), limits=Limits(drain_seconds=20.0)) as rig:
        whole = rig.openai.completions.create(**_asked(LONG)).choices[0].text
        _slowly(rig, monkeypatch, seconds=0.01)
        stream = rig.openai.completions.create(stream=True, **_asked(LONG))
        text = next(stream).choices[0].text
        rig.stop()
        rig.wait_for(lambda: _refused(rig))
        assert text + "".join(chunk.choices[0].text for chunk in stream) == whole


def test_what_outlasts_the_drain_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers that are too slow for the drain are told so, streamed and whole, and the server ends."""
    with serving(LLM(speaking_model(), **OPTIONS), limits=Limits(drain_seconds=0.3)) as rig:
        _slowly(rig, monkeypatch, seconds=0.2)
        codes: list[Any] = []

        def ask(stream: bool) -> None:
            response = rig.post("/v1/completions", {**LONG, "stream": stream})
            last = (
                json.loads(response.text.strip().split("\n\n")[-2].removeprefix("data: "))
                if stream
                else response.json()
            )
            codes.append((response.status_code, last["error"]["code"]))

        threads = [threading.Thread(target=ask, args=(stream,)) for stream in (True, False)]
        for thread in threads:
            thread.start()
        rig.wait_for(lambda: rig.metric("requests_running") == 2)
        rig.stop()
        for thread in threads:
            thread.join(20)
        assert sorted(codes) == [(200, "shutting_down"), (503, "shutting_down")]


def test_a_dead_engine_is_unhealthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the device has failed for good, running requests get the error, new ones 503, and health says so."""
    with serving(LLM(speaking_model(), **OPTIONS)) as rig:

        def dies(*_: object) -> None:
            raise RuntimeError("the device is gone")

        monkeypatch.setattr(rig.llm.engine.decode, "launch", dies)
        monkeypatch.setattr(rig.llm.engine, "check_device", dies)
        response = rig.post("/v1/completions", COMPLETION)
        assert response.status_code == 500
        rig.wait_for(lambda: rig.http.get("/health").status_code == 503)
        assert rig.http.get("/health").json() == {"status": "the engine has failed"}
        response = rig.post("/v1/completions", COMPLETION)
        assert (response.status_code, _error(response)["code"]) == (503, "not_serving")
        assert rig.http.get("/metrics").status_code == 503
        monkeypatch.undo()
        rig.llm.engine.reset()  # what the thread left behind


def test_a_port_in_use_is_refused_before_anything_is_loaded() -> None:
    """So is a port that does not exist, and an address that is not this machine's."""
    taken = bind("127.0.0.1", 0)
    try:
        taken.listen()
        with pytest.raises(ConfigError, match="in use"):
            bind("127.0.0.1", taken.getsockname()[1])
    finally:
        taken.close()
    for host, port in (("127.0.0.1", 65536), ("127.0.0.1", -1), ("203.0.113.7", 0), ("no such host", 0)):
        with pytest.raises(ConfigError, match=r"port is|cannot have"):
            bind(host, port)


@pytest.mark.parametrize(
    "field", ["max_body_bytes", "max_queue", "max_prompts", "body_seconds", "request_seconds", "drain_seconds"]
)
@pytest.mark.parametrize("value", [0, -1, True, "1", float("inf"), float("nan")])
def test_limits_are_checked(field: str, value: Any) -> None:
    """A bound that bounds nothing is refused with its name."""
    with pytest.raises(ConfigError, match=field):
        Limits(**{field: value})


def _raw(body: bytes) -> bytes:
    """A request as it goes over the wire."""
    head = (
        "POST /v1/completions HTTP/1.1",
        "Host: x",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    )
    return "\r\n".join((*head, "", "")).encode() + body


def _asked(body: dict[str, Any]) -> dict[str, Any]:
    """A body as arguments of OpenAI's client, which knows no `ignore_eos`."""
    return {**{k: v for k, v in body.items() if k != "ignore_eos"}, "extra_body": {"ignore_eos": True}}


def _refused(rig: Rig) -> bool:
    try:
        return httpx.get(rig.url + "/health", timeout=5).status_code == 503
    except httpx.ConnectError:
        return True
