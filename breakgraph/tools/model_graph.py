"""One graph of a model, captured for a look at it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import attrs

from breakgraph.capture import BreakableCUDAGraph
from breakgraph.errors import CaptureError, ConfigError
from breakgraph.models.via import Via
from breakgraph.runner import GraphRunner
from breakgraph.serving import LLM
from breakgraph.serving.llm import Progress
from breakgraph.tools.verifying.report import Verification
from breakgraph.tools.verifying.verify import verify_key
from breakgraph.work import Rehearsal

__all__ = ["ModelGraph"]


@attrs.frozen(kw_only=True)
class ModelGraph:
    """Which graph of which model.

    Attributes:
        model: A Hugging Face folder, a GGUF file, or `demo`.
        tokens: Rows of a prefill; None for a decode.
        batch: Requests of a decode; None for a prefill.
        via: Whose code runs it.
        device: `auto`, `cpu` or `cuda`.
        dtype: Of the weights; None: bfloat16 on CUDA, else float32.
        placement: `break`, `captured` or `auto`: where the attention of a prefill stands.
        verify: `first` or `never`: whether the graph is proven before.
    """

    model: str = "demo"
    tokens: int | None = None
    batch: int | None = None
    via: Via = Via.AUTO
    device: str = "auto"
    dtype: str | None = None
    placement: str = "auto"
    verify: str = "never"

    def __attrs_post_init__(self) -> None:
        if (self.tokens is None) is (self.batch is None):
            raise ConfigError(
                f"tokens={self.tokens} and batch={self.batch}; expected one of the two.",
                why="A prefill graph has rows of tokens, a decode graph one row a request.",
                fix="Give tokens=128 for a prefill, batch=8 for a decode.",
            )
        size, name = (self.tokens, "tokens") if self.batch is None else (self.batch, "batch")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(
                f"{name} is {size!r}; expected a whole number, 1 or more.",
                why="It is the size of the graph that is captured.",
                fix=f"Pass {name}=128." if self.batch is None else f"Pass {name}=8.",
            )

    def capture(self, *, progress: Progress | None = None) -> CapturedModelGraph:
        """Load the model and capture its graphs, one bucket of prefill.

        Args:
            progress: Called as `progress(stage, done, total)`.

        Raises:
            ConfigError: The model or an option does not fit.
            CaptureError: The graph was dropped, or this model's code runs eagerly.
        """
        tokens = self.tokens or 16
        llm = LLM(
            self.model,
            via=self.via,
            device=self.device,
            dtype=self.dtype,
            progress=progress,
            max_batch_size=self.batch or 1,
            max_num_tokens=tokens,
            max_seq_len=tokens + 64,
            prefill_sizes=(tokens,),
            placement=self.placement,
            verify=self.verify,
            measure="never",
            sampling="greedy",
        )
        engine = llm.engine
        runner: GraphRunner[Any] = engine.prefill.runner if self.batch is None else engine.decode.runner
        keys = sorted(runner.graphs, key=lambda key: str(key))
        wanted = keys if self.batch is None else [key for key in keys if key.batch_size == engine.sizes.decode.largest]
        if not wanted:
            reasons = "; ".join(sorted(set(runner.dropped.values()))) or llm.model.served
            raise CaptureError(
                f"{self.model} has no graph of this size: {reasons}.",
                why="Only a captured graph can be looked at.",
                fix="See the reason; breakgraph models lists how each family is served.",
            )
        return CapturedModelGraph(llm, runner, wanted[-1])


@attrs.frozen(eq=False)
class CapturedModelGraph:
    """A captured graph of a model.

    Attributes:
        llm: Holds the model and its engine.
        runner: Whose graph it is.
        key: Its key.
    """

    llm: LLM
    runner: GraphRunner[Any]
    key: Hashable

    @property
    def graph(self) -> BreakableCUDAGraph:
        """The graph."""
        graphs: Mapping[Any, BreakableCUDAGraph] = self.runner.graphs
        return graphs[self.key]

    def verify(self, *, rounds: int) -> Verification:
        """See `verify_key`.

        Args:
            rounds: Examples to compare.
        """
        return verify_key(self.runner, self.key, modules=(self.llm.engine.state.decoder,), rounds=rounds)

    def rehearsal(self) -> AbstractContextManager[Rehearsal]:
        """See `GraphRunner.rehearsal`."""
        return self.runner.rehearsal(self.key)
