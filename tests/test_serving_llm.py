"""The serving loop on a tiny model: the same tokens with graphs, without, and in a loop without either."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from breakgraph.errors import ConfigError
from breakgraph.models.weights import LoadedModel
from breakgraph.serving import LLM, FinishReason, Graphs, SamplingParams, SamplingPaths
from breakgraph.serving.requests import Request
from breakgraph.serving.sampling import sample
from breakgraph.serving.statistics import Phase, Statistics
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


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    """One model for all tests."""
    return tiny_model()


@pytest.fixture(scope="module", params=[Graphs.ON, Graphs.OFF])
def llm(request: pytest.FixtureRequest, model: LoadedModel) -> LLM:
    """An engine with graphs and one without, each started once."""
    made = LLM(model, graphs=request.param, **OPTIONS)
    made.start()
    return made


@pytest.fixture(scope="module")
def with_graphs(model: LoadedModel) -> LLM:
    """An engine with graphs."""
    made = LLM(model, **OPTIONS)
    made.start()
    return made


@pytest.fixture(scope="module")
def references(model: LoadedModel) -> dict[tuple[int, ...], Reference]:
    """20 tokens behind each of the prompts."""
    return {tuple(prompt): greedy_reference(model, prompt, max_tokens=20) for prompt in PROMPTS}


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test its engine has nothing to do and all blocks back."""
    yield
    for name in ("llm", "with_graphs"):
        if name in request.fixturenames:
            engine = request.getfixturevalue(name).engine
            while engine.has_work:
                engine.step()
            assert engine.free_blocks == engine.usable_blocks


def test_batches_and_chunks_give_the_tokens_of_a_plain_loop(
    llm: LLM, references: dict[tuple[int, ...], Reference]
) -> None:
    """Five prompts, one longer than a step, four at a time: every answer is that of one sequence computed alone."""
    answers = llm.generate(PROMPTS, SamplingParams(max_tokens=20))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert references[tuple(prompt)].agrees(answer.token_ids)
        assert len(answer.token_ids) == 20
        assert answer.finish_reason is FinishReason.LENGTH
        assert answer.prompt_token_ids == tuple(prompt)


def test_every_step_is_a_replay_or_counted(model: LoadedModel) -> None:
    """With graphs no step is eager; without, every step is, counted as DISABLED. Segments and breaks add up."""
    counts = {}
    for graphs in Graphs:
        engine = LLM(model, graphs=graphs, **OPTIONS)
        engine.generate(PROMPTS, [SamplingParams(max_tokens=n, temperature=n % 2) for n in (3, 8, 1, 5, 12)])
        counts[graphs] = engine.statistics
    on, off = counts[Graphs.ON], counts[Graphs.OFF]
    assert on.eager == {}
    assert on.dropped == {}
    assert (on.prefill_replays, on.decode_replays) == (on.prefill.steps, on.decode.steps)
    layers = model.config.num_layers
    assert on.breaks == layers * on.prefill.steps
    assert on.segments == (layers + 1) * on.prefill.steps + on.decode.steps
    assert off.eager == {"DISABLED": on.prefill.steps + on.decode.steps}
    assert (off.segments, off.breaks, off.graphs) == (0, 0, 0)
    assert on.prompt_tokens == sum(map(len, PROMPTS)) == on.prefill.tokens
    assert on.generated_tokens == 29
    # The first token of each prompt comes from prefill; decode made the others, and those thrown away.
    assert on.decode.tokens == 29 - len(PROMPTS) + on.discarded_tokens
    assert f"decode {on.decode.tokens} tokens in {on.decode.steps} steps" in on.summary()
    flat = on.as_dict()
    assert flat["prefill_replays"] == on.prefill_replays
    assert flat["decode_tokens_per_second"] > 0
    assert "0 eager;" in on.summary()
    assert f"{off.eager_steps} eager ({off.eager_steps} DISABLED)" in off.summary()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 12), st.integers(0, len(PROMPTS) - 1), st.integers(1, 20), st.integers(0, 30)),
        min_size=1,
        max_size=7,
    )
)
def test_requests_join_and_leave_at_any_step(
    llm: LLM, references: dict[tuple[int, ...], Reference], arrivals: list[tuple[int, int, int, int]]
) -> None:
    """Whoever comes and goes at whatever step, every request gets the tokens of its prompt.

    It may be ended by the caller, by a stop token or by its length, at any step; no more and no fewer tokens.
    """
    engine = llm.engine
    waiting = sorted(arrivals)
    running: dict[Request, tuple[int, int]] = {}
    step = 0
    while waiting or engine.has_work:
        while waiting and waiting[0][0] <= step:
            _, which, length, abort = waiting.pop(0)
            reference = references[tuple(PROMPTS[which])]
            # Every third request ends at a stop token instead of at its length.
            stop = [reference.token_ids[length - 1]] if length % 3 == 0 else []
            params = SamplingParams(max_tokens=20 if stop else length, stop_token_ids=stop)
            running[engine.add(PROMPTS[which], params=params)] = (which, abort)
        engine.step()
        step += 1
        for request, (_, abort) in running.items():
            if step == abort:
                engine.finish(request, reason=FinishReason.ABORT)
        assert step < 500
    for request, (which, _) in running.items():
        reference = references[tuple(PROMPTS[which])]
        assert reference.agrees(request.output_ids)
        assert request.blocks == []
        if request.finish_reason is FinishReason.LENGTH:
            assert len(request.output_ids) == request.params.max_tokens
        if request.finish_reason is FinishReason.STOP:
            assert request.output_ids[-1] in request.params.stop_token_ids
            assert not set(request.output_ids[:-1]) & set(request.params.stop_token_ids)


