"""The forms of requests to OpenAI's chats and completions: pydantic models without unknown fields.

The fields of a form are the parameters of its interface. Those that `SamplingParams` has too bear
its names, with the interface's name as alias. The other forms of chats are in `responses` and
`anthropic`; all become a `Prompt`, whose messages are `Turn`s.

Source: https://platform.openai.com/docs/api-reference, and the types of its official Python client.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from .errors import HttpError
from .messages import Prompt, Turn

_MOST_CHOICES = 16
MOST_TOP_LOGPROBS = 20
_EMPTY: tuple[Any, ...] = (None, "", [], {})
_PARAMS = {"temperature", "top_p", "top_k", "min_p", "logit_bias", "seed", "stop"}
_PARAMS |= {"presence_penalty", "frequency_penalty", "repetition_penalty", "max_new_tokens"}

StopText = Annotated[str, Field(min_length=1, max_length=256)]
StopTexts = Annotated[list[StopText], Field(max_length=16), AfterValidator(tuple)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Share = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Count = Annotated[int, Field(ge=1)]
TopLogprobs = Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)]


def drop_none(values: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the values that are None."""
    return {name: value for name, value in values.items() if value is not None}


class Form(BaseModel):
    """An object of a request: null means absent, and unknown fields are refused."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _drop_null(cls, values: Any) -> Any:
        return drop_none(values) if isinstance(values, Mapping) else values


class AnswerRequest(Form):
    """The common fields of requests for answers."""

    model: str = ""
    stream: bool = False
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Share | None = None

    @property
    def top(self) -> int | None:
        """The number of likeliest tokens whose log-probabilities are wanted, beside the token's."""
        return None

    @property
    def grammar(self) -> dict[str, Any] | None:
        """The form of the answer, for `Grammar.from_response_format`."""
        return None

    def params(self) -> dict[str, Any]:
        """Return the given parameters under the names of `SamplingParams`."""
        values = {name: getattr(self, name, None) for name in _PARAMS}
        return drop_none(values | {"logprobs": self.top, "response_format": self.grammar})


class IgnoredFields(Form):
    """OpenAI's fields without effect."""

    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None
    user: str | None = None


# ── messages and tools ──


# Messages are checked here, and nowhere else: `to_turn` drops the form, and the engine's process
# checks only the facts of the model and of the conversation (images, memory, ids of calls).


class MessageForm(Form):
    """A message of a chat; unknown fields may be there if they are empty, as answers have them."""

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        fields = cls.model_fields
        return {key: value for key, value in values.items() if key in fields or value not in _EMPTY}


class TextPart(MessageForm):
    """A text of a message."""

    type: Literal["text"]
    text: str


class RefusalPart(MessageForm):
    """A refusal of an assistant."""

    type: Literal["refusal"]
    text: Annotated[str, Field(alias="refusal")]


class ImageAddress(MessageForm):
    """A data URL, or an address."""

    url: str
    detail: Literal["auto", "low", "high"] | None = None


class ImagePart(MessageForm):
    """An image of a message."""

    type: Literal["image_url"]
    image_url: ImageAddress

    @property
    def url(self) -> str:
        """The URL of the image."""
        return self.image_url.url


class CalledFunction(Form):
    """The function of a call, and its arguments as JSON."""

    model_config = ConfigDict(extra="ignore")  # clients add what they have parsed
    name: str
    arguments: str | dict[str, Any]


class AnsweredCall(MessageForm):
    """A call of a tool in an answer."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class SystemMessage(MessageForm):
    """A message of the system."""

    role: Literal["system", "developer"]
    content: str | list[TextPart]

    def to_turn(self) -> Turn:
        """Return the message, whatever its form."""
        return make_turn("system", self.content)


class UserMessage(MessageForm):
    """A message of the user."""

    role: Literal["user"]
    content: str | list[Annotated[TextPart | ImagePart, Field(discriminator="type")]]

    def to_turn(self) -> Turn:
        """Return the message, whatever its form."""
        return make_turn("user", self.content)


class AssistantMessage(MessageForm):
    """An answer of the model."""

    role: Literal["assistant"]
    content: str | list[Annotated[TextPart | RefusalPart, Field(discriminator="type")]] = ""
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[AnsweredCall] | None = None

    def to_turn(self) -> Turn:
        """Return the message, whatever its form."""
        calls = tuple(
            {"id": call.id, "function": dict(call.function)} for call in self.tool_calls or ()
        )
        reasoning = self.reasoning_content or self.reasoning or ""
        return make_turn("assistant", self.content, reasoning=reasoning, calls=calls)


class ToolMessage(MessageForm):
    """The result of a call."""

    role: Literal["tool"]
    tool_call_id: str
    content: str | list[TextPart] = ""
    name: str | None = None

    def to_turn(self) -> Turn:
        """Return the message, whatever its form."""
        return make_turn("tool", self.content, call_id=self.tool_call_id)


RequestMessage = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]


def make_turn(role: Any, content: str | Iterable[Any], **values: Any) -> Turn:
    """Return a message with a content of text, or of parts with a `text` or a `url` each."""
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
    """A function of the client."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(Form):
    """A tool of a chat: a function."""

    type: Literal["function"] = "function"
    function: Function

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.function.name


