from __future__ import annotations

import base64
import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from pydantic import TypeAdapter, ValidationError

from duoka.errors import UsageError
from duoka.models.text.answer_reader import Tags
from duoka.models.text.messages import ChatMessage, ToolCall
from duoka.serve.chats import ChatMessages
from duoka.serve.messages import Turn
from duoka.serve.requests import RequestMessage, read_chat


def png(size: tuple[int, int] = (2, 3)) -> str:
    content = io.BytesIO()
    Image.new("RGB", size, "red").save(content, "PNG")
    return f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"


def call(number: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


OPENAI = [
    {"role": "developer", "content": "Be brief."},
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "What is"},
            {"type": "image_url", "image_url": {"url": png()}},
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


def turns(messages: Any) -> list[Turn]:
    read = TypeAdapter(list[RequestMessage]).validate_python(messages)
    return read_chat(read)


def test_a_chat_is_read() -> None:
    messages = ChatMessages(most_images=1).read(turns(OPENAI))
    assert messages[0] == ChatMessage(role="system", content="Be brief.")
    assert (messages[1].role, messages[1].content) == ("user", "What is this?")
    assert [image.size for image in messages[1].images] == [(2, 3)]
    assert messages[2:] == [
        ChatMessage(role="assistant", content="", calls=(LOOK, ASK)),
        ChatMessage(role="observation", content="no", call_id="call_2"),
        ChatMessage(role="observation", content="red", call_id="call_1"),
    ]


def test_reasoning_is_written_as_the_model_writes_it() -> None:
    openai = [{"role": "assistant", "content": "Yes.", "reasoning_content": "so"}]
    for reasoning, expected in (
        (None, "Yes."),
        (Tags("<think>", "</think>"), "<think>\nso\n</think>\n\nYes."),
    ):
        assert ChatMessages(reasoning).read(turns(openai))[0].content == expected


def image(url: object, **more: object) -> list[dict[str, Any]]:
    part = {"type": "image_url", "image_url": {"url": url, **more}}
    return [{"role": "user", "content": [part]}]


@pytest.mark.parametrize(
    "messages",
    [
        {},
        [3],
        [{"role": "root", "content": "x"}],
        [{"role": []}],
        [{"role": "user"}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": "x", "tool_calls": [LOOK.id]}],
        [{"role": "user", "content": [{"type": "input_audio"}]}],
        [{"role": "system", "content": image("x")[0]["content"]}],
        [{"role": "tool", "content": "x"}],
        [{"role": "assistant", "tool_calls": 3}],
        image(3),
    ],
)
def test_another_form_is_refused(messages: Any) -> None:
    with pytest.raises(ValidationError):
        turns(messages)


REFUSED: list[tuple[Any, str]] = [
    ([OPENAI[0], {"role": "tool", "content": "x", "tool_call_id": "call_9"}],
     r"messages\[1\]: it is the result of the call .*, which no earlier message"),
    ([{"role": "assistant", "tool_calls": [call("c", "f", "[]")]}], "no JSON arguments"),
    ([{"role": "assistant", "tool_calls": [call("c", "f", '{"a": "\\ud800"}')]}], "surrogate"),
    (image("https://example.com/x.png"), "in the request are"),
    (image("file:///etc/passwd"), "in the request are"),
    (image("data:image/png;base64,%%%"), "not base64"),
    (image("data:image/png;base64,AAAA"), "not a supported image"),
    (image(png((17000, 1))), "too large"),
]  # fmt: skip


@pytest.mark.parametrize(("messages", "reason"), REFUSED)
def test_what_is_refused(messages: Any, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        ChatMessages(most_images=1).read(turns(messages))


@pytest.mark.parametrize("role", ["system", "assistant", "tool"])
def test_users_alone_show_images(role: Any) -> None:
    with pytest.raises(UsageError, match="image_url for users"):
        ChatMessages().read([Turn(role=role, images=(png(),))])


def test_limits_of_images() -> None:
    with pytest.raises(UsageError, match="takes no images"):
        ChatMessages().read(turns(OPENAI))
    many = turns(image(png())) * 3
    assert len(ChatMessages(most_images=3).read(many)) == 3
    with pytest.raises(UsageError, match="memory for 2 images, and the request has more"):
        ChatMessages(most_images=2).read(many)
    broken = turns(image("data:image/png;base64,AAAA"))
    with pytest.raises(UsageError, match="memory for 1 image, and"):  # the second isn't decoded
        ChatMessages(most_images=1).read([many[0], *broken])


@given(text=st.text(max_size=20))
def test_texts_stay_as_they_are(text: str) -> None:
    said = [{"role": "user", "content": text}]
    assert ChatMessages().read(turns(said)) == [ChatMessage(role="user", content=text)]