def test_the_host_is_one_step_ahead(with_graphs: LLM) -> None:
    """The step after the prefill is launched before the prefill's token is read.

    A stop found then costs one thrown-away token, and the blocks are held until the step with it has been read.
    """
    engine = with_graphs.engine
    before = engine.statistics()
    first = engine.add(PROMPTS[0], params=SamplingParams(max_tokens=9))
    assert engine.step() == []
    assert (engine.statistics().prefill.steps, engine.statistics().decode.steps) == (
        before.prefill.steps + 1,
        before.decode.steps,
    )
    assert [token.request for token in engine.step()] == [first]
    assert engine.statistics().decode.steps == before.decode.steps + 1
    while engine.has_work:
        engine.step()
    stopped = engine.add(PROMPTS[0], params=SamplingParams(max_tokens=9, stop_token_ids=first.output_ids[:1]))
    held = engine.free_blocks
    engine.step()
    engine.step()
    assert stopped.finish_reason is FinishReason.STOP
    assert engine.free_blocks < held  # the step in flight may still write them
    engine.step()
    assert engine.free_blocks == held
    assert engine.statistics().discarded_tokens == before.discarded_tokens + 1
    assert stopped.output_ids == first.output_ids[:1]


def test_preempted_requests_give_the_same_tokens(
    model: LoadedModel, references: dict[tuple[int, ...], Reference]
) -> None:
    """A cache too small for all: some start again from all their tokens, and every answer is unchanged, also sampled."""
    sampled = SamplingParams(max_tokens=20, temperature=0.8, seed=4)
    roomy = LLM(model, **OPTIONS).generate(PROMPTS, sampled)
    tight = LLM(model, **OPTIONS, num_blocks=13)
    assert [answer.token_ids for answer in tight.generate(PROMPTS, sampled)] == [a.token_ids for a in roomy]
    for prompt, answer in zip(PROMPTS, tight.generate(PROMPTS, SamplingParams(max_tokens=20)), strict=True):
        assert references[tuple(prompt)].agrees(answer.token_ids)
    assert tight.statistics.preemptions > 0
    assert tight.statistics.eager == {}
    assert tight.engine.free_blocks == tight.engine.usable_blocks


def test_a_seed_gives_the_same_tokens_in_any_company(llm: LLM) -> None:
    """Sampled requests with seeds: alone, together and in another order they draw the same tokens."""
    params = [
        SamplingParams(max_tokens=10, temperature=t, top_k=k, top_p=p, min_p=m, seed=s)
        for t, k, p, m, s in [
            (1.0, 0, 1.0, 0.0, 1),
            (0.7, 5, 1.0, 0.0, 2),
            (1.3, 0, 0.8, 0.0, 3),
            (1.0, 9, 0.9, 0.1, 4),
        ]
    ]
    params.append(SamplingParams(max_tokens=10))
    together = llm.generate(PROMPTS, params)
    backwards = llm.generate(PROMPTS[::-1], params[::-1])[::-1]
    alone = [llm.generate([prompt], one)[0] for prompt, one in zip(PROMPTS, params, strict=True)]
    for answers in (backwards, alone):
        assert [a.token_ids for a in answers] == [a.token_ids for a in together]
    again = llm.generate(PROMPTS[0], attrs.evolve(params[0], seed=99))[0]
    assert again.token_ids != together[0].token_ids


