"""Mixture of experts: an MLP whose rows go through a few of many experts each, chosen by a router.

Which expert computes which row is known on the device only, and the host never asks: every tensor here has a shape
that the number of rows alone decides. So the whole MLP lies in a segment of a graph. Two ways to compute it:

- `grouped`: the pairs of row and expert, sorted by expert, go through two grouped matrix products. Work is that of the
  chosen experts. Which rows lie in which group is an array of offsets on the device.
- `dense`: every expert computes every row, and what was not chosen is masked. Any device, any dtype; the reference.

Rows of padding are not routed: they belong to no group of `grouped`, and what `dense` computes of them is masked. Both
sum the experts of a row in a fixed order and without atomics, so equal inputs give equal bits.
"""

from __future__ import annotations

import attrs
import torch
import torch.nn.functional as F
from torch import nn

from breakgraph.errors import ConfigError
from breakgraph.models.config import ExpertsConfig
from breakgraph.models.linear import parameter
from breakgraph.models.ops import Ops

__all__ = ["KINDS", "ExpertsChoice", "SparseMLP", "choose_experts"]

KINDS = ("auto", "grouped", "dense")

# Where torch multiplies groups in one kernel that reads the offsets on the device. On other GPUs, and for other dtypes,
# torch.nn.functional.grouped_mm copies the offsets to the host and waits for them, which no graph can hold.
GROUPED_MAJORS = (9, 10)
# The kernel loads 16 bytes at a time, and keeps the sizes of all groups in one block of threads.
GROUPED_ALIGNMENT = 8
GROUPED_MOST = 1023
# On a CPU torch multiplies group by group: in these dtypes, and over rows of whole 16 bytes.
CPU_GROUPED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CPU_ROW_BYTES = 16


@attrs.frozen
class ExpertsChoice:
    """How the experts are computed, decided once when a decoder is made.

    Attributes:
        kind: "grouped" or "dense".
        reason: Why, for people.
    """

    kind: str
    reason: str


def choose_experts(
    experts: ExpertsConfig, *, hidden_size: int, device: torch.device, dtype: torch.dtype, kind: str = "auto"
) -> ExpertsChoice:
    """Choose how the experts of a decoder are computed.

    Args:
        experts: Their number and width.
        hidden_size: Width of the residual stream.
        device: Where the weights are.
        dtype: What they are held in.
        kind: "auto"; or "grouped" or "dense" to have that one. A CPU groups on request only: there torch multiplies
            group by group, and the bits of a row may depend on how many rows its group has.

    Raises:
        ConfigError: `kind` is unknown, or "grouped" would fail here or wait for the device.
    """
    if kind not in KINDS:
        raise ConfigError(
            f"experts are {kind!r}; expected {', '.join(KINDS)}.",
            why="It names how a mixture of experts is computed.",
            fix="Use auto.",
        )
    if kind == "dense":
        return ExpertsChoice("dense", "asked for")
    against = _against_grouped(experts, hidden_size=hidden_size, device=device, dtype=dtype)
    if against is None:
        return ExpertsChoice("grouped", "torch has a grouped matrix product for bfloat16 on this GPU")
    if kind == "auto":
        return ExpertsChoice("dense", against)
    if device.type == "cpu":
        against = _against_cpu(experts, hidden_size=hidden_size, dtype=dtype)
        if against is None:
            return ExpertsChoice("grouped", "asked for")
    raise ConfigError(
        f"experts cannot be grouped: {against}.",
        why="torch's grouped matrix product would fail, or wait for the device, which a graph cannot.",
        fix="Use auto, or bfloat16 weights on a GPU of compute capability 9.0 or 10.x.",
    )


def _against_grouped(
    experts: ExpertsConfig, *, hidden_size: int, device: torch.device, dtype: torch.dtype
) -> str | None:
    if device.type != "cuda" or torch.version.cuda is None:
        return f"torch has no grouped matrix product that a graph of {device.type} could hold"
    major, minor = torch.cuda.get_device_capability(device)
    if major not in GROUPED_MAJORS:
        return f"on compute capability {major}.{minor} torch's grouped matrix product waits for the device"
    if dtype is not torch.bfloat16:
        return f"torch's grouped matrix product waits for the device when weights are {dtype}"
    if hidden_size % GROUPED_ALIGNMENT or experts.inner_size % GROUPED_ALIGNMENT:
        return f"the widths {hidden_size} and {experts.inner_size} are not multiples of {GROUPED_ALIGNMENT}"
    if experts.num_experts > GROUPED_MOST:
        return f"there are {experts.num_experts} experts, more than {GROUPED_MOST}"
    return None


