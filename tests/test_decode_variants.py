"""Variants of the decode key: each field chooses kernels of its own, and its graph, and no other, serves a batch."""

from __future__ import annotations

import itertools
import logging
import operator
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from breakgraph.buckets import Buckets
from breakgraph.decode_runner import DecodeRunner
from breakgraph.graph_key import GraphKey, SampleType, UnequalRequests, cached_tokens, num_tokens
from breakgraph.runner import Result
from breakgraph.serving.sampling import greedy, sample
from breakgraph.static_buffers import REQUESTS, TOKENS, Pad, StaticInput
from breakgraph.statistics import Reason
from breakgraph.work import Example

MIB, SIZES = 1 << 20, (2, 4, 8)
WIDTH, VOCAB, SLOTS, ADAPTERS = 8, 64, 32, 4
MAX_SEQ, THRESHOLD, WINDOW = 16, 8, 3


class Weights:
    """Parameters, cache, encoder output and adapters: equal numbers in each instance."""

    def __init__(self, device: torch.device) -> None:
        shapes = (VOCAB, WIDTH), (WIDTH, VOCAB), (SLOTS, MAX_SEQ, WIDTH), (ADAPTERS, WIDTH, VOCAB)
        random = torch.Generator().manual_seed(0)
        self.embedding, self.head, self.memory, lora = (torch.randn(s, generator=random).to(device) for s in shapes)
        self.lora = {None: lora, torch.float32: lora, torch.float16: lora.half()}


@attrs.frozen
class Variant:
    """A field of the key and a model whose kernels it chooses, by a branch of Python that a capture freezes.

    Attributes:
        name: The field.
        forward: Called as `forward(weights, key=key, **inputs)`.
        reference: The rows of one request of a batch, called like forward with the inputs of that request.
        inputs: Names of its inputs besides tokens.
        fields: Values of the field, and of those that it needs: a product with the batch sizes.
        serves: Whether the graph of the second value is right for a batch of the first.
    """

    name: str
    forward: Callable[..., torch.Tensor]
    reference: Callable[..., torch.Tensor]
    inputs: tuple[str, ...] = ()
    fields: Mapping[str, tuple[Any, ...]] = attrs.field(factory=dict)
    serves: Callable[[Any, Any], bool] = operator.eq


