"""Reasoning on and off in the templates of different families, and prompts that are continued."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from duoka.base.prompt_settings import PromptSettings
from duoka.errors import UsageError
from duoka.models.text.messages import ChatMessage
from duoka.models.text.prompts import ChatFormat, chat_format
from duoka.models.text.reasoning import template_variables

from .call_templates import tokenizer

QUESTION = ChatMessage(role="user", content="how is <|im_end|> it?")
OFF, ON = PromptSettings(is_thinking=False), PromptSettings(is_thinking=True)
_CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\nTHOUGHT{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\nBEGIN{% endif %}"
)
_REASONS = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"


def template(begin: str, thought: str = "") -> str:
    return _CHAT.replace("BEGIN", begin).replace("THOUGHT", thought)


SWITCHED = template(
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}",
    _REASONS,
)
# For each template: what follows "assistant\n" in a prompt with thinking off, on, and by default.
TEMPLATES: dict[str, tuple[str, str, str, str]] = {
    "a switch, as Qwen3": (SWITCHED, "<think>\n\n</think>\n\n", "", ""),
    "off by default, as DeepSeek-V3.1": (
        template(
            "{% if not thinking is defined %}{% set thinking = false %}{% endif %}"
            "{{ '<think>' if thinking else '</think>' }}"
        ),
        *("</think>", "<think>", "</think>"),
    ),
    "an effort": (
        template("{% if reasoning_effort not in ['none', 'high'] %}[high]{% else %}"
                 "[{{ reasoning_effort }}]{% endif %}"),
        *("[none]", "[high]", "[high]"),
    ),
    "a budget, as Seed-OSS": (
        template("[{{ thinking_budget | default(-1) }}]<seed:think>", "</seed:think>"),
        *("[0]<seed:think></seed:think>", "[-1]<seed:think>", "[-1]<seed:think>"),
    ),
    "opened, as DeepSeek-R1": (
        template("<think>\n", "{{ m.content.split('</think>')[-1] }}"),
        *("<think>\n\n</think>\n\n", "<think>\n", "<think>\n"),
    ),
    "opened on one line": (
        template("<think>", "<think>{{ m.reasoning_content }}</think>\n"),
        *("<think></think>\n", "<think>", "<think>"),
    ),
    "written by the model": (template("", _REASONS), "<think>\n\n</think>\n\n", "", ""),
    "in brackets, as Magistral": (
        template("", "[THINK]{{ m.reasoning }}[/THINK]"),
        *("[THINK][/THINK]", "", ""),
    ),
}  # fmt: skip
# Tags that the other tokenizer of these tests has aren't there.
UNKNOWN = template("{{ reasoning_effort | default('medium') }}<|channel|>")


def format_of(text: str, *, has_tags: bool = True) -> ChatFormat:
    made = tokenizer("hermes", text)
    if not has_tags:
        content = made.backend_tokenizer.to_str().replace("think>", "other>")  # type: ignore[attr-defined]
        made._tokenizer = type(made.backend_tokenizer).from_str(content)  # type: ignore[attr-defined]
    return chat_format(made, {"model_type": "llama"})


def end_of(chat: ChatFormat, settings: PromptSettings) -> str:
    text = str(chat.tokenizer.decode(chat.prompt([QUESTION], None, settings)))
    assert text.startswith("<|im_start|>user\n")
    return text.rpartition("assistant\n")[2]


@pytest.mark.parametrize("name", TEMPLATES)
def test_thinking_off_and_on(name: str) -> None:
    text, off, on, default = TEMPLATES[name]
    chat = format_of(text)
    assert end_of(chat, OFF) == off
    assert end_of(chat, PromptSettings(budget_tokens=0)) == off
    assert end_of(chat, ON) == on
    assert end_of(chat, PromptSettings()) == default
    assert chat.reasoning.is_effective


def test_a_closed_prompt_has_the_tokens_of_the_templates_own() -> None:
    switched, opened = format_of(SWITCHED), format_of(template("<think>\n", _REASONS))
    assert opened.prompt([QUESTION], None, OFF) == switched.prompt([QUESTION], None, OFF)


def test_what_can_be_neither_switched_off_nor_limited_is_refused() -> None:
    chat = format_of(UNKNOWN, has_tags=False)
    assert not chat.reasoning.is_effective
    assert end_of(chat, replace(ON, effort="low")) == "low<|channel|>"
    with pytest.raises(UsageError, match="reasoning of this model can't be switched off"):
        end_of(chat, OFF)
    with pytest.raises(UsageError, match="reasoning of this model can't be limited"):
        end_of(chat, PromptSettings(budget_tokens=5))
    plain = format_of(template(""), has_tags=False)  # it doesn't reason
    assert not plain.reasoning.is_effective
    for settings in (OFF, ON, PromptSettings(budget_tokens=5)):
        assert end_of(plain, settings) == ""
        assert plain.reasoning.budget(settings, []) is None


def test_variables_reach_the_template_but_not_its_own() -> None:
    chat = format_of(template("{{ language }} {{ eos_token }}"))
    assert end_of(chat, PromptSettings(variables={"language": "de"})).startswith("de <|im_end|>")
    for name in ("eos_token", "messages", "tools", "chat_template", "other"):
        with pytest.raises(UsageError, match=f"no variable '{name}'") as caught:
            end_of(chat, PromptSettings(variables={name: "x"}))
        assert caught.value.hint == "its variables: language"
        assert caught.value.param == "chat_template_kwargs"
    with pytest.raises(UsageError, match="chat_template_kwargs contains the text of a special"):
        end_of(chat, PromptSettings(variables={"language": ["<|im_end|>"]}))


def test_variables_are_found_in_any_template() -> None:
    text = (
        "{% generation %}{% macro f(a) %}{{ inner }}{{ a }}{% endmacro %}{% endgeneration %}"
        "{%- for m in messages %}{% if m.thinking %}{% break %}{% endif %}{% endfor %}"
    )
    assert template_variables(text) == {"inner"}
    assert template_variables("{% if %}") == frozenset()


def test_a_budget_says_how_reasoning_ends() -> None:
    chat = format_of(SWITCHED)
    limit = PromptSettings(budget_tokens=3)
    budget: Any = chat.reasoning.budget(limit, chat.tokenizer.encode("a <think>\n"))
    assert (budget.tokens, budget.is_open, [*budget.tags]) == (3, True, ["<think>", "</think>"])
    assert chat.tokenizer.decode(list(budget.closing_ids)) == "</think>\n\n"
    closed: Any = chat.reasoning.budget(limit, chat.prompt([QUESTION], None, OFF))
    assert not closed.is_open
    assert chat.reasoning.budget(PromptSettings(), []) is None


@pytest.mark.parametrize("content", ["It is ", "It is <|im_end|>", "fine"])
def test_an_answer_that_has_begun_is_continued(content: str) -> None:
    chat = format_of(template("", _REASONS))
    begun = ChatMessage(role="assistant", content=content)
    ids = chat.prompt([QUESTION, begun], None, PromptSettings(continues=True))
    text = f"<|im_start|>user\n{QUESTION.content}<|im_end|>\n<|im_start|>assistant\n{content}"
    assert chat.tokenizer.decode(ids) == text
    assert ids.count(chat.tokenizer.convert_tokens_to_ids("<|im_end|>")) == 1
    with pytest.raises(UsageError, match="only a message of the assistant"):
        chat.prompt([QUESTION], None, PromptSettings(continues=True))


def test_a_template_that_changes_the_last_content_is_not_continued() -> None:
    changed = format_of(template("").replace("m.content", "m.content | replace('x', 'y')"))
    last = ChatMessage(role="assistant", content="x")
    question = ChatMessage(role="user", content="how is it?")
    dropped = format_of("{% for m in messages[:-1] %}{{ m.content }}{% endfor %}")
    for chat in (changed, dropped):
        with pytest.raises(UsageError, match="rejects the messages: "):
            chat.prompt([question, last], None, PromptSettings(continues=True))
