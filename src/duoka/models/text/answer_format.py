"""The form of a model's answers: its tool calls, and the tags around its reasoning.

Both are recognized by the chat template and the special tokens of the model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from duoka.errors import UsageError

from .answer_reader import AnswerReader, CallForm, Tags
from .call_forms import LineForm, MistralForm, ObjectForm, PairForm, ParameterForm, TaggedForm
from .call_grammars import JSON_OPTIONS, ForcedCall, force_call
from .messages import TOOL_NAME, Tool, tool_function

_TAGS = [Tags(f"<{name}>", f"</{name}>") for name in ("think", "seed:think")]
_TAGS.append(Tags("[THINK]", "[/THINK]"))
NUM_LAST = 8  # number of last tokens of a prompt that are searched for the begin of reasoning
# A text in the template, and the form of calls that it indicates; the first match counts.
_FORMS: tuple[tuple[str, CallForm], ...] = (
    ("<arg_key>", PairForm()),
    ("<function=", ParameterForm()),
    ("[ARGS]", MistralForm(has_names=True)),
    ("[TOOL_CALLS]", MistralForm()),
    ("<tool_call>", TaggedForm()),
    ("<|python_tag|>", ObjectForm()),
    ("<|observation|>", LineForm("json")),
)


@dataclass(frozen=True)
class AnswerFormat:
    """The form of a model's answers.

    `form` is None if the model has no known form of tool calls, and `reasoning` is None if it has
    no known tags of reasoning.
    """

    tokenizer: PreTrainedTokenizerBase
    form: CallForm | None
    reasoning: Tags | None

    @classmethod
    def of_template(cls, tokenizer: PreTrainedTokenizerBase) -> AnswerFormat:
        """Recognize the form by the tokenizer's template for tools, and by its added tokens."""
        try:
            template = tokenizer.get_chat_template(tools=[{}])
        except ValueError:  # the tokenizer has no template
            return cls(tokenizer, None, None)
        added = tokenizer.get_added_vocab()
        form = next((form for mark, form in _FORMS if mark in template), None)
        if form is None and "<|python_tag|>" in added and '"parameters"' in template:
            form = ObjectForm()
        tags = [pair for pair in _TAGS if pair.end in template]
        tags += [pair for pair in _TAGS if {*pair} <= added.keys()]
        return cls(tokenizer, form, next(iter(tags), None))

    @property
    def kept_ids(self) -> tuple[int, ...]:
        """The ids of special tokens around calls and reasoning, to keep when decoding answers."""
        marks, added = {*self._marks()}, self.tokenizer.added_tokens_decoder.items()
        return tuple(sorted(n for n, token in added if token.special and token.content in marks))

    def reader(
        self,
        tools: Sequence[Tool] | None = None,
        prompt: Sequence[int] = (),
        *,
        forced: ForcedCall | None = None,
        is_parallel: bool = True,
    ) -> AnswerReader:
        """Return a reader of the answer to a prompt.

        Parameters
        ----------
        tools : sequence of Tool, optional
            Tools that may be called; without tools nothing is parsed as a call.
        prompt : sequence of int
            The prompt's ids; they tell if the answer begins within reasoning.
        forced : ForcedCall, optional
            The call that the prompt has begun; the answer then has no content.
        is_parallel : bool
            Return all calls, not only the first one.
        """
        form = self.form
        if forced is not None and form is None:
            form = ObjectForm(markers=())
        reader = AnswerReader(
            form,
            tool_schemas(tools or ()),
            self.reasoning,
            is_reasoning=forced is None and self.begins_within_reasoning(prompt),
            is_forced=forced is not None,
            is_parallel=is_parallel,
        )
        parts = reader.feed(forced.text) if forced is not None else []
        assert not parts, "the beginning of a call is no part"
        return reader

    def begins_within_reasoning(self, prompt: Sequence[int]) -> bool:
        """Return True if the answer to a prompt begins within reasoning."""
        if self.reasoning is None:
            return False
        end = str(self.tokenizer.decode(list(prompt[-NUM_LAST:]), skip_special_tokens=False))
        return end.rstrip().endswith(self.reasoning.begin)

    def forced_call(
        self, tools: Sequence[Tool], prompt: Sequence[int] = (), *, parallel: bool = True
    ) -> ForcedCall:
        """Return prompt tokens and a grammar that force the answer to be a call of a given tool.

        With `parallel` the answer may have several calls, if the model's form allows them. Raises
        UsageError if no grammar can express the form.
        """
        tool_schemas(tools)
        before = ""
        if self.begins_within_reasoning(prompt):
            assert self.reasoning is not None, "it has begun"
            before = f"{self.reasoning.end}\n\n"
        return force_call(self.form, tools, self.tokenizer, before=before, parallel=parallel)

    def answer_or_call(self, schema: str, tools: Sequence[Tool]) -> tuple[str, tuple[int, ...]]:
        """Return the grammar of an answer that matches a JSON schema or is a call, in Lark's form.

        Only the beginning of a call is constrained. Also return the special tokens of the grammar.
        """
        assert self.form is not None, "without a form there are no calls"
        added = self.tokenizer.get_added_vocab()
        marks = {*self.form.markers, *self.form.inner_marks} & added.keys()
        rest = " | ".join(["TEXT", *map(json.dumps, sorted(marks))])
        rules = " | ".join(self.form.alternatives(tool_schemas(tools))) + f"\nrest: ({rest})*"
        for mark in marks:
            rules = rules.replace(json.dumps(mark), f"<[{added[mark]}]>")
        line = r'"\n" ' if isinstance(self.form, LineForm) else ""  # its empty line of metadata
        answer = f"{line}%json {json.dumps({**json.loads(schema), 'x-guidance': JSON_OPTIONS})}"
        grammar = f"start: {answer} | {rules}\nTEXT: /(.|\\n)+/"
        return grammar, tuple(sorted(added[mark] for mark in marks))

    def _marks(self) -> Iterator[str]:
        """Yield all texts around calls and reasoning."""
        yield from self.reasoning or ()
        if self.form is not None:
            yield from (*self.form.markers, *self.form.inner_marks)
            yield self.form.turn


def tool_schemas(tools: Sequence[Tool]) -> dict[str, Mapping[str, Any]]:
    """Return the parameters of each tool by name; raise UsageError for invalid tools."""
    schemas: dict[str, Mapping[str, Any]] = {}
    for function in map(tool_function, tools):
        name = function["name"]
        if not TOOL_NAME.fullmatch(name):
            hint = "use at most 128 letters, digits, _, - and ., not starting with ."
            raise UsageError(f"{name[:80]!r} is not a valid tool name", hint=hint)
        schemas[name] = function.get("parameters") or {}
    return schemas
