"""Read a row of training data as a chat, a prompt and its completion, or a document, by its keys.

=================================  ===========================================================
keys                               form
=================================  ===========================================================
``messages``, ``conversations``,   a chat: messages of OpenAI and ms-swift (``role``), ChatGLM3
or ``conversation``                and ShareGPT (``from``), or exchanges (``human`` and
                                   ``assistant``); optionally with ``system`` and ``tools``
``prompt``, ``completion``         two texts; the completion continues the prompt
those of `EXCHANGES`               a question and its answer: Alpaca, Dolly, ms-swift;
                                   optionally with ``input`` or ``context`` after the question,
                                   ``system``, ``history`` and ``tools``
``text``                           a document
=================================  ===========================================================

The first form of which a row has all keys is read. Further keys whose names have words such as
"weight" or "loss" mark rows or messages as trained or not: they are followed or refused. All other
keys are ignored.

A chat may have images, as ``images`` or ``image`` of the row or of a message, or as parts of a
content. Each stands where a question has ``<image>``; without any, all are in the first question.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from typing import Any

from PIL.Image import Image

from duoka.base.units import format_count
from duoka.errors import UsageError
from duoka.models.text.messages import ChatMessage, Tool, read_message, refuse_half_pairs

from .images import PLACEHOLDER, split_row

# The question and the answer of an exchange.
EXCHANGES = (
    # Alpaca, Dolly; ms-swift, ChatGLM-6B; AdvertiseGen
    ("instruction", "output"), ("instruction", "response"), ("query", "response"),
    ("prompt", "response"), ("content", "summary"), ("question", "answer"),
    # In lists of exchanges: ms-swift, XTuner
    ("human", "assistant"), ("user", "assistant"), ("input", "output"),
)  # fmt: skip
ADDITIONS = ("input", "context")  # texts that follow a question
_KEYS = (
    "messages, conversations, a question and its answer (instruction and output, query and "
    "response, …), prompt and completion, or text; --columns names other keys"
)
_ANSWER = "…"  # for a row without an answer; see `with_answer`
# The keys to which named columns are renamed; the key of any other role is the role's name.
_ROLE_KEYS = {"prompt": "instruction", "query": "input", "response": "output"}
_CALL = "call"  # a message that only calls tools
_ROLES = {
    "human": "user",
    "developer": "system",
    **dict.fromkeys(("gpt", "bot"), "assistant"),
    **dict.fromkeys(("tool", "tool_response", "function", "function_response"), "observation"),
    **dict.fromkeys(("tool_call", "function_call"), _CALL),
}
_REASONING = frozenset({"reasoning", "thinking", "thought", "thoughts"})
_MOST_SHOWN_KEYS = 8
# Words in the names of keys by which other trainers mark trained content; see `_marks`.
_WORDS = re.compile("[A-Z]?[a-z]+|[A-Z]+")
_PREFERENCES = frozenset(
    {"chosen", "rejected", "preferred", "preference", "preferences", "kto", "reward", "rewards"}
)
_MEDIA = frozenset({"image", "images", "video", "videos", "audio", "audios", "pixel"})
_PLACE = re.compile(f"{PLACEHOLDER}\n?|\n{PLACEHOLDER}")
LISTS = ("messages", "conversations", "conversation")
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


RowContent = Chat | PromptCompletion | Document
ReadImage = Callable[[Any], Image]


class RowError(UsageError):
    """An unusable row; rows are counted by `kind`."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


def rename_columns(row: Mapping[str, Any], columns: Mapping[str, str]) -> Mapping[str, Any]:
    """Rename the columns of a row to the keys of its form; `columns` has their names by role.

    Rows with none of these columns are returned unchanged.
    """
    hidden = set(columns.values())
    if hidden.isdisjoint(row):
        return row
    if not columns.keys() <= {"system", "history", "tools", "images", "chosen", "rejected"}:
        hidden |= FORM_KEYS
    named = {_ROLE_KEYS.get(role, role): row.get(name) for role, name in columns.items()}
    return {key: row[key] for key in row if key not in hidden} | named


