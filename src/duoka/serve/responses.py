"""``POST /v1/responses``, OpenAI's other form of chats; nothing is kept between requests.

Source: https://platform.openai.com/docs/api-reference/responses, and its official Python client's
types. What would need a memory, or tools of the server's own, is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import BaseModel, Discriminator, Field, Tag, field_validator

from .messages import Prompt
from .parts import respond
from .requests import (
    MOST_TOP_LOGPROBS,
    Form,
    Function,
    Share,
    Unheeded,
    refuse_missing_tool,
    without_none,
)
from .response_answer import ResponseAnswer
from .service import Service

_LOGPROBS = "message.output_text.logprobs"
_REPEATED = {"instructions", "max_output_tokens", "temperature", "top_logprobs", "top_p"}
_REPEATED |= {"user", "safety_identifier", "prompt_cache_key"}
_STORED = ("previous_response_id", "conversation", "prompt")


class InputText(Form):
    """A text of a message."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None

    def part(self) -> dict[str, Any]:
        """In the form of a chat."""
        return {"type": "text", "text": self.text}


class InputRefusal(Form):
    """What an assistant has refused to say."""

    type: Literal["refusal"]
    refusal: str

    def part(self) -> dict[str, Any]:
        """In the form of a chat."""
        return {"type": "text", "text": self.refusal}


class InputImage(Form):
    """An image of a message."""

    type: Literal["input_image"]
    image_url: str
    detail: Literal["auto", "low", "high"] | None = None

    def part(self) -> dict[str, Any]:
        """In the form of a chat."""
        image = without_none({"url": self.image_url, "detail": self.detail})
        return {"type": "image_url", "image_url": image}


Part = Annotated[InputText | InputRefusal | InputImage, Field(discriminator="type")]


