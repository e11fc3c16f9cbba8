"""The runs of a forward that `lint` judges by: as it is, as it is again, and with stand-ins for its host data."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Sequence
from typing import Any

import attrs
import torch

from breakgraph.errors import add_note
from breakgraph.tools.linting.stand_ins import StandIns
from breakgraph.tools.linting.state import Changes, KeptTensor
from breakgraph.tools.linting.trace import Tracer
from breakgraph.tools.linting.watch import HostNames, Sighting, Watch

__all__ = ["Run", "run"]


@attrs.frozen(eq=False)
class Run:
    """What one run showed.

    Attributes:
        sightings: What was seen, and how often.
        changes: What Python state was written.
        kept: The tensors that are alive afterwards.
        host_names: Variables that held host data where it was used, by (path, function).
        unread: What ran and could not be judged, and why.
    """

    sightings: Counter[Sighting]
    changes: Changes
    kept: list[KeptTensor]
    host_names: dict[tuple[str, str], HostNames]
    unread: set[str]


def run(
    forward: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    device: torch.device,
    stand_ins: StandIns | None = None,
) -> Run:
    """Runs a forward once, under watch and without gradients.

    Args:
        forward: The forward.
        args: Its inputs.
        kwargs: Its keyword inputs.
        device: Where the work is.
        stand_ins: What made the inputs, where they hold stand-ins.

    Raises:
        BaseException: Whatever the forward raised, unchanged, with a note; what it had written is put back.
    """
    changes = Changes(inputs=(*args, *kwargs.values()))
    watch = Watch(device=device, stand_ins=stand_ins)
    tracer = Tracer(watch, changes=changes)
    try:
        with torch.no_grad(), changes.noting(), watch.watching(), tracer.tracing():
            result = forward(*args, **kwargs)
    except BaseException as error:
        changes.undo()
        add_note(error, "raised in the forward that breakgraph's lint ran")
        raise
    if isinstance(result, Generator | Coroutine | AsyncGenerator):
        tracer.unread.add(f"the body of the forward: it returned a {type(result).__name__}, which nobody ran")
    if isinstance(result, Coroutine):
        result.close()
    del result
    torch.clear_autocast_cache()  # it holds casts for as long as an autocast around this is in force
    changes.settle()
    return Run(watch.sightings, changes, watch.made.alive(), watch.host_names, tracer.unread)
