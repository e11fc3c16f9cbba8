"""Any decoder of transformers behind the surface of ours, with no change to its code.

transformers looks every layer's attention up by a name of the configuration. Here that name leads to `_dispatch`, which
writes the layer's keys and values to our paged cache, hands the queries to the caller's `attend`, and gives the result
back. A name for which no mask function exists makes transformers build no mask: who sees whom is our attention's matter.

Whether a model really goes through that door is not assumed. `adapt` runs it first (`huggingface_probe.py`): a model that
would give other numbers than its own attention is refused with the reason.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import nn

from breakgraph.errors import ConfigError
from breakgraph.models.attention import AttentionVariant, KVLayer, KVShape
from breakgraph.models.decoder import Attend, Decoder
from breakgraph.models.experts import ExpertsChoice
from breakgraph.models.huggingface_breaks import Fit
from breakgraph.swaps import swapped

__all__ = ["ATTENTION", "AdaptedDecoder", "Site", "dispatched"]

ATTENTION = "breakgraph_paged"  # a name with flash, sdpa or flex_attention in it would make transformers build masks

_KNOWN = frozenset(
    {
        "dropout",
        "scaling",
        "sliding_window",
        "softcap",
        "s_aux",
        "is_causal",
        "position_ids",
        "use_cache",
        "cache",
        "past_key_values",
        "cache_position",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "layer_idx",
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "max_length_q",
        "max_length_k",
    }
)


@attrs.frozen(eq=False)
class Site:
    """One call of the attention in a forward; a layer may make several.

    Attributes:
        module: Who calls.
        kv_heads: Key and value heads.
        head_dim: Of queries and keys.
        value_dim: Of values.
        heads: Query heads.
        variant: What it does besides plain attention.
    """

    module: nn.Module
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    variant: AttentionVariant


class _Call(threading.local):
    """What a forward of an adapted decoder is doing, for the function that transformers calls; None outside one."""

    handler: Any = None


_call = _Call()


@contextlib.contextmanager
def dispatched(handler: Any) -> Iterator[None]:
    """Let the attentions of a forward be handled inside a `with` block.

    Args:
        handler: Called as `handler(module, q, k, v, keywords)`, q (1, heads, T, head_dim) as transformers gives it; returns
            (T, heads, value_dim).
    """
    before, _call.handler = _call.handler, handler
    try:
        yield
    finally:
        _call.handler = before


def _dispatch(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls for every attention of a model whose implementation is `ATTENTION`."""
    if _call.handler is None:
        raise ConfigError(
            f"{type(module).__name__} was called outside a step of its adapted decoder.",
            why="Its attention reads and writes a paged cache that only a step names.",
            fix='Call the adapted decoder; or model.set_attn_implementation("sdpa") to use the model by itself.',
        )
    return _call.handler(module, query, key, value, {"mask": attention_mask, **keywords})[None], None


def register() -> None:
    """Make the name known to transformers; again is harmless."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, _dispatch)


def body_of(model: Any) -> Any:
    """The part of a causal model between embeddings and head.

    Args:
        model: The model.
    """
    decoder = model.get_decoder()
    if decoder is not model:
        return decoder
    # Some models call themselves their decoder.
    embeddings = model.get_input_embeddings()
    return next(child for child in model.children() if any(module is embeddings for module in child.modules()))


def unknown_keywords(keywords: dict[str, Any]) -> list[str]:
    """Keyword arguments of an attention call that could change its numbers and that nothing here reads.

    Args:
        keywords: Of the call.
    """
    return sorted(name for name, value in keywords.items() if name not in _KNOWN | {"mask"} and value is not None)


class _Rows(nn.Module):
    """Stands in for the body of a causal model while its head turns rows into logits."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.__dict__["body"] = body  # not a submodule: the model would have it twice
        self.rows: torch.Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["body"], name)

    def forward(self, *_: Any, **__: Any) -> Any:
        """The rows, as the body would return them."""
        return _BodyOutput(self.rows)


class _BodyOutput:
    """What a body returns, for any head: its rows, and None for whatever else some heads ask for.

    Also a mapping of the one thing it has, for wrappers that hand on `**outputs`.
    """

    def __init__(self, rows: torch.Tensor | None) -> None:
        self.last_hidden_state = rows

    def __getattr__(self, name: str) -> None:
        return None

    def keys(self) -> list[str]:
        """Names of what it has."""
        return ["last_hidden_state"]

    def __getitem__(self, index: Any) -> Any:
        return getattr(self, index) if isinstance(index, str) else (self.last_hidden_state,)[index]


def _not_as_probed(what: str) -> ConfigError:
    return ConfigError(
        f"{what}, unlike when the model was probed.",
        why="Each call has a cache and a variant of its own, and who sees whom was found out then.",
        fix="Use a model whose forward does the same at every step; or its own generate().",
    )


