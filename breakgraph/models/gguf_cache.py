"""GGUF files, converted once to a Hugging Face folder and kept.

A conversion takes half a minute; reading its result takes 0.3 s. The folder's name is the sha256 of the file, so a
changed file is another entry. An entry is written beside its place and moved there when it is complete: a run that is
interrupted leaves nothing that looks like an entry, and of two runs at a time the second finds the first one's.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from breakgraph.errors import ConfigError
from breakgraph.models.checkpoint import Progress
from breakgraph.models.transformers_files import check_causal, quiet_transformers

__all__ = ["default_cache_root", "gguf_folder", "is_gguf"]

MAGIC = b"GGUF"
STALE_SECONDS = 24 * 3600.0


def default_cache_root() -> Path:
    """`~/.cache/breakgraph`."""
    return Path.home() / ".cache" / "breakgraph"


def is_gguf(path: Path) -> bool:
    """Whether a file begins with the four bytes of a GGUF."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def gguf_folder(
    path: Path,
    *,
    cache_root: Path | None = None,
    progress: Progress | None = None,
    convert: Callable[[Path, Path], None] | None = None,
) -> Path:
    """The Hugging Face folder of a GGUF file: configuration, float32 safetensors, tokenizer.

    Args:
        path: The GGUF file.
        cache_root: Where entries are kept; None takes `default_cache_root()`.
        progress: Called with the stage "converting GGUF" before and after a conversion.
        convert: `convert(file, folder)` writes the entry; None takes transformers.

    Returns:
        The entry. It takes four bytes a parameter on disk.

    Raises:
        ConfigError: No GGUF, one that transformers or this package does not know, packages are missing, or the
            cache cannot be written.
    """
    if not is_gguf(path):
        raise ConfigError(
            f"{path} is not a GGUF file: it does not begin with {MAGIC.decode()}.",
            why="The file may be cut off, or be the page of a download that failed.",
            fix="Download the file again, or give a folder with config.json and safetensors.",
        )
    entries = (cache_root or default_cache_root()) / "gguf"
    entry = entries / _sha256(path)
    if (entry / "config.json").is_file():
        return entry
    convert = convert or _convert
    with _writable(entries):
        entries.mkdir(parents=True, exist_ok=True)
        _remove_stale(entries)
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=entries))
    if progress is not None:
        progress("converting GGUF", 0, 1)
    try:
        convert(path, partial)
        _publish(partial, entry)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    if progress is not None:
        progress("converting GGUF", 1, 1)
    return entry


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _publish(partial: Path, entry: Path) -> None:
    """Move a complete entry to its place; another run's entry that is there already is as good."""
    partial.chmod(0o755)  # mkdtemp makes folders that only their owner may read
    try:
        os.rename(partial, entry)
    except OSError:
        # A rename never replaces a folder that has files, on any system.
        if not (entry / "config.json").is_file():
            raise


def _remove_stale(entries: Path) -> None:
    """Clear what killed runs left behind, unless it is young enough to be at work."""
    for partial in entries.glob(".partial-*"):
        with contextlib.suppress(OSError):
            if time.time() - partial.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _writable(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"The cache folder {folder} cannot be written: {error}.",
            why="A GGUF is converted once and kept, because the conversion takes half a minute.",
            fix="Free space or permissions there, or pass another cache_root (breakgraph generate: --cache-dir).",
        ) from error


def _convert(path: Path, folder: Path) -> None:
    missing = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"Reading a GGUF file needs {' and '.join(missing)}, which is not installed.",
            why="transformers reads GGUF files through these packages.",
            fix='Run: pip install "breakgraph[demo]"',
        )
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source, options = str(path.parent), {"gguf_file": path.name, "local_files_only": True}
    with _quiet_reader(), _readable(path):
        config = AutoConfig.from_pretrained(source, **options)
    _forget_quantisation(config)
    check_causal(config)  # not half a minute later
    with _quiet_reader(), _readable(path):
        # The configuration is handed in because every parse of the header takes seconds. Unasked, transformers may
        # keep the blocks packed for kernels of its own.
        model: Any = AutoModelForCausalLM.from_pretrained(
            source, config=config, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True), **options
        )
        tokenizer: Any = AutoTokenizer.from_pretrained(source, **options)
    # The weights are plain float32 now; left in place, these two would make transformers refuse to save them, or
    # whoever reads the folder take them for packed.
    model.hf_quantizer = None
    _forget_quantisation(model.config)
    with _writable(folder), _quiet_reader():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _forget_quantisation(config: Any) -> None:
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # the reader raises whatever a damaged header runs into
        raise ConfigError(
            f"{path} cannot be read as a model: {type(error).__name__}: {error}.",
            why="transformers does not know this architecture, or the file is damaged.",
            fix="Download the file again, or use the model's safetensors folder.",
        ) from error


@contextlib.contextmanager
def _quiet_reader() -> Iterator[None]:
    with quiet_transformers(warnings=True), _without_tensor_bar():
        yield


@contextlib.contextmanager
def _without_tensor_bar() -> Iterator[None]:
    """Silence the one bar that does not ask transformers' switch; a release without it needs nothing."""
    try:
        from transformers import modeling_gguf_pytorch_utils as reader

        bar = reader.tqdm
    except (ImportError, AttributeError):
        yield
        return
    reader.tqdm = lambda items, **_: items
    try:
        yield
    finally:
        reader.tqdm = bar
