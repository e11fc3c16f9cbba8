"""DecodeRunner: batches padded to a bucket, keys, padding requests, and tokens that never leave the device."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from breakgraph.errors import ConfigError, NoGraphError, StaticInputError
from breakgraph.graph_key import GraphKey, SampleType, UnequalRequests, num_tokens
from breakgraph.padding_dummies import JoinedDummies
from breakgraph.prefill_runner import Example
from breakgraph.static_buffers import REQUESTS, TOKENS, Pad, StaticInput
from breakgraph.statistics import Reason
from tests.runner_models import SLOTS, DecodeRig

CPU = torch.device("cpu")


class Dummies:
    """Storage for padding requests: a number of free slots, and what was taken from them."""

    def __init__(self, *, free: int = 8, token_row: int = SLOTS - 1) -> None:
        self.free = free
        self.token_row = token_row
        self.taken: list[int] = []
        self.log: list[str] = []

    def allocate(self, *, draft_len: int) -> Mapping[str, torch.Tensor] | None:
        """Take one slot."""
        self.log.append(f"allocate {draft_len}")
        if self.free == 0:
            return None
        self.free -= 1
        self.taken.append(draft_len)
        return {
            "rows": torch.tensor([self.token_row]),
            "positions": torch.full((draft_len + 1,), 50, dtype=torch.int32),
        }

    def release(self, *, draft_len: int) -> None:
        """Give it back."""
        self.log.append(f"release {draft_len}")
        self.taken.remove(draft_len)
        self.free += 1


def rows_and_positions(rows: list[int], positions: list[int]) -> dict[str, torch.Tensor]:
    """The inputs of a step."""
    return {"rows": torch.tensor(rows), "positions": torch.tensor(positions, dtype=torch.int32)}


@pytest.fixture
def rig(device: torch.device) -> DecodeRig:
    """A captured runner with buckets 1, 2, 4 and 8."""
    rig = DecodeRig(device)
    rig.capture()
    assert not rig.runner.dropped
    return rig


# Padding.


@pytest.mark.parametrize("size", range(1, 10))
def test_every_batch_size_is_right(rig: DecodeRig, size: int) -> None:
    """REQ-C1, REQ-C7, FAULT-R3: sizes up to the largest bucket replay and return real rows only; above it, eager."""
    rig.last_token[1 : size + 1] = torch.arange(100, 100 + size, device=rig.device)
    rows, positions = list(range(1, size + 1)), [3 * row for row in range(size)]
    result = rig.runner.run(rows_and_positions(rows, positions), key=GraphKey(size))
    assert result.output.tolist() == [rig.reference(100 + i, [3 * i]) for i in range(size)]
    if size <= 8:
        assert result.key == GraphKey({3: 4, 5: 8, 6: 8, 7: 8}.get(size, size))
    else:
        assert result.reason is Reason.ABOVE_LARGEST_BUCKET


def test_padding_rows_touch_nobody(rig: DecodeRig) -> None:
    """REQ-C3, FAULT-P2, FAULT-P4: eight real rows, then five: rows of the other requests keep their tokens."""
    rig.last_token.fill_(5)
    rig.runner.run(rows_and_positions(list(range(1, 9)), [1] * 8), key=GraphKey(8))
    before = rig.last_token.clone()
    rig.runner.run(rows_and_positions([11, 12, 13, 14, 15], [2] * 5), key=GraphKey(5))
    changed = (rig.last_token != before).nonzero().flatten().tolist()
    assert set(changed) <= {0, 11, 12, 13, 14, 15}
    assert set(changed) >= {11, 12, 13, 14, 15}


def test_inputs_are_held_to_the_key(rig: DecodeRig) -> None:
    """REQ-E1, FAULT-P5: a token count other than num_tokens(key) is refused, naming both."""
    inputs = rows_and_positions([1, 2, 3], [1, 1, 1])
    for size in (2, 4):
        with pytest.raises(StaticInputError, match=rf"shape \(3,\).*expected shape \({size},\)"):
            rig.runner.prepare(inputs, key=GraphKey(size))


# Tokens stay on the device.


def test_the_device_feeds_the_next_step(rig: DecodeRig) -> None:
    """REQ-E3: with no token from the host, twenty steps one ahead continue from what the step before wrote."""
    runner = rig.runner
    rig.last_token[1:4] = torch.tensor([7, 8, 9], device=rig.device)
    expected = {1: 7, 2: 8, 3: 9}
    waiting = None
    for step in range(20):
        rows = [1, 2, 3] if step % 3 else [3, 1]
        ahead = runner.prepare(rows_and_positions(rows, [step] * len(rows)), key=GraphKey(len(rows)))
        if waiting is not None:
            runner.launch(waiting)
        waiting = ahead
        for row in rows:
            expected[row] = rig.reference(expected[row], [step])
    assert waiting is not None
    runner.launch(waiting)
    assert {row: int(rig.last_token[row]) for row in expected} == expected
    assert runner.statistics.replays == 20


def test_an_eager_step_continues_from_the_same_table(rig: DecodeRig) -> None:
    """REQ-E3: replay, eager step and replay again read and write one table, so a fallback loses no token."""
    rig.last_token[1] = 3
    token = 3
    for step in range(4):
        inputs = rows_and_positions([1], [step])
        if step % 2:
            with rig.runner.suspend():
                rig.runner.run(inputs, key=GraphKey(1))
        else:
            rig.runner.run(inputs, key=GraphKey(1))
        token = rig.reference(token, [step])
    assert int(rig.last_token[1]) == token
    assert rig.runner.statistics.eager == {"DISABLED": 2}


def test_capture_leaves_the_table_as_it_was(device: torch.device) -> None:
    """REQ-D3: device-fed inputs count as state without being declared: capture and proof put them back."""
    rig = DecodeRig(device)
    rig.last_token.copy_(torch.arange(SLOTS, device=device))
    rig.capture()
    assert len(rig.runner.graphs) == 4
    assert rig.last_token.tolist() == list(range(SLOTS))


def test_a_device_fed_input_is_not_given(rig: DecodeRig) -> None:
    """REQ-E3: handing a device-fed input to a step is refused: it would be ignored."""
    inputs = {**rows_and_positions([1], [1]), "last_token": rig.last_token}
    with pytest.raises(StaticInputError, match="device-fed"):
        rig.runner.prepare(inputs, key=GraphKey(1))


# Keys.


def test_draft_lengths_choose_graphs(device: torch.device) -> None:
    """REQ-A2: requests with three draft tokens have four tokens in a step, in a graph of their own."""
    keys = GraphKey.product([2, 4], draft_len=(0, 3))
    rig = DecodeRig(device, sizes=(2, 4), keys=keys)
    rig.capture()
    assert set(rig.runner.graphs) == set(keys)
    rig.last_token[1:4] = torch.tensor([7, 8, 9], device=device)
    positions = list(range(12))
    result = rig.runner.run(rows_and_positions([1, 2, 3], positions), key=GraphKey(3, draft_len=3))
    assert result.key == GraphKey(4, draft_len=3)
    assert result.output.tolist() == [rig.reference(7 + i, positions[4 * i : 4 * i + 4]) for i in range(3)]
    assert (rig.runner.statistics.real_rows, rig.runner.statistics.padded_rows) == (12, 16)


def test_unequal_requests_run_eagerly(device: torch.device) -> None:
    """REQ-A2: a batch whose draft lengths differ is a counted eager step in words, never an assertion."""
    rows = StaticInput("rows", shape=(REQUESTS,))
    positions = StaticInput("positions", shape=(TOKENS,), dtype=torch.int32)
    rig = DecodeRig(
        device, inputs=[rows, positions], forward=lambda rows, positions: positions + rows.sum(), sizes=(1, 2)
    )
    rig.capture()
    key = GraphKey.for_batch([0, 1])
    assert isinstance(key, UnequalRequests)
    result = rig.runner.run(rows_and_positions([1, 2], [5, 6, 7]), key=key, tokens=3)
    assert result.reason is Reason.UNEQUAL_REQUESTS
    assert "draft lengths differ: [0, 1]" in result.detail
    assert result.output.tolist() == [8, 9, 10]


def test_host_work_of_an_unequal_batch_sees_its_variant() -> None:
    """REQ-A2, REQ-A4: plan() of a batch without a key is given the fields that its requests agree on."""
    planned: list[GraphKey] = []
    rig = DecodeRig(
        CPU,
        inputs=[StaticInput("positions", shape=(TOKENS,), dtype=torch.int32)],
        forward=lambda positions: positions + 1,
        example=lambda key: Example({"positions": torch.arange(num_tokens(key), dtype=torch.int32)}),
        plan=lambda key, live, rows: planned.append(key),
        sizes=(2,),
    )
    key = GraphKey.for_batch([0, 1], greedy=[True, True], extra=(("a", 1),))
    rig.runner.run({"positions": torch.arange(3, dtype=torch.int32)}, key=key, tokens=3)
    assert planned == [GraphKey(2, draft_len=1, is_all_greedy_sample=True, extra=(("a", 1),))]


def test_encoder_extent_is_rounded_up(device: torch.device) -> None:
    """REQ-A7: the smallest captured extent that agrees on every other field serves; none: eager."""
    keys = [GraphKey(2, num_encoder_tokens=64), GraphKey(2, num_encoder_tokens=128, is_all_greedy_sample=True)]
    keys += [GraphKey(2, num_encoder_tokens=256)]
    rig = DecodeRig(device, sizes=(2,), keys=keys)
    rig.capture()
    inputs = rows_and_positions([1, 2], [0, 0])
    assert rig.runner.run(inputs, key=GraphKey(2, num_encoder_tokens=64)).key == keys[0]
    assert rig.runner.run(inputs, key=GraphKey(2, num_encoder_tokens=65)).key == keys[2]
    assert rig.runner.run(inputs, key=GraphKey(2, num_encoder_tokens=300)).reason is Reason.NO_GRAPH


def test_variants_that_were_not_captured_are_eager(rig: DecodeRig) -> None:
    """REQ-E9: a key with another field is a counted fallback, or a NoGraphError where fallback is forbidden."""
    key = GraphKey(2, sample_type=SampleType.FULL)
    inputs = rows_and_positions([1, 2], [0, 0])
    assert rig.runner.run(inputs, key=key).reason is Reason.NO_GRAPH
    strict = DecodeRig(rig.device, fallback="error")
    strict.capture()
    with pytest.raises(NoGraphError, match=r"NO_GRAPH.*sample_type=SampleType.FULL"):
        strict.runner.run(inputs, key=key)


def test_tokens_follow_from_the_key(rig: DecodeRig) -> None:
    """REQ-E1: tokens= that contradicts the key is refused; with requests that differ it must be a count."""
    inputs = rows_and_positions([1, 2], [0, 0])
    with pytest.raises(ConfigError, match=r"tokens=3 with GraphKey\(2\), which has 2 tokens"):
        rig.runner.run(inputs, key=GraphKey(2), tokens=3)
    with pytest.raises(ConfigError, match="tokens=-4; expected an integer"):
        rig.runner.run(inputs, key=GraphKey.for_batch([1, 2]), tokens=-4)


def test_forward_takes_every_declared_input() -> None:
    """A forward without a parameter for an input is refused when the runner is made, not once for every key."""
    with pytest.raises(ConfigError, match=r"forward\(rows\).* has no parameter for the declared inputs"):
        DecodeRig(CPU, forward=lambda rows: rows)


def test_a_key_is_a_graph_key(rig: DecodeRig) -> None:
    """REQ-A1: a batch size in place of a key is refused with what to pass instead."""
    with pytest.raises(ConfigError, match="key is 2; expected a GraphKey"):
        rig.runner.prepare(rows_and_positions([1, 2], [0, 0]), key=2)  # type: ignore[arg-type]


def test_keys_outside_the_buckets_are_refused() -> None:
    """FAULT-R6: a graph that could never be used is refused before anything is captured."""
    with pytest.raises(ConfigError, match=r"batch sizes \[3\], which are no buckets"):
        DecodeRig(CPU, sizes=(2, 4), keys=[GraphKey(3)])


def test_larger_memory_is_captured_first(device: torch.device) -> None:
    """REQ-D2, REQ-D7: captures go from most tokens to fewest, with adapters before without."""
    keys = GraphKey.product([2, 4], draft_len=(0, 3), use_lora_graph=(False, True))
    rig = DecodeRig(device, sizes=(2, 4), keys=keys)
    rig.capture()
    order = [(num_tokens(key), key.use_lora_graph) for key in rig.runner.graphs]
    assert order == sorted(order, reverse=True)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(size=st.integers(0, 12), draft_len=st.integers(0, 3))
def test_every_lookup_is_captured_or_has_a_reason(two_drafts: DecodeRig, size: int, draft_len: int) -> None:
    """FAULT-R3: any batch size and draft length is served by a captured key that holds it, or has a stated reason."""
    key = GraphKey(size, draft_len=draft_len)
    router = two_drafts.runner._router
    found = router.choose(key, refusal=router.refusal(key, {}))
    if size > 8:
        assert getattr(found, "reason", None) is Reason.ABOVE_LARGEST_BUCKET
    elif draft_len not in (0, 2):
        assert getattr(found, "reason", None) is Reason.NO_GRAPH
    else:
        assert isinstance(found, tuple)
        chosen = found[0].target.key
        assert chosen in two_drafts.runner.graphs
        assert attrs.evolve(chosen, batch_size=size) == key
        assert chosen.batch_size >= size


@pytest.fixture(scope="module")
def two_drafts() -> DecodeRig:
    """A captured runner with buckets 1, 4, 8 and draft lengths 0 and 2."""
    rig = DecodeRig(CPU, sizes=(1, 4, 8), keys=GraphKey.product([1, 4, 8], draft_len=(0, 2)))
    rig.capture()
    return rig


# Padding requests.


def test_dummies_are_allocated_after_capture_where_padding_can_happen(device: torch.device) -> None:
    """REQ-C4: one per draft length that can be padded: not for one whose every batch size has its own graph."""
    dummies = Dummies()
    keys = [GraphKey(1), GraphKey(2), GraphKey(1, draft_len=2), GraphKey(4, draft_len=2)]
    rig = DecodeRig(device, sizes=(1, 2, 4), keys=keys, dummies=dummies)
    assert not dummies.log
    rig.capture()
    assert dummies.log == ["allocate 2"]


def test_padding_rows_are_the_dummys(device: torch.device) -> None:
    """REQ-C2, REQ-C3, FAULT-P9: padding rows run on the dummy's own storage, and reach no result and no count."""
    dummies = Dummies(token_row=SLOTS - 1)
    rig = DecodeRig(device, dummies=dummies)
    rig.capture()
    rig.last_token.fill_(4)
    result = rig.runner.run(rows_and_positions([1, 2, 3], [9, 9, 9]), key=GraphKey(3))
    assert result.output.tolist() == [rig.reference(4, [9])] * 3
    changed = (rig.last_token != 4).nonzero().flatten().tolist()
    assert changed == [1, 2, 3, SLOTS - 1]
    assert int(rig.last_token[SLOTS - 1]) == rig.reference(4, [50])
    assert rig.runner.statistics.real_rows == 3


