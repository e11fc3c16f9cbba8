"""The command line and whose code runs a model: the adapter, refusals, and the table of families."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks import tables
from benchmarks.small_transformers import small_model
from breakgraph.cli import app
from breakgraph.models import huggingface_probe
from breakgraph.models.config import SUPPORTED_MODEL_TYPES
from breakgraph.models.families import ADAPTED, Families, Family, families
from tests.tiny_models import save_byte_tokenizer, tiny_hf

ROOT = Path(__file__).resolve().parent.parent


def _run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [*map(str, arguments)])


def _saved(kind: str, folder: Path, **sizes: Any) -> Path:
    small_model(kind, **{"vocab_size": 257, **sizes}).save_pretrained(folder)
    save_byte_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def neox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A family without a decoder of ours, with a tokenizer."""
    return _saved("gpt_neox", tmp_path_factory.mktemp("neox"))


def _refused(*arguments: object) -> list[str]:
    """The three lines of a refusal: status 2, nothing on stdout, no traceback."""
    result = _run("generate", "Hi", *arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    lines: list[str] = result.stderr.strip().splitlines()
    assert len(lines) == 3, result.stderr
    assert lines[0].startswith("breakgraph: ")
    return lines


def test_a_family_without_a_decoder_is_answered_and_the_line_says_how(neox: Path) -> None:
    """`generate` takes the adapter by itself: one line on stderr names it and why, the statistics have it as fields."""
    result = _run("generate", "Hello", "--model", neox, "--max-tokens", 6, "--device", "cpu", "--stats")
    assert result.exit_code == 0, result.output
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith(
        "gpt_neox: transformers' own code through the adapter, because there is no decoder of ours for it; 6 tokens"
    )
    stats = json.loads(result.stdout.splitlines()[-1])
    assert (stats["model_type"], stats["served_via"], stats["eager"]) == ("gpt_neox", "adapter", {})
    assert stats["served_reason"] == "there is no decoder of ours for it"


def test_both_ways_can_be_forced(neox: Path, tmp_path: Path) -> None:
    """--via adapter runs a Llama in its own code and gives the same text; --via fast is refused where we have no decoder."""
    tiny_hf("llama", tmp_path, vocab_size=257)
    save_byte_tokenizer(tmp_path)
    arguments = ("generate", "Hello", "--model", tmp_path, "--max-tokens", 8, "--device", "cpu")
    fast, adapter = _run(*arguments, "--via", "fast"), _run(*arguments, "--via", "adapter")
    assert fast.stdout == adapter.stdout
    assert fast.stderr.startswith("llama: own decoder; ")
    assert adapter.stderr.startswith("llama: transformers' own code through the adapter, because it was asked for; ")
    what, _, fix = _refused("--model", neox, "--via", "fast")
    assert "'gpt_neox' has no decoder here" in what
    assert "--via adapter" in fix
    assert _run("generate", "Hi", "--via", "slow").exit_code == 2


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("mamba", "0 attention calls for 4 layers"),
        ("falcon", "0 attention calls for 4 layers"),
        ("bert", "BertSelfAttention is not causal"),
    ],
)
def test_a_model_that_the_probe_refuses(kind: str, reason: str, tmp_path: Path) -> None:
    """Three lines with the probe's reason, status 2; nothing is written as an answer."""
    what, why, fix = _refused("--model", _saved(kind, tmp_path), "--device", "cpu")
    assert "cannot be served through its own code" in what
    assert reason in what
    assert "The adapter was tried because there is no decoder of ours for it." in why
    assert "`breakgraph models`" in fix


def test_types_that_nobody_knows(tmp_path: Path) -> None:
    """A type that transformers does not know, and one without a causal language model: three lines each."""
    for kind, message in (("no_such_model", "is refused by transformers"), ("t5", "has no causal language model")):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        what, _, _ = _refused("--model", tmp_path)
        assert message in what
        assert kind in what


def test_an_adapted_folder_without_tokenizer_or_weights(neox: Path, tmp_path: Path) -> None:
    """The tokenizer is missed before the weights are; both are told in three lines."""
    shutil.copytree(neox, tmp_path / "m", ignore=shutil.ignore_patterns("tokenizer*", "*.safetensors"))
    assert "has no tokenizer" in _refused("--model", tmp_path / "m")[0]
    save_byte_tokenizer(tmp_path / "m")
    assert "transformers could not load" in _refused("--model", tmp_path / "m")[0]


