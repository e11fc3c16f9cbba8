"""The shape of a decoder: everything the forward pass needs to know, and nothing about where it came from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch

from breakgraph.errors import ConfigError

__all__ = ["SUPPORTED_MODEL_TYPES", "DecoderConfig", "ExpertsConfig", "RopeConfig", "default_dtype"]

SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")

# Rope types whose frequencies do not depend on the length of the running sequence. The others would need a table
# for each request, so they are refused by name.
STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")

# What the scaling of each kind cannot do without.
ROPE_NEEDS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}

# Which options a family's own code reads: what config.json says beyond them changes no number there.
BIAS_FAMILIES = ("llama", "qwen3", "qwen3_moe")
WINDOW_SWITCH_FAMILIES = ("qwen2", "qwen3", "qwen3_moe")
ONE_WINDOW_FAMILIES = ("mistral", "mixtral", "qwen3_moe")


def default_dtype(device: torch.device) -> torch.dtype:
    """The dtype that weights are held in when nobody chose one: bfloat16 on CUDA, float32 elsewhere."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


@attrs.frozen
class RopeConfig:
    """Rotary position embedding.

    Attributes:
        kind: One of `STATIC_ROPE_TYPES`.
        theta: Base of the frequencies.
        parameters: What the scaling of `kind` needs (factor, original_max_position_embeddings, ...), as
            transformers names it in `rope_parameters`.
    """

    kind: str = "default"
    theta: float = 10_000.0
    parameters: Mapping[str, Any] = attrs.field(factory=dict, hash=False)

    def __attrs_post_init__(self) -> None:
        if self.kind not in STATIC_ROPE_TYPES:
            raise ConfigError(
                f"rope type {self.kind!r} is not supported; supported are {', '.join(STATIC_ROPE_TYPES)}.",
                why="Its frequencies change with the length of the running sequence, and a table cannot.",
                fix="Use a model, or a rope_parameters entry, of a supported type.",
            )
        needed = {name: self.parameters.get(name) for name in ROPE_NEEDS.get(self.kind, ())}
        for name, value in {"theta": self.theta, **needed}.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise ConfigError(
                    f"rope type {self.kind!r}: {name} is {value!r}; expected a number above 0.",
                    why="The angles of every position are computed from it.",
                    fix="Use the rope_parameters of the config.json that came with the weights.",
                )


@attrs.frozen
class ExpertsConfig:
    """A mixture of experts in place of the MLP.

    Attributes:
        num_experts: Experts of a layer.
        experts_per_token: How many of them compute a row.
        inner_size: Width of the gated MLP of one expert.
        renormalise: The shares of a row's experts are scaled to sum to one.
        dense_layers: Layers that have an ordinary MLP all the same.
    """

    num_experts: int
    experts_per_token: int
    inner_size: int
    renormalise: bool = True
    dense_layers: tuple[int, ...] = ()

    def __attrs_post_init__(self) -> None:
        if self.num_experts < 1 or self.inner_size < 1:
            raise ConfigError(
                f"{self.num_experts} experts of width {self.inner_size} are no mixture of experts.",
                why="A layer with experts needs at least one, and a width.",
                fix="Correct the number of experts or moe_intermediate_size in the model's config.json.",
            )
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise ConfigError(
                f"{self.experts_per_token} of {self.num_experts} experts were to compute each token.",
                why="A token goes through at least one expert, and through none of them twice.",
                fix="Correct num_experts_per_tok in the model's config.json.",
            )


