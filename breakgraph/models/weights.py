"""From a path to a model that can run: `load_model`, and `random_model` for measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import attrs
import torch

from breakgraph.errors import ConfigError
from breakgraph.models.arguments import (
    as_device,
    as_weight_dtype,
    check_open_arguments,
    check_positions_argument,
    check_progress,
)
from breakgraph.models.checkpoint import Progress, equal_tensors, load_safetensors, tensor_names
from breakgraph.models.config import SUPPORTED_MODEL_TYPES, DecoderConfig
from breakgraph.models.demo import demo_gguf
from breakgraph.models.experts import SparseMLP
from breakgraph.models.generation import GenerationDefaults
from breakgraph.models.gguf_cache import gguf_folder, is_gguf
from breakgraph.models.huggingface_load import load_transformers
from breakgraph.models.huggingface_probe import position_limit
from breakgraph.models.llama import DecoderLayer, LlamaDecoder
from breakgraph.models.loaded import LoadedModel
from breakgraph.models.transformers_files import check_causal, read_config, read_tokenizer, text_config
from breakgraph.models.via import Served, Via

__all__ = [
    "DEMO",
    "LoadedModel",
    "OpenedModel",
    "load_model",
    "open_model",
    "random_model",
    "weight_targets",
]

DEMO = "demo"
FUSED_EXPERTS = ".mlp.experts.gate_up_proj"
EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"


@attrs.frozen(eq=False, kw_only=True)
class OpenedModel:
    """Everything about a model but its weights: cheap, so that a prompt can be checked before they are read.

    Attributes:
        config: Shape of our decoder, without a choice of dtype; None where the adapter runs it.
        vocab_size: Token ids are below this.
        max_positions: Longest sequence, in tokens, as far as the configuration says; the adapter may find out less.
        tokenizer: Of transformers; None for a folder without one.
        generation: Where to stop and how to sample by default.
        served: Whose code will run it, and why.
        source: Where it came from, for people.
        folder: The Hugging Face folder of its files.
    """

    config: DecoderConfig | None
    vocab_size: int
    max_positions: int
    tokenizer: Any
    generation: GenerationDefaults
    served: Served
    source: str
    folder: Path

    def load(
        self,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | str | None = None,
        max_positions: int | None = None,
        progress: Progress | None = None,
    ) -> LoadedModel:
        """Read the weights; see `load_model`.

        Args:
            device: Where the weights go.
            dtype: What they are held in, a dtype or its name.
            max_positions: Longest sequence that will be served, in tokens.
            progress: Called as `progress(stage, done, total)`.

        Raises:
            ConfigError: An argument is wrong, the files are damaged, the adapter's probe refused the model, or sequences of
                that length cannot be served.
        """
        check_positions_argument(max_positions)
        check_progress(progress)
        device = as_device(device)
        dtype = as_weight_dtype(dtype, device=device)
        if self.config is None:
            return self._adapted(device=device, dtype=dtype, max_positions=max_positions, progress=progress)
        positions = self.max_positions if max_positions is None else max_positions
        self.config.check_positions(positions)
        names = tensor_names(self.folder)
        tied = self.config.tie_word_embeddings and self._can_tie(names, dtype=dtype)
        config = attrs.evolve(self.config, dtype=dtype, tie_word_embeddings=tied)
        # Weights made under inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            decoder = LlamaDecoder(config, device=device, dtype=dtype, max_positions=positions)
            targets = weight_targets(decoder, fused_experts=_has_fused_experts(names, config))
            if tied and EMBEDDING not in names and OUTPUT in names:
                targets[OUTPUT] = targets.pop(EMBEDDING)
            ignored = (OUTPUT,) if OUTPUT not in targets else ()
            load_safetensors(self.folder, targets, ignored=ignored, progress=progress)
        return LoadedModel(decoder.eval(), config, self.tokenizer, self.generation, positions, self.source, self.served)

    def _can_tie(self, names: frozenset[str], *, dtype: torch.dtype) -> bool:
        # As transformers does: a checkpoint that holds two different matrices is right, and its config.json is wrong.
        return not {EMBEDDING, OUTPUT} <= names or equal_tensors(self.folder, EMBEDDING, OUTPUT, dtype=dtype)

    def _adapted(
        self, *, device: torch.device, dtype: torch.dtype, max_positions: int | None, progress: Progress | None
    ) -> LoadedModel:
        try:
            loaded = load_transformers(
                self.folder, device=device, dtype=dtype, tokenizer=self.tokenizer, progress=progress
            )
        except ConfigError as error:
            why = f"{error.why} The adapter was tried because {self.served.reason}."
            raise ConfigError(error.what, why=why, fix=error.fix) from error
        positions = loaded.max_positions if max_positions is None else max_positions
        if positions > loaded.max_positions:
            raise ConfigError(
                f"{self.served.model_type}: sequences of {positions} tokens were asked for; the adapter serves up to "
                f"{loaded.max_positions}.",
                why="Beyond, the model ends, or has a window or rotary embeddings that the probe could not go past.",
                fix=f"Serve at most {loaded.max_positions} tokens a sequence (max_seq_len={loaded.max_positions}).",
            )
        return attrs.evolve(
            loaded, generation=self.generation, max_positions=positions, source=self.source, served=self.served
        )


def open_model(
    path: str | Path,
    *,
    via: Via | str = Via.AUTO,
    max_positions: int | None = None,
    cache_root: Path | None = None,
    progress: Progress | None = None,
) -> OpenedModel:
    """Read everything about a model but its weights; a GGUF file is converted first where it was not yet.

    Args:
        path: As in `load_model`.
        via: As in `load_model`.
        max_positions: As in `load_model`.
        cache_root: As in `load_model`.
        progress: As in `load_model`.

    Raises:
        ConfigError: An argument is wrong, the path is no model, or it is one that cannot be run in that way.
    """
    via = Via.of(via)
    check_open_arguments(path, max_positions=max_positions, progress=progress)
    folder = _model_folder(path, cache_root=cache_root, progress=progress)
    hf_config = read_config(folder)
    config, served = _choose(hf_config, via=via, max_positions=max_positions)
    if config is None:
        check_causal(hf_config)
        text = text_config(hf_config)
        vocabulary, positions = int(text.vocab_size), position_limit(text)
    else:
        vocabulary, positions = config.vocab_size, config.served_positions
    tokenizer = read_tokenizer(folder)
    generation = GenerationDefaults.from_folder(folder, config=hf_config, tokenizer=tokenizer)
    return OpenedModel(
        config=config,
        vocab_size=vocabulary,
        max_positions=positions,
        tokenizer=tokenizer,
        generation=generation,
        served=served,
        source=str(path),
        folder=folder,
    )


def _choose(hf_config: Any, *, via: Via, max_positions: int | None) -> tuple[DecoderConfig | None, Served]:
    """Whose code runs a model; with the shape of our decoder where it is ours."""
    family = str(hf_config.model_type)
    if via is Via.ADAPTER:
        return None, Served(family, Via.ADAPTER, "it was asked for")
    if via is Via.AUTO and family not in SUPPORTED_MODEL_TYPES:
        return None, Served(family, Via.ADAPTER, "there is no decoder of ours for it")
    try:
        config = DecoderConfig.from_transformers(hf_config)
        if max_positions is not None and max_positions <= config.max_positions:
            config.check_positions(max_positions)  # a sliding window; more than the model has fits no decoder
    except ConfigError as error:
        if via is Via.FAST:
            raise
        refusal = error.what.removeprefix(f"{family}: ").removesuffix(".")
        return None, Served(family, Via.ADAPTER, f"ours refuses it: {refusal}")
    return config, Served(family, Via.FAST)


def load_model(
    path: str | Path,
    *,
    via: Via | str = Via.AUTO,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str | None = None,
    max_positions: int | None = None,
    cache_root: Path | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a Hugging Face folder, a GGUF file or the demo model.

    Args:
        path: A folder with config.json and safetensors, a GGUF file, a folder that holds one, or "demo".
        via: "auto" takes our own decoder where there is one that fits, else transformers' own code through the adapter;
            "fast" and "adapter" insist on one of them. `served` of the result says which it is, and why.
        device: Where the weights go.
        dtype: What they are held in, a dtype or its name; None takes bfloat16 on CUDA and float32 elsewhere.
        max_positions: Longest sequence that will be served, in tokens; None takes the longest that whoever runs the model
            can. Our decoders go up to a sliding window; for more, "auto" takes the adapter.
        cache_root: Where converted GGUF files are kept, in a folder `gguf`; None takes `~/.cache/breakgraph`.
        progress: Called as `progress(stage, done, total)`; the stages are "converting GGUF" and "loading weights".

    Returns:
        The model. Peak memory of a decoder of ours is its weights plus one tensor of the checkpoint.

    Raises:
        ConfigError: An argument is wrong, the path is no model, the model cannot be run here, or its files are damaged.
    """
    device = as_device(device)
    dtype = as_weight_dtype(dtype, device=device)
    opened = open_model(path, via=via, max_positions=max_positions, cache_root=cache_root, progress=progress)
    return opened.load(device=device, dtype=dtype, max_positions=max_positions, progress=progress)


