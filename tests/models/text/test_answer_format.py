from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duoka.base.answer_parts import AnswerPart
from duoka.errors import UsageError
from duoka.models.text.answer_format import AnswerFormat
from duoka.models.text.call_forms import LineForm, ObjectForm
from duoka.models.text.messages import ChatMessage, ToolCall
from duoka.models.text.prompts import chat_format
from duoka.models.text.tokenizer import load_tokenizer

from .answers import FORMS, WEATHER, calls, content, read
from .call_templates import PLAIN, TEMPLATES, tokenizer

LLAMA = {"model_type": "llama"}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now", "parameters": {}}},
]
CALLS = (
    ToolCall(name="get_weather", arguments={"city": '北京 "x"', "days": 2}, id="call_1"),
    ToolCall(name="now", arguments={}, id="call_2"),
)
FAMILIES = sorted(TEMPLATES)
QUESTION = ChatMessage(role="user", content="how is it?")


def answer_of(*said: ToolCall) -> ChatMessage:
    return ChatMessage(role="assistant", content="", calls=said)


def without_ids(said: Any) -> list[ToolCall]:
    return [ToolCall(name=call.name, arguments=call.arguments) for call in said]


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_template_writes_is_read_back(name: str) -> None:
    chat = chat_format(tokenizer(name), LLAMA)
    assert chat.answers.form == FORMS[name]
    said = CALLS[:1] if name == "llama" else CALLS
    result = ChatMessage(role="observation", content="21", call_id="call_1")
    prompt = chat.prompt([QUESTION], TOOLS)
    whole = chat.prompt([QUESTION, answer_of(*said), result], TOOLS)
    assert whole[: len(prompt)] == prompt
    # As an engine does: special tokens are left out but for those that calls are told by.
    left_out = set(chat.tokenizer.all_special_ids) - set(chat.answers.kept_ids)
    stop = whole.index(chat.tokenizer.eos_token_id, len(prompt))
    ids = [token for token in whole[len(prompt) : stop] if token not in left_out]
    text = chat.tokenizer.decode(ids, skip_special_tokens=False)
    parts = read(chat.answers.reader(TOOLS, prompt), list(text))
    assert calls(parts) == without_ids(said)
    assert content(parts) == ""


def test_ids_join_calls_and_results_as_mistral_wants_them() -> None:
    chat = chat_format(tokenizer("mistral"), LLAMA)
    results = [
        ChatMessage(role="observation", content="x", call_id=call.id) for call in CALLS[::-1]
    ]
    text = chat.tokenizer.decode(chat.prompt([QUESTION, answer_of(*CALLS), *results], TOOLS))
    assert '"id": "call00000"}, {' in text
    assert text.index("xcall00001") < text.index("xcall00000")
    again = [QUESTION, answer_of(*CALLS), *results, answer_of(CALLS[0]), results[0]]
    assert "call00000" in chat.tokenizer.decode(chat.prompt(again, TOOLS))


def test_templates_that_write_one_call_or_none() -> None:
    llama = chat_format(tokenizer("llama"), LLAMA)
    with pytest.raises(UsageError, match="one call at once"):
        llama.prompt([QUESTION, answer_of(*CALLS), QUESTION], TOOLS)
    first = TEMPLATES["hermes"].replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
    for template in (first, PLAIN):
        chat = chat_format(tokenizer("hermes", template), LLAMA)
        with pytest.raises(UsageError, match="drops tool calls"):
            chat.prompt([QUESTION, answer_of(*CALLS), QUESTION], TOOLS)


def test_special_tokens_that_stay() -> None:
    for name, marks in {
        "mistral": ["[ARGS]", "[TOOL_CALLS]"],
        "llama": ["<|python_tag|>"],
        "hermes": [],  # its tags are no special tokens, and stay anyway
    }.items():
        answers = chat_format(tokenizer(name), LLAMA).answers
        kept = answers.tokenizer.convert_ids_to_tokens(list(answers.kept_ids))
        assert sorted(kept) == marks


def test_models_that_are_not_known_to_call_tools() -> None:
    chat = chat_format(tokenizer("hermes", PLAIN), LLAMA)
    assert chat.answers.form is None
    text = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    assert read(chat.answers.reader(TOOLS), [text]) == [AnswerPart("content", text)]
    bare = AnswerFormat.of_template(tokenizer("llama", PLAIN.replace("role", '"parameters"')))
    assert bare.form == ObjectForm()
    no_template = tokenizer("hermes", PLAIN)
    no_template.chat_template = None
    assert AnswerFormat.of_template(no_template) == AnswerFormat(no_template, None, None)


def test_reasoning_that_the_prompt_begins() -> None:
    open_think = TEMPLATES["hermes"].replace(
        "assistant\n{% endif %}", "assistant\n<think>\n{% endif %}"
    )
    chat = chat_format(tokenizer("hermes", open_think), LLAMA)
    prompt = chat.prompt([QUESTION])
    assert read(chat.answers.reader(None, prompt), list("so\n</think>\n\nYes.")) == [
        *(AnswerPart("reasoning", "so"), AnswerPart("content", "Yes."))
    ]
    closed = chat_format(tokenizer("hermes"), LLAMA)
    for text in ("Yes <think>no</think>", "a</think>"):
        assert read(closed.answers.reader(None, closed.prompt([QUESTION])), [text]) == [
            AnswerPart("content", text)
        ]
    assert read(closed.answers.reader(None), ["<think>", "\n\n</think>\n\nYes."]) == [
        AnswerPart("content", "Yes.")
    ]


@given(pieces=st.lists(st.text(max_size=9), max_size=5))
def test_without_tools_everything_is_content(pieces: list[str]) -> None:
    reader = AnswerFormat(tokenizer("hermes"), FORMS["hermes"], None).reader(None)
    assert content(read(reader, pieces)) == "".join(pieces).strip()


@pytest.mark.parametrize("name", ["chatglm3-6b", "glm-4-9b-chat"])
def test_the_chatglm_family(name: str, shared_data: Path) -> None:
    config = {"model_type": "chatglm"}
    chat: Any = chat_format(load_tokenizer(shared_data / "tokenizers" / name, config), config)
    assert chat.answers.form == LineForm("python" if name == "chatglm3-6b" else "json")
    assert chat.tokenizer.convert_ids_to_tokens(list(chat.answers.kept_ids)) == ["<|assistant|>"]
    said = ChatMessage(role="assistant", content="我来查。", calls=CALLS)
    prompt = chat.prompt([QUESTION], TOOLS)
    sample = chat.sample([QUESTION, said], TOOLS, "observation").ids
    assert sample[: len(prompt)] == prompt
    text = chat.tokenizer.decode(sample[len(prompt) : -1], skip_special_tokens=False)
    parts = read(chat.answers.reader(TOOLS, prompt), list(text))
    assert calls(parts) == without_ids(CALLS)
    assert content(parts) == "我来查。"


@pytest.mark.parametrize(
    ("tools", "reason"),
    [
        ([{"name": "a b"}], "is not a valid tool name"),
        ([{"name": 3}], "a tool must be an object"),
    ],
)
def test_tools_that_cannot_be_called(tools: list[Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        AnswerFormat(tokenizer("hermes"), FORMS["hermes"], None).reader(tools)
