"""Ranks that stay on one path: real processes over gloo, two and four of them, and the rule by which they decide."""

from __future__ import annotations

import functools
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from breakgraph.errors import ConfigError
from breakgraph.gates import Refusal
from breakgraph.graph_key import GraphKey
from breakgraph.rank_votes import Agreed, Standing, Vote, _text, decide, digest
from breakgraph.ranks import RankAgreement, RankGroup
from breakgraph.statistics import Reason
from tests.rank_scenarios import SCENARIOS

ROOT = Path(__file__).resolve().parent.parent
LAST = ("a_rank_that_dies", "a_rank_that_hangs")
DISAGREE = Reason.RANK_DISAGREEMENT.name

worlds = pytest.mark.parametrize("world", [2, 4])


@functools.cache
def outcomes(world: int, names: tuple[str, ...]) -> dict[str, list[Any]]:
    """What each rank returned from each scenario; None where its process ended before."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "error::RuntimeWarning", "-m", "tests.rank_scenarios"]
        processes = [
            subprocess.Popen(
                [*command, str(rank), str(world), folder, *names],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(world)
        ]
        try:
            printed = [process.communicate(timeout=150)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        found: dict[str, list[Any]] = {}
        for name in names:
            files = [Path(folder) / f"{name}.{rank}" for rank in range(world)]
            found[name] = [pickle.loads(file.read_bytes()) if file.exists() else None for file in files]
            if name not in LAST:
                assert None not in found[name], "\n".join(printed)
        return found


def outcome(name: str, *, world: int) -> list[Any]:
    """What each rank returned from one scenario; all that leave their processes alive share one start."""
    names = (name,) if name in LAST else tuple(name for name in SCENARIOS if name not in LAST)
    return outcomes(world, names)[name]


# Steps.


@worlds
def test_unequal_sizes_share_a_bucket(world: int) -> None:
    """REQ-F1, FAULT-R2: 5 and 7 requests replay the bucket of 8; a size above the largest bucket sends all to eager."""
    for rank, (first, ones, eights, above) in enumerate(outcome("unequal_sizes", world=world)):
        assert first[:2] == (True, 8)
        assert ones[:2] == (True, 1)
        assert eights[:2] == (True, 8)
        assert not above[0]
        assert above[2] == (Reason.ABOVE_LARGEST_BUCKET.name if rank == 1 else DISAGREE)
        assert rank == 1 or "ranks [1] cannot use a graph" in above[3]


@worlds
def test_an_idle_rank_goes_with_the_others(world: int) -> None:
    """REQ-F2: it answers FULL and pads: it replays the key that the busy rank samples and drafts with, and returns no row."""
    for rank, (key, rows, replayed, none_replayed, none_rows) in enumerate(outcome("idle_ranks", world=world)):
        assert replayed
        assert none_replayed
        assert (rows, none_rows) == (3 if rank == 0 else 0, 0)
        assert key == "GraphKey(4, draft_len=2)"  # FAST is the default


@worlds
def test_without_padding_unequal_sizes_are_eager(world: int) -> None:
    """REQ-F1: pad=False sends unequal sizes to eager on all ranks; equal ones replay, beside idle ranks too."""
    for unequal, equal, idle in outcome("without_padding", world=world):
        assert (unequal[0], unequal[2]) == (False, DISAGREE)
        assert "differ in sizes" in unequal[3]
        assert equal[:2] == (True, 8)
        assert idle[:2] == (True, 8)


@worlds
def test_other_keys_are_no_common_path(world: int) -> None:
    """REQ-F1, REQ-A2, REQ-A5: other draft lengths or sampling send all to eager; what may differ is declared."""
    for found in outcome("other_keys", world=world):
        drafts, sampling, greedy, *_ = found
        assert {drafts[2], sampling[2], greedy[2]} == {DISAGREE}
        assert "other fields of the key" in drafts[3]
        assert "sampling in the graph" in sampling[3]
        drafts, sampling, greedy = found[3:]
        assert {drafts[2], sampling[2]} == {DISAGREE}
        assert greedy[:2] == (True, 4)


@worlds
def test_a_gate_of_one_rank_sends_all_to_eager(world: int) -> None:
    """REQ-B, REQ-F1: that rank counts its own reason, the others the disagreement, and the next step replays again."""
    for rank, (found, eager) in enumerate(outcome("a_gate_on_one_rank", world=world)):
        assert [one[0] for one in found] == [True, False, True, False]
        reasons = [found[1][2], found[3][2]]
        assert reasons == ["GATE" if rank == 1 else DISAGREE, "DISABLED" if rank == 0 else DISAGREE]
        assert sum(eager.values()) == 2


@worlds
def test_a_rank_without_storage_for_padding(world: int) -> None:
    """REQ-F1, REQ-C4: where it would have to pad, all are eager; where it need not, all replay; later it has storage again."""
    for padded, full, mixed, later in outcome("no_storage_on_one_rank", world=world):
        assert (padded[0], padded[2]) == (False, DISAGREE)
        assert "ranks [1] have no storage" in padded[3]
        assert full[:2] == (True, 4)
        assert mixed[:2] == (True, 4)  # rank 1 has four requests, the others pad
        assert later[:2] == (True, 4)


@worlds
def test_another_plan_on_one_rank(world: int) -> None:
    """REQ-E10, REQ-F1: a plan that one rank's graph does not hold is found after the vote, and sends all to eager."""
    for rank, (first, other, again) in enumerate(outcome("another_plan_on_one_rank", world=world)):
        assert first[:2] == again[:2] == (True, 4)
        assert (other[0], other[2]) == (False, "OTHER_PLAN" if rank == 1 else DISAGREE)


