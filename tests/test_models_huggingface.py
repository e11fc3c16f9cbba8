"""Decoders of transformers through our attention: their own numbers, every step replayed, and refusals with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.small_transformers import OPTIONS, small_model
from breakgraph.errors import ConfigError
from breakgraph.models import huggingface_probe
from breakgraph.models.huggingface_load import load_transformers
from breakgraph.models.huggingface_probe import adapt
from breakgraph.serving import LLM, SamplingParams

# A window in all layers and in some, latent attention, chunks, sinks, soft caps, learned positions, experts, a nested body.
SERVED = [
    "llama",
    "mistral",
    "gemma2",
    "cohere2",
    "gpt2",
    "opt",
    "gpt_neox",
    "phi3",
    "phimoe",
    "qwen3_moe",
    "gpt_oss",
    "llama4_text",
    "deepseek_v3",
]
PROMPTS = [[5, 9, 2, 7, 7, 3, 1, 8, 60, 61, 4, 4, 9, 30, 31, 32, 33, 34, 35, 36, 37, 38], [11, 12, 13]]
NEW = 8
TIE = 1e-3


def own_logits(model: Any, ids: list[int]) -> torch.Tensor:
    """What the model says by itself, with its own attention."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            logits: torch.Tensor = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
    finally:
        model.set_attn_implementation(before)
    return logits


@pytest.mark.parametrize("kind", SERVED)
def test_a_model_gives_its_own_tokens_and_every_step_is_replayed(kind: str) -> None:
    """REQ-H2, REQ-H5, FAULT-F5: past windows and chunks, in batches, chunks and padded steps: the model's own greedy tokens."""
    model = small_model(kind)
    loaded = load_transformers(model)
    llm = LLM(loaded, **OPTIONS)
    answers = llm.generate(PROMPTS, SamplingParams(max_tokens=NEW, ignore_eos=True))
    statistics = llm.statistics
    assert statistics.dropped == {}
    assert statistics.eager == {}
    assert statistics.prefill_replays > 0
    assert statistics.decode_replays > 0
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        logits = own_logits(model, [*prompt, *answer.token_ids[:-1]])[len(prompt) - 1 :]
        for row, token in zip(logits, answer.token_ids, strict=True):
            assert float(row.max() - row[token]) < TIE * float(row.abs().max())


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("mamba", "0 attention calls for 4 layers"),
        ("falcon", "0 attention calls for 4 layers"),
        ("bert", "BertSelfAttention is not causal"),
        ("doge", "was given a mask"),
        ("recurrent_gemma", "1 attention calls for 4 layers"),
        ("blenderbot", "its logits differ from its own"),
    ],
)
def test_a_model_that_would_give_other_numbers_is_refused(kind: str, reason: str) -> None:
    """FAULT-F5: recurrent state, another way to attend, no causality, a mask: refused by name, and the model is as it was."""
    model = small_model(kind)
    before = model.config._attn_implementation
    with pytest.raises(ConfigError, match="cannot be served through its own code: ") as caught:
        adapt(model)
    assert reason in str(caught.value)
    assert model.config._attn_implementation == before
    with torch.no_grad():
        assert torch.isfinite(model(input_ids=torch.tensor([[5, 6, 7]]), use_cache=False).logits).all()


def test_what_a_layer_does_comes_from_its_calls_and_its_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows, soft caps, sinks and chunks are those of each layer, and bound the positions where they were not gone past."""
    variants = adapt(small_model("gemma2")).decoder.variants
    assert [variant.window for variant in variants] == [8, None, 8, None]
    assert {variant.softcap for variant in variants} == {50.0}
    assert all(variant.sinks is not None for variant in adapt(small_model("gpt_oss")).decoder.variants)
    chunked = adapt(small_model("llama4_text"))
    assert {variant.chunk for variant in chunked.decoder.variants} == {8, None}
    assert chunked.max_positions == 256
    assert adapt(small_model("mistral", sliding_window=100)).max_positions == 256
    monkeypatch.setitem(huggingface_probe._WORK, "cpu", 0.0)  # as for a large model
    assert adapt(small_model("mistral", sliding_window=100)).max_positions == 100


def test_lengths_that_nothing_reads_bound_the_sequences() -> None:
    """FAULT-F5: a window under another name, and the length from which longrope changes, may not be gone past."""
    model = small_model("llama")
    assert adapt(model).max_positions == 256
    model.config.local_window = 40
    assert adapt(model).max_positions == 40
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 64}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    stretched = small_model("phi3", rope_parameters=rope, original_max_position_embeddings=64)
    assert adapt(stretched).max_positions == 64


@pytest.mark.parametrize("error", [KeyboardInterrupt(), torch.OutOfMemoryError("no memory")])
def test_what_says_nothing_of_a_model_is_no_refusal(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """FAULT-E3: an interrupt and a lack of memory reach the caller as they are, and the model is as it was."""
    from breakgraph.models import huggingface_probe

    def fail(*_: object) -> None:
        raise error

    model = small_model("llama")
    before = model.config._attn_implementation
    monkeypatch.setattr(huggingface_probe._Probe, "_compared", fail)
    with pytest.raises(type(error)):
        adapt(model)
    assert model.config._attn_implementation == before


def test_a_wrong_window_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """FAULT-F5: if a layer's window were read wrongly, the probe would see other logits and refuse."""
    from breakgraph.models import huggingface_sites

    variant = huggingface_sites._variant
    monkeypatch.setattr(huggingface_sites, "_variant", lambda *given: type(variant(*given))(window=7))
    with pytest.raises(ConfigError, match="its logits differ from its own"):
        adapt(small_model("mistral"))


