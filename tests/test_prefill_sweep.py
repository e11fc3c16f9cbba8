"""The engine's prefill step at every real size: its eager twins, the bytes of the cache, and poisoned memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import numpy as np
import pytest
import torch

from benchmarks.shapes import SHAPES
from breakgraph.graph_key import PrefillKey
from breakgraph.models.attention import BatchLayout, Placement
from breakgraph.models.config import DecoderConfig
from breakgraph.models.weights import random_model
from breakgraph.replay_context import eager_step
from breakgraph.serving.config import EngineConfig
from breakgraph.serving.kv_cache import NULL_BLOCK, blocks_for, slots_of
from breakgraph.serving.prefill_step import prefill_body
from breakgraph.serving.startup import build_engine
from breakgraph.statistics import Reason
from breakgraph.step import Result

BLOCK = 16
MOST_REQUESTS = 8
SPARE_BLOCKS = 4
SWEEP_END = 64  # every size up to here, then some
RANDOM_SIZES = 40
POISONED_BATCHES = 200
_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


@attrs.frozen
class Case:
    """A model, where it runs, and what is expected of it.

    Attributes:
        config: Its shape.
        device: "cpu" or "cuda".
        dtype: Of weights, hidden states and cache.
        buckets: Token buckets, ascending.
        longest_prefix: Most tokens that a chunked request has in the cache.
        tolerance: Largest error of a row against unpadded eager, relative to the row's norm. In bfloat16 another tiling
            of a product is another rounding, and layers of random weights amplify it: on a CPU, decoders of these depths
            and an eighth of the width differ from float32 by 0.025 (1B) and 0.064 (8B). What mixes rows is off by about 1.
        placement: Where the attention stands.
    """

    config: DecoderConfig
    device: str
    dtype: torch.dtype
    buckets: tuple[int, ...]
    longest_prefix: int
    tolerance: float
    placement: Placement = Placement.BREAK


TWO_LAYERS = DecoderConfig(
    model_type="llama",
    vocab_size=1024,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_positions=512,
)
_ON_CPU = {"device": "cpu", "dtype": torch.float32, "buckets": (16, 64), "longest_prefix": 24, "tolerance": 1e-4}
_ON_CUDA = {"device": "cuda", "dtype": torch.bfloat16, "buckets": (16, 64, 256, 1024), "longest_prefix": 300}
_SMALL_VOCABULARY = attrs.evolve(SHAPES["135M"], vocab_size=1024)
CASES = {
    "two layers": Case(config=TWO_LAYERS, **_ON_CPU),
    "135M": Case(config=_SMALL_VOCABULARY, **_ON_CPU),
    "1B": Case(config=SHAPES["1B"], tolerance=0.06, **_ON_CUDA),
    "8B": Case(config=SHAPES["8B"], tolerance=0.15, **_ON_CUDA),
}
CASES |= {
    f"{name}, captured": attrs.evolve(CASES[name], placement=Placement.CAPTURED) for name in ("two layers", "1B", "8B")
}


@attrs.frozen(eq=False)
class Batch:
    """A prefill step to be run.

    Attributes:
        size: Real tokens.
        layout: Rows, context and blocks of each request.
        ids: int64 ``(size,)``, on the host.
        positions: ``(size,)``, on the host.
        slots: ``(size,)``, on the host: where the keys and values of the step go.
    """

    size: int
    layout: BatchLayout
    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor

    def __str__(self) -> str:
        lens, contexts = self.layout.query_lens.tolist(), self.layout.context_lens.tolist()
        return f"{self.size} tokens (rows {lens} behind {contexts})"


class Rig:
    """The prefill step of an engine with random weights, all buckets captured, and a cache full of random numbers."""

    def __init__(self, case: Case) -> None:
        self.case = case
        largest = case.buckets[-1]
        model = random_model(case.config, device=case.device, dtype=case.dtype, seed=1)
        needed = blocks_for(MOST_REQUESTS * case.longest_prefix + largest, block_size=BLOCK) + MOST_REQUESTS
        config = EngineConfig(
            max_batch_size=MOST_REQUESTS,
            max_num_tokens=largest,
            max_seq_len=case.longest_prefix + largest + 1,
            block_size=BLOCK,
            num_blocks=1 + needed + SPARE_BLOCKS,
            prefill_sizes=case.buckets,
            placement=case.placement,
        )
        engine = build_engine(model, config=config)
        self._prefill = engine.prefill
        self.runner = engine.prefill.runner
        self.state = engine.state
        self.num_blocks = engine.sizes.num_blocks
        self.random = np.random.default_rng(7)
        self._generator = torch.Generator(device=self.device).manual_seed(7)
        self._body = prefill_body(self.state, layers=self.state.cache.layers, placement=case.placement)
        engine.prefill.capture()
        assert self.runner.dropped == {}
        # On CUDA a size far below its bucket is served eagerly where that was measured to be cheaper. Here the graphs
        # are what is tested, at every size.
        self.runner._least_size.clear()
        for cache in self._caches:
            cache.copy_(self._randn(*cache.shape))

    @property
    def device(self) -> torch.device:
        """Of model and cache."""
        return self.state.device

    @property
    def _caches(self) -> list[torch.Tensor]:
        """Keys and values of all layers, seen as ``(slots, heads, head_dim)``."""
        return [cache.flatten(0, 1) for layer in self.state.cache.layers for cache in layer]

    def _randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator, device=self.device).to(self.case.dtype)

    def bucket(self, size: int) -> int:
        """The smallest bucket that holds ``size`` tokens."""
        return min(bucket for bucket in self.case.buckets if bucket >= size)

    def batch(self, size: int) -> Batch:
        """A random batch of ``size`` tokens, its prefixes in the cache, its own slots full of NaN."""
        random, longest = self.random, self.case.longest_prefix
        requests = min(size, int(random.integers(1, MOST_REQUESTS, endpoint=True)))
        cuts = np.sort(random.choice(np.arange(1, size), size=requests - 1, replace=False)) if requests > 1 else []
        counts = np.diff([0, *cuts, size])
        contexts = random.integers(1, longest, endpoint=True, size=requests) * (random.random(requests) < 0.5)
        free = (1 + random.permutation(self.num_blocks - 1)).astype(np.int32).tolist()
        tables = [
            np.array([free.pop() for _ in range(blocks_for(int(length), block_size=BLOCK))], dtype=np.int32)
            for length in counts + contexts
        ]
        chunked = [index for index in range(requests) if contexts[index]]
        if chunked:
            prefix = self._batch(contexts[chunked], np.zeros(len(chunked)), [tables[index] for index in chunked])
            self._fill_prefix(prefix)
        batch = self._batch(counts, contexts, tables)
        self.forget(batch)
        return batch

    def _batch(self, counts: Sequence[int], contexts: Sequence[int], tables: list[np.ndarray]) -> Batch:
        layout = BatchLayout(np.array(counts, dtype=np.int32), np.array(contexts, dtype=np.int32), tables)
        rows = list(zip(layout.context_lens.tolist(), layout.query_lens.tolist(), tables, strict=True))
        slots = [slots_of(table.tolist(), start=start, count=count, block_size=BLOCK) for start, count, table in rows]
        positions = [np.arange(start, start + count, dtype=np.int64) for start, count, _ in rows]
        return Batch(
            layout.rows,
            layout,
            torch.from_numpy(self.random.integers(self.case.config.vocab_size, size=layout.rows)),
            torch.from_numpy(np.concatenate(positions)),
            torch.from_numpy(np.concatenate(slots)),
        )

    def _fill_prefix(self, prefix: Batch) -> None:
        """Put the keys and values of a prefix into the cache: now and then by a step of the runner, else at random."""
        if self.random.random() < 0.125:
            self.step(prefix, self.plan(prefix))
            return
        slots = prefix.slots.to(self.device)
        for cache in self._caches:
            cache.index_copy_(0, slots, self._randn(prefix.size, *cache.shape[1:]))

    def forget(self, batch: Batch) -> None:
        """Fill the slots that a batch writes with NaN: what it reads there it must have written."""
        slots = batch.slots.to(self.device)
        for cache in self._caches:
            cache.index_fill_(0, slots, float("nan"))

    def cache_bits(self) -> torch.Tensor:
        """A copy of all keys and values as integers, ``(tensors, slots, numbers of a slot)``."""
        return torch.stack([cache.flatten(1).view(_BITS[self.case.dtype]) for cache in self._caches])

    def plan(self, batch: Batch) -> dict[str, object]:
        """Live data of a batch. In a break one plan may be run several times; captured, each `step` makes one."""
        return dict(self._prefill.live(batch.layout))

    def _inputs(self, batch: Batch) -> dict[str, torch.Tensor]:
        return {"ids": batch.ids, "positions": batch.positions, "slots": batch.slots}

    def step(self, batch: Batch, live: dict[str, object]) -> Result[PrefillKey]:
        """Through the runner; the result is the caller's own."""
        prepared = self.runner.prepare(self._inputs(batch), size=batch.size, live=live)
        return self.runner.launch(prepared, copy=True)

    def unpadded(self, batch: Batch, live: dict[str, object]) -> torch.Tensor:
        """Eager, at the real shape."""
        with self.runner.suspend():
            result = self.step(batch, live)
        assert result.reason is Reason.DISABLED
        return result.output  # type: ignore[no-any-return]

    def suspended(self, batch: Batch, live: dict[str, object]) -> torch.Tensor:
        """Eager, at the padded shape, over the runner's own static buffers: a step suspended after it was prepared."""
        prepared = self.runner.prepare(self._inputs(batch), size=batch.size, live=live)
        with self.runner.suspend():
            result = self.runner.launch(prepared)
        assert result.reason is Reason.DISABLED
        return result.output  # type: ignore[no-any-return]

    def twin(self, batch: Batch, live: dict[str, object]) -> torch.Tensor:
        """Eager, at the padded shape, over tensors that are padded here: nothing of the runner is used."""
        padded, size = self.bucket(batch.size), batch.size
        ids = torch.zeros(padded, dtype=torch.int64, device=self.device)
        positions = torch.zeros(padded, dtype=torch.int64, device=self.device)
        slots = torch.full((padded,), NULL_BLOCK * BLOCK, dtype=torch.int64, device=self.device)
        ids[:size], positions[:size], slots[:size] = batch.ids, batch.positions, batch.slots
        with torch.no_grad(), eager_step(live, valid_rows=size, padded_rows=padded):
            return self._body(ids=ids, positions=positions, slots=slots, **live)[:size]

    def poison(self, size: int) -> None:
        """Overwrite whatever a replay may have left: pool, static inputs, staging slots, results, the null block."""
        builder = self.runner._graphs.builder
        captured = self.runner._graphs.captured[PrefillKey(self.bucket(size))]
        builder.pool.backend.poison()
        builder.stage.arena.fill_(0xFF)  # NaN in every floating dtype
        for buffer in builder.stage.buffers(captured.target.layout).values():
            if not buffer.is_floating_point():
                buffer.fill_(-12345)
        for slot in builder.stage._slots:
            slot.bytes.fill_(0xFF)
        assert builder._outputs._arena is not None
        builder._outputs._arena.fill_(0xFF)
        # Captured attention in plain torch weighs tokens of the null block with zero, so what is there must be finite.
        gathers = self.case.placement is Placement.CAPTURED and self.state.attention.kind == "torch"
        for cache in self._caches:
            cache[NULL_BLOCK * BLOCK : (NULL_BLOCK + 1) * BLOCK].fill_(1e4 if gathers else float("nan"))


