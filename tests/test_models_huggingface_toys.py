"""Models that are almost Llama, each with one thing of its own: refused with the reason, or right, step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.small_transformers import OPTIONS, small_model
from breakgraph.errors import ConfigError
from breakgraph.models.huggingface_load import load_transformers
from breakgraph.models.huggingface_probe import adapt
from breakgraph.models.huggingface_sites import score_operations
from breakgraph.serving import LLM, SamplingParams

PROMPTS = [[5, 9, 2, 7, 7, 3, 1, 8, 60, 61, 4, 4, 9, 30, 31, 32, 33, 34, 35, 36, 37, 38], [11, 12, 13]]
NEW = 8
TIE = 1e-3


class Around(nn.Module):
    """A module with something done to its result: `change(module, result, args)`."""

    def __init__(self, inner: nn.Module, change: Callable[..., Any]) -> None:
        super().__init__()
        self.inner = inner
        self.change = change

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.change(self, self.inner(*args, **kwargs), (*args, *kwargs.values()))


def around_mlp(change: Callable[..., Any]) -> Callable[[Any], None]:
    """Put something around the MLP of the second layer."""

    def put(model: Any) -> None:
        layer = model.model.layers[1]
        layer.mlp = Around(layer.mlp, change).eval()

    return put


def around_rotary(change: Callable[..., Any]) -> Callable[[Any], None]:
    """Put something around the rotary embedding."""

    def put(model: Any) -> None:
        model.model.rotary_emb = Around(model.model.rotary_emb, change).eval()

    return put


def scaled(pair: Any, factor: Any) -> Any:
    """Cosines and sines times a factor."""
    return tuple(each * factor for each in pair)


def shift(module: Any, result: torch.Tensor, args: Any) -> torch.Tensor:
    """Adds the row before, across calls."""
    before = getattr(module, "last", None)
    module.last = result[:, -1:].detach()
    first = torch.zeros_like(result[:, :1]) if before is None else before
    return result + 0.3 * torch.cat([first, result[:, :-1]], dim=1)


def capacity(module: Any, result: torch.Tensor, args: Any) -> torch.Tensor:
    """Of the rows that go to one of two experts, those after the fifth are dropped."""
    chosen = (args[0].sum(-1) > 0).long()[..., None] == torch.arange(2)
    place = (chosen.long().cumsum(1) * chosen).amax(-1, keepdim=True)
    return torch.where(place <= 5, result, 0.0)


def quantised(module: Any, result: torch.Tensor, args: Any) -> torch.Tensor:
    """Rounds to eight bits by the largest value of the whole step."""
    step = result.abs().max() / 127
    return (result / step).round() * step


def arange(module: Any, result: Any, args: Any) -> Any:
    """Positions from the number of rows, whatever was given."""
    return module.inner(args[0], torch.arange(args[1].shape[-1])[None])


def beyond(length: int) -> Callable[..., Any]:
    """Other numbers for a whole step that reaches a position."""

    def change(module: Any, result: Any, args: Any) -> Any:
        return scaled(result, torch.where(args[1].max() >= length, 1.3, 1.0))

    return change


def rows_beyond(rows: int) -> Callable[..., Any]:
    """Other numbers in steps of many rows."""
    return lambda module, result, args: result * (1.3 if result.shape[1] > rows else 1.0)


def temperature(module: Any, result: Any, args: Any) -> Any:
    """Grows with the position of each row, as some models scale their queries."""
    return scaled(result, 1 + 0.1 * torch.log1p(torch.floor(args[1] / 8))[..., None])


def left_in_training(model: Any) -> None:
    """A dropout that nobody switched off."""
    model.model.layers[0].mlp.append = nn.Dropout(0.0).train()


def masked(model: Any) -> None:
    """A window in a mask that the attention makes itself."""
    attention = model.model.layers[1].self_attn
    inner = attention.forward

    def forward(hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        rows = hidden_states.shape[1]
        causal = torch.ones(rows, rows, dtype=torch.bool).tril()
        kwargs["attention_mask"] = (causal & ~causal.tril(-6))[None, None]
        return inner(hidden_states, **kwargs)

    attention.forward = forward


def biased(model: Any) -> None:
    """One more keyword for the attention."""
    attention = model.model.layers[1].self_attn
    inner = attention.forward
    attention.forward = lambda *args, **kwargs: inner(*args, **kwargs, position_bias=torch.zeros(1))


def shared_keys(model: Any) -> None:
    """One projection of keys and values for two layers."""
    first, second = (model.model.layers[index].self_attn for index in (0, 1))
    second.k_proj, second.v_proj = first.k_proj, first.v_proj


REFUSED = {
    "state from one call to the next": around_mlp(shift),
    "a capacity of each step": around_mlp(capacity),
    "quantised by the largest value of a step": around_mlp(quantised),
    "a mean over the rows": around_mlp(lambda module, result, args: result + 0.1 * result.mean(1, keepdim=True)),
    "a scale by the rows of a step": around_mlp(lambda module, result, args: result * result.shape[1] ** 0.1),
    "noise": around_mlp(lambda module, result, args: result * (1 + 1e-3 * torch.rand(1))),
    "positions of its own": around_rotary(arange),
    "other frequencies from position 150 on": around_rotary(beyond(150)),
    "other frequencies at the last position": around_rotary(beyond(255)),
    "another scale from 120 rows on": around_mlp(rows_beyond(120)),
    "a module in training": left_in_training,
    "a window in a mask of its own": masked,
    "a bias of the positions": biased,
}
RIGHT = {
    "a temperature of each position": around_rotary(temperature),
    "a constant for every row": around_mlp(lambda module, result, args: result + 0.25),
    "keys shared by two layers": shared_keys,
}


def own_tokens_of(model: Any, answers: Any) -> None:
    """Every token is the model's own choice."""
    model.set_attn_implementation("eager")
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = torch.tensor([[*prompt, *answer.token_ids[:-1]]])
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :].float()
        for row, token in zip(logits, answer.token_ids, strict=True):
            assert float(row.max() - row[token]) < TIE * float(row.abs().max())


