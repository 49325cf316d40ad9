"""The engine on the GPUs of a plan: requests in any company, cancelled, failed, refused."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import re
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
import tuning
from plain_generate import answers
from tiers import only

import duoka
from duoka.engine import Completion, Engine, Grammar, SamplingParams
from duoka.engine.detokenizer import Detokenizer
from duoka.errors import DuokaError, UsageError
from duoka.models.text.messages import ChatMessage

WORK = duoka.Workload(batch=4, prompt_tokens=64, new_tokens=16, dtype="float32")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tuning.write_model("shallow", tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(
    scope="module",
    params=only([2], [1, 2, 3]),
)
def plan(request: pytest.FixtureRequest, model: Path) -> Any:
    return duoka.plan(model, f"virtual:{request.param}x256MiB", WORK, use_all=True)


@pytest.fixture(scope="module", params=only(["asynchronous"], ["synchronous", "asynchronous"]))
def engine(plan: Any, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """An engine that schedules steps as on a GPU, or as on the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        is_asynchronous = request.param == "asynchronous"
        patch.setattr("duoka.engine.executor._is_asynchronous", lambda model: is_asynchronous)
        with Engine(plan, processes=False) as engine:
            yield engine


def prompts(number: int) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(256) for _ in range(rng.randrange(1, 64))] for _ in range(number)]


def ids(completion: Completion) -> list[int]:
    return [choice.token for choice in completion.tokens]


def test_many_are_answered_as_one_by_one(plan: Any, engine: Engine) -> None:
    texts = prompts(7)
    expected = answers(plan, texts)
    found = engine.generate(texts, SamplingParams(max_new_tokens=WORK.new_tokens))
    assert [completion.text for completion in found] == [answer.text for answer in expected]
    assert [completion.finish for completion in found] == [answer.finish for answer in expected]


def test_an_answer_with_a_seed_is_the_same_in_any_company(engine: Engine) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=7, max_new_tokens=12)
    text, *others = prompts(8)
    alone = engine.submit(text, params).result()
    crowd = [engine.submit(other, SamplingParams(temperature=2.0)) for other in others]
    again = engine.submit(text, params).result()
    assert ids(alone) == ids(again)
    assert len({tuple(ids(stream.result())) for stream in crowd}) > 1


def test_log_probabilities_are_those_of_the_model(plan: Any, engine: Engine) -> None:
    (text,) = prompts(1)
    completion = engine.submit(text, SamplingParams(logprobs=3, max_new_tokens=6)).result()
    whole: Any = duoka.load(plan)
    with torch.no_grad():
        tokens = torch.tensor([text + ids(completion)], device=whole.device)
        logits = whole(input_ids=tokens).logits[0, len(text) - 1 : -1].float().cpu()
    expected = torch.log_softmax(logits, dim=-1)
    for row, choice in zip(expected, completion.tokens, strict=True):
        assert choice.logprob == pytest.approx(float(row[choice.token]), abs=1e-4)
        best = row.topk(3)
        assert [token for token, _ in choice.top_logprobs] == best.indices.tolist()


def test_text_comes_piece_by_piece_and_async(engine: Engine) -> None:
    params = SamplingParams(max_new_tokens=8)
    stream = engine.submit("How are you?", params)
    pieces = list(stream)
    assert "".join(pieces).strip() == stream.result().text

    async def listen() -> str:
        return "".join([piece async for piece in engine.submit("How are you?", params)])

    assert asyncio.run(listen()).strip() == stream.result().text


def test_a_callback_may_submit_a_request(engine: Engine) -> None:
    params = SamplingParams(max_new_tokens=3)
    streams: SimpleQueue[Any] = SimpleQueue()

    def on_event(event: Any) -> None:
        if isinstance(event, Completion):
            streams.put((event, engine.submit([5, 6, 7], params)))

    engine.submit([5, 6, 7], params, on_event=on_event)
    completion, stream = streams.get(timeout=60)
    assert stream.result().tokens == completion.tokens


def test_text_is_told_while_the_next_step_runs(engine: Engine) -> None:
    flying: list[int] = []
    params = SamplingParams(max_new_tokens=6, logprobs=1)

    def on_event(event: Any) -> None:
        flying.append(len(engine._steps))

    engine.submit([5, 6, 7], params, on_event=on_event)
    engine.submit([5, 6, 7], params).result()
    assert max(flying[:-2]) == engine._executor.runs_ahead
    assert flying[-1] == 0


def test_a_text_ends_the_answer_and_nothing_of_it_is_told(engine: Engine) -> None:
    whole = engine.submit("2+2?", SamplingParams(max_new_tokens=16)).result().text
    assert len(whole) > 4
    stop = whole[3:5]
    stream = engine.submit("2+2?", SamplingParams(max_new_tokens=16, stop=(stop,)))
    pieces = list(stream)
    assert (stream.result().finish, stream.result().stop_text) == ("stop", stop)
    assert "".join(pieces).strip() == whole[: whole.index(stop)].strip()