def test_sampled_tokens_are_those_of_the_sampler_on_plain_logits(llm: LLM, model: LoadedModel) -> None:
    """Each token is what `sample` draws from the plain loop's logits with the request's seed at the token's place."""
    params = SamplingParams(max_tokens=6, temperature=0.9, top_k=20, top_p=0.95, seed=11)
    answer = llm.generate(PROMPTS[2], params)[0]
    tokens = [*PROMPTS[2]]
    for token in answer.token_ids:
        drawn = sample(
            logits_of(model, tokens)[None],
            temperature=torch.tensor([0.9]),
            top_k=torch.tensor([20]),
            top_p=torch.tensor([0.95], dtype=torch.float64),
            min_p=torch.zeros(1, dtype=torch.float64),
            seed=torch.tensor([11]),
            position=torch.tensor([len(tokens)]),
        )
        assert token == int(drawn)
        tokens.append(token)


def test_requests_without_a_seed_differ_and_follow_the_engines_seed(model: LoadedModel) -> None:
    """Two equal requests without a seed get two; an engine with the same seed gives the same two again."""
    params = SamplingParams(max_tokens=12, temperature=1.0)
    runs = [LLM(model, graphs=Graphs.OFF, **OPTIONS).generate([PROMPTS[0]] * 2, params) for _ in range(2)]
    first, second = ([answer.token_ids for answer in run] for run in runs)
    assert first == second
    assert first[0] != first[1]