def test_exhausted_dummies_are_a_counted_fallback_and_retried(device: torch.device) -> None:
    """REQ-C4, FAULT-P10: without storage a padded step is eager under NO_DUMMY; the next step tries again."""
    dummies = Dummies(free=0)
    rig = DecodeRig(device, dummies=dummies)
    rig.capture()
    inputs = rows_and_positions([1, 2, 3], [0, 0, 0])
    assert rig.runner.run(inputs, key=GraphKey(3)).reason is Reason.NO_DUMMY
    full = rows_and_positions([1, 2], [0, 0])
    assert rig.runner.run(full, key=GraphKey(2)).replayed
    dummies.free = 1
    assert rig.runner.run(inputs, key=GraphKey(3)).replayed
    assert rig.runner.statistics.eager == {"NO_DUMMY": 1}


def test_dummies_are_suspended_while_blocks_move(device: torch.device) -> None:
    """REQ-C5: inside suspend_dummies() none is held; afterwards handles are fresh; no slot is lost over many cycles."""
    dummies = Dummies(free=2)
    rig = DecodeRig(device, dummies=dummies)
    rig.capture()
    inputs = rows_and_positions([1, 2, 3], [0, 0, 0])
    for cycle in range(50):
        with rig.runner.suspend_dummies():
            assert not dummies.taken
            assert rig.runner.run(inputs, key=GraphKey(3)).reason is Reason.NO_DUMMY
            dummies.token_row = 40 + cycle % 20  # the block that it gets afterwards is another one
        assert dummies.taken == [0]
        before = rig.last_token.clone()
        assert rig.runner.run(inputs, key=GraphKey(3)).replayed
        changed = (rig.last_token != before).nonzero().flatten().tolist()
        assert set(changed) <= {1, 2, 3, dummies.token_row}
    rig.runner.release_dummies()
    rig.runner.release_dummies()
    assert (dummies.free, dummies.taken) == (2, [])


