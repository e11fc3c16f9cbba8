"""A server on loopback for the tests: a real socket, uvicorn in a thread, a tiny model of bytes that speaks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import httpx
import openai
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from breakgraph.models.loaded import LoadedModel
from breakgraph.server import Limits, Service, create_app, run_server
from breakgraph.server.run import Running, bind
from breakgraph.serving import LLM
from tests.serving_reference import tiny_model

CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'robot' %}{{ raise_exception('no robots here') }}{% endif %}"
    "{{ message['role'] }}:{{ message['content'] }};{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
OPTIONS: dict[str, Any] = {
    "max_batch_size": 4,
    "max_num_tokens": 32,
    "max_seq_len": 128,
    "block_size": 4,
    "num_blocks": 80,
    "prefill_sizes": [8, 32],
    "contexts": [],
    "sampling": "all",
    "verify": "never",
    "seed": 1,
}


def speaking_model() -> LoadedModel:
    """A tiny model whose tokens are bytes, with a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = CHAT_TEMPLATE
    return attrs.evolve(tiny_model(vocab_size=257, max_positions=128), tokenizer=fast)


@attrs.frozen(eq=False)
class Rig:
    """A server that takes requests.

    Attributes:
        url: Its address.
        service: Behind it.
        llm: Whose engine the service has.
        openai: OpenAI's client of it, without retries.
        http: A plain client of it.
        stop: Does what the first signal does.
    """

    url: str
    service: Service
    llm: LLM
    openai: openai.OpenAI
    http: httpx.Client
    stop: Callable[[], None]

    def post(self, path: str, body: Any) -> httpx.Response:
        """Sends JSON."""
        return self.http.post(path, json=body)

    def metric(self, name: str, **labels: str) -> float:
        """One number of `/metrics`; 0 where it is not there."""
        wanted = ",".join(f'{key}="{value}"' for key, value in labels.items())
        start = f"breakgraph_{name}{{{wanted}}} " if wanted else f"breakgraph_{name} "
        lines = self.http.get("/metrics").text.splitlines()
        return next((float(line.removeprefix(start)) for line in lines if line.startswith(start)), 0.0)

    def wait_for(self, condition: Callable[[], bool], *, seconds: float = 20.0) -> None:
        """Waits until something holds."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "it did not come about"
            time.sleep(0.01)

    def wait_until_idle(self) -> None:
        """Waits until no request holds or waits for anything."""
        self.wait_for(
            lambda: (
                self.metric("requests_running") == self.metric("requests_waiting") == self.metric("kv_blocks_used") == 0
            )
        )


@contextmanager
def serving(llm: LLM, *, limits: Limits | None = None, api_key: str | None = None, name: str = "tiny") -> Iterator[Rig]:
    """Serves an engine inside a `with` block; afterwards its blocks are all back and its threads are gone."""
    llm.start()
    service = Service(llm.model, engine=llm.engine, name=name, limits=limits or Limits(drain_seconds=5.0))
    listener, ready = bind("127.0.0.1", 0), threading.Event()
    found: list[Running] = []

    def on_ready(running: Running) -> None:
        found.append(running)
        ready.set()

    app = create_app(service, api_key=api_key)
    thread = threading.Thread(
        target=run_server, args=(app,), kwargs={"service": service, "listener": listener, "on_ready": on_ready}
    )
    before = set(threading.enumerate())
    thread.start()
    assert ready.wait(30)
    (running,) = found
    key = api_key or "nobody asks"
    with (
        openai.OpenAI(base_url=f"{running.address}/v1", api_key=key, max_retries=0, timeout=60) as client,
        httpx.Client(base_url=running.address, timeout=60, headers={"authorization": f"Bearer {key}"}) as http,
    ):
        try:
            yield Rig(running.address, service, llm, client, http, running.stop)
        finally:
            running.stop()
            thread.join(30)
    assert not thread.is_alive()
    for one in set(threading.enumerate()) - before:
        if "breakgraph" in one.name:
            one.join(5)  # one that has been told to end may be on its last lines
    left = [one for one in set(threading.enumerate()) - before if "breakgraph" in one.name]
    assert not left, left
    assert llm.engine.free_blocks == llm.engine.usable_blocks