def test_padding_rows_touch_nothing_that_is_alive(with_graphs: LLM) -> None:
    """REQ-C2, REQ-C3, FAULT-P2, FAULT-P9: three requests in a graph for four: the padding row writes to its own block only.

    Every byte of the blocks that requests hold, but for the slot of each one's new token, of free blocks and of the null
    block stays, and so do the rows of the token table that nobody has.
    """
    engine = with_graphs.engine
    state = engine.state
    requests = [engine.add(prompt, params=SamplingParams(max_tokens=6)) for prompt in PROMPTS[:3]]
    while any(request.launched < 2 for request in requests):
        engine.step()
    idle = [row for row in range(1, 5) if row not in {request.row for request in requests}]
    cache = torch.stack([tensor for layer in state.cache.layers for tensor in layer]).flatten(1, 2)
    state.last_token[idle] = -999
    padded = engine.statistics().decode_replays
    engine.step()
    assert engine.statistics().decode_replays == padded + 1
    after = torch.stack([tensor for layer in state.cache.layers for tensor in layer]).flatten(1, 2)
    size = state.cache.block_size
    places = [request.length - 2 for request in requests]  # of the token that this step read
    expected = {r.blocks[at // size] * size + at % size for r, at in zip(requests, places, strict=True)}
    own = engine.decode.padding_block
    assert own != 0
    assert not any(own in request.blocks for request in requests)
    changed = (cache != after).flatten(2).any(-1).any(0).nonzero().flatten().tolist()
    assert expected <= set(changed) <= expected | {own * size}
    assert state.last_token[idle].tolist() == [-999]


def test_answers_end_at_the_models_length(llm: LLM) -> None:
    """Prompt and answer together stop at max_seq_len with reason length, though more tokens were allowed."""
    answer = llm.generate([PROMPTS[1] * 2], SamplingParams(max_tokens=100))[0]
    assert len(answer.token_ids) == 48 - 40
    assert answer.finish_reason is FinishReason.LENGTH


def test_end_of_sequence_tokens_of_the_model(model: LoadedModel, references: dict[tuple[int, ...], Reference]) -> None:
    """Each of the model's EOS tokens ends an answer and is its last token; ignore_eos goes on."""
    expected = references[tuple(PROMPTS[2])].token_ids
    eos = next(token for index, token in enumerate(expected) if index >= 3 and token not in expected[:index])
    place = expected.index(eos)
    ending = attrs.evolve(model, generation=attrs.evolve(model.generation, eos_token_ids=(60, eos)))
    engine = LLM(ending, graphs=Graphs.OFF, **OPTIONS)
    stopped, whole = (
        engine.generate(PROMPTS[2], SamplingParams(max_tokens=20, ignore_eos=i))[0] for i in (False, True)
    )
    assert stopped.token_ids == expected[: place + 1]
    assert stopped.finish_reason is FinishReason.STOP
    assert whole.token_ids == expected


def test_a_path_without_graphs_is_eager_and_counted(model: LoadedModel) -> None:
    """Only greedy graphs: a batch that samples runs eagerly under NO_GRAPH. Only sampling graphs: they serve both."""
    greedy_only = LLM(model, sampling=SamplingPaths.GREEDY, **OPTIONS)
    greedy_only.generate(PROMPTS[:2], [SamplingParams(max_tokens=4), SamplingParams(max_tokens=4, temperature=1)])
    assert set(greedy_only.statistics.eager) == {"NO_GRAPH"}
    sampled_only = LLM(model, sampling=SamplingPaths.SAMPLED, **OPTIONS)
    plain = greedy_only.generate(PROMPTS, SamplingParams(max_tokens=9))
    assert [a.token_ids for a in sampled_only.generate(PROMPTS, SamplingParams(max_tokens=9))] == [
        a.token_ids for a in plain
    ]
    assert sampled_only.statistics.eager == {}


def test_a_failing_step_leaves_a_usable_engine(
    with_graphs: LLM, references: dict[tuple[int, ...], Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception in the middle of a step reaches the caller, ends what ran, and the next prompt is answered."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the device is on fire")

    with monkeypatch.context() as patched:
        patched.setattr(with_graphs.engine.decode, "launch", fail)
        with pytest.raises(RuntimeError, match="on fire"):
            with_graphs.generate(PROMPTS, SamplingParams(max_tokens=20))
    assert with_graphs.engine.free_blocks == with_graphs.engine.usable_blocks
    answer = with_graphs.generate(PROMPTS[4], SamplingParams(max_tokens=20))[0]
    assert references[tuple(PROMPTS[4])].agrees(answer.token_ids)


def test_generate_inside_inference_mode(with_graphs: LLM, references: dict[tuple[int, ...], Reference]) -> None:
    """A caller's inference mode changes nothing, and leaves nothing that fails outside of it."""
    with torch.inference_mode():
        inside = with_graphs.generate(PROMPTS[0], SamplingParams(max_tokens=5))[0]
    outside = with_graphs.generate(PROMPTS[0], SamplingParams(max_tokens=5))[0]
    assert inside.token_ids == outside.token_ids
    assert references[tuple(PROMPTS[0])].agrees(outside.token_ids)


# Text.


def _byte_tokenizer() -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture(scope="module")
def speaking() -> LLM:
    """A model of bytes with a tokenizer, without graphs."""
    model = attrs.evolve(tiny_model(vocab_size=257), tokenizer=_byte_tokenizer())
    return LLM(model, graphs=Graphs.OFF, **OPTIONS)


TEXT = SamplingParams(max_tokens=20, temperature=1.0, seed=8)


def test_a_stream_joins_to_the_completion(speaking: LLM) -> None:
    """Streamed pieces have the text, the tokens and the reason of the completion; several streams may be mixed."""
    whole = speaking.generate(["one", "two"], [TEXT, attrs.evolve(TEXT, max_tokens=7)])
    streams = [speaking.stream("one", TEXT), speaking.stream("two", attrs.evolve(TEXT, max_tokens=7))]
    pieces: list[list[Any]] = [[], []]
    while streams != [None, None]:
        for index, stream in enumerate(streams):
            if stream is not None:
                piece = next(stream, None)
                if piece is None:
                    streams[index] = None
                else:
                    pieces[index].append(piece)
    for answer, parts in zip(whole, pieces, strict=True):
        assert "".join(part.text for part in parts) == answer.text
        assert tuple(token for part in parts for token in part.token_ids) == answer.token_ids
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [FinishReason.LENGTH]
        assert answer.text == speaking.model.tokenizer.decode(list(answer.token_ids))


def test_a_closed_stream_gives_its_blocks_back(speaking: LLM) -> None:
    """Closing an iterator early ends its request; another one goes on undisturbed."""
    expected = speaking.generate("other", TEXT)[0].text
    stream, other = speaking.stream("one", TEXT), speaking.stream("other", TEXT)
    next(stream)
    stream.close()
    assert "".join(piece.text for piece in other) == expected
    engine = speaking.engine
    while engine.has_work:
        engine.step()
    assert engine.free_blocks == engine.usable_blocks


def test_stop_strings_end_the_text_before_them(speaking: LLM) -> None:
    """The text ends before the stop string, the tokens with the one that completed it, also as the last allowed."""
    whole = speaking.generate("one", TEXT)[0]
    decode = speaking.model.tokenizer.decode
    place = next(i for i in range(5, 19) if all("\ufffd" not in decode([t]) for t in whole.token_ids[i : i + 2]))
    stop = decode(list(whole.token_ids[place : place + 2]))
    for most in (20, place + 2):
        answer = speaking.generate("one", attrs.evolve(TEXT, max_tokens=most, stop=[stop, "\0never\0"]))[0]
        assert answer.text == whole.text[: whole.text.index(stop)]
        assert answer.token_ids == whole.token_ids[: len(answer.token_ids)]
        assert answer.finish_reason is FinishReason.STOP


def test_stop_tokens_are_in_the_tokens_and_not_in_the_text(speaking: LLM) -> None:
    """The stop token is the last token, its text is left out."""
    whole = speaking.generate("one", TEXT)[0]
    stop = whole.token_ids[6]
    end = whole.token_ids.index(stop)
    answer = speaking.generate("one", attrs.evolve(TEXT, stop_token_ids=[stop]))[0]
    assert answer.token_ids == whole.token_ids[: end + 1]
    assert answer.text == speaking.model.tokenizer.decode(list(whole.token_ids[:end]))
    assert answer.finish_reason is FinishReason.STOP


def test_a_chat_template_is_used_as_it_is(speaking: LLM) -> None:
    """With chat=True the prompt is the template's text and no more: no second BOS in front."""
    tokenizer = speaking.model.tokenizer
    with pytest.raises(ConfigError, match="no chat template"):
        speaking.generate("hi", TEXT, chat=True)
    tokenizer.chat_template = "<end>{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}bot:"
    try:
        ids = speaking.encode("hi", chat=True)
    finally:
        tokenizer.chat_template = None
    assert tokenizer.decode(ids) == "<end>user:hi\nbot:"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        ([], "the prompt has no tokens"),
        ("x" * 48, "has 48 tokens; at most 47 fit"),
        ([3, 257], "the prompt has token 257"),
        ([-1], "the prompt has token -1"),
    ],
)
def test_a_bad_prompt_is_refused_and_nothing_runs(speaking: LLM, prompt: str | Sequence[int], message: str) -> None:
    """The error comes before any step, and prompts beside the bad one are taken back."""
    steps = speaking.statistics.prefill.steps
    with pytest.raises(ConfigError, match=message):
        speaking.generate(["good", prompt], TEXT)
    assert not speaking.engine.has_work
    assert speaking.statistics.prefill.steps == steps


def test_bad_options_are_refused_with_their_name(model: LoadedModel) -> None:
    """Counts, shares, devices and lengths that cannot work: ConfigError, before anything is loaded or captured."""
    for options, message in [
        ({"max_batch_size": 0}, "max_batch_size is 0"),
        ({"num_blocks": True}, "num_blocks is True"),
        ({"num_blocks": 1}, "num_blocks is 1; expected an integer of at least 2"),
        ({"max_seq_len": 1}, "max_seq_len is 1; expected an integer of at least 2"),
        ({"memory_fraction": 1.5}, "memory_fraction is 1.5"),
        ({"graph_budget": 0}, "graph_budget is 0"),
        ({"measure": "sometimes"}, "measure is 'sometimes'"),
    ]:
        with pytest.raises(ConfigError, match=message):
            LLM(model, **options)
    for made, message in [
        (LLM(model, max_seq_len=65), "the model has 64 positions"),
        (LLM("demo", device="abacus"), "device is 'abacus'"),
        (LLM("/no/such/model", device="cpu"), "There is no model at"),
    ]:
        with pytest.raises(ConfigError, match=message):
            made.start()
    with pytest.raises(ConfigError, match="2 prompts came with 1"):
        LLM(model, graphs=Graphs.OFF).generate([[1], [2]], [SamplingParams()])
    with pytest.raises(ConfigError, match="token 5 stands among 1 prompts"):
        LLM(model, graphs=Graphs.OFF).generate(["text", 5])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="no tokenizer"):
        LLM(model, graphs=Graphs.OFF).generate("text")
    with pytest.raises(ConfigError, match="no tokenizer"):
        LLM(model, graphs=Graphs.OFF).generate([[1]], SamplingParams(stop="x"))