def test_a_hundred_padded_steps_take_one_dummy(device: torch.device) -> None:
    """REQ-C2, FAULT-P8: padding takes the same dummy again, so a hundred padded steps leave the storage where it was."""
    dummies = Dummies(free=2)
    rig = DecodeRig(device, dummies=dummies)
    rig.capture()
    for step in range(100):
        size = (3, 5, 6, 7)[step % 4]
        rig.runner.run(rows_and_positions(list(range(1, size + 1)), [step] * size), key=GraphKey(size))
    assert rig.runner.statistics.replays == 100
    assert (dummies.free, dummies.taken) == (1, [0])


class Manager:
    """One of the managers that hold a part of a padding request's state; may have none left, or raise."""

    def __init__(self, name: str, log: list[str], *, fails: str = "") -> None:
        self.name, self.log, self.fails = name, log, fails

    def allocate(self, *, draft_len: int) -> Mapping[str, torch.Tensor] | None:
        """Take one slot, or none, or raise."""
        self.log.append(f"{self.name} +{draft_len}")
        if self.fails == "raises":
            raise RuntimeError(f"{self.name} is broken")
        return None if self.fails == "empty" else {self.name: torch.tensor([SLOTS - 1])}

    def release(self, *, draft_len: int) -> None:
        """Give it back."""
        self.log.append(f"{self.name} -{draft_len}")


