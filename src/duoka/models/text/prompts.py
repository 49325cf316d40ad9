"""From messages to token ids and from an answer back to a message.

Roles are ids put in by this code; what people and tools say is encoded as plain text. So nobody
can change the speaker by writing ``<|user|>`` into a message. ChatGLM2 has no ids for roles: its
rounds are text, and text can imitate them.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from transformers import PreTrainedTokenizerBase

from duoka.errors import CheckpointError, UsageError

from .answer_format import AnswerFormat
from .call_forms import LineForm
from .chat_template import encode_answer, encode_template
from .image_prompts import ImageFormat, ImagePrompt, PromptImages, SquareImages, images_of
from .messages import (
    ChatMessage,
    Role,
    Tool,
    ToolCall,
    last_is_answerable,
    tool_function,
    write_json_call,
    write_python_call,
)
from .tokenizer import special_id


class TrainingSample(NamedTuple):
    """What a model is trained on: token ids, and which of them it is to learn to say."""

    ids: list[int]
    is_trained: list[bool]


class ChatFormat(Protocol):
    """How one model is talked to."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of what is said."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer."""

    @property
    def content_start(self) -> tuple[int, ...]:
        """What the model says before an answer's content, where that isn't the content's."""

    @property
    def answers(self) -> AnswerFormat:
        """How reasoning and calls are told apart from what an answer says."""

    @property
    def images(self) -> ImageFormat | None:
        """How images are read; None where the model takes none."""

    def prompt(
        self, messages: Sequence[ChatMessage], tools: Sequence[Tool] | None = None
    ) -> list[int]:
        """Return the ids after which the model answers; with images an `ImagePrompt`."""

    def sample(
        self, messages: Sequence[ChatMessage], tools: Sequence[Tool] | None, next_role: Role
    ) -> TrainingSample:
        """Return the ids of messages of which the last one is an answer that is to be trained.

        They end in the token that ends the answer, which with some models is the role that speaks
        next.
        """


def chat_format(
    tokenizer: PreTrainedTokenizerBase,
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any] | None = None,
    directory: Path | None = None,
) -> ChatFormat:
    """Choose the format by the model's type and the special tokens that its tokenizer has.

    With the checkpoint's directory, whose files say how images are read, prompts can have some.
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
        raise CheckpointError("the tokenizer has none of the ChatGLM family's special tokens")
    stop_ids = [*_end_ids(generation_config or {}), *_end_ids(config)]
    if isinstance(tokenizer.eos_token_id, int):
        stop_ids.append(tokenizer.eos_token_id)
    model_type = str(config.get("model_type"))
    images = PromptImages.find(directory, tokenizer, model_type)
    return TemplateFormat(tokenizer, stop_ids=tuple(dict.fromkeys(stop_ids)), images=images)


def _end_ids(config: Mapping[str, Any]) -> list[int]:
    ids = config.get("eos_token_id")
    listed = ids if isinstance(ids, list) else [ids]
    return [number for number in listed if isinstance(number, int)]


@dataclass(frozen=True)
class _TokenFormat:
    """What ChatGLM3 and GLM-4 share: a token for each role, metadata to the end of its line."""

    tokenizer: PreTrainedTokenizerBase
    start: tuple[str, str]
    stops: tuple[str, ...]
    write: Callable[[ToolCall], str] = field(repr=False)
    describe: Callable[[str, Sequence[Tool]], str] = field(repr=False)
    form: LineForm
    images: SquareImages | None = None

    @cached_property
    def answers(self) -> AnswerFormat:
        """See `ChatFormat.answers`."""
        return AnswerFormat(self.tokenizer, self.form, None)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The end of text, and the roles that only others have."""
        return tuple(special_id(self.tokenizer, name) for name in self.stops)

    @property
    def content_start(self) -> tuple[int, ...]:
        """The line of metadata, which is empty where no tool is called."""
        return tuple(_encode(self.tokenizer, "\n"))

    def prompt(
        self, messages: Sequence[ChatMessage], tools: Sequence[Tool] | None = None
    ) -> list[int]:
        """See `ChatFormat.prompt`."""
        last_is_answerable(messages, takes_images=self.images is not None)
        ids = [*self.written(messages, tools), special_id(self.tokenizer, "<|assistant|>")]
        images = images_of(messages)
        if self.images is None or not images:
            return ids
        return ImagePrompt(ids, len(images), self.images.pictures(images))

    def written(
        self, messages: Sequence[ChatMessage], tools: Sequence[Tool] | None = None
    ) -> list[int]:
        """Return the ids of what was said, without what makes the model answer."""
        ids = [special_id(self.tokenizer, name) for name in self.start]
        for message in self._with_tools(messages, tools or ()):
            ids.append(special_id(self.tokenizer, f"<|{message.role}|>"))
            ids += _encode(self.tokenizer, message.metadata + "\n")
            ids += self.images.ids * len(message.images) if self.images else []
            ids += _encode(self.tokenizer, message.content)
        return ids

    def sample(
        self, messages: Sequence[ChatMessage], tools: Sequence[Tool] | None, next_role: Role
    ) -> TrainingSample:
        """See `ChatFormat.sample`. The roles that end an answer are those that `stops` has."""
        context = len(self.written(messages[:-1], tools)) + 1
        stop = special_id(self.tokenizer, f"<|{next_role}|>")
        ids = [*self.written(messages, tools), stop]
        return TrainingSample(ids, [False] * context + [True] * (len(ids) - context))

    def _with_tools(
        self, messages: Sequence[ChatMessage], tools: Sequence[Tool]
    ) -> list[ChatMessage]:
        """Write calls as the model writes them, and tools into the system's message."""
        said: list[ChatMessage] = []
        for message in messages:
            if message.tool_call is None or message.content:
                said.append(replace(message, tool_call=None, further_calls=()))
            for call in message.calls:
                written = self.write(call)
                said.append(ChatMessage(role="assistant", metadata=call.name, content=written))
        if not tools:
            return said
        leading = said.pop(0).content if said[0].role == "system" else ""
        return [ChatMessage(role="system", content=self.describe(leading, tools)), *said]


