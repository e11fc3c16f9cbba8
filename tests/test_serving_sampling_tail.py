"""Penalties, bias and log-probabilities: what a plain loop over one sequence gives, in any batch, with graphs and without."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from breakgraph.errors import ConfigError, InternalError
from breakgraph.graph_key import SampleType
from breakgraph.models.weights import LoadedModel
from breakgraph.serving import LLM, Completion, FinishReason, Graphs, SamplingParams, SamplingPaths
from breakgraph.serving.logits_tail import LogitsTail, log_probabilities, penalised
from breakgraph.serving.memory import _run_largest
from breakgraph.serving.requests import Request
from breakgraph.serving.token_counts import TokenCounts
from tests.serving_reference import Reference, greedy_reference, logits_of, tiny_model

OPTIONS: dict[str, Any] = {
    "max_batch_size": 4,
    "max_num_tokens": 16,
    "max_seq_len": 48,
    "block_size": 4,
    "prefill_sizes": [4, 16],
    "contexts": [16],
    "seed": 1,
}
PROMPTS = [[5, 9, 2], [7] * 20, [1, 2, 3, 4, 5, 6, 7, 8, 9], [60], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2]]
PENALTIES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.6},
    "reward": {"repetition_penalty": 0.8},
    "frequency": {"frequency_penalty": 1.5},
    "presence": {"presence_penalty": 2.0},
    "liked": {"frequency_penalty": -0.7, "presence_penalty": -1.0},
    "bias": {"logit_bias": {3: 4.0, 17: -3.5, 60: 2.0}},
    "all": {
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.7,
        "logit_bias": {4: 2.5, 9: -2.0},
    },
}
TOKENS = 14


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    """One model for all tests."""
    return tiny_model()


@pytest.fixture(scope="module", params=["captured", "eager tail steps", "no graphs"])
def llm(request: pytest.FixtureRequest, model: LoadedModel) -> LLM:
    """An engine with graphs that end at the logits, one without those, and one without graphs."""
    kinds: dict[str, dict[str, Any]] = {
        "captured": {"sampling": SamplingPaths.ALL},
        "eager tail steps": {},
        "no graphs": {"graphs": Graphs.OFF},
    }
    made = LLM(model, **kinds[request.param], **OPTIONS)
    made.start()
    return made


@pytest.fixture(scope="module")
def captured(model: LoadedModel) -> LLM:
    """An engine with all graphs."""
    made = LLM(model, sampling="all", **OPTIONS)
    made.start()
    return made


def plain(logits: torch.Tensor, params: SamplingParams, *, prompt: Sequence[int], output: Sequence[int]) -> list[float]:
    """The adjusted logits of one row, one token at a time, as the definitions read."""
    adjusted, bias = [], dict(params.logit_bias)
    for token, raw in enumerate(logits.tolist()):
        value = raw
        if token in prompt or token in output:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        times = list(output).count(token)
        if times:
            value -= times * params.frequency_penalty + params.presence_penalty
        adjusted.append(value + bias.get(token, 0.0))
    return adjusted


def reference(
    model: LoadedModel, prompt: Sequence[int], params: SamplingParams, *, max_tokens: int = TOKENS
) -> Reference:
    """The greedy answer with penalties and bias, one whole forward per token, computed from nothing."""
    output: list[int] = []
    gaps = []
    for _ in range(max_tokens):
        adjusted = plain(logits_of(model, [*prompt, *output]), params, prompt=prompt, output=output)
        best = max(adjusted)
        token = adjusted.index(best)
        gaps.append(best - max(value for other, value in enumerate(adjusted) if other != token))
        output.append(token)
    return Reference(tuple(output), tuple(gaps))


@functools.cache
def references(kind: str) -> list[Reference]:
    """The answers to all prompts with one kind of penalty."""
    model, params = tiny_model(), SamplingParams(**PENALTIES[kind])
    return [reference(model, prompt, params) for prompt in PROMPTS]


def check(answers: Sequence[Completion], expected: Sequence[Reference]) -> None:
    """Each answer has the tokens of its reference, all of them."""
    for answer, one in zip(answers, expected, strict=True):
        assert len(answer.token_ids) == len(one.token_ids)
        assert one.agrees(answer.token_ids)


@pytest.mark.parametrize("kind", PENALTIES)
def test_penalties_and_bias_equal_a_plain_loop(llm: LLM, model: LoadedModel, kind: str) -> None:
    """Each penalty, and bias, alone and together: the tokens of a plain loop, in a batch and in chunks; and it does something."""
    params = SamplingParams(max_tokens=TOKENS, **PENALTIES[kind])
    check(llm.generate(PROMPTS, params), references(kind))
    free = [greedy_reference(model, prompt, max_tokens=TOKENS).token_ids for prompt in PROMPTS]
    assert free != [one.token_ids for one in references(kind)]


def test_a_prompt_in_chunks_is_penalised_whole(captured: LLM, model: LoadedModel) -> None:
    """Tokens of the first chunk count as well: the row is written when the last one is computed, of the whole prompt."""
    prompt, params = list(range(27, 47)), SamplingParams(max_tokens=6, repetition_penalty=1.9)
    before = captured.statistics.prefill.steps
    answer = captured.generate([prompt], params)
    assert captured.statistics.prefill.steps - before == 2
    check(answer, [reference(model, prompt, params, max_tokens=6)])
    last_chunk = prompt[OPTIONS["max_num_tokens"] :]
    adjusted = plain(logits_of(model, prompt), params, prompt=last_chunk, output=[])
    assert adjusted.index(max(adjusted)) != answer[0].token_ids[0]  # so the first chunk did count


def test_neighbours_of_a_penalised_request_keep_their_tokens(llm: LLM, model: LoadedModel) -> None:
    """One penalised request in a batch: the others, greedy and sampled, get the tokens that they get without it."""
    alone = [
        SamplingParams(max_tokens=TOKENS),
        SamplingParams(max_tokens=TOKENS, temperature=0.9, seed=5),
        SamplingParams(max_tokens=TOKENS, temperature=1.4, top_p=0.8, top_k=20, min_p=0.01, seed=6),
    ]
    without = llm.generate(PROMPTS[:3], alone)
    loud = SamplingParams(max_tokens=TOKENS, **PENALTIES["all"])
    *others, fourth = llm.generate(PROMPTS[:4], [*alone, loud])
    assert [answer.token_ids for answer in others] == [answer.token_ids for answer in without]
    check([fourth], [references("all")[3]])
    assert llm.statistics.tail_steps > 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_preempted_request_goes_on_as_if_it_had_not_been(model: LoadedModel, temperature: float) -> None:
    """A cache too small for all: tokens of the answer so far are counted again, and every answer is unchanged."""
    params = SamplingParams(max_tokens=20, temperature=temperature, seed=4, logprobs=2, **PENALTIES["all"])
    roomy = LLM(model, sampling="all", **OPTIONS)
    expected = roomy.generate(PROMPTS, params)
    assert roomy.statistics.preemptions == 0
    for paths in ("all", "both"):
        tight = LLM(model, sampling=paths, **OPTIONS, num_blocks=13)
        answers = tight.generate(PROMPTS, params)
        assert tight.statistics.preemptions > 0
        assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
        for answer in answers:
            assert answer.logprobs is not None
            assert [one.token_id for one in answer.logprobs] == list(answer.token_ids)
    if not temperature:
        check(expected, [reference(model, prompt, params, max_tokens=20) for prompt in PROMPTS])


def test_nothing_of_a_row_is_left_for_its_next_owner(model: LoadedModel) -> None:
    """One row: penalised answers after others, after an aborted one and after one without penalties, are unchanged."""
    one_row = LLM(model, sampling="all", **{**OPTIONS, "max_batch_size": 1})
    params = SamplingParams(max_tokens=TOKENS, **PENALTIES["all"])
    check(one_row.generate(PROMPTS, params), references("all"))
    check(one_row.generate(PROMPTS[::-1], params), references("all")[::-1])
    pieces = one_row.stream(PROMPTS[2], params)
    for _ in range(4):
        next(pieces)
    pieces.close()  # a step for the row is still in flight, and counts a token into it
    check(one_row.generate(PROMPTS[:1], params), references("all")[:1])
    one_row.generate(PROMPTS[1:2], SamplingParams(max_tokens=5, logprobs=1))
    check(one_row.generate(PROMPTS[2:3], params), references("all")[2:3])


def test_a_request_starts_anew_after_a_failed_step(captured: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception in the middle of penalised steps ends them; the next penalised answers are right."""
    params = SamplingParams(max_tokens=TOKENS, **PENALTIES["all"])
    pieces = captured.stream(PROMPTS[0], params)
    next(pieces)
    with monkeypatch.context() as patched:
        patched.setattr(TokenCounts, "add", _fails)
        with pytest.raises(RuntimeError, match="no more"):
            list(pieces)
    check(captured.generate(PROMPTS, params), references("all"))