def test_a_padding_request_is_taken_from_every_manager_and_given_back_once() -> None:
    """REQ-C6: storage comes from all managers in order, and goes back to each of them once."""
    log: list[str] = []
    joined = JoinedDummies([Manager("rows", log), Manager("state", log), Manager("draft", log)])
    rows = joined.allocate(draft_len=2)
    assert rows is not None
    assert list(rows) == ["rows", "state", "draft"]
    joined.release(draft_len=2)
    assert log == ["rows +2", "state +2", "draft +2", "draft -2", "state -2", "rows -2"]


@pytest.mark.parametrize("fails", ["empty", "raises"])
def test_a_creation_that_fails_half_way_is_undone_in_every_manager(device: torch.device, fails: str) -> None:
    """REQ-C6, FAULT-P8: what earlier managers gave goes back once; the step is eager, or the error reaches the caller."""
    log: list[str] = []
    managers = [Manager("rows", log), Manager("state", log), Manager("draft", log, fails=fails)]
    rig = DecodeRig(device, dummies=JoinedDummies(managers))
    inputs = rows_and_positions([1, 2, 3], [0, 0, 0])
    if fails == "raises":
        with pytest.raises(RuntimeError, match="draft is broken"):
            rig.capture()
    else:
        rig.capture()
        assert log == ["rows +0", "state +0", "draft +0", "state -0", "rows -0"]
        log.clear()
        assert rig.runner.run(inputs, key=GraphKey(3)).reason is Reason.NO_DUMMY
    assert log == ["rows +0", "state +0", "draft +0", "state -0", "rows -0"]
    assert len(rig.runner.graphs) == 4


