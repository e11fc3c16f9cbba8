"""Our decoder against transformers, family by family, and its configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from breakgraph.errors import ConfigError
from breakgraph.models.config import SUPPORTED_MODEL_TYPES, DecoderConfig, RopeConfig
from breakgraph.models.llama import LlamaDecoder
from breakgraph.models.ops import TorchOps
from breakgraph.models.rope import inverse_frequencies, rope_table
from breakgraph.models.weights import load_model, random_model
from tests.tiny_models import FAMILIES, LINEAR_ROPE, LLAMA3_ROPE, YARN_ROPE, PagedModel, hf_logits, tiny_config, tiny_hf

TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in FAMILIES),
    ("llama", {"attention_bias": True}),
    ("qwen3", {"attention_bias": True}),
    ("mistral", {"attention_bias": True, "mlp_bias": True}),
    ("mixtral", {"attention_bias": True, "mlp_bias": True}),
    ("qwen2", {"attention_bias": True}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"num_key_value_heads": 6}),
    ("llama", {"rope_parameters": LLAMA3_ROPE}),
    ("llama", {"rope_parameters": LINEAR_ROPE}),
    ("mistral", {"rope_parameters": YARN_ROPE, "head_dim": 12}),
    ("qwen2", {"rope_parameters": YARN_ROPE}),
    ("qwen3", {"rope_parameters": YARN_ROPE}),
]


def _ids(count: int, *, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (count,), generator=generator).tolist()


@pytest.mark.parametrize(("family", "options"), VARIANTS, ids=lambda value: value if isinstance(value, str) else "")
def test_logits_equal_transformers(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Fresh prefill, chunked prefill, two requests at once and decode steps give transformers' logits within 1e-4."""
    hf = tiny_hf(family, tmp_path, **options)
    model = load_model(tmp_path, via="fast")
    paged = PagedModel(model)
    ids, other = _ids(41), _ids(9, seed=1)
    expected, expected_other = hf_logits(hf, ids), hf_logits(hf, other)
    assert expected.std() > 0.05, "logits too flat to tell models apart"
    table, other_table = list(range(21, 9, -1)), [30, 2, 33]

    first = paged.prefill([(ids[:17], 0, table)], padding=3)
    torch.testing.assert_close(first, expected[:17], **TOLERANCE)
    second = paged.prefill([(other[:7], 0, other_table), (ids[17:38], 17, table)])
    torch.testing.assert_close(second[:7], expected_other[:7], **TOLERANCE)
    torch.testing.assert_close(second[7:], expected[17:38], **TOLERANCE)
    for step in range(2):
        logits = paged.decode([ids[38 + step], other[7 + step], 0], [38 + step, 7 + step, 0], [table, other_table, [0]])
        torch.testing.assert_close(logits[0], expected[38 + step], **TOLERANCE)
        torch.testing.assert_close(logits[1], expected_other[7 + step], **TOLERANCE)
        assert torch.isfinite(logits).all()


@pytest.mark.parametrize(
    "rope", [None, LLAMA3_ROPE, YARN_ROPE, LINEAR_ROPE], ids=["default", "llama3", "yarn", "linear"]
)
def test_rope_table_is_bit_equal_to_transformers(rope: dict[str, Any] | None) -> None:
    """Cosines and sines of all positions are the very bits that transformers' rotary embedding computes."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    hf_config = tiny_config("llama", **({"rope_parameters": rope} if rope else {}))
    config = DecoderConfig.from_transformers(hf_config)
    table = rope_table(config, positions=128)
    cos, sin = LlamaRotaryEmbedding(hf_config)(torch.zeros(1), torch.arange(128)[None])
    half = config.head_dim // 2
    assert torch.equal(table[:, :half], cos[0, :, :half])
    assert torch.equal(table[:, half:], sin[0, :, :half])


def test_yarn_scales_the_table() -> None:
    """Yarn's attention factor is in the table: its first row is that factor, not one."""
    config = DecoderConfig.from_transformers(tiny_config("llama", rope_parameters=YARN_ROPE))
    _, scaling = inverse_frequencies(config)
    assert scaling > 1.1
    assert torch.equal(rope_table(config, positions=1)[0, :4], torch.full((4,), scaling))