def _fails(*_: object, **__: object) -> None:
    raise RuntimeError("no more")


def test_bias_forces_and_forbids_tokens(llm: LLM, model: LoadedModel) -> None:
    """100 makes every token that one, -100 keeps the best tokens out, greedy and sampled."""
    for temperature in (0.0, 1.0):
        forced = SamplingParams(max_tokens=5, temperature=temperature, seed=1, logit_bias={42: 100})
        assert llm.generate(PROMPTS[:2], forced)[0].token_ids == (42,) * 5
        free = llm.generate([PROMPTS[2]], attrs.evolve(forced, logit_bias={}))[0].token_ids
        banned = set(free)
        forbidden = attrs.evolve(forced, max_tokens=20, logit_bias=dict.fromkeys(banned, -100))
        assert not banned & set(llm.generate([PROMPTS[2]], forbidden)[0].token_ids)


def test_a_forced_stop_token_ends_the_request(llm: LLM) -> None:
    """A stop token that the bias brings about ends the answer with it, and its log-probability is there."""
    params = SamplingParams(max_tokens=9, stop_token_ids=[33], logit_bias={33: 100}, logprobs=1)
    for answer in llm.generate(PROMPTS[:3], params):
        assert answer.token_ids == (33,)
        assert answer.finish_reason is FinishReason.STOP
        assert answer.logprobs is not None
        assert [one.token_id for one in answer.logprobs] == [33]


