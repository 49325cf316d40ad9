"""Requests of OpenAI's chats and completions, as pydantic models.

The fields of a model are the parameters of the API. A field that `SamplingParams` also has is named
as there, with the API's name as alias. The requests of the other two APIs are in `responses` and
`anthropic`. All are converted to a `Prompt`, whose messages are `Turn`s.

Source: https://platform.openai.com/docs/api-reference, and the types of its official Python client.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field

from .errors import HttpError
from .forms import Form, PromptFields, drop_none
from .messages import Prompt, Turn

_MOST_CHOICES, _MOST_PROMPTS = 16, 2048
MOST_TOP_LOGPROBS = 20
_PARAMS = {"temperature", "top_p", "top_k", "min_p", "logit_bias", "seed", "stop"}
_PARAMS |= {"presence_penalty", "frequency_penalty", "repetition_penalty", "max_new_tokens"}
_PARAMS |= {"stop_ids", "skip_special_tokens"}

StopText = Annotated[str, Field(min_length=1, max_length=256)]
StopTexts = Annotated[list[StopText], Field(max_length=16), AfterValidator(tuple)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
StopIds = Annotated[list[TokenId], Field(max_length=64), AfterValidator(tuple)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Share = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Count = Annotated[int, Field(ge=1)]
TopLogprobs = Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)]


class AnswerRequest(Form):
    """The common fields of requests for generations."""

    model: str = ""
    stream: bool = False
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    store: Literal[False] | None = None

    def params(self) -> dict[str, Any]:
        """Return the parameters of the request, under the names of `SamplingParams`."""
        return drop_none({name: getattr(self, name, None) for name in _PARAMS})


# ── messages and tools ──


# The format of messages is checked only here. The engine's process checks only what depends on the
# model and the conversation (images, memory, ids of tool calls).


class TextPart(Form):
    """A text part of a message."""

    type: Literal["text"]
    text: str


class RefusalPart(Form):
    """A refusal of the assistant."""

    type: Literal["refusal"]
    text: Annotated[str, Field(alias="refusal")]


class ImageAddress(Form):
    """The URL of an image: a data URL or an http(s) URL."""

    url: str


class ImagePart(Form):
    """An image part of a message."""

    type: Literal["image_url"]
    image_url: ImageAddress

    @property
    def url(self) -> str:
        """The URL of the image."""
        return self.image_url.url


class CalledFunction(Form):
    """The function of a tool call, with its arguments as JSON."""

    model_config = ConfigDict(extra="ignore")  # clients add fields with parsed arguments
    name: str
    arguments: str | dict[str, Any]


class AnsweredCall(Form):
    """A tool call of the assistant."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class RoleMessage(Form):
    """A message of a chat; clients such as lm-evaluation-harness add a `type`."""

    type: Literal["text", "message"] | None = None


class SystemMessage(RoleMessage):
    """A system message."""

    role: Literal["system", "developer"]
    content: str | list[TextPart]


class UserMessage(RoleMessage):
    """A user message."""

    role: Literal["user"]
    content: str | list[Annotated[TextPart | ImagePart, Field(discriminator="type")]]


class AssistantMessage(RoleMessage):
    """An earlier answer of the model."""

    role: Literal["assistant"]
    content: str | list[Annotated[TextPart | RefusalPart, Field(discriminator="type")]] = ""
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[AnsweredCall] | None = None


class ToolMessage(RoleMessage):
    """The result of a tool call."""

    role: Literal["tool"]
    tool_call_id: str
    content: str | list[TextPart] = ""


AnyMessage = SystemMessage | UserMessage | AssistantMessage | ToolMessage
RequestMessage = Annotated[AnyMessage, Field(discriminator="role")]


