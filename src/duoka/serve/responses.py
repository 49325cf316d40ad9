"""``POST /v1/responses``, ``/v1/responses/input_tokens``: OpenAI's Responses API, without state.

Source: https://platform.openai.com/docs/api-reference/responses, and the types of its official
Python client. Fields for stored state or server-side tools are refused with their names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import BaseModel, Discriminator, Field, Tag, field_validator

from .forms import Form, PromptFields, drop_none
from .messages import Prompt, Turn
from .requests import (
    AnswerRequest,
    Count,
    Function,
    RefusalPart,
    TopLogprobs,
    choose_tools,
    make_turn,
)
from .response_answer import ResponseAnswer
from .service import Service
from .streams import respond

_LOGPROBS = "message.output_text.logprobs"
_ECHOED_FIELDS = (
    *("prompt_cache_key", "safety_identifier", "user", "instructions", "max_output_tokens"),
    *("temperature", "top_p"),
)
_ECHOED_NUMBERS = ("top_logprobs", "presence_penalty", "frequency_penalty")
_TOOL_DEFAULTS = dict.fromkeys(("description", "parameters", "strict"))
_STATE_FIELDS = ("previous_response_id", "conversation", "prompt")


class InputText(Form):
    """A text part of a message."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputImage(Form):
    """An image part of a message."""

    type: Literal["input_image"]
    url: Annotated[str, Field(alias="image_url")]


Part = Annotated[InputText | RefusalPart | InputImage, Field(discriminator="type")]


class InputItem(Form):
    """The common fields of the items of a conversation."""

    id: str | None = None
    status: str | None = None


class InputMessage(InputItem):
    """A message, also of the assistant."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]
    phase: str | None = None


class FunctionCall(InputItem):
    """A tool call of the assistant."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionCallOutput(InputItem):
    """The result of a tool call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[Part]


class ReasoningText(Form):
    """A text part of reasoning or of its summary."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class InputReasoning(InputItem):
    """The reasoning before an answer."""

    type: Literal["reasoning"]
    summary: list[ReasoningText] | None = None
    content: list[ReasoningText] | None = None

    @property
    def texts(self) -> Sequence[ReasoningText]:
        """The reasoning's texts, or those of its summary if there are none."""
        return self.content or self.summary or ()


def _type_of(item: Any) -> str | None:
    """Return the type of an item, by default "message"; None if the item is malformed."""
    kind = item.get("type", "message") if isinstance(item, Mapping) else None
    return kind if isinstance(kind, str) else None


Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[InputReasoning, Tag("reasoning")],
    Discriminator(_type_of),
]


class FunctionTool(Function):
    """A function of the client, offered as a tool."""

    type: Literal["function"]


class ResponseAllowedTools(Form):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[FunctionTool]


class TextFormat(Form):
    """The format "any text", or "any JSON object"."""

    type: Literal["text", "json_object"]


class ResponseSchemaFormat(Form):
    """The format "JSON that matches a schema"; `strict` has no effect."""

    type: Literal["json_schema"]
    name: str
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None


class TextConfig(Form):
    """The format of the answer's text."""

    format: Annotated[TextFormat | ResponseSchemaFormat, Field(discriminator="type")] | None = None


class InputTokensRequest(PromptFields):
    """``POST /v1/responses/input_tokens``."""

    model: str = ""
    input: str | list[Item] = Field(default_factory=list)
    instructions: str | None = None
    text: TextConfig | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: (
        Literal["none", "auto", "required"] | FunctionTool | ResponseAllowedTools | None
    ) = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["disabled"] | None = None
    previous_response_id: None = None
    conversation: None = None
    prompt: None = None

    @field_validator(*_STATE_FIELDS, mode="before")
    @classmethod
    def _refuse_stored(cls, value: object) -> None:
        """Refuse a reference to a stored conversation or prompt."""
        if value is not None:
            text = "the server stores no conversations; send the whole conversation as input"
            raise ValueError(text)

    def to_prompt(self) -> Prompt:
        """Convert the request to a prompt."""
        instructions = [Turn(role="system", content=self.instructions or "")]
        return Prompt(
            messages=[*(instructions if self.instructions else ()), *read_turns(self.input)],
            field="input",
            parallel_tool_calls=self.parallel_tool_calls is not False,
            settings=self.prompt_settings(),
            **choose_tools([tool.to_chat_tool() for tool in self.tools or ()], self.tool_choice),
        )