@pytest.mark.parametrize("adjusted", [{}, {**PENALTIES["all"], "temperature": 0.7, "top_k": 30, "seed": 2}])
def test_log_probabilities_are_those_of_the_raw_logits(llm: LLM, model: LoadedModel, adjusted: dict[str, Any]) -> None:
    """log_softmax of the plain loop's logits within 1e-4, whatever changed the draw; alternatives are the best, sorted."""
    params = SamplingParams(max_tokens=8, logprobs=5, **adjusted)
    for prompt, answer in zip(PROMPTS, llm.generate(PROMPTS, params), strict=True):
        assert answer.logprobs is not None
        assert len(answer.logprobs) == len(answer.token_ids) == 8
        for place, one in enumerate(answer.logprobs):
            exact = torch.log_softmax(logits_of(model, [*prompt, *answer.token_ids[:place]]).double(), dim=-1)
            assert one.token_id == answer.token_ids[place]
            assert one.logprob == pytest.approx(float(exact[one.token_id]), abs=1e-4)
            assert len(one.top) == 5
            assert list(one.top) == sorted(one.top, key=lambda pair: (-pair[1], pair[0]))
            for (token, value), best in zip(one.top, exact.topk(5).values.tolist(), strict=True):
                assert value == pytest.approx(float(exact[token]), abs=1e-4)
                assert value == pytest.approx(best, abs=1e-4)
            if not adjusted:
                assert one.top[0][1] == pytest.approx(one.logprob, abs=1e-4)


def test_each_request_gets_the_alternatives_that_it_asked_for(llm: LLM) -> None:
    """0 is the chosen token alone, None nothing at all, and requests of one batch may ask for different numbers."""
    wanted = [0, None, 3, 20]
    answers = llm.generate(PROMPTS[:4], [SamplingParams(max_tokens=4, logprobs=count) for count in wanted])
    for count, answer in zip(wanted, answers, strict=True):
        if count is None:
            assert answer.logprobs is None
        else:
            assert answer.logprobs is not None
            assert [len(one.top) for one in answer.logprobs] == [count] * 4
            assert len({token for token, _ in answer.logprobs[0].top}) == count


def test_no_more_alternatives_than_tokens() -> None:
    """A vocabulary smaller than what was asked for is reported whole; its probabilities add up to one."""
    small = LLM(tiny_model(vocab_size=7), graphs=False, **OPTIONS)
    (answer,) = small.generate([[1, 2]], SamplingParams(max_tokens=3, logprobs=20))
    assert answer.logprobs is not None
    for one in answer.logprobs:
        assert len(one.top) == 7
        assert sum(torch.tensor([value for _, value in one.top]).exp()) == pytest.approx(1.0, abs=1e-5)