WRONG_PROMPTS: list[tuple[Any, str]] = [
    (None, "the prompts are of type NoneType"),
    (7, "the prompts are of type int"),
    (torch.tensor([1, 2]), "the prompts are of type Tensor"),
    ([torch.tensor([1, 2])], "a prompt is of type Tensor"),
    (b"hi", "the prompts are of type bytes"),
    ({"hi": 1}, "the prompts are of type dict"),
    ([None], "a prompt is of type NoneType"),
    ([[1.5]], "token 1.5 of type float"),
    ([[1, "a"]], "token 'a' of type str"),
    ([[True]], "token True of type bool"),
    ([1.5], "a prompt is of type float"),
]


@pytest.mark.parametrize(("prompts", "message"), WRONG_PROMPTS, ids=lambda value: str(value)[:30])
def test_what_is_no_prompt_is_refused(speaking: LLM, prompts: Any, message: str) -> None:
    """Anything that is neither text nor token ids is a ConfigError with the type, before a step runs."""
    with pytest.raises(ConfigError, match=message) as caught:
        speaking.generate(prompts, TEXT)
    assert "list" in caught.value.fix
    assert not speaking.engine.has_work


def test_a_stream_refuses_the_same(speaking: LLM) -> None:
    """One prompt of a stream is held to the same rule as one among many."""
    for prompt, message in [(torch.tensor([1]), "a prompt is of type Tensor"), (None, "a prompt is of type NoneType")]:
        with pytest.raises(ConfigError, match=message):
            speaking.stream(prompt, TEXT)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="token 'hi' of type str"):
        speaking.stream(["hi"], TEXT)  # type: ignore[arg-type]


