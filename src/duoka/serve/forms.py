"""The base of all objects in requests, and the fields that all APIs take alike.

Absent, null and empty fields are the same. `Hints` is the table of fields without an effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from duoka.base.thinking import Thinking

from .errors import HttpError

_EMPTY: tuple[Any, ...] = ("", [], {})
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Tokens = Annotated[int, Field(ge=0, lt=2**31)]


def drop_none(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the items whose value isn't None."""
    return {name: value for name, value in values.items() if value is not None}


class Form(BaseModel):
    """Base of objects in a request: refuses unknown fields, unless they are null or empty."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, values: Any) -> Any:
        """Drop null fields, and empty fields that aren't required."""
        if not isinstance(values, Mapping):
            return values
        forms = cls.model_fields.items()
        required = {form.alias or name for name, form in forms if form.is_required()}
        return {
            name: value
            for name, value in values.items()
            if value is not None and (name in required or value not in _EMPTY)
        }


class Hints(Form):
    """The fields without an effect, which every API accepts."""

    cache_control: dict[str, Any] | None = None  # every prefix is cached
    context_management: Any = None  # conversations are neither stored nor shortened
    inference_geo: str | None = None
    metadata: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None  # would only speed up generation
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: Literal[False] | None = None
    user: str | None = None
    user_profile_id: str | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


# ── thinking ──


class ThinkingConfig(Form):
    """Anthropic's `thinking`; `display` has no effect, as reasoning is always returned."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Tokens | None = None
    display: Literal["summarized", "omitted"] | None = None


class ReasoningConfig(Form):
    """The `reasoning` of OpenAI's responses, with the switch and the limit of OpenRouter.

    The fields from `context` on have no effect.
    """

    effort: Effort | None = None
    enabled: bool | None = None
    max_tokens: Tokens | None = None
    exclude: Literal[False] | None = None
    context: str | None = None
    generate_summary: str | None = None
    mode: str | None = None
    summary: str | None = None


class TemplateVariables(Form):
    """The variables of the chat template; those for thinking are read under every template."""

    model_config = ConfigDict(extra="allow")
    enable_thinking: bool | None = None
    thinking: bool | None = None
    reasoning_effort: str | None = None
    thinking_budget: Tokens | None = None


def _read_switch(value: Any) -> Any:
    """Convert a boolean to Anthropic's `thinking`."""
    return {"type": "enabled" if value else "disabled"} if isinstance(value, bool) else value


class ThinkingFields(Form):
    """The fields by which clients choose how the model thinks; every API takes all of them."""

    chat_template_kwargs: TemplateVariables = TemplateVariables()
    enable_thinking: bool | None = None
    thinking: Annotated[ThinkingConfig | None, BeforeValidator(_read_switch)] = None
    reasoning: ReasoningConfig = ReasoningConfig()
    reasoning_effort: Effort | None = None
    thinking_budget: Tokens | None = None
    thinking_token_budget: Tokens | None = None
    thinking_budget_tokens: Tokens | None = None

    def read_thinking(self) -> Thinking:
        """Return the choice of the request; raise HttpError if fields contradict one another.

        An effort also switches thinking on, or off ("none"), unless a switch is given.
        """
        template, thinking, reasoning = self.chat_template_kwargs, self.thinking, self.reasoning
        switches = drop_none({
            "enable_thinking": self.enable_thinking,
            "thinking": thinking and thinking.type != "disabled",
            "reasoning.enabled": reasoning.enabled,
            "chat_template_kwargs.enable_thinking": template.enable_thinking,
            "chat_template_kwargs.thinking": template.thinking,
        })  # fmt: skip
        efforts = drop_none({
            "reasoning_effort": self.reasoning_effort,
            "reasoning.effort": reasoning.effort,
            "chat_template_kwargs.reasoning_effort": template.reasoning_effort,
        })  # fmt: skip
        effort = _agree(efforts)
        if effort == "none" or not switches:
            switches |= dict.fromkeys(efforts, effort != "none")
        budgets = {
            "thinking.budget_tokens": thinking and thinking.budget_tokens,
            "reasoning.max_tokens": reasoning.max_tokens,
            "thinking_budget": self.thinking_budget,
            "thinking_token_budget": self.thinking_token_budget,
            "thinking_budget_tokens": self.thinking_budget_tokens,
            "chat_template_kwargs.thinking_budget": template.thinking_budget,
        }
        return Thinking(
            is_on=_agree(switches),
            effort=effort,
            budget_tokens=_agree(drop_none(budgets)),
            variables=template.model_extra or {},
        )


def _agree(choices: Mapping[str, Any]) -> Any:
    """Return the value of all fields, None without a field; raise HttpError if values differ."""
    (name, value), *others = choices.items() or (("", None),)
    for other_name, other_value in others:
        if other_value != value:
            raise HttpError(400, f"{name} and {other_name} contradict each other", param=name)
    return value