class ResponsesRequest(AnswerRequest, InputTokensRequest):
    """``POST /v1/responses``."""

    input: str | Annotated[list[Item], Field(min_length=1)]
    stream_options: dict[str, Any] | None = None  # ignored
    max_new_tokens: Annotated[Count | None, Field(alias="max_output_tokens")] = None
    top_logprobs: TopLogprobs | None = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None
    background: Literal[False] | None = None

    @property
    def has_logprobs(self) -> bool:
        """True if log-probabilities are requested."""
        return self.top_logprobs is not None or _LOGPROBS in (self.include or ())

    def params(self) -> dict[str, Any]:
        """See `AnswerRequest`."""
        form = None if self.text is None else _dump(self.text.format)
        if form is not None and form["type"] == "json_schema":
            form = {"type": form.pop("type"), "json_schema": form}
        top = (self.top_logprobs or 0) if self.has_logprobs else None
        return super().params() | drop_none({"logprobs": top, "response_format": form})

    def settings(self) -> dict[str, Any]:
        """Return the settings to be repeated in the response."""
        values = self.model_dump(by_alias=True)
        return {name: values[name] for name in _ECHOED_FIELDS} | {
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "reasoning": {"effort": self.prompt_settings().effort, "summary": None},
            "text": {"format": {"type": "text"}, **(_dump(self.text) or {})},
            "tool_choice": _dump(self.tool_choice or "auto"),
            "tools": [{**_TOOL_DEFAULTS, **_dump(tool)} for tool in self.tools or ()],
            **{name: values[name] or 0 for name in _ECHOED_NUMBERS},
        }


def read_turns(items: str | Sequence[Any]) -> list[Turn]:
    """Convert the items of a conversation to turns.

    The reasoning, the text and each tool call of one answer are separate items; they are merged
    into one turn.
    """
    if isinstance(items, str):
        return [Turn(role="user", content=items)]
    # An answer ends at an item of another role, or at reasoning, which begins the next answer:
    #     reasoning, message, function_call, function_call_output, message
    #     → assistant (reasoning, text, call); tool; assistant (text)
    turns: list[Turn] = []
    is_open = False  # True if the last turn is an answer to which items may be added
    for item in items:
        is_answer = False
        if isinstance(item, FunctionCallOutput):
            turns.append(make_turn("tool", item.output, call_id=item.call_id))
        elif isinstance(item, InputMessage) and item.role != "assistant":
            role = "user" if item.role == "user" else "system"
            turns.append(make_turn(role, item.content))
        elif not isinstance(item, InputReasoning) or item.texts:
            if not is_open or isinstance(item, InputReasoning):
                turns.append(Turn(role="assistant"))
            turns[-1] = _add_item(turns[-1], item)
            is_answer = True
        is_open = is_answer
    return turns


def _add_item(turn: Turn, item: Any) -> Turn:
    """Return the turn of an answer with an item added: reasoning, a text or a tool call."""
    if isinstance(item, InputReasoning):
        return replace(turn, reasoning="\n".join(text.text for text in item.texts))
    if isinstance(item, FunctionCall):
        function = {"name": item.name, "arguments": item.arguments}
        return replace(turn, calls=(*turn.calls, {"id": item.call_id, "function": function}))
    text = make_turn("assistant", item.content)
    return replace(turn, content=turn.content + text.content, images=turn.images + text.images)


def _dump(value: Any) -> Any:
    """Convert a pydantic model to a dict without None values; return other values unchanged."""
    if isinstance(value, BaseModel):
        return value.model_dump(by_alias=True, exclude_none=True)
    return value


def add_responses(app: FastAPI, service: Service) -> None:
    """Add the routes of ``/v1/responses`` to an application."""

    @app.post("/v1/responses")
    async def create_response(request: ResponsesRequest, http: Request) -> Response:
        """Answer a chat in the format of the Responses API."""
        settings, has_logprobs = request.settings(), request.has_logprobs
        form = ResponseAnswer(request.model or service.model, settings, has_logprobs=has_logprobs)
        return await respond(service, request, [request.to_prompt()], form, http)

    @app.post("/v1/responses/input_tokens")
    async def count_input_tokens(request: InputTokensRequest) -> dict[str, Any]:
        """Count the prompt tokens of a chat."""
        service.check_model(request.model)
        counted = await service.count(request.to_prompt())
        return {"object": "response.input_tokens", "input_tokens": len(counted.tokens)}
