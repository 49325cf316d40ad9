"""Training of the demo's model: until it knows every answer by heart.

Dialogues are built by the prompt format that the model is talked to with later, so what is
learnt is what is asked.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from duoka.models.messages import Message
from duoka.models.prompts import ChatFormat

from .questions import Pair

_BATCH = 8
_PEAK_RATE = 1e-3
_WARMUP_STEPS = 10
_DECAY_STEPS = 80
_LOWEST_RATE = 0.15  # of the peak
_CHECK_EVERY = 10
_MAX_STEPS = 500
# Every right token must lead the next one by this much in the logits: far more than what
# other kernels or 16 bit change, so that the answers are the same on every machine.
_MARGIN = 1.0
_IGNORED = -100

Report = Callable[[int, float], None]
"""Called after each step with its number and loss."""


@dataclass(frozen=True, slots=True)
class Dialogue:
    """Token ids of a dialogue; the target is -100 where nothing is to be learnt."""

    ids: list[int]
    targets: list[int]


def write_dialogue(
    pairs: Sequence[Pair], tokenizer: PreTrainedTokenizerBase, chat: ChatFormat
) -> Dialogue:
    """Build the ids of questions and answers that follow one another."""
    ids: list[int] = []
    targets: list[int] = []
    said: list[Message] = []
    for pair in pairs:
        said.append(Message(role="user", content=pair.question))
        asked = chat.prompt(said)[len(ids) :]
        # An answer ends where the user speaks again: in a role token, which is asked[0] there.
        targets += [asked[0] if ids else _IGNORED] + [_IGNORED] * (len(asked) - 1)
        # As in the published model: an empty line of metadata, then the content.
        answer = [*_encode(tokenizer, "\n"), *_encode(tokenizer, pair.answer)]
        ids += [*asked, *answer]
        targets += answer
        said.append(Message(role="assistant", content=pair.answer))
    end = chat.prompt([*said, Message(role="user", content="")])[len(ids)]
    return Dialogue([*ids, end], [*targets, end])


def train(
    model: nn.Module,
    alone: Sequence[Dialogue],
    mixed: Callable[[], Sequence[Dialogue]],
    report: Report,
) -> int:
    """Train until every answer is known.

    Parameters
    ----------
    model : torch.nn.Module
        A causal language model of transformers.
    alone : sequence of Dialogue
        What must be known in the end: each question on its own.
    mixed : callable
        Makes the dialogues of one epoch.
    report : callable

    Returns
    -------
    int
        Steps that were needed.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=_PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    for step, dialogues in enumerate(_batches(mixed), start=1):
        rate = _PEAK_RATE * _schedule(step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        ids, targets = pad(dialogues)
        loss: Tensor = model(input_ids=ids, labels=targets).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        report(step, loss.item())
        is_time = step >= _DECAY_STEPS // 2 and step % _CHECK_EVERY == 0
        if step == _MAX_STEPS or (is_time and smallest_margin(model, alone) >= _MARGIN):
            return step
    raise AssertionError("the batches never end")


@torch.no_grad()
def smallest_margin(model: nn.Module, dialogues: Sequence[Dialogue]) -> float:
    """By how much the right token leads at the least; negative where another one leads."""
    smallest = float("inf")
    for start in range(0, len(dialogues), _BATCH):
        ids, targets = pad(dialogues[start : start + _BATCH])
        output: Any = model(input_ids=ids)
        logits, wanted = output.logits[:, :-1], targets[:, 1:]
        learnt = wanted != _IGNORED
        logits, wanted = (
            logits[learnt],
            wanted[learnt][:, None],
        )  # [tokens, vocabulary], [tokens, 1]
        right = logits.gather(1, wanted)
        best_other = logits.scatter(1, wanted, -torch.inf).amax(1, keepdim=True)
        smallest = min(smallest, (right - best_other).min().item())
    return smallest


def pad(dialogues: Sequence[Dialogue]) -> tuple[Tensor, Tensor]:
    """Ids and targets, [batch, tokens]. Padding on the right needs no mask in a causal model."""
    longest = max(len(dialogue.ids) for dialogue in dialogues)
    gaps = [longest - len(dialogue.ids) for dialogue in dialogues]
    ids = [d.ids + [0] * gap for d, gap in zip(dialogues, gaps, strict=True)]
    targets = [d.targets + [_IGNORED] * gap for d, gap in zip(dialogues, gaps, strict=True)]
    return torch.tensor(ids), torch.tensor(targets)


def mix(
    pairs: Sequence[Pair], write: Callable[[Sequence[Pair]], Dialogue], rng: random.Random
) -> list[Dialogue]:
    """Deal all pairs once into dialogues of one round, and some of two."""
    left = list(pairs)
    rng.shuffle(left)
    dialogues = []
    while left:
        rounds = rng.choice((1, 1, 2))
        dialogues.append(write(left[:rounds]))
        del left[:rounds]
    return dialogues


def _batches(mixed: Callable[[], Sequence[Dialogue]]) -> Iterator[Sequence[Dialogue]]:
    while True:
        dialogues = mixed()
        for start in range(0, len(dialogues), _BATCH):
            yield dialogues[start : start + _BATCH]


def _schedule(step: int) -> float:
    """A factor on the learning rate: up, then down in a line, then low."""
    return max(min(step / _WARMUP_STEPS, 1 - step / _DECAY_STEPS), _LOWEST_RATE)


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    return ids