def test_a_manager_that_cannot_take_its_part_back_keeps_no_other_from_it() -> None:
    """REQ-C6: an exception of one manager's release reaches the caller, after every manager was asked."""
    log: list[str] = []

    class Stubborn(Manager):
        def release(self, *, draft_len: int) -> None:
            raise RuntimeError("stubborn")

    joined = JoinedDummies([Manager("rows", log), Stubborn("state", log)])
    joined.allocate(draft_len=0)
    with pytest.raises(RuntimeError, match="stubborn"):
        joined.release(draft_len=0)
    assert log == ["rows +0", "state +0", "rows -0"]


def test_two_managers_may_not_fill_one_input() -> None:
    """REQ-C6: rows for one input from two managers are refused, and both have their storage back."""
    log: list[str] = []
    with pytest.raises(ConfigError, match=r"two managers .* rows for \['rows'\]"):
        JoinedDummies([Manager("rows", log), Manager("rows", log)]).allocate(draft_len=0)
    assert log == ["rows +0", "rows +0", "rows -0", "rows -0"]


def test_an_exception_while_blocks_move_is_not_replaced(device: torch.device) -> None:
    """REQ-C5: the caller's exception leaves suspend_dummies() as it is, and the padding request is taken again."""
    dummies = Dummies(free=1)
    rig = DecodeRig(device, dummies=dummies)
    rig.capture()
    with pytest.raises(ValueError, match="the caller's"), rig.runner.suspend_dummies():
        raise ValueError("the caller's")
    assert dummies.taken == [0]
    assert rig.runner.run(rows_and_positions([1, 2, 3], [0, 0, 0]), key=GraphKey(3)).replayed


