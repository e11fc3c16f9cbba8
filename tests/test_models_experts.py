"""Mixture of experts: against transformers, against a plain loop, grouped against dense, and padding left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from breakgraph.errors import ConfigError
from breakgraph.models.checkpoint import tensor_names
from breakgraph.models.config import DecoderConfig, ExpertsConfig
from breakgraph.models.experts import ExpertsChoice, SparseMLP, choose_experts
from breakgraph.models.llama import LlamaDecoder
from breakgraph.models.ops import TorchOps
from breakgraph.models.weights import LoadedModel, load_model, random_model, weight_targets
from tests.tiny_models import SPARSE_FAMILIES, PagedModel, hf_logits, tiny_config, tiny_hf

CPU = torch.device("cpu")
KINDS = ("dense", "grouped")

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("mixtral", {}),
    ("mixtral", {"num_experts_per_tok": 1}),
    ("mixtral", {"num_experts_per_tok": 4, "num_key_value_heads": 6, "tie_word_embeddings": True}),
    ("qwen3_moe", {}),
    ("qwen3_moe", {"norm_topk_prob": True}),
    ("qwen3_moe", {"num_experts_per_tok": 1, "norm_topk_prob": True}),
    ("qwen3_moe", {"num_experts_per_tok": 8, "num_experts": 16, "norm_topk_prob": True, "attention_bias": True}),
    ("qwen3_moe", {"num_experts_per_tok": 2, "mlp_only_layers": [1]}),
    ("qwen3_moe", {"num_experts_per_tok": 2, "decoder_sparse_step": 2, "norm_topk_prob": True}),
    ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [1]}),
]


def with_kind(model: LoadedModel, kind: str) -> LoadedModel:
    """The same weights, experts computed in the way that is named."""
    decoder = LlamaDecoder(model.config, device=model.decoder.device, dtype=model.decoder.dtype, experts=kind)
    decoder.load_state_dict(model.decoder.state_dict())
    return attrs.evolve(model, decoder=decoder.eval())


def _ids(count: int, *, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (count,), generator=generator).tolist()


def _assert_near(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()


# ---- transformers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seed", "family", "options"),
    [(seed, *variant) for seed, variant in enumerate([*VARIANTS, VARIANTS[0], VARIANTS[4], VARIANTS[6]])],
    ids=lambda value: "" if isinstance(value, dict) else str(value),
)
def test_logits_equal_transformers(seed: int, family: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Padded prefill, two requests at once, a second chunk and a padded decode step: transformers' logits, both ways."""
    hf = tiny_hf(family, tmp_path, seed=seed, **options)
    hf.set_attn_implementation("sdpa" if seed % 2 else "eager")
    loaded = load_model(tmp_path)
    ids, other = _ids(30, seed=seed), _ids(9, seed=seed + 1)
    expected, expected_other = hf_logits(hf, ids), hf_logits(hf, other)
    assert expected.std() > 0.05, "logits too flat to tell models apart"
    table, other_table = list(range(21, 9, -1)), [30, 2, 33]
    for kind in KINDS:
        paged = PagedModel(with_kind(loaded, kind))
        _assert_near(paged.prefill([(ids[:17], 0, table)], padding=3), expected[:17])
        both = paged.prefill([(other[:7], 0, other_table), (ids[17:29], 17, table)])
        _assert_near(both, torch.cat((expected_other[:7], expected[17:29])))
        logits = paged.decode([ids[29], other[7], 0], [29, 7, 0], [table, other_table, [0]])
        _assert_near(logits[:2], torch.stack((expected[29], expected_other[7])))


@pytest.mark.parametrize("original", [True, False], ids=["published", "fused"])
@pytest.mark.parametrize("family", SPARSE_FAMILIES)
def test_both_forms_of_a_checkpoint_fill_every_weight(family: str, original: bool, tmp_path: Path) -> None:
    """A tensor for each expert, as models are published, or one for all experts: each lands where it belongs."""
    hf = tiny_hf(family, tmp_path / "first")
    hf.save_pretrained(tmp_path / "second", save_original_format=original, max_shard_size="40KB")
    state = hf.state_dict()
    fused = weight_targets(load_model(tmp_path / "second").decoder, fused_experts=True)
    assert set(fused) == set(state)
    for name, target in fused.items():
        assert torch.equal(target, state[name]), name
    assert (".mlp.experts.gate_up_proj" in " ".join(tensor_names(tmp_path / "second"))) is not original


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    """A checkpoint without one expert's tensor, or with one expert too many, is refused by that tensor's name."""
    tiny_hf("mixtral", tmp_path, shard_size="1GB")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.2.block_sparse_moe.experts.3.w2.weight"
    save_file({key: value for key, value in tensors.items() if key != name}, file)
    with pytest.raises(ConfigError, match=f"lacks 1 of .* tensors: {name}"):
        load_model(tmp_path)
    save_file({**tensors, name.replace("3.w2", "4.w2"): tensors[name].clone()}, file)
    with pytest.raises(ConfigError, match=r"unexpected tensor .*experts\.4\.w2"):
        load_model(tmp_path)