@pytest.fixture(scope="module")
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """The engine of a case, made once for all its tests."""
    with torch.no_grad():
        yield Rig(CASES[request.param])
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # the next case may be the 8B shape


def _cases(*names: str) -> pytest.MarkDecorator:
    marks = {name: [pytest.mark.gpu] if CASES[name].device == "cuda" else [] for name in names}
    return pytest.mark.parametrize("rig", [pytest.param(name, marks=marks[name]) for name in names], indirect=True)


def _sizes(rig: Rig) -> list[int]:
    """All sizes up to 64, then those at the edges of larger buckets and 40 at random."""
    largest = rig.case.buckets[-1]
    if largest <= SWEEP_END:
        return list(range(1, largest + 1))
    edges = {size for bucket in rig.case.buckets for size in (bucket, bucket + 1) if SWEEP_END < size <= largest}
    drawn = rig.random.choice(np.arange(SWEEP_END + 1, largest + 1), size=RANDOM_SIZES, replace=False)
    return [*range(1, SWEEP_END + 1), *sorted(edges | set(drawn.tolist()))]


def _real_slots(bits: torch.Tensor) -> torch.Tensor:
    """The cache without its null block."""
    return bits[:, (NULL_BLOCK + 1) * BLOCK :]


def _assert_only_written(before: torch.Tensor, after: torch.Tensor, batch: Batch) -> None:
    """FAULT-P2: of the cache, the slots of the batch have changed, all of them, and else the null block at most."""
    changed = set((before != after).any(dim=2).any(dim=0).nonzero().flatten().tolist())
    null = set(range(NULL_BLOCK * BLOCK, (NULL_BLOCK + 1) * BLOCK))
    written = set(batch.slots.tolist())
    assert len(written) == batch.size
    assert not changed - written - null, f"{batch}: slots {sorted(changed - written - null)} are not its own"
    assert not written - changed, f"{batch}: slots {sorted(written - changed)} were not written"


