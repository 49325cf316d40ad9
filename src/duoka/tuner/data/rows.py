"""Read a row of training data as a chat, a prompt and its completion, or a document, by its keys.

=================================  ===========================================================
keys                               form
=================================  ===========================================================
``messages``                       a chat in OpenAI's form, optionally with ``tools``
``conversations``                  a chat in the form of ChatGLM3 (``role``), ShareGPT (``from``)
``instruction``, ``output``        Alpaca, optionally with ``input``, ``system``, ``history``
``prompt``, ``completion``         two texts; the completion continues the prompt
``text``                           a document
=================================  ===========================================================

Further keys whose names have words such as "weight" or "loss" mark rows or messages as trained or
not: they are followed or refused. All other keys are ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from duoka.errors import UsageError
from duoka.models.text.messages import (
    ChatMessage,
    Tool,
    read_message,
    read_tool_call,
    refuse_half_pairs,
)

_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "function": "observation",
    "function_response": "observation",
    "developer": "system",
}
_REASONING = frozenset({"reasoning", "thinking", "thought", "thoughts"})
_KEYS = "messages, conversations, instruction and output, prompt and completion, or text"
_MOST_SHOWN_KEYS = 8
# Words in the names of keys by which other trainers mark trained content; see `_marks`.
_WORDS = re.compile("[A-Z]?[a-z]+|[A-Z]+")
_PREFERENCES = frozenset(
    {"chosen", "rejected", "preferred", "preference", "preferences", "kto", "reward", "rewards"}
)
_MEDIA = frozenset({"image", "images", "video", "videos", "audio", "audios", "pixel"})
_MARKS = frozenset(
    {"label", "labels", "loss", "weight", "weights", "learn", "desirable"}
    | {"train", "trained", "training", "trainable"}
)
_MASKS = frozenset({"mask", "masks", "masked", "ignore", "ignored", "skip", "exclude"})
_SIGNS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
# Keys with context before an answer; only some forms of rows support them.
_CONTEXTS = ("system", "tools", "functions", "history", "system_prompt", "documents")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """Messages in order, and the tools that the assistant may call.

    `unweighted` has the indices of messages that are not trained: OpenAI's ``weight`` of 0.
    """

    messages: tuple[ChatMessage, ...]
    tools: tuple[Tool, ...] = ()
    unweighted: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class PromptCompletion:
    """A prompt and the completion to train."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Document:
    """A text to train; `pieces` together are the text, and may be read lazily."""

    pieces: Iterable[str]


def read_row(row: Mapping[str, Any]) -> Chat | PromptCompletion | Document:
    """Read a row in the form indicated by its keys; raise UsageError for unknown forms."""
    for key, is_learnt in _marks(row).items():
        if not is_learnt:
            raise UsageError(f"{key!r} is {row[key]}: the row is marked as not trained")
    for key in ("messages", "conversations"):
        if row.get(key) is not None:
            return _chat(_list_of(row[key], key), row)
    if row.get("instruction") is not None and "output" in row:
        _refuse_unread(row, "system", "tools", "history")
        return _check_chat(list(_alpaca(row)), row)
    if row.get("prompt") is not None and "completion" in row:
        if isinstance(row["prompt"], list) and isinstance(row["completion"], list):
            return _chat([*row["prompt"], *row["completion"]], row)
        _refuse_unread(row)
        return PromptCompletion(_text(row, "prompt"), _nonempty_text(row, "completion"))
    if row.get("text") is not None:
        _refuse_unread(row)
        return Document([_nonempty_text(row, "text")])
    key_names = ", ".join(list(row)[:_MOST_SHOWN_KEYS]) or "none"
    raise UsageError(f"its keys are {key_names}; supported: {_KEYS}")


def _words(key: object) -> set[str]:
    """Return the words of a key in lower case, split at capitals, digits and underscores."""
    return {word.lower() for word in _WORDS.findall(str(key))}


# Other trainers have keys that mark content as trained or not. Ignoring such a key could train on
# content that the author of the data excluded. A key is judged by its words:
#
#   "weight": 0, "isTrained": false   weight, trained     a message isn't trained, a row is refused
#   "loss_mask": [1, 0]               loss, mask          refused: 1 may mean trained or hidden
#   "chosen": "…", "rejected": "…"    preference data     refused: another method of training
#   "id": 7, "source": "web"          none of the words   ignored
def _marks(fields: Mapping[str, Any]) -> dict[str, bool]:
    """Return the keys that mark a row or message as trained or not, with their values.

    Raises UsageError for preference data, media, masks, and values other than true and false.
    """
    marks = {}
    for key, value in fields.items():
        words = _words(key)
        if value is None or value in ("", [], {}):
            continue
        if words & _PREFERENCES:
            raise UsageError(
                f"{key!r} belongs to preference data (DPO, KTO), which isn't supported: keep the "
                "better answer as the last message, and remove the other one"
            )
        if words & _MEDIA and value:
            raise UsageError(f"{key!r} isn't supported: training uses text only")
        if words & (_MARKS | _MASKS):
            sign = None if words & _MASKS else _SIGNS.get(str(value).lower())
            if sign is None:
                raise UsageError(
                    f"{key!r} is {str(value)[:40]}; only true, false, 1 and 0 are supported: "
                    "remove the key if it has another meaning"
                )
            marks[key] = sign
    return marks


def _refuse_unread(row: Mapping[str, Any], *read: str) -> None:
    """Raise UsageError for context keys that the row's form would ignore; `read` are supported."""
    for key in _CONTEXTS:
        if row.get(key) and key not in read:
            raise UsageError(f"{key!r} isn't supported here; write the row as messages")


