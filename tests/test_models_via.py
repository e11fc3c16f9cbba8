"""Whose code runs a model: ours where there is one that fits, else the adapter; forced either way; refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.small_transformers import OPTIONS, small_model
from breakgraph.errors import ConfigError
from breakgraph.models import huggingface_probe
from breakgraph.models.huggingface import AdaptedDecoder
from breakgraph.models.llama import LlamaDecoder
from breakgraph.models.via import Via
from breakgraph.models.weights import LoadedModel, load_model, open_model, random_model
from breakgraph.serving import LLM, SamplingParams
from tests.tiny_models import tiny_hf

PROMPTS = [[5, 9, 2, 7, 7, 3, 1, 8, 60, 61, 4, 4, 9, 30, 31, 32, 33, 34, 35, 36, 37, 38], [11, 12, 13]]
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)


def _saved(kind: str, folder: Path, **sizes: Any) -> Path:
    small_model(kind, **sizes).save_pretrained(folder)
    return folder


def _tokens(llm: LLM) -> list[tuple[int, ...]]:
    return [answer.token_ids for answer in llm.generate(PROMPTS, PARAMS)]


def _change(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_a_family_of_ours_takes_the_fast_path_and_both_paths_agree(tmp_path: Path) -> None:
    """Left alone or told "fast" a Llama runs in our decoder; told "adapter", in its own code: the same tokens."""
    tiny_hf("llama", tmp_path)
    llms = {via: LLM(tmp_path, via=via, device="cpu", **OPTIONS) for via in ("auto", "fast", "adapter")}
    first, *others = [_tokens(llm) for llm in llms.values()]
    assert others == [first, first]
    assert [type(llm.model.decoder) for llm in llms.values()] == [LlamaDecoder, LlamaDecoder, AdaptedDecoder]
    assert [str(llm.statistics.served) for llm in llms.values()] == [
        "llama: own decoder",
        "llama: own decoder",
        "llama: transformers' own code through the adapter, because it was asked for",
    ]
    assert all(llm.statistics.eager == {} for llm in llms.values())


def test_a_family_without_a_decoder_takes_the_adapter(tmp_path: Path) -> None:
    """GPT-NeoX by its folder alone: served, every step a replay, and the statistics say by which code and why."""
    llm = LLM(_saved("gpt_neox", tmp_path), device="cpu", **OPTIONS)
    assert len(_tokens(llm)[0]) == 6
    assert llm.statistics.eager == {}
    assert llm.statistics.summary().startswith(
        "gpt_neox: transformers' own code through the adapter, because there is no decoder of ours for it; 12 tokens"
    )
    flat = llm.statistics.as_dict()
    assert (flat["model_type"], flat["served_via"]) == ("gpt_neox", "adapter")
    assert flat["served_reason"] == "there is no decoder of ours for it"
    assert json.loads(json.dumps(flat)) == flat


def test_the_fast_path_cannot_be_forced_where_there_is_none(tmp_path: Path) -> None:
    """via="fast" for another family: refused before the weights are read, with the way out."""
    _saved("gpt_neox", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="'gpt_neox' has no decoder here.*\n.*\n.*--via adapter"):
        open_model(tmp_path, via="fast")
    with pytest.raises(ConfigError, match="via is 'slow'; expected auto, fast or adapter"):
        open_model(tmp_path, via="slow")
    with pytest.raises(ConfigError, match="via is 'slow'"):
        LLM(tmp_path, via="slow")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported, only 'silu' is"),
        ({"mlp_bias": True}, "mlp_bias=True is not supported, only False is"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor=0.5 is not supported",
        ),
    ],
)
def test_what_our_decoder_refuses_goes_to_the_adapter(options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    """A Llama with an option that ours does not have: the adapter, with the refusal as its reason; never the wrong numbers."""
    hf = tiny_hf("llama", tmp_path, **options)
    llm = LLM(tmp_path, device="cpu", **OPTIONS)
    answers = _tokens(llm)
    assert llm.model.served.via is Via.ADAPTER
    assert llm.model.served.reason == f"ours refuses it: {reason}"
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        with torch.no_grad():
            logits = hf(input_ids=torch.tensor([[*prompt, *answer[:-1]]])).logits[0, len(prompt) - 1 :]
        for row, token in zip(logits, answer, strict=True):
            assert float(row.max() - row[token]) < 1e-3
    with pytest.raises(ConfigError, match=reason):
        open_model(tmp_path, via="fast")


def test_beyond_a_sliding_window_the_adapter_takes_over(tmp_path: Path) -> None:
    """Up to the window our decoder is right and serves; sequences that are to be longer go to the adapter."""
    tiny_hf("mistral", tmp_path, sliding_window=32)
    short = load_model(tmp_path)
    assert (short.served.via, short.max_positions) == (Via.FAST, 32)
    long = load_model(tmp_path, max_positions=100)
    assert (long.served.via, long.max_positions) == (Via.ADAPTER, 100)
    assert long.served.reason == "ours refuses it: sliding_window=32 is active below the 100 positions to be served"
    llm = LLM(tmp_path, device="cpu", **{**OPTIONS, "max_seq_len": 100})
    assert llm.model.served == long.served
    with pytest.raises(ConfigError, match=r"129 tokens were asked for; the model has 128 positions"):
        load_model(tmp_path, max_positions=129)


def test_the_adapters_bound_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that the probe cannot go past bounds the sequences: the default ends there, more is refused with the bound."""
    monkeypatch.setitem(huggingface_probe._WORK, "cpu", 0.0)  # as for a large model
    _saved("cohere2", tmp_path, sliding_window=100)
    opened = open_model(tmp_path)
    assert opened.max_positions == 256
    assert opened.load().max_positions == 100
    assert opened.load(max_positions=64).max_positions == 64
    with pytest.raises(
        ConfigError, match=r"200 tokens were asked for; the adapter serves up to 100(.|\n)*max_seq_len=100"
    ):
        LLM(tmp_path, device="cpu", max_seq_len=200).start()
    with pytest.raises(ConfigError, match="150 tokens; at most 99 fit"):
        LLM(tmp_path, device="cpu", **{**OPTIONS, "max_seq_len": None}).generate([[5] * 150])


