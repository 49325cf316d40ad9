"""A conversation with an engine: the answers of a generator, and nothing read twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tuning

import duoka
from duoka.engine import Engine, SamplingParams
from duoka.engine.answerer import EngineAnswerer
from duoka.runtime import Conversation, Generator, PromptReader, Sampling

WORK = duoka.Workload(prompt_tokens=96, new_tokens=16, dtype="float32")
SHORT = Sampling(max_new_tokens=8)
QUESTIONS = ("What is NVLink?", "And PCIe?", "Which one is faster, and by how much?")


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path: Path = tuning.write_model("llama", tmp_path_factory.mktemp("model") / "llama")
    return duoka.plan(path, "virtual:2x256MiB", WORK, use_all=True)


def test_it_answers_as_a_generator_and_reads_the_end_alone(
    plan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = duoka.Checkpoint.open(plan.source)
    generator = Generator.of(duoka.load(plan), checkpoint, plan.workload)
    conversation = Conversation(generator, SHORT)
    expected = ["".join(conversation.ask(question)) for question in QUESTIONS]
    submit, streams = Engine.submit, []

    def spy(self: Engine, *args: Any, **kwargs: Any) -> Any:
        streams.append(submit(self, *args, **kwargs))
        return streams[-1]

    monkeypatch.setattr(Engine, "submit", spy)
    with Engine(plan, processes=False) as engine:
        answerer = EngineAnswerer(engine, PromptReader.open(checkpoint, plan.workload))
        conversation = Conversation(answerer, SHORT)
        assert ["".join(conversation.ask(question)) for question in QUESTIONS] == expected
        stopped = conversation.ask(QUESTIONS[0])
        next(stopped)
        stopped.close()
        assert engine.num_free_pages == engine.capacity.pages
    first, second, third, _ = [stream.result() for stream in streams]
    assert first.shared_tokens == 0
    assert second.shared_tokens > first.prompt_tokens - 16
    assert third.prompt_tokens > third.shared_tokens > second.prompt_tokens - 16
    measured = answerer.measured()
    assert [peaks.device for peaks in measured.devices] == list(plan.devices)
    assert measured.context_tokens > third.prompt_tokens
    assert measured.first_token_seconds is not None
    assert measured.tokens_per_second is not None


def test_parameters_of_the_engine_hold(plan: Any) -> None:
    checkpoint = duoka.Checkpoint.open(plan.source)
    params = SamplingParams.recommended(
        {"do_sample": False, "repetition_penalty": 1.8}, max_new_tokens=8
    )
    with Engine(plan, processes=False) as engine:
        reader = PromptReader.open(checkpoint, plan.workload)
        answerer = EngineAnswerer(engine, reader)
        prompt = reader.prompt(QUESTIONS[0])
        texts = []
        for chosen in (params, SHORT):
            with answerer.stream(prompt, chosen) as pieces:
                texts.append("".join(pieces).strip())
        assert texts[0] == engine.submit(prompt, params).result().text != texts[1]
