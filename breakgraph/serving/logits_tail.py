"""What follows the logits of a step where they leave the graph: penalties, bias, the draw, log-probabilities.

Prefill always ends here, since its logits are made outside of its graph. A decode step does where a request asks for something
that is not captured; all others draw their tokens inside the graph. Everything goes on the current stream, right behind the step:
the logits may lie in a runner's output arena, which the next step overwrites. The host waits for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from breakgraph.serving.device_state import DeviceState, PendingLogprobs, PendingTokens, sampling_columns, upload
from breakgraph.serving.requests import Request
from breakgraph.serving.sampling import greedy, sample
from breakgraph.serving.token_counts import TokenCounts

__all__ = ["LogitsTail", "log_probabilities", "needs_logits", "penalised"]

# Beyond these a product with a logit leaves float32, and what is not finite leaves no order among tokens.
_PENALTIES = (1e-30, 1e30)


def needs_logits(requests: Sequence[Request]) -> bool:
    """Whether a step of these requests ends on its logits: where one of them does, all do."""
    return any(request.params.needs_logits for request in requests)


class LogitsTail:
    """Ends steps eagerly, on their logits.

    Args:
        state: Model and token table.
    """

    def __init__(self, state: DeviceState) -> None:
        self._state = state
        self._counts = TokenCounts(state.last_token.shape[0], vocab_size=state.decoder.vocab_size, device=state.device)

    def first(
        self, logits: torch.Tensor, requests: Sequence[Request], *, positions: npt.NDArray[np.int64]
    ) -> PendingTokens:
        """Ends a prefill step: the tables of tokens are written anew for the rows of its requests, then as `following`.

        Args:
            logits: ``(requests, vocabulary)`` float32.
            requests: Those whose tokens are all in the cache now, each with a row.
            positions: ``(requests,)``, the index in its sequence of the token that is drawn.
        """
        self._counts.begin([request for request in requests if request.params.penalises])
        return self.following(logits, requests, positions=positions)

    def following(
        self, logits: torch.Tensor, requests: Sequence[Request], *, positions: npt.NDArray[np.int64]
    ) -> PendingTokens:
        """Ends a step: draws a token for each request, writes it to the token table and counts it where penalties need it.

        The logits of a request that asks for none of it reach the draw bit for bit as they came.

        Cost: without penalties, bias and log-probabilities the draw alone; penalties read and write the logits about six times,
        log-probabilities four times.

        Args:
            logits: ``(requests, vocabulary)`` float32, left as they are.
            requests: See `first`.
            positions: See `first`.

        Returns:
            The tokens, in the order of the requests.
        """
        device = self._state.device
        params = [request.params for request in requests]
        rows = upload(np.array([request.row for request in requests], dtype=np.int64), device=device)
        counting = any(one.penalises for one in params)
        adjusted = self._penalised(logits, requests, rows=rows) if counting else logits
        if any(one.logit_bias for one in params):
            adjusted = _biased(adjusted, requests)
        if all(one.temperature == 0 for one in params):
            tokens = greedy(adjusted)
        else:
            columns = {name: upload(column, device=device) for name, column in sampling_columns(requests).items()}
            tokens = sample(adjusted, position=upload(positions, device=device), **columns)
        self._state.last_token.index_copy_(0, rows, tokens)
        if counting:
            self._counts.add(rows, tokens=tokens)
        wanted = [one.logprobs for one in params]
        if all(count is None for count in wanted):
            return PendingTokens(tokens)
        chosen, top, top_values = log_probabilities(logits, tokens, count=max(count or 0 for count in wanted))
        return PendingTokens(tokens, logprobs=PendingLogprobs(wanted, chosen=chosen, top=top, top_values=top_values))

    def _penalised(self, logits: torch.Tensor, requests: Sequence[Request], *, rows: torch.Tensor) -> torch.Tensor:
        params = [request.params for request in requests]
        columns = np.array(
            [
                np.clip([one.repetition_penalty for one in params], *_PENALTIES),
                [one.frequency_penalty for one in params],
                [one.presence_penalty for one in params],
            ],
            dtype=np.float32,
        )
        repetition, frequency, presence = upload(columns, device=self._state.device).unsqueeze(-1)
        counts, in_prompt = self._counts.of(rows)
        return penalised(
            logits, counts=counts, in_prompt=in_prompt, repetition=repetition, frequency=frequency, presence=presence
        )


def penalised(
    logits: torch.Tensor,
    *,
    counts: torch.Tensor,
    in_prompt: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> torch.Tensor:
    """Lowers, or raises, the logits of tokens that were used: first the repetition penalty, then the other two.

    A row whose penalties are 1, 0 and 0 keeps its logits bit for bit, whatever its counts.

    Args:
        logits: ``(rows, vocabulary)`` float32.
        counts: ``(rows, vocabulary)`` int32, how often the answer has each token.
        in_prompt: ``(rows, vocabulary)`` bool.
        repetition: ``(rows, 1)`` float32, above 0.
        frequency: ``(rows, 1)`` float32.
        presence: ``(rows, 1)`` float32.

    Returns:
        ``(rows, vocabulary)`` float32.
    """
    in_output = counts > 0
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    return torch.where(in_output | in_prompt, scaled, logits) - (counts * frequency + in_output * presence)


def log_probabilities(
    logits: torch.Tensor, tokens: torch.Tensor, *, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logarithms of the model's own probabilities: of the tokens that were chosen, and of the most probable ones.

    Args:
        logits: ``(rows, vocabulary)`` float32, as the model made them.
        tokens: ``(rows,)`` int64, the chosen ones.
        count: How many of the most probable are wanted; no more than the vocabulary has are returned.

    Returns:
        ``(rows,)`` float32 of the chosen tokens; ``(rows, count)`` int64 ids, most probable first and the lower id first among
        equals, and ``(rows, count)`` float32, theirs.
    """
    vocabulary = logits.shape[-1]
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    # A stable sort would do and costs many times as much; topk alone takes any of equals, and each backend others. The bits of
    # floats that are not negative are ordered like the floats, and with the id below them no two keys are equal.
    ids = torch.arange(vocabulary, device=logits.device)
    keys = (logprobs.abs().view(torch.int32).to(torch.int64) << 32) | ids
    top = keys.topk(min(count, vocabulary), largest=False).values & 0xFFFFFFFF
    return chosen, top, logprobs.gather(-1, top)


def _biased(logits: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
    """Adds the bias of every request to the logits of its tokens, in a copy."""
    vocabulary, device = logits.shape[-1], logits.device
    pairs = [
        (index * vocabulary + token, bias) for index, r in enumerate(requests) for token, bias in r.params.logit_bias
    ]
    places = upload(np.array([place for place, _ in pairs], dtype=np.int64), device=device)
    bias = upload(np.array([value for _, value in pairs], dtype=np.float32), device=device)
    result = logits.clone()
    flat = result.view(-1)
    flat.index_copy_(0, places, flat.index_select(0, places) + bias)  # no token twice, so no place twice
    return result
