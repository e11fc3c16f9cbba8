"""What the probe of a transformers model runs: few rows, decoded rows, long sequences, parts of models; and what it leaves."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.small_transformers import OPTIONS, small_model
from breakgraph.errors import ConfigError
from breakgraph.models import huggingface_probe
from breakgraph.models.huggingface import ATTENTION
from breakgraph.models.huggingface_load import load_transformers
from breakgraph.models.huggingface_probe import adapt
from breakgraph.models.huggingface_sites import score_operations
from breakgraph.serving import LLM, SamplingParams
from breakgraph.swaps import swapped

PROMPTS = [[5, 9, 2, 7, 7, 3, 1, 8, 60, 61, 4, 4, 9, 30, 31, 32, 33, 34, 35, 36, 37, 38], [11, 12, 13]]
HALF = [torch.bfloat16, torch.float16]


def change_mlp(model: Any, layer: int, change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    """Do something to what the MLP of a layer returns: `change(result, rows)`."""
    mlp = model.get_decoder().layers[layer].mlp
    inner = mlp.forward
    mlp.forward = lambda rows: change(inner(rows), rows)


def when(condition: Callable[[int], bool]) -> Callable[[Any], None]:
    """Another scale in steps of some numbers of rows."""
    return lambda model: change_mlp(model, 1, lambda result, rows: result * (1.5 if condition(rows.shape[1]) else 1.0))


def squeezed(model: Any) -> None:
    """Adds a mean where the axis of rows was squeezed away."""
    change_mlp(
        model,
        1,
        lambda result, rows: result + (rows.squeeze().mean(0) if rows.squeeze().dim() == 1 else 0 * rows.mean()),
    )


def head_of_one_row(model: Any) -> None:
    """A head with other logits for a single row."""
    inner = model.lm_head.forward
    odd = torch.arange(96) % 2 == 1
    model.lm_head.forward = lambda rows: inner(rows) * torch.where(odd, 3.0 if rows.shape[1] == 1 else 1.0, 1.0)


def positions_of(model: Any) -> dict[str, torch.Tensor]:
    """The positions of the latest step, under "at"."""
    seen: dict[str, torch.Tensor] = {}
    rotary = model.model.rotary_emb
    inner = rotary.forward

    def forward(x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        seen["at"] = position_ids
        return inner(x, position_ids)

    rotary.forward = forward
    return seen


def with_predecessor(model: Any, chosen: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """In the last layer rows at some positions add the row before them in the step."""
    seen = positions_of(model)

    def change(result: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        before = torch.cat([torch.zeros_like(result[:, :1]), result[:, :-1]], dim=1)
        return result + 2 * before * chosen(seen["at"])[..., None]

    change_mlp(model, 3, change)


@pytest.mark.parametrize(
    "put",
    [
        when(lambda rows: rows == 1),
        when(lambda rows: rows < 5),
        when(lambda rows: 2 <= rows <= 4),
        head_of_one_row,
        squeezed,
    ],
    ids=["one row", "fewer than five", "two to four", "a head with one row", "squeeze"],
)
def test_steps_of_few_rows_are_run(put: Callable[[Any], None]) -> None:
    """FAULT-F5: a lone request decodes one row, unpadded, and hands it to the head: other numbers there are refused."""
    model = small_model("llama")
    put(model)
    with pytest.raises(ConfigError, match="its logits differ from its own"):
        adapt(model)


@pytest.mark.parametrize("limit", [4096, 1 << 20, None])
def test_lengths_are_tried_however_many_positions_there_are(limit: int | None) -> None:
    """FAULT-F4: a million positions are a number like any other, and where none is said a long sequence is run as well."""

    def made() -> Any:
        model = small_model("llama", max_position_embeddings=limit or 256)
        vars(model.config)["max_position_embeddings"] = limit
        return model

    model = made()
    rotary = model.model.rotary_emb
    inner = rotary.forward

    def forward(x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        scale = torch.where(position_ids.max() >= 150, 1.3, 1.0)
        return tuple(each * scale for each in inner(x, position_ids))

    rotary.forward = forward
    with pytest.raises(ConfigError, match="its logits differ"):
        adapt(model)
    assert adapt(made()).max_positions == (limit or 1 << 20)


@pytest.mark.parametrize("dtype", HALF)
def test_decoded_rows_are_judged_by_themselves_in_half_precision(dtype: torch.dtype) -> None:
    """FAULT-F5: a token shift that half of the tokens use spoils decoded rows and few others: no quarter covers those."""
    model = small_model("llama", dtype=dtype)

    def change(result: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        use = (rows[..., :1] > 0).to(result.dtype)
        return result + 1.5 * use * torch.cat([torch.zeros_like(result[:, :1]), result[:, :-1]], dim=1)

    change_mlp(model, 3, change)
    with pytest.raises(ConfigError, match=r"in (decoded rows|first rows of chunks|steps of one row)"):
        adapt(model)


def test_a_few_wrong_rows_of_a_long_sequence_are_counted() -> None:
    """FAULT-F5: in an exact type at most one row in a hundred may be far; rows that are wrong here and there are more."""
    model = small_model("llama")
    with_predecessor(model, lambda at: (at >= 64) & (at < 200))
    with pytest.raises(ConfigError, match="in a sequence of 256 tokens the logits of 4 differ"):
        adapt(model)
    summaries = small_model("llama")
    with_predecessor(summaries, lambda at: at % 48 == 47)
    with pytest.raises(ConfigError, match="its logits differ from its own"):
        adapt(summaries)


@pytest.mark.parametrize(
    ("kind", "dtype", "seed"),
    [
        ("mixtral", torch.bfloat16, 0),
        ("mixtral", torch.float16, 1),
        ("phimoe", torch.bfloat16, 0),
        ("phimoe", torch.bfloat16, 2),
        ("gpt_oss", torch.float16, 0),
        # Two of the five rows of a kind go to other experts: more rows decide.
        ("phimoe", torch.bfloat16, 3),
        ("exaone_moe", torch.bfloat16, 4),
        ("ernie4_5_moe", torch.float16, 4),
        ("granitemoe_swa", torch.bfloat16, 4),
    ],
)
def test_experts_in_half_precision_may_be_as_far_as_the_model_is_from_itself(
    kind: str, dtype: torch.dtype, seed: int
) -> None:
    """REQ-H5: a rounding sends rows to other experts, in the model's own two attentions as much as in ours: no refusal."""
    assert adapt(small_model(kind, dtype=dtype, seed=seed)).error < 0.3


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("kind", ["llama", "mixtral", "phimoe"])
def test_wrong_models_are_refused_in_half_precision(kind: str, dtype: torch.dtype) -> None:
    """FAULT-F5: what is allowed to roundings does not cover a state from call to call, or a scale from a length on."""
    last: dict[str, torch.Tensor] = {}

    def shift(result: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        before = last.get("rows", torch.zeros_like(result[:, :1]))
        last["rows"] = result[:, -1:]
        return result + 0.3 * torch.cat([before, result[:, :-1]], dim=1)

    for change in (shift, lambda result, rows: result * (1.5 if rows.shape[1] > 120 else 1.0)):
        model = small_model(kind, dtype=dtype)
        change_mlp(model, 1, change)
        with pytest.raises(ConfigError, match="its logits differ"):
            adapt(model)


def test_the_long_sequence_counts_the_square_of_the_attention() -> None:
    """A small model of many positions is probed in about a second: parameters and scores together stay below the work."""
    model = small_model("gemma2", max_position_embeddings=32768)
    lengths: list[int] = []
    model.get_input_embeddings().register_forward_hook(lambda module, args, rows: lengths.append(args[0].shape[-1]))
    sites = adapt(model).decoder.sites
    tokens, parameters = max(lengths), sum(each.numel() for each in model.parameters())
    work = huggingface_probe._WORK["cpu"]
    assert 0.9 * work < 2 * parameters * tokens + score_operations(sites) * tokens**2 <= 1.01 * work
    assert tokens < 2048


@pytest.mark.parametrize("refused", [False, True])
def test_the_order_of_a_model_is_kept(refused: bool) -> None:
    """An optimizer's state goes by the order of parameters: the probe, and a refusal, leave it as it was."""
    model = small_model("llama")
    if refused:
        when(lambda rows: rows == 1)(model)
    before = [list(dict(model.named_children())), list(dict(model.named_parameters())), list(model.state_dict())]
    try:
        adapt(model)
        assert not refused
    except ConfigError:
        assert refused
    assert before == [
        list(dict(model.named_children())),
        list(dict(model.named_parameters())),
        list(model.state_dict()),
    ]


def test_swapped_keeps_the_order_of_what_it_puts_back() -> None:
    """Whatever takes the place of a submodule, a parameter, a buffer or an attribute, tables have the order that they had."""

    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)
            self.p, self.q = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
            self.register_buffer("s", torch.ones(1))
            self.register_buffer("t", torch.ones(1))
            self.x, self.y = 1, 2

    held = Held()
    tables = (held._modules, held._parameters, held._buffers, vars(held))
    before = [list(table.items()) for table in tables]
    for value in (nn.ReLU(), torch.zeros(1), nn.Parameter(torch.zeros(1)), "word", None):
        for name in ("a", "p", "s", "x"):
            with swapped(held, **{name: value}):
                assert getattr(held, name) is value
            after = [list(table.items()) for table in tables]
            assert [[key for key, _ in table] for table in after] == [[key for key, _ in table] for table in before]
            assert all(
                one is other
                for mine, theirs in zip(after, before, strict=True)
                for (_, one), (_, other) in zip(mine, theirs, strict=True)
            )