# ---- configuration -------------------------------------------------------------------------------------------------


def test_configuration_of_both_families() -> None:
    """Number, width, share and place of the experts, as each family writes them."""
    mixtral = DecoderConfig.from_transformers(tiny_config("mixtral"))
    assert mixtral.experts == ExpertsConfig(4, 2, 80, renormalise=True)
    assert (mixtral.qk_norm, mixtral.qkv_bias, mixtral.o_bias) == (False, False, False)
    qwen = DecoderConfig.from_transformers(tiny_config("qwen3_moe", mlp_only_layers=[2], attention_bias=True))
    assert qwen.experts == ExpertsConfig(8, 4, 24, renormalise=False, dense_layers=(2,))
    assert [qwen.is_sparse(layer) for layer in range(3)] == [True, True, False]
    assert qwen.qk_norm
    assert qwen.qkv_bias
    assert qwen.o_bias
    every_second = DecoderConfig.from_transformers(tiny_config("qwen3_moe", decoder_sparse_step=2))
    assert [every_second.is_sparse(layer) for layer in range(3)] == [False, True, False]
    nowhere = DecoderConfig.from_transformers(tiny_config("qwen3_moe", mlp_only_layers=[0, 1, 2]))
    assert nowhere.experts is None
    assert LlamaDecoder(nowhere, device="cpu").experts is None