def random_model(
    config: DecoderConfig, *, device: torch.device | str = "cpu", dtype: torch.dtype | str | None = None, seed: int = 0
) -> LoadedModel:
    """A model of a given shape with random weights, for measurements and tests.

    Args:
        config: Its shape.
        device: Where the weights are made; the same seed gives other weights on another device.
        dtype: What they are held in, a dtype or its name; None takes bfloat16 on CUDA and float32 elsewhere.
        seed: Of the weights.

    Returns:
        The model, without tokenizer and without EOS.

    Raises:
        ConfigError: An argument is wrong.
    """
    if not isinstance(config, DecoderConfig):
        raise ConfigError(
            f"random_model() got a {type(config).__name__}; expected a DecoderConfig.",
            why="The weights are made in the shape of our decoder.",
            fix="Of a configuration of transformers make one: DecoderConfig.from_transformers(config).",
        )
    device = as_device(device)
    dtype = as_weight_dtype(dtype, device=device)
    config = attrs.evolve(config, dtype=dtype)
    generator = torch.Generator(device=device).manual_seed(seed)
    with torch.inference_mode(False), torch.no_grad():
        decoder = LlamaDecoder(config, device=device, dtype=dtype)
        for name, parameter in decoder.named_parameters():
            if name.endswith("norm"):
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 0.02, generator=generator)
    return LoadedModel(
        decoder.eval(),
        config,
        None,
        GenerationDefaults(),
        config.max_positions,
        f"random {config.model_type}",
        Served(config.model_type, Via.FAST),
    )


