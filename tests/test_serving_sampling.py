"""Sampling: the right distribution, exact supports, the same token wherever a request is computed."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from breakgraph.serving.sampling import greedy, hash_bits, sample


def _draw(logits: torch.Tensor, **options: float) -> torch.Tensor:
    """Samples each row of `logits`; an option is one number for all rows, seeds and positions may be tensors."""
    rows = logits.shape[0]

    def column(name: str, default: float, dtype: torch.dtype) -> torch.Tensor:
        value = options.get(name, default)
        return value if isinstance(value, torch.Tensor) else torch.full((rows,), value, dtype=dtype)

    return sample(
        logits,
        temperature=column("temperature", 1.0, torch.float32),
        top_k=column("top_k", 0, torch.int64),
        top_p=column("top_p", 1.0, torch.float64),
        min_p=column("min_p", 0.0, torch.float64),
        seed=column("seed", 0, torch.int64),
        position=column("position", 0, torch.int64),
    )


def _unsigned(bits: torch.Tensor) -> list[int]:
    return [value % 2**64 for value in bits.tolist()]


def test_the_hash_is_splitmix64() -> None:
    """The mixing steps equal a plain big-integer SplitMix64, whose first outputs for 1234567 are the published ones."""

    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    gamma = 0x9E3779B97F4A7C15
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [mix((1234567 + (i + 1) * gamma) % 2**64) for i in range(4)] == published
    seeds = [0, 1, 42, 2**63 - 1, 1234567]
    positions = [0, 1, 7, 100_000, 2**31]
    for seed in seeds:
        expected = [mix((mix((seed + gamma) % 2**64) + (p + 1) * gamma) % 2**64) for p in positions]
        got = hash_bits(torch.full((5,), seed), position=torch.tensor(positions))
        assert _unsigned(got) == expected


def test_hash_bits_are_balanced_over_seeds_and_positions() -> None:
    """Each of the 64 bits is set in about half of the hashes of neighbouring seeds and of neighbouring positions."""
    count = 20_000
    line, still = torch.arange(count), torch.full((count,), 3)
    for bits in (hash_bits(line, position=still), hash_bits(still, position=line)):
        share = torch.stack([(bits >> place) & 1 for place in range(64)]).double().mean(dim=1)
        assert (share - 0.5).abs().max() < 5 * 0.5 / math.sqrt(count)


def _chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities * counts.sum()
    keep = expected > 0
    assert not counts[~keep].any(), "a token of probability zero was drawn"
    return float(((counts[keep] - expected[keep]) ** 2 / expected[keep]).sum())


@pytest.mark.parametrize("vary", ["seed", "position"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.02},
        {"temperature": 1.5, "top_k": 8, "top_p": 0.9, "min_p": 0.05},
    ],
)
def test_distribution_equals_the_exact_probabilities(vary: str, options: dict[str, float]) -> None:
    """Chi-square of 40,000 draws against the exact renormalised probabilities, over a fixed set of seeds or positions."""
    logits = torch.randn(12, generator=torch.Generator().manual_seed(5)) * 1.5
    count = 40_000
    tokens = _draw(logits.expand(count, -1), **options, **{vary: torch.arange(count)})
    probabilities = _reference(logits, **options)
    degrees = int((probabilities > 0).sum()) - 1
    limit = degrees + 4 * math.sqrt(2 * degrees)  # about four standard deviations of the chi-square distribution
    assert _chi_square(torch.bincount(tokens, minlength=12).double(), probabilities) < limit


def _reference(
    logits: torch.Tensor, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> torch.Tensor:
    """Exact probabilities in float64, one token at a time, written as the definition reads."""
    p = torch.softmax(logits.double() / temperature, dim=-1).tolist()
    order = sorted(range(len(p)), key=lambda token: (-logits[token].item(), token))
    order = order[:top_k] if top_k else order
    total = sum(p[token] for token in order)
    kept, share = [], 0.0
    for token in order:
        if kept and share >= top_p:
            break
        kept.append(token)
        share += p[token] / total
    kept = [token for token in kept if p[token] >= min_p * p[order[0]]]
    result = torch.zeros(len(p), dtype=torch.float64)
    result[kept] = torch.tensor([p[token] for token in kept], dtype=torch.float64)
    return result / result.sum()


@pytest.mark.parametrize(
    ("options", "support"),
    [
        ({"top_k": 1}, {1}),
        ({"top_k": 3}, {1, 3, 0}),  # 0 and 2 are equally probable: the lower id is first
        ({"top_k": 100}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.4999}, {1}),
        ({"top_p": 0.5001}, {1, 3}),
        ({"top_p": 0.7499}, {1, 3}),
        ({"top_p": 1e-9}, {1}),
        ({"top_p": 1.0}, {0, 1, 2, 3, 4}),
        ({"min_p": 0.4999}, {1, 3}),
        ({"min_p": 0.5001}, {1}),
        ({"min_p": 1.0}, {1}),
        ({"top_k": 2, "top_p": 0.6}, {1}),  # of the two that top-k leaves, the first has two thirds
        ({"top_k": 4, "top_p": 0.9, "min_p": 0.2499}, {0, 1, 3, 2}),
        ({"temperature": 0.0, "top_k": 4}, {1}),
    ],
)
def test_supports_are_exact(options: dict[str, float], support: set[int]) -> None:
    """Every token that top-k, top-p and min-p leave is drawn, and no other; ties at the border included."""
    probabilities = torch.tensor([0.109375, 0.5, 0.109375, 0.25, 0.03125])
    if options.get("min_p") == 0.2499:
        probabilities = torch.tensor([0.125, 0.5, 0.125, 0.25, 1e-9])
    count = 4000
    tokens = _draw(probabilities.log().expand(count, -1), **options, seed=torch.arange(count))
    assert set(tokens.tolist()) == support


@pytest.mark.parametrize(("top_p", "kept"), [(0.25, 1), (0.2500001, 2), (0.5, 2), (0.75, 3), (0.7500001, 4), (1.0, 4)])
def test_top_p_is_exact_at_the_border(top_p: float, kept: int) -> None:
    """Four equal tokens: a share that is reached exactly needs no further token, one barely missed does."""
    tokens = _draw(torch.zeros(1000, 4), top_p=top_p, seed=torch.arange(1000))
    assert set(tokens.tolist()) == set(range(kept))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), vocabulary=st.sampled_from([2, 3, 33, 1000]))
def test_a_row_does_not_depend_on_its_batch(data: st.DataObject, vocabulary: int) -> None:
    """The token of a row is the same alone, in any place of any batch, and beside any other rows and options."""
    rows = data.draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    logits = torch.randn(rows, vocabulary, generator=generator) * 3
    number = st.floats(0.01, 1.0)
    columns = {
        "temperature": torch.tensor(data.draw(st.lists(st.floats(0, 2, width=32), min_size=rows, max_size=rows))),
        "top_k": torch.tensor(data.draw(st.lists(st.integers(0, vocabulary + 1), min_size=rows, max_size=rows))),
        "top_p": torch.tensor(data.draw(st.lists(number, min_size=rows, max_size=rows)), dtype=torch.float64),
        "min_p": torch.tensor(data.draw(st.lists(number, min_size=rows, max_size=rows)), dtype=torch.float64),
        "seed": torch.tensor(data.draw(st.lists(st.integers(0, 2**63 - 1), min_size=rows, max_size=rows))),
        "position": torch.tensor(data.draw(st.lists(st.integers(0, 2**31), min_size=rows, max_size=rows))),
    }
    together = sample(logits, **columns)
    order = torch.randperm(rows, generator=generator)
    shuffled = sample(logits[order], **{name: column[order] for name, column in columns.items()})
    assert torch.equal(shuffled, together[order])
    for row in range(rows):
        alone = sample(logits[row : row + 1], **{name: column[row : row + 1] for name, column in columns.items()})
        assert torch.equal(alone, together[row : row + 1])
        if columns["temperature"][row] == 0:
            assert together[row] == logits[row].argmax()


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    """Equal logits: the all-greedy path and a greedy row of the sampling path take the same, lowest token."""
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [2.0, 2.0, 2.0, 2.0]])
    assert greedy(logits).tolist() == [1, 0]
    assert _draw(logits, temperature=0.0).tolist() == [1, 0]


def test_extreme_rows_stay_inside_the_vocabulary() -> None:
    """Masked tokens are never drawn; tiny temperatures are greedy; a row of NaN still gives a valid index."""
    infinite = float("-inf")
    masked = torch.tensor([infinite, 0.0, infinite, 0.0]).expand(500, -1)
    assert set(_draw(masked, seed=torch.arange(500)).tolist()) == {1, 3}
    logits = torch.tensor([[1.0, 1.001, -50.0]]).expand(100, -1)
    assert set(_draw(logits, temperature=1e-30, seed=torch.arange(100)).tolist()) == {1}
    broken = _draw(torch.full((3, 7), float("nan")))
    assert bool(((broken >= 0) & (broken < 7)).all())


@pytest.mark.gpu
def test_the_same_tokens_on_both_devices() -> None:
    """Same logits, seeds and positions: a CPU and a CUDA device draw the same tokens."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(64, 50_000, generator=generator) * 2
    columns = {
        "temperature": torch.rand(64, generator=generator) * 1.5,
        "top_k": torch.randint(0, 200, (64,), generator=generator),
        "top_p": torch.rand(64, generator=generator, dtype=torch.float64).clamp(min=0.1),
        "min_p": torch.rand(64, generator=generator, dtype=torch.float64) * 0.1,
        "seed": torch.randint(0, 2**62, (64,), generator=generator),
        "position": torch.randint(0, 10_000, (64,), generator=generator),
    }
    on_device = sample(logits.cuda(), **{name: column.cuda() for name, column in columns.items()}).cpu()
    assert torch.equal(on_device, sample(logits, **columns))