def test_prompts_that_begin_alike_share_pages(engine: Engine) -> None:
    text = prompts(1)[0] * 2
    text = (text * 64)[:60]
    first = engine.submit(text, SamplingParams(max_new_tokens=4)).result()
    again = engine.submit(text, SamplingParams(max_new_tokens=4)).result()
    assert first.shared_tokens == 0
    assert again.shared_tokens == 48
    assert ids(first) == ids(again)


def test_what_can_never_fit_is_refused_with_numbers(engine: Engine) -> None:
    with pytest.raises(UsageError, match=r"70 tokens and 16 new tokens .* memory for 80 in total"):
        engine.submit([1] * 70, SamplingParams(max_new_tokens=16))
    with pytest.raises(UsageError, match="empty"):
        engine.submit([])
    with pytest.raises(DuokaError, match="token 9999 is invalid"):
        engine.submit([1, 9999])
    assert engine.submit([1] * 64, SamplingParams(max_new_tokens=16)).result().prompt_tokens == 64


def test_who_cancels_frees_pages_for_those_who_wait(engine: Engine) -> None:
    streams = [engine.submit(text) for text in prompts(9)]
    for stream in streams[:4]:
        stream.cancel()
    assert [stream.result().finish for stream in streams[:4]].count("cancelled") > 0
    assert all(stream.result().finish != "cancelled" for stream in streams[4:])
    assert engine.load().free_pages == engine.capacity.pages


@pytest.mark.slow
def test_weights_in_the_hosts_memory_answer_alike(tmp_path: Path) -> None:
    path = tuning.write_model("large", tmp_path / "large")
    whole = duoka.plan(path, "virtual:256MiB", WORK)
    constraints = duoka.Constraints(offload=True)
    budget = (whole.forecast.devices[0].reserved_bytes >> 20) - 2
    plan = duoka.plan(path, f"virtual:{budget}MiB", WORK, constraints=constraints)
    assert plan.offloaded
    answers = []
    for each in (whole, plan):
        with Engine(each) as engine:
            answers.append([ids(completion) for completion in engine.generate(prompts(5))])
    assert answers[0] == answers[1]


# ── answers as long as the context ──


def test_an_answer_may_take_the_rest_of_the_context(plan: Any, engine: Engine) -> None:
    text, free = prompts(1)[0], {"logit_bias": {256: -100.0}}  # the token that ends answers
    whole = engine.submit(text, SamplingParams(**free)).result()
    assert (len(text) + len(whole.tokens), whole.finish) == (80, "length")
    assert len(engine.submit(text, SamplingParams(max_new_tokens=5)).result().tokens) == 5
    assert len(engine.submit([1] * 79, SamplingParams(**free)).result().tokens) == 1
    with Engine(plan, processes=False, max_new_tokens=7, warm_up="largest") as short:
        assert len(short.submit(text, SamplingParams(**free)).result().tokens) == 7
        longer = SamplingParams(max_new_tokens=9, **free)
        assert len(short.submit(text, longer).result().tokens) == 9
        assert len(short.submit([1] * 78, SamplingParams(**free)).result().tokens) == 2


FORMS_OF_PARAMS = [
    {},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "repetition_penalty": 1.2, "frequency_penalty": 0.5, "logprobs": 2},
    {"temperature": 1.0, "stop": ("zz",), "min_new_tokens": 40},
]


@pytest.mark.parametrize(
    ("cache", "processes"),
    [
        ("paged", False),
        pytest.param("paged-int8", False, marks=pytest.mark.slow),
        pytest.param("paged", True, marks=pytest.mark.slow),
    ],
)
def test_preempted_answers_are_those_of_an_engine_with_room(
    model: Path, cache: Any, processes: bool
) -> None:
    work = replace(WORK, cache=cache, prefill_chunk_tokens=24)
    roomy, tight = (
        duoka.plan(model, "virtual:2x256MiB", replace(work, pages=pages), use_all=True)
        for pages in (40, 7)
    )
    params = [
        SamplingParams(seed=number, **{"min_new_tokens": 30, **FORMS_OF_PARAMS[number % 4]})
        for number in range(5)
    ]
    texts = [text[:20] for text in prompts(5)]
    found = []
    for plan in (roomy, tight):
        with Engine(plan, processes=processes, warm_up="largest") as engine:
            streams = [engine.submit(*asked) for asked in zip(texts, params, strict=True)]
            found.append([stream.result() for stream in streams])
            assert (engine.load().num_preempted > 0) == (plan is tight)
            assert engine.load().free_pages == engine.capacity.pages
    for one, other in zip(*found, strict=True):
        assert (one.text, ids(one), one.finish) == (other.text, ids(other), other.finish)
        assert other.shared_tokens < other.prompt_tokens


