"""Breakable CUDA graphs: record a forward as graph segments with eager breaks between them, and replay it.

Names are imported on first use, so that `breakgraph --help` and a wrong option do not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from breakgraph.break_function import break_graph, eager_on_graph
    from breakgraph.buckets import Buckets
    from breakgraph.capture import BreakableCUDAGraph, BreakableCUDAGraphCapture, GraphPool
    from breakgraph.decode_runner import DecodeRunner
    from breakgraph.graph_key import GraphKey
    from breakgraph.prefill_runner import PrefillRunner
    from breakgraph.replay_context import current_replay, eager_step
    from breakgraph.static_buffers import StaticInput
    from breakgraph.swaps import swapped

__all__ = [
    "BreakableCUDAGraph",
    "BreakableCUDAGraphCapture",
    "Buckets",
    "DecodeRunner",
    "GraphKey",
    "GraphPool",
    "PrefillRunner",
    "StaticInput",
    "break_graph",
    "current_replay",
    "eager_on_graph",
    "eager_step",
    "swapped",
]

_HOME = {
    "BreakableCUDAGraph": "capture",
    "BreakableCUDAGraphCapture": "capture",
    "Buckets": "buckets",
    "DecodeRunner": "decode_runner",
    "GraphKey": "graph_key",
    "GraphPool": "capture",
    "PrefillRunner": "prefill_runner",
    "StaticInput": "static_buffers",
    "break_graph": "break_function",
    "current_replay": "replay_context",
    "eager_on_graph": "break_function",
    "eager_step": "replay_context",
    "swapped": "swaps",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'breakgraph' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"breakgraph.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