def served(model: Any) -> LLM:
    """An engine that has answered, with the model's own tokens."""
    llm = LLM(load_transformers(model), **OPTIONS)
    answers = llm.generate(PROMPTS, SamplingParams(max_tokens=NEW, ignore_eos=True))
    own_tokens_of(model, answers)
    return llm


def replays_everything(llm: LLM) -> None:
    """No step ran eagerly."""
    statistics = llm.statistics
    assert statistics.dropped == {}
    assert statistics.eager == {}
    assert statistics.prefill_replays > 0
    assert statistics.decode_replays > 0


@pytest.mark.parametrize("kind", REFUSED)
def test_what_would_write_wrong_text_is_refused(kind: str) -> None:
    """FAULT-F5: rows that look at other rows, at the step, or at a length that the first probe does not reach."""
    model = small_model("llama")
    REFUSED[kind](model)
    with pytest.raises(ConfigError, match="cannot be served through its own code"):
        adapt(model)


@pytest.mark.parametrize("kind", RIGHT)
def test_what_looks_at_its_own_row_only_is_right(kind: str) -> None:
    """REQ-H5: what depends on a row and its position is served, every step replayed."""
    model = small_model("llama")
    RIGHT[kind](model)
    replays_everything(served(model))


def numbered(module: Any, result: Any, args: Any) -> Any:
    """Llama 4's temperature: from the number of the row, and 1 up to the 2000th."""
    rows = torch.arange(args[1].shape[-1])
    return scaled(result, 1 + torch.log1p(torch.floor(rows.float() / 2000))[None, :, None])


def test_numbers_of_rows_bound_the_sequences_to_what_was_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """FAULT-F4: what a model makes of row numbers may begin behind the probe: no sequence is longer than what was seen right."""
    from breakgraph.models import huggingface_probe

    model = small_model("llama", max_position_embeddings=4096)
    around_rotary(numbered)(model)
    pairs = score_operations(adapt(small_model("llama")).decoder.sites)
    work = 300 * 2 * sum(each.numel() for each in model.parameters()) + 300**2 * pairs
    monkeypatch.setitem(huggingface_probe._WORK, "cpu", work)
    assert adapt(model).max_positions == 300
    plain = small_model("llama", max_position_embeddings=4096)
    assert adapt(plain).max_positions == 4096
    known = small_model("llama4_text", max_position_embeddings=4096, floor_scale=1024)
    assert adapt(known).max_positions == 1023


def syncing(module: Any, result: torch.Tensor, args: Any) -> torch.Tensor:
    """Asks the host about every row."""
    signs = [1.0 if value > 0 else 0.5 for value in args[0].sum(-1).flatten().tolist()]
    return result * torch.tensor(signs, device=result.device).view(1, -1, 1).to(result.dtype)


