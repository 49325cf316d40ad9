"""A tokenizer of the ChatGLM family with `apply_chat_template`, for scripts.

These models are published without a template: their own code inserts the ids of roles between
texts. This tokenizer does the same with the formats of `prompts`, so roles typed by users are
encoded as text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import BatchEncoding, PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import get_json_schema

from duoka.errors import UsageError

from .messages import Tool, read_message
from .prompts import ChatGLM2Format, ChatGLM3Format, GLM4Format, chat_format

Chat = Sequence[Mapping[str, Any]]
Described = Mapping[str, Any] | Callable[..., Any]
_OPTIONS = frozenset({"padding", "truncation", "max_length", "return_tensors"})


class ChatGLMTokenizer(PreTrainedTokenizerFast):
    """transformers' fast tokenizer with the family's own chat formats."""

    def apply_chat_template(  # type: ignore[override]  # fewer positional arguments
        self,
        conversation: Chat | Sequence[Chat],
        tools: Sequence[Described] | None = None,
        *,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = True,
        **options: Any,
    ) -> Any:
        """Encode a chat or several; arguments and results are those of transformers.

        The options are `padding`, `truncation`, `max_length` and `return_tensors`.

        Raises
        ------
        UsageError
            If a message is invalid, or an argument is not supported for these models.
        """
        if refused := sorted(name for name in options.keys() - _OPTIONS if options[name]):
            raise UsageError(
                f"apply_chat_template doesn't support {', '.join(refused)} for a ChatGLM model",
                hint="omit these arguments: ChatGLM has a fixed chat format",
            )
        is_alone = not conversation or isinstance(conversation[0], Mapping)
        chats: Any = [conversation] if is_alone else conversation
        rows = [self._chat_ids(chat, tools, add_generation_prompt) for chat in chats]
        if options.get("truncation"):
            rows = [row[: options.get("max_length")] for row in rows]
        if not tokenize:
            texts = [self.decode(row) for row in rows]
            return texts[0] if is_alone else texts
        tensors = options.get("return_tensors")
        ids: Any = rows[0] if is_alone and tensors is None else rows
        encoded: BatchEncoding = self.pad(
            {"input_ids": ids},
            padding=options.get("padding", False),
            max_length=options.get("max_length"),
            return_tensors=tensors,
        )
        return encoded if return_dict else encoded["input_ids"]

    def _chat_ids(self, chat: Chat, tools: Sequence[Described] | None, is_open: bool) -> list[int]:
        """Encode a chat; `is_open` adds the beginning of an answer."""
        form = chat_format(self, {"model_type": "chatglm"})
        assert isinstance(form, ChatGLM2Format | ChatGLM3Format | GLM4Format)
        messages = [read_message(message) for message in chat]
        described: list[Tool] = [
            tool if isinstance(tool, Mapping) else get_json_schema(tool) for tool in tools or ()
        ]
        if is_open:
            return form.prompt(messages, described or None)
        return form.written(messages, described or None)
