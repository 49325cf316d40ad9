"""Encode rows of data as token ids, with a mask of the trained tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import takewhile

from transformers import PreTrainedTokenizerBase

from duoka.errors import CheckpointError
from duoka.models.text.chat_template import common_length, text_ids
from duoka.models.text.image_prompts import ImagePrompt, images_of
from duoka.models.text.messages import ChatMessage, Role
from duoka.models.text.prompts import ChatFormat, TrainingSample

from ..settings import TrainOn
from .rows import Chat, Document, PromptCompletion

_ANSWER_TOKENS = 128


def row_samples(
    row: Chat | PromptCompletion | Document, chat: ChatFormat, seq_length: int, train_on: TrainOn
) -> Iterator[TrainingSample]:
    """Yield the samples of a row; only documents are cut to the sequence length.

    Raises UsageError if the model's chat format can't represent the row.
    """
    if isinstance(row, Chat):
        yield from chat_samples(row, chat, seq_length, train_on)
    elif isinstance(row, PromptCompletion):
        yield _completion_sample(row, chat.tokenizer)
    else:
        yield from _document_samples(row, chat.tokenizer, seq_length)


def prompt_sample(
    row: Chat | PromptCompletion | Document, chat: ChatFormat, seq_length: int
) -> tuple[TrainingSample, str]:
    """Return the prompt of a row as a sample, and the text of its last message.

    End-of-text tokens after the prompt are in the place of an answer, and marked as trained.
    """
    start, end = _boundary_tokens(chat.tokenizer)
    if isinstance(row, Chat):
        last = max(at for at, it in enumerate(row.messages) if it.role != "assistant")
        ids = chat.prompt(row.messages[: last + 1], row.tools)
        text = row.messages[last].content
    else:
        text = row.prompt if isinstance(row, PromptCompletion) else "".join(row.pieces)
        ids = [*start, *text_ids(chat.tokenizer, text)]
    room = max(1, min(_ANSWER_TOKENS, seq_length - len(ids)))
    ids = ImagePrompt([*ids, *[end] * room], getattr(ids, "num_images", 0), {})
    return TrainingSample(ids, [False] * (len(ids) - room) + [True] * room), text


def chat_samples(
    row: Chat, chat: ChatFormat, seq_length: int, train_on: TrainOn
) -> list[TrainingSample]:
    """Return the samples of a conversation: each answer follows its own generation prompt.

    Several answers share a sample if the prompt of each begins with the sample so far. Otherwise a
    new sample begins: the template drops earlier reasoning, say, or ends an answer differently. A
    sample longer than `seq_length` is returned as the last one. With images, the ids of a sample
    are an `ImagePrompt` without tensors.
    """
    # Two answers b and d share a sample if the prompt of d begins with the sample of b:
    #
    #   <user> a <assistant> {b <end>} <user> c <assistant> {d <end>}      {…} is trained
    #
    # A template that drops the reasoning x from earlier answers gives two samples:
    #
    #   <user> a <assistant> {x b <end>}
    #   <user> a <assistant> b <end> <user> c <assistant> {y d <end>}
    samples: list[TrainingSample] = []
    for at in _trained_answers(row, train_on):
        turns = row.messages[: at + 1]
        sample = chat.sample(turns, row.tools, _next_role(row.messages, at))
        if images := images_of(turns):
            sample = TrainingSample(ImagePrompt(sample.ids, len(images), {}), sample.is_trained)
        earlier = samples[-1] if samples else TrainingSample([], [])
        num_shared = len(earlier.ids)
        if sample.ids[:num_shared] == earlier.ids:
            samples = samples[:-1]
            sample = TrainingSample(
                sample.ids, [*earlier.is_trained, *sample.is_trained[num_shared:]]
            )
        samples.append(sample)
        if len(sample.ids) > seq_length:
            break
    return samples


def _trained_answers(row: Chat, train_on: TrainOn) -> list[int]:
    """Return the indices of the answers to train."""
    answers = [
        at
        for at, message in enumerate(row.messages)
        if message.role == "assistant" and at not in row.unweighted
    ]
    return answers if train_on == "all" else answers[-1:]


def truncate_chat(row: Chat, chat: ChatFormat, seq_length: int, train_on: TrainOn) -> Chat:
    """Drop turns of a conversation so that the others fit; each answer stays whole.

    If the first trained answer doesn't fit, the earliest exchanges before it are dropped, but never
    the system message. The turns after the last answer that fits are dropped. Returns the row
    unchanged if a single exchange is too long.
    """
    # If 20 tokens fit, of three exchanges of 10 tokens each, a question and an answer, remain:
    #
    #   all answers trained         q a | q a | –
    #   only the last one trained    –  | q a | q a
    answers = _trained_answers(row, train_on)
    roles = [message.role for message in row.messages]
    system = row.messages[: roles.count("system")]
    questions = [at for at in range(answers[0]) if roles[at] == "user"]
    starts = [at for at in questions if at - 1 not in questions]

    def fits(start: int, answer: int) -> bool:
        turns = system + row.messages[start : answer + 1]
        return len(chat.sample(turns, row.tools, "user").ids) <= seq_length

    # A binary search, because a sample grows with its messages.
    place = bisect_left(starts, True, key=lambda start: fits(start, answers[0]))
    if place == len(starts):
        return row
    start = starts[place]
    *_, last = takewhile(lambda answer: fits(start, answer), answers)
    return Chat(
        messages=system + row.messages[start : last + 1],
        tools=row.tools,
        unweighted=frozenset(at - start + len(system) for at in row.unweighted if at >= start),
    )


def _next_role(messages: tuple[ChatMessage, ...], at: int) -> Role:
    """Return the role of the message after index `at`.

    After the last message it is "observation" if the message calls a tool, otherwise "user".
    """
    if at + 1 < len(messages):
        return messages[at + 1].role
    calls = messages[at].calls or messages[at].metadata
    return "observation" if calls else "user"


def _completion_sample(row: PromptCompletion, tokenizer: PreTrainedTokenizerBase) -> TrainingSample:
    """Build the sample of a prompt and its completion.

    A token with text of both, across the boundary, is trained.
    """
    ids = text_ids(tokenizer, row.prompt + row.completion)
    num_shared = common_length(text_ids(tokenizer, row.prompt), ids)
    start, end = _boundary_tokens(tokenizer)
    context = len(start) + num_shared
    ids = [*start, *ids, end]
    return TrainingSample(ids, [False] * context + [True] * (len(ids) - context))


def _document_samples(
    row: Document, tokenizer: PreTrainedTokenizerBase, seq_length: int
) -> Iterator[TrainingSample]:
    """Split a document and an end-of-text token into samples of `seq_length` tokens.

    The last sample may be shorter. Start tokens aren't trained.
    """
    start, end = _boundary_tokens(tokenizer)

    def cut(ids: list[int]) -> Iterator[TrainingSample]:
        for at in range(0, len(ids), seq_length):
            part = ids[at : at + seq_length]
            yield TrainingSample(part, [number not in start for number in part])

    ids = list(start)
    for piece in row.pieces:
        ids += text_ids(tokenizer, piece)
        num_whole = len(ids) // seq_length * seq_length
        yield from cut(ids[:num_whole])
        ids = ids[num_whole:]
    if ids not in ([], start):
        yield from cut([*ids, end])


def _boundary_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], int]:
    """Return a tokenizer's tokens before a text, and its end-of-text token."""
    end = tokenizer.eos_token_id
    if not isinstance(end, int):
        raise CheckpointError("the tokenizer has no token that ends a text")
    start: list[int] = tokenizer.encode("", add_special_tokens=True)
    if start[-1:] == [end] and (len(start) > 1 or tokenizer.bos_token_id != end):
        del start[-1]  # some tokenizers append the end token
    return start, end
