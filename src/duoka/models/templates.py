"""Chat templates, applied so that the text of a message cannot become a special token.

A template gives one string in which its own special tokens and those that somebody typed look
alike. Where a message contains the text of a special token, the template is rendered a second
time with marks in the place of the contents. That tells which special tokens are the template's:
only these become ids; between them everything is encoded as text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from duoka.errors import UsageError

from .messages import Message, Tool
from .tokenization import special_id

# Private-use characters; a message that contains them is refused if it must be marked.
_MARK = re.compile("\ue0f0([0-9]+)\ue0f1")


def encode_template(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Tool] | None = None,
) -> list[int]:
    """Return the ids of a prompt by the tokenizer's chat template.

    Raises
    ------
    UsageError
        If the template refuses the messages, or if a message contains a special token's text
        and the template changes contents, so that it can't be told apart.
    """
    contents = [message.content for message in messages]
    text = _render(tokenizer, messages, contents, tools)
    special = _special_pattern(tokenizer)
    if special is None or not any(special.search(content) for content in contents):
        return _ids(tokenizer, text)
    return _encode_marked(tokenizer, messages, tools, special)


def _encode_marked(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Tool] | None,
    special: re.Pattern[str],
) -> list[int]:
    contents = [message.content for message in messages]
    if any("\ue0f0" in content or "\ue0f1" in content for content in contents):
        raise UsageError("a message contains the private-use characters U+E0F0 or U+E0F1")
    marks = [f"\ue0f0{index}\ue0f1" for index in range(len(contents))]
    marked = _render(tokenizer, messages, marks, tools)
    text = _render(tokenizer, messages, contents, tools)
    for chosen in (contents, [content.strip() for content in contents]):
        if _fill(marked, chosen) == text:
            break
    else:
        raise _unsafe()
    # With harmless contents the two ways must agree, or this tokenizer needs more than parts.
    harmless = [special.sub("x", content) for content in chosen]
    if _in_parts(tokenizer, marked, harmless, special) != _ids(tokenizer, _fill(marked, harmless)):
        raise _unsafe()
    return _in_parts(tokenizer, marked, chosen, special)


def _unsafe() -> UsageError:
    return UsageError(
        "a message contains the text of a special token, which this model's chat template can't "
        "keep apart from its own",
        hint="leave it out, or put a space into it",
    )


def _render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    contents: Sequence[str],
    tools: Sequence[Tool] | None,
) -> str:
    conversation = [
        {"role": "tool" if message.role == "observation" else message.role, "content": content}
        for message, content in zip(messages, contents, strict=True)
    ]
    options: dict[str, Any] = {"tools": [dict(tool) for tool in tools]} if tools else {}
    try:
        rendered = tokenizer.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=True, **options
        )
    except Exception as error:
        raise UsageError(f"the model's chat template refuses the messages: {error}") from error
    return str(rendered)


def _fill(marked: str, contents: Sequence[str]) -> str:
    return _MARK.sub(lambda mark: contents[int(mark[1])], marked)


def _in_parts(
    tokenizer: PreTrainedTokenizerBase,
    marked: str,
    contents: Sequence[str],
    special: re.Pattern[str],
) -> list[int]:
    """Encode text between the template's own special tokens, and those tokens as ids."""
    ids: list[int] = []
    at = 0
    for token in special.finditer(marked):
        ids += _text_ids(tokenizer, _fill(marked[at : token.start()], contents))
        ids.append(special_id(tokenizer, token[0]))
        at = token.end()
    return ids + _text_ids(tokenizer, _fill(marked[at:], contents))


def _special_pattern(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str] | None:
    """Match the tokens that text must not become; other added tokens are text like any other."""
    added = tokenizer.added_tokens_decoder.values()
    tokens = sorted((token.content for token in added if token.special), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, tokens))) if tokens else None


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=False)
    return ids


def _text_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    return ids
