"""``POST /v1/messages`` and its ``count_tokens``: Anthropic's form of chats.

Source: https://docs.anthropic.com/en/api/messages, and its official Python client's types. Tools
and memory that would be the server's own are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import Field

from .errors import HttpError
from .message_answer import MessageAnswer
from .messages import Prompt
from .parts import respond
from .requests import Form, Share, StopTexts, refuse_missing_tool, without_none
from .service import Service


class CacheControl(Form):
    """Where a beginning is worth being kept; all are, as long as there is room."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class _Block(Form):
    cache_control: CacheControl | None = None


class TextBlock(_Block):
    """A text."""

    type: Literal["text"]
    text: str
    citations: None = None


class ImageBase64(Form):
    """An image within the request."""

    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class ImageUrl(Form):
    """An image somewhere else."""

    type: Literal["url"]
    url: str


class ImageBlock(_Block):
    """An image."""

    type: Literal["image"]
    source: Annotated[ImageBase64 | ImageUrl, Field(discriminator="type")]


class ThinkingBlock(Form):
    """What was thought before an answer."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class ToolUseBlock(_Block):
    """A call of a tool, as it was answered."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(_Block):
    """What a tool has returned."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[Annotated[TextBlock | ImageBlock, Field(discriminator="type")]] = ""
    is_error: bool | None = None


Block = Annotated[
    TextBlock | ImageBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]


class Said(Form):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(min_length=1)]


class Tool(_Block):
    """A function that may be called."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None

    def tool(self) -> dict[str, Any]:
        """In the form of a chat completion's."""
        values = {
            "name": self.name,
            "description": self.description,
            "parameters": self.input_schema,
            "strict": self.strict,
        }
        return {"type": "function", "function": without_none(values)}


class AnthropicToolChoice(Form):
    """Whether tools may be called, or must be; or the one that must be."""

    type: Literal["auto", "any", "none", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @property
    def choice(self) -> str | dict[str, Any]:
        """In the form of a chat completion's."""
        if (self.type == "tool") != (self.name is not None):
            text = f"tool_choice of type {self.type} {'needs a' if self.name is None else 'has no'}"
            raise HttpError(400, f"{text} name", param="tool_choice.name")
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class Thinking(Form):
    """What is asked of reasoning; how much there is, the model alone decides."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=1024)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class AnthropicSchemaFormat(Form):
    """JSON that fits a schema."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Form):
    """How the text of an answer is."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: AnthropicSchemaFormat | None = None


class Metadata(Form):
    """Who asks; it isn't kept."""

    user_id: str | None = None


class CountTokensRequest(_Block):
    """``POST /v1/messages/count_tokens``."""

    model: str
    messages: Annotated[list[Said], Field(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[Tool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    @property
    def question(self) -> Prompt:
        """What is asked."""
        chosen = self.tool_choice or AnthropicToolChoice(type="auto")
        choice, tools = chosen.choice, [tool.tool() for tool in self.tools or ()]
        refuse_missing_tool(choice, tools)
        chat: list[dict[str, Any]] = []
        if self.system:
            chat.append({"role": "system", "content": _text(self.system)})
        for said in self.messages:
            chat += chat_of(said)
        return Prompt(
            messages=chat,
            tools=tools,
            tool_choice=choice,
            parallel_tool_calls=not chosen.disable_parallel_tool_use,
        )


class MessagesRequest(CountTokensRequest):
    """``POST /v1/messages``."""

    max_tokens: Annotated[int, Field(ge=1)]
    stream: bool | None = None
    stop_sequences: StopTexts | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    def params(self) -> dict[str, Any]:
        """Sampling parameters in duoka's names; those that aren't said are left out."""
        form = None if self.output_config is None else self.output_config.format
        content = None if form is None else {"schema": form.schema_}
        schema: dict[str, Any] = {"type": "json_schema", "json_schema": content}
        values = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop": tuple(self.stop_sequences or ()) or None,
            "max_new_tokens": self.max_tokens,
            "response_format": None if form is None else schema,
        }
        return without_none(values)


def chat_of(said: Said) -> list[dict[str, Any]]:
    """A message as messages in the form of chat completions: a tool's result is one of its own."""
    if isinstance(said.content, str):
        return [{"role": said.role, "content": said.content}]
    if said.role == "assistant":
        return [_answer(said.content)]
    chat: list[dict[str, Any]] = []
    rest: list[dict[str, Any]] = []
    for block in said.content:
        if isinstance(block, ToolResultBlock) and said.role == "user":
            text, images = _result(block)
            chat.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
            rest += images
        elif isinstance(block, TextBlock | ImageBlock):
            rest.append(_part(block))
        else:
            raise _misplaced(block, said.role)
    return [*chat, {"role": said.role, "content": _joined(rest)}] if rest else chat


def _answer(blocks: Sequence[Any]) -> dict[str, Any]:
    """What an assistant thought, said and called."""
    texts, thoughts, calls = [], [], []
    for block in blocks:
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            arguments = json.dumps(block.input, ensure_ascii=False)
            function = {"name": block.name, "arguments": arguments}
            calls.append({"id": block.id, "type": "function", "function": function})
        else:
            raise _misplaced(block, "assistant")
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts) or None}
    if not (texts or calls):
        message["content"] = ""
    if "".join(thoughts):
        message["reasoning_content"] = "".join(thoughts)
    return message | ({"tool_calls": calls} if calls else {})


def _result(block: ToolResultBlock) -> tuple[str, list[dict[str, Any]]]:
    """What a tool has returned: its text, and the images, which only a user can show."""
    if isinstance(block.content, str):
        text, images = block.content, []
    else:
        text = _text([part for part in block.content if isinstance(part, TextBlock)])
        images = [_part(part) for part in block.content if isinstance(part, ImageBlock)]
    return (f"Error: {text}" if block.is_error else text), images


def _part(block: TextBlock | ImageBlock) -> dict[str, Any]:
    if isinstance(block, TextBlock):
        return {"type": "text", "text": block.text}
    source = block.source
    url = source.url if isinstance(source, ImageUrl) else None
    if isinstance(source, ImageBase64):
        url = f"data:{source.media_type};base64,{source.data}"
    return {"type": "image_url", "image_url": {"url": url}}


def _joined(parts: Sequence[Mapping[str, Any]]) -> Any:
    """What is said, in parts where there are images."""
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return list(parts)


def _text(said: str | Sequence[TextBlock]) -> str:
    return said if isinstance(said, str) else "".join(block.text for block in said)


def _misplaced(block: Any, role: str) -> HttpError:
    return HttpError(400, f"a block of type {block.type} has no place in a message of role {role}")


def add_messages(app: FastAPI, service: Service) -> None:
    """Let an application answer ``/v1/messages``."""

    @app.post("/v1/messages")
    async def messages(request: MessagesRequest, http: Request) -> Response:
        """Answer a chat, in Anthropic's form."""
        service.check_model(request.model)
        is_streamed = bool(request.stream)
        events = service.ask(request.question, request.params(), is_streamed=is_streamed)
        form = MessageAnswer(service.model)
        return await respond(form, events, http, stream=is_streamed)

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(request: CountTokensRequest) -> dict[str, int]:
        """How many tokens a chat has."""
        service.check_model(request.model)
        return {"input_tokens": len(await service.count(request.question))}
