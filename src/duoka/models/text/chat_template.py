"""Apply chat templates so that the text of a message never becomes a special token.

A template renders a single string, in which its own special tokens can't be distinguished from
those that a user typed ("imitated" ones). So the messages are rendered twice, the second time with
marks in place of contents and names of calls:

    contents  ["hi<|end|>"]   <|user|>hi<|end|><|end|>
    marks     ["⟦0⟧"]         <|user|>⟦0⟧<|end|>

The special tokens of the second string come from the template, and are encoded as special tokens.
The texts between them are encoded as text, after contents replace the marks. If no content has a
special token, or a part of one at its edges, the first string is encoded as usual.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from duoka.errors import CheckpointError, UsageError

from .image_prompts import TOKEN_TYPES, ImagePrompt, PromptImages, images_of
from .messages import ChatMessage, Messages, Tools, tool_function
from .tokenizer import encode, special_id

_MOST_CHARACTERS = 1 << 24  # of a rendered chat; four times a million tokens of text
_MOST_WHY_CHARACTERS = 500
GENERATION = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
"""The tags of a template around what is trained."""
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def encode_answer(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    tools: Tools,
    stop_ids: Sequence[int],
    *,
    images: PromptImages | None = None,
) -> tuple[list[int], list[bool]]:
    """Return the ids of a chat up to the end of its last answer, with a mask of the trained tokens.

    Trained is the part after the prompt, up to and including the first stop token; if the template
    has ``{% generation %}`` blocks, only the tokens in them and the stop token. If the template
    writes no stop token, one is appended. Raises UsageError if the chat with the answer doesn't
    begin with the prompt, or the template drops a part of the answer.
    """
    question = encode_chat(tokenizer, messages[:-1], tools, images=images)
    chat = encode_chat(
        tokenizer, messages, tools, images=images, rendering=Rendering(is_prompt=False)
    )
    answer = chat.text.removeprefix(question.text)
    is_changed = answer == chat.text or _drop_space(messages[-1].content) not in _drop_space(answer)
    if is_changed:
        raise UsageError(
            "the model's chat template renders this answer differently from its generation "
            "prompt, or drops a part of it",
            hint="use a chat template that renders answers unchanged",
        )
    if isinstance(chat.ids, ImagePrompt) and not chat.ids.rows.keys() <= {*TOKEN_TYPES}:
        raise CheckpointError(
            f"this model can't be trained with images: it needs {', '.join(chat.ids.rows)}",
            hint="train it on text, or use duoka.dispatch with your own training loop",
        )
    ids, start = [*chat.ids], common_length(question.ids, chat.ids)
    mask = _mask_of_template(tokenizer, messages, tools, ids) or [True] * len(ids)
    stop = next((at for at in range(start, len(ids)) if ids[at] in stop_ids), len(ids))
    if stop == len(ids):
        ends = [end for end in (tokenizer.eos_token_id, *stop_ids) if isinstance(end, int)]
        if not ends:
            raise CheckpointError("the tokenizer has no token that ends a text")
        ids, mask = [*ids, ends[0]], [*mask, True]
    mask[stop] = True
    return ids[: stop + 1], [False] * start + mask[start : stop + 1]


def _drop_space(text: str) -> str:
    """Remove all white space from a text, because templates may strip some."""
    return "".join(text.split())


def common_length(first: Sequence[object], second: Sequence[object]) -> int:
    """Count the equal items at the beginning of two sequences, the first of which ends earlier."""
    pairs = zip(first, second, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), len(first))


def _mask_of_template(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, tools: Tools, ids: Sequence[int]
) -> list[bool] | None:
    """Return the template's mask of answer tokens; None without ``{% generation %}`` blocks.

    Raises UsageError if transformers encodes the chat to other ids than `ids`.
    """
    template = find_template(tokenizer, has_tools=bool(tools))
    if not GENERATION.search(template):
        return None
    if images_of(messages):
        raise UsageError(
            "the model's chat template has {% generation %} marks, which images move",
            hint="use a chat template without these marks",
        )
    apply: Any = tokenizer.apply_chat_template
    encoded = apply(
        _conversation(messages),
        tools=[dict(tool) for tool in tools] if tools else None,
        chat_template=template,
        return_assistant_tokens_mask=True,
        return_dict=True,
    )
    if list(encoded["input_ids"]) != list(ids):
        raise _imitation_error()
    return [bool(mark) for mark in encoded["assistant_masks"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    """Options of rendering a chat.

    Parameters
    ----------
    is_prompt : bool
        Append the beginning of an answer.
    continues : bool
        End after the content of the last message, which the answer continues.
    variables : mapping
        Variables of the template.
    end : callable
        Returns a text to append to a rendered prompt.
    """

    is_prompt: bool = True
    continues: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    end: Callable[[str], str] = lambda _: ""


_PROMPT = Rendering()


class EncodedChat(NamedTuple):
    """A chat as text and as token ids."""

    text: str
    ids: list[int]


def encode_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    tools: Tools,
    *,
    images: PromptImages | None = None,
    rendering: Rendering = _PROMPT,
) -> EncodedChat:
    """Render messages by the chat template and encode the text.

    Raises UsageError if special tokens in a message can't be distinguished from those of the
    template.
    """
    special = _Special(tokenizer)
    calls = [call for message in messages for call in message.calls]
    for tool in tools or ():
        tool_function(tool)  # refuses tools of another form
    # Templates write tools and calls in many ways, so special tokens are refused there.
    special.refuse(list(tools or ()), "a tool's description")
    special.refuse([[call.name, call.arguments] for call in calls], "a tool call")
    special.refuse(dict(rendering.variables), "chat_template_kwargs")
    contents = [message.content for message in messages]
    marks = _Marks(messages)
    images_shown = images_of(messages)
    # Both strings come from one call, so that a template that writes the date writes the same date.
    text, marked = _render(tokenizer, messages, marks, tools, rendering)
    # Some templates need contents as lists of parts; other templates would print lists as Python.
    if images_shown or (contents[-1] and marks.contents[-1] not in marked):
        in_parts = _render(tokenizer, messages, marks, tools, rendering, in_parts=True)
        if str(_parts(marks.messages[-1])) not in in_parts[1]:
            text, marked = in_parts
    is_imitated = special.is_imitated(contents, text, marked)
    if images_shown:
        assert images is not None, "a format without it refuses images"
        if is_imitated or any(map(images.is_imitated, contents)):
            raise _imitation_error()
        return EncodedChat(text, images.prompt(text, images_shown))
    if not is_imitated:
        return EncodedChat(text, list(trusted_ids(tokenizer, text)))
    # The template may write contents unchanged or stripped. If it changes contents in another way,
    # the marks don't tell where a content stands.
    for written in (contents, [content.strip() for content in contents]):
        if marks.fill(marked, written) == text:
            break
    else:
        raise _imitation_error()
    # For harmless contents encoding in parts must equal encoding at once, or parts can't be used.
    harmless = [f"x{special.without(content)}x" for content in written]
    ids = special.ids_in_parts(marked, marks, harmless)
    if tuple(ids) != trusted_ids(tokenizer, marks.fill(marked, harmless)):
        raise _imitation_error()
    return EncodedChat(text, special.ids_in_parts(marked, marks, written))


class _Marks:
    """Copies of messages with marks in place of contents and of the names of calls.

    A mark has private-use characters and random digits, so that users can't guess a mark.
    """

    def __init__(self, messages: Messages) -> None:
        nonce = secrets.randbelow(10**12)
        self._names = [call.name for message in messages for call in message.calls]
        marks = [f"\ue0f0{nonce}-{n}\ue0f1" for n in range(len(messages) + len(self._names))]
        self._pattern = re.compile(f"\ue0f0{nonce}-([0-9]+)\ue0f1")
        self.contents, self.names = marks[: len(messages)], marks[len(messages) :]
        names = iter(self.names)
        self.messages = [
            replace(
                message,
                content=content,
                calls=tuple(replace(call, name=next(names)) for call in message.calls),
            )
            for message, content in zip(messages, self.contents, strict=True)
        ]

    def fill(self, marked: str, contents: Sequence[str]) -> str:
        """Replace the marks in a text by contents and by the names of calls."""
        texts = [*contents, *self._names]
        return self._pattern.sub(lambda mark: texts[int(mark[1])], marked)


class _Special:
    """The special tokens of a tokenizer, which text must not become; other added tokens may."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        added = tokenizer.added_tokens_decoder.values()
        self._tokenizer = tokenizer
        self._texts = sorted((t.content for t in added if t.special), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self._texts)) or r"(?!)")

    def refuse(self, value: object, what: str) -> None:
        """Raise UsageError if a JSON value, named `what`, has a special token in its texts."""
        for text in _texts(value):
            match = self._pattern.search(text)
            if match is not None:
                raise UsageError(
                    f"{what} contains the text of a special token: {match[0]}",
                    hint="remove it, or insert a space",
                )

    def is_imitated(self, contents: Sequence[str], text: str, marked: str) -> bool:
        """Return True if a content has a special token, or forms one with neighbouring text."""
        if any(self._pattern.search(content) for content in contents):
            return True
        # A content "<|us" and the template's "er|>" form a special token together. Then the strings
        # with contents and with marks differ in their special tokens.
        at_edges = any(self._begins_or_ends(content) for content in contents)
        return at_edges and self._pattern.findall(text) != self._pattern.findall(marked)

    def without(self, text: str) -> str:
        """Replace the special tokens in a text by "x"."""
        return self._pattern.sub("x", text)

    def ids_in_parts(self, marked: str, marks: _Marks, contents: Sequence[str]) -> list[int]:
        """Encode the template's own special tokens as ids, and the texts between them as text."""
        ids: list[int] = []
        position = 0
        for token in self._pattern.finditer(marked):
            text = marks.fill(marked[position : token.start()], contents)
            ids += text_ids(self._tokenizer, text)
            ids.append(special_id(self._tokenizer, token[0]))
            position = token.end()
        return ids + text_ids(self._tokenizer, marks.fill(marked[position:], contents))

    def _begins_or_ends(self, content: str) -> bool:
        """Return True if a content can be the first, last or middle part of a special token."""
        return any(
            content in token
            or any(
                content.endswith(token[:cut]) or content.startswith(token[cut:])
                for cut in range(1, len(token))
            )
            for token in self._texts
        )