class Rig:
    """A variant's model with a captured runner."""

    def __init__(self, variant: Variant, device: torch.device, **options: Any) -> None:
        self.variant, self.device, self.weights = variant, device, Weights(device)
        self.random = torch.Generator().manual_seed(1)
        self.keys: tuple[GraphKey, ...] = options.pop("keys", GraphKey.product(SIZES, **variant.fields))
        self.runner = DecodeRunner(
            partial(variant.forward, self.weights),
            inputs=[INPUTS[name] for name in ("tokens", *variant.inputs)],
            buckets=Buckets.of(SIZES),
            example=lambda key: Example(self.draw(key), live={"key": key}),
            device=device,
            keys=self.keys,
            state=(self.weights.memory,),
            **options,
        )
        with self.runner.capture_window():
            self.runner.capture()

    def draw(self, key: GraphKey) -> dict[str, torch.Tensor]:
        """Random rows, one request as long as a step can meet; what batches of the key do not use is left out."""

        def some(least: int, most: int, count: int = key.batch_size) -> torch.Tensor:
            return torch.randint(least, most + 1, (count,), generator=self.random)

        least = WINDOW if key.short_seq_len_mode else THRESHOLD
        most = cached_tokens(key, max_seq_len=MAX_SEQ, short_threshold=THRESHOLD)
        least, most = (2, key.num_encoder_tokens) if key.num_encoder_tokens else (least, most)
        rows = {"tokens": some(1, 3 if key.draft_len else VOCAB - 1, num_tokens(key)), "lengths": some(least, most)}
        rows["lengths"][:1] = most
        rows["slots"] = torch.randperm(SLOTS - 1, generator=self.random)[: key.batch_size] + 1
        if key.sample_type is SampleType.FAST and not key.is_all_greedy_sample:
            rows |= {"seed": some(0, 1 << 40), "position": some(0, 1 << 20)}
        if key.use_lora_graph:
            rows["adapters"] = some(0, ADAPTERS - 1)
        return {name: rows[name] for name in ("tokens", *self.variant.inputs) if name in rows}

    def expected(self, key: GraphKey, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The reference of each request, from the state as it is now."""
        counts = [key.context_query_len] * key.num_contexts
        counts += [key.draft_len + 1] * (key.batch_size - key.num_contexts)
        split = [rows.to(self.device).split(counts if name == "tokens" else 1) for name, rows in inputs.items()]
        requests = (dict(zip(inputs, request, strict=True)) for request in zip(*split, strict=True))
        return torch.cat([self.variant.reference(self.weights, key=key, **request) for request in requests])

    def run(self, key: GraphKey, inputs: Mapping[str, torch.Tensor]) -> Result[GraphKey]:
        """A step; its key is live data, so an eager step branches on its own and a graph on that of its capture."""
        return self.runner.run(inputs, key=key, live={"key": key})


def _project(w: Weights, tokens: torch.Tensor, key: GraphKey, rows: int | None = None) -> torch.Tensor:
    """Operands of a type that depends on the number of rows, as that of a kernel may, or on a field of the user's own."""
    rows = len(tokens) if rows is None else rows
    by_rows = torch.float32 if rows <= 2 else torch.float16 if rows <= 4 else torch.bfloat16
    kinds: dict[Hashable, torch.dtype] = {None: by_rows, "half": torch.float16, "full": torch.float32}
    kind = kinds[dict(key.extra).get("operands")]
    return w.embedding[tokens].to(kind).float() @ w.head.to(kind).float()


def _decode(w: Weights, tokens: torch.Tensor, key: GraphKey, **sampling: torch.Tensor) -> torch.Tensor:
    """Argmax or a draw in the graph, or its logits come out."""
    logits = w.embedding[tokens] @ w.head
    if key.sample_type is SampleType.FULL:
        return logits
    return greedy(logits) if key.is_all_greedy_sample else _draw(logits, **sampling)


def _draw(logits: torch.Tensor, seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    ones = torch.ones_like(seed, dtype=torch.float64)
    every = {"temperature": ones.float() * 8, "top_k": torch.zeros_like(seed), "top_p": ones, "min_p": ones * 1e-3}
    return sample(logits, **every, seed=seed, position=position)


def _decode_one(w: Weights, tokens: torch.Tensor, key: GraphKey, **sampling: torch.Tensor) -> torch.Tensor:
    logits = (w.embedding[tokens, :, None] * w.head).sum(1)
    if key.is_all_greedy_sample:
        return logits.topk(1).indices[0]
    return logits if key.sample_type is SampleType.FULL else _draw(logits, **sampling)


def _verify(w: Weights, tokens: torch.Tensor, key: GraphKey) -> torch.Tensor:
    """The target of each place, and whether the drafts up to it agree."""
    drafts = tokens.view(-1, key.draft_len + 1)
    targets, kept = drafts.cumsum(1) * 5 + 3, torch.ones_like(drafts)
    kept[:, 1:] = (drafts[:, 1:] == targets[:, :-1] % 4).to(torch.int64).cumprod(1)
    return torch.stack([targets.flatten(), kept.flatten()], 1)


def _verify_one(w: Weights, tokens: torch.Tensor, key: GraphKey) -> torch.Tensor:
    rows: list[tuple[int, int]] = []
    for token, total in zip(tokens.tolist(), itertools.accumulate(tokens.tolist()), strict=True):
        rows.append((total * 5 + 3, int(not rows or (rows[-1][1] and rows[-1][0] % 4 == token))))
    return torch.tensor(rows, device=tokens.device)


def _mix(query: torch.Tensor, keys: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    scores = (keys @ query[:, :, None]).squeeze(-1).masked_fill(~seen, float("-inf"))
    return (scores.softmax(-1)[:, None] @ keys).squeeze(1)


def _short(w: Weights, tokens: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor, key: GraphKey) -> torch.Tensor:
    """A window of the cache; while sequences are short, all of it."""
    w.memory.index_put_((slots, lengths), w.embedding[tokens])
    keys, last = w.memory[slots, : THRESHOLD if key.short_seq_len_mode else MAX_SEQ], lengths[:, None]
    places = torch.arange(keys.shape[1], device=tokens.device)
    seen = places <= last if key.short_seq_len_mode else (places <= last) & (places > last - WINDOW)
    return _mix(w.embedding[tokens], keys, seen)


def _short_one(w: Weights, tokens: torch.Tensor, key: GraphKey, **at: torch.Tensor) -> torch.Tensor:
    keys = torch.cat([w.memory[int(at["slots"]), : int(at["lengths"])], w.embedding[tokens]])
    keys = keys if key.short_seq_len_mode else keys[-WINDOW:]
    return (w.embedding[tokens] @ keys.T).softmax(-1) @ keys


def _cross(w: Weights, tokens: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor, key: GraphKey) -> torch.Tensor:
    """An encoder's output for the rows of contexts, which come first, and for those that are generated, by other kernels."""
    owner, rows = torch.arange(len(slots), device=tokens.device), key.num_contexts * key.context_query_len
    contexts = owner[: key.num_contexts, None].expand(-1, key.context_query_len)
    owner = torch.cat([contexts.flatten(), owner[key.num_contexts :]])
    query = torch.cat([w.embedding[tokens[:rows]].tanh(), w.embedding[tokens[rows:]]])
    seen = torch.arange(key.num_encoder_tokens, device=tokens.device) < lengths[owner][:, None]
    return _mix(query, w.memory[slots[owner], : key.num_encoder_tokens], seen)


def _cross_one(w: Weights, tokens: torch.Tensor, key: GraphKey, **at: torch.Tensor) -> torch.Tensor:
    query, keys = w.embedding[tokens], w.memory[int(at["slots"]), : int(at["lengths"])]
    return ((query.tanh() if len(tokens) > 1 else query) @ keys.T).softmax(-1) @ keys


def _adapt(w: Weights, tokens: torch.Tensor, adapters: torch.Tensor, key: GraphKey) -> torch.Tensor:
    """The product with adapters is in the graph or not, and from a cache of one type or another."""
    hidden = w.embedding[tokens, None]
    added = hidden @ w.lora[key.peft_cache_data_type][adapters].float() if key.use_lora_graph else 0
    return (hidden @ w.head + added).squeeze(1)


def _adapt_one(w: Weights, tokens: torch.Tensor, key: GraphKey, **ids: torch.Tensor) -> torch.Tensor:
    added = [w.lora[key.peft_cache_data_type][int(one)].float() for one in ids.values()]
    return w.embedding[tokens] @ sum(added, w.head)


def _wide(w: Weights, tokens: torch.Tensor, key: GraphKey, adapters: torch.Tensor | None = None) -> torch.Tensor:
    """Intermediates of 8 MiB for each row of a graph with adapters."""
    return (tokens[:, None].float().expand(-1, 2 * MIB if key.use_lora_graph else 1) + 1).amax(1)


INPUTS = {name: StaticInput(name, shape=(REQUESTS,), default=0) for name in ("seed", "position", "adapters")}
INPUTS["tokens"] = StaticInput("tokens", shape=(TOKENS,))
INPUTS["slots"] = StaticInput("slots", shape=(REQUESTS,), pad=Pad.keep_out(0))
INPUTS["lengths"] = StaticInput("lengths", shape=(REQUESTS,), pad=Pad.value(1))
BOTH, TYPES, EXTENT = (False, True), (torch.float16, torch.float32), {"num_encoder_tokens": (8,)}
PROJECT = (_project, lambda w, tokens, key: _project(w, tokens, key, rows=key.batch_size))
SAMPLED = (_decode, _decode_one, ("seed", "position"))
SHORT, CROSS = (_short, _short_one, ("slots", "lengths")), (_cross, _cross_one, ("slots", "lengths"))
ADAPT = (_adapt, _adapt_one, ("adapters",))
VARIANTS = [
    Variant("batch_size", *PROJECT),
    Variant("extra", *PROJECT, fields={"extra": ((("operands", "half"),), (("operands", "full"),))}),
    Variant("draft_len", _verify, _verify_one, fields={"draft_len": (0, 1, 3)}),
    Variant("is_all_greedy_sample", *SAMPLED, {"is_all_greedy_sample": BOTH}),
    Variant("sample_type", *SAMPLED, {"sample_type": tuple(SampleType)}),
    Variant("short_seq_len_mode", *SHORT, {"short_seq_len_mode": BOTH}),
    Variant("num_contexts", *CROSS, {"num_contexts": (0, 1, 2), "context_query_len": (3,), **EXTENT}),
    Variant("context_query_len", *CROSS, {"num_contexts": (2,), "context_query_len": (2, 3), **EXTENT}),
    Variant("num_encoder_tokens", *CROSS, {"num_encoder_tokens": (3, 5, 8)}, operator.le),
    Variant("use_lora_graph", *ADAPT, {"use_lora_graph": BOTH}),
    Variant("peft_cache_data_type", *ADAPT, {"use_lora_graph": (True,), "peft_cache_data_type": TYPES}),
]
BY_NAME = {variant.name: variant for variant in VARIANTS}
every_variant = pytest.mark.parametrize("name", list(BY_NAME))


def _bucket(size: int) -> int:
    return next((bucket for bucket in SIZES if bucket >= size), size)


@pytest.fixture(scope="module")
def rigs() -> dict[tuple[str, torch.device], Rig]:
    """Captured rigs: the garbage collection of a capture window takes longer than a variant."""
    return {}


@pytest.fixture
def rig(name: str, device: torch.device, rigs: dict[tuple[str, torch.device], Rig]) -> Rig:
    """The rig of a variant."""
    rig = rigs.get((name, device)) or rigs.setdefault((name, device), Rig(BY_NAME[name], device))
    rig.random.manual_seed(2)
    return rig


@every_variant
def test_each_value_has_a_graph_that_gives_its_result(rig: Rig) -> None:
    """REQ-A1 to REQ-A9, REQ-D9: any size, length and encoder extent below a captured one replays to each request's result."""
    assert set(BY_NAME) == {field.name for field in attrs.fields(GraphKey)}
    assert set(rig.runner.graphs) == set(rig.keys)
    for kind, size in itertools.product(rig.keys, range(1, 9)):
        if _bucket(size) != kind.batch_size or size < kind.num_contexts:
            continue
        key = attrs.evolve(kind, batch_size=size, num_encoder_tokens=max(kind.num_encoder_tokens - size % 2, 0))
        inputs = rig.draw(key)
        expected = rig.expected(key, inputs)
        result = rig.run(key, inputs)
        assert (result.replayed, result.key) == (True, kind)
        torch.testing.assert_close(result.output, expected)
        with rig.runner.suspend():
            torch.testing.assert_close(rig.run(key, inputs).output, expected)
    reports = rig.runner.statistics.reports
    assert all(reports[key].padded_rows for key in rig.keys if key.batch_size > key.num_contexts)


@every_variant
def test_another_graph_gives_another_result(rig: Rig, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """REQ-A1 to REQ-A9, FAULT-F2, FAULT-F4: led to the graph of another value, with room for it, a batch gets another result."""
    seen: set[object] = set()
    for key, other in itertools.permutations(rig.keys, 2):
        value, found = getattr(key, name), getattr(other, name)
        room = other.batch_size >= key.batch_size and num_tokens(other) >= num_tokens(key)
        if not room or rig.variant.serves(value, found):
            continue
        inputs = rig.draw(key)
        expected = rig.expected(key, inputs)
        with monkeypatch.context() as patch:
            patch.setitem(rig.runner._router._routes, key, rig.runner._graphs.captured[other])
            wrong = rig.run(key, inputs)
        assert (wrong.replayed, wrong.key) == (True, other)
        with pytest.raises(AssertionError, match="not close|not equal|do not match"):
            torch.testing.assert_close(wrong.output, expected)
        torch.testing.assert_close(rig.run(key, inputs).output, expected)
        seen |= {value, found}
    assert seen == {getattr(key, name) for key in rig.keys}


@pytest.mark.parametrize("name", ["sample_type"])
def test_a_seed_and_a_position_give_one_token_anywhere(rig: Rig) -> None:
    """REQ-A5: a draw depends on seed, position and logits only, in any row, bucket and eager batch, and outside the graph."""

    def draw(seed: int, position: int, *, row: int = 0, size: int = 1) -> int:
        inputs = rig.draw(GraphKey(size))
        for name, value in (("tokens", 5), ("seed", seed), ("position", position)):
            inputs[name][row] = value
        result = rig.run(GraphKey(size), inputs)
        assert result.replayed is (size <= 8)
        return int(result.output[row])

    logits = rig.run(GraphKey(1, sample_type=SampleType.FULL), {"tokens": torch.tensor([5])}).output
    outside = int(_draw(logits, *torch.tensor([[11], [3]], device=rig.device)))
    assert {draw(11, 3, row=row, size=size) for size in range(1, 11) for row in range(size)} == {outside}
    by_position, by_seed = [draw(11, place) for place in range(20)], [draw(seed, 3) for seed in range(20)]
    assert min(len(set(by_position)), len(set(by_seed))) > 8
    assert by_position != [draw(12, place) for place in range(20)]


def test_the_number_of_graphs_is_told_first(device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    """REQ-D7, REQ-D8: the size of the product is in the log, largest key first, before any key is done; all are captured."""
    keys = GraphKey.product(SIZES, draft_len=(0, 1, 3), is_all_greedy_sample=BOTH)
    told: list[tuple[str, int]] = []
    with caplog.at_level(logging.INFO, logger="breakgraph.graph_set"):
        rig = Rig(BY_NAME["draft_len"], device, keys=keys, progress=lambda to: told.append((caplog.text, to.total)))
    assert "capturing 18 graphs, in two passes: ['decode[8, draft_len=3" in told[0][0]
    assert {total for _, total in told} == {len(keys)} == {len(rig.runner.graphs)} == {18}


def test_a_budget_keeps_the_variants_that_fit(device: torch.device) -> None:
    """REQ-D8, FAULT-R5: the variant that takes too much is dropped and says why, later ones are kept, and all are right."""
    keys, gone = GraphKey.product((2, 8), use_lora_graph=BOTH), GraphKey(8, use_lora_graph=True)
    rig = Rig(attrs.evolve(BY_NAME["use_lora_graph"], forward=_wide), device, keys=keys, memory_budget=40 * MIB)
    assert set(rig.runner.graphs) == set(keys) - {gone}
    assert list(rig.runner.dropped) == [gone]
    assert "decode[8, use_lora_graph=True] needs" in rig.runner.dropped[gone]
    assert "of a budget of 40.0 MiB" in rig.runner.dropped[gone]
    assert rig.runner._graphs.nbytes <= 40 * MIB
    for key in keys:
        inputs = rig.draw(key)
        result = rig.run(key, inputs)
        assert (result.key, result.reason) == ((None, Reason.DROPPED) if key == gone else (key, None))
        assert result.output.tolist() == [token + 1 for token in inputs["tokens"].tolist()]


def test_requests_that_differ_in_length_run_eagerly(device: torch.device) -> None:
    """REQ-A2, REQ-A6, FAULT-R6: one draft length and one context length replay; others are eager, counted, in words."""

    def forward(tokens: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
        return torch.cat([rows.cumsum(0) for rows in tokens.split([*lengths, len(tokens) - sum(lengths)])])

    def example(key: GraphKey) -> Example:
        generated = key.batch_size - key.num_contexts
        lengths = (key.context_query_len,) * key.num_contexts + (key.draft_len + 1,) * generated
        return Example({"tokens": torch.arange(sum(lengths))}, {"lengths": lengths})

    keys = [GraphKey(4, draft_len=1), GraphKey(4, num_contexts=2, context_query_len=2)]
    runner = DecodeRunner(
        forward, inputs=[INPUTS["tokens"]], buckets=Buckets.of([4]), example=example, device=device, keys=keys
    )
    with runner.capture_window():
        runner.capture()
    for drafts, contexts, differ in (
        ([1, 1, 1, 1], [], ""),
        ([0, 0], [2, 2], ""),
        ([0, 1, 3], [], "draft lengths differ: [0, 1, 3]"),
        ([0, 0], [2, 3], "context lengths differ: [2, 3]"),
    ):
        lengths = (*contexts, *(draft_len + 1 for draft_len in drafts))
        tokens = torch.arange(sum(lengths)) * 7 % 5
        key = GraphKey.for_batch(drafts, context_query_lens=contexts)
        result = runner.run({"tokens": tokens}, key=key, live={"lengths": lengths}, tokens=len(tokens))
        sums = [itertools.accumulate(rows.tolist()) for rows in tokens.split(lengths)]
        assert result.output.tolist() == list(itertools.chain(*sums))
        assert isinstance(key, UnequalRequests) is bool(differ)
        assert (result.reason, result.detail) == (Reason.UNEQUAL_REQUESTS if differ else None, differ)
    assert runner.statistics.replays_by_key == dict.fromkeys(keys, 1)
    assert runner.statistics.eager == {"UNEQUAL_REQUESTS": 2}


def test_every_lookup_has_its_graph_or_a_declared_reason(device: torch.device) -> None:
    """FAULT-R3: any batch is served by a captured key that differs in nothing but a larger size, or is eager as declared."""
    kinds = {"is_all_greedy_sample": BOTH, "short_seq_len_mode": BOTH, "sample_type": tuple(SampleType)}
    product = GraphKey.product(SIZES, draft_len=(0, 1, 3), **kinds)
    keys = tuple(key for key in product if not (key.is_all_greedy_sample and key.sample_type is SampleType.FULL))
    rig = Rig(BY_NAME["draft_len"], device, keys=keys)
    drawn: dict[str, Any] = {name: st.sampled_from(values) for name, values in kinds.items()}

    @settings(max_examples=120, deadline=None)
    @given(st.builds(GraphKey, st.integers(0, 12), draft_len=st.integers(0, 4), **drawn))
    def holds(key: GraphKey) -> None:
        unknown = key.draft_len in (2, 4) or (key.is_all_greedy_sample and key.sample_type is SampleType.FULL)
        reason = Reason.ABOVE_LARGEST_BUCKET if key.batch_size > 8 else Reason.NO_GRAPH if unknown else None
        rounded = attrs.evolve(key, batch_size=_bucket(key.batch_size))
        assert (rounded in rig.runner.graphs) is (reason is None)
        inputs = rig.draw(key)
        result = rig.run(key, inputs)
        assert (result.key, result.reason) == (rounded if reason is None else None, reason)
        assert len(result.output) == num_tokens(key)
        if key.batch_size:
            torch.testing.assert_close(result.output, rig.expected(key, inputs))

    holds()
