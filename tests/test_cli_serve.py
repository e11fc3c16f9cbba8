"""`breakgraph serve` as a process: it starts, says what there is, answers, and ends by a signal."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from breakgraph.tools import read_sizes, tune

ARGUMENTS = ["--port", "0", "--max-num-seqs", "2", "--max-model-len", "64", "--max-num-batched-tokens", "16"]


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "breakgraph", "serve", *arguments]


def _environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "200", **more}


class Serving:
    """A server process.

    Attributes:
        process: It.
        said: What it wrote to stderr so far.
        url: Where it listens.
        sizes: Where it records the sizes of its steps.
    """

    sizes: Path

    def __init__(self, *arguments: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            _command(*arguments),
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=_environment(**environment),
        )
        self.said = ""
        self.url = ""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said += line
            if (found := re.search(r"at (http://\S+)/v1", line)) is not None:
                self.url = found[1]
                return
        raise AssertionError(f"it ended: {self.said}")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """One process for the tests that ask it."""
    sizes = tmp_path_factory.mktemp("sizes") / "sizes.jsonl"
    made = Serving(*ARGUMENTS, "--record-sizes", str(sizes), "--prefill-sizes", "16", "--decode-sizes", "1,2")
    made.sizes = sizes
    yield made
    if made.process.poll() is None:
        made.process.kill()
        made.process.communicate()


@pytest.mark.demo
def test_it_says_what_there_is_and_answers(server: Serving) -> None:
    """The table has both phases with their buckets, and the lines have cache and model; the demo model knows its capital."""
    assert re.search(r"prefill\s+16\s+1\s+31\s+30", server.said), server.said
    assert re.search(r"decode\s+1, 2\s+4\s+1\s+0", server.said), server.said
    assert "KV cache: 9 blocks of 16" in server.said
    body: dict[str, Any] = {"model": "demo", "prompt": "The capital of France is", "max_tokens": 3, "temperature": 0}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
    assert "Paris" in answer["choices"][0]["text"]
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
    }
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
    assert "Paris" in answer["choices"][0]["message"]["content"]


@pytest.mark.demo
def test_a_signal_drains_and_ends_with_0(server: Serving) -> None:
    """A stream that runs when the signal comes is answered to its end; the exit status is 0 and there is no traceback."""
    body = {"model": "demo", "prompt": "Once", "max_tokens": 30, "temperature": 0, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        rest = list(lines)
    assert "data: [DONE]" in rest
    assert not any('"error"' in line for line in rest)
    _, said = server.process.communicate(timeout=30)
    assert server.process.returncode == 0
    assert "Traceback" not in server.said + said


@pytest.mark.demo
def test_the_sizes_of_steps_are_in_the_file_at_the_end(server: Serving) -> None:
    """The signal of the test before ended it: every step of every answer is there, and tune reads it."""
    assert server.process.poll() == 0
    prefill, decode = (read_sizes(server.sizes, phase=phase) for phase in ("prefill", "decode"))
    assert max(prefill) <= 16
    assert prefill[5] >= 1  # "The capital of France is"
    assert decode[1] >= 2 + 29  # all tokens of the first and the last answer but those of prefill
    assert not list(server.sizes.parent.glob(".*"))
    assert tune(prefill, max_graphs=1).ladder.largest == max(prefill)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--port", "70000"], "port is 70000; expected 0 to 65535"),
        (["--max-num-seqs", "0"], "--max-num-seqs is 0"),
        (["--max-model-len", "1"], "--max-model-len is 1"),
        (["--memory-fraction", "1.5"], "--memory-fraction is 1.5"),
        (["--sampling", "none"], "--sampling is 'none'"),
        (["--dtype", "int3"], "int3"),
        (
            ["--record-sizes", "/no/such/folder/sizes.jsonl"],
            "sizes cannot be recorded in '/no/such/folder/sizes.jsonl'",
        ),
        (["--prefill-sizes", "16,0"], "--prefill-sizes is '16,0'"),
        (["--decode-sizes", "none.json"], "the ladder cannot be read from 'none.json'"),
        (["--max-body-mb", "0"], "--max-body-mb is 0"),
        (["--request-timeout", "-1"], "--request-timeout is -1"),
        (["--api-key", ""], "the API key is empty"),
        (["--api-key", "clé"], "cannot carry"),
        (["--model", "/no/such/folder"], "/no/such/folder"),
        (["--host", "203.0.113.7"], "cannot have 203.0.113.7:8000"),
    ],
    ids=str,
)
def test_a_wrong_option_ends_with_2_at_once(arguments: list[str], said: str) -> None:
    """Status 2, three lines and no traceback, long before a model is loaded."""
    begin = time.monotonic()
    done = subprocess.run(_command(*arguments), capture_output=True, text=True, timeout=60, env=_environment())
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert time.monotonic() - begin < 30


def test_a_missing_extra_is_named(tmp_path: Path) -> None:
    """Without FastAPI the command says what to install."""
    (tmp_path / "fastapi.py").write_text("raise ModuleNotFoundError(\"No module named 'fastapi'\", name='fastapi')")
    done = subprocess.run(
        _command(), capture_output=True, text=True, timeout=60, env=_environment(PYTHONPATH=f"{tmp_path}:{os.getcwd()}")
    )
    assert done.returncode == 2, done.stderr
    assert "the server needs fastapi" in done.stderr
    assert 'pip install -e ".[server]"' in done.stderr
