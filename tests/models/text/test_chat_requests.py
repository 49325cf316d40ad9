from __future__ import annotations

import base64
import io
from typing import Any

import pytest
from fuzzing import JSON, damaged, fuzz, told_of
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from duoka.errors import UsageError
from duoka.models.text.answer_reader import Tags
from duoka.models.text.chat_requests import MOST_IMAGES, ChatMessages
from duoka.models.text.messages import ChatMessage, ToolCall
from duoka.models.text.prompts import chat_format

from .call_templates import tokenizer


def png(size: tuple[int, int] = (2, 3)) -> str:
    content = io.BytesIO()
    Image.new("RGB", size, "red").save(content, "PNG")
    return base64.b64encode(content.getvalue()).decode()


def call(number: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


OPENAI = [
    {"role": "developer", "content": "Be brief."},
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "What is"},
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png()}"}},
            {"type": "text", "text": " this?"},
        ],
    },
    {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "annotations": [],
        "tool_calls": [call("call_1", "look", '{"x": 1}'), call("call_2", "ask", "{}")],
    },
    {"role": "tool", "tool_call_id": "call_2", "content": "no"},
    {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "red"}]},
]
LOOK = ToolCall(name="look", arguments={"x": 1}, id="call_1")
ASK = ToolCall(name="ask", arguments={}, id="call_2")


def test_a_chat_is_read() -> None:
    messages = ChatMessages().openai(OPENAI)
    assert messages[0] == ChatMessage(role="system", content="Be brief.")
    assert (messages[1].role, messages[1].content) == ("user", "What is this?")
    assert [image.size for image in messages[1].images] == [(2, 3)]
    assert messages[2:] == [
        ChatMessage(role="assistant", content="", tool_call=LOOK, further_calls=(ASK,)),
        ChatMessage(role="observation", content="no", call_id="call_2"),
        ChatMessage(role="observation", content="red", call_id="call_1"),
    ]


def test_a_prompt_of_them() -> None:
    chat = chat_format(tokenizer("mistral"), {"model_type": "llama"})
    text = chat.tokenizer.decode(chat.prompt(ChatMessages().openai([OPENAI[0], *OPENAI[2:]])))
    assert '"id": "call00000"}, {"name": "ask", "arguments": {}, "id": "call00001"}]' in text
    assert "tool\nnocall00001" in text
    assert "tool\nredcall00000" in text


def test_reasoning_is_written_as_the_model_writes_it() -> None:
    openai = [{"role": "assistant", "content": "Yes.", "reasoning_content": "so"}]
    for reasoning, expected in (
        (None, "Yes."),
        (Tags("<think>", "</think>"), "<think>\nso\n</think>\n\nYes."),
    ):
        assert ChatMessages(reasoning).openai(openai)[0].content == expected


def image(url: object, **more: object) -> list[dict[str, Any]]:
    part = {"type": "image_url", "image_url": {"url": url, **more}}
    return [{"role": "user", "content": [part]}]


REFUSED: list[tuple[Any, str]] = [
    ([], "a list of 1 to 4096"),
    ({}, "a list of 1 to 4096"),
    ([3], r"messages\[0\]: it is 3"),
    ([OPENAI[0], {"role": "root", "content": "x"}], r"messages\[1\]: its role is \"root\""),
    ([{"role": []}], "its role is"),
    ([{"role": "user"}], "no content"),
    ([{"role": "user", "content": 3}], "no text"),
    ([{"role": "user", "content": "\ud800"}], "surrogate"),
    ([{"role": "user", "content": "x", "name": "bob"}], "a field that isn't read: 'name'"),
    ([{"role": "user", "content": "x", "tool_calls": [LOOK.id]}], "'tool_calls'"),
    ([{"role": "user", "content": [{"type": "input_audio"}]}], 'of type "input_audio"'),
    ([{"role": "system", "content": image("x")[0]["content"]}], 'of type "image_url"'),
    ([{"role": "tool", "content": "x", "tool_call_id": "call_9"}], "which no message before"),
    ([{"role": "assistant", "tool_calls": [call("call 1", "f", "{}")]}], "a call's id"),
    ([{"role": "assistant", "tool_calls": [call("c", "f", "[]")]}], "no arguments in JSON"),
    ([{"role": "assistant", "tool_calls": [call("c", "f", '{"a": "\\ud800"}')]}], "surrogate"),
    ([{"role": "assistant", "tool_calls": 3}], "is no list"),
    ([{"role": "assistant", "tool_calls": [call("c", "f", "{}")] * 129}], "calls 129 tools"),
    (image("https://example.com/x.png"), "taken from the request alone"),
    (image("file:///etc/passwd"), "taken from the request alone"),
    (image("data:image/png;base64,%%%"), "no base64"),
    (image("data:image/png;base64,AAAA"), "no picture"),
    (image(3), "has no url"),
    (image("data:image/png;base64,AAAA", detail="extreme"), "detail"),
    (image(f"data:image/png;base64,{png((17000, 1))}"), "too large"),
]


@pytest.mark.parametrize(("messages", "reason"), REFUSED)
def test_what_is_refused(messages: Any, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        ChatMessages().openai(messages)


def test_limits_of_images() -> None:
    with pytest.raises(UsageError, match="takes no images"):
        ChatMessages(takes_images=False).openai(OPENAI)
    many = image(f"data:image/png;base64,{png()}") * MOST_IMAGES
    assert len(ChatMessages().openai(many)) == MOST_IMAGES
    with pytest.raises(UsageError, match="memory for 64 images, and there are more"):
        ChatMessages().openai([*many, many[0]])
    with pytest.raises(UsageError, match="larger than"):
        ChatMessages().openai(image("data:image/png;base64," + "A" * (2**27)))
    with pytest.raises(UsageError, match="memory for 1 image, and"):  # the second isn't decoded
        ChatMessages(most_images=1).openai([many[0], *image("data:image/png;base64,AAAA")])


@fuzz()
@given(openai=damaged(OPENAI) | JSON)
def test_anything_is_read_or_refused(openai: Any) -> None:
    try:
        assert all(isinstance(message, ChatMessage) for message in ChatMessages().openai(openai))
    except UsageError as error:
        told_of(error, "", 600)


@given(text=st.text(max_size=20))
def test_texts_stay_as_they_are(text: str) -> None:
    said = [{"role": "user", "content": text}]
    assert ChatMessages().openai(said) == [ChatMessage(role="user", content=text)]