def test_the_probes_bound_ends_answers_and_refuses_longer_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the probe cannot go past is known after loading: answers end there, which is said, and a longer prompt is refused."""
    monkeypatch.setitem(huggingface_probe._WORK, "cpu", 0.0)  # as for a large model
    _saved("cohere2", tmp_path, sliding_window=100)
    arguments = ("--model", tmp_path, "--device", "cpu", "--max-tokens", 200, "--eager", "--stats")
    result = _run("generate", "x" * 80, *arguments)
    stats = json.loads(result.stdout.splitlines()[-1])
    assert stats["prompt_tokens"] + stats["generated_tokens"] == 100
    assert stats["finish_reason"] == "length"
    assert "the answer is cut off: prompt and answer have 100 tokens" in result.stderr
    result = _run("generate", "x" * 150, *arguments)
    assert result.exit_code == 2
    assert "tokens; at most 99 fit" in result.stderr
    assert "the adapter's probe could not try" in result.stderr


def test_a_sliding_window_ends_the_fast_path_and_not_the_adapter(tmp_path: Path) -> None:
    """A prompt beyond the window of a Mistral is refused with the way on, and that way answers it."""
    tiny_hf("mistral", tmp_path, vocab_size=257, sliding_window=32)
    save_byte_tokenizer(tmp_path)
    arguments = ("generate", "x" * 60, "--model", tmp_path, "--device", "cpu", "--max-tokens", 4, "--eager")
    result = _run(*arguments)
    assert result.exit_code == 2
    assert "at most 31 fit" in result.stderr
    assert "--via adapter" in result.stderr
    result = _run(*arguments, "--via", "adapter")
    assert result.exit_code == 0, result.output
    assert result.stderr.startswith("mistral: transformers' own code through the adapter")


# ---- breakgraph models ---------------------------------------------------------------------------------------------


def test_the_table_of_families_is_plain_where_stdout_is_no_terminal() -> None:
    """One line for each type: name, how, reason, by tabs; ours first; the versions on stderr."""
    result = _run("models")
    assert result.exit_code == 0
    rows = [line.split("\t") for line in result.stdout.splitlines()]
    assert {len(row) for row in rows} == {3}
    assert [row[0] for row in rows[: len(SUPPORTED_MODEL_TYPES)]] == sorted(SUPPORTED_MODEL_TYPES)
    how = {name: (served, reason) for name, served, reason in rows}
    assert len(how) == len(rows) > 150
    assert how["llama"] == ("own decoder", "")
    assert how["gpt_neox"] == ("adapter", "")
    assert how["jetmoe"][0] == "adapter, eager steps"
    assert "Tensor.tolist()" in how["jetmoe"][1]
    assert how["mamba"][0] == "refused"
    assert "0 attention calls" in how["mamba"][1]
    assert how["blt"][0] == "not tried"
    assert f"transformers {families().transformers}" in result.stderr
    assert "probed when it is loaded" in result.stderr


def test_the_table_of_families_as_json() -> None:
    """--json is one object with the version that was probed and the same rows."""
    result = _run("models", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == json.loads(json.dumps(families().as_dict()))
    assert result.stderr == ""


def test_the_table_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On a terminal there are a head, the note and whole reasons; brackets in a reason are no markup."""
    from breakgraph.cli.serving import print_table

    monkeypatch.setenv("COLUMNS", "100")
    odd = Family("odd", "refused", "[/bold] ['a', 'b'] and " + "long" * 40)
    print_table(Families("1.2.3", (Family("llama", "own decoder"), odd)))
    shown = capsys.readouterr().out
    for part in ("type", "how", "reason", "own decoder", "[/bold] ['a', 'b']", "transformers 1.2.3"):
        assert part in shown
    assert shown.count("long") >= 36
    assert "…" not in shown


def test_the_packages_table_is_made_of_the_probes_records() -> None:
    """The file in the package is what benchmarks/tables.py makes of the results, knows each outcome, and is installed."""
    assert tables.SERVED.read_text() == tables.served_models()
    records = json.loads(tables.SERVED.read_text())
    results = json.loads((tables.RESULTS / "transformers_models.json").read_text())
    assert records["transformers"] == results["versions"]["transformers"]
    assert {row["outcome"] for row in results["models"].values()} <= set(ADAPTED)
    assert set(records["models"]) == set(results["models"]) >= set(SUPPORTED_MODEL_TYPES)
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["breakgraph"]
    assert str(tables.SERVED.relative_to(ROOT / "breakgraph")) in data
