"""Where the attention of a prefill step stands: between the segments of its graph, or in the graph.

As a *break* it takes any batch; its plan is live data. *Captured* it reads a plan in fixed places, one for each bucket, made
before each replay; a step without a graph runs the same attention as an ordinary function.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping
from typing import Any

import attrs
import torch

from breakgraph.errors import ConfigError, InternalError
from breakgraph.graph_key import PrefillKey
from breakgraph.models.attention import Attention, BatchLayout, Placement, PrefillState
from breakgraph.models.decoder import Attend, Decoder
from breakgraph.serving.config import Sizes

__all__ = ["MOST_CAPTURED_REQUESTS", "CapturedAttention", "PrefillLive", "break_attend", "captured_attend", "choose"]

MOST_CAPTURED_REQUESTS = 64
"""Requests of a step with captured attention: each may end in a tile of its own, and the graph has room for all of them."""

_LOG = logging.getLogger(__name__)


def choose(attention: Attention, *, wanted: Placement) -> Placement:
    """Decide where the attention of prefills stands.

    Args:
        attention: The attention.
        wanted: What the caller asks for.

    Returns:
        A break, or captured.

    Raises:
        ConfigError: It is to be captured, and cannot be.
    """
    if wanted is Placement.BREAK:
        return wanted
    if wanted is Placement.AUTO and attention.best_placement is Placement.BREAK:
        return Placement.BREAK
    reason = attention.no_capture()
    if reason is None:
        return Placement.CAPTURED
    if wanted is Placement.CAPTURED:
        raise ConfigError(
            f"placement is 'captured', and the attention of prefills cannot be captured: {reason}.",
            why="It was asked for by name, and a break between all layers costs time.",
            fix="Leave placement out, or give 'break'.",
        )
    _LOG.info("attention of prefills in breaks: %s", reason)
    return Placement.BREAK


@attrs.define(eq=False)
class PrefillLive:
    """Live data of a step with captured attention. The graph needs none of it; planning does, and so does an eager run.

    Attributes:
        layout: Rows and pages of each request.
        state: What the graph has baked in, planned for this step; None in a step without a graph.
        batch: The plan of a step without a graph.
    """

    layout: BatchLayout
    state: PrefillState | None = None
    batch: object = None


class CapturedAttention:
    """The plans of prefills with captured attention: one state for each bucket.

    Planned in `prepare`, while the device is busy with the step before. A step that is prepared before that one was launched
    overwrites its plan, which is then made again at the launch.

    Args:
        attention: The attention.
        sizes: The engine's sizes.
    """

    def __init__(self, attention: Attention, *, sizes: Sizes) -> None:
        self._attention, self._sizes = attention, sizes
        self._states: dict[int, PrefillState] = {}

    def plan(self, key: PrefillKey, live: Mapping[str, Any], rows: int) -> None:
        """Plan a step for the rows that it computes: the bucket's, or the real ones of an eager step.

        Args:
            key: Of the step.
            live: With a `PrefillLive` under "batch".
            rows: Rows that are computed.
        """
        step: PrefillLive = live["batch"]
        step.state = self._state(rows) if len(step.layout.query_lens) <= MOST_CAPTURED_REQUESTS else None
        if step.state is None:
            step.batch = self._attention.plan_prefill(step.layout)
        else:
            _plan(self._attention, step, step.state)

    def check(self, key: Hashable, live: Mapping[str, object]) -> str | None:
        """Gate of the runner: why a step cannot use a graph.

        Args:
            key: Of the step.
            live: With a `PrefillLive` under "batch".
        """
        step = live["batch"]
        assert isinstance(step, PrefillLive)
        requests = len(step.layout.query_lens)
        if requests <= MOST_CAPTURED_REQUESTS:
            return None
        return f"{requests} requests; a graph with captured attention takes {MOST_CAPTURED_REQUESTS}"

    def hold(self, key: PrefillKey, live: Mapping[str, Any]) -> None:
        """Hook of the runner, before each replay: the bucket's plan is that of this step.

        Args:
            key: Of the graph.
            live: With a planned `PrefillLive` under "batch".
        """
        _hold(self._attention, live["batch"])

    def _state(self, rows: int) -> PrefillState | None:
        if rows not in self._sizes.prefill.sizes:
            return None
        state = self._states.get(rows)
        if state is None:
            state = self._states[rows] = self._attention.prefill_state(
                rows=rows, requests=min(rows, MOST_CAPTURED_REQUESTS), max_context=self._sizes.max_seq_len
            )
        return state


def _plan(attention: Attention, step: PrefillLive, state: PrefillState) -> None:
    state.planned_for = None  # if planning raises, it is nobody's
    attention.plan_captured(state, step.layout)
    state.planned_for = step


def _hold(attention: Attention, step: PrefillLive) -> None:
    if step.state is not None and step.state.planned_for is not step:
        _plan(attention, step, step.state)


def break_attend(attention: Attention, decoder: Decoder, batch: object) -> Attend:
    """The attention of a step, each call a break.

    Args:
        attention: The attention.
        decoder: The model, for its variants.
        batch: What `plan_prefill` returned.
    """

    def attend(call: int, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        out = q.new_empty(*q.shape[:2], v_cache.shape[-1])
        attention.prefill(q, k_cache, v_cache, out, batch, decoder.variants[call])
        return out

    return attend


def captured_attend(attention: Attention, decoder: Decoder, step: PrefillLive) -> Attend:
    """The attention of a step, device work only where it has a state.

    Args:
        attention: The attention.
        decoder: The model, for its variants.
        step: Planned.
    """
    if step.state is None and step.batch is None:
        raise InternalError("a prefill step ran that was not planned.")
    _hold(attention, step)  # of a capture it is: nothing is planned between

    def attend(call: int, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        variant = decoder.variants[call]
        if step.state is not None:
            return attention.prefill_captured(q, k_cache, v_cache, step.state, variant)
        out = q.new_empty(*q.shape[:2], v_cache.shape[-1])
        attention.attend(q, k_cache, v_cache, out, step.batch, variant)
        return out

    return attend
