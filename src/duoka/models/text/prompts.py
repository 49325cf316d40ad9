"""Encode the messages of a chat as prompts of token ids.

In ChatGLM3 and GLM-4 roles are special tokens, which this code inserts; the texts of users and
tools are encoded as plain text. So a message with ``<|user|>`` in its text can't change the role.
ChatGLM2 has no tokens for roles: its rounds are text, and a message can imitate them. All other
models have a chat template; see `chat_template`.

    ChatGLM2   [gMASK] sop "[Round 1]⏎⏎问：hi⏎⏎答："
    ChatGLM3   [gMASK] sop <|user|> "⏎" "hi" <|assistant|>
    GLM-4      [gMASK] <sop> <|user|> "⏎" "hi" <|assistant|>
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from transformers import PreTrainedTokenizerBase

from duoka.base.prompt_settings import PromptSettings
from duoka.errors import CheckpointError, UsageError

from .answer_format import AnswerFormat
from .call_forms import LineForm
from .chat_template import Rendering, encode_answer, encode_chat, text_ids
from .image_prompts import ImageFormat, ImagePrompt, PromptImages, SquareImages, images_of
from .messages import (
    ChatMessage,
    Messages,
    Role,
    Tool,
    ToolCall,
    Tools,
    last_is_answerable,
    tool_function,
    write_json_call,
    write_python_call,
)
from .reasoning import ReasoningSwitch
from .tokenizer import encode, special_id

_DEFAULTS = PromptSettings()


class TrainingSample(NamedTuple):
    """Token ids, and a mask of the trained tokens."""

    ids: list[int]
    is_trained: list[bool]


class ChatFormat(ABC):
    """The chat format of a model: encodes prompts and training samples.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerBase
    images : ImageFormat, optional
        Image processor; None if images aren't supported.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, images: ImageFormat | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.images = images

    @property
    @abstractmethod
    def stop_ids(self) -> tuple[int, ...]:
        """The ids of tokens at the end of an answer."""

    def content_start(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """Return the ids between a prompt and the content of its answer."""
        return self.reasoning.end_ids(prompt)

    @cached_property
    def answers(self) -> AnswerFormat:
        """The form of the answers: content, reasoning and calls."""
        return AnswerFormat(self.tokenizer, None, None)

    @cached_property
    def reasoning(self) -> ReasoningSwitch:
        """The switch of the model's reasoning."""
        return ReasoningSwitch(self.tokenizer, self.answers.reasoning)

    def prompt(
        self, messages: Messages, tools: Tools = None, settings: PromptSettings = _DEFAULTS
    ) -> list[int]:
        """Return the ids of a prompt; if messages have images, an `ImagePrompt`."""
        takes_images = self.images is not None
        last_is_answerable(messages, takes_images=takes_images, continues=settings.continues)
        rendering = self.reasoning.rendering(settings, has_tools=bool(tools))
        return self._encode(messages, tools, rendering)

    @abstractmethod
    def _encode(self, messages: Messages, tools: Tools, rendering: Rendering) -> list[int]:
        """Encode a prompt that has been checked; see `prompt`."""

    @abstractmethod
    def sample(self, messages: Messages, tools: Tools, next_role: Role) -> TrainingSample:
        """Return the training sample of a chat whose last message is the answer to train.

        The last id ends the answer; in some formats it is `next_role`, which begins the next
        message.
        """


def chat_format(
    tokenizer: PreTrainedTokenizerBase,
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any] | None = None,
    directory: Path | None = None,
) -> ChatFormat:
    """Choose the chat format by the model type and the special tokens of the tokenizer.

    Prompts can have images only if the checkpoint's `directory` is given, from which the image
    processor is loaded.
    """
    added = tokenizer.get_added_vocab()
    if config.get("model_type") == "chatglm":
        if "<|user|>" in added and "<sop>" in added:
            if directory is None or "vision_config" not in config:
                return GLM4Format(tokenizer)
            return GLM4Format(tokenizer, SquareImages(config, directory))
        if "<|user|>" in added and "sop" in added:
            return ChatGLM3Format(tokenizer)
        if "sop" in added:
            return ChatGLM2Format(tokenizer)
        raise CheckpointError("the tokenizer has no special tokens of the ChatGLM family")
    stop_ids = [*_end_ids(generation_config or {}), *_end_ids(config)]
    if isinstance(tokenizer.eos_token_id, int):
        stop_ids.append(tokenizer.eos_token_id)
    images = PromptImages.find(directory, tokenizer, str(config.get("model_type")))
    return TemplateFormat(tokenizer, tuple(dict.fromkeys(stop_ids)), images)


