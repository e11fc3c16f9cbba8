"""Sampling inside a graph: pure tensor operators, one seed per row, no host in the loop.

Every row draws ``u = hash(seed, position)`` and takes the inverse CDF of its renormalised probabilities, so
a request's tokens depend on its own seed, positions and probabilities only: not on its row, on the batch or
on how often the scheduler moved it. A generator would be cheaper to write and wrong: its offset counts
draws, so a request's tokens would change with its neighbours.

The order is temperature, top-k, top-p, min-p; each works on what the one before left. All of it is
capturable: fixed shapes, no host synchronisation, greedy rows (temperature 0) mixed with sampled ones.

Two choices make the result the same on every backend:

- Probabilities become integer weights before anything is summed. Integer sums are exact in any order, so
  a parallel scan on a GPU and a loop on a CPU build the same CDF; floating-point scans do not, and may even
  fall at a token of probability zero.
- The CDF runs in token order, not in sorted order. A rounding difference between two batches may swap two
  nearly equal probabilities; in sorted order that would change the token for most ``u``, in token order
  it changes nothing.
"""

from __future__ import annotations

import torch

__all__ = ["greedy", "hash_bits", "sample"]

# SplitMix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014), with the
# finaliser constants "Mix13" of David Stafford, as in Sebastiano Vigna's public-domain splitmix64.c.
# Written as signed 64-bit values, because torch's int64 is signed; products wrap modulo 2**64 all the same.
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)

# Weights of one row must sum to less than 2**53: then one float64 product finds the place in the CDF exactly.
_WEIGHT_BITS = 52


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """Returns the most probable token of each row; the lowest id of equals.

    Args:
        logits: ``(rows, vocabulary)``, any floating dtype.

    Returns:
        ``(rows,)`` int64.
    """
    return torch.argmax(logits, dim=-1)


def sample(
    logits: torch.Tensor,
    *,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
) -> torch.Tensor:
    """Draws one token for each row.

    Cost: one stable sort of the rows and a dozen passes over ``(rows, vocabulary)``.

    Args:
        logits: ``(rows, vocabulary)`` float32, not yet divided by the temperature.
        temperature: ``(rows,)`` float32; 0 takes the most probable token.
        top_k: ``(rows,)`` int64; keeps this many most probable tokens (lower ids first among equals), 0 keeps all.
        top_p: ``(rows,)`` float64; keeps the smallest set of most probable tokens, out of those that top-k left,
            whose share reaches it; 1 keeps all.
        min_p: ``(rows,)`` float64; drops tokens less probable than this share of the most probable one.
        seed: ``(rows,)`` int64, the request's seed.
        position: ``(rows,)`` int64, the index in its sequence of the token that is drawn.

    Returns:
        ``(rows,)`` int64 token ids.
    """
    vocabulary = logits.shape[-1]
    best = logits.amax(dim=-1, keepdim=True)
    is_greedy = temperature == 0
    divisor = torch.where(is_greedy, torch.ones_like(temperature), temperature).unsqueeze(-1)
    share = torch.exp((logits - best) / divisor)  # of the most probable token's probability: in [0, 1], its own is 1
    scale = float(2 ** (_WEIGHT_BITS - vocabulary.bit_length()))
    weights = (share * scale).to(torch.int64)

    order = torch.sort(logits, dim=-1, descending=True, stable=True).indices
    sorted_weights = weights.gather(-1, order)
    rank = torch.arange(vocabulary, device=logits.device)
    limit = torch.where(top_k == 0, torch.full_like(top_k, vocabulary), top_k).unsqueeze(-1)
    in_top_k = rank < limit
    inclusive = torch.where(in_top_k, sorted_weights, torch.zeros_like(sorted_weights)).cumsum(-1)
    exclusive = (inclusive - sorted_weights).to(torch.float64)
    nucleus = top_p.unsqueeze(-1) * inclusive[:, -1:].to(torch.float64)
    in_top_p = (exclusive < nucleus) | (rank == 0)
    kept_sorted = in_top_k & in_top_p
    kept = torch.zeros_like(kept_sorted).scatter(-1, order, kept_sorted)
    kept = kept & (share.to(torch.float64) >= min_p.unsqueeze(-1))

    cdf = torch.where(kept, weights, torch.zeros_like(weights)).cumsum(-1)
    # u <= 1 - 2**-53 and total < 2**53, so the product rounds to less than total: the place always exists.
    uniform = (hash_bits(seed, position=position) >> 11 & ((1 << 53) - 1)).to(torch.float64) * 2.0**-53
    place = (uniform.unsqueeze(-1) * cdf[:, -1:].to(torch.float64)).floor().to(torch.int64)
    # The clamp is for rows of NaN: a wrong model must not turn into an index outside the embedding table.
    drawn = (cdf <= place).sum(dim=-1).clamp(max=vocabulary - 1)
    return torch.where(is_greedy, greedy(logits), drawn)


def hash_bits(seed: torch.Tensor, *, position: torch.Tensor) -> torch.Tensor:
    """Returns 64 random bits for each pair of seed and position: SplitMix64, twice.

    The seed is mixed before the position is added, else the streams of two seeds could be shifted copies of
    one another.

    Args:
        seed: int64, any shape.
        position: int64 of the same shape, not negative.

    Returns:
        int64 of that shape; the bits of the unsigned result.
    """
    return _mix(_mix(seed + _GAMMA) + (position + 1) * _GAMMA)


def _mix(bits: torch.Tensor) -> torch.Tensor:
    bits = (bits ^ _shift_right(bits, 30)) * _MIX_1
    bits = (bits ^ _shift_right(bits, 27)) * _MIX_2
    return bits ^ _shift_right(bits, 31)


def _shift_right(bits: torch.Tensor, count: int) -> torch.Tensor:
    # torch shifts signed values arithmetically; the mask removes the copies of the sign bit.
    return (bits >> count) & ((1 << (64 - count)) - 1)
