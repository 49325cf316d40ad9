"""Chat templates, applied so that the text of a message cannot become a special token.

A template gives one string in which its own special tokens and those that somebody typed look
alike. So it is rendered twice, the second time with marks in the place of the contents. That
tells which special tokens are the template's: only these become ids; between them everything is
encoded as text.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from duoka.errors import CheckpointError, UsageError

from .image_prompts import PromptImages, images_of
from .messages import Message, Tool, tool_function
from .tokenizer import special_id

MOST_TEMPLATE_CHARACTERS = 1 << 18  # the longest published ones have some ten thousand
_MOST_CHARACTERS = 1 << 24  # a million tokens of text are a quarter of it
_MOST_WHY_CHARACTERS = 500
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def encode_template(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Tool] | None = None,
    images: PromptImages | None = None,
) -> list[int]:
    """Return the ids of a prompt by the tokenizer's chat template."""
    special = _Special(tokenizer)
    special.refuse_in_tools(tools or ())
    contents = [message.content for message in messages]
    marks = _Marks(len(contents))
    shown = images_of(messages)
    text, marked = _render(tokenizer, messages, (contents, marks.texts), tools)
    if shown or marks.texts[-1] not in marked:  # some templates know contents in parts alone
        text, marked = _render(tokenizer, messages, (contents, marks.texts), tools, in_parts=True)
    is_imitated = special.is_imitated(contents, text, marked)
    if shown:
        assert images is not None, "a format without it refuses images"
        if is_imitated or any(map(images.is_imitated, contents)):
            raise _unsafe()
        return images.prompt(text, shown)
    if not is_imitated:
        return _ids(tokenizer, text)
    for chosen in (contents, [content.strip() for content in contents]):
        if marks.fill(marked, chosen) == text:
            break
    else:
        raise _unsafe()
    # With harmless contents the two ways must agree, or this tokenizer needs more than parts.
    harmless = [f"x{special.without(content)}x" for content in chosen]
    if special.ids_in_parts(marked, marks, harmless) != _ids(
        tokenizer, marks.fill(marked, harmless)
    ):
        raise _unsafe()
    return special.ids_in_parts(marked, marks, chosen)


class _Marks:
    """Texts that stand for contents; nobody can guess them."""

    def __init__(self, number: int) -> None:
        # Private-use characters, and digits that differ each time.
        nonce = secrets.randbelow(10**12)
        self.texts = [f"\ue0f0{nonce}-{index}\ue0f1" for index in range(number)]
        self._pattern = re.compile(f"\ue0f0{nonce}-([0-9]+)\ue0f1")

    def fill(self, marked: str, contents: Sequence[str]) -> str:
        return self._pattern.sub(lambda mark: contents[int(mark[1])], marked)


class _Special:
    """The tokens that text must not become; other added tokens are text like any other."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        added = tokenizer.added_tokens_decoder.values()
        self._tokenizer = tokenizer
        self._texts = sorted((t.content for t in added if t.special), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self._texts)) or r"(?!)")

    def refuse_in_tools(self, tools: Sequence[Tool]) -> None:
        """Raise UsageError for a special token in a tool: templates write tools in many ways."""
        for tool in tools:
            tool_function(tool)  # refuses what is none
        for text in _texts(list(tools)):
            match = self._pattern.search(text)
            if match is not None:
                raise UsageError(
                    f"a tool's description contains the text of a special token: {match[0]}",
                    hint="leave it out, or put a space into it",
                )

    def is_imitated(self, contents: Sequence[str], text: str, marked: str) -> bool:
        """Whether a content holds a special token, or makes one with what stands beside it."""
        if any(self._pattern.search(content) for content in contents):
            return True
        at_edges = any(self._begins_or_ends(content) for content in contents)
        return at_edges and self._pattern.findall(text) != self._pattern.findall(marked)

    def without(self, text: str) -> str:
        """A text with something else in the place of special tokens."""
        return self._pattern.sub("x", text)

    def ids_in_parts(self, marked: str, marks: _Marks, contents: Sequence[str]) -> list[int]:
        """Encode text between the template's own special tokens, and those tokens as ids."""
        ids: list[int] = []
        at = 0
        for token in self._pattern.finditer(marked):
            ids += _text_ids(self._tokenizer, marks.fill(marked[at : token.start()], contents))
            ids.append(special_id(self._tokenizer, token[0]))
            at = token.end()
        return ids + _text_ids(self._tokenizer, marks.fill(marked[at:], contents))

    def _begins_or_ends(self, content: str) -> bool:
        """Whether a content could be the first, the last or the middle part of a special token."""
        return any(
            content in token
            or any(
                content.endswith(token[:cut]) or content.startswith(token[cut:])
                for cut in range(1, len(token))
            )
            for token in self._texts
        )


def _texts(value: object) -> Iterator[str]:
    """Every text in a JSON value, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _unsafe() -> UsageError:
    return UsageError(
        "a message contains the text of a special token, which this model's chat template can't "
        "keep apart from its own",
        hint="leave it out, or put a space into it",
    )


def _render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    contents_of: Sequence[Sequence[str]],
    tools: Sequence[Tool] | None,
    *,
    in_parts: bool = False,
) -> list[str]:
    """Render in Jinja's sandbox, as transformers does, once for each list of contents."""
    if any(message.tool_call is not None for message in messages):
        raise UsageError("how this model writes its tool calls is not known")
    conversations = [
        [
            {
                "role": "tool" if message.role == "observation" else message.role,
                "content": _parts(message, content) if in_parts else content,
            }
            for message, content in zip(messages, contents, strict=True)
        ]
        for contents in contents_of
    ]
    render: Any = tokenizer.apply_chat_template
    template = _template(tokenizer, has_tools=bool(tools))
    try:
        texts: list[str] = render(
            conversations,
            tools=[dict(tool) for tool in tools] if tools else None,
            chat_template=template,
            add_generation_prompt=True,
            tokenize=False,
        )
    except (TemplateSyntaxError, SyntaxError, MemoryError, RecursionError) as error:
        raise CheckpointError(f"the model's chat template is damaged: {_why(error)}") from error
    except Exception as error:  # a program of the checkpoint's: it can raise anything
        raise UsageError(
            f"the model's chat template refuses the messages: {_why(error)}"
        ) from error
    if any(len(text) > _MOST_CHARACTERS for text in texts):
        raise CheckpointError(
            "the model's chat template is damaged: it gives more than "
            f"{_MOST_CHARACTERS} characters"
        )
    if any(_LONE_SURROGATE.search(text) for text in texts):
        raise CheckpointError("the model's chat template is damaged: it is no valid text")
    return texts


def _parts(message: Message, content: str) -> list[dict[str, str]]:
    """A message's images and its text as templates for images take them."""
    return [*({"type": "image"} for _ in message.images), {"type": "text", "text": content}]


def _template(tokenizer: PreTrainedTokenizerBase, *, has_tools: bool) -> str:
    try:
        template = tokenizer.get_chat_template(tools=[{}] if has_tools else None)
    except ValueError as error:
        raise CheckpointError(f"the tokenizer has no usable chat template: {error}") from error
    if len(template) > MOST_TEMPLATE_CHARACTERS:
        raise CheckpointError(
            f"the model's chat template has {len(template)} characters; "
            f"at most {MOST_TEMPLATE_CHARACTERS} are read"
        )
    return template


def _why(error: BaseException) -> str:
    return (str(error) or type(error).__name__)[:_MOST_WHY_CHARACTERS]


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=False)
    return ids


def _text_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    return ids