@attrs.frozen
class DecoderConfig:
    """Shape of a Llama-like decoder.

    Attributes:
        model_type: Family as transformers names it, one of `SUPPORTED_MODEL_TYPES`.
        vocab_size: Rows of the embedding and of the output matrix.
        hidden_size: Width of the residual stream.
        intermediate_size: Width of the gated MLP, in layers without experts.
        num_layers: Decoder layers.
        num_heads: Query heads.
        num_kv_heads: Key and value heads; divides `num_heads`.
        head_dim: Width of one head; `num_heads * head_dim` may differ from `hidden_size`.
        max_positions: Longest sequence, in tokens, that the weights were trained or scaled for.
        rms_norm_eps: Epsilon of every RMS norm.
        tie_word_embeddings: The output matrix is the embedding.
        qkv_bias: Biases on the q, k and v projections.
        o_bias: A bias on the attention's output projection.
        qk_norm: RMS norms over each head of q and k, before rope (Qwen3).
        rope: Rotary embedding.
        sliding_window: Tokens that a token may look back on, itself included; None means all. This decoder has
            no windowed attention, see `check_positions`.
        dtype: What the weights are held in.
        experts: The mixture of experts; None where every layer has an ordinary MLP.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    rope: RopeConfig = attrs.field(factory=RopeConfig)
    sliding_window: int | None = None
    dtype: torch.dtype = torch.float32
    experts: ExpertsConfig | None = None

    def __attrs_post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "head_dim", "max_positions"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"{self.model_type}: {name} is {getattr(self, name)}; expected at least 1.",
                    why="A decoder of that shape has no weights, or nothing to compute.",
                    fix="Use the config.json that came with the weights.",
                )
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.model_type}: {self.num_heads} query heads cannot share {self.num_kv_heads} key-value heads.",
                why="Grouped attention gives every key-value head the same number of query heads.",
                fix="Correct num_attention_heads or num_key_value_heads in the model's config.json.",
            )
        if self.head_dim % 2:
            raise ConfigError(
                f"{self.model_type}: head_dim {self.head_dim} is odd.",
                why="Rotary embedding turns pairs of channels.",
                fix="Use a model with an even head dimension.",
            )
        dense = self.experts.dense_layers if self.experts is not None else ()
        if unknown := [layer for layer in dense if not 0 <= layer < self.num_layers]:
            raise ConfigError(
                f"{self.model_type}: layer {unknown[0]} was to have no experts; there are {self.num_layers} layers.",
                why="Layers are counted from 0, and one that is not there would go unnoticed.",
                fix="Correct mlp_only_layers in the model's config.json.",
            )

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has experts in place of its MLP."""
        return self.experts is not None and layer not in self.experts.dense_layers

    @property
    def q_size(self) -> int:
        """Columns of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Columns of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token takes in the KV cache, over all layers."""
        return 2 * self.num_layers * self.kv_size * self.dtype.itemsize

    @property
    def served_positions(self) -> int:
        """Longest sequence, in tokens, that `check_positions` lets pass."""
        return min(self.max_positions, self.sliding_window or self.max_positions)

    def check_positions(self, positions: int) -> None:
        """Refuse to serve sequences of `positions` tokens that this decoder would compute wrongly.

        Args:
            positions: The longest sequence that will be served, in tokens, prompt and answer together.

        Raises:
            ConfigError: Beyond the model's positions, or beyond a sliding window: within the window, windowed and
                full attention are the same thing, so only longer sequences are refused.
        """
        if positions > self.max_positions:
            raise ConfigError(
                f"{self.model_type}: sequences of {positions} tokens were asked for; the model has "
                f"{self.max_positions} positions.",
                why="Beyond its positions a model writes nonsense without any error.",
                fix=f"Serve at most {self.max_positions} tokens a sequence.",
            )
        if self.sliding_window is not None and positions > self.sliding_window:
            raise ConfigError(
                f"{self.model_type}: sliding_window={self.sliding_window} is active below the {positions} positions "
                "to be served.",
                why="This decoder attends to every earlier token, so longer sequences would give other numbers.",
                fix=f"Serve at most {self.sliding_window} tokens a sequence (max_seq_len={self.sliding_window}); "
                "the adapter has windows (via='adapter').",
            )

    @classmethod
    def from_transformers(cls, config: Any, *, dtype: torch.dtype = torch.float32) -> DecoderConfig:
        """Read a configuration of transformers (5.17 or newer).

        Args:
            config: A `PreTrainedConfig` of one of the supported families.
            dtype: What the weights will be held in.

        Raises:
            ConfigError: No configuration, another family, a quantised checkpoint, or an option that changes the numbers and
                that this decoder does not have. The option is named.
        """
        if isinstance(config, type) or not callable(getattr(config, "to_dict", None)):
            raise ConfigError(
                f"from_transformers() got {config!r:.80}; expected a configuration of transformers.",
                why="The shape of the decoder is read from it.",
                fix="Pass AutoConfig.from_pretrained(folder), or model.config.",
            )
        values: dict[str, Any] = config.to_dict()
        family = str(values.get("model_type"))
        if family not in SUPPORTED_MODEL_TYPES:
            raise ConfigError(
                f"Model type {family!r} has no decoder here; supported are {', '.join(SUPPORTED_MODEL_TYPES)}.",
                why="Every family needs its own forward pass, and a near miss would give wrong numbers silently.",
                fix="Use a model of a supported family, or transformers' own code: via='adapter' (breakgraph generate: "
                "--via adapter).",
            )
        _refuse_quantised(values, family)
        _refuse(values, family, "hidden_act", "silu")
        _refuse(values, family, "is_causal", True)
        if family == "llama":
            _refuse(values, family, "mlp_bias", False)
        bias = bool(values.get("attention_bias", False)) and family in BIAS_FAMILIES
        heads = int(values["num_attention_heads"])
        return cls(
            model_type=family,
            vocab_size=int(values["vocab_size"]),
            hidden_size=int(values["hidden_size"]),
            intermediate_size=int(values["intermediate_size"]),
            num_layers=int(values["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(values.get("num_key_value_heads") or heads),
            head_dim=int(values.get("head_dim") or values["hidden_size"] // max(heads, 1)),
            max_positions=int(values["max_position_embeddings"]),
            rms_norm_eps=float(values["rms_norm_eps"]),
            # `to_dict` drops values that equal the family's default in some releases; the attribute is always there.
            tie_word_embeddings=bool(config.tie_word_embeddings),
            qkv_bias=bias or family == "qwen2",
            o_bias=bias,
            qk_norm=family in ("qwen3", "qwen3_moe"),
            rope=_rope(values.get("rope_parameters") or {}, family),
            sliding_window=_sliding_window(config, family),
            dtype=dtype,
            experts=_experts(config, family),
        )


def _experts(config: Any, family: str) -> ExpertsConfig | None:
    # Attributes, not `to_dict`: releases differ in the key that the number of experts is written under.
    if family == "mixtral":
        return ExpertsConfig(
            num_experts=int(config.num_local_experts),
            experts_per_token=int(config.num_experts_per_tok),
            inner_size=int(config.intermediate_size),
        )
    if family != "qwen3_moe":
        return None
    layers, step = range(int(config.num_hidden_layers)), int(config.decoder_sparse_step)
    if step < 1:
        raise ConfigError(
            f"{family}: decoder_sparse_step={step} says nothing about which layers have experts.",
            why="Every so many layers one has experts, counted from this number on.",
            fix="Correct decoder_sparse_step in the model's config.json; 1 gives every layer experts.",
        )
    ordinary = set(config.mlp_only_layers or ())
    dense = tuple(layer for layer in layers if layer in ordinary or (layer + 1) % step)
    if len(dense) == len(layers) or not config.num_experts:
        return None
    return ExpertsConfig(
        num_experts=int(config.num_experts),
        experts_per_token=int(config.num_experts_per_tok),
        inner_size=int(config.moe_intermediate_size),
        renormalise=bool(config.norm_topk_prob),
        dense_layers=dense,
    )


def _refuse(values: Mapping[str, Any], family: str, option: str, expected: object) -> None:
    got = values.get(option, expected)
    if got != expected:
        raise ConfigError(
            f"{family}: {option}={got!r} is not supported, only {expected!r} is.",
            why="Ignoring the option would give other numbers than the model was trained for.",
            fix=f"Use a model with {option}={expected!r}.",
        )


def _refuse_quantised(values: Mapping[str, Any], family: str) -> None:
    quantised = values.get("quantization_config")
    if not quantised:
        return
    method = quantised.get("quant_method") if isinstance(quantised, Mapping) else quantised
    raise ConfigError(
        f"{family}: the checkpoint is quantised (quantization_config, method {method!r}).",
        why="Its tensors are packed; read as plain weights they would be noise.",
        fix="Use the unquantised checkpoint (float32, float16 or bfloat16) of the same model, or a GGUF file.",
    )


def _rope(parameters: Mapping[str, Any], family: str) -> RopeConfig:
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise ConfigError(
            f"{family}: rope_parameters differ between layer types: {', '.join(sorted(parameters))}.",
            why="This decoder has one rope table for all layers.",
            fix="Use a model with one set of rope parameters.",
        )
    kind = str(parameters.get("rope_type") or parameters.get("type") or "default")
    if (parameters.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ConfigError(
            f"{family}: partial_rotary_factor={parameters['partial_rotary_factor']} is not supported.",
            why="This decoder turns every channel of a head.",
            fix="Use a model that rotates whole heads (partial_rotary_factor 1.0).",
        )
    theta = float(parameters.get("rope_theta") or 10_000.0)
    extra = {k: v for k, v in parameters.items() if k not in ("rope_type", "type", "rope_theta") and v is not None}
    return RopeConfig(kind=kind, theta=theta, parameters=extra)


def _sliding_window(config: Any, family: str) -> int | None:
    # Attributes, as above. What a family's own code does not read makes no difference there, so it makes none here.
    window = getattr(config, "sliding_window", None)
    if window is None:
        return None
    if family in WINDOW_SWITCH_FAMILIES and getattr(config, "use_sliding_window", None) is False:
        return None
    layers = getattr(config, "layer_types", None)
    if family not in ONE_WINDOW_FAMILIES and layers and "sliding_attention" not in layers:
        return None
    return int(window)
