"""What a prompt becomes in the engine's process, and how its answer is read."""

from __future__ import annotations

import pytest
import tuning

from duoka import Checkpoint, Workload
from duoka.engine import Grammar
from duoka.errors import UsageError
from duoka.runtime.prompt_reader import PromptReader
from duoka.serve.messages import Prompt
from duoka.serve.questions import QuestionReader

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> PromptReader:
    directory = tuning.write_model("llama", tmp_path_factory.mktemp("model") / "llama")
    return PromptReader.open(Checkpoint.open(directory), Workload())


@pytest.fixture(scope="module")
def questions(reader: PromptReader) -> QuestionReader:
    return QuestionReader(reader)


def test_a_text_and_tokens_are_taken_as_they_are(
    reader: PromptReader, questions: QuestionReader
) -> None:
    assert questions.read(Prompt(text="a b")).tokens == reader.plain("a b")
    question = questions.read(Prompt(tokens=[1, 2]))
    assert question.tokens == [1, 2]
    assert question.reader().feed(" <x> ") == [("content", 0, " <x> ")]


def test_a_chat_is_the_familys_own_prompt(reader: PromptReader, questions: QuestionReader) -> None:
    assert questions.read(Prompt(messages=CHAT)).tokens == reader.prompt("hi")


def test_a_required_call_is_forced_and_read(questions: QuestionReader) -> None:
    prompt = Prompt(messages=CHAT, tools=[TOOL], tool_choice="required")
    question = questions.read(prompt)
    assert question.grammar is not None
    answer = question.reader()
    text = '{"name": "weather", "arguments": {"city": "Bonn"}}'
    assert question.forced is not None
    parts = answer.feed(text.removeprefix(question.forced.text)) + answer.finish()
    assert parts[0] == ("tool_name", 0, "weather")
    assert "".join(part for kind, _, part in parts if kind == "tool_arguments") == (
        '{"city": "Bonn"}'
    )
    assert answer.num_calls == 1


def test_what_cant_be_asked_is_refused(questions: QuestionReader) -> None:
    forced = Prompt(messages=CHAT, tools=[TOOL], tool_choice="required")
    with pytest.raises(UsageError, match="can't be a call and have a response_format"):
        questions.read(forced, Grammar.json_object())
    with pytest.raises(UsageError, match="no tool is offered"):
        questions.read(Prompt(messages=CHAT, tool_choice="required"))
    with pytest.raises(UsageError, match=r"messages\[0\]"):
        questions.read(Prompt(messages=[{"role": "nobody", "content": "hi"}]))
