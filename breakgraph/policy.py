"""How a runner decides: when a graph is verified, when addresses are compared, what happens without a graph."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import attrs
import torch

from breakgraph.capture_window import ProgressReporter
from breakgraph.errors import ConfigError
from breakgraph.gates import Gate
from breakgraph.ranks import RankAgreement
from breakgraph.verification import Tolerance

__all__ = ["CheckAddresses", "Fallback", "Measure", "Policy", "Verify"]


class Verify(enum.Enum):
    """When a graph is compared with eager."""

    FIRST = "first"
    """Once, before it is published."""
    ALWAYS = "always"
    """At every step as well, which then runs forward and its breaks three times: for debugging."""
    NEVER = "never"


class CheckAddresses(enum.Enum):
    """When addresses are compared with those of the capture: static inputs, parameters, buffers, tensors of live data."""

    FIRST = "first"
    """Before the first replay of each graph."""
    ALWAYS = "always"
    """Before every replay: about 0.15 us for each parameter, buffer and submodule."""
    NEVER = "never"


class Fallback(enum.Enum):
    """What happens to a step that cannot use a graph."""

    ALLOW = "allow"
    """It runs eagerly and is counted."""
    ERROR = "error"
    """NoGraphError, for tests."""


class Measure(enum.Enum):
    """When a prefill runner measures from which real size on a bucket's replay is cheaper than an eager step."""

    CUDA = "cuda"
    """On a CUDA device; an emulated replay is no faster than eager, and its times say nothing."""
    ALWAYS = "always"
    NEVER = "never"


E = TypeVar("E", bound=enum.Enum)


def _member(kind: type[E], value: E | str, *, name: str) -> E:
    try:
        return kind(value)
    except ValueError:
        raise ConfigError(
            f"{name}={value!r}; expected one of {[member.value for member in kind]}.",
            why="It decides what the runner does when a graph may not be trusted or used.",
            fix=f"Pass {name}={next(iter(kind)).value!r}, the default.",
        ) from None


def _verify(value: Verify | str) -> Verify:
    return _member(Verify, value, name="verify")


def _check_addresses(value: CheckAddresses | str) -> CheckAddresses:
    return _member(CheckAddresses, value, name="check_addresses")


def _fallback(value: Fallback | str) -> Fallback:
    return _member(Fallback, value, name="fallback")


def _measure(value: Measure | str) -> Measure:
    return _member(Measure, value, name="measure")


def _positive(policy: object, field: attrs.Attribute[int | None], value: object) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ConfigError(
            f"{field.name}={value!r}; expected a number of bytes, 1 or more, or None.",
            why="Graphs that would take more are left out, and their steps run eagerly.",
            fix=f"Pass {field.name}=256 * 2**20 for 256 MiB.",
        )


def _is_agreement(policy: object, field: object, value: Any) -> None:
    if value is not None and not isinstance(value, RankAgreement):
        raise ConfigError(
            f"ranks={type(value).__name__}; expected a RankAgreement or None.",
            why="It is how the ranks of a model stay on one path.",
            fix="Pass ranks=RankAgreement(RankGroup.create()).",
        )


def _are_modules(policy: object, field: object, value: object) -> None:
    items = [value] if isinstance(value, torch.nn.Module) or not isinstance(value, Iterable) else list(value)
    if isinstance(value, torch.nn.Module) or not all(isinstance(item, torch.nn.Module) for item in items):
        raise ConfigError(
            f"modules={type(value).__name__}; expected a sequence of torch.nn.Module.",
            why="Their parameters and buffers are watched for being replaced.",
            fix="Pass modules=(model,).",
        )


@attrs.frozen(kw_only=True)
class Policy:
    """How a runner decides.

    Attributes:
        modules: Modules whose parameters, buffers and submodules are watched.
        gates: The caller's gates.
        override: Names of soft gates to leave out.
        verify: When a graph is compared with eager: "first", "always", "never".
        tolerance: Used only where eager differs from itself.
        check_addresses: When addresses are compared: "first", "always", "never".
        fallback: "allow" or "error".
        progress: Called after each key of each phase of a capture.
        memory_budget: Most bytes of device memory that the graphs may take; None: no limit.
        measure: When the size is measured below which eager is cheaper than padding: "cuda", "always", "never".
        ranks: How the ranks of a model stay on one path; None: there is one.
        enabled: False: every step runs eagerly and nothing is captured.
    """

    modules: Sequence[torch.nn.Module] = attrs.field(default=(), validator=_are_modules)
    gates: Sequence[Gate] = ()
    override: Sequence[str] = ()
    verify: Verify = attrs.field(default=Verify.FIRST, converter=_verify)
    tolerance: Tolerance | None = None
    check_addresses: CheckAddresses = attrs.field(default=CheckAddresses.FIRST, converter=_check_addresses)
    fallback: Fallback = attrs.field(default=Fallback.ALLOW, converter=_fallback)
    progress: ProgressReporter | None = None
    memory_budget: int | None = attrs.field(default=None, validator=_positive)
    measure: Measure = attrs.field(default=Measure.CUDA, converter=_measure)
    ranks: RankAgreement | None = attrs.field(default=None, validator=_is_agreement)
    enabled: bool = True

    def of_all_ranks(self) -> Mapping[str, str]:
        """The options that the ranks of a group must have in common."""
        return {"verify": self.verify.value, "fallback": self.fallback.value, "measure": self.measure.value}