def test_integers_of_numpy_are_tokens(speaking: LLM) -> None:
    """An array of token ids is a prompt, alone and among others."""
    ids = speaking.encode("one")
    plain = speaking.generate([ids], TEXT)[0].token_ids
    assert speaking.generate(np.array(ids), TEXT)[0].token_ids == plain  # type: ignore[arg-type]
    assert speaking.generate([np.array(ids), "one"], TEXT)[0].token_ids == plain  # type: ignore[list-item]


@pytest.mark.parametrize("params", [{"max_tokens": 3}, [{"max_tokens": 3}], 3, "greedy", [None]])
def test_what_are_no_sampling_parameters_is_refused(model: LoadedModel, params: Any) -> None:
    """Sampling parameters of another type are a ConfigError before the engine starts."""
    llm = LLM(model, graphs=False, **OPTIONS)
    with pytest.raises(ConfigError, match="the sampling parameters are of type ") as caught:
        llm.generate([[1]], params)
    assert "SamplingParams(" in caught.value.fix
    if not isinstance(params, list):
        with pytest.raises(ConfigError, match="the sampling parameters are of type "):
            llm.stream([1], params)
    assert llm._engine is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": torch.nn.Linear(1, 1)}, "model is of type Linear"),
        ({"model": None}, "model is of type NoneType"),
        ({"device": 0}, "device is 0; expected auto, cpu or cuda"),
        ({"dtype": "fp32"}, "dtype is 'fp32'"),
        ({"progress": True}, "progress is True"),
        ({"cache_root": 5}, "cache_root is 5"),
        ({"max_batchsize": 4}, "there is no option max_batchsize"),
        ({"graphs": "nope"}, "graphs is 'nope'"),
    ],
)
def test_the_constructor_refuses_what_cannot_work(arguments: dict[str, Any], message: str) -> None:
    """Arguments of another type are a ConfigError of the constructor, not an AttributeError of some later step."""
    with pytest.raises(ConfigError, match=message):
        LLM(**arguments)


def test_a_device_of_torch_is_taken(model: LoadedModel) -> None:
    """device= takes what torch calls a device."""
    assert LLM(model, device=torch.device("cpu"), dtype="float32", graphs="off", **OPTIONS).generate([[1]])


