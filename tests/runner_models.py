"""Small synthetic models for the tests of the runners."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import nn

from breakgraph.break_function import eager_on_graph
from breakgraph.buckets import Buckets
from breakgraph.decode_runner import DecodeRunner
from breakgraph.graph_key import GraphKey, PrefillKey, num_tokens
from breakgraph.prefill_runner import Example, PrefillRunner
from breakgraph.replay_context import current_replay, eager_step
from breakgraph.static_buffers import REQUESTS, TOKENS, Pad, StaticInput

WIDTH = 8
SLOTS = 64


@attrs.define
class Meta:
    """Live data of a prefill step: a factor, and the real rows of each request."""

    factor: float
    lengths: list[int]


class PrefillModel(nn.Module):
    """Matmul, cache write, a break that mixes the real rows of each request, matmul."""

    def __init__(self, device: torch.device, *, breaks: bool = True) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.up = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator).to(device), requires_grad=False)
        self.down = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator).to(device), requires_grad=False)
        self.register_buffer("bias", torch.randn(WIDTH, generator=generator).to(device))
        self.cache = torch.zeros(SLOTS, WIDTH, device=device)
        self.breaks = breaks
        self.seen: list[tuple[int | None, int | None, int]] = []

    def forward(self, x: torch.Tensor, slots: torch.Tensor, meta: Meta) -> torch.Tensor:
        """Rows (tokens, WIDTH) to rows (tokens, WIDTH)."""
        hidden = x @ self.up + self.bias
        self.cache.index_copy_(0, slots, hidden)
        out = torch.empty_like(hidden)
        (self.attend if self.breaks else self.mix)(hidden, out, meta)
        return (out + hidden) @ self.down

    @eager_on_graph(name="attend", live=("meta",), rows=("hidden", "out"), writes=("out",))
    def attend(self, hidden: torch.Tensor, out: torch.Tensor, meta: Meta) -> None:
        """The step that depends on host data."""
        context = current_replay()
        self.seen.append((context.valid_rows, context.padded_rows, len(hidden)))
        self.mix(hidden, out, meta)

    def mix(self, hidden: torch.Tensor, out: torch.Tensor, meta: Meta) -> None:
        """Running mean inside each request, times the factor."""
        start = 0
        for length in meta.lengths:
            rows = hidden[start : start + length]
            out[start : start + length] = rows.cumsum(0) * meta.factor
            start += length


class PrefillRig:
    """A prefill model, its runner, and eager runs to compare with."""

    def __init__(
        self,
        device: torch.device,
        *,
        sizes: tuple[int, ...] = (4, 8, 16),
        model: PrefillModel | None = None,
        **options: Any,
    ) -> None:
        self.device = device
        self.model = PrefillModel(device) if model is None else model
        self.random = torch.Generator().manual_seed(1)
        self.examples: list[PrefillKey] = []
        self.inputs = [
            StaticInput("x", shape=(TOKENS, WIDTH), dtype=torch.float32),
            StaticInput("slots", shape=(TOKENS,), pad=Pad.keep_out(0)),
        ]
        options = {
            "state": (self.model.cache,),
            "modules": (self.model,),
            "expect_breaks": {"attend": 1},
            "measure": "never",  # a model this small is timed for nothing, and takes examples for it
            **options,
        }
        self.runner = PrefillRunner(
            options.pop("forward", self.model),
            inputs=options.pop("inputs", self.inputs),
            buckets=Buckets.of(sizes),
            example=options.pop("example", self.example),
            device=device,
            **options,
        )

    def capture(self) -> None:
        """Capture everything, in a window."""
        with self.runner.capture_window():
            self.runner.capture()

    def example(self, key: PrefillKey) -> Example:
        """Random rows of one request."""
        self.examples.append(key)
        inputs, live = self.step(key.tokens)
        return Example(inputs, live)

    def step(self, size: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Random inputs on the host and live data, for two requests where there is room."""
        lengths = [size] if size < 2 else [size // 2, size - size // 2]
        factor = float(torch.rand((), generator=self.random))
        inputs = {
            "x": torch.randn(size, WIDTH, generator=self.random),
            "slots": torch.randperm(SLOTS - 1, generator=self.random)[:size] + 1,
        }
        return inputs, {"meta": Meta(factor, lengths)}

    def eager(self, forward: Any, inputs: Mapping[str, torch.Tensor], live: Mapping[str, Any]) -> torch.Tensor:
        """What a forward returns without a graph, nothing padded; the cache is put back."""
        cache = self.model.cache.clone()
        with torch.no_grad(), eager_step(live):
            result: torch.Tensor = forward(**inputs, **live)
        self.model.cache.copy_(cache)
        return result

    def twin(self, inputs: Mapping[str, torch.Tensor], live: Mapping[str, Any], *, padded: int) -> torch.Tensor:
        """The eager result at the padded shape, real rows only; the cache is put back."""
        size = len(inputs["slots"])
        x = torch.zeros(padded, WIDTH, device=self.device)
        slots = torch.zeros(padded, dtype=torch.int64, device=self.device)
        x[:size] = inputs["x"].to(self.device)
        slots[:size] = inputs["slots"].to(self.device)
        saved = self.model.cache.clone()
        with torch.no_grad(), eager_step(live, valid_rows=size, padded_rows=padded):
            result = self.model(x, slots, **live)
        self.model.cache.copy_(saved)
        return result[:size]


class DecodeRig:
    """A decode step over a device-fed token table: next token = hash of token, position and a weight."""

    def __init__(self, device: torch.device, *, sizes: tuple[int, ...] = (1, 2, 4, 8), **options: Any) -> None:
        self.device = device
        self.last_token = torch.zeros(SLOTS, dtype=torch.int64, device=device)
        self.weight = torch.tensor(31, device=device)
        self.random = torch.Generator().manual_seed(2)
        inputs = [
            StaticInput("last_token", source="device", buffer=self.last_token),
            StaticInput("rows", shape=(REQUESTS,), pad=Pad.keep_out(0)),
            StaticInput("positions", shape=(TOKENS,), dtype=torch.int32),
        ]
        self.runner = DecodeRunner(
            options.pop("forward", self.forward),
            inputs=options.pop("inputs", inputs),
            buckets=Buckets.of(sizes),
            example=options.pop("example", self.example),
            device=device,
            **options,
        )

    def capture(self) -> None:
        """Capture everything, in a window."""
        with self.runner.capture_window():
            self.runner.capture()

    def forward(self, last_token: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """One token for each request, written back to the table."""
        tokens = last_token.index_select(0, rows)
        for part in positions.view(len(rows), -1).unbind(1):
            tokens = (tokens * self.weight + part + 7) % 1009
        last_token.index_copy_(0, rows, tokens)
        return tokens

    def example(self, key: GraphKey) -> Example:
        """Random rows and positions for the whole padded batch."""
        rows = torch.randperm(SLOTS - 1, generator=self.random)[: key.batch_size] + 1
        positions = torch.randint(0, 99, (num_tokens(key),), generator=self.random, dtype=torch.int32)
        return Example({"rows": rows, "positions": positions})

    @staticmethod
    def reference(token: int, positions: list[int]) -> int:
        """The step in plain Python."""
        for position in positions:
            token = (token * 31 + position + 7) % 1009
        return token