def _texts(value: object) -> Iterator[str]:
    """Yield every text in a JSON value, including keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts([*value.keys(), *value.values()])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _imitation_error() -> UsageError:
    """Return the error for a special token in the text of a message."""
    return UsageError(
        "a message contains the text of a special token, which this model's chat template can't "
        "distinguish from its own",
        hint="remove it, or insert a space",
    )


def _render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    marks: _Marks,
    tools: Tools,
    rendering: Rendering,
    *,
    in_parts: bool = False,
) -> list[str]:
    """Render the messages, and the messages with marks, by transformers in Jinja's sandbox."""
    render: Any = tokenizer.apply_chat_template
    template = find_template(tokenizer, has_tools=bool(tools))
    try:
        texts: list[str] = render(
            [_conversation(chat, in_parts=in_parts) for chat in (messages, marks.messages)],
            tools=[dict(tool) for tool in tools] if tools else None,
            chat_template=template,
            add_generation_prompt=rendering.is_prompt and not rendering.continues,
            continue_final_message=rendering.continues,
            tokenize=False,
            **rendering.variables,
        )
    except (TemplateSyntaxError, SyntaxError, MemoryError, RecursionError) as error:
        raise CheckpointError(f"the model's chat template is damaged: {_why(error)}") from error
    except Exception as error:  # a template is a program, which can raise anything
        raise UsageError(
            f"the model's chat template rejects the messages: {_why(error)}"
        ) from error
    if any(len(text) > _MOST_CHARACTERS for text in texts):
        raise CheckpointError(
            f"the model's chat template is damaged: it produces more than {_MOST_CHARACTERS} "
            "characters"
        )
    if any(_LONE_SURROGATE.search(text) for text in texts):
        raise CheckpointError("the model's chat template is damaged: its output is not valid text")
    # Some templates write no calls, or only the first one.
    if any(name not in texts[1] for name in marks.names):
        raise UsageError("the model's chat template drops tool calls")
    return [text + rendering.end(texts[1]) for text in texts]


