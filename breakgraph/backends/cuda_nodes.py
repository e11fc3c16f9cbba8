"""What a captured CUDA graph holds, node by node: names for people, and each node as a graph of its own for debugging."""

from __future__ import annotations

import functools
import heapq
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from cuda.bindings import driver
from cuda.bindings import runtime as cudart

from breakgraph.backends.base import Piece
from breakgraph.backends.cuda_capture import checked, graph_edges

__all__ = ["node_names", "single_nodes"]

_KERNEL = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
_TYPES = "CU_GRAPH_NODE_TYPE_"


def node_names(raw_graph: int) -> Mapping[str, int]:
    """How often each kernel occurs in a graph, by the driver's name, demangled; other nodes by their type.

    Args:
        raw_graph: A `cudaGraph_t` as an integer.

    Returns:
        Name -> count, in the order of first use.
    """
    return Counter(_name(node) for node in _in_order(cudart.cudaGraph_t(raw_graph)))


def single_nodes(raw_graph: int, *, stream: Callable[[], int]) -> tuple[Piece, ...]:
    """Each node of a graph as an executable of its own, in an order that its edges allow.

    A clone of the graph whose other nodes are destroyed keeps what belongs to the node: arguments, attributes, cluster
    sizes. To launch the kernel anew from its parameters was rejected: copies, fills and attributes would each be a case.

    Args:
        raw_graph: A `cudaGraph_t` as an integer; it must outlive the pieces.
        stream: Gives the handle of the stream to launch on.
    """
    graph = cudart.cudaGraph_t(raw_graph)
    nodes = _in_order(graph)
    return tuple(Piece(_name(node), _Single.of(graph, nodes, kept=i, stream=stream)) for i, node in enumerate(nodes))


class _Single:
    """An executable of one node; it is destroyed with this object."""

    def __init__(self, executable: Any, *, stream: Callable[[], int]) -> None:
        self._executable = executable
        self._stream = stream
        weakref.finalize(self, cudart.cudaGraphExecDestroy, executable)

    @classmethod
    def of(cls, graph: Any, nodes: list[Any], *, kept: int, stream: Callable[[], int]) -> _Single:
        (clone,) = checked(cudart.cudaGraphClone(graph), call="cudaGraphClone")
        try:
            for index, node in enumerate(nodes):
                if index != kept:
                    found = checked(cudart.cudaGraphNodeFindInClone(node, clone), call="cudaGraphNodeFindInClone")
                    checked(cudart.cudaGraphDestroyNode(*found), call="cudaGraphDestroyNode")
            (executable,) = checked(cudart.cudaGraphInstantiate(clone, 0), call="cudaGraphInstantiate")
        finally:
            cudart.cudaGraphDestroy(clone)
        return cls(executable, stream=stream)

    def __call__(self) -> None:
        stream = cudart.cudaStream_t(self._stream())
        checked(cudart.cudaGraphLaunch(self._executable, stream), call="cudaGraphLaunch")


def _in_order(graph: Any) -> list[Any]:
    """Nodes in an order that the edges allow, as near to that of the capture as the driver tells it."""
    _, count = checked(cudart.cudaGraphGetNodes(graph), call="cudaGraphGetNodes")
    if not count:
        return []
    nodes, _ = checked(cudart.cudaGraphGetNodes(graph, count), call="cudaGraphGetNodes")
    place = {int(node): index for index, node in enumerate(nodes)}
    behind: dict[int, list[int]] = defaultdict(list)
    awaited = [0] * len(nodes)
    for source, target in graph_edges(graph):
        behind[place[source]].append(place[target])
        awaited[place[target]] += 1
    ready = [index for index, number in enumerate(awaited) if not number]
    ordered: list[Any] = []
    while ready:
        index = heapq.heappop(ready)
        ordered.append(nodes[index])
        for follower in behind[index]:
            awaited[follower] -= 1
            if not awaited[follower]:
                heapq.heappush(ready, follower)
    return ordered


def _name(node: Any) -> str:
    handle = driver.CUgraphNode(int(node))
    status, kind = driver.cuGraphNodeGetType(handle)
    if status != driver.CUresult.CUDA_SUCCESS:
        return "unknown"
    if kind != _KERNEL:
        return str(kind.name).removeprefix(_TYPES).lower()
    status, parameters = driver.cuGraphKernelNodeGetParams(handle)
    if status != driver.CUresult.CUDA_SUCCESS:
        return "kernel"
    function, kernel = int(parameters.func), int(parameters.kern)
    if function:
        status, name = driver.cuFuncGetName(parameters.func)
    elif kernel:
        status, name = driver.cuKernelGetName(parameters.kern)
    else:
        return "kernel"
    if status != driver.CUresult.CUDA_SUCCESS or not name:
        return "kernel"
    return _demangled(name.decode() if isinstance(name, bytes) else str(name))


@functools.lru_cache(maxsize=4096)
def _demangled(name: str) -> str:
    return str(torch._C._demangle(name))
