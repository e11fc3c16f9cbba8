"""What `/metrics` shows, for Prometheus: what requests saw, and what the engine counted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from breakgraph.server.answers import Answer
from breakgraph.serving.engine import Engine
from breakgraph.serving.statistics import Load, Statistics

__all__ = ["EngineSnapshot", "Metrics", "snapshot"]

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_BETWEEN = (0.0005, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


@attrs.frozen(kw_only=True)
class EngineSnapshot:
    """The engine's numbers at one moment, taken between two of its steps.

    Attributes:
        statistics: What it did since the start.
        load: What it has to do now.
    """

    statistics: Statistics
    load: Load


def snapshot(engine: Engine) -> EngineSnapshot:
    """Takes the numbers; to be called in the engine's thread.

    Args:
        engine: The engine.
    """
    return EngineSnapshot(statistics=engine.statistics(), load=engine.load())


class Metrics:
    """Counters and histograms of one server; a registry of their own, so that two servers can live in one process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "breakgraph_requests",
            "HTTP requests for answers, by endpoint and outcome: an HTTP status, or disconnect.",
            ("endpoint", "outcome"),
            registry=self._registry,
        )
        self._first = self._histogram("time_to_first_token", "From submission to the first token.", _SECONDS)
        self._between = self._histogram("time_between_tokens", "Between two tokens of an answer.", _BETWEEN)
        self._queue = self._histogram("queue", "From submission to the first step of the prompt.", _SECONDS)
        self._whole = self._histogram("answer", "From submission to the last token.", _SECONDS)
        self._prompt = Counter("breakgraph_prompt_tokens", "Tokens of answered prompts.", registry=self._registry)
        self._completion = Counter("breakgraph_completion_tokens", "Tokens handed to clients.", registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"breakgraph_{name}_seconds", text, buckets=buckets, registry=self._registry)

    def between_tokens(self, seconds: float) -> None:
        """Notes the time between two tokens.

        Args:
            seconds: Of one answer.
        """
        self._between.observe(seconds)

    def answered(self, answer: Answer) -> None:
        """Notes an answer that has come to its end, or was left by its client.

        Args:
            answer: It gets no more tokens.
        """
        times = answer.times
        self._completion.inc(answer.completion_tokens)
        if times.first is None or times.last is None:
            return
        self._prompt.inc(answer.prompt_tokens)
        self._first.observe(times.first - times.submitted)
        self._queue.observe(times.queued)
        self._whole.observe(times.last - times.submitted)

    def request(self, endpoint: str, *, outcome: str) -> None:
        """Counts an HTTP request.

        Args:
            endpoint: Its path.
            outcome: The status, or "disconnect".
        """
        self._requests.labels(endpoint, outcome).inc()

    def text(self, engine: EngineSnapshot) -> bytes:
        """Everything in Prometheus' text format.

        Args:
            engine: The engine's numbers.
        """
        own = CollectorRegistry()
        own.register(_EngineCollector(engine))
        return generate_latest(self._registry) + generate_latest(own)


class _EngineCollector(Collector):
    def __init__(self, engine: EngineSnapshot) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """The engine's numbers as metrics."""
        statistics, load = self._engine.statistics, self._engine.load
        phases = {"prefill": statistics.prefill, "decode": statistics.decode}
        labelled: tuple[tuple[str, str, str, Mapping[str, float]], ...] = (
            ("steps", "Steps launched.", "phase", {name: phase.steps for name, phase in phases.items()}),
            ("graph_replays", "Steps that replayed.", "phase", {name: phase.replays for name, phase in phases.items()}),
            (
                "step_tokens",
                "Tokens that steps computed.",
                "phase",
                {name: phase.tokens for name, phase in phases.items()},
            ),
            ("eager_steps", "Steps that ran eagerly.", "reason", statistics.eager),
            ("step_seconds", "Host time of steps.", "part", statistics.parts),
            ("real_rows", "Real rows of replays.", "phase", {name: rows[0] for name, rows in statistics.rows.items()}),
            (
                "replayed_rows",
                "All rows of replays.",
                "phase",
                {name: rows[1] for name, rows in statistics.rows.items()},
            ),
        )
        for name, text, label, values in labelled:
            yield _family(CounterMetricFamily, name, text, label, values)
        waste = "Share of replayed rows that was padding."
        yield _family(GaugeMetricFamily, "padding_waste", waste, "phase", statistics.padding_waste)
        counters = (
            ("preemptions", "Times that a request lost its blocks and started again.", statistics.preemptions),
            ("cached_tokens", "Prompt tokens taken from the cache.", statistics.cached_tokens),
            ("discarded_tokens", "Tokens made for requests that had ended a step before.", statistics.discarded_tokens),
            ("failed_steps", "Steps that raised.", statistics.failed_steps),
            ("tail_steps", "Steps with penalties, bias or log-probabilities.", statistics.tail_steps),
        )
        for name, text, count in counters:
            yield CounterMetricFamily(f"breakgraph_{name}", text, value=count)
        gauges: tuple[tuple[str, str, float], ...] = (
            ("requests_running", "Requests that hold blocks.", load.running),
            ("requests_waiting", "Requests that wait for blocks or rows.", load.waiting),
            ("kv_blocks_used", "Blocks of the KV cache that requests hold.", load.used_blocks),
            ("kv_blocks_usable", "Blocks of the KV cache that requests can hold.", load.usable_blocks),
            ("kv_usage", "The first by the second, 0 to 1.", load.used_blocks / max(load.usable_blocks, 1)),
            ("graphs", "Graphs that may serve.", statistics.graphs),
        )
        for name, text, number in gauges:
            yield GaugeMetricFamily(f"breakgraph_{name}", text, value=number)


def _family(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    name: str,
    text: str,
    label: str,
    values: Mapping[str, float],
) -> Metric:
    family = kind(f"breakgraph_{name}", text, labels=[label])
    for value, count in values.items():
        family.add_metric([value], count)
    return family