def test_a_prompt_that_never_fits_is_refused_before_the_captures(model: LoadedModel) -> None:
    """Too many tokens for max_seq_len, or for the model: told before the engine is made, with the way out that there is."""
    llm = LLM(model, max_seq_len=8)
    with pytest.raises(ConfigError, match="has 8 tokens; at most 7 fit") as caught:
        llm.generate([[1] * 8])
    assert "max_seq_len" in caught.value.fix
    assert llm._engine is None
    whole = LLM(model)
    with pytest.raises(ConfigError, match="has 64 tokens; at most 63 fit") as caught:
        whole.generate([[1] * 64])
    assert "max_seq_len" not in caught.value.fix


def test_a_prompt_is_checked_before_the_weights_are_read(tmp_path: Path) -> None:
    """Config and tokenizer are enough to encode a prompt and to know that it never fits: no weight file is needed."""
    config = LlamaConfig(vocab_size=257, hidden_size=32, num_attention_heads=4, max_position_embeddings=64)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    _byte_tokenizer().save_pretrained(tmp_path)
    llm = LLM(tmp_path, device="cpu")
    assert llm.encode("hi") == _byte_tokenizer()("hi").input_ids
    with pytest.raises(ConfigError, match="has 64 tokens; at most 63 fit"):
        llm.generate("x" * 64)
    with pytest.raises(ConfigError, match="lacks model.safetensors"):
        llm.generate("x" * 63)


def test_dropped_graphs_are_not_silent(
    model: LoadedModel, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When captures fail, start() says so once with every reason, and the summary has the count."""

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no room for it")

    monkeypatch.setattr("breakgraph.graph_builder.GraphBuilder.capture", broken)
    llm = LLM(model, **OPTIONS)
    with caplog.at_level("WARNING"):
        llm.start()
    said = [record.getMessage() for record in caplog.records if record.name.startswith("breakgraph.serving")]
    assert len(said) == 1
    statistics = llm.statistics
    count = len(statistics.dropped)
    assert count > 2
    assert statistics.graphs == 0
    assert f"{count} of {count} graphs were dropped" in said[0]
    assert said[0].count("RuntimeError: no room for it") == 1  # said once, for what all of them share
    assert "test_serving_llm.py" in said[0]
    assert f"; {count} graphs dropped" in statistics.summary()
    assert "\n" not in statistics.summary()
    assert llm.generate([[1]], SamplingParams(max_tokens=2))[0].token_ids


def test_the_summary_counts_like_the_dictionary() -> None:
    """One is singular, and the numbers of the line are those of as_dict()."""
    statistics = Statistics(
        prefill=Phase(steps=1, replays=1, tokens=5, seconds=1.0),
        decode=Phase(steps=1, replays=0, tokens=1, seconds=1.0),
        eager={"DISABLED": 1},
        segments=1,
        breaks=1,
        graphs=1,
        dropped={},
        prompt_tokens=5,
        generated_tokens=2,
        discarded_tokens=0,
        preemptions=0,
        capture_seconds=0.0,
    )
    assert statistics.summary() == (
        "2 tokens generated; prefill 5 tokens in 1 step (5.0 tok/s), decode 1 token in 1 step (1.0 tok/s);"
        " 1 graph replay (1 prefill, 0 decode), 1 eager (1 DISABLED); 1 segment, 1 break"
    )
    flat = statistics.as_dict()
    assert (flat["prefill_tokens"], flat["decode_tokens"], flat["generated_tokens"]) == (5, 1, 2)


@pytest.mark.parametrize("num_blocks", [13, 17, 26])
def test_examples_of_a_capture_do_not_disturb_each_other(model: LoadedModel, num_blocks: int) -> None:
    """What one example left in the cache is no part of another's proof: every graph is proven, in a tight cache too."""
    assert LLM(model, **OPTIONS, num_blocks=num_blocks).statistics.dropped == {}


def test_verification_at_every_step_leaves_the_cache_alone(
    model: LoadedModel, references: dict[tuple[int, ...], Reference]
) -> None:
    """verify="always" runs each step several times; keys and values of requests stay what they were."""
    llm = LLM(model, **OPTIONS, verify="always")
    for prompt, answer in zip(PROMPTS, llm.generate(PROMPTS, SamplingParams(max_tokens=12)), strict=True):
        assert references[tuple(prompt)].agrees(answer.token_ids)
    assert llm.statistics.dropped == {}
    assert llm.statistics.eager == {}
