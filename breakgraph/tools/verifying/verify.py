"""`verify`: is a replay what eager computes, and if not, where and why not?"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import attrs
import torch

from breakgraph.addresses import plain_tensors
from breakgraph.capture import GraphPool, Saveable
from breakgraph.divergence import Divergence, first_divergence, step_in_words
from breakgraph.errors import ConfigError
from breakgraph.glances import NO_ALLOCATION, PoisonedAllocations
from breakgraph.runner import GraphRunner
from breakgraph.tools.verifying.case import Case, PythonState, plain_attributes
from breakgraph.tools.verifying.diagnose import diagnose
from breakgraph.tools.verifying.forward_runs import ForwardRuns
from breakgraph.tools.verifying.naming import tensor_name
from breakgraph.tools.verifying.report import Verification
from breakgraph.tools.verifying.tape import record
from breakgraph.verification import Compared, Outcome, StateKeeper, difference
from breakgraph.work import Rehearsal

__all__ = ["verify", "verify_key"]

_LOG = logging.getLogger(__name__)


def verify(
    forward: Callable[..., Any],
    *,
    example: Callable[[int], Mapping[str, torch.Tensor]],
    live: Callable[[int], Mapping[str, Any]] | None = None,
    valid_rows: Callable[[int], int | None] | None = None,
    state: Sequence[Any] = (),
    generators: Sequence[torch.Generator] = (),
    modules: Sequence[torch.nn.Module] = (),
    backend: str = "auto",
    rounds: int = 3,
) -> Verification:
    """Capture a forward and compare replays with its eager twin, over the same buffers, with other inputs each time.

    Before each replay what segments computed is filled with NaN, so that it shows when something is read that this replay
    did not write. Where a replay differs, the first segment or break that does is found, and why, by running again:
    eager twice, the replay twice, with the device awaited behind each step, and with notes of every operator.

    Args:
        forward: Called as `forward(**inputs, **live)`; returns tensors.
        example: Round -> inputs by name, all of one shape. Round 0 is captured, the others are compared. What shall change
            between steps besides (weights, attributes), it may change.
        live: Round -> live data by name.
        valid_rows: Round -> real rows; None: every row.
        state: What forward changes and each run must begin with: tensors, or objects with `save()` and `restore(saved)`.
        generators: The caller's own random generators.
        modules: Modules whose parameters, buffers and plain attributes are watched, to name what changed. Where `forward` is a
            module, that one by default.
        backend: `"auto"`, `"cuda"` or `"emulated"`.
        rounds: Steps to compare; the first that differs ends it.

    Returns:
        What was found; `print()` shows it.

    Raises:
        ConfigError: An argument does not fit.
        BaseException: Whatever forward or the capture raised, unchanged.

    Cost: two forwards for the capture, two runs a round; some ten more where something differs.
    """
    _check(rounds)
    _check_arguments(forward, example=example, live=live, valid_rows=valid_rows)
    watched = _checked_modules(modules) or _modules_of(forward)
    pool = GraphPool(backend=backend)
    keeper = StateKeeper(_checked_state(state), generators=generators, device=pool.device)
    python = PythonState(watched)
    try:
        with (
            keeper.generators_kept(),
            ForwardRuns(forward, example=example, live=live, valid_rows=valid_rows) as runs,
        ):
            case = runs.capture(pool=pool, keeper=keeper, generators=generators, modules=watched)
            for number in range(1, rounds + 1):
                runs.begin(number)
                # Rows of padding all write one null slot, in no order.
                compared = Compared.RESULT if runs.padded else Compared.ALL
                found = _compared(attrs.evolve(case, python=PythonState(watched), compared=compared), number)
                if not found.ok:
                    return found
            notes = tuple(_kept(case))
    finally:
        python.restore()
    if runs.repeats:
        notes = ("every round had the inputs of the capture, so what is frozen of them does not show", *notes)
    return Verification(case.graph.name, rounds, notes=notes)


def verify_key(
    runner: GraphRunner[Any], key: Any, *, modules: Sequence[torch.nn.Module] = (), rounds: int = 3
) -> Verification:
    """Compare a published graph of a runner with its eager twin, with new examples: of its key, and of a smaller one, in turn.

    Args:
        runner: The runner.
        key: One of `runner.graphs`.
        modules: Modules whose plain attributes are watched, to name what changed.
        rounds: Examples to compare; the first that differs ends it.

    Returns:
        What was found.

    Raises:
        ConfigError: There is no such graph, or `rounds` is below 1.

    Cost: two runs a round, one more for the first; some ten more where something differs.
    """
    _check(rounds)
    if not isinstance(runner, GraphRunner):
        raise ConfigError(
            f"verify_key() got a {type(runner).__name__}; expected a runner.",
            why="It has the graph, its examples and its state.",
            fix="Pass the PrefillRunner or DecodeRunner; for a forward use verify().",
        )
    modules = _checked_modules(modules)
    with runner.rehearsal(key) as first:
        name = first.graph.name
        at_capture = record(first.eager)
    attributes = plain_attributes(modules)
    for number in range(1, rounds + 1):
        with _rehearsed(runner, key, fewer_rows=number % 2 == 0) as rehearsal:
            padded = rehearsal.rows != rehearsal.graph.padded_rows
            case = Case(
                graph=rehearsal.graph,
                # Rows of padding all write one null slot, in no order.
                compared=Compared.RESULT if padded else Compared.ALL,
                keeper=rehearsal.keeper,
                replay=rehearsal.replay,
                eager=rehearsal.eager,
                at_capture=at_capture,
                attributes=attributes,
                modules=tuple(modules),
                python=PythonState(modules),
                check=runner.check_addresses,
            )
            found = _compared(case, number)
            if not found.ok:
                return found
    return Verification(name, rounds)


def _kept(case: Case) -> Iterator[str]:
    """Tensors of segments that a replay has left in attributes: within a step they are right, behind it they are one buffer."""
    pool = case.graph.pool
    case.outcome_of_replay()
    for tensor in plain_tensors(case.modules):
        if pool is not None and (pool.backend.made_by_a_segment(tensor) or pool.arena.holds(tensor)):
            yield (
                f"{tensor_name(tensor, case.modules)} holds a tensor of {tuple(tensor.shape)} that a segment made: each replay "
                "writes it anew, so what a later step reads there is not this step's; keep a clone"
            )
            return


@contextmanager
def _rehearsed(runner: GraphRunner[Any], key: Any, *, fewer_rows: bool) -> Iterator[Rehearsal]:
    """A full example where one of fewer rows cannot be made, as a runner's own proof leaves that out then."""
    with ExitStack() as stack:
        try:
            rehearsal = stack.enter_context(runner.rehearsal(key, fewer_rows=fewer_rows))
        except Exception as error:
            if not fewer_rows:
                raise
            _LOG.info("%s is verified without padding: example() raised %s: %s", key, type(error).__name__, error)
            rehearsal = stack.enter_context(runner.rehearsal(key))
        yield rehearsal


