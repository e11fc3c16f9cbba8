"""Safetensors of a Hugging Face folder, streamed into the merged weights of a decoder."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from breakgraph.errors import ConfigError
from breakgraph.models.generation import read_json

__all__ = ["Progress", "equal_tensors", "load_safetensors", "shard_paths", "some_names", "tensor_names"]

Progress = Callable[[str, int, int], None]
"""`progress(stage, done, total)`: stage is a few words for people; done goes from 0 to total."""

# Packed or scaled types mean a quantised checkpoint; copying them would convert codes into weights, silently.
PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")

# Old checkpoints saved the rope frequencies, which are computed; biases of the cache are never loaded.
COMPUTED = re.compile(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$")

MAX_NAMES = 8

# Rows that are compared at a time.
COMPARED_ROWS = 4096


def shard_paths(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a folder, in order.

    Raises:
        ConfigError: There are none, the index is damaged, or it names one that is not there.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index).get("weight_map", {})
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ConfigError(
                f"{index}: weight_map is {weight_map!r:.80}; expected the file of each tensor, by its name.",
                why="It says where the weights are.",
                fix="Download the file again.",
            )
        shards = tuple(folder / name for name in sorted(set(weight_map.values())))
    else:
        shards = (folder / "model.safetensors",)
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing or not shards:
        raise ConfigError(
            f"{folder} lacks {some_names(missing) if missing else 'every weight file'}.",
            why="Weights are read from safetensors: model.safetensors, or the files that its index names.",
            fix="Download the missing files; convert a pytorch_model.bin with save_pretrained of transformers.",
        )
    return shards


def tensor_names(folder: Path) -> frozenset[str]:
    """The names of all tensors of a folder. Reads the headers of its files only.

    Raises:
        ConfigError: A file is missing or damaged.
    """
    from safetensors import safe_open

    names: set[str] = set()
    for shard in shard_paths(folder):
        with _open(safe_open, shard) as file:
            names.update(file.keys())
    return frozenset(names)


def equal_tensors(folder: Path, first: str, second: str, *, dtype: torch.dtype) -> bool:
    """Whether two tensors of a folder are the same weights; never more than some rows of them are in memory.

    Args:
        folder: Holds the safetensors.
        first: Name of a tensor.
        second: Name of another.
        dtype: What the weights will be held in; a difference that it rounds away is none.

    Raises:
        ConfigError: A file is missing or damaged.
    """
    from safetensors import safe_open

    with contextlib.ExitStack() as stack:
        slices = {}
        for shard in shard_paths(folder):
            file = stack.enter_context(_open(safe_open, shard))
            slices.update({name: file.get_slice(name) for name in file.keys() if name in (first, second)})  # noqa: SIM118
        one, other = slices[first], slices[second]
        shape = one.get_shape()
        if not shape or shape != other.get_shape():
            return False
        rows = (slice(start, start + COMPARED_ROWS) for start in range(0, shape[0], COMPARED_ROWS))
        return all(torch.equal(one[some].to(dtype), other[some].to(dtype)) for some in rows)


@torch.no_grad()
def load_safetensors(
    folder: Path,
    targets: Mapping[str, torch.Tensor],
    *,
    ignored: Iterable[str] = (),
    progress: Progress | None = None,
) -> None:
    """Copy every tensor of a folder into its target, one at a time.

    All headers are checked before the first byte is copied. Peak memory is the targets plus one tensor.

    Args:
        folder: Holds the safetensors.
        targets: Where each tensor goes, by its name in the checkpoint: whole parameters or rows of merged ones.
        ignored: Names that may be there and are not needed.
        progress: Called after each tensor.

    Raises:
        ConfigError: A tensor is missing, unexpected, of another shape or of a quantised type; it is named.
    """
    from safetensors import safe_open

    optional = set(ignored)
    origin: dict[str, Path] = {}
    for shard in shard_paths(folder):
        with _open(safe_open, shard) as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                if name not in optional and not COMPUTED.search(name):
                    origin[name] = shard
                    _check(name, file.get_slice(name), targets, shard)
    absent = [name for name in targets if name not in origin]
    if absent:
        raise ConfigError(
            f"{folder} lacks {len(absent)} of {len(targets)} tensors: {some_names(absent)}.",
            why="Weights that are not loaded would be whatever was in memory.",
            fix="Download the checkpoint again, or correct config.json (layers, tie_word_embeddings).",
        )
    done = 0
    for shard in sorted(set(origin.values())):
        with _open(safe_open, shard) as file:
            for name in (name for name, where in origin.items() if where == shard):
                targets[name].copy_(file.get_tensor(name))
                done += 1
                if progress is not None:
                    progress("loading weights", done, len(targets))


def _open(safe_open: Any, shard: Path) -> Any:
    try:
        return safe_open(str(shard), framework="pt", device="cpu")
    except Exception as error:  # safetensors raises its own type, which is not public in every release
        raise ConfigError(
            f"{shard} is not a readable safetensors file: {error}.",
            why="Its header says which tensors it holds and where.",
            fix="Download the file again.",
        ) from error


def _check(name: str, tensor: Any, targets: Mapping[str, torch.Tensor], shard: Path) -> None:
    dtype, shape = tensor.get_dtype(), tuple(tensor.get_shape())
    if dtype not in PLAIN_DTYPES:
        raise ConfigError(
            f"{shard.name}: tensor {name} is {dtype}: the checkpoint is quantised.",
            why="Read as plain weights, packed numbers would be noise.",
            fix=f"Use a checkpoint in {', '.join(PLAIN_DTYPES)}, or a GGUF file.",
        )
    target = targets.get(name)
    if target is None:
        raise ConfigError(
            f"{shard.name}: unexpected tensor {name} of shape {shape}.",
            why="A tensor that the decoder has no place for changes the model's numbers.",
            fix="Use a checkpoint of the family that config.json names, without adapters or extra heads.",
        )
    if shape != tuple(target.shape):
        raise ConfigError(
            f"{shard.name}: tensor {name} has shape {shape}; config.json asks for {tuple(target.shape)}.",
            why="The decoder is built from config.json.",
            fix="Use the config.json that came with the weights.",
        )


def some_names(names: list[str]) -> str:
    """The first names of a list, and how many more there are."""
    shown = ", ".join(names[:MAX_NAMES])
    return shown if len(names) <= MAX_NAMES else f"{shown} and {len(names) - MAX_NAMES} more"
