"""The base of all objects in requests, and the fields that all APIs take alike.

Absent, null and empty fields are the same. `HINTS` is the table of fields without an effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from duoka.base.prompt_settings import PromptSettings

from .errors import HttpError

_EMPTY: tuple[Any, ...] = ("", [], {})
# Fields that every object of every API may have, without an effect unless the object defines them:
# every prefix is cached, only the model calls tools, and all tools are described in each prompt;
# templates have no place for names; reasoning is always returned; no conversation is stored.
HINTS = frozenset({
    *("allowed_callers", "annotations", "cache_control", "caller", "citations", "context"),
    *("context_management", "data", "defer_loading", "detail", "display", "eager_input_streaming"),
    *("encrypted_content", "generate_summary", "include", "include_obfuscation", "inference_geo"),
    *("input_examples", "max_tool_calls", "metadata", "mode", "name", "output_schema", "parsed"),
    *("personality", "prediction", "prompt_cache_breakpoint", "prompt_cache_key"),
    *("prompt_cache_options", "prompt_cache_retention", "reasoning_details", "safety_identifier"),
    *("service_tier", "speed", "summary", "thread", "user", "user_profile_id", "verbosity"),
})  # fmt: skip
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Tokens = Annotated[int, Field(ge=0, lt=2**31)]
# The fields for one choice, under the names of different clients and servers.
_SWITCHES = (
    *("enable_thinking", "thinking.is_on", "reasoning.enabled"),
    *("chat_template_kwargs.enable_thinking", "chat_template_kwargs.thinking"),
)
_EFFORTS = ("reasoning_effort", "reasoning.effort", "chat_template_kwargs.reasoning_effort")
_BUDGETS = (
    *("thinking.budget_tokens", "reasoning.max_tokens", "chat_template_kwargs.thinking_budget"),
    *("thinking_budget", "thinking_token_budget", "thinking_budget_tokens"),
)


def drop_none(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the items whose value isn't None."""
    return {name: value for name, value in values.items() if value is not None}


class Form(BaseModel):
    """Base of objects in a request: refuses unknown fields, unless null, empty or a hint."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, values: Any) -> Any:
        """Drop null fields, hints, and empty fields that aren't required."""
        if not isinstance(values, Mapping):
            return values
        forms = cls.model_fields.items()
        hints = HINTS if cls.model_config.get("extra") == "forbid" else ()
        fields = {form.alias or name: form.is_required() for name, form in forms}
        return {
            name: value
            for name, value in values.items()
            if value is not None
            and (name in fields or name not in hints)
            and (fields.get(name) or value not in _EMPTY)
        }


class ThinkingConfig(Form):
    """Anthropic's `thinking`."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"] | None = None
    budget_tokens: Tokens | None = None

    @property
    def is_on(self) -> bool | None:
        """True if the model shall think; None without a choice."""
        return None if self.type is None else self.type != "disabled"


class ReasoningConfig(Form):
    """The `reasoning` of OpenAI's responses, with the switch and the limit of OpenRouter."""

    effort: Effort | None = None
    enabled: bool | None = None
    max_tokens: Tokens | None = None
    exclude: Literal[False] | None = None


class TemplateVariables(Form):
    """Variables of the chat template; these have their effect even if the template reads others."""

    model_config = ConfigDict(extra="allow")
    enable_thinking: bool | None = None
    thinking: bool | None = None
    reasoning_effort: str | None = None
    thinking_budget: Tokens | None = None


class PromptFields(Form):
    """The fields for the settings of a prompt, under the names of all clients, in every API."""

    chat_template_kwargs: TemplateVariables = TemplateVariables()
    enable_thinking: bool | None = None
    thinking: ThinkingConfig = ThinkingConfig()
    reasoning: ReasoningConfig = ReasoningConfig()
    reasoning_effort: Effort | None = None
    thinking_budget: Tokens | None = None
    thinking_token_budget: Tokens | None = None
    thinking_budget_tokens: Tokens | None = None
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None

    def prompt_settings(self) -> PromptSettings:
        """Return the settings of the prompt; raise HttpError if fields contradict one another.

        An effort also switches thinking on, or off ("none"), unless a switch is given.
        """
        is_on, effort = self._read_choice(_SWITCHES), self._read_choice(_EFFORTS)
        if self.add_generation_prompt is self.continue_final_message:
            text = "add_generation_prompt must be the opposite of continue_final_message"
            raise HttpError(400, text, param="add_generation_prompt")
        if effort == "none" and is_on:
            raise HttpError(400, "reasoning effort none contradicts thinking", param="reasoning")
        return PromptSettings(
            is_thinking=effort != "none" if effort and is_on is None else is_on,
            effort=effort,
            budget_tokens=self._read_choice(_BUDGETS),
            variables=self.chat_template_kwargs.model_extra or {},
            continues=self.continue_final_message,
        )

    def _read_choice(self, paths: Iterable[str]) -> Any:
        """Return the value of these fields, or None; raise HttpError if they differ."""
        values = [(path.removesuffix(".is_on"), attrgetter(path)(self)) for path in paths]
        choices = [(path, value) for path, value in values if value is not None]
        for path, value in choices:
            if value != choices[0][1]:
                raise HttpError(400, f"{path} contradicts {choices[0][0]}", param=path)
        return choices[0][1] if choices else None