def _assert_same_bits(got: torch.Tensor, expected: torch.Tensor, *, what: str) -> None:
    """The same shape, dtype and bits: a zero with another sign is another result."""
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype), what
    bits = _BITS[got.dtype]
    other = (got.view(bits) != expected.view(bits)).any(dim=1).nonzero().flatten().tolist()
    assert not other, f"{what}: rows {other} differ"


def _largest_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error of a row, relative to the row's norm; NaN counts as infinite."""
    norms = expected.float().norm(dim=1)
    errors = (got.float() - expected.float()).norm(dim=1) / norms
    return float(errors.nan_to_num(nan=float("inf")).max())


@_cases("135M", "two layers, captured", "1B", "8B", "1B, captured", "8B, captured")
def test_every_size_equals_eager_and_writes_its_own_slots(rig: Rig, record_property: pytest.RecordProperty) -> None:
    """REQ-H5, FAULT-P2, FAULT-P7: each real size, fresh and chunked requests mixed, is a replay of its smallest bucket.

    Its rows and its cache are those of the padded eager twin, bit for bit, and nearly those of unpadded eager; no slot
    changes that the batch does not own.
    """
    errors: dict[int, float] = {}
    for size in _sizes(rig):
        batch = rig.batch(size)
        live = rig.plan(batch)
        before = rig.cache_bits()
        result = rig.step(batch, live)
        after = rig.cache_bits()
        assert result.replayed, f"{batch}: {result.reason}, {result.detail}"
        assert result.key == PrefillKey(rig.bucket(size))
        _assert_only_written(before, after, batch)

        rig.forget(batch)
        _assert_same_bits(result.output, rig.twin(batch, live), what=f"{batch} beside its twin")
        assert torch.equal(_real_slots(after), _real_slots(rig.cache_bits())), f"{batch}: the twin left another cache"

        rig.forget(batch)
        errors[size] = _largest_error(result.output, rig.unpadded(batch, live))
        tolerance = rig.case.tolerance
        assert errors[size] < tolerance, f"{batch}: a row is off by {errors[size]:.2e} of its norm; most is {tolerance}"
    worst = max(errors, key=lambda size: errors[size])
    record_property("largest error against unpadded eager", f"{errors[worst]:.2e} at {worst} tokens")
    print(f"largest error against unpadded eager: {errors[worst]:.2e} at {worst} tokens, of {len(errors)} sizes")


