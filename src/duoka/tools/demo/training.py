"""Training of the demo's model, until every answer is memorised.

Dialogues are built by the prompt format of the later chat, so the model learns the very tokens of
the later questions.
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
_BATCH = 8
_PEAK_RATE = 8e-3
_PEAK_MATRIX_RATE = 0.05
_WARMUP_STEPS = 10
_DECAY_STEPS = 70
_LOWEST_RATE = 0.1  # of the peak
_CHECK_EVERY = 10
_MAX_STEPS = 500
# Every right token must lead the next one by this much in the logits: far more than other kernels
# or 16 bit change, so that the answers are the same on every machine.
_MARGIN = 1.0
_IGNORED = -100

Report = Callable[[int, float], None]
"""Called after each step with its number and loss."""


@dataclass(frozen=True, slots=True)
class Dialogue:
    """Token ids of a dialogue; the target is -100 for tokens not to learn."""

    ids: list[int]
    targets: list[int]


def write_dialogue(
    pairs: Sequence[Pair], tokenizer: PreTrainedTokenizerBase, chat: ChatFormat
) -> Dialogue:
    """Build the ids of consecutive questions and answers."""
    ids: list[int] = []
    targets: list[int] = []
    messages: list[ChatMessage] = []
    for pair in pairs:
        messages.append(ChatMessage(role="user", content=pair.question))
        question = chat.prompt(messages)[len(ids) :]
        # An answer ends with the user's next role token, the first token of the next question.
        targets += [question[0] if ids else _IGNORED] + [_IGNORED] * (len(question) - 1)
        # As in the published model: an empty line of metadata, then the content.
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
    """Train until every answer is memorised."""
    optimizers, single_dialogues = _optimizers(model), [write([pair]) for pair in pairs]
    for step, dialogues in enumerate(_batches(pairs, write), start=1):
        for optimizer, peak in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = peak * _schedule(step)
        ids, targets = pad(dialogues)
        loss: Tensor = model(input_ids=ids, labels=targets).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, _ in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        report(step, loss.item())
        if step >= _DECAY_STEPS // 2 and step % _CHECK_EVERY == 0:
            margin = min(min(measure(model, batch)) for batch in _cut(single_dialogues))
            if margin >= _MARGIN or step >= _MAX_STEPS:
                return step
    raise AssertionError("the batches never end")


def _batches(
    pairs: Sequence[Pair], write: Callable[[Sequence[Pair]], Dialogue]
) -> Iterator[Sequence[Dialogue]]:
    """Yield batches of dialogues, of one round and some of two, without end."""
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


# The answers must be the same on every machine, so training goes on until every right token leads
# by a margin that other kernels and 16 bit don't change; that takes far fewer steps with Muon.
def _optimizers(model: nn.Module) -> list[tuple[torch.optim.Optimizer, float]]:
    """Return Muon for the layers' matrices and AdamW for the rest, each with its peak rate.

    Muon gives all directions of a matrix's step equal length (Jordan, 2024): facts are memorised in
    a third of the steps of AdamW alone.
    """
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name]
    rest = [p for name, p in model.named_parameters() if p.ndim != 2 or ".layers." not in name]
    return [
        (torch.optim.Muon(matrices, weight_decay=0.0), _PEAK_MATRIX_RATE),
        (torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=0.0, fused=True), _PEAK_RATE),
    ]


@torch.no_grad()
def measure(model: nn.Module, dialogues: Sequence[Dialogue]) -> list[float]:
    """Return each dialogue's smallest lead of a right token's logit; negative if wrong."""
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
    for start in range(0, len(dialogues), _BATCH):
        yield dialogues[start : start + _BATCH]


def pad(dialogues: Sequence[Dialogue]) -> tuple[Tensor, Tensor]:
    """Pad ids and targets to [batch, tokens] on the right, where a causal model needs no mask."""
    ids = [torch.tensor(dialogue.ids) for dialogue in dialogues]
    targets = [torch.tensor(dialogue.targets) for dialogue in dialogues]
    return (
        pad_sequence(ids, batch_first=True),
        pad_sequence(targets, batch_first=True, padding_value=_IGNORED),
    )


def _schedule(step: int) -> float:
    """Return the factor of the learning rate: linearly up, linearly down, then low."""
    return max(min(step / _WARMUP_STEPS, 1 - step / _DECAY_STEPS), _LOWEST_RATE)


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
