"""Checks of what callers give to `LLM`."""

from __future__ import annotations

from pathlib import Path

import torch

from breakgraph.errors import ConfigError
from breakgraph.models.loaded import LoadedModel
from breakgraph.models.via import Via
from breakgraph.serving.sampling_params import SamplingParams

__all__ = ["check_arguments", "check_via", "checked_params"]


def check_arguments(model: object, *, device: object, cache_root: object, progress: object) -> None:
    """Refuses arguments of another type than `LLM` takes.

    Args:
        model: See `LLM`.
        device: See `LLM`.
        cache_root: See `LLM`.
        progress: See `LLM`.

    Raises:
        ConfigError: One of them is.
    """
    if not isinstance(model, (str, Path, LoadedModel)):
        raise ConfigError(
            f'model is of type {type(model).__name__}; expected a path, "demo" or a LoadedModel.',
            why="The engine needs a decoder of packed rows over its paged cache.",
            fix="Give the folder; of a model of transformers load_transformers(model); a module of your own: PrefillRunner, "
            "DecodeRunner.",
        )
    _expect(isinstance(device, (str, torch.device)), "device", device, "auto, cpu or cuda")
    _expect(cache_root is None or isinstance(cache_root, (str, Path)), "cache_root", cache_root, "a path or None")
    _expect(progress is None or callable(progress), "progress", progress, "a function of (stage, done, total) or None")


def check_via(model: object, via: Via) -> None:
    """Refuses to ask for one way of a model that was loaded for the other.

    Args:
        model: See `LLM`.
        via: See `LLM`.

    Raises:
        ConfigError: It was.
    """
    if isinstance(model, LoadedModel) and via not in (Via.AUTO, model.served.via):
        raise ConfigError(
            f"via is {via.value!r}, but the model was loaded: {model.served}.",
            why="Whose code runs a model is settled when it is loaded.",
            fix=f"Leave via out, or load it so: load_model(path, via={via.value!r}).",
        )


def _expect(fits: bool, name: str, value: object, kind: str) -> None:
    if not fits:
        raise ConfigError(
            f"{name} is {value!r}; expected {kind}.",
            why="It is used when the engine starts, long after this line.",
            fix=f"Give {name} as {kind}, or leave it out.",
        )


def checked_params(params: object) -> SamplingParams:
    """Refuses what are no sampling parameters.

    Args:
        params: What a caller gave.

    Raises:
        ConfigError: It is something else.
    """
    if isinstance(params, SamplingParams):
        return params
    raise ConfigError(
        f"the sampling parameters are of type {type(params).__name__}: {params!r:.80}.",
        why="SamplingParams checks names and ranges once, before anything runs.",
        fix="Give SamplingParams(max_tokens=16), of a dict SamplingParams(**options), or a list with one for each prompt.",
    )