@worlds
def test_an_error_of_one_rank_reaches_the_others_at_once(world: int) -> None:
    """FAULT-R1: its own exception is its own; the others get a RankError that names it, without waiting, and go on."""
    for rank, (first, second, after, seconds) in enumerate(outcome("an_error_before_a_step", world=world)):
        if rank == 1:
            assert first.startswith("StaticInputError")
            assert second == "own the gate's own"
        else:
            assert all(text.startswith("RankError: rank 1 raised before a step") for text in (first, second))
        assert after[:2] == (True, 4)
        assert seconds < 10


@worlds
def test_a_graph_that_one_rank_has_lost(world: int) -> None:
    """REQ-F1: a mismatch found at run time is known to one rank only; from then on it votes against graphs."""
    for rank, found in enumerate(outcome("a_graph_lost_at_run_time", world=world)):
        assert found[0][0]
        assert found[1][0] is (rank != 1)  # the step in which it is found; both paths have the padded shape
        assert [one[2] for one in found[2:]] == [DISAGREE] * 2


@worlds
def test_the_largest_token_count_decides_the_bucket(world: int) -> None:
    """REQ-F4, REQ-G5: also for an idle rank; and the costliest limit that a rank has measured is that of all."""
    for rank, (sixteen, eight, costly, above) in enumerate(outcome("prefill_buckets", world=world)):
        assert sixteen[:2] == (True, 16)
        assert eight[:2] == (True, 8)
        assert (costly[0], costly[2]) == (False, Reason.EAGER_IS_CHEAPER.name)
        assert above[2] == (Reason.ABOVE_LARGEST_BUCKET.name if rank == 1 else DISAGREE)


@worlds
def test_variants_that_may_differ_all_have_the_bucket(world: int) -> None:
    """REQ-F1: where a variant lacks a bucket that another has, no rank uses it: the sum over the ranks is that of one path."""
    for rank, (apart, fits, idle, small) in enumerate(outcome("variants_without_a_bucket", world=world)):
        sizes = (3, 7, 1, 1)[:world]
        assert apart == (False, [sum(sizes)] * sizes[rank])
        assert fits == (True, [4 * world] * (3, 4, 1, 1)[rank])
        assert idle == (False, [7] * (7 if rank == 0 else 0))
        assert small == (True, [4 * world] * (3 if rank == 0 else 0))


@worlds
def test_idle_ranks_agree_whatever_their_keys(world: int) -> None:
    """REQ-F2: idle keys of any variant replay the smallest graph together; a busy key of numpy's numbers is like any other."""
    for idle, busy in outcome("idle_with_other_keys", world=world):
        assert idle[:2] == busy[:2] == (True, 4)


@worlds
def test_ranks_at_different_runners_notice(world: int) -> None:
    """REQ-F1: a prefill step beside idle decode steps is an error on every rank, at once; the group goes on."""
    for text, after in outcome("other_runners", world=world):
        assert text.startswith("RankError: the ranks are at different runners: rank 0 at runner 0, rank 1 at runner 1")
        assert after[:2] == (True, 4)