def _modules_of(forward: Callable[..., Any]) -> tuple[torch.nn.Module, ...]:
    if isinstance(forward, functools.partial):
        held = (forward.func, *forward.args, *forward.keywords.values())
        return tuple(module for item in held for module in _modules_of(item))
    owner = forward if isinstance(forward, torch.nn.Module) else getattr(forward, "__self__", None)
    return (owner,) if isinstance(owner, torch.nn.Module) else ()


def _checked_modules(modules: object) -> tuple[torch.nn.Module, ...]:
    items = None if isinstance(modules, torch.nn.Module) or not isinstance(modules, Iterable) else tuple(modules)
    if items is None or not all(isinstance(item, torch.nn.Module) for item in items):
        raise ConfigError(
            f"modules={type(modules).__name__}; expected a sequence of torch.nn.Module.",
            why="Their attributes and tensors are watched and named.",
            fix="Pass modules=(model,).",
        )
    return items


def _checked_state(state: object) -> tuple[Any, ...]:
    items = None if isinstance(state, torch.Tensor) or not isinstance(state, Iterable) else tuple(state)
    if items is None or not all(isinstance(item, torch.Tensor | Saveable) for item in items):
        raise ConfigError(
            f"state={state!r:.80}; expected a sequence of tensors or of objects with save() and restore(saved).",
            why="Each run begins with it.",
            fix="Pass state=(cache,).",
        )
    return items


def _check_arguments(forward: object, **functions: object) -> None:
    for name, value in {"forward": forward, **functions}.items():
        if not callable(value) and (value is not None or name in ("forward", "example")):
            raise ConfigError(
                f"verify({name}=...) got a {type(value).__name__}; expected a function.",
                why="forward is captured; the others are called with the number of the round.",
                fix=f"Pass {name}=lambda number: ..." if name != "forward" else "Pass the module, or a function.",
            )


def _check(rounds: int) -> None:
    if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1:
        raise ConfigError(
            f"rounds is {rounds!r}; expected a whole number, 1 or more.",
            why="It is the number of steps that are compared.",
            fix="Pass rounds=3.",
        )


def _compared(case: Case, number: int) -> Verification:
    """One step: the replay, poisoned, against its eager twin."""
    found: Divergence | None = None
    try:
        replayed: Outcome | None = case.outcome_of_replay()
    except Exception as error:
        replayed, text = None, f"the replay raised {type(error).__name__} and eager did not: {error}"
    # Zeros where the replay finds poison: both may find the same bits of freed memory otherwise, by chance.
    with PoisonedAllocations(only=NO_ALLOCATION):
        expected = case.outcome_of_eager()
    if replayed is None:
        case = attrs.evolve(case, raises=True)
    else:
        unequal = difference(replayed, expected)
        if unequal is None:
            return Verification(case.graph.name, number)
        text = unequal
        found = first_divergence(
            case.graph, keeper=case.keeper, replay=case.poisoned_replay, eager=case.eager_run, compared=case.compared
        )
    diagnosis = diagnose(case, found, expected=expected)
    step = diagnosis.step if diagnosis.step is not None else None if found is None else found.step
    blamed = "" if step is None else step_in_words(case.graph.steps[step], step)
    kinds = tuple(step.kind for step in case.graph.steps)
    return Verification(case.graph.name, number, found, diagnosis, text, blamed, kinds)