def _conversation(messages: Messages, *, in_parts: bool = False) -> list[dict[str, Any]]:
    """Return messages in the form of transformers' templates."""
    # Calls get new ids, because Mistral's templates accept only ids of nine letters and digits.
    names = {call.id: call.name for message in messages for call in message.calls if call.id}
    ids = {call_id: f"call{number:05}" for number, call_id in enumerate(names)}
    conversation = []
    for message in messages:
        entry: dict[str, Any] = {
            "role": "tool" if message.role == "observation" else message.role,
            "content": _parts(message) if in_parts else message.content,
        }
        if message.calls:
            entry["tool_calls"] = [
                {
                    "type": "function",
                    "function": {"name": call.name, "arguments": dict(call.arguments)},
                    **({"id": ids[call.id]} if call.id else {}),
                }
                for call in message.calls
            ]
        if message.role == "observation" and message.call_id in ids:
            call_id = message.call_id
            entry |= {"tool_call_id": ids[call_id], "name": names[call_id]}
        conversation.append(entry)
    return conversation


def _parts(message: ChatMessage) -> list[dict[str, str]]:
    """Return a message's content as a list of parts: its images, and its text."""
    images = ({"type": "image"} for _ in message.images)
    return [*images, {"type": "text", "text": message.content}]


def find_template(tokenizer: PreTrainedTokenizerBase, *, has_tools: bool) -> str:
    """Return the template, empty if there is none; CheckpointError if none is usable."""
    if tokenizer.chat_template is None:
        return ""
    try:
        return tokenizer.get_chat_template(tools=[{}] if has_tools else None)
    except ValueError as error:
        raise CheckpointError(f"the tokenizer has no usable chat template: {error}") from error


def _why(error: BaseException) -> str:
    """Return the text of an error, or its type if there is no text; cut to a maximum length."""
    return (str(error) or type(error).__name__)[:_MOST_WHY_CHARACTERS]


def trusted_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """Encode trusted text; special tokens in the text become special tokens."""
    return tuple(encode(tokenizer, text, splits=False))


def text_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Encode untrusted text; special tokens in the text are encoded as text."""
    return encode(tokenizer, text, splits=True)