def test_rms_norm_is_bit_equal_to_transformers() -> None:
    """The norm rounds where transformers rounds, in float32 and in bfloat16."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    for dtype in (torch.float32, torch.bfloat16):
        norm = LlamaRMSNorm(48, eps=1e-5).to(dtype)
        with torch.no_grad():
            norm.weight.copy_(torch.randn(48))
            x = torch.randn(7, 48).to(dtype) * 3
            assert torch.equal(TorchOps().rms_norm(x, norm.weight, 1e-5), norm(x))


def test_configuration_of_each_family() -> None:
    """Biases, norms and head sizes follow the family, and a tied output is the embedding itself."""
    read = {family: DecoderConfig.from_transformers(tiny_config(family)) for family in FAMILIES}
    assert [read[f].qkv_bias for f in FAMILIES] == [False, False, True, False]
    assert [read[f].qk_norm for f in FAMILIES] == [False, False, False, True]
    assert not any(config.o_bias for config in read.values())
    assert read["qwen3"].head_dim == 16
    assert read["qwen3"].q_size == 96
    assert read["llama"].kv_bytes_per_token == 2 * 3 * 2 * 8 * 4
    tied = LlamaDecoder(DecoderConfig.from_transformers(tiny_config("llama", tie_word_embeddings=True)), device="cpu")
    assert tied.lm_head is tied.embed_tokens


@pytest.mark.parametrize(
    ("family", "options", "named"),
    [
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "'dynamic'"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("llama", {"mlp_bias": True}, "mlp_bias=True"),
        *((family, {"is_causal": False}, "is_causal=False") for family in SUPPORTED_MODEL_TYPES),
        ("llama", {"quantization_config": {"quant_method": "awq", "bits": 4}}, "'awq'"),
    ],
)
def test_unsupported_options_are_refused_by_name(family: str, options: dict[str, Any], named: str) -> None:
    """An option that would change the numbers and is not implemented is a ConfigError that names it."""
    with pytest.raises(ConfigError, match=named):
        DecoderConfig.from_transformers(tiny_config(family, **options))


def test_unknown_family_is_refused() -> None:
    """A family without a decoder is refused and the supported ones are listed."""
    import transformers

    with pytest.raises(ConfigError, match=r"'gpt2'.*llama, mistral, qwen2, qwen3"):
        DecoderConfig.from_transformers(transformers.GPT2Config())


def test_sliding_window_is_refused_only_where_it_is_active(tmp_path: Path) -> None:
    """A window below the served positions is refused by name; up to the window, the default, the numbers are the full ones."""
    hf = tiny_hf("mistral", tmp_path, sliding_window=32)
    with pytest.raises(ConfigError, match="sliding_window=32 is active below the 128 positions"):
        load_model(tmp_path, via="fast", max_positions=128)
    model = load_model(tmp_path)
    assert model.max_positions == 32
    assert model.decoder.rope.shape[0] == 32
    ids = _ids(32)
    logits = PagedModel(model).prefill([(ids, 0, list(range(1, 9)))])
    torch.testing.assert_close(logits, hf_logits(hf, ids), **TOLERANCE)


def test_windows_that_no_layer_uses_are_ignored() -> None:
    """Qwen2 carries a window size that its layers do not use; only a used one counts."""
    assert DecoderConfig.from_transformers(tiny_config("qwen2", sliding_window=16)).sliding_window is None
    used = tiny_config("qwen2", sliding_window=16, use_sliding_window=True, max_window_layers=1)
    assert DecoderConfig.from_transformers(used).sliding_window == 16


@pytest.mark.parametrize("family", SUPPORTED_MODEL_TYPES)
def test_only_options_that_the_family_reads_lift_a_window(family: str) -> None:
    """use_sliding_window and layer_types count where transformers' own code of that family reads them, and nowhere else."""
    off = tiny_config(family, sliding_window=16, use_sliding_window=False)
    switch = family in ("qwen2", "qwen3", "qwen3_moe")
    assert DecoderConfig.from_transformers(off).sliding_window == (None if switch else 16)
    full = tiny_config(family, sliding_window=16, use_sliding_window=True, layer_types=["full_attention"] * 3)
    layers = family in ("llama", "qwen2", "qwen3")
    assert DecoderConfig.from_transformers(full).sliding_window == (None if layers else 16)


def test_more_positions_than_the_model_has_are_refused(tmp_path: Path) -> None:
    """Serving beyond max_position_embeddings is a ConfigError that has both numbers."""
    tiny_hf("llama", tmp_path)
    with pytest.raises(ConfigError, match=r"129 tokens.*128 positions"):
        load_model(tmp_path, max_positions=129)


def test_head_counts_must_divide() -> None:
    """Query heads that cannot share the key-value heads evenly are refused when the shape is made."""
    with pytest.raises(ConfigError, match="6 query heads cannot share 4"):
        DecoderConfig("llama", 97, 48, 80, 1, 6, 4, 8, 128)