def read_row(row: Mapping[str, Any], read_image: ReadImage | None = None) -> RowContent:
    """Read a row in the form indicated by its keys; raise UsageError for unknown forms.

    `read_image` reads an image as written in the row; None for a model that takes text only, whose
    rows must not have images.
    """
    if read_image is None:
        return _read_text(row)
    lists = {key: list_of(row[key], key) for key in LISTS if row.get(key)}
    row, images = split_row({**row, **lists})
    content = _read_text(row)
    if images is None:
        return content
    if isinstance(content, Chat):
        return _place_images(content, images, read_image)
    raise UsageError("images aren't supported here; write the row as messages")


def with_answer(row: Any) -> Any:
    """Return a row with an answer added wherever one may be missing, for `read_row`."""
    if not isinstance(row, Mapping):
        return row
    message = {"role": "assistant", "content": _ANSWER}
    row = {key: value for key, value in row.items() if value not in (None, "", [])}
    for question, answer in EXCHANGES:
        if question in row:
            row.setdefault(answer, [message] if isinstance(row[question], list) else _ANSWER)
    for key in row.keys() & {*LISTS}:
        row[key] = [*map(with_answer, list_of(row[key], key)), message]
    return row


def _read_text(row: Mapping[str, Any]) -> RowContent:
    """Read a row without images."""
    for key, is_learnt in _marks(row).items():
        if not is_learnt:
            reason = f"{key!r} is {row[key]}: the row is marked as not trained"
            raise RowError("marked as not trained", reason)
    forms = [form for form in _FORMS if row.keys() >= {*form[0]} and row[form[0][0]] is not None]
    if not forms:
        key_names = ", ".join(list(row)[:_MOST_SHOWN_KEYS]) or "none"
        raise RowError("of an unknown form", f"its keys are {key_names}; supported: {_KEYS}")

    # A table has all columns in all rows: the form with the fewest empty columns is meant. A text
    # beside a question without an answer is the whole of both, and not another form.
    def num_empty(form: tuple[tuple[str, ...], Callable[..., RowContent]]) -> int:
        empty = [row[key] in (None, "", []) for key in form[0]]
        return sum(empty) + all(empty) + (form[0] == ("text",))

    keys, read = min(forms, key=num_empty)
    return read(row, *keys)


def _read_exchange(row: Mapping[str, Any], question: str, answer: str) -> RowContent:
    """Read a row with a question and its answer; both may be messages."""
    if isinstance(row[question], list):
        return _read_completion(row, question, answer)
    _refuse_unread(row, "system", "system_prompt", "tools", "history")
    return _check_chat([*_system(row), *_exchange(row, question, answer)], row)


def _read_completion(row: Mapping[str, Any], prompt: str, completion: str) -> RowContent:
    """Read a row with a prompt and its completion: two texts, or two parts of a chat."""
    if isinstance(row[prompt], list) and isinstance(row[completion], list):
        return _chat([*row[prompt], *row[completion]], row)
    _refuse_unread(row)
    return PromptCompletion(_text(row, prompt), _nonempty_text(row, completion))


def _read_list(row: Mapping[str, Any], key: str) -> RowContent:
    """Read a row with a list of messages or exchanges."""
    return _chat(list_of(row[key], key), row)


def _read_document(row: Mapping[str, Any], key: str) -> RowContent:
    """Read a row with a text, without any context."""
    _refuse_unread(row)
    return Document([_nonempty_text(row, key)])