def _end_ids(config: Mapping[str, Any]) -> list[int]:
    """Return the ids under ``eos_token_id``, a number or a list."""
    ids = config.get("eos_token_id")
    listed = ids if isinstance(ids, list) else [ids]
    return [number for number in listed if isinstance(number, int)]


class _RoleFormat(ChatFormat):
    """The common format of ChatGLM3 and GLM-4: a token for each role, then a line of metadata."""

    _start: ClassVar[tuple[str, str]]
    _form: ClassVar[LineForm]
    # Writes a call as the content of a message.
    _write_call: Callable[[ToolCall], str]
    images: SquareImages | None

    @property
    @abstractmethod
    def _end(self) -> str:
        """The end-of-text token."""

    @abstractmethod
    def _describe_tools(self, leading: str, tools: Sequence[Tool]) -> str:
        """Write the content of the system message with tools, after the leading text."""

    @cached_property
    def answers(self) -> AnswerFormat:
        """See `ChatFormat`."""
        return AnswerFormat(self.tokenizer, self._form, None)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The end of text, and the roles of user and tools at the beginning of the next message."""
        names = (self._end, "<|user|>", "<|observation|>")
        return tuple(special_id(self.tokenizer, name) for name in names)

    def content_start(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """Return the empty line of metadata of an answer without a call."""
        return tuple(text_ids(self.tokenizer, "\n"))

    def _encode(self, messages: Messages, tools: Tools, rendering: Rendering) -> list[int]:
        """See `ChatFormat`."""
        ids = self.written(messages, tools)
        if not rendering.continues:
            ids.append(special_id(self.tokenizer, "<|assistant|>"))
        images = images_of(messages)
        if self.images is None or not images:
            return ids
        return ImagePrompt(ids, len(images), self.images.pictures(images))

    def written(self, messages: Messages, tools: Tools = None) -> list[int]:
        """Return the ids of messages, without the role of the following answer."""
        ids = [special_id(self.tokenizer, name) for name in self._start]
        for message in self._with_tools(messages, tools or ()):
            ids.append(special_id(self.tokenizer, f"<|{message.role}|>"))
            ids += text_ids(self.tokenizer, message.metadata + "\n")
            ids += self.images.ids * len(message.images) if self.images else []
            ids += text_ids(self.tokenizer, message.content)
        return ids

    def sample(self, messages: Messages, tools: Tools, next_role: Role) -> TrainingSample:
        """See `ChatFormat`. The role of the next message ends the answer, as in `stop_ids`."""
        context = len(self.written(messages[:-1], tools)) + 1
        stop = special_id(self.tokenizer, f"<|{next_role}|>")
        ids = [*self.written(messages, tools), stop]
        return TrainingSample(ids, [False] * context + [True] * (len(ids) - context))

    def _with_tools(self, messages: Messages, tools: Sequence[Tool]) -> list[ChatMessage]:
        """Convert calls to messages as the model writes them, and tools to a system message."""
        # A message with a text and two calls becomes three messages of the assistant: the text,
        # and a message with the tool's name as metadata for each call.
        chat: list[ChatMessage] = []
        for message in messages:
            if message.content or not message.calls:
                chat.append(replace(message, calls=()))
            for call in message.calls:
                content = self._write_call(call)
                chat.append(ChatMessage(role="assistant", metadata=call.name, content=content))
        if not tools:
            return chat
        leading = chat.pop(0).content if chat[0].role == "system" else ""
        return [ChatMessage(role="system", content=self._describe_tools(leading, tools)), *chat]


class ChatGLM3Format(_RoleFormat):
    """The chat format of ChatGLM3, with calls in Python."""

    _start = ("[gMASK]", "sop")
    _form = LineForm("python")
    _write_call = staticmethod(write_python_call)

    @property
    def _end(self) -> str:
        return str(self.tokenizer.eos_token)

    def _describe_tools(self, leading: str, tools: Sequence[Tool]) -> str:
        return f"{leading}\n{_json([tool_function(tool) for tool in tools])}"


class GLM4Format(_RoleFormat):
    """The chat format of GLM-4, with calls in JSON, and of GLM-4V.

    GLM-4V has the image tokens of a message before its text.
    """

    _start = ("[gMASK]", "<sop>")
    _form = LineForm("json")
    _end = "<|endoftext|>"
    _write_call = staticmethod(write_json_call)

    def _describe_tools(self, leading: str, tools: Sequence[Tool]) -> str:
        # These headings are part of the published format; the model was trained on them.
        parts = [leading, "# 可用工具"] if leading else ["# 可用工具"]
        for function in map(tool_function, tools):
            parts += [
                f"## {function['name']}",
                f"{_json(function)}\n在调用上述函数时，请使用 Json 格式表示调用的参数。",
            ]
        return "\n\n".join(parts)


def _json(value: object) -> str:
    """Write a description of tools as JSON; raise UsageError if impossible."""
    try:
        return json.dumps(value, ensure_ascii=False, indent=4)
    except (TypeError, ValueError) as error:
        raise UsageError(f"a tool's description is not JSON: {error}") from error


class ChatGLM2Format(ChatFormat):
    """The chat format of ChatGLM2: numbered rounds of question and answer, all as text."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The end-of-text token."""
        end = self.tokenizer.eos_token_id
        return (end,) if isinstance(end, int) else ()

    def _encode(self, messages: Messages, tools: Tools, rendering: Rendering) -> list[int]:
        """See `ChatFormat`. The system message comes before the first round."""
        if rendering.continues:
            question = self.written(messages[:-1], tools, "\n\n答：")
            return [*question, *text_ids(self.tokenizer, messages[-1].content)]
        return self.written(messages, tools, "\n\n答：")

    def written(self, messages: Messages, tools: Tools = None, end: str = "") -> list[int]:
        """Return the ids of messages; `end` is appended after a question, to begin its answer."""
        if tools or any(message.calls for message in messages):
            raise UsageError("ChatGLM2 doesn't support tool calls")
        text, questions, last_role = "", 0, ""
        for message in messages:
            if message.role == "system" and not questions:
                text += f"{message.content}\n\n"
            elif message.role == "user":
                questions += 1
                text += "\n\n答：" if last_role == "user" else ""
                text += f"[Round {questions}]\n\n问：{message.content}"
            elif message.role == "assistant" and last_role == "user":
                text += f"\n\n答：{message.content}\n\n"
            else:
                raise UsageError(
                    f"ChatGLM2 doesn't support a message of role {message.role!r} here",
                    hint="use an optional system message, then alternating user and assistant "
                    "messages",
                )
            last_role = message.role
        prefix = [special_id(self.tokenizer, name) for name in ("[gMASK]", "sop")]
        return [*prefix, *text_ids(self.tokenizer, text + (end if last_role == "user" else ""))]

    def sample(self, messages: Messages, tools: Tools, next_role: Role) -> TrainingSample:
        """See `ChatFormat`. The answer is encoded separately, and ends with the end of text."""
        self.written(messages, tools)  # refuses answers without a question
        context = self.prompt(messages[:-1], tools)
        answer = [*text_ids(self.tokenizer, messages[-1].content), *self.stop_ids]
        return TrainingSample([*context, *answer], [False] * len(context) + [True] * len(answer))


