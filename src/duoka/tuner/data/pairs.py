"""Read a row of preference data as a pair of samples, with the chosen and the rejected answer.

The forms are those of TRL, LLaMA-Factory and ms-swift:

- ``chosen`` and ``rejected``: answers to a conversation (``prompt``, ``messages`` or
  ``conversations``) or to a question, as texts or messages; or whole conversations or texts, whose
  common beginning is the prompt
- ``rejected_response`` or ``rejected_messages`` beside a row of any form with the chosen answer, or
  beside ``chosen_messages``

A row is split into two, with one answer each, which `rows` reads with its forms and options.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from duoka.errors import UsageError
from duoka.models.text.chat_template import common_length
from duoka.models.text.prompts import ChatFormat, TrainingSample

from ..settings import TrainOn
from . import rows
from .samples import row_samples

_KEYS = "chosen and rejected, or rejected_response or rejected_messages beside an answer"
_COMPLETION = "prompt", "completion"
Row = Mapping[str, Any]


def pair_samples(
    row: Row, chat: ChatFormat, seq_length: int, train_on: TrainOn
) -> list[TrainingSample]:
    """Return the samples of a row with the chosen and the rejected answer, which alone is trained.

    Raises UsageError if the row has no two answers, or the model can't represent the row.
    """
    pair = [[*row_samples(it, chat, seq_length, train_on)] for it in read_pair(row)]
    if any(len(samples) != 1 for samples in pair):
        raise UsageError("its answers depend on each other; train the last one: --train-on last")
    return [sample for [sample] in pair]


def read_pair(row: Row) -> list[rows.RowContent]:
    """Read a row as two contents; in chats only the messages that differ are trained."""
    chosen, rejected = pair = [*map(rows.read_row, _split(row))]
    if chosen == rejected:
        raise rows.RowError("with equal answers", "chosen and rejected are equal")
    if isinstance(chosen, rows.Chat) and isinstance(rejected, rows.Chat):
        num_common = common_length(chosen.messages, rejected.messages)
        parts = [it.messages[num_common:] for it in (chosen, rejected)]
        if any(not part or part[0].role != "assistant" for part in parts):
            raise UsageError("chosen and rejected are not two answers after common messages")
        common = frozenset(range(num_common))
        return [replace(it, unweighted=it.unweighted | common) for it in (chosen, rejected)]
    texts = [it for it in pair if isinstance(it, rows.PromptCompletion)]
    if len(texts) < len(pair):
        raise UsageError("chosen and rejected are not two texts, or two conversations")
    if any(it.prompt for it in texts):
        return pair
    shorter, longer = sorted((it.completion for it in texts), key=len)
    prompt = shorter[: common_length(shorter, longer)].removesuffix(" ")
    return [rows.PromptCompletion(prompt, it.completion.removeprefix(prompt)) for it in texts]


def _split(row: Row) -> tuple[Row, Row]:
    """Split a row into one with the chosen and one with the rejected answer."""
    fields = {key: value for key, value in row.items() if not rows.is_preference(key)}
    chosen = row.get("chosen") or row.get("chosen_messages")
    rejected = row.get("rejected") or row.get("rejected_response")
    with_chosen = _with_answer(fields, chosen) if chosen else fields
    if row.get("rejected_messages"):
        return with_chosen, {**_context(fields), "messages": row["rejected_messages"]}
    if not rejected:
        raise rows.RowError("without a pair", f"it has no pair of answers: {_KEYS}")
    return with_chosen, _with_answer(fields, rejected)


def _with_answer(fields: Row, answer: Any) -> Row:
    """Return the row with an answer in place of its own: a text, a message, or messages."""
    context = _context(fields)
    lists = ["prompt"] if isinstance(fields.get("prompt"), list) else []
    lists += [key for key in rows.LISTS if fields.get(key)]
    if isinstance(answer, str) and not lists:
        # If the row has an answer of its own, as in ms-swift, the form is that of the own answer.
        forms = [keys for keys in (_COMPLETION, *rows.EXCHANGES) if fields.get(keys[0])]
        forms.sort(key=lambda keys: keys[1] not in fields)
        question, key = (*forms, _COMPLETION)[0]
        return {**context, question: fields.get(question, ""), key: answer}
    if isinstance(answer, str):
        answer = {"role": "assistant", "content": answer}
    messages = [answer] if isinstance(answer, Mapping) else [*rows.list_of(answer, "an answer")]
    if messages and rows.role_of(messages[0]) in ("system", "user"):  # a whole conversation
        return {**context, "messages": messages}
    prompt = {"role": "user", "content": fields.get("prompt")}
    conversation = [*rows.list_of(fields[lists[0]], lists[0])] if lists else [prompt]
    while conversation and rows.role_of(conversation[-1]) == "assistant":
        conversation.pop()  # the row's own answer
    return {**context, "messages": [*conversation, *messages]}


def _context(fields: Row) -> Row:
    """Return the fields that aren't a question, an answer, or a conversation."""
    answered = rows.FORM_KEYS.difference(rows.ADDITIONS)
    return {key: value for key, value in fields.items() if key not in answered}