def weight_targets(decoder: LlamaDecoder, *, fused_experts: bool = False) -> dict[str, torch.Tensor]:
    """Where each tensor of a checkpoint goes: whole parameters, or rows of merged ones.

    Args:
        decoder: Its parameters are the targets; views share their memory.
        fused_experts: The checkpoint has the experts of a layer stacked in one tensor, as transformers holds them;
            otherwise each has its own tensors, as models are published and as transformers saves them.

    Returns:
        Targets by the names that transformers saves.
    """
    config = decoder.config
    targets: dict[str, torch.Tensor] = {
        EMBEDDING: decoder.embed_tokens,
        "model.norm.weight": decoder.norm,
    }
    if not config.tie_word_embeddings:
        targets[OUTPUT] = decoder.lm_head
    for index, module in enumerate(decoder.layers):
        layer = cast("DecoderLayer", module)
        for name, target in _layer_targets(layer, config, fused_experts=fused_experts).items():
            targets[f"model.layers.{index}.{name}"] = target
    return targets


def _layer_targets(layer: DecoderLayer, config: DecoderConfig, *, fused_experts: bool) -> dict[str, torch.Tensor]:
    targets: dict[str, torch.Tensor] = {
        "input_layernorm.weight": layer.input_norm,
        "post_attention_layernorm.weight": layer.post_attention_norm,
        "self_attn.o_proj.weight": layer.o_proj.weight,
    }
    if isinstance(layer.mlp, SparseMLP):
        targets |= _expert_targets(layer.mlp, family=config.model_type, fused=fused_experts)
    else:
        gate, up = layer.mlp.gate_up_proj.weight.chunk(2)
        targets["mlp.gate_proj.weight"], targets["mlp.up_proj.weight"] = gate, up
        targets["mlp.down_proj.weight"] = layer.mlp.down_proj.weight
    rows = [config.q_size, config.kv_size, config.kv_size]
    for part, weight in zip("qkv", torch.split(layer.qkv_proj.weight, rows), strict=True):
        targets[f"self_attn.{part}_proj.weight"] = weight
    if layer.qkv_proj.bias is not None:
        for part, bias in zip("qkv", torch.split(layer.qkv_proj.bias, rows), strict=True):
            targets[f"self_attn.{part}_proj.bias"] = bias
    if layer.o_proj.bias is not None:
        targets["self_attn.o_proj.bias"] = layer.o_proj.bias
    if layer.q_norm is not None and layer.k_norm is not None:
        targets["self_attn.q_norm.weight"] = layer.q_norm
        targets["self_attn.k_norm.weight"] = layer.k_norm
    return targets


