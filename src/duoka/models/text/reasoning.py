"""Switch the reasoning of a model on and off: by its chat template, or by closing its block.

Templates have switches under a few names, which are found in their source. Where a template has
none, a prompt without reasoning ends with an empty block, in the template's own form:

    template   "{% if enable_thinking is false %}"    enable_thinking=False
    template   "<|assistant|><think>\n"               "<|assistant|><think>\n\n</think>\n\n"
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from jinja2 import Environment, TemplateSyntaxError, meta
from transformers import PreTrainedTokenizerBase

from duoka.base.thinking import Thinking
from duoka.errors import UsageError

from .answer_reader import Tags
from .chat_template import GENERATION, Rendering, find_template

SWITCHES = ("enable_thinking", "thinking")
EFFORT, BUDGET = "reasoning_effort", "thinking_budget"
_OFF_EFFORT = re.compile(rf"\b{EFFORT}\b[^%}}]*(['\"])none\1")
# Words in the templates of models that reason in a form of their own.
_REASONS = re.compile("reasoning|thinking")
_ALWAYS_SET = {"messages", "raise_exception", "strftime_now"}
# Around empty reasoning: after the begin tag, before the end tag, after it.
_SPACES = {"<think>": ("\n", "\n", "\n\n")}


@lru_cache(16)
def template_variables(template: str) -> frozenset[str]:
    """Return the names of the variables that a chat template reads; none if it is damaged."""
    source = GENERATION.sub("", template)
    environment = Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=False)  # noqa: S701
    try:
        return frozenset(meta.find_undeclared_variables(environment.parse(source)))
    except TemplateSyntaxError:
        return frozenset()


@dataclass(frozen=True)
class ReasoningSwitch:
    """Applies a `Thinking` to the prompts of a model; `tags` are those around its reasoning."""

    tokenizer: PreTrainedTokenizerBase
    tags: Tags | None

    def rendering(self, thinking: Thinking, *, has_tools: bool) -> Rendering:
        """Return the variables of the template, and the end of the prompt.

        Raises UsageError for a variable that the template doesn't read, and if reasoning can be
        neither switched off nor bounded, because its form is unknown.
        """
        template = find_template(self.tokenizer, has_tools=has_tools)
        names = template_variables(template)
        values = self._check_variables(thinking, names)
        is_on = False if thinking.is_off else thinking.is_on
        switches = [name for name in SWITCHES if name in names and is_on is not None]
        values |= dict.fromkeys(switches, is_on)
        has_switch = bool(switches)
        if EFFORT in names and is_on is not False and thinking.effort is not None:
            values[EFFORT] = thinking.effort
        elif is_on is False and EFFORT in names and _OFF_EFFORT.search(template):
            values[EFFORT], has_switch = "none", True
        if BUDGET in names and (is_on is False or thinking.budget_tokens is not None):
            values[BUDGET], has_switch = 0 if is_on is False else thinking.budget_tokens, True
        is_bounded = bool(thinking.budget_tokens) and BUDGET not in names
        is_unknown = self.tags is None and (is_bounded or not has_switch)
        if is_unknown and (is_bounded or is_on is False) and _REASONS.search(template):
            what = "limited" if is_bounded else "switched off"
            raise UsageError(
                f"the reasoning of this model can't be {what}: its chat template has no variable "
                "for that, and the tags around it are unknown",
                hint="let the model decide, and limit all new tokens",
            )

        def end(text: str) -> str:
            """Return the text that closes reasoning in a rendered prompt."""
            is_open = self.tags is not None and text.rstrip().endswith(self.tags.begin)
            return self.close(text) if is_on is False and (is_open or not has_switch) else ""

        return Rendering(variables=values, end=end)

    def close(self, text: str) -> str:
        """Return the text that ends the reasoning of a prompt, or writes an empty block."""
        if self.tags is None:
            return ""
        (begin, end), (before, after, gap) = self.tags, self._spaces
        _, tag, written = text.rpartition(begin)
        if not tag or written.strip():
            return f"{begin}{before}{after}{end}{gap}"
        inner = before + after
        return f"{inner.removeprefix(written) if inner.startswith(written) else after}{end}{gap}"

    def closing_ids(self, prompt: str | None = None) -> tuple[int, ...]:
        """Return the tokens that end reasoning: of a prompt, or by default within an answer."""
        assert self.tags is not None, "without tags nothing is closed"
        text = f"{self.tags.end}{self._spaces[2]}" if prompt is None else self.close(prompt)
        ids = self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=False)
        return tuple(ids)

    @cached_property
    def _spaces(self) -> tuple[str, ...]:
        """The white space around reasoning, read off an answer that the template renders."""
        assert self.tags is not None, "without tags there is nothing around"
        reasons = {"reasoning_content": "REASONS", "reasoning": "REASONS"}
        answer = {"role": "assistant", "content": "ANSWER", **reasons}
        render: Any = self.tokenizer.apply_chat_template
        try:
            text = str(render([{"role": "user", "content": "?"}, answer], tokenize=False))
        except Exception:  # a template is a program, which can raise anything
            text = ""
        begin, end = map(re.escape, self.tags)
        match = re.search(rf"{begin}(\s*)REASONS(\s*){end}(\s*)ANSWER", text)
        return match.groups() if match else _SPACES.get(self.tags.begin, ("", "", ""))

    def _check_variables(self, thinking: Thinking, names: frozenset[str]) -> dict[str, Any]:
        """Return the variables of a request; raise UsageError for one that can't be set."""
        arguments = inspect.signature(self.tokenizer.apply_chat_template).parameters
        fixed = _ALWAYS_SET | arguments.keys() | self.tokenizer.special_tokens_map.keys()
        for name in thinking.variables:
            if name not in names or name in fixed:
                settable = ", ".join(sorted(names - fixed)) or "none"
                error = UsageError(
                    f"the model's chat template has no variable {name[:80]!r}",
                    hint=f"its variables: {settable}",
                )
                error.param = "chat_template_kwargs"
                raise error
        return dict(thinking.variables)