TEXT: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}


def composite(kind: str) -> Any:
    """A model with a part for images, whose parts have attentions of their own."""
    import transformers as tr

    torch.manual_seed(0)
    if kind == "gemma3":
        text, vision = tr.Gemma3TextConfig(**TEXT, sliding_window=8), tr.SiglipVisionConfig(**VISION)
        config = tr.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
        model = tr.Gemma3ForConditionalGeneration(config)
    elif kind == "llava":
        vision = tr.CLIPVisionConfig(**VISION, projection_dim=32)
        config = tr.LlavaConfig(text_config=tr.LlamaConfig(**TEXT), vision_config=vision, image_token_index=95)
        model = tr.LlavaForConditionalGeneration(config)
    elif kind == "mistral3":
        text, vision = tr.MistralConfig(**TEXT), tr.PixtralVisionConfig(**VISION)
        config = tr.Mistral3Config(text_config=text, vision_config=vision, image_token_index=95)
        model = tr.Mistral3ForConditionalGeneration(config)
    else:
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
        vision = {"embed_dim": 32, "hidden_size": 32, "num_heads": 4, "depth": 2, "mlp_ratio": 2}
        config = tr.Qwen2VLConfig(text_config={**TEXT, "rope_parameters": rope}, vision_config=vision)
        model = tr.Qwen2VLForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
    model.eval().set_attn_implementation({"text_config": "eager", "vision_config": "sdpa"})
    return model