def _expert_targets(mlp: SparseMLP, *, family: str, fused: bool) -> dict[str, torch.Tensor]:
    if fused:
        return {
            "mlp.gate.weight": mlp.router,
            "mlp.experts.gate_up_proj": mlp.gate_up,
            "mlp.experts.down_proj": mlp.down,
        }
    mixtral = family == "mixtral"
    block = "block_sparse_moe" if mixtral else "mlp"
    gate_name, up_name, down_name = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    targets: dict[str, torch.Tensor] = {f"{block}.gate.weight": mlp.router}
    for number in range(mlp.config.num_experts):
        gate, up = mlp.gate_up[number].chunk(2)
        for name, target in ((gate_name, gate), (up_name, up), (down_name, mlp.down[number])):
            targets[f"{block}.experts.{number}.{name}.weight"] = target
    return targets


def _has_fused_experts(names: frozenset[str], config: DecoderConfig) -> bool:
    return config.experts is not None and any(name.endswith(FUSED_EXPERTS) for name in names)


def _model_folder(path: str | Path, *, cache_root: Path | None, progress: Progress | None) -> Path:
    """The Hugging Face folder behind a path, converting a GGUF where needed."""
    where = demo_gguf() if str(path) == DEMO else Path(path).expanduser()
    if where.is_dir():
        if (where / "config.json").is_file():
            return where
        where = _only_gguf(where)
    elif not where.is_file():
        raise ConfigError(
            f"There is no model at {where}.",
            why="A model is a folder with config.json and safetensors, or a GGUF file.",
            fix='Correct the path, use "demo", or fetch one first: hf download NAME --local-dir FOLDER',
        )
    elif not is_gguf(where):
        raise ConfigError(
            f"{where} is neither a folder nor a GGUF file.",
            why="A model is a folder with config.json and safetensors, or a GGUF file.",
            fix="Give the folder that holds config.json.",
        )
    return gguf_folder(where, cache_root=cache_root, progress=progress)


def _only_gguf(folder: Path) -> Path:
    found = sorted(folder.glob("*.gguf"))
    if len(found) == 1:
        return found[0]
    names = ", ".join(file.name for file in found)
    raise ConfigError(
        f"{folder} has several GGUF files: {names}." if found else f"{folder} has neither config.json nor a GGUF file.",
        why="A model is a folder with config.json and safetensors, or a GGUF file.",
        fix="Name one of the files." if found else "Give the folder that holds config.json.",
    )