@pytest.mark.parametrize("family", ["mistral", "mixtral"])
def test_a_window_that_stays_on_goes_to_the_adapter(family: str, tmp_path: Path) -> None:
    """use_sliding_window=false switches no window of Mistral's off: beyond it the adapter, and its numbers are the model's."""
    hf = tiny_hf(family, tmp_path, sliding_window=8, attn_implementation="eager")
    _change(tmp_path, use_sliding_window=False)
    llm = LLM(tmp_path, device="cpu", **OPTIONS)
    answers = _tokens(llm)
    assert llm.model.served.via is Via.ADAPTER
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        with torch.no_grad():
            logits = hf(input_ids=torch.tensor([[*prompt, *answer[:-1]]]), use_cache=False).logits[0, len(prompt) - 1 :]
        for row, token in zip(logits, answer, strict=True):
            assert float(row.max() - row[token]) < 1e-3


def test_a_model_that_is_not_causal_is_refused_by_both(tmp_path: Path) -> None:
    """is_causal=false: no decoder of ours, and the adapter's refusal says that it is not the first."""
    tiny_hf("llama", tmp_path)
    _change(tmp_path, is_causal=False)
    with pytest.raises(ConfigError, match="is_causal=False is not supported"):
        load_model(tmp_path, via="fast")
    with pytest.raises(ConfigError, match="ours refuses it: is_causal=False"):
        load_model(tmp_path)


@pytest.mark.parametrize("via", ["auto", "fast", "adapter"])
def test_a_vocabulary_without_tokens_is_refused(via: str, tmp_path: Path) -> None:
    """A vocab_size below one is a ConfigError whoever is to run the model."""
    tiny_hf("llama", tmp_path)
    _change(tmp_path, vocab_size=-1)
    with pytest.raises(ConfigError) as caught:
        load_model(tmp_path, via=via)
    assert len(str(caught.value).splitlines()) == 3


