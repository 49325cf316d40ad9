r"""Switch the reasoning of a model on and off: by its chat template, or by closing its block.

Templates have switches under a few names, which are found in their source. Where a template has
none, a prompt without reasoning ends with an empty block, in the template's own form:

    template   "{% if enable_thinking is false %}"    enable_thinking=False
    template   "<|assistant|><think>\n"               "<|assistant|><think>\n\n</think>\n\n"
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple

from jinja2 import Environment, TemplateSyntaxError, meta
from transformers import PreTrainedTokenizerBase

from duoka.base.prompt_settings import PromptSettings
from duoka.errors import DuokaError, UsageError

from .answer_format import NUM_LAST
from .answer_reader import Tags
from .chat_template import GENERATION, Rendering, find_template, trusted_ids

_SWITCHES, _EFFORT, _BUDGET = ("enable_thinking", "thinking"), "reasoning_effort", "thinking_budget"
_OFF_EFFORT = re.compile(rf"\b{_EFFORT}\b[^%}}]*(['\"])none\1")
# Words in the templates of models that reason in a form of their own.
_REASONS = re.compile("reasoning|thinking")
_ENVIRONMENT = Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=False)
_NOT_SETTABLE = {"messages", "raise_exception", "strftime_now"}
# White space around empty reasoning, where the template doesn't show it: after the begin tag,
# before the end tag, and after it.
_SPACES = {"<think>": ("\n", "\n", "\n\n")}


@lru_cache(16)
def template_variables(template: str) -> frozenset[str]:
    """Return the names of the variables that a chat template reads; none if it is damaged."""
    try:
        tree = _ENVIRONMENT.parse(GENERATION.sub("", template))
        return frozenset(meta.find_undeclared_variables(tree)) - _NOT_SETTABLE
    except TemplateSyntaxError:
        return frozenset()


class ReasoningBudget(NamedTuple):
    """The most tokens of reasoning in an answer, at least 1, and how reasoning begins and ends.

    The texts of `tags` must be kept in the answer (`kept_ids` of `Engine.submit`). `closing_ids`
    are the tokens that end reasoning; `is_open` is True if the answer begins within reasoning.
    """

    tokens: int
    tags: Tags
    closing_ids: tuple[int, ...]
    is_open: bool


@dataclass(frozen=True)
class ReasoningSwitch:
    """Applies the settings of prompts to a model; `tags` are those around its reasoning."""

    tokenizer: PreTrainedTokenizerBase
    tags: Tags | None

    def rendering(self, settings: PromptSettings, *, has_tools: bool) -> Rendering:
        """Return the variables of the template, and the end of the prompt.

        Raises UsageError for a variable that the template doesn't read, and if reasoning can be
        neither switched off nor limited, because its form is unknown.
        """
        template = find_template(self.tokenizer, has_tools=has_tools)
        names = template_variables(template)
        self._check_variables(settings, names)
        is_on = False if settings.budget_tokens == 0 else settings.is_thinking
        effort, budget = settings.effort, settings.budget_tokens
        if is_on is False:
            effort, budget = "none" if _OFF_EFFORT.search(template) else None, 0
        values = {**dict.fromkeys(_SWITCHES, is_on), _EFFORT: effort, _BUDGET: budget}
        switches = {name: values[name] for name in names & {*values} if values[name] is not None}
        is_limited = bool(budget)
        needs_tags = _BUDGET not in switches if is_limited else is_on is False and not switches
        if needs_tags and self.tags is None and _REASONS.search(template):
            what = "limited" if is_limited else "switched off"
            raise UsageError(
                f"the reasoning of this model can't be {what}: its chat template has no variable "
                "for that, and the tags around it are unknown",
                hint="let the model decide, and limit all new tokens",
            )
        closes = is_on is False and not settings.continues
        return Rendering(
            continues=settings.continues,
            variables={**settings.variables, **switches},
            end=partial(self._close, adds_block=not switches) if closes else lambda _: "",
        )

    @cached_property
    def is_effective(self) -> bool:
        """True if prompts without thinking differ from prompts with it."""
        try:
            off = self.rendering(PromptSettings(is_thinking=False), has_tools=False)
        except DuokaError:
            return False
        return self.tags is not None or bool(off.variables)

    def end_ids(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens that end the reasoning that a prompt has begun, if it has."""
        text = self.tokenizer.decode(list(prompt[-NUM_LAST:]), skip_special_tokens=False)
        return trusted_ids(self.tokenizer, self._close(str(text), adds_block=False))

    def budget(self, settings: PromptSettings, prompt: Sequence[int]) -> ReasoningBudget | None:
        """Return the limit of the reasoning in the answer to a prompt; None without one."""
        if not settings.budget_tokens or self.tags is None:
            return None
        closing_ids = trusted_ids(self.tokenizer, self.tags.end + self._spaces[2])
        is_open = bool(self.end_ids(prompt))
        return ReasoningBudget(settings.budget_tokens, self.tags, closing_ids, is_open)

    def _close(self, text: str, *, adds_block: bool) -> str:
        """Return the text that ends the reasoning of a prompt; an empty block if none has begun."""
        if self.tags is None:
            return ""
        (begin, end), (before, after, gap) = self.tags, self._spaces
        _, tag, written = text.rpartition(begin)
        if not tag or written.strip():
            return f"{begin}{before}{after}{end}{gap}" if adds_block else ""
        inner = before + after
        return f"{inner.removeprefix(written) if inner.startswith(written) else after}{end}{gap}"

    @cached_property
    def _spaces(self) -> tuple[str, ...]:
        """The white space around reasoning, read off an answer that the template renders."""
        assert self.tags is not None, "without tags there is nothing around"
        answer = {"role": "assistant", "content": "ANSWER"}
        answer |= dict.fromkeys(("reasoning_content", "reasoning"), "REASONS")
        render: Any = self.tokenizer.apply_chat_template
        try:
            text = str(render([{"role": "user", "content": "?"}, answer], tokenize=False))
        except Exception:  # a template is a program, which can raise anything
            text = ""
        begin, end = map(re.escape, self.tags)
        match = re.search(rf"{begin}(\s*)REASONS(\s*){end}(\s*)ANSWER", text)
        return match.groups() if match else _SPACES.get(self.tags.begin, ("", "", ""))

    def _check_variables(self, settings: PromptSettings, names: frozenset[str]) -> None:
        """Raise UsageError for variables that the template doesn't read, or that are fixed."""
        parameters = inspect.signature(self.tokenizer.apply_chat_template).parameters
        settable = names - parameters.keys() - self.tokenizer.special_tokens_map.keys()
        for name in settings.variables.keys() - settable:
            error = UsageError(
                f"the model's chat template has no variable {name[:80]!r}",
                hint=f"its variables: {', '.join(sorted(settable)) or 'none'}",
            )
            error.param = "chat_template_kwargs"
            raise error