def test_what_would_change_the_numbers_is_refused() -> None:
    """Counts that cannot be, activations and windows: a ConfigError that names the option."""
    for family, options, named in [
        ("mixtral", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("qwen3_moe", {"hidden_act": "relu"}, "hidden_act='relu'"),
        ("mixtral", {"num_experts_per_tok": 5}, "5 of 4 experts"),
        ("qwen3_moe", {"num_experts_per_tok": 0}, "0 of 8 experts"),
        ("qwen3_moe", {"moe_intermediate_size": 0}, "8 experts of width 0"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
    ]:
        with pytest.raises(ConfigError, match=named):
            DecoderConfig.from_transformers(tiny_config(family, **options))
    with pytest.raises(ConfigError, match="layer 3 was to have no experts; there are 3"):
        attrs.evolve(
            DecoderConfig.from_transformers(tiny_config("mixtral")),
            experts=ExpertsConfig(4, 2, 80, dense_layers=(0, 3)),
        )
    windowed = DecoderConfig.from_transformers(tiny_config("mixtral", sliding_window=16))
    with pytest.raises(ConfigError, match="sliding_window=16 is active"):
        windowed.check_positions(17)
    unused = tiny_config("qwen3_moe", sliding_window=16, use_sliding_window=False)
    assert DecoderConfig.from_transformers(unused).sliding_window is None


def test_the_choice_has_a_reason() -> None:
    """A CPU computes experts densely unless it is told otherwise; both say why, and other words are refused."""
    experts = ExpertsConfig(4, 2, 80)
    options: dict[str, Any] = {"hidden_size": 48, "device": CPU, "dtype": torch.float32}
    assert choose_experts(experts, **options).kind == "dense"
    assert "cpu" in choose_experts(experts, **options).reason
    assert choose_experts(experts, **options, kind="grouped") == ExpertsChoice("grouped", "asked for")
    assert choose_experts(experts, **options, kind="dense") == ExpertsChoice("dense", "asked for")
    with pytest.raises(ConfigError, match="experts are 'sparse'; expected auto, grouped, dense"):
        choose_experts(experts, **options, kind="sparse")


@pytest.mark.parametrize(
    ("dtype", "hidden", "inner", "fits"),
    [
        (torch.float64, 48, 80, False),
        (torch.float32, 44, 20, True),
        (torch.float32, 48, 51, False),
        (torch.bfloat16, 48, 24, True),
        (torch.bfloat16, 48, 20, False),
        (torch.float16, 44, 24, False),
    ],
)
def test_a_cpu_groups_only_what_torch_can(dtype: torch.dtype, hidden: int, inner: int, fits: bool) -> None:
    """Grouped on request in a dtype and widths that torch multiplies on a CPU; anything else is refused beforehand."""
    experts = ExpertsConfig(4, 2, inner)
    options: dict[str, Any] = {"hidden_size": hidden, "device": CPU, "dtype": dtype}
    x, ends = torch.zeros(8, hidden, dtype=dtype), torch.tensor([2, 4, 6, 8], dtype=torch.int32)
    gate_up, down = torch.zeros(4, 2 * inner, hidden, dtype=dtype), torch.zeros(4, hidden, inner, dtype=dtype)
    if fits:
        assert choose_experts(experts, **options, kind="grouped") == ExpertsChoice("grouped", "asked for")
        gates = F.grouped_mm(x, gate_up.transpose(1, 2), offs=ends)
        assert F.grouped_mm(gates[:, :inner].contiguous(), down.transpose(1, 2), offs=ends).shape == x.shape
        return
    with pytest.raises(ConfigError, match="experts cannot be grouped: (torch has no|the widths)") as caught:
        choose_experts(experts, **options, kind="grouped")
    assert len(str(caught.value).splitlines()) == 3
    assert choose_experts(experts, **options).kind == "dense"


@pytest.mark.parametrize(
    ("capability", "dtype", "hidden", "kind", "said"),
    [
        ((9, 0), torch.bfloat16, 48, "grouped", "bfloat16"),
        ((10, 3), torch.bfloat16, 48, "grouped", "bfloat16"),
        ((9, 0), torch.float32, 48, "dense", "weights are torch.float32"),
        ((8, 0), torch.bfloat16, 48, "dense", "compute capability 8.0"),
        ((12, 0), torch.bfloat16, 48, "dense", "compute capability 12.0"),
        ((9, 0), torch.bfloat16, 44, "dense", "multiples of 8"),
    ],
)
def test_only_a_kernel_that_does_not_wait_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    dtype: torch.dtype,
    hidden: int,
    kind: str,
    said: str,
) -> None:
    """Elsewhere torch's grouped product copies offsets to the host: not chosen there, and refused when asked for."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    options: dict[str, Any] = {"hidden_size": hidden, "device": torch.device("cuda"), "dtype": dtype}
    choice = choose_experts(ExpertsConfig(4, 2, 80), **options)
    assert choice.kind == kind
    assert said in choice.reason
    if kind == "dense":
        with pytest.raises(ConfigError, match="cannot be grouped"):
            choose_experts(ExpertsConfig(4, 2, 80), **options, kind="grouped")


# ---- rows and experts ----------------------------------------------------------------------------------------------


def _sparse(experts: ExpertsConfig, kind: str, *, hidden: int = 16, seed: int = 0) -> SparseMLP:
    mlp = SparseMLP(
        experts,
        hidden_size=hidden,
        choice=ExpertsChoice(kind, "test"),
        ops=TorchOps(),
        device=CPU,
        dtype=torch.float32,
    )
    generator = torch.Generator().manual_seed(seed)
    for parameter in mlp.parameters():
        parameter.normal_(0.0, 0.5, generator=generator)
    return mlp


def _row_by_row(mlp: SparseMLP, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
    """The definition: each row alone, one chosen expert after the other."""
    result = torch.zeros_like(x)
    for row in range(len(x)):
        shares = F.linear(x[row], mlp.router).softmax(-1)
        best = shares.topk(mlp.config.experts_per_token)
        scale = best.values.sum() if mlp.config.renormalise else 1.0
        for expert, share in zip(best.indices.tolist(), best.values / scale, strict=True):
            gate, up = F.linear(x[row], mlp.gate_up[expert]).chunk(2)
            result[row] += share * F.linear(F.silu(gate) * up, mlp.down[expert])
    return result.masked_fill(padding.unsqueeze(1), 0)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_grouped_equals_dense_equals_the_definition(data: st.DataObject) -> None:
    """Any rows, any padding among them, any number of experts, empty groups and full ones: one result."""
    count = data.draw(st.integers(1, 9), label="experts")
    each = data.draw(st.integers(1, count), label="each")
    experts = ExpertsConfig(count, each, 8, renormalise=data.draw(st.booleans(), label="renormalise"))
    padding = torch.tensor(data.draw(st.lists(st.booleans(), min_size=1, max_size=20), label="padding"))
    seed = data.draw(st.integers(0, 1000), label="seed")
    x = torch.randn(len(padding), 16, generator=torch.Generator().manual_seed(seed))
    if data.draw(st.booleans(), label="one row repeated"):
        x = x[:1].repeat(len(padding), 1)  # all rows in the same groups, the others empty
    grouped, dense = (_sparse(experts, kind, seed=seed) for kind in ("grouped", "dense"))
    expected = _row_by_row(dense, x, padding)
    before = x.clone()
    for mlp in (grouped, dense):
        torch.testing.assert_close(mlp(x, padding), expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(x, before)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("kind", KINDS)
def test_what_lies_in_padding_reaches_nobody(kind: str, value: float) -> None:
    """NaN, infinities and overflow in rows of padding: other rows keep their bits, and those rows give zero."""
    mlp = _sparse(ExpertsConfig(8, 3, 8), kind)
    padding = torch.tensor([False, True, False, False, True, True])
    x = torch.randn(6, 16)
    clean = mlp(x.masked_fill(padding.unsqueeze(1), 0), padding)
    soiled = mlp(x.masked_fill(padding.unsqueeze(1), value), padding)
    assert torch.equal(clean, soiled)
    assert not clean[padding].any()
    assert clean[~padding].any(dim=1).all()


@pytest.mark.parametrize("real", [0, 1, 7, 12])
def test_no_expert_computes_padding(real: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The groups hold the pairs of the real rows and no more; each expert's rows are those that chose it."""
    mlp = _sparse(ExpertsConfig(8, 3, 8), "grouped")
    x, padding = torch.randn(12, 16), torch.arange(12) >= real
    seen: list[list[int]] = []
    product = F.grouped_mm

    def watched(a: torch.Tensor, b: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        seen.append(offs.diff(prepend=offs.new_zeros(1)).tolist())
        return product(a, b, offs=offs)

    monkeypatch.setattr(F, "grouped_mm", watched)
    mlp(x, padding)
    chosen = mlp.route(x[:real])[0].flatten()
    assert seen == [torch.bincount(chosen, minlength=8).tolist()] * 2


def test_an_overflow_of_an_expert_that_was_not_chosen_is_not_seen() -> None:
    """Dense experts compute every row; what those that were not chosen make of it may be infinite or NaN."""
    mlp = _sparse(ExpertsConfig(4, 1, 8), "dense")
    x, padding = torch.randn(5, 16), torch.zeros(5, dtype=torch.bool)
    expected = mlp(x, padding)
    unused = set(range(4)) - set(mlp.route(x)[0].flatten().tolist())
    assert unused
    for expert in unused:
        mlp.gate_up[expert] = 1e38
    assert torch.equal(mlp(x, padding), expected)


@settings(max_examples=15, deadline=None)
@given(changed=st.lists(st.integers(0, 8), min_size=1, max_size=8), seed=st.integers(0, 1000))
def test_rows_of_dense_do_not_influence_each_other(changed: list[int], seed: int) -> None:
    """A row's bits depend on that row alone, whoever else is in the batch, padding of decode included."""
    mlp = _sparse(ExpertsConfig(6, 2, 8), "dense", seed=seed)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(9, 16, generator=generator)
    padding = torch.zeros(9, dtype=torch.bool)
    before = mlp(x, padding)
    x[changed] = torch.randn(len(changed), 16, generator=generator) * 3
    kept = [row for row in range(9) if row not in changed]
    assert torch.equal(mlp(x, padding)[kept], before[kept])


@pytest.mark.parametrize("family", SPARSE_FAMILIES)
def test_padding_of_decode_changes_no_request(family: str) -> None:
    """Padding rows of decode own a block, so they are routed; whatever token they hold, real rows keep their bits."""
    model = random_model(DecoderConfig.from_transformers(tiny_config(family)), seed=2)
    paged = PagedModel(model)
    tables = [[1, 2], [3, 4]]
    for table in tables:
        paged.prefill([([5, 6, 7], 0, table)])
    first, second = (paged.decode([9, 8, token, token], [3, 3, 0, 0], [*tables, [7], [7]]) for token in (0, 50))
    assert torch.equal(first[:2], second[:2])
    assert not torch.equal(first[2:], second[2:])


def test_rows_in_the_null_block_are_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoder tells experts which rows are padding by their slots: those in block 0, whatever their offset."""
    model = random_model(DecoderConfig.from_transformers(tiny_config("mixtral")))
    seen: list[list[bool]] = []
    forward = SparseMLP.forward

    def watched(self: SparseMLP, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        seen.append(padding.tolist())
        return forward(self, x, padding)

    monkeypatch.setattr(SparseMLP, "forward", watched)
    paged = PagedModel(model)
    paged.prefill([([5, 6, 7, 8, 9], 0, [1, 2])], padding=2)
    paged.decode([3, 3], [5, 3], [[1, 2], [0]])  # the slot of the second row is the last of block 0
    assert seen == [[False] * 5 + [True] * 2] * 3 + [[False, True]] * 3


def test_random_models_have_random_experts() -> None:
    """Equal seeds give equal experts, no expert is like another, and no parameter asks for gradients."""
    config = DecoderConfig.from_transformers(tiny_config("qwen3_moe"))
    first, second = (random_model(config, seed=4).decoder for _ in range(2))
    assert torch.equal(first.layers[1].mlp.down, second.layers[1].mlp.down)
    assert not torch.equal(first.layers[1].mlp.gate_up[0], first.layers[1].mlp.gate_up[1])
    assert not any(parameter.requires_grad for parameter in first.parameters())
