"""Does a model of transformers give its own numbers through our attention? Found out by running it, before it may serve."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from breakgraph.errors import BreakgraphError, ConfigError
from breakgraph.models.huggingface import ATTENTION, AdaptedDecoder, Site, register
from breakgraph.models.huggingface_breaks import Fit
from breakgraph.models.huggingface_fit import experts_of, find_fit, held_still, moved, numbers_rows
from breakgraph.models.huggingface_own import Attentions, Own, Said
from breakgraph.models.huggingface_packed import DECODED, Packed, cuts_of
from breakgraph.models.huggingface_sites import (
    ENDLESS,
    bounds,
    find_sites,
    limit_of,
    position_limit,
    refusal,
    score_operations,
    unread,
)
from breakgraph.models.transformers_files import one_line

__all__ = ["Probed", "adapt", "position_limit"]

_LOG = logging.getLogger(__name__)
_LONGEST = 96  # tokens that a sequence of the probe may always have
_UNSAID = 2048  # most tokens of the long sequence where nothing says how many positions there are
_LONE = (10, 64)  # tokens that are run alone, one a step: of any model, and of a small one in an exact type
_MORE = range(14, 22)  # tokens of more sequences, where half precision is in doubt
_MORE_TIMES = 6  # steps of one, two and three rows there
_SMALL = 1 << 24  # parameters of a small model: a step of one row takes milliseconds
_EXACT = (torch.float32, torch.float64)
_TOLERANCE = 1e-5
_MOST = 1e-4  # however far the model's own attentions are from each other
_FAR = 1e-3  # of a sequence at the last positions, whose large angles are rounded; of a row in the long sequence
_FAR_ROWS = 0.01  # share of the rows of the long sequence that may be farther
_COARSE = 5e-2  # of half precision
# In a long sequence a rounding that sends rows to other experts carries on: gpt_oss in bfloat16 reaches 0.2, and 0.03 in the
# short ones. Logits of another row are 0.45 and more away.
_CARRIED = 10
_CARRIED_MOST = 0.3
_WORK = {"cpu": 5e10, "cuda": 1e14}  # floating point operations for which the long sequence is worth about a second
_LOGITS = {"cpu": 1 << 27, "cuda": 6 << 27}  # most logits at a time
_SCORES = {"cpu": 1 << 25, "cuda": 1 << 29}  # most scores of one layer's attention at a time
_SOME_ROWS = 8
_CHUNKS = 8  # of the long sequence: the model sees many more rows at once than a step has


@attrs.frozen(eq=False)
class Probed:
    """A model that passed.

    Attributes:
        decoder: The adapter.
        max_positions: Longest sequence that was shown to be right, or that the configuration promises.
        error: Largest difference of a logit from the model's own, relative to the largest logit; in half precision that of
            three quarters of the rows.
    """

    decoder: AdaptedDecoder
    max_positions: int
    error: float


def adapt(model: Any) -> Probed:
    """Put a causal model of transformers behind our attention, and compare it with itself.

    Args:
        model: A `PreTrainedModel` with a language model head, on its device, in eval mode. Its attention is ours afterwards.

    Returns:
        The adapter.

    Raises:
        ConfigError: It would give other numbers, or cannot be seen to give the same; the message has the reason. Its
            attention is what it was before.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel) or not callable(getattr(type(model), "get_decoder", None)):
        raise ConfigError(
            f"adapt() got {model!r:.40}; expected a causal language model of transformers."
            if model is None or isinstance(model, str)
            else f"adapt() got a {type(model).__name__}; expected a causal language model of transformers.",
            why="Its body is run over a paged cache, and its head makes the logits.",
            fix="Pass AutoModelForCausalLM.from_pretrained(...).eval(); for a folder there is load_transformers(path).",
        )
    attentions = Attentions(model)
    experts = experts_of(model)
    register()
    try:
        with torch.autocast(next(model.parameters()).device.type, enabled=False):  # steps have none either
            return _Probe(model, attentions).run()
    except BaseException as error:
        attentions.back()
        if experts is not None and experts != experts_of(model):
            model.set_experts_implementation(experts)
        if isinstance(error, BreakgraphError | torch.OutOfMemoryError) or not isinstance(error, Exception):
            raise  # says nothing of the model
        raise refusal(model, f"its forward raised {type(error).__name__}: {one_line(error)}") from error