class AdaptedDecoder(Decoder):
    """A causal language model of transformers as a decoder of packed rows over a paged cache.

    Args:
        model: The model, with our attention chosen; its body and head are used as they are.
        sites: Its attention calls, in the order of a forward.
        fit: How it is put into graphs.

    Attributes:
        model: As given.
        sites: As given.
        fit: As given.
    """

    def __init__(self, model: Any, *, sites: Sequence[Site], fit: Fit | None = None) -> None:
        super().__init__()
        self.model = model
        self.sites = tuple(sites)
        self.fit = fit or Fit()
        self.breaks = {one.name: one.calls for one in self.fit.breaks}
        self.eager_prefill = self.fit.prefill
        self.eager_decode = self.fit.decode

    def fitted(self, fit: Fit, *, experts: ExpertsChoice | None = None) -> AdaptedDecoder:
        """The same model, put into graphs in another way.

        Args:
            fit: How.
            experts: How its experts are computed, for people.
        """
        other = AdaptedDecoder(self.model, sites=self.sites, fit=fit)
        other.experts = experts
        return other

    @property
    def body(self) -> Any:
        """The part between embeddings and head."""
        return body_of(self.model)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        device: torch.device = next(self.model.parameters()).device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """What the rows are held in."""
        dtype: torch.dtype = self.model.get_input_embeddings().weight.dtype
        return dtype

    @property
    def hidden_size(self) -> int:
        """Width of the rows."""
        return int(self.model.get_input_embeddings().weight.shape[1])

    @property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        """Of each attention call."""
        return tuple(KVShape(site.kv_heads, site.head_dim, site.value_dim) for site in self.sites)

    @property
    def vocab_size(self) -> int:
        """Width of the logits: rows of the output matrix."""
        return int(self.model.get_output_embeddings().weight.shape[0])

    @property
    def heads(self) -> int:
        """Query heads of the first attention call."""
        return self.sites[0].heads

    @property
    def variants(self) -> tuple[AttentionVariant, ...]:
        """Of each attention call."""
        return tuple(site.variant for site in self.sites)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Token ids (T,) to rows (T, H)."""
        rows: torch.Tensor = self.model.get_input_embeddings()(token_ids)
        return rows

    def forward(
        self,
        hidden: torch.Tensor,
        *,
        positions: torch.Tensor,
        slots: torch.Tensor,
        kv: Sequence[KVLayer],
        attend: Attend,
    ) -> torch.Tensor:
        """Run the body over packed rows; see `LlamaDecoder.forward`.

        Args:
            hidden: (T, H), from `embed`.
            positions: int64 (T,).
            slots: int64 (T,), where each row's key and value go.
            kv: One pair of caches for each attention call.
            attend: Attention of one call over the cache just written.

        Returns:
            (T, H), as the body returns it.
        """
        calls = iter(enumerate(self.sites))

        def handle(module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keywords: Any) -> torch.Tensor:
            index, site = next(calls, (-1, None))
            if site is None or site.module is not module:
                raise _not_as_probed(f"attention call {index} came from another layer")
            if keywords["mask"] is not None:
                raise _not_as_probed(f"attention call {index} was given a mask")
            k_cache, v_cache = kv[index]
            k_cache.view(-1, *k_cache.shape[2:]).index_copy_(0, slots, k[0].transpose(0, 1))
            v_cache.view(-1, *v_cache.shape[2:]).index_copy_(0, slots, v[0].transpose(0, 1))
            return attend(index, q[0].transpose(0, 1).contiguous(), k_cache, v_cache)

        with dispatched(handle), self.fit.entered():
            output = self.body(inputs_embeds=hidden[None], position_ids=positions[None], use_cache=False)
        if (left := next(calls, None)) is not None:
            self._check_attention()
            raise _not_as_probed(f"attention call {left[0]} did not come")
        rows: torch.Tensor = output[0]
        return rows[0]

    def _check_attention(self) -> None:
        name = self.model.config.get_text_config()._attn_implementation
        if name != ATTENTION:
            raise ConfigError(
                f"The attention of {type(self.model).__name__} was changed to {name!r} after the model was adapted.",
                why="Its layers no longer go through the paged cache.",
                fix="Call load_transformers(model) again, and use what it returns.",
            )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores of the next token: rows (R, H) after `forward` to float32 (R, vocab_size).

        The model's own forward makes them, over a stand-in for its body, so that what it does behind the head (scales, soft
        caps) is done.
        """
        body = self.body
        path = next(path for path, module in self.model.named_modules() if module is body)
        parent, _, name = path.rpartition(".")
        rows = _Rows(body)
        rows.rows = hidden[None]
        with swapped(self.model.get_submodule(parent), **{name: rows}):
            output = self.model(inputs_embeds=hidden[None], use_cache=False)
        logits: torch.Tensor = output.logits
        return logits[0].float()