def test_asking_for_log_probabilities_changes_no_token(llm: LLM) -> None:
    """A sampled request draws the same tokens with and without, and a greedy one too."""
    for base in (SamplingParams(max_tokens=12, temperature=1.1, top_p=0.95, seed=9), SamplingParams(max_tokens=12)):
        without = llm.generate(PROMPTS, base)
        answers = llm.generate(PROMPTS, attrs.evolve(base, logprobs=3))
        assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in without]


def test_neutral_penalties_change_no_token(llm: LLM) -> None:
    """A bias of 0 sends steps through the tail, beside a penalised request too, and leaves tokens what they were."""
    base = SamplingParams(max_tokens=12, temperature=1.1, seed=9)
    without = llm.generate(PROMPTS[:3], base)
    before = llm.statistics.tail_steps
    loud = SamplingParams(max_tokens=12, **PENALTIES["frequency"])
    answers = llm.generate(PROMPTS[:4], [*[attrs.evolve(base, logit_bias={1: 0.0})] * 3, loud])
    assert llm.statistics.tail_steps > before
    assert [answer.token_ids for answer in answers[:3]] == [answer.token_ids for answer in without]


def test_pieces_of_a_stream_carry_their_log_probabilities(llm: LLM) -> None:
    """Each piece has one for each of its tokens; joined they are the completion's."""
    params = SamplingParams(max_tokens=6, logprobs=2)
    (whole,) = llm.generate(PROMPTS[:1], params)
    pieces = list(llm.stream(PROMPTS[0], params))
    assert all(piece.logprobs is not None and len(piece.logprobs) == len(piece.token_ids) for piece in pieces)
    assert whole.logprobs is not None
    joined = [one for piece in pieces for one in piece.logprobs or ()]
    assert [one.token_id for one in joined] == [one.token_id for one in whole.logprobs]
    assert [one.top for one in joined] == [one.top for one in whole.logprobs]
    assert all(piece.logprobs is None for piece in llm.stream(PROMPTS[0], SamplingParams(max_tokens=3)))


def test_steps_with_the_tail_replay_where_their_graphs_were_captured(model: LoadedModel) -> None:
    """sampling="all": a graph for each batch size and context more, and no eager step; the tail's steps are counted."""
    llm = LLM(model, sampling="all", verify="always", **OPTIONS)
    params = SamplingParams(max_tokens=TOKENS, logprobs=1, **PENALTIES["all"])
    check(llm.generate(PROMPTS, params), references("all"))
    statistics = llm.statistics
    assert statistics.eager == {}
    assert statistics.dropped == {}
    assert statistics.decode_replays == statistics.decode.steps > 0
    assert statistics.tail_steps == statistics.as_dict()["tail_steps"]
    # A prefill step that completes no prompt draws nothing.
    assert statistics.decode.steps < statistics.tail_steps <= statistics.decode.steps + statistics.prefill.steps
    runner = llm.engine.decode.runner
    ended = [key for key in runner.graphs if key.sample_type is SampleType.FULL]
    assert len(ended) == len(llm.engine.sizes.decode.sizes) * len(llm.engine.sizes.contexts) == len(runner.graphs) / 3
    assert not any(key.is_all_greedy_sample for key in ended)
    llm.generate(PROMPTS, SamplingParams(max_tokens=3))
    assert llm.statistics.tail_steps == statistics.tail_steps


def test_steps_with_the_tail_are_eager_and_counted_by_default(model: LoadedModel) -> None:
    """Without such graphs only the decode steps of the tail are eager, as NO_GRAPH; the others replay as before."""
    llm = LLM(model, **OPTIONS)
    llm.generate(PROMPTS, SamplingParams(max_tokens=5))
    assert llm.statistics.eager == {}
    assert llm.statistics.tail_steps == 0
    before = llm.statistics
    llm.generate(PROMPTS, SamplingParams(max_tokens=5, presence_penalty=1.0))
    after = llm.statistics
    assert after.eager == {"NO_GRAPH": after.decode.steps - before.decode.steps}
    assert after.prefill_replays == after.prefill.steps
    assert after.decode_replays == before.decode_replays