class _Probe:
    def __init__(self, model: Any, attentions: Attentions) -> None:
        self.model = model
        self.config = model.config.get_text_config()
        self.attentions = attentions
        self.device = next(model.parameters()).device
        self.limit = limit_of(model)

    def run(self) -> Probed:
        """All tests, cheap ones first."""
        if training := [path for path, module in self.model.named_modules() if module.training]:
            raise refusal(self.model, f"{training[0] or 'it'} is in training mode", fix="Call eval() on it first.")
        if self.model.get_output_embeddings() is None:
            raise refusal(
                self.model,
                "it has no language model head",
                fix="Load it with AutoModelForCausalLM.from_pretrained(...).",
            )
        if getattr(self.config, "is_encoder_decoder", False):
            raise refusal(self.model, "it has an encoder")
        with torch.no_grad():
            own = self.attentions.text
            self.attentions.choose(ATTENTION)
            sites = find_sites(self.model, self._tokens(5))
            # Soft caps and sinks are left out by sdpa in some versions of transformers.
            plain = all(site.variant.softcap is None and site.variant.sinks is None for site in sites)
            # A model that was adapted before has another than ours of its own.
            reference = own if plain and own != ATTENTION else "eager"
            others = ("eager", "sdpa") if plain else ()
            self.own = Own(self.model, self.attentions, reference=reference, others=others)
            decoder = AdaptedDecoder(self.model, sites=sites, fit=Fit(still=held_still(self.model)))
            affordable = self._affordable(sites)
            longest = self._longest(sites, affordable=affordable)
            positions = self._positions(sites, longest)
            sequences = [self._tokens(longest), self._tokens(13), self._tokens(11), self._repeated(12)]
            error = self._compared(decoder, sequences)
            before = experts_of(self.model)
            fit, experts = find_fit(decoder)
            decoder = decoder.fitted(fit, experts=experts)
            if fit.breaks or experts_of(self.model) != before:
                error = self._compared(decoder, sequences)
            reach = positions if self.limit is not None else min(positions, affordable, _UNSAID)
            self._compare_far(decoder, reach)
            long = self._compare_long(decoder, min(affordable, reach), longest=longest, short=error)
            if (line := numbers_rows(decoder)) is not None:
                # Steps up to that length were right, so what it makes of its numbers begins later, if at all.
                begins = int(getattr(self.config, "floor_scale", None) or 0) - 1
                positions = min(positions, max(long, begins))
                _LOG.warning("sequences end at %d tokens: the model numbers the rows of a step at %s", positions, line)
            against = moved(decoder, longest=long)
            if against is not None:
                fit = attrs.evolve(fit, prefill=fit.prefill or against, decode=fit.decode or against)
                decoder = decoder.fitted(fit, experts=experts)
        return Probed(decoder, positions, error)

    def _compared(self, decoder: AdaptedDecoder, sequences: Sequence[torch.Tensor]) -> float:
        """How far our logits are from the model's own; refused where they are too far."""
        alone = self._tokens(self._alone(many=decoder.dtype in _EXACT and self._small()))
        if decoder.dtype not in _EXACT:
            # A few rows of a kind may all be sent to other experts. More rows of it decide: a fault is in as many of those.
            with contextlib.suppress(ConfigError):
                return self._compared_rows(decoder, sequences, alone)
            lengths = [min(count, self.limit or count) for count in _MORE]
            sequences = [*sequences, *map(self._tokens, lengths)]
            alone = self._tokens(self._alone(many=True))
            return self._compared_rows(decoder, sequences, alone, times=_MORE_TIMES)
        return self._compared_rows(decoder, sequences, alone)

    def _compared_rows(
        self, decoder: AdaptedDecoder, sequences: Sequence[torch.Tensor], alone: torch.Tensor, *, times: int = 1
    ) -> float:
        """As said of `_compared`: of sequences side by side, and of one that is run alone."""
        exact = decoder.dtype in _EXACT
        cuts, decoded = _few_rows(len(alone), times=times)
        ours = [
            Packed(decoder, sequences).logits(),
            Packed(decoder, [alone], padding=0).steps([cuts], decoded=decoded),
        ]
        said = self.own.say([*sequences, alone])
        kinds = _kinds([cuts_of(len(ids), chunks=2) for ids in sequences], cuts, device=self.device)
        # In half precision a rounding may send a row to other experts: a quarter of the rows may be off, and of each kind of rows
        # no more than a quarter. What a wrong window or a leaking state changes is more than that.
        share = 1.0 if exact else 0.75

        def measured(logits: torch.Tensor) -> float:
            # By itself the model has no kinds of rows: of all rows its distance from itself is the surer number.
            of = kinds if times == 1 else {"": kinds[""]}
            return max(_differences(logits, said.logits, of, share=share).values())

        found = _differences(torch.cat(ours), said.logits, kinds, share=share)
        kind, error = max(found.items(), key=lambda pair: pair[1])
        least, multiple = (_TOLERANCE, 4) if exact else (_COARSE, 2 if times == 1 else 3)
        allowed = self._allowed(decoder, error, said, measured, least=least, times=multiple)
        if not error <= allowed:
            raise refusal(
                self.model,
                f"packed, chunked and decoded, its logits differ from its own {self.own.reference} attention by {error:.2g} of "
                f"the largest{kind}; {allowed:.2g} is allowed",
            )
        return found[""]

    def _allowed(
        self,
        decoder: AdaptedDecoder,
        error: float,
        said: Said,
        measure: Callable[[torch.Tensor], float],
        *,
        least: float,
        times: int = 2,
    ) -> float:
        """How large an error may be: what lies as close as the model does to itself is no fault of ours.

        A deep recurrence multiplies the last bit; in half precision a rounding sends rows to other experts.
        """
        exact = decoder.dtype in _EXACT
        most = _MOST if exact else _CARRIED_MOST
        if not least < error <= most:
            return least
        # In steps of one row every product sums in another order, which the model by itself never does: `times` the distance.
        return max(least, min(times * self.own.spread(said, measure, exact=exact), most))

    def _alone(self, *, many: bool) -> int:
        """Tokens of the sequence that is run alone."""
        return min(_LONE[many], self.limit or _LONE[1])

    def _small(self) -> bool:
        parameters: int = sum(parameter.numel() for parameter in self.model.parameters())
        return parameters < _SMALL

    def _compare_far(self, decoder: AdaptedDecoder, positions: int) -> None:
        """A sequence at the last positions beside one at the first: each must be what it is alone."""
        near, far = self._tokens(9), self._tokens(8)
        start = positions - len(far)
        if start <= 0:
            return
        at = [torch.arange(first, first + len(ids), device=self.device) for first, ids in ((0, near), (start, far))]
        try:
            said = self.own.say([near, far], positions=at)
        except TypeError:  # its positions cannot be chosen
            return
        exact = decoder.dtype in _EXACT

        def measured(logits: torch.Tensor) -> float:
            return _difference(logits, said.logits, share=1.0 if exact else 0.75)

        error = measured(Packed(decoder, [near, far], starts=[0, start]).logits())
        least = _FAR if exact else _COARSE
        if not error <= (least if exact else self._allowed(decoder, error, said, measured, least=least)):
            raise refusal(
                self.model,
                f"beside a sequence at position {positions - 1} its logits differ by {error:.2g} of the largest",
            )

    def _affordable(self, sites: Sequence[Site]) -> int:
        """Tokens of a sequence that takes about a second, and not too much memory."""
        kind = self.device.type if self.device.type in _WORK else "cpu"
        each = 2 * sum(parameter.numel() for parameter in self.model.parameters())
        pair = score_operations(sites)
        # tokens * each + tokens^2 * pair = work
        tokens = (math.sqrt(each**2 + 4 * pair * _WORK[kind]) - each) / (2 * pair)
        scores = math.isqrt(_SCORES[kind] // max(site.heads for site in sites))
        return min(int(tokens + 1e-6), _LOGITS[kind] // int(self.config.vocab_size), scores)

    def _compare_long(self, decoder: AdaptedDecoder, tokens: int, *, longest: int, short: float) -> int:
        """A sequence as long as can be afforded, up to the last position: what begins at a length shows. Returns the length.

        A rounding may send a row to other experts, and the rows that look at it follow: what is compared is the middle of
        every few rows; in exact types also how many rows are far. `short` is the error of the short sequences.
        """
        if tokens <= longest:
            return longest
        exact = decoder.dtype in _EXACT
        said = self.own.say([self._tokens(tokens)])

        def measured(logits: torch.Tensor) -> float:
            return max(float(some.median()) for some in _rows(logits, said.logits).split(_SOME_ROWS))

        ours = Packed(decoder, [said.inputs[0][0]]).logits(chunks=_CHUNKS)
        error = measured(ours)
        if exact:
            allowed = _MOST
        else:
            coarse = max(_COARSE, min(_CARRIED * short, _CARRIED_MOST))
            # A rounding spoils some rows; most of them are never far.
            most = float(_rows(ours, said.logits).median()) <= coarse
            allowed = self._allowed(decoder, error, said, measured, least=coarse) if most else coarse
        if not error <= allowed:
            raise refusal(
                self.model,
                f"in a sequence of {tokens} tokens its logits differ from its own by {error:.2g} of the largest",
            )
        far = int((_rows(ours, said.logits) > _FAR).sum())
        if exact and far > _FAR_ROWS * tokens:
            raise refusal(
                self.model,
                f"in a sequence of {tokens} tokens the logits of {far} differ from its own by more than {_FAR:.0e}",
            )
        return tokens

    def _repeated(self, count: int) -> torch.Tensor:
        """One token again and again: a router sends all its rows to the same experts."""
        return self._tokens(count)[:1].expand(count)

    def _tokens(self, count: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(count)
        ids = torch.randint(min(3, self.config.vocab_size - 1), self.config.vocab_size, (count,), generator=generator)
        return ids.to(self.device)

    def _longest(self, sites: Sequence[Site], *, affordable: int) -> int:
        """Tokens of the probe: twice past every window and chunk that can be afforded, so that a wrong one shows."""
        small = [bound for bound in bounds(sites) if 2 * bound + 3 <= max(_LONGEST, affordable)]
        return max([2 * bound + 3 for bound in small], default=0) or 19

    def _positions(self, sites: Sequence[Site], longest: int) -> int:
        untested = [bound for bound in (*bounds(sites), *unread(self.model)) if bound >= longest]
        return min([ENDLESS if self.limit is None else self.limit, *untested])


def _few_rows(length: int, *, times: int = 1) -> tuple[list[int], int]:
    """Cuts of steps of one, two and three rows, some times over, then of one row each; and how many those are."""
    decoded = max(length - 6 * times, 0)
    cuts = [first + cut for first in range(0, 6 * times, 6) for cut in (0, 1, 3) if first + cut < length - decoded]
    return [*cuts, *range(length - decoded, length + 1)], decoded


def _kinds(packed: Sequence[Sequence[int]], alone: Sequence[int], *, device: torch.device) -> dict[str, torch.Tensor]:
    """Which rows are of a kind that steps may treat otherwise than the rest, by the words for it.

    Args:
        packed: Cuts of each sequence that is run beside others.
        alone: Cuts of the sequence that is run alone, after those.
        device: Where they are needed.
    """
    kinds: dict[str, list[int]] = {"": [], " in decoded rows": [], " in first rows of chunks": []}
    kinds |= {" in steps of one row": [], " in steps of two and three rows": []}
    before = 0
    for cuts in packed:
        chunks = [cut for cut in cuts[1:] if cut < cuts[-1] - DECODED]
        kinds[" in first rows of chunks"] += [before + row for cut in chunks for row in (cut, cut + 1)]
        kinds[" in decoded rows"] += range(before + cuts[-1] - DECODED, before + cuts[-1])
        before += cuts[-1]
    for low, high in itertools.pairwise(alone):
        few = " in steps of one row" if high - low == 1 else " in steps of two and three rows"
        kinds[few] += range(before + low, before + high)
    kinds[""] += range(before + alone[-1])
    return {words: torch.tensor(rows, device=device) for words, rows in kinds.items() if rows}


def _rows(ours: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Largest difference of a logit of each row, relative to the largest logit; without end where there is no comparison."""
    if ours.shape != expected.shape or not bool(torch.isfinite(ours).all()):
        return torch.full((len(expected),), float("inf"))
    return (ours - expected).abs().amax(-1) / expected.abs().max().clamp_min(1e-9)


def _differences(
    ours: torch.Tensor, expected: torch.Tensor, kinds: dict[str, torch.Tensor], *, share: float
) -> dict[str, float]:
    """The largest difference in the best `share` of the rows of each kind."""
    rows = _rows(ours, expected)
    return {words: _worst(rows[at.to(rows.device)], share=share) for words, at in kinds.items()}


def _difference(ours: torch.Tensor, expected: torch.Tensor, *, share: float) -> float:
    """Largest difference of a logit, relative to the largest logit, in the best `share` of the rows."""
    return _worst(_rows(ours, expected), share=share)


def _worst(rows: torch.Tensor, *, share: float) -> float:
    return float(rows.sort().values[max(math.ceil(share * len(rows)) - 1, 0)])