class ChatGLM3Format(_TokenFormat):
    """ChatGLM3: ``[gMASK]sop``, role tokens; a tool is called in a line of Python."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(
            tokenizer=tokenizer,
            start=("[gMASK]", "sop"),
            stops=(str(tokenizer.eos_token), "<|user|>", "<|observation|>"),
            write=write_python_call,
            describe=_chatglm3_tools,
            form=LineForm("python"),
        )


class GLM4Format(_TokenFormat):
    """GLM-4: ``[gMASK]<sop>``, role tokens; a tool's arguments are JSON.

    GLM-4V has the tokens of a message's images before its text.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, images: SquareImages | None = None
    ) -> None:
        super().__init__(
            tokenizer=tokenizer,
            start=("[gMASK]", "<sop>"),
            stops=("<|endoftext|>", "<|user|>", "<|observation|>"),
            write=write_json_call,
            describe=_glm4_tools,
            form=LineForm("json"),
            images=images,
        )


def _chatglm3_tools(leading: str, tools: Sequence[Tool]) -> str:
    return f"{leading}\n{_json([tool_function(tool) for tool in tools])}"


def _glm4_tools(leading: str, tools: Sequence[Tool]) -> str:
    # These headings are part of the published format; the model was trained on them.
    parts = [leading, "# 可用工具"] if leading else ["# 可用工具"]
    for function in map(tool_function, tools):
        parts += [
            f"## {function['name']}",
            f"{_json(function)}\n在调用上述函数时，请使用 Json 格式表示调用的参数。",
        ]
    return "\n\n".join(parts)


def _json(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, indent=4)
    except (TypeError, ValueError) as error:
        raise UsageError(f"a tool's description is no JSON: {error}") from error