def _against_cpu(experts: ExpertsConfig, *, hidden_size: int, dtype: torch.dtype) -> str | None:
    if dtype not in CPU_GROUPED_DTYPES:
        return f"torch has no grouped matrix product for {dtype} on a CPU"
    most = CPU_ROW_BYTES // dtype.itemsize
    if hidden_size % most or experts.inner_size % most:
        return f"the widths {hidden_size} and {experts.inner_size} are not multiples of {most}, as {dtype} asks for"
    return None


class SparseMLP(nn.Module):
    """Router and experts of one layer. Parameters are uninitialised until they are loaded.

    Args:
        experts: Their number, width and how many a row gets.
        hidden_size: Width of the residual stream (H).
        choice: How they are computed.
        ops: Elementwise kernels.
        device: Where the parameters are made.
        dtype: What they are held in.

    Attributes:
        router: (experts, H).
        gate_up: (experts, 2 * inner, H), the gate above the up projection.
        down: (experts, H, inner).
    """

    numbers: torch.Tensor

    def __init__(
        self,
        experts: ExpertsConfig,
        *,
        hidden_size: int,
        choice: ExpertsChoice,
        ops: Ops,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        count, inner = experts.num_experts, experts.inner_size
        self.config = experts
        self.choice = choice
        self.ops = ops
        self.router = parameter(count, hidden_size, device=device, dtype=dtype)
        self.gate_up = parameter(count, 2 * inner, hidden_size, device=device, dtype=dtype)
        self.down = parameter(count, hidden_size, inner, device=device, dtype=dtype)
        self.register_buffer("numbers", torch.arange(count, device=device), persistent=False)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        """Send every row through its experts.

        Args:
            x: (T, H), in the dtype of the weights. It is not overwritten.
            padding: bool (T,), True for rows that no expert is to compute. Nothing in them reaches another row,
                not even NaN.

        Returns:
            (T, H), a new tensor; zero in rows of padding. No host sync either way. `grouped` costs the chosen experts
            and two copies of `T * experts_per_token` rows; `dense` costs all experts for all rows.
        """
        ids, weights = self.route(x)
        if self.choice.kind == "grouped":
            return self._grouped(x, ids, weights, padding)
        return self._dense(x, ids, weights, padding)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts of each row, best first, and their shares of its output.

        Args:
            x: (T, H).

        Returns:
            int64 (T, experts_per_token), and float32 of that shape. Shares stay in float32 whatever the weights are:
            that is free, since they multiply outputs that are read anyway.
        """
        logits = F.linear(x, self.router)
        weights, ids = logits.softmax(-1, dtype=torch.float32).topk(self.config.experts_per_token, dim=-1)
        if self.config.renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return ids, weights

    def _grouped(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, padding: torch.Tensor
    ) -> torch.Tensor:
        count, each = self.config.num_experts, self.config.experts_per_token
        # One above the last expert: the sort puts rows of padding behind all groups, and no group's end reaches them.
        owners = ids.masked_fill(padding.unsqueeze(1), count).flatten()
        # Stable, so that the order within a group is that of the rows, whoever else is in the batch.
        owners, order = owners.sort(stable=True)
        ends = torch.searchsorted(owners, self.numbers, right=True, out_int32=True)
        rows = x.index_select(0, order // each)
        gates = F.grouped_mm(rows, self.gate_up.transpose(1, 2), offs=ends)
        out = F.grouped_mm(self.ops.silu_and_mul(gates), self.down.transpose(1, 2), offs=ends)
        out.mul_(weights.flatten().index_select(0, order).unsqueeze(1))
        # Behind the last group nothing was written: what lies there may be NaN, and zero times NaN is NaN.
        out.masked_fill_(owners.eq(count).unsqueeze(1), 0)
        # `order` names every place once, so this is a permutation and no two writes meet.
        placed = torch.empty_like(out).index_copy_(0, order, out)
        return placed.view(*ids.shape, -1).sum(1)

    def _dense(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        rows, count = x.shape[0], self.config.num_experts
        shares = torch.zeros(rows, count, dtype=weights.dtype, device=x.device).scatter_(1, ids, weights)
        # True where an expert does not compute a row. Masked, not only weighted with zero: what an expert makes of a row
        # that it was not chosen for may overflow.
        masked = torch.ones(rows, count, dtype=torch.bool, device=x.device)
        masked.scatter_(1, ids, padding.unsqueeze(1).expand_as(ids))
        total = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        for expert in range(count):
            out = F.linear(self.ops.silu_and_mul(F.linear(x, self.gate_up[expert])), self.down[expert])
            column = slice(expert, expert + 1)
            total.add_((out * shares[:, column]).masked_fill_(masked[:, column], 0))
        return total.to(x.dtype)
