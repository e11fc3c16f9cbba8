"""What a caller may pass to load a model, checked before any file is read."""

from __future__ import annotations

from pathlib import Path

import torch

from breakgraph.errors import ConfigError
from breakgraph.models.config import default_dtype

__all__ = [
    "as_device",
    "as_dtype",
    "as_weight_dtype",
    "check_open_arguments",
    "check_positions_argument",
    "check_progress",
]

# The dtypes that weights may be held in.
WEIGHT_DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)
}


def as_device(value: object) -> torch.device:
    """Takes a device of torch or its name, and tries it.

    Raises:
        ConfigError: It is neither, or torch has no such device here.
    """
    if not isinstance(value, (str, torch.device)):
        raise _wrong_device(value, "expected cpu, cuda or a torch.device")
    try:
        device = torch.device(value)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        said = str(error).partition("\n")[0].rstrip(".")
        raise _wrong_device(str(value), f"torch cannot use it: {said}") from error
    return device


def _wrong_device(value: object, reason: str) -> ConfigError:
    return ConfigError(
        f"device is {value!r:.80}; {reason}.",
        why="The weights would have nowhere to go.",
        fix="Use cpu, or cuda where torch sees a CUDA device.",
    )


def as_dtype(value: object) -> torch.dtype | None:
    """Takes a dtype of torch or its name; None stays None.

    Raises:
        ConfigError: Weights cannot be held in it.
    """
    if value is None:
        return None
    name = str(value).removeprefix("torch.") if isinstance(value, (str, torch.dtype)) else None
    if name not in WEIGHT_DTYPES:
        *most, last = WEIGHT_DTYPES
        raise ConfigError(
            f"dtype is {value!r:.80}; expected {', '.join(most)} or {last}.",
            why="Weights are held in it, and all kernels read it.",
            fix="Leave dtype out to take bfloat16 on CUDA and float32 elsewhere.",
        )
    return WEIGHT_DTYPES[name]


def as_weight_dtype(value: object, *, device: torch.device) -> torch.dtype:
    """Takes what `as_dtype` takes; None takes the default of the device.

    Raises:
        ConfigError: Weights cannot be held in it.
    """
    return as_dtype(value) or default_dtype(device)


def check_open_arguments(path: object, *, max_positions: object, progress: object) -> None:
    """Refuse what is no path, no length and no function.

    Raises:
        ConfigError: One of them is wrong; it is named.
    """
    if not isinstance(path, (str, Path)):
        raise ConfigError(
            f'The model is of type {type(path).__name__}; expected a path or "demo".',
            why="Its configuration and its weights are read from files.",
            fix="Give the folder or the GGUF file; for a model of transformers in memory use load_transformers(model).",
        )
    check_positions_argument(max_positions)
    check_progress(progress)


def check_positions_argument(value: object) -> None:
    """Refuse what is no length of a sequence; None is one.

    Raises:
        ConfigError: It is none.
    """
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ConfigError(
            f"max_positions is {value!r:.80}; expected a whole number of at least 1, or None.",
            why="Rotary embeddings are computed for that many tokens of a sequence.",
            fix="Leave max_positions out to take the longest that the model can.",
        )


def check_progress(value: object) -> None:
    """Refuse what cannot be called; None is let through.

    Raises:
        ConfigError: It cannot be called.
    """
    if value is not None and not callable(value):
        raise ConfigError(
            f"progress is {value!r:.80}; expected a function of (stage, done, total) or None.",
            why="It is called while the weights are read.",
            fix="Give such a function, or leave progress out.",
        )