def test_a_module_that_syncs_is_a_break_of_its_own() -> None:
    """REQ-H5, FAULT-F3: that instance and no other runs as a break in every step, on real rows; the class is untouched."""
    model = small_model("llama")
    around_mlp(syncing)(model)
    llm = served(model)
    replays_everything(llm)
    decoder = llm.engine.state.decoder
    assert decoder.breaks == {"layers.1.mlp": 1}
    assert decoder.eager_prefill is decoder.eager_decode is None
    assert llm.statistics.breaks > 5 * llm.statistics.prefill_replays
    assert "forward" not in vars(model.model.layers[1].mlp)


def test_a_sync_that_returns_no_rows_makes_its_caller_the_break() -> None:
    """A router that returns counts of the step cannot be a break; the block around it can."""

    class Router(nn.Module):
        def forward(self, x: torch.Tensor) -> list[int]:
            counts: list[int] = (x.sum(-1) > 0).flatten().long().tolist()
            return counts

    class Block(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.router = inner, Router()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows: torch.Tensor = self.inner(x)
            return rows * (1 + torch.tensor(self.router(x)).view(1, -1, 1))

    model = small_model("llama")
    layer = model.model.layers[2]
    layer.mlp = Block(layer.mlp).eval()
    llm = served(model)
    replays_everything(llm)
    assert llm.engine.state.decoder.breaks == {"layers.2.mlp": 1}


def test_a_sync_around_attention_is_served_eagerly_with_the_line() -> None:
    """FAULT-F5: what cannot be a break is known before anything is captured; steps are right, eager, and counted."""
    model = small_model("llama")
    layer = model.model.layers[1]
    model.model.layers[1] = Around(
        layer, lambda module, result, args: result * (1.0 if result.sum().item() else 2.0)
    ).eval()
    llm = served(model)
    assert llm.statistics.dropped == {}
    assert llm.statistics.graphs == 0
    assert set(llm.statistics.eager) == {"OPT_OUT"}
    reason = llm.engine.state.decoder.eager_prefill
    assert reason is not None
    assert "test_models_huggingface_toys.py" in reason
    assert "cannot be a break: it holds an attention call" in reason


def test_a_sync_in_the_head_leaves_prefill_its_graphs() -> None:
    """The head is in the graph of a decode step and outside that of prefill."""
    model = small_model("llama")
    model.lm_head = Around(
        model.lm_head, lambda module, result, args: result * (1.0 if result.sum().item() else 2.0)
    ).eval()
    llm = served(model)
    assert llm.statistics.prefill_replays > 0
    assert llm.statistics.decode_replays == 0
    assert llm.statistics.eager == {"OPT_OUT": llm.statistics.decode.steps}


def test_a_sync_in_the_embedding_makes_both_phases_eager() -> None:
    """The embedding is in the graphs of both phases: every step is eager, right, and counted."""
    model = small_model("llama")
    embedding = Around(
        model.get_input_embeddings(), lambda module, result, args: result * (1.0 if result.sum().item() else 2.0)
    ).eval()
    model.set_input_embeddings(embedding)
    llm = served(model)
    assert llm.statistics.graphs == 0
    assert llm.statistics.eager == {"OPT_OUT": llm.statistics.prefill.steps + llm.statistics.decode.steps}


def counting(module: Any, result: torch.Tensor, args: Any) -> torch.Tensor:
    """Counts its calls."""
    module.count = getattr(module, "count", 0) + 1
    return result


def moving(module: Any, result: torch.Tensor, args: Any) -> torch.Tensor:
    """Makes its buffer anew."""
    module.register_buffer("table", torch.ones(result.shape[1]), persistent=False)
    return result * module.table.view(1, -1, 1)


@pytest.mark.parametrize(("change", "name"), [(counting, "count"), (moving, "table")])
def test_what_a_forward_leaves_changed_keeps_it_from_graphs(change: Any, name: str) -> None:
    """FAULT-F6: a replay would not count, and would read a buffer where it was: eager steps, and the name of what changes."""
    model = small_model("llama")
    around_mlp(change)(model)
    llm = served(model)
    assert llm.statistics.graphs == 0
    assert set(llm.statistics.eager) == {"OPT_OUT"}
    assert f"a forward leaves model.layers.1.mlp.{name} changed" in str(llm.engine.state.decoder.eager_decode)


FACTORS = {"short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0, 3.0, 4.0, 5.0]}


@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, 256),
        ({"rope_type": "longrope", **FACTORS, "original_max_position_embeddings": 64}, 64),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 256),
        ({"rope_type": "linear", "factor": 4.0}, 256),
        ({"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 256),
    ],
)
def test_rotary_embeddings_that_change_with_length_are_bounded_and_replayed(rope: Any, positions: int) -> None:
    """FAULT-F4: frequencies are fixed up to the length where they would change, and the model by itself is as it was."""
    if rope["rope_type"] == "llama3":
        rope = {**rope, "original_max_position_embeddings": 64}
    model = small_model("llama", rope_parameters={"rope_theta": 10000.0, **rope})
    loaded = load_transformers(model)
    assert loaded.max_positions == positions
    llm = LLM(loaded, **OPTIONS)
    answers = llm.generate(PROMPTS, SamplingParams(max_tokens=NEW, ignore_eos=True))
    replays_everything(llm)
    own_tokens_of(model, answers)
    assert model.model.rotary_emb.rope_type == rope["rope_type"]