class TemplateFormat(ChatFormat):
    """The chat format of other models: the tokenizer's chat template, if any, or plain text."""

    images: PromptImages | None
    stop_ids: tuple[int, ...] = ()

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: tuple[int, ...],
        images: PromptImages | None = None,
    ) -> None:
        super().__init__(tokenizer, images)
        self.stop_ids = stop_ids

    @cached_property
    def answers(self) -> AnswerFormat:
        """See `ChatFormat`."""
        return AnswerFormat.of_template(self.tokenizer)

    def _encode(self, messages: Messages, tools: Tools, rendering: Rendering) -> list[int]:
        """See `ChatFormat`. Without a template the texts of messages are joined by newlines."""
        if self.tokenizer.chat_template is not None:
            return encode_chat(
                self.tokenizer, messages, tools, images=self.images, rendering=rendering
            ).ids
        if images_of(messages):
            raise UsageError("this model has no chat template, so images aren't supported")
        if tools:
            raise UsageError("this model has no chat template, so tools aren't supported")
        text = "\n".join(message.content for message in messages)
        return encode(self.tokenizer, text, splits=True, adds=True)

    def sample(self, messages: Messages, tools: Tools, next_role: Role) -> TrainingSample:
        """See `ChatFormat`, and `encode_answer`."""
        if self.tokenizer.chat_template is None:
            raise CheckpointError(
                "this model has no chat template, so it can't be trained on chats",
                hint="train it on texts, or on prompts and completions; or use its chat model",
            )
        answer = encode_answer(self.tokenizer, messages, tools, self.stop_ids, images=self.images)
        return TrainingSample(*answer)


def has_template(chat: ChatFormat) -> bool:
    """Return True if a format writes the roles of messages, instead of only joining texts."""
    return not isinstance(chat, TemplateFormat) or chat.tokenizer.chat_template is not None


def why_no_system_message(chat: ChatFormat, system: str) -> str:
    """Return the reason why a model can't get a system message; empty if there is no reason."""
    question = ChatMessage(role="user", content="?")
    try:
        is_left_out = chat.prompt([ChatMessage(role="system", content=system), question]) == (
            chat.prompt([question])
        )
    except UsageError as error:
        return str(error)
    return "its chat template ignores it" if is_left_out else ""