def _chat(messages_in: Sequence[Any], row: Mapping[str, Any]) -> Chat:
    """Read the messages of a row, with its tools and system text."""
    _refuse_unread(row, "system", "tools", "functions")
    messages: list[ChatMessage] = []
    unweighted = set()
    first_message = messages_in[0] if messages_in else None
    tools = row.get("tools") or row.get("functions")  # OpenAI's older key
    if isinstance(first_message, Mapping) and first_message.get("tools") and not tools:
        tools = first_message["tools"]  # as in GLM-4's fine-tuning demo
    row = {**row, "tools": tools}
    if row.get("system"):
        messages.append(ChatMessage(role="system", content=_text(row, "system")))
    for number, message in enumerate(messages_in, start=1):
        try:
            if not isinstance(message, Mapping):
                raise UsageError("it is not an object")
            if message.get("tools") and message["tools"] != tools:
                raise UsageError("its 'tools' differ from those of the row")
            marks, place = _marks(message), len(messages)
            messages += _messages(message)
            if not all(marks.values()):
                unweighted.add(place)
            elif marks and messages[place].role != "assistant":
                raise UsageError("it is marked as trained, and only assistant messages are trained")
        except UsageError as error:
            raise UsageError(f"message {number}: {error}") from error
    return _check_chat(messages, row, frozenset(unweighted))


def _messages(fields: Mapping[str, Any]) -> Iterator[ChatMessage]:
    """Read a message of ShareGPT, ChatGLM3's fine-tuning demo, or OpenAI.

    ChatGLM3's message of a tool gives two: the call, and its result.
    """
    for key in fields:
        if fields[key] and _words(key) & _REASONING:
            raise UsageError(f"{key!r} isn't supported; write it into the content")
    if "from" in fields and "role" not in fields:
        speaker, content = fields["from"], fields.get("value")
        if speaker == "function_call":
            call = read_tool_call(_json(content))
            yield ChatMessage(role="assistant", content="", calls=(call,))
        else:
            yield read_message({"role": _ROLES.get(str(speaker), speaker), "content": content})
    elif fields.get("role") == "tool" and fields.get("parameters") is not None:
        name, parameters = fields.get("name"), fields["parameters"]
        call = read_tool_call({"name": name, "arguments": parameters})
        yield ChatMessage(role="assistant", content="", calls=(call,))
        result = fields.get("observation")
        content = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
        yield ChatMessage(role="observation", content=content)
    else:
        role, calls = fields.get("role"), fields.get("tool_calls") or fields.get("function_call")
        yield read_message({**fields, "role": _ROLES.get(str(role), role), "tool_calls": calls})


def _alpaca(row: Mapping[str, Any]) -> Iterator[ChatMessage]:
    """Yield the messages of a row in Alpaca's form."""
    if row.get("system"):
        yield ChatMessage(role="system", content=_text(row, "system"))
    for exchange in _list_of(row.get("history"), "history"):
        if not isinstance(exchange, Sequence) or len(exchange) != 2:
            raise UsageError("'history' is not a list of question-answer pairs")
        yield ChatMessage(role="user", content=exchange[0])
        yield ChatMessage(role="assistant", content=exchange[1])
    question = _text(row, "instruction")
    if row.get("input"):
        question += "\n" + _text(row, "input")
    yield ChatMessage(role="user", content=question)
    yield ChatMessage(role="assistant", content=_text(row, "output"))


def _check_chat(
    messages: Sequence[ChatMessage],
    row: Mapping[str, Any],
    unweighted: frozenset[int] = frozenset(),
) -> Chat:
    """Build a chat; raise UsageError for an invalid order of roles, and for empty answers."""
    previous_role = ""
    for number, message in enumerate(messages, start=1):
        role = message.role
        if (
            (role == "system" and previous_role)
            or (role == "assistant" and previous_role in ("", "system"))
            or (role == "observation" and previous_role not in ("assistant", "observation"))
        ):
            position = (
                f"after one of role {previous_role!r}" if previous_role else "at the beginning"
            )
            raise UsageError(f"message {number} of role {role!r} isn't allowed {position}")
        if role == "assistant" and not message.content.strip() and not message.calls:
            raise UsageError(f"message {number} is an empty answer")
        previous_role = role
    if previous_role != "assistant":
        raise UsageError(
            "the last message is not an answer" if messages else "there are no messages"
        )
    tools = tuple(map(_json, _list_of(row.get("tools"), "tools")))
    calls = [call.arguments for message in messages for call in message.calls]
    if tools or calls:
        text = json.dumps([tools, calls], ensure_ascii=False, default=str)
        refuse_half_pairs(text, "a tool, or a call of one,")
    return Chat(messages=tuple(messages), tools=tools, unweighted=unweighted)


def _list_of(value: Any, key: str) -> Sequence[Any]:
    """Return a list, parsed from JSON if a string (in some tables, and ShareGPT's tools)."""
    items = _json(value) if isinstance(value, str) and value.strip() else value or []
    if not isinstance(items, list | tuple):
        raise UsageError(f"{key!r} is not a list")
    return items


def _json(value: Any) -> Any:
    """Return a value; parse a string as JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"a string in place of an object is not valid JSON: {error}") from error


def _text(row: Mapping[str, Any], key: str) -> str:
    """Return the value of a key; raise UsageError unless the value is valid text."""
    text = row[key]
    if not isinstance(text, str):
        raise UsageError(f"{key!r} is not a string, but of type {type(text).__name__}")
    refuse_half_pairs(text, repr(key))
    return text


def _nonempty_text(row: Mapping[str, Any], key: str) -> str:
    """Return the value of a key; raise UsageError unless the value is text, and not blank."""
    text = _text(row, key)
    if not text.strip():
        raise UsageError(f"{key!r} is empty")
    return text