@_cases("two layers", "two layers, captured", "1B", "1B, captured")
def test_a_step_suspended_after_it_was_prepared_is_the_padded_twin(rig: Rig) -> None:
    """REQ-H5, FAULT-P7: the runner's own eager run at the padded shape, over its static buffers, has a replay's bits."""
    for size in _sizes(rig):
        batch = rig.batch(size)
        live = rig.plan(batch)
        result = rig.step(batch, live)
        cache = rig.cache_bits()
        assert result.replayed
        rig.forget(batch)
        _assert_same_bits(result.output, rig.suspended(batch, live), what=f"{batch}, suspended")
        assert torch.equal(_real_slots(cache), _real_slots(rig.cache_bits())), f"{batch}: suspended, another cache"


@_cases("two layers", "two layers, captured", "1B", "1B, captured")
def test_a_step_reads_nothing_that_was_there_before(rig: Rig) -> None:
    """FAULT-P1, FAULT-P3: NaN in pool, static inputs, staging, results and null block changes no bit of a step."""
    largest = rig.case.buckets[-1]
    assert rig.runner.pool.backend.pool_bytes() > 0
    for size in rig.random.integers(1, largest, endpoint=True, size=POISONED_BATCHES).tolist():
        batch = rig.batch(size)
        live = rig.plan(batch)
        clean = rig.step(batch, live)
        cache = rig.cache_bits()
        assert bool(torch.isfinite(clean.output).all()), f"{batch}: not finite"

        rig.forget(batch)
        rig.poison(size)
        result = rig.step(batch, live)
        assert clean.replayed
        assert result.replayed
        _assert_same_bits(result.output, clean.output, what=f"{batch} after poison")
        assert torch.equal(_real_slots(cache), _real_slots(rig.cache_bits())), f"{batch}: another cache after poison"