def test_a_preempted_answer_fits_its_grammar(model: Path) -> None:
    work = replace(WORK, cache="paged", prefill_chunk_tokens=24, pages=7)
    pattern = "([a-d]{3}-){12}"
    with Engine(duoka.plan(model, "virtual:256MiB", work), warm_up="largest") as engine:
        params = SamplingParams(temperature=1.0, grammar=Grammar.regex(pattern))
        answers = engine.generate([text[:20] for text in prompts(4)], params)
        assert engine.load().num_preempted > 0
    assert all(re.fullmatch(pattern, answer.text) for answer in answers)


def test_white_space_at_the_ends_of_a_continuation_stays(engine: Engine) -> None:
    (space,) = tuning.make_tokenizer().encode(" ", add_special_tokens=False)
    params = SamplingParams(max_new_tokens=4, logit_bias={space: 100.0})
    assert engine.submit([1, 2, 3], params).result().text == "    "
    stream = engine.submit("What?", params)
    assert ("".join(stream), stream.result().text) == ("    ", "")


# ── grammars ──


def test_answers_fit_their_grammars_in_any_company(engine: Engine) -> None:
    plain = SamplingParams(temperature=1.0, seed=3, max_new_tokens=9)
    alone = engine.submit("How?", plain).result()
    patterns = ["[a-c]{3,6}", "(ab|é)+!", " x *y ", "[0-9]{2}|no"]
    streams = [
        engine.submit(
            "What?", SamplingParams(temperature=1.0, seed=seed, grammar=Grammar.regex(pattern))
        )
        for seed in range(4)
        for pattern in patterns
    ]
    company = engine.submit("How?", plain)
    answers = [stream.result() for stream in streams]
    for answer, pattern in zip(answers, patterns * 4, strict=True):
        # White space stays, and nothing stands for half a character.
        assert answer.finish == "length" or re.fullmatch(pattern, answer.text)
        assert "\ufffd" not in answer.text
    assert [answer.finish for answer in answers].count("stop") > 8
    assert len({answer.text for answer in answers}) > 8
    assert ids(company.result()) == ids(alone)


@pytest.mark.parametrize(
    ("pattern", "options", "text", "finish"),
    [
        ("[0-9]{40}", {"max_new_tokens": 8, "logit_bias": {0: 9.0}}, "[0-9]{8}", "length"),
        ("ab", {"min_new_tokens": 5}, "ab", "stop"),
        ("a*", {"min_new_tokens": 5, "logit_bias": {256: 99.0}}, "a{5}", "stop"),
        ("a*b?", {"logit_bias": {256: 99.0}}, "", "stop"),
        ("ab(cd)*", {"min_new_tokens": 3, "stop": ("c",)}, "ab", "stop"),
        (
            "[ab]{7}",
            {"logit_bias": {65: 99.0, 70: 100.0}, "frequency_penalty": 2.0},
            "b{7}",
            "stop",
        ),
        ("[ab]{7}", {"presence_penalty": 2.0, "temperature": 1.0, "seed": 1}, "[ab]{7}", "stop"),
    ],
)
def test_a_grammar_beside_other_parameters(
    engine: Engine, pattern: str, options: dict[str, Any], text: str, finish: str
) -> None:
    params = SamplingParams(**{"grammar": Grammar.regex(pattern), **options})
    answer = engine.submit("What?", params).result()
    assert answer.finish == finish
    assert re.fullmatch(text, answer.text)


def test_what_a_model_says_before_its_content_is_no_part_of_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(grammar=Grammar.regex("ab"))
    prompts = ["What?", [ChatMessage(role="user", content="What?")], [1, 2, 3]]
    plain = engine.generate(prompts, params)
    monkeypatch.setattr(type(engine._reader.chat), "content_start", lambda *_: (5, 6))
    begun = engine.generate(prompts, params)
    lengths = zip(begun, plain, strict=True)
    assert [one.prompt_tokens - other.prompt_tokens for one, other in lengths] == [2, 2, 0]
    assert {answer.text for answer in begun} == {"ab"}
    free = engine.submit("What?", SamplingParams(max_new_tokens=2)).result()
    assert free.prompt_tokens == plain[0].prompt_tokens


def test_a_grammar_that_takes_too_much_ends_its_answer_alone(engine: Engine) -> None:
    doubled = [f"r{number}: r{number + 1} r{number + 1}" for number in range(40)]
    heavy = Grammar.lark("\n".join(["start: r0", *doubled, 'r40: "a"']))
    streams = [engine.submit(text) for text in prompts(3)]
    bad = engine.submit("What?", SamplingParams(grammar=heavy))
    with pytest.raises(UsageError, match="can't continue under its lark"):
        bad.result()
    assert all(stream.result().tokens for stream in streams)
    assert engine.load().free_pages == engine.capacity.pages
    with pytest.raises(UsageError, match="no text token satisfies it"):
        engine.submit("What?", SamplingParams(grammar=Grammar.lark('start: <|user|> "a"')))