def test_layers_in_another_order_are_noticed() -> None:
    """A forward that calls its layers otherwise than in the probe is an error, not another layer's cache."""
    loaded = load_transformers(small_model("llama"))
    llm = LLM(loaded, graphs=False, **OPTIONS)
    llm.start()
    body = loaded.decoder.model.model  # type: ignore[union-attr]
    body.layers[0], body.layers[1] = body.layers[1], body.layers[0]
    with pytest.raises(ConfigError, match="came from another layer, unlike when the model was probed"):
        llm.generate(PROMPTS[1], SamplingParams(max_tokens=2))
    body.layers = body.layers[:0]
    with pytest.raises(ConfigError, match="attention call 0 did not come"):
        llm.generate(PROMPTS[1], SamplingParams(max_tokens=2))


def test_the_model_by_itself_says_that_it_is_adapted() -> None:
    """Calling an adapted model outside a step names the way back."""
    model = small_model("llama")
    assert max(adapt(model).error, adapt(model).error) < 1e-5  # again is harmless
    with pytest.raises(ConfigError, match="outside a step of its adapted decoder"):
        model(input_ids=torch.tensor([[5, 6]]), use_cache=False)


def test_a_folder_of_transformers_is_loaded(tmp_path: Any) -> None:
    """load_transformers(path) gives what the object gives; what is no model is refused with what to pass."""
    model = small_model("gemma2")
    model.save_pretrained(tmp_path)
    params = SamplingParams(max_tokens=NEW, ignore_eos=True)
    answers = [
        LLM(load_transformers(source), graphs=False, **OPTIONS).generate(PROMPTS, params)
        for source in (model, tmp_path, str(tmp_path))
    ]
    tokens = [[answer.token_ids for answer in one] for one in answers]
    assert tokens[0] == tokens[1] == tokens[2]
    with pytest.raises(ConfigError, match="got a Linear; expected a causal language model"):
        load_transformers(torch.nn.Linear(1, 1))
    with pytest.raises(ConfigError, match="transformers could not load|There is no folder"):
        load_transformers(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "/nothing"}, "There is no folder"),
        ({"model": "llama", "device": "cuda:77"}, "device= or dtype="),
        ({"model": "llama", "dtype": torch.float16}, "device= or dtype="),
        ({"model": "llama", "tokenizer": "gpt2"}, "tokenizer is 'gpt2'"),
        (
            {"model": "llama in training"},
            "is in training mode.\nIt would run without an error and write wrong text.\nCall eval()",
        ),
        ({"model": "llama without head"}, "has no language model head"),
    ],
)
def test_wrong_arguments_are_told_apart(arguments: dict[str, Any], message: str) -> None:
    """Each mistake is named, and what to do is about that mistake."""
    made = {
        "llama": lambda: small_model("llama"),
        "llama in training": lambda: small_model("llama").train(),
        "llama without head": lambda: small_model("llama").model,
    }
    kind = str(arguments.pop("model"))
    with pytest.raises(ConfigError) as caught:
        load_transformers(made[kind]() if kind in made else kind, **arguments)
    assert message in str(caught.value)


def test_a_folder_cannot_go_to_a_device_that_is_not_there(tmp_path: Any) -> None:
    """A misspelt device, and one that torch has not: a ConfigError, not torch's own."""
    small_model("llama").save_pretrained(tmp_path)
    for device in ("gpu", "cuda:77"):
        with pytest.raises(ConfigError, match=f"device is '{device}'"):
            load_transformers(tmp_path, device=device)


REAL_HEADS = {
    "hidden_size": 512,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "kv_lora_rank": 64,
    "q_lora_rank": 64,
    "moe_intermediate_size": 64,
    "sliding_window": 32,  # the probe goes past it
}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "attention"),
    [
        ("llama", "flashinfer"),
        ("qwen3", "flashinfer"),
        ("mixtral", "flashinfer"),
        ("qwen3_moe", "flashinfer"),
        ("gemma2", "torch"),
        ("gpt_oss", "torch"),
        ("deepseek_v3", "torch"),
    ],
)
def test_every_step_on_a_gpu_equals_its_eager_twin(kind: str, attention: str) -> None:
    """REQ-H5, FAULT-P7: real head sizes in bfloat16, each step replayed and compared with its eager twin, bit for bit."""
    # Without a window mixtral is plain; gemma2 and gpt_oss keep theirs.
    sizes = {**REAL_HEADS, **({"sliding_window": None} if kind == "mixtral" else {})}
    loaded = load_transformers(small_model(kind, device="cuda", dtype=torch.bfloat16, **sizes))
    options = {**OPTIONS, "block_size": 16, "max_seq_len": 160, "max_num_tokens": 64, "prefill_sizes": [16, 64]}
    llm = LLM(loaded, verify="always", measure="never", **options)
    llm.start()
    assert llm.statistics.dropped == {}
    assert llm.engine.state.attention.kind == attention
    prompts = [[(7 * i + 3) % 90 + 3 for i in range(100)], [11, 12, 13]]
    answers = llm.generate(prompts, SamplingParams(max_tokens=24, ignore_eos=True))
    assert [len(answer.token_ids) for answer in answers] == [24, 24]
    assert llm.statistics.dropped == {}
    assert llm.statistics.eager == {}