# Results.


def test_results_by_request_and_by_token(device: torch.device) -> None:
    """REQ-C7, REQ-E7: leaves with one row per request or per token are each cut to the real rows."""

    def forward(rows: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rows + 0, positions + 0

    inputs = [
        StaticInput("rows", shape=(REQUESTS,), pad=Pad.value(-1)),
        StaticInput("positions", shape=(TOKENS,), dtype=torch.int32, pad=Pad.value(-1)),
    ]
    rig = DecodeRig(device, inputs=inputs, forward=forward, sizes=(4,), keys=[GraphKey(4, draft_len=1)])
    rig.capture()
    key = GraphKey(3, draft_len=1)
    by_request, by_token = rig.runner.run(rows_and_positions([1, 2, 3], [1, 2, 3, 4, 5, 6]), key=key).output
    assert by_request.tolist() == [1, 2, 3]
    assert by_token.tolist() == [1, 2, 3, 4, 5, 6]


def test_live_data_reaches_plan_and_eager_forward(device: torch.device) -> None:
    """REQ-E5: plan fills static data of the padded batch before each launch, and of the real one for eager steps."""
    factor = torch.zeros(1, dtype=torch.int32, device=device)
    planned: list[tuple[int, int]] = []

    def plan(key: GraphKey, live: Mapping[str, int], padded: int) -> None:
        planned.append((key.batch_size, padded))
        factor.fill_(live["step"])

    def forward(rows: torch.Tensor, positions: torch.Tensor, step: int) -> torch.Tensor:
        return positions * factor

    inputs = [StaticInput("rows", shape=(REQUESTS,)), StaticInput("positions", shape=(TOKENS,), dtype=torch.int32)]
    random = torch.Generator().manual_seed(0)

    def example(key: GraphKey) -> Example:
        positions = torch.randint(1, 99, (key.batch_size,), generator=random, dtype=torch.int32)
        live = {"step": int(torch.randint(1, 99, (), generator=random))}
        return Example({"rows": torch.arange(key.batch_size), "positions": positions}, live)

    rig = DecodeRig(device, inputs=inputs, forward=forward, example=example, plan=plan, sizes=(4,))
    rig.capture()
    assert not rig.runner.dropped
    planned.clear()
    for size, step in ((3, 5), (4, 6), (5, 7)):
        result = rig.runner.run(rows_and_positions([1] * size, [2] * size), key=GraphKey(size), live={"step": step})
        assert result.output.tolist() == [2 * step] * size
    assert planned == [(4, 4), (4, 4), (5, 5)]