def read_chat(messages: Iterable[AnyMessage]) -> list[Turn]:
    """Convert the messages of a chat to turns."""
    turns = []
    for message in messages:
        values: dict[str, Any] = {}
        if isinstance(message, ToolMessage):
            values = {"call_id": message.tool_call_id}
        elif isinstance(message, AssistantMessage):
            calls = [{"id": c.id, "function": dict(c.function)} for c in message.tool_calls or ()]
            reasoning = message.reasoning_content or message.reasoning or ""
            values = {"reasoning": reasoning, "calls": tuple(calls)}
        role = "system" if message.role == "developer" else message.role
        content = message.content or getattr(message, "refusal", None) or ""
        turns.append(make_turn(role, content, **values))
    return turns


def make_turn(role: Any, content: str | Iterable[Any], **values: Any) -> Turn:
    """Create a turn from a text, or from parts, each of which has a `text` or a `url`."""
    if isinstance(content, str):
        return Turn(role=role, content=content, **values)
    parts = list(content)
    return Turn(
        role=role,
        content="".join(getattr(part, "text", "") for part in parts),
        images=tuple(part.url for part in parts if hasattr(part, "url")),
        **values,
    )


class Function(Form):
    """A function of the client, offered as a tool."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def to_chat_tool(self) -> dict[str, Any]:
        """Return the function as a tool in the format of chats."""
        function = self.model_dump(include={*Function.model_fields}, exclude_none=True)
        return {"type": "function", "function": function}


class ChatTool(Form):
    """A tool of a chat: a function."""

    type: Literal["function"] = "function"
    function: Function


class AllowedTools(Form):
    """A choice among some of the tools."""

    mode: Literal["auto", "required"]
    tools: list[ChatTool]


class ChatAllowedTools(Form):
    """The `tool_choice` of a chat for a choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def choose_tools(tools: Iterable[dict[str, Any]], choice: Any) -> dict[str, Any]:
    """Return `tools` and `must_call` of a `Prompt`, as a dict.

    Parameters
    ----------
    tools : iterable of dict
        The tools in the format of chats.
    choice : {"none", "auto", "required"}, or object with a `name` or with `tools`, optional
        "none": no tool may be called; "auto" (the default): the model decides; "required": one must
        be called; an object: the tool with its `name` must be called, or its `mode` holds for its
        `tools`.

    Raises
    ------
    HttpError
        If a tool must be called that is not in `tools`.
    """
    offered = {tool["function"]["name"]: tool for tool in tools}
    mode = getattr(choice, "mode", choice)
    allowed = [*offered] if mode != "none" else []
    if not isinstance(choice, str | None):
        named = [getattr(tool, "function", tool) for tool in getattr(choice, "tools", (choice,))]
        allowed = [function.name for function in named]
    must_call = mode not in (None, "none", "auto")
    if (must_call and not allowed) or not offered.keys() >= {*allowed}:
        text = f"tool_choice is not in tools; available: {', '.join(offered) or 'none'}"
        raise HttpError(400, text, param="tool_choice")
    return {"tools": [offered[name] for name in offered if name in allowed], "must_call": must_call}


# ── chats and completions ──


class StreamOptions(Form):
    """The options of a stream."""

    include_usage: bool = False


class ResponseFormat(Form):
    """The format of an answer; the types "regex" and "lark" are extensions of duoka."""

    type: Literal["text", "json_object", "json_schema", "regex", "lark"]
    json_schema: dict[str, Any] | None = None
    regex: str | None = None
    lark: str | None = None


