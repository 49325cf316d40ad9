"""The options that say how a model is trained, and how they are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial

from duoka.errors import UsageError
from duoka.forecast.workload import METHODS, Training

from .groups import flag, option
from .options import is_said, option_name

_PANEL = "Training instead of answering"
_train = partial(option, panel=_PANEL)
_train_flag = partial(flag, panel=_PANEL)


def with_method(arguments: Sequence[str]) -> list[str]:
    """A command line in which `duoka check --train` says what it means alone: every parameter."""
    words = list(arguments)
    if next((word for word in words if not word.startswith("-")), "") == "check":
        for at in reversed(range(len(words))):
            if words[at] == "--train" and not {*words[at + 1 : at + 2]} & {*METHODS}:
                words.insert(at + 1, "full")
    return words


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """How to train, in a person's words; None where nothing was said."""

    train: str | None = _train(
        "METHOD",
        "Plan for training: lora (adapters on frozen weights) or full (every parameter). "
        "--context is then the length of a sequence, and --batch a micro-batch.",
    )
    optimizer: str | None = _train(
        "NAME",
        "adamw (the default) or sgd, torch's own.",
    )
    lora_rank: int | None = _train(
        "N",
        "Rank of the adapters. By default 8.",
        min=1,
    )
    lora_target: list[str] | None = _train(
        "NAME",
        "Modules that get adapters, by the end of their names (q_proj; of a ChatGLM checkpoint "
        "query_key_value too). Repeatable; by default "
        "every linear layer but the head.",
    )
    gradient_checkpointing: bool = _train_flag(
        "--gradient-checkpointing",
        "Compute activations again in the backward pass instead of keeping them.",
    )
    master_weights: bool = _train_flag(
        "--master-weights",
        "Keep what is trained, gradients and optimizer states in float32, and compute under "
        "autocast in the plan's type.",
    )
    micro_batches: int | None = _train(
        "N",
        "Micro-batches whose gradients are added up for a step. By default 1.",
        min=1,
    )
    schedule: str | None = _train(
        "NAME",
        "sequential (the default: one micro-batch after another), gpipe (all forward, then all "
        "backward) or 1f1b (as many in flight as there are stages to the end).",
    )

    def read(self) -> Training | None:
        """How to train, as far as a person said it; None where a model is to answer."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        values = {name: value for name, value in values.items() if is_said(value)}
        method = values.pop("train", None)
        names = ", ".join(map(option_name, values))
        if method is None and values:
            raise UsageError(
                f"{names} {'are' if len(values) > 1 else 'is'} for training, and the plan is to "
                "answer",
                hint="say how to train: --train lora or --train full",
            )
        if method is None:
            return None
        adapters = [option_name(name) for name in ("lora_rank", "lora_target") if name in values]
        if method == "full" and adapters:
            raise UsageError(
                f"{', '.join(adapters)} is for adapters, and --train full has none",
                hint="leave it out, or say --train lora",
            )
        targets = tuple(values.pop("lora_target", ()))
        return Training(method=method, lora_targets=targets, **values)