@pytest.mark.parametrize("size", ["vocab_size", "hidden_size", "num_layers", "num_heads", "head_dim", "max_positions"])
def test_sizes_are_at_least_one(size: str) -> None:
    """A shape without rows, layers or heads is refused when it is made, by the name of the size."""
    config = DecoderConfig("llama", 97, 48, 80, 1, 6, 2, 8, 128)
    for value in (0, -1):
        with pytest.raises(ConfigError, match=f"{size} is {value}; expected at least 1"):
            attrs.evolve(config, **{size: value})


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("dynamic", {}, "'dynamic' is not supported; supported are default, linear, llama3, yarn"),
        ("yarn", {}, "'yarn': factor is None; expected a number above 0"),
        ("linear", {"parameters": {"factor": 0}}, "'linear': factor is 0;"),
        ("llama3", {"parameters": {"factor": 2.0, "low_freq_factor": 1.0}}, "'llama3': high_freq_factor is None"),
        ("linear", {"parameters": {"factor": "2"}}, "'linear': factor is '2'"),
        ("default", {"theta": 0.0}, "'default': theta is 0.0"),
    ],
)
def test_rope_that_cannot_be_computed_is_refused(kind: str, options: dict[str, Any], said: str) -> None:
    """An unknown rope type and scaling without its numbers are ConfigErrors when the shape is made."""
    with pytest.raises(ConfigError, match=said):
        RopeConfig(kind, **options)


def test_what_is_no_configuration_is_refused() -> None:
    """from_transformers and random_model name what they got where it is no configuration of theirs."""
    hf_config = tiny_config("llama")
    for wrong in (None, {}, type(hf_config)):
        with pytest.raises(
            ConfigError, match=r"from_transformers\(\) got .*; expected a configuration of transformers"
        ):
            DecoderConfig.from_transformers(wrong)
    with pytest.raises(ConfigError, match=r"random_model\(\) got a LlamaConfig; expected a DecoderConfig"):
        random_model(hf_config)
    with pytest.raises(ConfigError, match="dtype is torch.int8"):
        random_model(DecoderConfig.from_transformers(hf_config), dtype=torch.int8)


def test_random_model_is_repeatable_and_finite() -> None:
    """Equal seeds give equal weights, norms are one, and a forward is finite."""
    config = DecoderConfig("llama", 97, 48, 80, 2, 6, 2, 8, 128, rope=RopeConfig(theta=500.0))
    first, second, third = (random_model(config, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.decoder.embed_tokens, second.decoder.embed_tokens)
    assert not torch.equal(first.decoder.embed_tokens, third.decoder.embed_tokens)
    assert first.decoder.norm.eq(1).all()
    assert torch.isfinite(PagedModel(first).prefill([(_ids(5), 0, [1, 2])])).all()


def test_only_the_named_slots_of_the_cache_are_written(tmp_path: Path) -> None:
    """A padded prefill and a padded decode write their requests' slots and slot 0 of the null block, no other."""
    tiny_hf("llama", tmp_path)
    paged = PagedModel(load_model(tmp_path))
    for caches in paged.kv:
        for cache in caches:
            cache.fill_(0.5)
    table = [7, 3, 9]
    paged.prefill([(_ids(6), 0, table)], padding=4)
    paged.decode([5, 0], [6, 0], [table, [0]])
    written = {0, *paged.slots(table, 0, 7)}
    for k_cache, v_cache in paged.kv:
        for cache in (k_cache, v_cache):
            changed = cache.flatten(0, 1).ne(0.5).flatten(1).any(dim=1)
            assert set(changed.nonzero().flatten().tolist()) == written


def test_parameters_never_ask_for_gradients() -> None:
    """No parameter requires grad, so a capture with grad mode on records no autograd graph."""
    config = DecoderConfig("qwen3", 97, 48, 80, 2, 6, 2, 8, 128, qk_norm=True, qkv_bias=True)
    assert not any(parameter.requires_grad for parameter in LlamaDecoder(config, device="cpu").parameters())


def test_a_cache_that_is_not_dense_is_an_error() -> None:
    """Keys would be written to a copy of a strided cache; that is an error and not a silent loss."""
    model = random_model(DecoderConfig("llama", 97, 48, 80, 1, 6, 2, 8, 128))
    paged = PagedModel(model)
    whole = torch.zeros(64, 2, 4, 2, 8)
    paged.kv = [(whole[:, 0], whole[:, 1])]
    with pytest.raises(RuntimeError, match="view"):
        paged.prefill([(_ids(5), 0, [1, 2])])
