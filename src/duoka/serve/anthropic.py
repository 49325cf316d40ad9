"""``POST /v1/messages`` and ``/v1/messages/count_tokens``: Anthropic's Messages API.

Source: https://docs.anthropic.com/en/api/messages, and the types of its official Python client.
Fields for server-side tools and stored state are refused with their names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import AfterValidator, Field

from duoka.base.prompt_settings import PromptSettings

from .errors import NO_THREADS, HttpError
from .forms import Effort, Form, PromptFields, drop_none
from .message_answer import MessageAnswer
from .messages import Prompt, Turn
from .requests import AnswerRequest, Count, Function, StopTexts, choose_tools, make_turn
from .service import Service
from .streams import respond


class TextBlock(Form):
    """A text block of a message."""

    type: Literal["text"]
    text: str


class ImageBase64(Form):
    """The data of an image, in base64."""

    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class ImageUrl(Form):
    """The URL of an image."""

    type: Literal["url"]
    url: str


class ImageBlock(Form):
    """An image block of a message."""

    type: Literal["image"]
    source: Annotated[ImageBase64 | ImageUrl, Field(discriminator="type")]

    @property
    def url(self) -> str:
        """The URL of the image; a data URL if the request contains its data."""
        if isinstance(self.source, ImageUrl):
            return self.source.url
        return f"data:{self.source.media_type};base64,{self.source.data}"


class DocumentSource(Form):
    """The text of a document, or its text blocks; files aren't read."""

    type: Literal["text", "content"]
    media_type: Literal["text/plain"] | None = None
    data: str = ""
    content: str | list[TextBlock] = ""


class DocumentBlock(Form):
    """A document in a message: a text with a title and its context."""

    type: Literal["document"]
    source: DocumentSource
    title: str | None = None
    context: str | None = None

    @property
    def text(self) -> str:
        """The document as text."""
        body = self.source.data or make_turn("user", self.source.content).content
        return "\n\n".join(filter(None, (self.title, self.context, body))) + "\n\n"


class ThinkingBlock(Form):
    """The reasoning before an answer; empty if only Anthropic's servers can read it."""

    type: Literal["thinking", "redacted_thinking"]
    thinking: str = ""
    signature: str = ""


class ToolReferenceBlock(Form):
    """A tool that the client's search has found; its name is shown."""

    type: Literal["tool_reference"]
    text: Annotated[str, Field(alias="tool_name")]


ResultPart = TextBlock | ImageBlock | DocumentBlock | ToolReferenceBlock


class ToolUseBlock(Form):
    """A tool call of the assistant."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Form):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[Annotated[ResultPart, Field(discriminator="type")]] = ""
    is_error: bool | None = None

    @property
    def images(self) -> list[ImageBlock]:
        """The images of the result; `read_turns` moves them to the user's message."""
        return [part for part in self.content if isinstance(part, ImageBlock)]

    def to_turn(self) -> Turn:
        """Return the text of the result as a tool message, without images."""
        turn = make_turn("tool", self.content, call_id=self.tool_use_id)
        text = f"Error: {turn.content}" if self.is_error else turn.content
        return replace(turn, content=text, images=())


Block = Annotated[
    TextBlock | ImageBlock | DocumentBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]


_ALLOWED_BLOCKS: dict[str, Any] = {
    "user": (TextBlock, ImageBlock, DocumentBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, ToolUseBlock),
    "system": (TextBlock, ImageBlock),
}


class AnthropicMessage(Form):
    """A message of the conversation: a text or a list of blocks."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(min_length=1)]


class AnthropicTool(Function):
    """A tool of the client."""

    type: Literal["custom"] | None = None
    parameters: Annotated[dict[str, Any], Field(alias="input_schema")]


class AnthropicToolChoice(Form):
    """The `tool_choice` of a request: "any" requires a call, "tool" a call of a named tool."""

    type: Literal["auto", "any", "none", "tool"] = "auto"
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @property
    def mode(self) -> str:
        """The choice as `choose_tools` expects it; HttpError if the name is missing or extra."""
        if (self.type == "tool") != (self.name is not None):
            text = f"tool_choice of type {self.type} {'needs a' if self.name is None else 'has no'}"
            raise HttpError(400, f"{text} name", param="tool_choice.name")
        return "required" if self.type in ("any", "tool") else self.type


class AnthropicSchemaFormat(Form):
    """The format "JSON that matches a schema"."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Form):
    """The format of the answer's text."""

    effort: Effort | None = None
    format: AnthropicSchemaFormat | None = None


