"""What a prompt becomes in the engine's process, and how its answer is read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import tuning
from models.text import call_templates

from duoka import Checkpoint, Workload
from duoka.base.answer_parts import AnswerPart
from duoka.engine.grammar import Grammar
from duoka.errors import UsageError
from duoka.models.text.prompts import chat_format
from duoka.runtime.prompt_reader import PromptReader, PromptTooLong
from duoka.serve.messages import Prompt, Turn
from duoka.serve.questions import QuestionReader

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CHAT = [Turn(role="user", content="hi")]


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
    assert question.open_reader().feed(" <x> ") == [AnswerPart("content", " <x> ")]


def test_a_chat_is_the_familys_own_prompt(reader: PromptReader, questions: QuestionReader) -> None:
    assert questions.read(Prompt(messages=CHAT)).tokens == reader.prompt("hi")


def test_a_required_call_is_forced_and_read(questions: QuestionReader) -> None:
    question = questions.read(Prompt(messages=CHAT, tools=[TOOL], must_call=True))
    assert question.params.grammar is not None
    form = {"response_format": {"type": "json_object"}}  # is that of a text
    forced = questions.read(Prompt(messages=CHAT, tools=[TOOL], must_call=True), form)
    assert forced.params == question.params
    answer = question.open_reader()
    parts = answer.feed('{"name": "weather", "arguments": {"city": "Bonn"}}') + answer.finish()
    assert parts == [
        AnswerPart("tool_name", "weather"),
        AnswerPart("tool_arguments", '{"city": "Bonn"}'),
    ]
    assert answer.num_calls == 1


def test_a_single_call_is_told_where_no_more_are_wanted(questions: QuestionReader) -> None:
    prompt = Prompt(messages=CHAT, tools=[TOOL], must_call=True, parallel_tool_calls=False)
    call = '{"name": "weather", "arguments": {}}'
    answer = questions.read(prompt).open_reader()
    parts = answer.feed(f"{call}; {call}") + answer.finish()
    assert [part.text for part in parts] == ["weather", "{}"]


def questions_of(template: str) -> QuestionReader:
    """Questions for a model with this chat template."""
    tokenizer = call_templates.tokenizer("hermes", template)
    chat = chat_format(tokenizer, {"model_type": "llama"})
    return QuestionReader(cast(PromptReader, SimpleNamespace(
        tokenizer=tokenizer, chat=chat, check_images=lambda _: None)))  # fmt: skip


def test_a_structured_answer_may_be_a_call_instead() -> None:
    questions = questions_of(call_templates.TEMPLATES["hermes"])
    form = {"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": 1}}}}
    question = questions.read(Prompt(messages=CHAT, tools=[TOOL]), form)
    grammar = question.params.grammar
    assert grammar is not None
    assert "<[258]> rest" in grammar.text  # the token <tool_call>
    (name, _) = question.open_reader().feed(
        '<tool_call>{"name": "weather", "arguments": {"city": "Bonn"}}</tool_call>'
    )
    assert name == AnswerPart("tool_name", "weather")
    plain = questions.read(Prompt(messages=CHAT), form).params.grammar
    assert plain == Grammar.json_schema({"const": 1})


TURNS = [
    Turn(role="system", content="first"),
    *CHAT,
    Turn(role="system", content="second"),
    Turn(role="user", content="and?"),
]


def test_system_messages_come_first_where_a_template_wants_it() -> None:
    loop = "{% for m in messages %}[{{ m.role }} {{ CONTENT }}]{% endfor %}"
    strict = "m.content if loop.first or m.role != 'system' else raise_exception('no')"
    for content, expected in (
        (strict, "[system first\n\nsecond][user hi][user and?]"),
        ("m.content", "[system first][user hi][system second][user and?]"),
    ):
        questions = questions_of(loop.replace("CONTENT", content))
        tokens = questions.read(Prompt(messages=TURNS)).tokens
        assert questions.reader.tokenizer.decode(tokens) == expected
    with pytest.raises(UsageError, match="rejects the messages: no"):
        questions_of("{{ raise_exception('no') }}").read(Prompt(messages=CHAT))


def test_what_cant_be_asked_is_refused(questions: QuestionReader) -> None:
    with pytest.raises(UsageError, match="tools is empty"):
        questions.read(Prompt(messages=CHAT, must_call=True))
    with pytest.raises(UsageError, match=r"messages\[0\]"):
        questions.read(Prompt(messages=[Turn(role="tool", content="hi", call_id="x")]))
    with pytest.raises(UsageError, match="can't be compiled") as caught:
        questions.read(Prompt(text="a"), {"response_format": {"type": "regex", "regex": "("}})
    assert caught.value.param == "response_format"  # type: ignore[attr-defined]


def test_an_endless_prompt_is_not_encoded(reader: PromptReader) -> None:
    questions = QuestionReader(reader, context_tokens=10)
    assert questions.read(Prompt(tokens=[1] * 11)).tokens == [1] * 11  # which is only counted
    with pytest.raises(PromptTooLong, match="1000000 characters, more than 10 tokens"):
        questions.read(Prompt(text="a" * 10**6))