@dataclass(frozen=True)
class ChatGLM2Format:
    """ChatGLM2: numbered rounds of question and answer, all text."""

    tokenizer: PreTrainedTokenizerBase
    images: None = None
    content_start: tuple[int, ...] = ()

    @cached_property
    def answers(self) -> AnswerFormat:
        """See `ChatFormat.answers`."""
        return AnswerFormat(self.tokenizer, None, None)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The end of text."""
        end = self.tokenizer.eos_token_id
        return (end,) if isinstance(end, int) else ()

    def prompt(
        self, messages: Sequence[ChatMessage], tools: Sequence[Tool] | None = None
    ) -> list[int]:
        """See `ChatFormat.prompt`. A system's message stands before the first round."""
        last_is_answerable(messages)
        return self._ids(messages, tools, "\n\n答：")

    def written(
        self, messages: Sequence[ChatMessage], tools: Sequence[Tool] | None = None
    ) -> list[int]:
        """Return the ids of what was said, without what makes the model answer."""
        return self._ids(messages, tools, "")

    def _ids(
        self, messages: Sequence[ChatMessage], tools: Sequence[Tool] | None, end: str
    ) -> list[int]:
        if tools:
            raise UsageError("ChatGLM2 was not trained to call tools")
        text, questions, before = "", 0, ""
        for message in messages:
            if message.role == "system" and not questions:
                text += f"{message.content}\n\n"
            elif message.role == "user":
                questions += 1
                text += "\n\n答：" if before == "user" else ""
                text += f"[Round {questions}]\n\n问：{message.content}"
            elif message.role == "assistant" and before == "user":
                text += f"\n\n答：{message.content}\n\n"
            else:
                raise UsageError(
                    f"ChatGLM2 has no place for a message of role {message.role!r} here",
                    hint="a system message may come first, then questions and answers in turn",
                )
            before = message.role
        prefix = [special_id(self.tokenizer, name) for name in ("[gMASK]", "sop")]
        return [*prefix, *_encode(self.tokenizer, text + (end if before == "user" else ""))]

    def sample(
        self, messages: Sequence[ChatMessage], tools: Sequence[Tool] | None, next_role: Role
    ) -> TrainingSample:
        """See `ChatFormat.sample`. An answer is encoded by itself, and the end of text ends it."""
        self.written(messages, tools)  # refuses answers that no question is before
        context = self.prompt(messages[:-1], tools)
        answer = [*_encode(self.tokenizer, messages[-1].content), *self.stop_ids]
        return TrainingSample([*context, *answer], [False] * len(context) + [True] * len(answer))


def has_template(chat: ChatFormat) -> bool:
    """Whether a format writes a chat, and not texts one after another."""
    return not isinstance(chat, TemplateFormat) or chat.tokenizer.chat_template is not None


def why_untold(chat: ChatFormat, system: str) -> str:
    """Why a model can't be told a system's message; empty where it can."""
    question = ChatMessage(role="user", content="?")
    try:
        is_left_out = chat.prompt([ChatMessage(role="system", content=system), question]) == (
            chat.prompt([question])
        )
    except UsageError as error:
        return str(error)
    return "its chat template leaves it out" if is_left_out else ""


@dataclass(frozen=True)
class TemplateFormat:
    """Any other model: the chat template that comes with its tokenizer, or else plain text."""

    tokenizer: PreTrainedTokenizerBase
    stop_ids: tuple[int, ...]
    images: PromptImages | None = None
    content_start: tuple[int, ...] = ()
    # Whether text may become special tokens is a state of the tokenizer, and differs by call.
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    @cached_property
    def answers(self) -> AnswerFormat:
        """See `ChatFormat.answers`."""
        return AnswerFormat.of_template(self.tokenizer)

    def prompt(
        self, messages: Sequence[ChatMessage], tools: Sequence[Tool] | None = None
    ) -> list[int]:
        """See `ChatFormat.prompt`. Without a template the messages' texts follow one another."""
        last_is_answerable(messages, takes_images=self.images is not None)
        if self.tokenizer.chat_template is not None:
            with self._lock:
                return encode_template(self.tokenizer, messages, tools, self.images)
        if images_of(messages):
            raise UsageError("this model has no chat template, so no images can be shown to it")
        if tools:
            raise UsageError("this model has no chat template, so no tools can be offered")
        text = "\n".join(message.content for message in messages)
        with self._lock:
            return _encode(self.tokenizer, text, add_special_tokens=True)

    def sample(
        self, messages: Sequence[ChatMessage], tools: Sequence[Tool] | None, next_role: Role
    ) -> TrainingSample:
        """See `ChatFormat.sample`, and `encode_answer`."""
        if self.tokenizer.chat_template is None:
            raise CheckpointError(
                "this model has no chat template, so it can't be trained on chats",
                hint="train it on texts, or on prompts and completions; or take its chat model",
            )
        with self._lock:
            return TrainingSample(*encode_answer(self.tokenizer, messages, tools, self.stop_ids))


def _encode(
    tokenizer: PreTrainedTokenizerBase, text: str, *, add_special_tokens: bool = False
) -> list[int]:
    """Encode foreign text: what looks like a special token is text."""
    ids: list[int] = tokenizer.encode(
        text, add_special_tokens=add_special_tokens, split_special_tokens=True
    )
    return ids