def choose_tools(
    tools: Iterable[dict[str, Any]], choice: str | None, name: str | None = None
) -> dict[str, Any]:
    """Return the arguments of a `Prompt` for its tools.

    Parameters
    ----------
    tools : iterable of dict
        As chats have them.
    choice : {"none", "auto", "required"}, optional
        Whether tools may be called, or one has to be. By default they may be.
    name : str, optional
        The only tool that may be called, with "required".
    """
    offered = [] if choice == "none" else list(tools)
    names = [tool["function"]["name"] for tool in offered]
    if (choice == "required" and not names) or name not in (None, *names):
        text = f"tool_choice needs tools that have it; there are {', '.join(names) or 'none'}"
        raise HttpError(400, text, param="tool_choice")
    usable = [tool for tool in offered if name in (None, tool["function"]["name"])]
    return {"tools": usable, "must_call": choice == "required"}


def choose_openai_tools(
    tools: Iterable[dict[str, Any]], choice: Any, parallel: bool | None
) -> dict[str, Any]:
    """Return the arguments of a `Prompt` by OpenAI's `tool_choice`: a mode, or a tool."""
    mode = (choice, None) if isinstance(choice, str | None) else ("required", choice.name)
    return {**choose_tools(tools, *mode), "parallel_tool_calls": parallel is not False}


# ── chats and completions ──


class StreamOptions(Form):
    """Additions to a stream; its pieces are never padded."""

    include_usage: bool = False
    include_obfuscation: bool = False


class ResponseFormat(Form):
    """The form of an answer; the types "regex" and "lark" are duoka's own."""

    type: Literal["text", "json_object", "json_schema", "regex", "lark"]
    json_schema: dict[str, Any] | None = None
    regex: str | None = None
    lark: str | None = None


class OpenAIRequest(AnswerRequest):
    """The fields of chats and completions."""

    stream_options: StreamOptions = StreamOptions()
    n: Annotated[int, Field(ge=1, le=_MOST_CHOICES)] = 1
    stop: Annotated[StopText, AfterValidator(lambda text: (text,))] | StopTexts | None = None
    seed: (
        Annotated[int, Field(ge=-(2**63), lt=2**63), AfterValidator(lambda seed: seed % 2**63)]
        | None
    ) = None
    top_k: Annotated[int, Field(ge=-1), AfterValidator(lambda number: max(number, 0))] | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=1e-3, le=1e3)] | None = None
    logit_bias: Annotated[dict[TokenId, Bias], Field(max_length=1024)] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool = False  # load generators want answers of a given length
    response_format: ResponseFormat | None = None
    user: str | None = None

    @property
    def grammar(self) -> dict[str, Any] | None:
        """See `AnswerRequest`."""
        form = self.response_format
        return None if form is None else form.model_dump(exclude_none=True)

    def params(self) -> dict[str, Any]:
        """See `AnswerRequest`."""
        max_tokens = self.max_completion_tokens or self.max_tokens
        if self.ignore_eos and max_tokens is None:
            raise HttpError(400, "ignore_eos needs max_tokens", param="ignore_eos")
        min_tokens = max_tokens if self.ignore_eos else self.min_tokens
        lengths = {"max_new_tokens": max_tokens, "min_new_tokens": min_tokens}
        return super().params() | drop_none(lengths)


class ChatCompletionRequest(OpenAIRequest, IgnoredFields):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[RequestMessage], Field(min_length=1)]
    logprobs: bool = False
    top_logprobs: TopLogprobs | None = None
    tools: list[ChatTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChatTool | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None
    prediction: dict[str, Any] | None = None  # a guess at the answer, for more speed
    reasoning_effort: str | None = None  # the model alone decides
    verbosity: Literal["medium"] | None = None

    @property
    def top(self) -> int | None:
        """See `AnswerRequest`."""
        if self.top_logprobs is not None and not self.logprobs:
            raise HttpError(400, "top_logprobs needs logprobs", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def to_prompt(self) -> Prompt:
        """Return the chat."""
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools or ()]
        usable = choose_openai_tools(tools, self.tool_choice, self.parallel_tool_calls)
        return Prompt(messages=[message.to_turn() for message in self.messages], **usable)


class CompletionRequest(OpenAIRequest):
    """``POST /v1/completions``."""

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    echo: bool = False
    logprobs: TopLogprobs | None = None
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None

    @property
    def top(self) -> int | None:
        """See `AnswerRequest`."""
        if self.echo and self.logprobs is not None:
            raise HttpError(
                400,
                "log-probabilities of a prompt's tokens aren't told: leave out echo or logprobs",
                param="logprobs",
            )
        return self.logprobs

    def to_prompts(self) -> list[Prompt]:
        """Return the texts."""
        value: Any = self.prompt
        is_single = isinstance(value, str) or (value and isinstance(value[0], int))
        several = [value] if is_single else value
        if not all(several) or not 0 < len(several) <= _MOST_CHOICES:
            text = f"1 to {_MOST_CHOICES} prompts can be given, none empty"
            raise HttpError(400, text, param="prompt")
        return [
            Prompt(field="prompt", **{"text" if isinstance(prompt, str) else "tokens": prompt})
            for prompt in several
        ]


class TokenizeRequest(Form):
    """``POST /tokenize``: a text, or a chat."""

    model: str = ""
    prompt: str | None = None
    messages: list[RequestMessage] | None = None
    tools: list[ChatTool] | None = None

    def to_prompt(self) -> Prompt:
        """Return the text or the chat."""
        if (self.prompt is None) == (self.messages is None):
            raise HttpError(400, "either prompt or messages is needed", param="prompt")
        if self.messages is None:
            return Prompt(text=self.prompt, field="prompt")
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools or ()]
        return Prompt(messages=[message.to_turn() for message in self.messages], tools=tools)


class DetokenizeRequest(Form):
    """``POST /detokenize``."""

    model: str = ""
    tokens: list[TokenId]