# ── several answers to one prompt ──


def test_answers_to_one_prompt_share_its_pages_and_no_seed(engine: Engine) -> None:
    text = [5 + number for number in range(60)]
    params = SamplingParams(temperature=1.0, seed=4, max_new_tokens=8)
    answers = engine.generate([text, [1, 2]], params, n=3)
    assert [answer.shared_tokens for answer in answers] == [0, 48, 48, 0, 0, 0]
    assert len({tuple(ids(answer)) for answer in answers[:3]}) == 3
    # Each is what it is by itself, and the first one what it is without the others.
    again = [engine.submit(text, each).result() for each in params.split(3)]
    assert [*map(ids, again)] == [*map(ids, answers[:3])]
    assert ids(engine.submit(text, params).result()) == ids(answers[0])
    with pytest.raises(UsageError, match="n is 0"):
        engine.generate([text], n=0)


# ── failures ──


def test_one_that_fails_ends_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    run, poison = engine._executor.run, 13

    def failing(chunks: Any) -> Any:
        if any(poison in chunk.tokens for chunk in chunks):
            raise RuntimeError("a kernel failed")
        return run(chunks)

    monkeypatch.setattr(engine._executor, "run", failing)
    good = [[token for token in text if token != poison] + [1] for text in prompts(6)]
    streams = [engine.submit(text, SamplingParams(logit_bias={poison: -100})) for text in good]
    bad = engine.submit([1, poison, 2])
    with pytest.raises(RuntimeError, match="a kernel failed"):
        bad.result()
    assert all(stream.result().tokens for stream in streams)
    assert engine.load().free_pages == engine.capacity.pages


def test_one_whose_text_fails_ends_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    add, first = Detokenizer.add, []

    def failing(self: Detokenizer, token: int) -> str:
        first.append(self)
        if self is first[0]:
            raise ValueError("no such character")
        return add(self, token)

    monkeypatch.setattr(Detokenizer, "add", failing)
    outcomes = [outcome for _, outcome in engine.as_completed(enumerate(prompts(5)))]
    failed = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    assert [str(error) for error in failed] == ["no such character"]
    assert len(outcomes) == 5
    assert engine.load().free_pages == engine.capacity.pages


def test_memory_that_is_short_for_a_step_is_enough_for_smaller_ones(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "duoka.engine")
    texts, params = [text[:20] for text in prompts(5)], SamplingParams(max_new_tokens=6)
    expected = [ids(completion) for completion in engine.generate(texts, params)]
    run, sizes = engine._executor.run, []

    def short(chunks: Any) -> Any:
        size = sum(len(chunk.tokens) for chunk in chunks)
        if size > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        sizes.append(size)
        return run(chunks)

    monkeypatch.setattr(engine._executor, "run", short)
    assert [ids(completion) for completion in engine.generate(texts, params)] == expected
    assert max(sizes) <= 3
    assert all("failed: CUDA out of memory" in line for line in caplog.messages)
    assert caplog.messages


def test_a_defect_ends_all_and_hangs_nobody(plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(plan, processes=False) as engine:

        def defect(step: Any) -> None:
            raise ZeroDivisionError("a defect")

        monkeypatch.setattr(engine._executor, "submit", defect)
        for stream in [engine.submit(text) for text in prompts(2)]:
            with pytest.raises(ZeroDivisionError, match="a defect"):
                stream.result()
        with pytest.raises(ZeroDivisionError, match="a defect"):
            engine.submit([1])


def test_a_closed_engine_has_no_model_any_more(plan: Any) -> None:
    gc.collect()
    gc.disable()  # else it might find what the engine has left in a cycle
    try:
        engine = Engine(plan, processes=False)
        model = weakref.ref(engine._executor._model.model)  # type: ignore[attr-defined]
        engine.generate(prompts(2), SamplingParams(max_new_tokens=2))
        engine.close()
        assert model() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("is_asynchronous", [True, False])
def test_close_ends_what_is_on_its_way(
    is_asynchronous: bool, plan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("duoka.engine.executor._is_asynchronous", lambda model: is_asynchronous)
    engine = Engine(plan, processes=False)
    streams = [engine.submit(text) for text in prompts(9)]
    engine.close()
    assert {stream.result().finish for stream in streams} <= {"cancelled", "length", "stop"}
    assert streams[-1].result().finish == "cancelled"
    with pytest.raises(UsageError, match="has been closed"):
        engine.submit([1])
    assert not engine._thread.is_alive()
    assert not engine._executor._steps  # type: ignore[attr-defined]
    assert engine.fallbacks() == []