class InputMessage(Form):
    """A message, as it is asked or was answered."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionCall(Form):
    """A call of a tool, as it was answered."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class FunctionCallOutput(Form):
    """What a tool has returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[Part]
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class ReasoningText(Form):
    """A text of what was thought."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class InputReasoning(Form):
    """What was thought before an answer."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[ReasoningText] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


def _kind(item: Any) -> str | None:
    """A message alone may leave its type out."""
    kind = item.get("type", "message") if isinstance(item, Mapping) else None
    return kind if isinstance(kind, str) else None


Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[InputReasoning, Tag("reasoning")],
    Discriminator(_kind),
]


class FunctionTool(Function):
    """A function that may be called."""

    type: Literal["function"]

    def tool(self) -> dict[str, Any]:
        """In the form of a chat."""
        function = self.model_dump(exclude={"type"}, exclude_none=True)
        return {"type": "function", "function": function}


class TextFormat(Form):
    """Any text, or any JSON object."""

    type: Literal["text", "json_object"]


class ResponseSchemaFormat(Form):
    """JSON that fits a schema; it always does, whether `strict` or not."""

    type: Literal["json_schema"]
    name: str
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None


class TextConfig(Form):
    """How the text of an answer is."""

    format: Annotated[TextFormat | ResponseSchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(Form):
    """What is asked of reasoning; how much there is, the model alone decides."""

    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseStreamOptions(Form):
    """What a stream has beside its events; they are never padded."""

    include_obfuscation: bool | None = None


class ResponsesRequest(Unheeded):
    """``POST /v1/responses``."""

    input: str | Annotated[list[Item], Field(min_length=1)]
    model: str = ""
    instructions: str | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = None
    text: TextConfig | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = (
        None
    )
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    previous_response_id: None = None
    conversation: None = None
    prompt: None = None

    @field_validator(*_STORED, mode="before")
    @classmethod
    def _nothing_is_stored(cls, value: object) -> None:
        if value is not None:
            raise ValueError("nothing is stored here; send the whole conversation as input")

    @property
    def top(self) -> int | None:
        """Of how many of the likeliest tokens log-probabilities are told."""
        is_wanted = self.top_logprobs is not None or _LOGPROBS in (self.include or ())
        return (self.top_logprobs or 0) if is_wanted else None

    @property
    def question(self) -> Prompt:
        """What is asked."""
        chosen = self.tool_choice or "auto"
        named = {"type": "function", "function": {"name": getattr(chosen, "name", None)}}
        choice = chosen if isinstance(chosen, str) else named
        tools = [tool.tool() for tool in self.tools or ()]
        refuse_missing_tool(choice, tools)
        return Prompt(
            messages=[*_instructions(self.instructions), *chat_of(self.input)],
            tools=tools,
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            field="input",
        )

    def params(self) -> dict[str, Any]:
        """Sampling parameters in duoka's names; those that aren't said are left out."""
        values = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_new_tokens": self.max_output_tokens,
            "logprobs": self.top,
            "response_format": self._response_format(),
        }
        return without_none(values)

    def _response_format(self) -> dict[str, Any] | None:
        form = None if self.text is None else self.text.format
        if isinstance(form, ResponseSchemaFormat):
            content = form.model_dump(by_alias=True, exclude_none=True)
            return {"type": content.pop("type"), "json_schema": content}
        return None if form is None else form.model_dump()

    def settings(self) -> dict[str, Any]:
        """What an answer repeats of it."""
        text = {"format": {"type": "text"}} if self.text is None else _dumped(self.text)
        return self.model_dump(include=_REPEATED) | {
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "text": text,
            "tool_choice": _dumped(self.tool_choice or "auto"),
            "tools": [
                {"parameters": None, "strict": None, **_dumped(tool)} for tool in self.tools or ()
            ],
        }


def chat_of(items: str | Sequence[Any]) -> list[dict[str, Any]]:
    """The messages of a chat in the form of chat completions.

    An answer's reasoning, text and calls are items of their own here, and one message there.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    chat: list[dict[str, Any]] = []
    is_open = False  # whether the last message is an answer that may go on
    for item in items:
        if isinstance(item, FunctionCallOutput):
            content = _content(item.output)
            chat.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
            is_open = False
            continue
        if isinstance(item, InputMessage) and item.role != "assistant":
            role = "user" if item.role == "user" else "system"
            chat.append({"role": role, "content": _content(item.content)})
            is_open = False
            continue
        if not is_open or isinstance(item, InputReasoning):
            chat.append({"role": "assistant", "content": None})
            is_open = True
        _add(chat[-1], item)
    return [message for message in chat if len(message) > 2 or message["content"] is not None]


def _add(message: dict[str, Any], item: Any) -> None:
    """Add to an answer what it also said, thought or called."""
    if isinstance(item, InputReasoning):
        texts = item.content or item.summary or ()
        if texts:
            message["reasoning_content"] = "\n".join(text.text for text in texts)
    elif isinstance(item, FunctionCall):
        function = {"name": item.name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        message.setdefault("tool_calls", []).append(call)
    else:
        said = _content(item.content)
        before = message["content"]
        message["content"] = said if before is None else _joined(before, said)


def _joined(before: Any, said: Any) -> Any:
    if isinstance(before, str) and isinstance(said, str):
        return before + said
    return [*_listed(before), *_listed(said)]


def _listed(content: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _content(content: str | list[Any]) -> str | list[dict[str, Any]]:
    """What is said, in parts where there are images."""
    if isinstance(content, str):
        return content
    parts = [part.part() for part in content]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _instructions(text: str | None) -> Iterator[dict[str, Any]]:
    if text:
        yield {"role": "system", "content": text}


def _dumped(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(by_alias=True, exclude_none=True)
    return value


def add_responses(app: FastAPI, service: Service) -> None:
    """Let an application answer ``/v1/responses``."""

    @app.post("/v1/responses")
    async def responses(request: ResponsesRequest, http: Request) -> Response:
        """Answer a chat, in OpenAI's form of responses."""
        service.check_model(request.model)
        has_logprobs = request.top is not None
        form = ResponseAnswer(service.model, request.settings(), has_logprobs=has_logprobs)
        is_streamed = bool(request.stream)
        events = service.ask(request.question, request.params(), is_streamed=is_streamed)
        return await respond(form, events, http, stream=is_streamed)