def test_a_rotary_embedding_that_asks_by_itself_is_a_break_with_its_frequencies_held() -> None:
    """FAULT-F4: a rotary embedding with a host read of its own is a break, and in it the frequencies are those of steps, too."""
    original = {"original_max_position_embeddings": 64}
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_mscale": 1.0,
        "long_mscale": 1.2,
        **FACTORS,
        **original,
    }
    model = small_model("phimoe", rope_parameters=rope, **original)
    loaded = load_transformers(model)
    assert loaded.max_positions == 64
    assert loaded.decoder.breaks == {"rotary_emb": 1}
    before = model.model.rotary_emb.inv_freq._version
    llm = LLM(loaded, **OPTIONS)
    answers = llm.generate(PROMPTS, SamplingParams(max_tokens=NEW, ignore_eos=True))
    replays_everything(llm)
    assert model.model.rotary_emb.inv_freq._version == before
    own_tokens_of(model, answers)


def test_experts_that_read_the_host_are_computed_another_way() -> None:
    """REQ-H5: transformers' own grouped product takes the place of its loop over the experts, with the reason."""
    model = small_model("mixtral")
    model.set_experts_implementation("eager")
    llm = served(model)
    replays_everything(llm)
    experts = llm.engine.state.decoder.experts
    assert experts is not None
    assert experts.kind == "grouped_mm"
    assert "eager, reads data on the host" in experts.reason


def test_experts_without_another_way_are_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """REQ-H5: a loop over experts over flattened rows is a break in every layer, in prefill and decode."""
    model = small_model("mixtral")
    model.set_experts_implementation("eager")

    def refuse(_: object) -> None:
        raise ValueError

    monkeypatch.setattr(model, "set_experts_implementation", refuse)
    monkeypatch.setattr(model, "get_experts_implementation", lambda: None)
    llm = served(model)
    replays_everything(llm)
    assert llm.engine.state.decoder.breaks == {f"layers.{index}.mlp.experts": 1 for index in range(4)}


def test_a_refused_model_has_its_experts_back() -> None:
    """A refusal leaves the implementation of the experts as it was, too."""
    model = small_model("mixtral")
    model.set_experts_implementation("eager")
    around_mlp(lambda module, result, args: result * 1.5 if result.shape[1] > 7 else result)(model)
    with pytest.raises(ConfigError, match="cannot be served"):
        adapt(model)
    assert model.config._experts_implementation == "eager"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_syncs_on_a_gpu_are_breaks_or_gone(kind: str, dtype: torch.dtype) -> None:
    """REQ-H5, FAULT-F3: on CUDA kernels that wait are found before the capture as well, and every step equals its eager twin."""
    sizes = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 128, "sliding_window": None}
    model = small_model(kind, device="cuda", dtype=dtype, **sizes)
    around_mlp(syncing)(model)
    llm = LLM(load_transformers(model), verify="always", measure="never", **{**OPTIONS, "block_size": 16})
    llm.generate(PROMPTS, SamplingParams(max_tokens=NEW, ignore_eos=True))
    replays_everything(llm)
    assert llm.engine.state.decoder.breaks["layers.1.mlp"] == 1
    assert torch.cuda.get_sync_debug_mode() == 0
