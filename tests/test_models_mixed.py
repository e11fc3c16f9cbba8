"""Decode rows and prompt rows in one step, through a prefill graph."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
import torch

from breakgraph.buckets import Buckets
from breakgraph.errors import LiveDataError
from breakgraph.graph_key import PrefillKey
from breakgraph.models.attention import BatchLayout, make_attention
from breakgraph.models.attention_mixed import MixedBatch, mixed_attention, plan_mixed
from breakgraph.models.config import DecoderConfig
from breakgraph.models.weights import random_model
from breakgraph.prefill_runner import Example, PrefillRunner
from breakgraph.replay_context import eager_step
from breakgraph.serving.kv_cache import slots_of
from breakgraph.static_buffers import TOKENS, Pad, StaticInput
from breakgraph.testing import assert_same_bits

BLOCK, WIDTH, BLOCKS = 4, 8, 80
CONFIG = DecoderConfig(
    model_type="llama",
    vocab_size=64,
    hidden_size=256,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    max_positions=512,
)


@attrs.frozen(eq=False)
class Step:
    """A mixed step: decode rows first. Each request is (tokens in the cache before, tokens of the step, blocks)."""

    requests: list[tuple[int, int, list[int]]]
    decoding: int

    @property
    def rows(self) -> int:
        """Real rows."""
        return sum(count for _, count, _ in self.requests)


class Rig:
    """A decoder whose attention is mixed, in a prefill runner of two buckets."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        dtype = torch.float32
        self.decoder = random_model(CONFIG, device=device, dtype=dtype, seed=3).decoder
        self.attention = make_attention(
            num_heads=4, num_kv_heads=2, head_dim=64, block_size=BLOCK, dtype=dtype, device=device
        )
        self.random = np.random.default_rng(5)
        shape = (BLOCKS, BLOCK, 2, 64)
        self.layers = [(torch.zeros(shape, device=device), torch.zeros(shape, device=device)) for _ in range(2)]
        self.runner = PrefillRunner(
            self.forward,
            inputs=[
                StaticInput("hidden", shape=(TOKENS, CONFIG.hidden_size), dtype=dtype),
                StaticInput("positions", shape=(TOKENS,)),
                StaticInput("slots", shape=(TOKENS,), pad=Pad.keep_out(0)),
            ],
            buckets=Buckets.of((8, 24)),
            example=self.example,
            device=device,
            state=[cache for layer in self.layers for cache in layer],
            modules=(self.decoder,),
            expect_breaks={"attention": 2},
            measure="never",
        )
        with self.runner.capture_window():
            self.runner.capture()
        assert not self.runner.dropped

    def forward(
        self, hidden: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, batch: MixedBatch
    ) -> torch.Tensor:
        """Hidden states in and out."""

        def attend(layer: int, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(q)
            mixed_attention(self.attention, q, k_cache, v_cache, out, batch)
            return out

        result: torch.Tensor = self.decoder(hidden, positions=positions, slots=slots, kv=self.layers, attend=attend)
        return result

    def step(self, rows: int) -> Step:
        """A random step of so many rows: some of one token over a context, then prompts, fresh or continued."""
        decoding = int(self.random.integers(0, rows, endpoint=True))
        free = list(self.random.permutation(np.arange(1, BLOCKS)))
        requests = []
        left = rows
        while left:
            decode = len(requests) < decoding
            count = 1 if decode else int(self.random.integers(1, left, endpoint=True))
            before = int(self.random.integers(0, 7)) + (1 if decode else 0)
            blocks = [int(free.pop()) for _ in range(-(-(before + count) // BLOCK))]
            requests.append((before, count, blocks))
            left -= count
        return Step(requests, decoding)

    def plan(self, step: Step) -> dict[str, object]:
        """Its live data."""
        decode, prompts = step.requests[: step.decoding], step.requests[step.decoding :]
        tables = np.zeros((len(decode), WIDTH), dtype=np.int32)
        for row, (_, _, blocks) in enumerate(decode):
            tables[row, : len(blocks)] = blocks
        layout = None
        if prompts:
            layout = BatchLayout(
                np.array([count for _, count, _ in prompts], dtype=np.int32),
                np.array([before for before, _, _ in prompts], dtype=np.int32),
                [np.array(blocks, dtype=np.int32) for _, _, blocks in prompts],
            )
        lengths = np.array([before + 1 for before, _, _ in decode], dtype=np.int32)
        return {"batch": plan_mixed(self.attention, block_tables=tables, seq_lens=lengths, prompts=layout)}

    def inputs(self, step: Step) -> dict[str, torch.Tensor]:
        """Random hidden states, and where the rows go."""
        positions = [np.arange(before, before + count, dtype=np.int64) for before, count, _ in step.requests]
        slots = [
            slots_of(blocks, start=before, count=count, block_size=BLOCK) for before, count, blocks in step.requests
        ]
        generator = torch.Generator().manual_seed(int(self.random.integers(1 << 30)))
        return {
            "hidden": torch.randn(step.rows, CONFIG.hidden_size, generator=generator),
            "positions": torch.from_numpy(np.concatenate(positions)),
            "slots": torch.from_numpy(np.concatenate(slots)),
        }

    def example(self, key: PrefillKey) -> Example:
        """A full bucket."""
        step = self.step(key.tokens)
        return Example(self.inputs(step), self.plan(step))

    def eager(self, inputs: dict[str, torch.Tensor], live: dict[str, object], *, padded: int) -> torch.Tensor:
        """The padded eager twin, real rows only."""
        rows = len(inputs["positions"])
        full = {
            name: torch.zeros((padded, *tensor.shape[1:]), dtype=tensor.dtype, device=self.device)
            for name, tensor in inputs.items()
        }
        for name, tensor in inputs.items():
            full[name][:rows] = tensor
        with torch.no_grad(), eager_step(live, valid_rows=rows, padded_rows=padded):
            return self.forward(**full, **live)[:rows]  # type: ignore[arg-type]


def test_mixed_steps_replay_and_equal_one_request_at_a_time(device: torch.device) -> None:
    """REQ-H2: decode rows first, then prompts, in one replay: the twin's bits, and nearly the rows of each request alone."""
    rig = Rig(device)
    caches = [cache for layer in rig.layers for cache in layer]
    kinds = set()
    for rows in (1, 2, 5, 8, 9, 17, 24, 24, 13, 6):
        step = rig.step(rows)
        kinds.add((step.decoding > 0, step.decoding < len(step.requests)))
        for cache in caches:
            cache.copy_(torch.randn(cache.shape, generator=torch.Generator().manual_seed(rows)))
        before = [cache.clone() for cache in caches]
        inputs, live = rig.inputs(step), rig.plan(step)
        result = rig.runner.run(inputs, size=rows, live=live)
        assert result.replayed
        output = result.output.clone()
        written = [cache.clone() for cache in caches]
        for cache, old in zip(caches, before, strict=True):
            cache.copy_(old)
        assert result.key is not None
        assert_same_bits(output, expected=rig.eager(inputs, live, padded=result.key.tokens))
        for cache, want in zip(caches, written, strict=True):
            assert torch.equal(cache[1:], want[1:])
        start = 0
        for before_, count, blocks in step.requests:
            alone = Step([(before_, count, blocks)], 0)
            for cache, old in zip(caches, before, strict=True):
                cache.copy_(old)
            part = {name: tensor[start : start + count] for name, tensor in inputs.items()}
            expected = rig.eager(part, rig.plan(alone), padded=count)
            torch.testing.assert_close(output[start : start + count], expected, rtol=1e-4, atol=1e-4)
            start += count
    assert (True, True) in kinds, "no step had both kinds of rows"


def test_a_batch_of_other_rows_is_refused(device: torch.device) -> None:
    """The plan of another step does not fit: the message says both counts."""
    rig = Rig(device)
    step = rig.step(6)
    with pytest.raises(LiveDataError, match="received 6 rows; its batch describes 5"):
        rig.runner.run(rig.inputs(step), size=6, live=rig.plan(rig.step(5)))
