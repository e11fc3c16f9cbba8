"""From a loaded model and options to an engine: device, attention, sizes, memory, in that order."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import attrs
import torch

from breakgraph.capture_window import CaptureProgress
from breakgraph.errors import ConfigError
from breakgraph.models.attention import Attention, make_attention
from breakgraph.models.decoder import Decoder
from breakgraph.models.loaded import LoadedModel
from breakgraph.serving.config import EngineConfig, Sizes, sequence_limit
from breakgraph.serving.device_state import DeviceState
from breakgraph.serving.engine import Engine
from breakgraph.serving.kv_cache import KVCache, blocks_for
from breakgraph.serving.memory import MemorySplit, measure_blocks
from breakgraph.serving.prefill_attention import choose

__all__ = ["build_engine", "choose_device", "make_attention_for"]

_LOG = logging.getLogger(__name__)


def choose_device(name: str) -> torch.device:
    """Turns the device option into a device.

    Args:
        name: "auto", "cpu", "cuda" or "cuda:1".

    Raises:
        ConfigError: It is none of these, or there is no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()):
        raise ConfigError(
            f"device is {name!r}; expected auto, cpu or cuda.",
            why="Graphs exist for CUDA devices, and are emulated on a CPU.",
            fix="Use auto to take CUDA where there is one.",
        )
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device is {name!r}, but torch sees {torch.cuda.device_count()} CUDA devices.",
            why="The model would have nowhere to run.",
            fix="Use device cpu, or install a torch that fits your driver.",
        )
    return torch.device(name)


def build_engine(
    model: LoadedModel, *, config: EngineConfig, progress: Callable[[str, CaptureProgress], None] | None = None
) -> Engine:
    """Allocates cache and token table and makes an engine; captures nothing yet.

    Args:
        model: Weights, on their device.
        config: The caller's options.
        progress: Called as ``progress("prefill" | "decode", event)`` while graphs are captured.

    Raises:
        ConfigError: Model, device and options do not fit together.
    """
    decoder, shape = model.decoder, model.config
    _refuse_training(decoder)
    device = decoder.device
    limit = sequence_limit(config, max_positions=model.max_positions, device_type=device.type)
    shape.check_positions(limit)
    _LOG.info("model: %s", model.served)
    attention = make_attention_for(decoder, config=config)
    config = attrs.evolve(config, placement=choose(attention, wanted=config.placement))
    _LOG.info("attention: %s (%s), of prefills: %s", attention.kind, attention.reason, config.placement.value)
    if decoder.experts is not None:
        _LOG.info("experts: %s (%s)", decoder.experts.kind, decoder.experts.reason)
    for phase, against in (("prefill", decoder.eager_prefill), ("decode", decoder.eager_decode)):
        if against is not None:
            _LOG.warning("%s steps run eagerly, correct and slow: %s", phase, against)
    # More blocks than all requests at their full length, the null block and that of the padding request would never be used.
    most = config.max_batch_size * blocks_for(limit, block_size=config.block_size) + 2
    sizes_for = partial(
        Sizes.resolve,
        config,
        max_positions=model.max_positions,
        device_type=device.type,
        plans=attention.plans_decode,
    )
    shapes = decoder.kv_shapes
    num_blocks = most if config.num_blocks is None else config.num_blocks
    split: MemorySplit | None = None
    if config.num_blocks is None and device.type == "cuda":
        num_blocks, split = measure_blocks(
            decoder,
            attention=attention,
            sizes=sizes_for(num_blocks=most),
            config=config,
            block_bytes=KVCache.block_bytes(block_size=config.block_size, shapes=shapes, dtype=decoder.dtype),
        )
        _LOG.info("memory: %s", split)
    sizes = sizes_for(num_blocks=num_blocks)
    with torch.inference_mode(mode=False):
        state = DeviceState(
            decoder=decoder,
            attention=attention,
            cache=KVCache(num_blocks, block_size=config.block_size, shapes=shapes, dtype=decoder.dtype, device=device),
            last_token=torch.zeros(sizes.max_batch_size + 1, dtype=torch.int64, device=device),
        )
    return Engine(
        state,
        sizes=sizes,
        config=config,
        eos_token_ids=model.generation.eos_token_ids,
        progress=progress,
        memory=split,
    )


def _refuse_training(decoder: Decoder) -> None:
    """A module in training draws dropout, or counts: each replay would repeat what the capture drew."""
    training = [path or type(decoder).__name__ for path, module in decoder.named_modules() if module.training]
    if len(training) > 1 or (training and not decoder.training):
        raise ConfigError(
            f"{len(training)} modules of the model are in training mode, {training[-1]} among them; expected none.",
            why="Dropout and statistics of training would be in the answers, each time others.",
            fix="Call model.eval(), also after adding modules to it.",
        )


def make_attention_for(decoder: Decoder, *, config: EngineConfig) -> Attention:
    """One attention for all layers: plain torch where a layer is not plain, or layers differ in shape.

    Args:
        decoder: The model.
        config: Which attention is asked for, and the block size.

    Raises:
        ConfigError: FlashInfer is asked for, and a layer is not plain.
    """
    first, kind = decoder.kv_shapes[0], config.attention
    odd = [variant for variant in decoder.variants if not variant.is_plain]
    uneven = len(set(decoder.kv_shapes)) > 1 or first.key_dim != first.value_dim
    if odd or uneven:
        why = f"a layer has {odd[0]}" if odd else "layers differ in the shape of what they keep"
        if kind == "flashinfer":
            raise ConfigError(
                f"attention is 'flashinfer', and {why}.",
                why="Its plain kernels would leave that out, silently.",
                fix="Leave attention out, or give 'torch'.",
            )
        kind = "torch"
        _LOG.info("attention in plain torch: %s", why)
    return make_attention(
        num_heads=decoder.heads,
        num_kv_heads=first.heads,
        head_dim=first.key_dim,
        block_size=config.block_size,
        dtype=decoder.dtype,
        device=decoder.device,
        kind=kind,
    )
