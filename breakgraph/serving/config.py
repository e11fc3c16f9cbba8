"""The options of an engine, and the sizes that follow from them, a model and a device."""

from __future__ import annotations

import difflib
import enum
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeVar, cast

import attrs

from breakgraph.buckets import Buckets
from breakgraph.errors import ConfigError
from breakgraph.models.attention_types import Placement
from breakgraph.policy import CheckAddresses, Measure, Verify
from breakgraph.serving.kv_cache import blocks_for
from breakgraph.serving.prefix_cache import PrefixReuse

__all__ = [
    "EngineConfig",
    "Graphs",
    "SamplingPaths",
    "Sizes",
    "engine_config",
    "sequence_limit",
    "token_limit",
]

# On a CPU the emulated backend keeps every intermediate of a graph and a prefill bucket costs whole forwards at
# start-up, so the ladder is short and ends early.
_CPU_PREFILL_LADDER = (16, 64, 128, 256, 512)
_CPU_MAX_SEQ_LEN = 2048
_MAX_NUM_TOKENS = {"cpu": 512, "cuda": 2048}
# A captured decode in plain torch pays for the context its graph was made for, so a few contexts get their own.
_TORCH_CONTEXTS = (256, 1024, 4096, 16384)


class Graphs(enum.Enum):
    """Whether steps run as graphs."""

    ON = "on"
    OFF = "off"
    """Every step runs eagerly, counted as DISABLED; nothing is captured."""


class SamplingPaths(enum.Enum):
    """Which decode graphs exist: each path is one more graph for every batch size and context.

    A step in which a request asks for penalties, a bias or log-probabilities has graphs with ``ALL`` only; with the others it
    runs eagerly, as NO_GRAPH, and its answers are the same.
    """

    BOTH = "both"
    """Greedy and sampled."""
    GREEDY = "greedy"
    """Argmax only; a batch that samples runs eagerly and is counted."""
    SAMPLED = "sampled"
    """The sampling path only; it serves greedy rows as well, at the price of a sort."""
    ALL = "all"
    """Both, and graphs that end at the logits, for steps with penalties, bias or log-probabilities."""


_E = TypeVar("_E", bound=enum.Enum)


def _wrong(name: str, value: object, *, expected: str, why: str) -> ConfigError:
    advice = f"Give {name} as {expected.removesuffix(' or None').removesuffix(',')}, or leave it out."
    return ConfigError(f"{name} is {value!r}; expected {expected}.", why=why, fix=advice)