@worlds
def test_an_error_after_the_vote_reaches_the_others(world: int) -> None:
    """REQ-F1, FAULT-R1: plan() that raises on one rank, for a replay or an eager step, is named to the others at once."""
    for rank, (replay, eager, after) in enumerate(outcome("planning_that_raises", world=world)):
        for text in (replay, eager):
            if rank == 1:
                assert text == "own plan's own"
            else:
                assert text.startswith("RankError: rank 1 raised while planning a step")
        assert after[:2] == (True, 4)


@worlds
def test_no_encoder_tokens_are_another_variant(world: int) -> None:
    """REQ-A7, REQ-F1: a rank without encoder tokens does not replay the graph with cross-attention that the others need."""
    for rank, (replayed, output) in enumerate(outcome("encoder_tokens_on_one_rank", world=world)):
        assert not replayed
        assert output == [2 if rank == 0 else 1002] * 3


@worlds
def test_random_traffic_stays_on_one_path(world: int) -> None:
    """REQ-F1, REQ-F2, FAULT-R2: 300 random steps in which a break of the model meets the other ranks at the padded shape."""
    found = outcome("random_traffic", world=world)
    for steps in zip(*(steps for steps, _ in found), strict=True):
        assert len({(replayed, bucket) for replayed, bucket, _ in steps}) == 1
        replayed, bucket, _ = steps[0]
        largest = max(size for *_, size in steps)
        assert not replayed or bucket == next(b for b in (1, 2, 4, 8) if b >= largest)
    assert 150 < sum(replayed for replayed, *_ in found[0][0]) < 300
    assert any(size == 0 and replayed for replayed, _, size in found[0][0])
    assert any(DISAGREE in eager for _, eager in found)


# Captures.


@worlds
def test_a_bucket_that_one_rank_cannot_capture_is_dropped_everywhere(world: int) -> None:
    """REQ-F3, FAULT-R1: whatever the phase, every rank drops it, the message names the rank, and nobody waits."""
    for dropped, graphs, (one, three), seconds in outcome("a_bucket_that_one_rank_cannot_capture", world=world):
        assert sorted(dropped) == [2, 4, 8]
        assert graphs == [1]
        assert f"rank 1 of {world}: warm-up: ValueError: not 8 in warm-up" in dropped[8]
        assert f"rank 1 of {world}: capture: ValueError: not 4 in capture" in dropped[4]
        assert f"rank 1 of {world}: verify: " in dropped[2]
        assert one[:2] == (True, 1)
        assert three[2] == Reason.DROPPED.name
        assert seconds < 20


@worlds
def test_proofs_take_the_same_runs_on_all_ranks(world: int) -> None:
    """REQ-F3: where one rank lacks an example, or finds a mismatch, all make the same runs: their collectives meet."""
    for graphs, dropped in outcome("proofs_that_go_apart", world=world):
        assert graphs == [4, 2]
        assert list(dropped) == [4]
        assert f"rank 1 of {world}: verify: CaptureError: decode[4]: the replay differs from eager" in dropped[4]


@worlds
def test_a_mismatch_in_service_keeps_the_ranks_together(world: int) -> None:
    """REQ-F1, REQ-F3: a graph that one rank lost is lost to all until every rank has cleared and captured again."""
    for rank, ((first, lost, again), refused) in enumerate(outcome("a_mismatch_in_service", world=world)):
        assert first[0] is (rank != 1)
        assert "only rank 1: key decode[4]" in refused
        assert (lost[0], lost[2]) == (False, DISAGREE)
        assert "hold other graphs" in lost[3]
        assert again[:2] == (True, 4)


@worlds
def test_limits_are_measured_in_one_order(world: int) -> None:
    """REQ-F4, REQ-G5: variants are measured in one order, and compared by value, whatever the order of sets in a process."""
    assert outcome("limits_measured_in_one_order", world=world) == [2] * world


@worlds
def test_ranks_meet_before_each_break_of_a_capture(world: int) -> None:
    """REQ-F5, REQ-F3: a rank with a break fewer is noticed at the next one's barrier; all drop the key, none hangs."""
    for dropped, seconds in outcome("fewer_breaks_on_one_rank", world=world):
        assert "that rank 1 ended" in dropped[2]
        assert "rank 0 of" in dropped[2]
        assert seconds < 20


@worlds
def test_ranks_with_other_keys_do_not_capture(world: int) -> None:
    """REQ-F3: every rank gets the error that says which ranks have other keys, before anything is captured."""
    others = [rank for rank in range(world) if rank != 1]
    for keys, options in outcome("other_buckets_on_one_rank", world=world):
        assert keys.startswith("CaptureError: the ranks are to capture different things; ")
        assert all(f"only rank {rank}: key decode[4]" in keys for rank in others)
        assert "only rank 1" not in keys
        assert "only rank 1: pad=False" in options