def test_the_tables_are_taken_at_the_first_penalised_request(model: LoadedModel) -> None:
    """Bias and log-probabilities need none; tables made in a caller's inference mode serve outside of it too."""
    llm = LLM(model, sampling="all", **OPTIONS)
    tail = llm.engine.decode._tail
    assert tail is llm.engine.prefill._tail
    llm.generate(PROMPTS, SamplingParams(max_tokens=3, logprobs=1, logit_bias={3: 1.0}))
    assert not tail._counts.allocated
    params = SamplingParams(max_tokens=TOKENS, **PENALTIES["all"])
    with torch.inference_mode():
        check(llm.generate(PROMPTS, params), references("all"))
    assert tail._counts.allocated
    check(llm.generate(PROMPTS, params), references("all"))


def test_a_bias_outside_of_the_vocabulary_is_refused(captured: LLM) -> None:
    """The engine names the token and the size of the vocabulary, and nothing is queued."""
    for token in (61, 10**9):
        with pytest.raises(ConfigError, match=rf"logit_bias has token {token}; .* \(a vocabulary of 61\)") as caught:
            captured.generate([[1], [2]], [SamplingParams(), SamplingParams(logit_bias={3: 1, token: -1.5})])
        assert caught.value.why
        assert caught.value.fix
    assert not captured.engine.has_work
    assert captured.generate([[1]], SamplingParams(max_tokens=1, logit_bias={60: 100}))[0].token_ids == (60,)


def test_penalties_at_the_border_leave_finite_logits(captured: LLM) -> None:
    """A repetition penalty near nothing or beyond every float32 still gives tokens of the vocabulary, and NaN to none."""
    for penalty in (5e-324, 1e-40, 1e40, 1e308):
        params = SamplingParams(max_tokens=6, repetition_penalty=penalty, temperature=1.0, seed=1, logprobs=0)
        for answer in captured.generate(PROMPTS[:2], params):
            assert all(0 <= token < 61 for token in answer.token_ids)
            if penalty > 1:  # what was used is out of reach, as long as something unused has a positive logit
                assert len(set(answer.token_ids)) == 6


