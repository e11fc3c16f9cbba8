"""Names that people import: a change here is a change of the public surface and must be meant."""

from __future__ import annotations

import breakgraph


def test_public_names_are_pinned() -> None:
    """The package exports exactly these names."""
    assert sorted(breakgraph.__all__) == [
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
    for name in breakgraph.__all__:
        assert getattr(breakgraph, name).__doc__