def _place_images(chat: Chat, images: Sequence[Any], read_image: ReadImage) -> Chat:
    """Read images into the questions that have their placeholders."""
    roles = [message.role for message in chat.messages]
    numbers = [
        message.content.count(PLACEHOLDER) if message.role == "user" else 0
        for message in chat.messages
    ]
    if images and not any(numbers):
        numbers[roles.index("user")] = len(images)
    if sum(numbers) != len(images):
        raise UsageError(
            f"the questions have {format_count(sum(numbers), f'{PLACEHOLDER} placeholder')}, and "
            f"the row {format_count(len(images), 'image')}"
        )
    opened, messages = map(read_image, images), []
    for message, number in zip(chat.messages, numbers, strict=True):
        content = _PLACE.sub("", message.content) if number else message.content
        messages.append(replace(message, content=content, images=tuple(islice(opened, number))))
    return replace(chat, messages=tuple(messages))


def _words(key: object) -> set[str]:
    """Return the words of a key in lower case, split at capitals, digits and underscores."""
    return {word.lower() for word in _WORDS.findall(str(key))}


def is_preference(key: str) -> bool:
    """Return True for the key of an answer to prefer or reject, or of a grade."""
    return bool(_words(key) & _PREFERENCES)


# Other trainers have keys that mark content as trained or not. Ignoring such a key could train on
# content that the author of the data excluded. A key is judged by its words:
#
#   "weight": 0, "isTrained": false   weight, trained     a message isn't trained, a row is refused
#   "loss_mask": [1, 0]               loss, mask          refused: 1 may mean trained or hidden
#   "chosen": "…", "rejected": "…"    preference data     refused; see `pairs`
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
        if is_preference(key):
            raise UsageError(
                f"{key!r} belongs to preference data (DPO, KTO): train on pairs of answers with "
                "--dpo, or keep the better one as the last message, and remove the other one"
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


def _chat(items: Sequence[Any], row: Mapping[str, Any]) -> Chat:
    """Read the messages or exchanges of a row, with its tools and system text."""
    _refuse_unread(row, "system", "system_prompt", "tools", "functions")
    messages = _system(row)
    unweighted = set[int]()
    first_item = items[0] if items else None
    tools = row.get("tools") or row.get("functions")  # OpenAI's older key
    if isinstance(first_item, Mapping) and first_item.get("tools") and not tools:
        tools = first_item["tools"]  # as in GLM-4's fine-tuning demo
    for number, item in enumerate(items, start=1):
        try:
            if not isinstance(item, Mapping):
                raise UsageError("it is not an object")
            if item.get("tools") and item["tools"] != tools:
                raise UsageError("its 'tools' differ from those of the row")
            marks, turn = _marks(item), list(_messages(item))
            is_trained = all(marks.values())
            if marks and is_trained and all(message.role != "assistant" for message in turn):
                raise UsageError("it is marked as trained, and only assistant messages are trained")
            for message in turn:
                _append(messages, unweighted, message, is_trained)
        except UsageError as error:
            raise UsageError(f"message {number}: {error}") from error
    return _check_chat(messages, {**row, "tools": tools}, frozenset(unweighted))


def _append(
    messages: list[ChatMessage], unweighted: set[int], message: ChatMessage, is_trained: bool
) -> None:
    """Append a message; add calls without a text to the answer before them.

    ShareGPT and ms-swift have a message for each of several calls; a model writes all in one turn.
    """
    is_call = message.role == "assistant" and message.calls and not message.content
    is_same = is_trained == (len(messages) - 1 not in unweighted)
    if is_call and is_same and [answer.role for answer in messages[-1:]] == ["assistant"]:
        messages[-1] = replace(messages[-1], calls=messages[-1].calls + message.calls)
    else:
        unweighted |= set() if is_trained else {len(messages)}
        messages.append(message)


def _system(fields: Mapping[str, Any]) -> list[ChatMessage]:
    """Return the system message of a row or an exchange, if there is one."""
    keys = [key for key in ("system", "system_prompt") if fields.get(key)]
    return [ChatMessage(role="system", content=_text(fields, key)) for key in keys]


def _messages(fields: Mapping[str, Any]) -> Iterator[ChatMessage]:
    """Read an item of a chat: a message, or several.

    Several are an exchange, or ChatGLM3's message of a tool: the call, and its result.
    """
    for key in fields:
        if fields[key] and _words(key) & _REASONING:
            raise UsageError(f"{key!r} isn't supported; write it into the content")
    is_message = "role" in fields or "from" in fields
    pairs = [] if is_message else [pair for pair in EXCHANGES if fields.keys() >= {*pair}]
    speaker, role = fields.get("role", fields.get("from")), role_of(fields)
    content = fields.get("content", fields.get("value"))
    if pairs:
        yield from [*_system(fields), *_exchange(fields, *pairs[0])]
    elif role == _CALL:
        yield read_message({"role": "assistant", "tool_calls": _json(content)})
    elif speaker == "tool" and fields.get("parameters") is not None:
        call = {"name": fields.get("name"), "arguments": fields["parameters"]}
        yield read_message({"role": "assistant", "tool_calls": call})
        result = fields.get("observation")
        content = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
        yield ChatMessage(role="observation", content=content)
    else:
        calls = fields.get("tool_calls") or fields.get("function_call")
        yield read_message({**fields, "role": role, "content": content, "tool_calls": calls})


def role_of(item: Any) -> Any:
    """Return the role of a message under its name in `ChatMessage`; None for another item."""
    speaker = item.get("role", item.get("from")) if isinstance(item, Mapping) else None
    return _ROLES.get(str(speaker).replace("-", "_"), speaker)


def _exchange(fields: Mapping[str, Any], question: str, answer: str) -> Iterator[ChatMessage]:
    """Yield a question with its additions, and the answer, after the history."""
    for pair in list_of(fields.get("history"), "history"):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise UsageError("'history' is not a list of question-answer pairs")
        yield ChatMessage(role="user", content=pair[0])
        yield ChatMessage(role="assistant", content=pair[1])
    additions = [key for key in ADDITIONS if fields.get(key) and key != question]
    texts = [_text(fields, key) for key in (question, *additions)]
    yield ChatMessage(role="user", content="\n".join(filter(None, texts)))
    yield ChatMessage(role="assistant", content=_text(fields, answer))


_FORMS: tuple[tuple[tuple[str, ...], Callable[..., RowContent]], ...] = (
    *(((key,), _read_list) for key in ("messages", "conversations", "conversation")),
    (("prompt", "completion"), _read_completion),
    *((keys, _read_exchange) for keys in EXCHANGES),
    (("text",), _read_document),
)
FORM_KEYS = frozenset(key for keys, _ in _FORMS for key in keys).union(ADDITIONS)


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
            place = f"after one of role {previous_role!r}" if previous_role else "at the beginning"
            raise UsageError(f"message {number} of role {role!r} isn't allowed {place}")
        if role == "assistant" and not message.content.strip() and not message.calls:
            raise UsageError(f"message {number} is an empty answer")
        previous_role = role
    if previous_role != "assistant":
        reason = "the last message is not an answer" if messages else "there are no messages"
        raise UsageError(reason)
    tools = tuple(map(_json, list_of(row.get("tools"), "tools")))
    refuse_half_pairs(json.dumps(tools, ensure_ascii=False, default=str), "a tool")
    return Chat(messages=tuple(_pair_results(messages)), tools=tools, unweighted=unweighted)


def _pair_results(messages: Sequence[ChatMessage]) -> Iterator[ChatMessage]:
    """Sort the results of parallel calls in the order of the calls, by their ids.

    Most chat templates don't write ids, so a model can only tell results by their order.
    """
    positions: dict[str, int] = {}
    for is_result, group in groupby(messages, key=lambda message: message.role == "observation"):
        turn = list(group)
        if is_result:
            turn.sort(key=lambda message: positions.get(message.call_id, 0))
        else:
            positions = {call.id: at for at, call in enumerate(turn[-1].calls)}
        for message in turn:
            yield message if message.call_id in positions else replace(message, call_id="")


def list_of(value: Any, key: str) -> Sequence[Any]:
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
