"""Training of the demo's model, until every answer is memorised.

Dialogues are built with the prompt format of the chat, so that the model learns exactly the tokens
of the demo's questions.
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from duoka.models.text.chat_template import text_ids
from duoka.models.text.messages import ChatMessage
from duoka.models.text.prompts import ChatFormat

_SEED = 20
_BATCH_SIZE = 8
_PEAK_RATE = 5e-3
_WARMUP_STEPS = 10
_DECAY_STEPS = 200
_FINAL_RATE = 0.1  # of the peak
_CHECK_EVERY = 10
_MAX_STEPS = 500
# The logit of every right token must exceed all other logits by this margin. Other kernels or 16
# bit change logits far less, so the answers are the same on every machine.
_MIN_MARGIN = 1.0
_IGNORED = -100

Report = Callable[[int, float], None]
"""Called after each step with its number and loss."""


@dataclass(frozen=True, slots=True)
class Dialogue:
    """Token ids of a dialogue; `targets` are the ids to learn, -100 for all other positions."""

    ids: list[int]
    targets: list[int]


def write_dialogue(
    pairs: Sequence[Pair], tokenizer: PreTrainedTokenizerBase, chat: ChatFormat
) -> Dialogue:
    """Build the dialogue of several questions and answers; only answers are targets."""
    ids: list[int] = []
    targets: list[int] = []
    messages: list[ChatMessage] = []
    for pair in pairs:
        messages.append(ChatMessage(role="user", content=pair.question))
        question = chat.prompt(messages)[len(ids) :]
        # The role token of the next question ends an answer, so it is a target as well.
        targets += [question[0] if ids else _IGNORED] + [_IGNORED] * (len(question) - 1)
        # As in the published model, an answer has an empty line of metadata before its content.
        answer = [*text_ids(tokenizer, "\n"), *text_ids(tokenizer, pair.answer)]
        ids += [*question, *answer]
        targets += answer
        messages.append(ChatMessage(role="assistant", content=pair.answer))
    end = chat.prompt([*messages, ChatMessage(role="user", content="")])[len(ids)]
    return Dialogue([*ids, end], [*targets, end])


def train(
    model: nn.Module,
    pairs: Sequence[Pair],
    write: Callable[[Sequence[Pair]], Dialogue],
    report: Report,
) -> int:
    """Train until every answer is memorised; return the number of steps."""
    single_dialogues = [write([pair]) for pair in pairs]
    # Not torch's Muon, which needs fewer steps: it computes in bfloat16, and without AVX-512 a CPU
    # multiplies bfloat16 matrices some thirty times slower than float32 ones.
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    for step, dialogues in enumerate(_batches(pairs, write), start=1):
        for group in optimizer.param_groups:
            group["lr"] = _PEAK_RATE * _rate_factor(step)
        ids, targets = pad(dialogues)
        loss: Tensor = model(input_ids=ids, labels=targets).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        report(step, loss.item())
        if step >= _DECAY_STEPS // 2 and step % _CHECK_EVERY == 0:
            margin = min(min(measure(model, batch)) for batch in _cut(single_dialogues))
            if margin >= _MIN_MARGIN or step >= _MAX_STEPS:
                return step
    raise AssertionError("the batches never end")


def _batches(
    pairs: Sequence[Pair], write: Callable[[Sequence[Pair]], Dialogue]
) -> Iterator[Sequence[Dialogue]]:
    """Yield batches of dialogues without end; a third of the dialogues has two questions."""
    rng = random.Random(_SEED)
    while True:
        remaining = list(pairs)
        rng.shuffle(remaining)
        dialogues = []
        while remaining:
            rounds = rng.choice((1, 1, 2))
            dialogues.append(write(remaining[:rounds]))
            del remaining[:rounds]
        yield from _cut(dialogues)


@torch.no_grad()
def measure(model: nn.Module, dialogues: Sequence[Dialogue]) -> list[float]:
    """Return each dialogue's smallest margin: right logit minus best other; negative if wrong."""
    ids, targets = pad(dialogues)
    output: Any = model(input_ids=ids)
    logits, right_ids = output.logits[:, :-1], targets[:, 1:, None]  # [batch, tokens, …]
    is_learnt = right_ids != _IGNORED
    right_ids = right_ids.clamp(min=0)
    right = logits.gather(2, right_ids)
    best_other = logits.scatter(2, right_ids, -torch.inf).amax(2, keepdim=True)
    margins: list[float] = (right - best_other).where(is_learnt, torch.inf).amin((1, 2)).tolist()
    return margins


def _cut(dialogues: Sequence[Dialogue]) -> Iterator[Sequence[Dialogue]]:
    """Split dialogues into batches; the last batch may be smaller."""
    for start in range(0, len(dialogues), _BATCH_SIZE):
        yield dialogues[start : start + _BATCH_SIZE]


def pad(dialogues: Sequence[Dialogue]) -> tuple[Tensor, Tensor]:
    """Pad ids and targets to [batch, tokens] on the right; causal attention needs no mask there."""
    ids = [torch.tensor(dialogue.ids) for dialogue in dialogues]
    targets = [torch.tensor(dialogue.targets) for dialogue in dialogues]
    return (
        pad_sequence(ids, batch_first=True),
        pad_sequence(targets, batch_first=True, padding_value=_IGNORED),
    )


def _rate_factor(step: int) -> float:
    """Return the factor of the peak rate: linear warm-up and decay, then `_FINAL_RATE`."""
    return max(min(step / _WARMUP_STEPS, 1 - step / _DECAY_STEPS), _FINAL_RATE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A question and its answer; `ask` is True for the demo's own questions."""

    question: str
    answer: str
    ask: bool = False


def load_pairs() -> tuple[Pair, ...]:
    """Read ``questions.toml``."""
    text = resources.files(__package__).joinpath("questions.toml").read_text(encoding="utf-8")
    return tuple(Pair(**entry) for entry in tomllib.loads(text)["pair"])