ROW = st.tuples(st.floats(0.3, 3.0), st.floats(-2, 2), st.floats(-2, 2), st.booleans())


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(ROW, min_size=1, max_size=4), seed=st.integers(0, 1000))
def test_penalised_logits_equal_the_definition(rows: list[tuple[float, float, float, bool]], seed: int) -> None:
    """Random logits, counts and penalties: each row is the plain loop's; a neutral row is what it was, bit for bit."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(rows), 23)
    logits = torch.randn(shape, generator=generator) * 6
    counts = torch.randint(0, 4, shape, generator=generator, dtype=torch.int32) * (
        torch.rand(shape, generator=generator) < 0.5
    )
    in_prompt = torch.rand(shape, generator=generator) < 0.3
    values = [(1.0, 0.0, 0.0) if neutral else (r, f, p) for r, f, p, neutral in rows]
    repetition, frequency, presence = torch.tensor(values, dtype=torch.float32).T.unsqueeze(-1)
    result = penalised(
        logits,
        counts=counts.int(),
        in_prompt=in_prompt,
        repetition=repetition,
        frequency=frequency,
        presence=presence,
    )
    for row, (r, f, p) in enumerate(values):
        params = SamplingParams(repetition_penalty=r, frequency_penalty=f, presence_penalty=p)
        output = [token for token, times in enumerate(counts[row].tolist()) for _ in range(times)]
        prompt = in_prompt[row].nonzero().flatten().tolist()
        expected = plain(logits[row], params, prompt=prompt, output=output)
        assert result[row].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-4)
        if (r, f, p) == (1.0, 0.0, 0.0):
            assert torch.equal(result[row], logits[row])


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.sampled_from([-3.0, 0.0, 0.5, 0.5, 2.0, float("-inf")]), min_size=2, max_size=12),
    count=st.integers(0, 14),
)
def test_the_top_list_is_in_order_also_among_equals(values: list[float], count: int) -> None:
    """Most probable first, the lower id first among equals, at the border of the list too."""
    values = [*values, 1.0]
    logits = torch.tensor([values, values[::-1]])
    chosen, top, top_values = log_probabilities(logits, torch.tensor([0, 1]), count=count)
    exact = torch.log_softmax(logits, dim=-1)
    for row in range(2):
        line = exact[row].tolist()
        order = sorted(range(len(line)), key=lambda token: (-line[token], token))[:count]
        assert top[row].tolist() == order
        assert top_values[row].tolist() == [line[token] for token in order]
        assert float(chosen[row]) == line[row]


def _request(prompt: Sequence[int], *, row: int, output: Sequence[int] = ()) -> Request:
    params = SamplingParams(presence_penalty=1.0)
    return Request(prompt_ids=tuple(prompt), params=params, seed=0, max_new_tokens=9, row=row, output_ids=list(output))


def test_a_row_holds_the_tokens_of_its_request_alone() -> None:
    """`begin` forgets what was in the row, knows the answer so far, leaves other rows, and skips tokens without a logit."""
    counts = TokenCounts(4, vocab_size=6, device=torch.device("cpu"))
    with pytest.raises(InternalError, match="none has begun"):
        counts.of(torch.tensor([1]))
    counts.begin([_request([0, 0, 5, 900], row=1), _request([2], row=3, output=[4, 4, 1])])
    counts.add(torch.tensor([1, 2, 3]), tokens=torch.tensor([3, 3, 4]))
    used, in_prompt = counts.of(torch.tensor([3, 1]))
    assert used.tolist() == [[0, 1, 0, 0, 3, 0], [0, 0, 0, 1, 0, 0]]
    assert in_prompt.tolist() == [[token == 2 for token in range(6)], [token in (0, 5) for token in range(6)]]
    counts.begin([_request([1], row=3)])
    used, in_prompt = counts.of(torch.tensor([3, 1]))
    assert used.tolist() == [[0] * 6, [0, 0, 0, 1, 0, 0]]
    assert in_prompt.tolist() == [[token == 1 for token in range(6)], [token in (0, 5) for token in range(6)]]


def test_a_row_is_required() -> None:
    """A request that holds no row is a fault of the engine, and said."""
    counts = TokenCounts(2, vocab_size=6, device=torch.device("cpu"))
    request = _request([1], row=1)
    request.row = None
    with pytest.raises(InternalError, match="without a row"):
        counts.begin([request])


def test_the_largest_step_can_be_measured(captured: LLM) -> None:
    """What is run to find the room for the cache includes a whole tail, and leaves the engine's own state alone."""
    engine = captured.engine
    before = engine.state.last_token.clone()
    _run_largest(engine.state.decoder, attention=engine.state.attention, sizes=engine.sizes)
    assert torch.equal(engine.state.last_token, before)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("paths", [SamplingPaths.ALL, SamplingPaths.BOTH])
def test_the_tail_never_waits_for_the_device(monkeypatch: pytest.MonkeyPatch, paths: SamplingPaths) -> None:
    """On CUDA every operation of the tail runs where a synchronisation is an error; tokens are those of the CPU's plain loop."""

    def guarded(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **keywords: Any) -> Any:
            calls.append(method.__name__)
            torch.cuda.set_sync_debug_mode("error")
            try:
                return method(*args, **keywords)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return call

    calls: list[str] = []
    for name in ("first", "following"):
        monkeypatch.setattr(LogitsTail, name, guarded(getattr(LogitsTail, name)))
    on_cuda = tiny_model()
    on_cuda.decoder.to("cuda")
    llm = LLM(on_cuda, attention="torch", sampling=paths, **OPTIONS, num_blocks=60)
    for kind in PENALTIES:
        params = SamplingParams(max_tokens=TOKENS, logprobs=3, **PENALTIES[kind])
        answers = llm.generate(PROMPTS, params)
        check(answers, references(kind))
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            assert answer.logprobs is not None
            exact = torch.log_softmax(logits_of(tiny_model(), prompt), dim=-1)
            assert answer.logprobs[0].logprob == pytest.approx(float(exact[answer.token_ids[0]]), abs=1e-3)
    mixed = [SamplingParams(max_tokens=9, temperature=0.9 * (i % 2), seed=i, frequency_penalty=i % 3) for i in range(5)]
    first = llm.generate(PROMPTS, mixed)
    assert [a.token_ids for a in llm.generate(PROMPTS, mixed)] == [a.token_ids for a in first]
    assert {"first", "following"} <= set(calls)
    assert bool(llm.statistics.eager) == (paths is SamplingPaths.BOTH)
    assert llm.statistics.dropped == {}