def _is_int(value: object, *, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _at_least(
    least: int,
    *,
    optional: bool = False,
    why: str = "It counts requests, tokens or blocks; of the blocks one is kept for padding rows.",
) -> Callable[[object, attrs.Attribute[Any], Any], None]:
    def check(instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        if not (_is_int(value, least=least) or (optional and value is None)):
            expected = f"an integer of at least {least}{' or None' if optional else ''}"
            raise _wrong(attribute.name, value, expected=expected, why=why)

    return check


def _share(instance: object, attribute: attrs.Attribute[float], value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise _wrong(
            attribute.name,
            value,
            expected="a number in (0, 1]",
            why="It is the share of the device's memory that everything together may take.",
        )


def _buckets(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if value is None or (isinstance(value, tuple) and all(_is_int(size, least=1) for size in value)):
        return
    raise _wrong(
        attribute.name,
        value,
        expected="integers of at least 1 in a list, for example [16, 64], or None",
        why="Each is a size for which a graph is captured.",
    )


def _some_bucket(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if value == ():
        raise ConfigError(
            f"{attribute.name} is an empty list; expected at least one bucket, or None.",
            why="Without any every decode step would run eagerly, which is another option's business.",
            fix=f"Leave {attribute.name} out, or run everything eagerly with graphs='off'.",
        )


def _sizes(values: Iterable[int] | Buckets | None) -> tuple[int, ...] | None:
    if isinstance(values, Buckets):
        return values.sizes
    # What is no list of sizes goes on as it is, to the validator, which knows the option's name.
    if isinstance(values, Iterable) and not isinstance(values, (str, bytes)):
        return tuple(values)
    return cast("None", values)


def _member(kind: type[_E], value: object, *, name: str, why: str) -> _E:
    try:
        return kind(value)
    except ValueError:
        pass
    *most, last = (repr(member.value) for member in kind)
    raise _wrong(name, value, expected=f"{', '.join(most)} or {last}", why=why)


def _switch(kind: type[_E], value: object, *, name: str, why: str) -> _E:
    word = {True: "on", False: "off"}[value] if isinstance(value, bool) else value
    try:
        return kind(word)
    except ValueError:
        pass
    raise _wrong(name, value, expected="'on', 'off', True or False", why=why)


def _graphs(value: Graphs | str | bool) -> Graphs:
    return _switch(Graphs, value, name="graphs", why="It says whether steps are captured and replayed.")


def _reuse(value: PrefixReuse | str | bool) -> PrefixReuse:
    why = "It says whether prompts find what earlier ones left in the cache."
    return _switch(PrefixReuse, value, name="prefix_reuse", why=why)


def _paths(value: SamplingPaths | str) -> SamplingPaths:
    return _member(SamplingPaths, value, name="sampling", why="It says which decode graphs are captured.")


def _verify(value: Verify | str) -> Verify:
    return _member(Verify, value, name="verify", why="It says when a graph is compared with eager.")


def _measure(value: Measure | str) -> Measure:
    return _member(Measure, value, name="measure", why="It says when prefill buckets are timed against eager steps.")


def _addresses(value: CheckAddresses | str) -> CheckAddresses:
    why = "It says when weights are looked at that somebody may have replaced."
    return _member(CheckAddresses, value, name="check_addresses", why=why)


def _placement(value: Placement | str) -> Placement:
    return _member(Placement, value, name="placement", why="It says where the attention of prefills stands.")


def _attention(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if value not in ("auto", "torch", "flashinfer"):
        raise _wrong(
            attribute.name,
            value,
            expected="'auto', 'torch' or 'flashinfer'",
            why="The attention is chosen once, before anything is captured.",
        )


@attrs.frozen(kw_only=True)
class EngineConfig:
    """What a caller can choose.

    Attributes:
        max_batch_size: Most requests that run at a time.
        max_num_tokens: Most tokens of a prefill step; longer prompts are computed in chunks. None takes 512 on a
            CPU and 2048 on CUDA, where the default ladders of buckets end: steps above the largest bucket are eager.
        prefill_burst: Most prefill steps in a row while other requests could have their next token: more of them give new
            requests their first token sooner and the whole more tokens a second, fewer a steadier stream.
        max_seq_len: Most tokens of prompt and answer; None takes what the model has, on a CPU at most 2048.
        block_size: Tokens per block of the KV cache.
        num_blocks: Blocks of the KV cache; None takes what every request can use, on CUDA as far as memory goes.
        memory_fraction: Share of a CUDA device's memory for weights, graphs and cache together.
        graphs: Graphs, or every step eagerly: a member of ``Graphs``, "on", "off", True or False.
        prefix_reuse: Whether a request takes over the keys and values of its first blocks from requests with the same first
            tokens: a member of ``PrefixReuse``, "on", "off", True or False. Reused tokens were computed in other chunks, so
            they may differ by the rounding of floats, as they do from batch to batch.
        sampling: Which decode graphs are captured: "both", "greedy", "sampled" or "all". Penalties, ``logit_bias`` and
            ``logprobs`` of a request make the decode steps of its whole batch run eagerly, counted as NO_GRAPH, unless it is
            "all".
        prefill_sizes: Token buckets of prefill; None takes a ladder for the device.
        decode_sizes: Batch buckets of decode; None takes 1, 2, 4, every 8 to 128, then every 64. A batch above the largest
            one runs eagerly. `breakgraph tune` finds both ladders from the sizes that a server recorded.
        contexts: Context buckets of decode below ``max_seq_len``, for an attention in plain torch, which pays for
            the context that its graph was made for; None takes powers of four from 256.
        attention: "auto", "torch" or "flashinfer".
        placement: Where the attention of prefills stands: "break" (between the segments of a graph), "captured" (in the
            graph), or "auto", which is captured where that was measured to be faster: FlashInfer's FA3.
        verify: When a graph is compared with eager: "first" (before it may serve), "always" or "never".
        check_addresses: When a graph looks whether weights and buffers are where they were at capture: "first" (before its first
            replay), "always" (at each, 50 us for 300 tensors) or "never". Weights that are replaced, not overwritten, are a
            MovedBufferError then.
        measure: When prefill buckets are timed, so that steps for which padding costs more than an eager step run
            eagerly: "cuda" (on a CUDA device), "always" or "never".
        graph_budget: Most bytes that the graphs of prefill, and those of decode, may take; graphs that do not fit are
            dropped with a reason. None: no limit.
        seed: Of the generator that gives requests their seeds; None takes entropy.

    Raises:
        ConfigError: A value is out of its range or of another type.
    """

    max_batch_size: int = attrs.field(default=8, validator=_at_least(1))
    max_num_tokens: int | None = attrs.field(default=None, validator=_at_least(1, optional=True))
    prefill_burst: int = attrs.field(default=4, validator=_at_least(1))
    max_seq_len: int | None = attrs.field(default=None, validator=_at_least(2, optional=True))
    block_size: int = attrs.field(default=16, validator=_at_least(1))
    num_blocks: int | None = attrs.field(default=None, validator=_at_least(2, optional=True))
    memory_fraction: float = attrs.field(default=0.9, validator=_share)
    graphs: Graphs = attrs.field(default=Graphs.ON, converter=_graphs)
    prefix_reuse: PrefixReuse = attrs.field(default=PrefixReuse.ON, converter=_reuse)
    sampling: SamplingPaths = attrs.field(default=SamplingPaths.BOTH, converter=_paths)
    prefill_sizes: tuple[int, ...] | None = attrs.field(default=None, converter=_sizes, validator=_buckets)
    decode_sizes: tuple[int, ...] | None = attrs.field(
        default=None, converter=_sizes, validator=[_buckets, _some_bucket]
    )
    contexts: tuple[int, ...] | None = attrs.field(default=None, converter=_sizes, validator=_buckets)
    attention: Literal["auto", "torch", "flashinfer"] = attrs.field(default="auto", validator=_attention)
    placement: Placement = attrs.field(default=Placement.AUTO, converter=_placement)
    verify: Verify = attrs.field(default=Verify.FIRST, converter=_verify)
    check_addresses: CheckAddresses = attrs.field(default=CheckAddresses.FIRST, converter=_addresses)
    measure: Measure = attrs.field(default=Measure.CUDA, converter=_measure)
    graph_budget: int | None = attrs.field(
        default=None, validator=_at_least(1, optional=True, why="It is a number of bytes.")
    )
    seed: int | None = attrs.field(
        default=None,
        validator=_at_least(0, optional=True, why="Requests without a seed of their own get theirs from it."),
    )


def engine_config(options: Mapping[str, Any]) -> EngineConfig:
    """Makes a configuration of named options.

    Args:
        options: Fields of ``EngineConfig``.

    Raises:
        ConfigError: There is no such option, or a value is out of its range.
    """
    known = [field.name for field in attrs.fields(EngineConfig)]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ConfigError(
                f"there is no option {name}.",
                why="A misspelt option would be left at its default, silently.",
                fix=f"Did you mean {near[0]}?" if near else f"The options are {', '.join(known)}.",
            )
    return EngineConfig(**options)


@attrs.frozen(kw_only=True)
class Sizes:
    """The numbers that the engine, its cache and its graphs share.

    Attributes:
        max_batch_size: Most requests that run at a time; never more than there are blocks.
        max_num_tokens: Most tokens of a prefill step; never more than the cache holds.
        max_seq_len: Most tokens of prompt and answer.
        block_size: Tokens per block.
        num_blocks: Blocks of the cache, the null block included.
        prefill: Token buckets.
        decode: Batch buckets.
        contexts: Context buckets of decode graphs, ascending; the last is ``max_seq_len``.
    """

    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    block_size: int
    num_blocks: int
    prefill: Buckets
    decode: Buckets
    contexts: tuple[int, ...]

    @property
    def max_blocks(self) -> int:
        """Blocks of the longest request."""
        return blocks_for(self.max_seq_len, block_size=self.block_size)

    @property
    def pads_decode(self) -> bool:
        """Whether some batch size has no decode bucket of its own, so that a padding request is needed."""
        return len(self.decode.sizes) < self.max_batch_size

    @classmethod
    def resolve(
        cls, config: EngineConfig, *, num_blocks: int, max_positions: int, device_type: str, plans: bool
    ) -> Sizes:
        """Works out the sizes.

        Args:
            config: What the caller chose.
            num_blocks: Blocks of the cache, the null block included; at least 2.
            max_positions: What the model has.
            device_type: "cpu" or "cuda".
            plans: Whether the attention plans its work by the real lengths: one context bucket is enough then.

        Raises:
            ConfigError: ``max_seq_len`` or a bucket is out of range.
        """
        max_seq_len = sequence_limit(config, max_positions=max_positions, device_type=device_type)
        tokens = (num_blocks - 1) * config.block_size
        batch = min(config.max_batch_size, num_blocks - 1)
        wanted_tokens = token_limit(config, device_type=device_type)
        max_num_tokens = min(wanted_tokens, tokens, batch * (max_seq_len - 1))
        ladder = config.prefill_sizes
        if ladder is None and device_type == "cpu":
            ladder = _CPU_PREFILL_LADDER
        wanted = () if plans else _TORCH_CONTEXTS if config.contexts is None else config.contexts
        contexts = (*sorted({context for context in wanted if 0 < context < max_seq_len}), max_seq_len)
        return cls(
            max_batch_size=batch,
            max_num_tokens=max_num_tokens,
            max_seq_len=max_seq_len,
            block_size=config.block_size,
            num_blocks=num_blocks,
            prefill=Buckets.prefill(
                max_batch_size=batch, max_seq_len=max_seq_len, max_num_tokens=max_num_tokens, sizes=ladder
            ),
            decode=Buckets.decode(max_batch_size=batch, max_num_tokens=batch, sizes=config.decode_sizes),
            contexts=contexts,
        )


def token_limit(config: EngineConfig, *, device_type: str) -> int:
    """Tokens of a prefill step, before the cache and the batch limit them."""
    return _MAX_NUM_TOKENS[device_type] if config.max_num_tokens is None else config.max_num_tokens


def sequence_limit(config: EngineConfig, *, max_positions: int, device_type: str) -> int:
    """Tokens of prompt and answer that one request may have.

    Raises:
        ConfigError: More than the model has positions.
    """
    if config.max_seq_len is None:
        return max_positions if device_type != "cpu" else min(max_positions, _CPU_MAX_SEQ_LEN)
    if config.max_seq_len > max_positions:
        raise ConfigError(
            f"max_seq_len is {config.max_seq_len}; the model has {max_positions} positions.",
            why="Tokens beyond them would get positions that the model never saw.",
            fix=f"Give max_seq_len of at most {max_positions}, or leave it out.",
        )
    return config.max_seq_len
