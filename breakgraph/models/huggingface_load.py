"""`load_transformers`: a model of transformers, by object or by folder, as something that the serving loop can use."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from breakgraph.errors import ConfigError
from breakgraph.models.arguments import as_device
from breakgraph.models.checkpoint import Progress, some_names
from breakgraph.models.config import DecoderConfig, default_dtype
from breakgraph.models.generation import GenerationDefaults
from breakgraph.models.huggingface import AdaptedDecoder
from breakgraph.models.huggingface_probe import adapt
from breakgraph.models.loaded import LoadedModel
from breakgraph.models.transformers_files import one_line, quiet_transformers, read_tokenizer
from breakgraph.models.via import Served, Via

__all__ = ["load_transformers"]

_LOG = logging.getLogger(__name__)


def load_transformers(
    model: Any,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    tokenizer: Any = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """Put a causal language model of transformers behind our attention, unchanged, if it gives its own numbers there.

    Slower than our own decoders (its norms, rotary embeddings and projections are separate kernels), and for any family whose
    attention goes through transformers' attention interface.

    Args:
        model: A `PreTrainedModel` with a language model head, whose code and weights are used where they are. It is taken over:
            its attention is ours until `model.set_attn_implementation("sdpa")`. Or the path of a folder of transformers.
        device: Where the weights of a folder go; None: the CPU. A model that is an object stays where it is.
        dtype: What the weights of a folder are held in; None takes bfloat16 on CUDA and float32 elsewhere.
        tokenizer: For a model that was given as an object; None: prompts are token ids.
        progress: Called as `progress("loading weights", done, 1)` before and after the weights of a folder are read.

    Returns:
        The model, for `LLM(...)` or for runners of your own. `decoder` is an `AdaptedDecoder`.

    Raises:
        ConfigError: It cannot be read, or the probe refused it: see `adapt`.
    """
    generation = GenerationDefaults()
    source = type(model).__name__
    if isinstance(model, str | Path):
        folder, source = Path(model), str(model)
        model = _from_folder(folder, device=as_device(device or "cpu"), dtype=dtype, progress=progress)
        tokenizer = read_tokenizer(folder) if tokenizer is None else tokenizer
        generation = GenerationDefaults.from_folder(folder, config=model.config, tokenizer=tokenizer)
    elif device is not None or dtype is not None:
        raise ConfigError(
            "load_transformers() got a model and a device= or dtype= for it.",
            why="They are for the weights of a folder; a model is used where it is and as it is.",
            fix="Leave them out, after model.to(device, dtype).",
        )
    if tokenizer is not None and not callable(tokenizer):
        raise ConfigError(
            f"tokenizer is {tokenizer!r:.80}; expected a tokenizer of transformers or None.",
            why="It turns prompts into tokens.",
            fix="Pass AutoTokenizer.from_pretrained(...), or leave it out to use token ids.",
        )
    probed = adapt(model)
    config = _shape(model, probed.decoder, positions=probed.max_positions)
    served = Served(config.model_type, Via.ADAPTER, "it was asked for")
    return LoadedModel(probed.decoder, config, tokenizer, generation, probed.max_positions, source, served)


def _from_folder(folder: Path, *, device: torch.device, dtype: torch.dtype | None, progress: Progress | None) -> Any:
    from transformers import AutoModelForCausalLM

    if not folder.is_dir():
        raise ConfigError(
            f"There is no folder {folder}.",
            why="A model of transformers is a folder with config.json and weights.",
            fix="Correct the path, or fetch one first: hf download NAME --local-dir FOLDER",
        )
    if progress is not None:
        progress("loading weights", 0, 1)
    try:
        with quiet_transformers(warnings=False):  # what they would say is checked below
            model, found = AutoModelForCausalLM.from_pretrained(
                str(folder),
                dtype=dtype or default_dtype(device),
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # or the error would name none
            )
        model = model.to(device).eval()
    except torch.OutOfMemoryError:
        raise  # says nothing of the model
    except Exception as error:  # transformers validates with errors of several libraries
        raise ConfigError(
            f"transformers could not load {folder}: {one_line(error) or type(error).__name__}",
            why="The model's own code is used, and transformers' way to load it.",
            fix="Do what the message says. A file that cannot be read is to be downloaded again; a type that is not known needs "
            "a newer transformers.",
        ) from error
    _check_quantised(folder, model)
    _check_tensors(folder, found)
    if progress is not None:
        progress("loading weights", 1, 1)
    return model


def _check_quantised(folder: Path, model: Any) -> None:
    """A way to quantise that transformers does not know it leaves out, with no more than a warning."""
    named = getattr(model.config, "quantization_config", None)
    if named and getattr(model, "hf_quantizer", None) is None:
        raise ConfigError(
            f"{folder}: transformers does not know how the checkpoint is quantised: {one_line(named)}",
            why="Its tensors are packed; read as plain weights they would be noise.",
            fix="Use the unquantised checkpoint of the same model, or a newer transformers.",
        )


def _check_tensors(folder: Path, found: Mapping[str, Iterable[Any]]) -> None:
    """What a checkpoint lacks transformers makes up, and what it has too much is left out, with no more than a warning."""
    if misshapen := sorted(f"{key[0]} {tuple(key[1])} for {tuple(key[2])}" for key in found["mismatched_keys"]):
        raise ConfigError(
            f"{folder}: {len(misshapen)} tensors are of another shape than config.json asks for: {some_names(misshapen)}.",
            why="The model is built from config.json.",
            fix="Use the config.json that came with the weights.",
        )
    if absent := sorted(found["missing_keys"]):
        raise ConfigError(
            f"{folder} lacks {len(absent)} tensors: {some_names(absent)}.",
            why="transformers would put random numbers there, and the model would write noise.",
            fix="Download the checkpoint again, or correct config.json.",
        )
    if unused := sorted(found["unexpected_keys"]):
        _LOG.warning("%s: the model has no place for %d tensors: %s", folder, len(unused), some_names(unused))


def _shape(model: Any, decoder: AdaptedDecoder, *, positions: int) -> DecoderConfig:
    """What the serving loop asks of a configuration: vocabulary and positions; heads are those of the first call."""
    text, site = model.config.get_text_config(), decoder.sites[0]
    return DecoderConfig(
        model_type=str(text.model_type),
        vocab_size=decoder.vocab_size,
        hidden_size=decoder.hidden_size,
        intermediate_size=int(getattr(text, "intermediate_size", None) or decoder.hidden_size),
        num_layers=len(decoder.sites),
        num_heads=site.heads,
        num_kv_heads=site.kv_heads,
        head_dim=site.head_dim,
        max_positions=positions,
        dtype=decoder.dtype,
    )
