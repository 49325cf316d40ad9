"""Convert requests for the engine: token ids, sampling parameters, and a reader of the answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from duoka.base.prompt_settings import PromptSettings
from duoka.engine.grammar import Grammar
from duoka.engine.request import SamplingParams
from duoka.errors import UsageError
from duoka.models.text.answer_reader import AnswerReader
from duoka.models.text.image_prompts import images_of
from duoka.models.text.messages import ChatMessage
from duoka.runtime.prompt_reader import PromptReader, PromptTooLong, refuse_beyond

from .chats import ChatMessages, join_systems
from .messages import Prompt

_FORMAT = "response_format"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A request as the engine takes it: token ids, sampling parameters, and a reader for answers.

    Parameters
    ----------
    tokens : list of int
    params : SamplingParams
    kept_ids : sequence of int
        Special tokens to keep in the generated text, since they mark its parts.
    open_reader : callable
        Returns a new reader, which divides the text of one answer into parts.
    """

    tokens: list[int]
    params: SamplingParams
    kept_ids: Sequence[int]
    open_reader: Callable[[], AnswerReader]


@dataclass(eq=False)
class QuestionReader:
    """Converts requests to questions, with a model's tokenizer, chat template and defaults.

    Parameters
    ----------
    reader : PromptReader
    generation_config : mapping, optional
        The checkpoint's generation config, for recommended sampling parameters.
    context_tokens : int, optional
        The most tokens of a request, prompt and generated; None for no check of the length.
    is_thinking : bool, optional
        The choice for requests that make none; None leaves it to the chat template.

    Raises
    ------
    UsageError
        If the model's reasoning can't be switched off, but shall be.
    """

    reader: PromptReader
    generation_config: Mapping[str, Any] | None = None
    context_tokens: int | None = None
    is_thinking: bool | None = None

    def __post_init__(self) -> None:
        vocabulary = self.reader.tokenizer.get_vocab()
        self._longest_token = max(map(len, vocabulary))
        self.num_tokens = 1 + max(vocabulary.values())
        if self.is_thinking is False:
            question = ChatMessage(role="user", content="?")
            self.reader.chat.prompt([question], settings=PromptSettings(is_thinking=False))

    def read(self, prompt: Prompt, values: Mapping[str, Any] | None = None) -> Question:
        """Convert a prompt and sampling parameters, `values`, to a question.

        Raises
        ------
        UsageError
            If the model doesn't support the request, or a value is invalid. The error's `param` is
            the wrong field, if that isn't the prompt.
        """
        grammar = self._read_grammar(prompt, values or {})
        # Cheap checks come before the tokenizer; the engine checks the length in tokens.
        self._refuse_too_long(prompt)
        params_given = {name: value for name, value in (values or {}).items() if name != _FORMAT}
        question = self._read_prompt(prompt, grammar)
        if not params_given.pop("skip_special_tokens", True):
            added = self.reader.tokenizer.added_tokens_decoder.items()
            kept_ids = [number for number, token in added if token.special]
            question = replace(question, kept_ids=kept_ids)
        if prompt.is_scored:
            params_given["forced_ids"] = tuple(question.tokens[1:])
            question = replace(question, tokens=question.tokens[:1])
            for name in {"max_new_tokens", "min_new_tokens"} & params_given.keys():
                params_given[name] += len(params_given["forced_ids"])
        limits = {name: getattr(question.params, name) for name in ("grammar", "reasoning")}
        params = SamplingParams.recommended(self.generation_config, **params_given, **limits)
        return replace(question, params=params)

    def _read_grammar(self, prompt: Prompt, values: Mapping[str, Any]) -> Grammar | None:
        """Read the grammar, if one is requested, and check the token ids of `logit_bias`."""
        field = "text.format" if prompt.field == "input" else _FORMAT
        try:
            form = values.get(_FORMAT)
            grammar = None if form is None else Grammar.from_response_format(form)
            field = "logit_bias"
            refuse_beyond(values.get(field, ()), self.num_tokens)
            field = "stop_token_ids"
            refuse_beyond(values.get("stop_ids", ()), self.num_tokens)
        except UsageError as error:
            error.param = field
            raise
        return grammar

    def _refuse_too_long(self, prompt: Prompt) -> None:
        """Refuse a prompt with too many characters, whose tokenization could take minutes."""
        texts = [prompt.text or "", *(turn.content for turn in prompt.messages or ())]
        number = sum(map(len, texts))
        if self.context_tokens is not None and number > self.context_tokens * self._longest_token:
            raise PromptTooLong(
                f"the prompt has {number} characters, more than {self.context_tokens} tokens of at "
                f"most {self._longest_token} characters, for which the plan has memory"
            )

    def _read_prompt(self, prompt: Prompt, grammar: Grammar | None) -> Question:
        """Convert a prompt; the question's only sampling parameter is its grammar."""
        if prompt.messages is not None:
            return self._read_chat(prompt, grammar)
        tokens = prompt.tokens
        return Question(
            tokens=self.reader.plain(prompt.text or "") if tokens is None else list(tokens),
            params=SamplingParams(grammar=grammar),
            kept_ids=(),
            open_reader=lambda: AnswerReader(None, {}, None, keeps_space=True),
        )

    def _read_chat(self, prompt: Prompt, grammar: Grammar | None) -> Question:
        """Convert a chat; a forced tool call sets a grammar and begins the answer in the prompt.

        A format is that of the text, which a forced call doesn't have.

        An answer with a grammar has no reasoning: it is closed in the prompt.
        """
        chat, answers, tools = self.reader.chat, self.reader.chat.answers, prompt.tools
        most_images = None if chat.images is None else self.reader.workload.images
        messages = ChatMessages(answers.reasoning, most_images).read(prompt.messages or ())
        self.reader.check_images(images_of(messages))
        settings = prompt.settings
        if settings.is_thinking is None:
            settings = replace(settings, is_thinking=self.is_thinking)
        try:
            tokens = chat.prompt(messages, tools or None, settings)
        except UsageError:  # some templates take no system message but the first message
            tokens = chat.prompt(join_systems(messages), tools or None, settings)
        is_parallel, forced, budget = prompt.parallel_tool_calls, None, None
        if prompt.must_call:
            forced = answers.forced_call(tools, tokens, parallel=is_parallel)
            tokens.extend(forced.prompt_ids)
            grammar = Grammar.lark(forced.grammar)
        elif grammar is not None and tools and answers.form and grammar.kind == "json_schema":
            tokens.extend(chat.reasoning.end_ids(tokens))
            grammar = Grammar("lark", *answers.answer_or_call(grammar.text, tools))
        elif grammar is not None:
            tokens.extend(chat.content_start(tokens))
        else:
            budget = chat.reasoning.budget(settings, tokens)

        def open_reader() -> AnswerReader:
            reader = answers.reader(tools, tokens, forced=forced, is_parallel=is_parallel)
            reader.keeps_space = settings.continues
            return reader

        return Question(
            tokens=tokens,
            params=SamplingParams(grammar=grammar, reasoning=budget),
            kept_ids=answers.kept_ids,
            open_reader=open_reader,
        )