def test_prompts_are_checked_before_an_adapted_model_is_read(tmp_path: Path) -> None:
    """Vocabulary, positions and the lack of a tokenizer are found with the configuration alone."""
    _saved("gpt_neox", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    llm = LLM(tmp_path, device="cpu")
    with pytest.raises(ConfigError, match="token 96; the model's tokens are 0 to 95"):
        llm.generate([[5, 96]])
    with pytest.raises(ConfigError, match="300 tokens; at most 255 fit"):
        llm.generate([[5] * 300])
    with pytest.raises(ConfigError, match="has no tokenizer"):
        llm.generate(["Hello"])
    with pytest.raises(ConfigError, match="transformers could not load|There is no folder"):
        llm.generate([[5, 6]])


def test_a_refused_model_says_why_and_why_it_was_tried(tmp_path: Path) -> None:
    """The probe's refusal has three parts on three lines, the reason and why our own decoder was no way out."""
    _saved("bert", tmp_path)
    with pytest.raises(ConfigError, match="BertLMHeadModel cannot be served through its own code") as caught:
        load_model(tmp_path)
    assert "is not causal" in caught.value.what
    assert "because there is no decoder of ours for it" in caught.value.why
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("method", "message"),
    [("gptq", "transformers could not load"), ("no_such_method", "does not know how the checkpoint is")],
)
def test_a_quantised_checkpoint_is_named_whoever_tries(method: str, message: str, tmp_path: Path) -> None:
    """What neither our decoder nor transformers can read, be it that it says so or not: one error with both reasons."""
    tiny_hf("llama", tmp_path)
    _change(tmp_path, quantization_config={"quant_method": method, "bits": 4})
    with pytest.raises(ConfigError, match=f"{message}(.|\n)*ours refuses it: the checkpoint is quantised"):
        load_model(tmp_path)


def test_tensors_that_transformers_would_make_up_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A tensor that is missing or misshapen is refused by its name, one too many is told of: no noise is served."""
    _saved("gpt_neox", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "gpt_neox.layers.2.mlp.dense_4h_to_h.weight"
    save_file({**tensors, "extra.weight": torch.zeros(2)}, file, {"format": "pt"})
    load_model(tmp_path)
    assert "has no place for 1 tensors: extra.weight" in caplog.text
    save_file({key: value for key, value in tensors.items() if key != name}, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=f"lacks 1 tensors: {name}"):
        load_model(tmp_path)
    save_file({**tensors, name: tensors[name][:-1].clone()}, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=f"1 tensors are of another shape than config.json asks for: {name}"):
        load_model(tmp_path)


def test_code_of_a_folder_is_not_run(tmp_path: Path) -> None:
    """A folder that brings its own Python is refused, without a question on the terminal and without running it."""
    (tmp_path / "config.json").write_text(
        json.dumps(
            {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}}
        )
    )
    (tmp_path / "mine.py").write_text("raise SystemExit('it ran')\n")
    with pytest.raises(ConfigError, match="is refused by transformers"):
        load_model(tmp_path)


def test_a_loaded_model_stays_what_it_is(tmp_path: Path) -> None:
    """LLM(loaded, via=...) that contradicts how it was loaded is refused, not ignored."""
    tiny_hf("llama", tmp_path)
    model: LoadedModel = random_model(load_model(tmp_path).config)
    assert LLM(model, via="fast", **OPTIONS).model.served.via is Via.FAST
    with pytest.raises(ConfigError, match="via is 'adapter', but the model was loaded: llama: own decoder"):
        LLM(model, via="adapter")


def test_loading_through_the_adapter_is_told_and_quiet(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Progress is called before and after; transformers' own bars and remarks do not reach the terminal."""
    _saved("gpt_neox", tmp_path)
    capfd.readouterr()
    seen: list[tuple[str, int, int]] = []
    load_model(tmp_path, progress=lambda *step: seen.append(step))
    assert seen == [("loading weights", 0, 1), ("loading weights", 1, 1)]
    assert capfd.readouterr() == ("", "")