class OpenAIRequest(AnswerRequest):
    """The common fields of chats and completions."""

    stream_options: StreamOptions = StreamOptions()
    n: Annotated[int, Field(ge=1, le=_MOST_CHOICES)] = 1
    stop: Annotated[StopText, AfterValidator(lambda text: (text,))] | StopTexts | None = None
    stop_ids: Annotated[StopIds | None, Field(alias="stop_token_ids")] = None
    skip_special_tokens: bool | None = None
    seed: (
        Annotated[int, Field(ge=-(2**63), lt=2**63), AfterValidator(lambda seed: seed % 2**63)]
        | None
    ) = None
    top_k: Annotated[int, Field(ge=-1), AfterValidator(lambda number: max(number, 0))] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Field(ge=1e-3, le=1e3)] | None = None
    logit_bias: Annotated[dict[TokenId, Bias], Field(max_length=1024)] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool = False  # for load generators, which need answers of a fixed length
    response_format: ResponseFormat | None = None

    def params(self) -> dict[str, Any]:
        """See `AnswerRequest`."""
        max_tokens = self.max_completion_tokens or self.max_tokens
        if self.ignore_eos and max_tokens is None:
            raise HttpError(400, "ignore_eos needs max_tokens", param="ignore_eos")
        form = self.response_format
        values = {
            "max_new_tokens": max_tokens,
            "min_new_tokens": max_tokens if self.ignore_eos else self.min_tokens,
            "response_format": form and form.model_dump(exclude_none=True),
        }
        return super().params() | drop_none(values)


class ChatCompletionRequest(OpenAIRequest, PromptFields):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[RequestMessage], Field(min_length=1)]
    logprobs: bool = False
    top_logprobs: TopLogprobs | None = None
    tools: list[ChatTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChatTool | ChatAllowedTools | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None

    def params(self) -> dict[str, Any]:
        """See `AnswerRequest`."""
        if self.top_logprobs is not None and not self.logprobs:
            raise HttpError(400, "top_logprobs needs logprobs", param="top_logprobs")
        top = {"logprobs": self.top_logprobs or 0} if self.logprobs else {}
        return super().params() | top

    def to_prompt(self) -> Prompt:
        """Convert the chat to a prompt."""
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools or ()]
        return Prompt(
            messages=read_chat(self.messages),
            parallel_tool_calls=self.parallel_tool_calls is not False,
            settings=self.prompt_settings(),
            **choose_tools(tools, getattr(self.tool_choice, "allowed_tools", self.tool_choice)),
        )


class CompletionRequest(OpenAIRequest):
    """``POST /v1/completions``."""

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    echo: bool = False
    logprobs: TopLogprobs | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None

    @property
    def has_prompt_logprobs(self) -> bool:
        """True if the log-probabilities of the prompt's tokens are requested."""
        return self.echo and self.logprobs is not None

    def params(self) -> dict[str, Any]:
        """See `AnswerRequest`."""
        if not self.has_prompt_logprobs and self.max_tokens == 0:
            raise HttpError(400, "max_tokens 0 needs echo and logprobs", param="max_tokens")
        if self.has_prompt_logprobs and self.max_tokens is None:
            raise HttpError(400, "echo with logprobs needs max_tokens", param="max_tokens")
        return super().params() | drop_none({"logprobs": self.logprobs})

    def to_prompts(self) -> list[Prompt]:
        """Convert the texts, or lists of token ids, to prompts."""
        value: Any = self.prompt
        is_single = isinstance(value, str) or (value and isinstance(value[0], int))
        several = [value] if is_single else value
        if not all(several) or not 0 < len(several) <= _MOST_PROMPTS:
            text = f"1 to {_MOST_PROMPTS} prompts can be given, none empty"
            raise HttpError(400, text, param="prompt")
        return [
            Prompt(field="prompt", **{"text" if isinstance(prompt, str) else "tokens": prompt})
            for prompt in several
        ]


class TokenizeRequest(PromptFields):
    """``POST /tokenize``: a text, or a chat."""

    model: str = ""
    prompt: str | None = None
    messages: list[RequestMessage] | None = None
    tools: list[ChatTool] | None = None

    def to_prompt(self) -> Prompt:
        """Convert the text or the chat to a prompt."""
        if (self.prompt is None) == (self.messages is None):
            raise HttpError(400, "either prompt or messages is needed", param="prompt")
        if self.messages is None:
            return Prompt(text=self.prompt, field="prompt")
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools or ()]
        settings = self.prompt_settings()
        return Prompt(messages=read_chat(self.messages), tools=tools, settings=settings)


class DetokenizeRequest(Form):
    """``POST /detokenize``."""

    model: str = ""
    tokens: list[TokenId]