def attentions(model: Any) -> list[str]:
    """Of the whole, of text and of vision."""
    config = model.config
    return [one._attn_implementation for one in (config, config.text_config, config.vision_config)]


@pytest.mark.parametrize("kind", ["gemma3", "llava", "mistral3", "qwen2_vl"])
def test_a_model_with_a_part_for_images_serves_text(kind: str) -> None:
    """REQ-H5: text goes through our attention and gives the model's own tokens; the part for images keeps its attention."""
    model = composite(kind)
    top, _, vision = attentions(model)
    llm = LLM(load_transformers(model), **OPTIONS)
    assert attentions(model) == [top, ATTENTION, vision]
    answers = llm.generate(PROMPTS, SamplingParams(max_tokens=6, ignore_eos=True))
    model.set_attn_implementation({"text_config": "eager"})
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = torch.tensor([[*prompt, *answer.token_ids[:-1]]])
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :].float()
        for row, token in zip(logits, answer.token_ids, strict=True):
            assert float(row.max() - row[token]) < 1e-3 * float(row.abs().max())


@pytest.mark.parametrize("kind", ["gemma3", "llava", "mistral3", "qwen2_vl"])
def test_a_refused_model_has_the_attention_of_each_part_back(kind: str) -> None:
    """FAULT-F5: text and vision had different attentions, and have them again after a refusal."""
    model = composite(kind)
    before = attentions(model)
    change_mlp(model, 1, lambda result, rows: result.flip(-1) if rows.shape[1] == 1 else result)
    with pytest.raises(ConfigError, match="its logits differ from its own"):
        load_transformers(model)
    assert attentions(model) == before


def test_autocast_around_the_probe_is_off_inside() -> None:
    """A caller's autocast would have the probe run in another type than the steps."""
    with torch.autocast("cpu", torch.bfloat16):
        probed = adapt(small_model("llama"))
    assert probed.error < 1e-5


def test_a_changed_attention_is_named_with_the_way_back() -> None:
    """After `set_attn_implementation` a step says what was changed, and what to call."""
    model = small_model("llama")
    loaded = load_transformers(model)
    llm = LLM(loaded, graphs=False, **OPTIONS)
    llm.start()
    model.set_attn_implementation("sdpa")
    with pytest.raises(ConfigError, match=r"was changed to 'sdpa' after(.|\n)*load_transformers\(model\) again"):
        llm.generate(PROMPTS[1], SamplingParams(max_tokens=2))


@pytest.mark.parametrize("given", [None, "gpt2", nn.Linear(1, 1)])
def test_what_is_no_model_of_transformers_is_a_config_error(given: Any) -> None:
    """adapt() says what it got and what it wants, not what Python says of the first attribute that is not there."""
    with pytest.raises(ConfigError, match=r"adapt\(\) got .*; expected a causal language model of transformers"):
        adapt(given)


def test_a_decoder_with_breaks_cannot_be_copied() -> None:
    """FAULT-F3: the copy's break would compute with the original's weights; a decoder without breaks can be copied."""

    class Asks(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            signs = torch.tensor([1.0 if value > 0 else 0.5 for value in rows.sum(-1).flatten().tolist()])
            result: torch.Tensor = self.inner(rows) * signs.view(1, -1, 1)
            return result

    plain = adapt(small_model("llama")).decoder
    assert copy.deepcopy(plain).model is not plain.model
    model = small_model("llama")
    model.model.layers[1].mlp = Asks(model.model.layers[1].mlp).eval()
    decoder = adapt(model).decoder
    assert decoder.breaks
    with pytest.raises(ConfigError, match=r"cannot be copied(.|\n)*adapt the copy"):
        copy.deepcopy(decoder)
