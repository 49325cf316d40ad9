"""Conversations: what was said is the context, as far as it fits, and nothing is read twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import plain_generate
import pytest
from image_checkpoints import write_glm4v
from PIL import Image

import duoka
from duoka.engine import Engine, SamplingParams
from duoka.engine.conversation import Conversation
from duoka.engine.timing import measured
from duoka.errors import UsageError
from duoka.runtime.prompt_reader import PromptReader

SHORT = SamplingParams(max_new_tokens=4)
WORK = duoka.Workload(prompt_tokens=64, new_tokens=32, dtype="float32")
QUESTIONS = ("What is NVLink?", "And PCIe?", "Which?")
PICTURES = (
    Image.effect_noise((56, 56), 99).convert("RGB"),
    Image.new("RGB", (56, 56), "red"),
)


@pytest.fixture(scope="module")
def plan(tiny: Path) -> duoka.Plan:
    return duoka.plan(tiny, "virtual:2x64MiB", WORK, use_all=True)


@pytest.fixture(scope="module")
def reader(plan: duoka.Plan) -> PromptReader:
    return PromptReader.open(duoka.Checkpoint.open(plan.source), plan.workload)


@pytest.fixture(scope="module")
def engine(plan: duoka.Plan) -> Iterator[Engine]:
    with Engine(plan, processes=False) as engine:
        yield engine


def test_each_answer_is_that_to_the_whole_history(
    engine: Engine, reader: PromptReader, plan: duoka.Plan
) -> None:
    conversation = Conversation(engine, reader, SHORT, system="Be brief.")
    prompts, said = [], []
    for question in QUESTIONS:
        said.append("".join(conversation.ask(question)).strip())
        prompts.append(reader.chat.prompt(conversation.messages[:-1]))
    assert [message.role for message in conversation.messages[:3]] == [
        "system", "user", "assistant"
    ]  # fmt: skip
    assert conversation.messages[-1].content == said[-1]
    expected = plain_generate.answers(plan, prompts, max_new_tokens=4)
    assert said == [answer.text.strip() for answer in expected]
    first, second, third = conversation.answers
    assert first.shared_tokens == 0
    assert second.shared_tokens > first.prompt_tokens - 16
    assert third.shared_tokens > second.prompt_tokens - 16


def test_how_fast_answers_came(plan: duoka.Plan, reader: PromptReader) -> None:
    with Engine(plan, processes=False) as engine:
        answers = engine.generate([reader.prompt(text) for text in QUESTIONS], SHORT)
    took = measured(answers, engine.peaks())
    assert [peaks.device for peaks in took.devices] == list(plan.devices)
    assert took.context_tokens == max(a.prompt_tokens + len(a.tokens) for a in answers)
    assert took.first_token_seconds is not None
    assert took.tokens_per_second is not None
    # The seconds of answers that came at the same time are counted once.
    span = max(a.ended_at for a in answers) - min(a.first_token_at or 0 for a in answers)
    new = sum(len(answer.tokens) - 1 for answer in answers)
    assert took.tokens_per_second >= new / span


def test_clearing_keeps_the_system_message(engine: Engine, reader: PromptReader) -> None:
    conversation = Conversation(engine, reader, SHORT, system="Be brief.")
    list(conversation.ask("What is NVLink?"))
    conversation.clear()
    assert [message.role for message in conversation.messages] == ["system"]


def test_the_oldest_rounds_are_left_out_when_the_context_is_full(
    engine: Engine, reader: PromptReader
) -> None:
    conversation = Conversation(engine, reader, SHORT)
    for number in range(8):
        list(conversation.ask(f"What is {number}?"))
    assert conversation.num_forgotten > 0
    assert conversation.messages[-2].content == "What is 7?"
    assert conversation.messages[0].content != "What is 0?"
    assert conversation.messages[0].role == "user"


def test_a_question_that_is_too_long_is_refused_and_forgotten(
    engine: Engine, reader: PromptReader
) -> None:
    conversation = Conversation(engine, reader, SHORT)
    list(conversation.ask("What is NVLink?"))
    with pytest.raises(UsageError, match=r"memory for 64") as caught:
        list(conversation.ask("What? " * 100))
    assert "--context" in str(caught.value.hint)
    assert all("What? What?" not in message.content for message in conversation.messages)


def test_an_answer_that_was_stopped_stays_as_far_as_it_came(
    engine: Engine, reader: PromptReader
) -> None:
    conversation = Conversation(engine, reader, SamplingParams())
    with closing(conversation.ask("What is NVLink?")) as pieces:
        first = next(pieces)
    assert conversation.messages[-1].content.startswith(first.strip())
    assert conversation.messages[-1].role == "assistant"
    assert engine.load().free_pages == engine.capacity.pages


def test_an_answer_that_failed_is_no_answer(
    engine: Engine, reader: PromptReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("a defect")

    conversation = Conversation(engine, reader, SHORT)
    with monkeypatch.context() as patched:
        patched.setattr(engine._scheduler, "_advance", fail)
        with pytest.raises(RuntimeError, match="a defect"):
            list(conversation.ask("What is NVLink?"))
    assert not conversation.answers
    assert not conversation.messages
    assert list(conversation.ask("And now?"))


def test_a_conversation_about_pictures(tmp_path: Path) -> None:
    work = duoka.Workload(
        prompt_tokens=96, new_tokens=8, images=2, image_size=(56, 56), vision_batch=1
    )
    plan = duoka.plan(write_glm4v(tmp_path), "virtual:2x256MiB", work)
    reader = PromptReader.open(duoka.Checkpoint.open(plan.source), plan.workload)
    with Engine(plan) as engine:
        conversation = Conversation(engine, reader, SHORT)
        conversation.show(PICTURES[0])
        for question in ("What?", "And now?"):
            list(conversation.ask(question))
        assert [len(message.images) for message in conversation.messages] == [1, 0, 0, 0]
        conversation.show(*PICTURES)
        list(conversation.ask("And these?"))  # whose pictures are all that were planned
        assert conversation.num_forgotten == 1
        assert [len(message.images) for message in conversation.messages] == [0, 0, 2, 0]
        conversation.show(PICTURES[0])
        with pytest.raises(UsageError, match="3 images in a prompt; the plan has memory for 2"):
            conversation.show(*PICTURES)
        conversation.clear()
        list(conversation.ask("What?"))
        assert [len(message.images) for message in conversation.messages] == [0, 0]
