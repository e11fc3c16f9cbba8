"""What an engine did: steps by kind and path, tokens, seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Protocol

import attrs

from breakgraph.capture import BreakableCUDAGraph
from breakgraph.models.via import Served
from breakgraph.serving.logits_tail import needs_logits
from breakgraph.serving.scheduler import DecodeBatch, PrefillBatch
from breakgraph.serving.step_records import Laps, StepRecords
from breakgraph.statistics import RunnerStatistics

__all__ = ["Counters", "Phase", "Statistics", "collect"]


@attrs.define
class Phase:
    """Prefill or decode.

    Attributes:
        steps: Steps launched.
        replays: Those that replayed a graph.
        tokens: Tokens that the steps computed: recomputed prompts and thrown-away tokens included. The first token
            of each answer comes from prefill, the others from decode.
        seconds: Time the host spent launching them and waiting for them.
    """

    steps: int = 0
    replays: int = 0
    tokens: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens by seconds; 0 before the first step."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def summary(self, name: str) -> str:
        """A few words for people."""
        return (
            f"{name} {_count(self.tokens, 'token')} in {_count(self.steps, 'step')}"
            f" ({self.tokens_per_second:.1f} tok/s)"
        )


@attrs.define
class Counters:
    """What the engine itself counts.

    Attributes:
        prefill: Prefill steps.
        decode: Decode steps.
        prompt_tokens: Tokens of all prompts.
        generated_tokens: Tokens that went to a caller.
        discarded_tokens: Tokens made for requests that had ended one step before.
        tail_steps: Steps of both kinds in which a request asked for penalties, a bias or log-probabilities.
        capture_seconds: Spent capturing.
        failed_steps: Steps that raised.
        records: Where the host was in each step.
    """

    prefill: Phase = attrs.field(factory=Phase)
    decode: Phase = attrs.field(factory=Phase)
    prompt_tokens: int = 0
    generated_tokens: int = 0
    discarded_tokens: int = 0
    tail_steps: int = 0
    capture_seconds: float = 0.0
    failed_steps: int = 0
    records: StepRecords = attrs.field(factory=StepRecords)

    def launched(self, batch: PrefillBatch | DecodeBatch, *, seconds: float) -> None:
        """Counts a launched step and the host time of its launch; on a CPU that is all of its work."""
        phase = self._phase(batch)
        phase.steps += 1
        phase.tokens += batch.num_tokens
        phase.seconds += seconds
        self.tail_steps += needs_logits(batch.sampled)

    def waited(self, batch: PrefillBatch | DecodeBatch, *, seconds: float) -> None:
        """Adds the time that the host waited for a step."""
        self._phase(batch).seconds += seconds

    def read(self, batch: PrefillBatch | DecodeBatch, laps: Laps) -> None:
        """Notes where the host was in a step whose tokens have been handed out."""
        phase = "prefill" if isinstance(batch, PrefillBatch) else "decode"
        self.records.add(laps, phase=phase, requests=len(batch.requests), tokens=batch.num_tokens)

    def _phase(self, batch: PrefillBatch | DecodeBatch) -> Phase:
        return self.prefill if isinstance(batch, PrefillBatch) else self.decode


@attrs.frozen(kw_only=True)
class Load:
    """What an engine has to do at one moment.

    Attributes:
        running: Requests that hold blocks.
        waiting: Requests that wait for blocks or rows.
        used_blocks: Blocks that requests hold.
        usable_blocks: Blocks that requests can hold together.
    """

    running: int
    waiting: int
    used_blocks: int
    usable_blocks: int


@attrs.frozen(kw_only=True)
class Statistics:
    """What an engine did since its start.

    Attributes:
        prefill: Prefill steps.
        decode: Decode steps.
        eager: Steps that ran eagerly, by reason.
        segments: Graph launches of all replays.
        breaks: Break functions run in all replays.
        graphs: Graphs that were captured and may serve.
        dropped: Graphs that were not published, by name, and why.
        prompt_tokens: Tokens of all prompts.
        cached_tokens: Those of them that were in the cache when their request was first admitted, and were not computed.
        generated_tokens: Tokens that went to a caller.
        discarded_tokens: Tokens made for requests that had ended one step before.
        preemptions: Times that a request lost its blocks and started again.
        capture_seconds: Spent capturing.
        tail_steps: Steps of both kinds in which a request asked for penalties, a bias or log-probabilities.
        failed_steps: Steps that raised; their requests ended with the exception.
        parts: Seconds of all steps that were read, by part: schedule, prepare, launch, wait, process.
        rows: By phase, the real rows of all replays and all their rows, padding included.
        sizes: By phase, steps by their real size, replays and eager ones: tokens of prefill steps, requests of decode steps.
            `write_sizes` makes a file of it, from which `breakgraph tune` finds better buckets.
        served: Whose code ran the model, and why; None for an engine without an `LLM`, which knows only a decoder.
    """

    prefill: Phase
    decode: Phase
    eager: dict[str, int]
    segments: int
    breaks: int
    graphs: int
    dropped: dict[str, str]
    prompt_tokens: int
    cached_tokens: int = 0
    generated_tokens: int
    discarded_tokens: int
    preemptions: int
    capture_seconds: float
    tail_steps: int = 0
    failed_steps: int = 0
    parts: dict[str, float] = attrs.field(factory=dict)
    rows: dict[str, tuple[int, int]] = attrs.field(factory=dict)
    sizes: dict[str, dict[int, int]] = attrs.field(factory=dict)
    served: Served | None = None

    @property
    def prefill_replays(self) -> int:
        """Prefill steps that replayed a graph."""
        return self.prefill.replays

    @property
    def decode_replays(self) -> int:
        """Decode steps that replayed a graph."""
        return self.decode.replays

    @property
    def padding_waste(self) -> dict[str, float]:
        """By phase, the share of replayed rows that were padding, 0 to 1."""
        return {phase: 1.0 - real / padded if padded else 0.0 for phase, (real, padded) in self.rows.items()}

    @property
    def eager_steps(self) -> int:
        """Steps that ran eagerly, whatever the reason."""
        return sum(self.eager.values())

    def as_dict(self) -> dict[str, Any]:
        """Everything as values that JSON has, on one level: ``prefill_replays``, ``decode_steps`` and so on."""
        values = attrs.asdict(self)
        served: dict[str, Any] = {}
        del values["served"]
        if self.served is not None:
            served = {"model_type": self.served.model_type, "served_via": str(self.served.via)}
            served["served_reason"] = self.served.reason
        phases: dict[str, Any] = {}
        for name, phase in (("prefill", self.prefill), ("decode", self.decode)):
            del values[name]
            phases |= {f"{name}_{field}": value for field, value in attrs.asdict(phase).items()}
            phases[f"{name}_tokens_per_second"] = phase.tokens_per_second
            phases[f"{name}_real_rows"], phases[f"{name}_padded_rows"] = self.rows.get(name, (0, 0))
            phases[f"{name}_sizes"] = {str(size): count for size, count in sorted(self.sizes.get(name, {}).items())}
        del values["rows"], values["sizes"]
        return phases | values | served

    def summary(self) -> str:
        """One line for people, with the numbers of ``as_dict``."""
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.eager.items()))
        dropped = f"; {_count(len(self.dropped), 'graph')} dropped" if self.dropped else ""
        cached = f"; {_count(self.cached_tokens, 'prompt token')} from the cache" if self.cached_tokens else ""
        served = "" if self.served is None else f"{self.served}; "
        return (
            f"{served}{_count(self.generated_tokens, 'token')} generated; {self.prefill.summary('prefill')},"
            f" {self.decode.summary('decode')};"
            f" {_count(self.prefill_replays + self.decode_replays, 'graph replay')}"
            f" ({self.prefill_replays} prefill, {self.decode_replays} decode),"
            f" {self.eager_steps} eager{f' ({reasons})' if reasons else ''};"
            f" {_count(self.segments, 'segment')}, {_count(self.breaks, 'break')}{dropped}{cached}"
        )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


class CountedRunner(Protocol):
    """What is read of a runner."""

    @property
    def statistics(self) -> RunnerStatistics:
        """Its counters."""
        ...

    @property
    def graphs(self) -> Mapping[Any, BreakableCUDAGraph]:
        """Its graphs by key."""
        ...

    @property
    def dropped(self) -> Mapping[Any, str]:
        """Why keys have no graph."""
        ...


def collect(
    counters: Counters, *, prefill: CountedRunner, decode: CountedRunner, preemptions: int, cached_tokens: int
) -> Statistics:
    """Joins the engine's counters with those of its runners.

    Args:
        counters: The engine's.
        prefill: The prefill runner.
        decode: The decode runner.
        preemptions: The scheduler's count.
        cached_tokens: That of the prefix cache.
    """
    eager: Counter[str] = Counter()
    segments = breaks = 0
    dropped: dict[str, str] = {}
    for name, runner in (("prefill", prefill), ("decode", decode)):
        eager.update(runner.statistics.eager)
        graphs = runner.graphs
        for key, replays in runner.statistics.replays_by_key.items():
            # With verify="always" a graph may have been dropped since; what it did is not known any more.
            if key in graphs:
                size = graphs[key].stats()
                segments += replays * size.segments
                breaks += replays * size.breaks
        dropped.update({f"{name} {key}": reason for key, reason in runner.dropped.items()})
    return Statistics(
        prefill=attrs.evolve(counters.prefill, replays=prefill.statistics.replays),
        decode=attrs.evolve(counters.decode, replays=decode.statistics.replays),
        eager=dict(eager),
        segments=segments,
        breaks=breaks,
        graphs=len(prefill.graphs) + len(decode.graphs),
        dropped=dropped,
        prompt_tokens=counters.prompt_tokens,
        cached_tokens=cached_tokens,
        generated_tokens=counters.generated_tokens,
        discarded_tokens=counters.discarded_tokens,
        preemptions=preemptions,
        capture_seconds=counters.capture_seconds,
        tail_steps=counters.tail_steps,
        failed_steps=counters.failed_steps,
        parts=dict(counters.records.totals),
        rows={
            name: (runner.statistics.real_rows, runner.statistics.padded_rows)
            for name, runner in (("prefill", prefill), ("decode", decode))
        },
        sizes={"prefill": dict(prefill.statistics.sizes), "decode": dict(decode.statistics.sizes)},
    )