@worlds
def test_ranks_in_different_places_notice(world: int) -> None:
    """REQ-F3: a rank that captures beside ranks that step: all get an error that says who is where."""
    for text in outcome("a_step_beside_a_capture", world=world):
        assert text.startswith("RankError: the ranks are at different runners: rank 0 at runner 1, rank 1 at runner 0")


@pytest.mark.parametrize(("name", "bound"), [("a_rank_that_dies", 20), ("a_rank_that_hangs", 7)])
def test_a_rank_that_is_gone_ends_the_wait(name: str, bound: float) -> None:
    """REQ-F3, FAULT-R1: the other rank gets a RankError within the time-out of the group."""
    text, seconds = outcome(name, world=2)[0]
    assert text.startswith(
        "RankError: rank 0 of 2 waited for the others for a vote on a step, and at least one is gone"
    )
    assert seconds < bound


# The rule.

VOTES = st.builds(
    Vote,
    standing=st.sampled_from([Standing.CAN] * 6 + [Standing.CANNOT]),
    size=st.integers(0, 9),
    samples=st.booleans(),
    can_pad=st.booleans(),
    extent=st.integers(0, 3),
    coordinates=st.integers(1, 2),
    graphs=st.sampled_from([7] * 6 + [8]),
).map(lambda vote: attrs.evolve(vote, samples=False, extent=0, coordinates=0) if vote.is_idle else vote)


@given(votes=st.lists(VOTES, min_size=1, max_size=6), pad=st.booleans())
def test_ranks_agree_only_where_all_can_take_the_same_path(votes: Sequence[Vote], pad: bool) -> None:
    """REQ-F1, REQ-F2: a common path needs every rank, one kind of key, one size unless they pad; idle ranks fit any."""
    agreed = decide(votes, pad=pad)
    busy = [vote for vote in votes if vote.size]
    kinds = {(vote.samples, vote.coordinates) for vote in busy}
    sizes = {vote.size for vote in busy}
    possible = all(v.standing is Standing.CAN for v in votes) and len(kinds) <= 1 and (pad or len(sizes) <= 1)
    possible = possible and len({vote.graphs for vote in votes}) == 1
    assert isinstance(agreed, Agreed) is possible
    if isinstance(agreed, Refusal):
        assert agreed.reason is Reason.RANK_DISAGREEMENT
        return
    assert agreed.size == max(sizes, default=0)
    stuck = agreed.unpadded(8)
    assert (stuck is None) is all(vote.can_pad or vote.size == 8 for vote in votes)


def test_a_digest_is_the_same_in_every_process() -> None:
    """REQ-F1: keys are compared by a number that does not hang on the seed of a process's hashes."""
    code = "from breakgraph.rank_votes import digest; print(digest((('mode', 'wide'), ('n', 3))))"
    printed = {
        subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
        for _ in range(2)
    }
    assert printed == {str(digest((("mode", "wide"), ("n", 3))))}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("n", 1), ("n", True)),
        (("n", 1), ("n", np.int64(1))),
        (("n", 1.0), ("n", 1)),
        (frozenset({"a", "b", "c"}), frozenset({"c", "a", "b"})),
        (GraphKey(2, extra=(("n", True),)), GraphKey(2, extra=(("n", 1),))),
    ],
)
def test_equal_values_have_one_digest(one: object, other: object) -> None:
    """REQ-F1: what is equal as a key is equal between ranks, whichever of the two a process has met first."""
    assert one == other
    assert _text(one) == _text(other)
    assert digest(one) == digest(other) != digest(("n", 2))


@pytest.mark.parametrize("names", [("batch_size",), ["is_all_greedy"], "typo"])
def test_fields_that_may_differ_are_fields(names: object) -> None:
    """may_differ names fields of a key, other than sizes; anything else would have no effect, silently."""
    with pytest.raises(ConfigError, match="may_differ names"):
        RankAgreement(RankGroup(None), may_differ=names)  # type: ignore[arg-type]
    assert RankAgreement(RankGroup(None), may_differ="draft_len").may_differ == ("draft_len",)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="expected a RankGroup"):
        RankAgreement(None)  # type: ignore[arg-type]


def test_a_group_needs_torch_distributed() -> None:
    """A RankGroup made before init_process_group says what to call first."""
    with pytest.raises(ConfigError, match=r"torch\.distributed is not initialised"):
        RankGroup.create()
