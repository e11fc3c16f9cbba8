"""Why each kind of finding matters, and what to do about it."""

from __future__ import annotations

from breakgraph.tools.linting.report import Kind

__all__ = [
    "AT_FIRST_ONLY",
    "DEFAULT_GENERATOR",
    "FIXES",
    "GUARD",
    "IDEMPOTENT",
    "OWN_GENERATOR",
    "PRINTED",
    "UNREADABLE",
    "WHYS",
]

_FROZEN = "A replay runs no Python: what was decided at capture holds for every replay."

WHYS: dict[Kind, str] = {
    Kind.HOST_SYNC: "The host waits for the device or hands data to it, which no graph can hold: the capture fails.",
    Kind.DATA_DEPENDENT_SHAPE: "The shape of the result depends on values, and a graph has one shape: the capture fails.",
    Kind.HOST_BRANCH: _FROZEN,
    Kind.HOST_DATA: "The number is baked into the graph: every replay computes with that of the capture.",
    Kind.HOST_CODE: "A replay runs no Python, so this happens once, at capture, and never again.",
    Kind.ATTRIBUTE: "A replay runs no Python, so the state stays as the capture left it.",
    Kind.KEPT_TENSOR: "Its memory belongs to the graph: each replay overwrites it, and that of another graph may as well.",
    Kind.WORKSPACE: "Memory that a capture allocates belongs to that graph, and other graphs of the pool use it again.",
    Kind.RANDOM: "A replay runs no Python, so it uses the numbers of the capture for ever.",
    Kind.AUTOCAST: "Its casts are captured, and its cache of casts is off during a capture.",
}
FIXES: dict[Kind, str] = {
    Kind.HOST_SYNC: "Do it in a function marked with @eager_on_graph, or compute on the device.",
    Kind.DATA_DEPENDENT_SHAPE: "Do it in a function marked with @eager_on_graph, or use a mask of fixed shape (torch.where).",
    Kind.HOST_BRANCH: "Branch in a function marked with @eager_on_graph, or on the device (torch.where).",
    Kind.HOST_DATA: "Pass it as live data to a function marked with @eager_on_graph, or as a tensor. Where it never changes for "
    "one graph, bind it: functools.partial(forward, name=value).",
    Kind.HOST_CODE: "Do it in a function marked with @eager_on_graph, or outside of the forward.",
    Kind.ATTRIBUTE: "Keep it in a tensor that is updated in place, or write it outside of the forward or in a "
    "function marked with @eager_on_graph.",
    Kind.KEPT_TENSOR: "Return it, or copy it into a tensor that was made before: self.last.copy_(value).",
    Kind.WORKSPACE: "Allocate it before the capture, at its largest size, in __init__ for example.",
    Kind.RANDOM: "Draw on the device, or in a function marked with @eager_on_graph.",
    Kind.AUTOCAST: "Nothing to do; eager steps need the same autocast, so leave it inside the forward.",
}
DEFAULT_GENERATOR = (
    "The default generator of the device is registered with every capture, so replays draw new numbers.",
    "Nothing to do; a seed per request needs numbers that are computed from the seed.",
)
OWN_GENERATOR = (
    "A graph draws new numbers only from generators that it knows.",
    "Name it at the capture: BreakableCUDAGraphCapture(graph, generators=(generator,)).",
)
GUARD = (
    "The check is made at capture and not at replays.",
    "Check it before the replay, where it must hold for every step.",
)
PRINTED = ("It is printed at capture and not at replays.", "Nothing to do, where that is meant.")
IDEMPOTENT = (
    "Both runs left the value it had before, so replays miss nothing here.",
    "Nothing to do, unless other inputs write another value.",
)
UNREADABLE = (
    "What it holds cannot be read from outside, so it is not known whether a replay misses something: it runs no Python.",
    "Keep it in a tensor that is updated in place, or write it in a function marked with @eager_on_graph.",
)
AT_FIRST_ONLY = "Only the first of two calls did it: a call before the capture may be enough."