def _drop_billing(blocks: list[TextBlock]) -> list[TextBlock]:
    """Drop the block by which Claude Code is billed, which differs in each of its requests."""
    # As the first text of every prompt it would prevent all sharing of cached prefixes.
    return [block for block in blocks if not block.text.startswith("x-anthropic-billing-header:")]


class Thread(Form, extra="ignore"):
    """A stored conversation to begin or to continue; beginning one has no effect."""

    type: str = "create"


class CountTokensRequest(PromptFields):
    """``POST /v1/messages/count_tokens``."""

    model: str
    messages: Annotated[list[AnthropicMessage], Field(min_length=1)]
    system: str | Annotated[list[TextBlock], AfterValidator(_drop_billing)] = ""
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice = AnthropicToolChoice()
    output_config: OutputConfig = OutputConfig()
    thread: Thread = Thread()

    def to_prompt(self) -> Prompt:
        """Convert the request to a prompt."""
        if self.thread.type != "create":
            text = "no conversation is stored to continue a thread: send all messages"
            raise HttpError(400, text, code=NO_THREADS, param="thread")
        choice, tools = self.tool_choice, [tool.to_chat_tool() for tool in self.tools or ()]
        mode: Any = choice.mode
        usable = choose_tools(tools, mode if choice.name is None else choice)
        system = [make_turn("system", self.system)] if self.system else []
        return Prompt(
            messages=[*system, *chain.from_iterable(map(read_turns, self.messages))],
            parallel_tool_calls=not choice.disable_parallel_tool_use,
            settings=self.prompt_settings(),
            **usable,
        )

    def prompt_settings(self) -> PromptSettings:
        """See `PromptFields`; effort is no switch, and a last assistant message is continued."""
        settings = super().prompt_settings()
        return replace(
            settings,
            effort=settings.effort or self.output_config.effort,
            continues=settings.continues or self.messages[-1].role == "assistant",
        )


class MessagesRequest(CountTokensRequest, AnswerRequest):
    """``POST /v1/messages``."""

    model: str
    max_new_tokens: Annotated[Count, Field(alias="max_tokens")]
    stop: Annotated[StopTexts | None, Field(alias="stop_sequences")] = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None

    def params(self) -> dict[str, Any]:
        """See `AnswerRequest`."""
        form = self.output_config.format
        schema = form and {"type": "json_schema", "json_schema": {"schema": form.schema_}}
        return super().params() | drop_none({"response_format": schema})


def read_turns(message: AnthropicMessage) -> list[Turn]:
    """Convert a message to turns: each tool result becomes a turn of its own."""
    blocks = message.content
    if isinstance(blocks, str):
        return [Turn(role=message.role, content=blocks)]
    for block in blocks:
        if not isinstance(block, _ALLOWED_BLOCKS[message.role]):
            text = f"a block of type {block.type} isn't allowed in a message of role {message.role}"
            raise HttpError(400, text)
    if message.role == "assistant":
        return [_read_assistant(blocks)]
    # Tool results come first, each as a turn of its own, then the user's text and all images:
    #     [result(id=1, "red", image), text "And now?"]
    #     → tool "red" (call 1); user "And now?" with the image
    results = [block for block in blocks if isinstance(block, ToolResultBlock)]
    user_blocks = [part for block in blocks for part in getattr(block, "images", (block,))]
    turns = [block.to_turn() for block in results]
    return [*turns, make_turn(message.role, user_blocks)] if user_blocks else turns


def _read_assistant(blocks: Sequence[Any]) -> Turn:
    """Convert the blocks of an assistant's message to a turn with reasoning, text and calls."""
    calls = tuple(
        {"id": block.id, "function": {"name": block.name, "arguments": block.input}}
        for block in blocks
        if isinstance(block, ToolUseBlock)
    )
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    return make_turn("assistant", blocks, reasoning="".join(thoughts), calls=calls)


def add_messages(app: FastAPI, service: Service) -> None:
    """Add the routes of ``/v1/messages`` to an application."""

    @app.post("/v1/messages")
    async def create_message(request: MessagesRequest, http: Request) -> Response:
        """Answer a chat in the format of Anthropic's API."""
        form = MessageAnswer(request.model or service.model)
        return await respond(service, request, [request.to_prompt()], form, http)

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(request: CountTokensRequest) -> dict[str, int]:
        """Count the prompt tokens of a chat."""
        service.check_model(request.model)
        return {"input_tokens": len((await service.count(request.to_prompt())).tokens)}
