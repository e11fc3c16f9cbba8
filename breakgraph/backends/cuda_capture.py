"""Calls into the CUDA runtime that torch has no name for: nodes of a graph, leaves of a capture, raw launches.

cuda-bindings 12.9 and 13 differ in names and arguments here; which of the two is at hand is decided once, by what it has.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from breakgraph.errors import ConfigError, InternalError

try:
    from cuda.bindings import runtime as cudart
except ImportError as error:  # pragma: no cover - a CPU machine never imports this module
    raise ConfigError(
        f"CUDA graphs need the package cuda-bindings ({error}).",
        why="Nodes of a captured segment are counted and segments are launched through it.",
        fix='Install it: pip install "breakgraph[cuda]".',
    ) from error

__all__ = [
    "bound_launch",
    "captures_with",
    "checked",
    "error_name",
    "fill_bytes",
    "graph_edges",
    "join_leaves",
    "pool_handle_kept",
]

_SUCCESS = cudart.cudaError_t.cudaSuccess
# 13 gave the plain names the meaning of 12.9's _v3 and _v2: both hand out and take edge data.
_capture_info: Any = getattr(cudart, "cudaStreamGetCaptureInfo_v3", cudart.cudaStreamGetCaptureInfo)
_update_dependencies: Any = getattr(
    cudart, "cudaStreamUpdateCaptureDependencies_v2", cudart.cudaStreamUpdateCaptureDependencies
)
_edges: Any = getattr(cudart, "cudaGraphGetEdges_v2", cudart.cudaGraphGetEdges)
_ADD = 0
_CAPTURING = cudart.cudaStreamCaptureStatus.cudaStreamCaptureStatusActive


def checked(result: tuple[Any, ...], *, call: str) -> tuple[Any, ...]:
    """What a call into the runtime returned behind its status.

    Args:
        result: Status first.
        call: Its name.

    Raises:
        InternalError: The status is an error.
    """
    if result[0] != _SUCCESS:
        raise InternalError(f"{call} failed: {result[0].name}")
    return result[1:]


@contextmanager
def pool_handle_kept(handle: Any) -> Iterator[None]:
    """Guard a pool handle across a call into torch that takes it.

    torch 2.11 gives back a reference to the handle's number that it does not own. Small integers are immortal in
    CPython, so nothing shows until a process has made more than 256 pools; then the number is freed while the handle
    still has it, and a later capture crashes. Every reference that a call took too many is put back here.
    """
    number = handle[1]
    spare = [number] * 8
    before = sys.getrefcount(number)
    try:
        yield
    finally:
        for _ in range(before - sys.getrefcount(number)):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(number))
        del spare


def join_leaves(stream: int) -> tuple[int, int]:
    """Join work of a running capture that its stream would not wait for: forks that no hook saw.

    Such work is a leaf of the graph that is no dependency of the stream's next node. Made a dependency, it is joined:
    the capture can end, and a replay waits for it.

    Args:
        stream: Handle of the capturing stream.

    Returns:
        How many leaves were joined, and how many nodes the graph has.
    """
    # status, id, graph, dependencies, edge data, count
    status, _, graph, dependencies, _, _ = checked(_capture_info(stream), call="cudaStreamGetCaptureInfo")
    if status != _CAPTURING:
        return 0, 1  # invalidated; ending the capture says so
    _, count = checked(cudart.cudaGraphGetNodes(graph), call="cudaGraphGetNodes")
    if not count:
        return 0, 0
    nodes, _ = checked(cudart.cudaGraphGetNodes(graph, count), call="cudaGraphGetNodes")
    known = {source for source, _ in graph_edges(graph)} | {int(node) for node in dependencies or ()}
    leaves = [node for node in nodes if int(node) not in known]
    if leaves:
        checked(
            _update_dependencies(stream, leaves, None, len(leaves), _ADD), call="cudaStreamUpdateCaptureDependencies"
        )
    return len(leaves), count


def graph_edges(graph: Any) -> list[tuple[int, int]]:
    """The edges of a graph, as handles of nodes.

    Args:
        graph: A `cudaGraph_t`.
    """
    *_, count = checked(_edges(graph), call="cudaGraphGetEdges")
    if not count:
        return []
    sources, targets, *_ = checked(_edges(graph, count), call="cudaGraphGetEdges")
    return [(int(source), int(target)) for source, target in zip(sources, targets, strict=True)]


def captures_with(stream: int, *, main: int) -> bool:
    """True where a stream takes part in the capture that runs on another.

    Args:
        stream: Handle of the stream.
        main: Handle of the stream whose capture it is.
    """
    results = _capture_info(stream), _capture_info(main)
    # The legacy default stream answers with an error while a capture runs; it cannot take part.
    if any(error != _SUCCESS for error, *_ in results):
        return False
    (_, status, number, *_), (_, _, main_number, *_) = results
    return bool(status == _CAPTURING) and int(number) == int(main_number)


def bound_launch(raw_executable: int, *, stream: int) -> Callable[[], tuple[int]]:
    """A function that launches an executable and returns (status,). Cost on an H200's host: 2-3 us.

    A partial and not a Python function: a frame for each segment would cost a twentieth of the launch.

    Args:
        raw_executable: A `cudaGraphExec_t` as an integer; it must outlive the function.
        stream: Handle of the stream to launch on.
    """
    launch: Callable[[], tuple[int]] = functools.partial(
        cudart.cudaGraphLaunch, cudart.cudaGraphExec_t(raw_executable), cudart.cudaStream_t(stream)
    )
    return launch


def error_name(status: int) -> str:
    """Name of an error code."""
    return str(cudart.cudaError_t(status).name)


def fill_bytes(address: int, nbytes: int) -> None:
    """Fill device memory with 0xFF bytes, on the legacy default stream."""
    checked(cudart.cudaMemset(address, 0xFF, nbytes), call="cudaMemset")
