"""Options of training plans, and the conversion of old option names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from duoka.base.text import choose
from duoka.errors import UsageError
from duoka.forecast.workload import METHODS, OPTIMIZERS, ROWS, SCHEDULES, Training

from .groups import OptionGroup, all_but, flag, is_given, option

_PANEL = "Training"
_train = partial(option, panel=_PANEL)
_train_flag = partial(flag, panel=_PANEL)


def complete_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the command line with all words of ``--train``.

    For `duoka check`, `--train` without a method becomes `--train full`. For `duoka plan` and
    `duoka check`, `--train qlora` becomes `--train lora --quantize nf4`.
    """
    command = next((word for word in arguments if not word.startswith("-")), "")
    words = [*arguments]
    if command in ("plan", "check"):
        _split_qlora(words)
    if command == "check":
        for at in reversed(range(len(words))):
            following = words[at + 1] if at + 1 < len(words) else ""
            # A plain word that is no existing file (such as the MODEL) is meant as the method.
            is_method = following.isalnum() and not Path(following).exists()
            if words[at] == "--train" and not is_method:
                words.insert(at + 1, "full")
    return words


def _split_qlora(words: list[str]) -> None:
    """Replace ``--train qlora`` by ``--train lora``; add ``--quantize nf4`` unless given."""
    for at, word in enumerate(words):
        pair = words[at - 1 : at + 1]
        if word == "--train=qlora" or pair == ["--train", "qlora"]:
            words[at] = word.replace("qlora", "lora")
            is_quantized = any(word.partition("=")[0] == "--quantize" for word in words)
            words += [] if is_quantized else ["--quantize", "nf4"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions(OptionGroup):
    """Training options, as written on the command line; None if not given."""

    train: str | None = _train(
        "METHOD",
        "Plan for training: lora (adapters on frozen weights) or full (every parameter). "
        "--context is then the length of a sequence, and --batch a micro-batch.",
        values=METHODS,
    )
    optimizer: str | None = _train(
        "NAME",
        "adamw (the default), adamw8bit (8-bit states, bitsandbytes), adafactor (factored second "
        "moments) or sgd.",
        values=OPTIMIZERS,
    )
    lora_rank: int | None = _train("N", "LoRA rank. By default 8.", min=1)
    lora_alpha: int | None = _train(
        "N",
        "LoRA alpha: the adapter output is scaled by alpha / rank. By default twice the rank.",
        min=1,
    )
    lora_dropout: float | None = _train("P", "LoRA dropout. By default 0.")
    lora_target: list[str] | None = _train(
        "NAME",
        "Modules that get adapters, by name suffix (q_proj; for ChatGLM checkpoints also "
        "query_key_value). Repeatable; by default every linear layer except the head.",
    )
    train_vision: bool = _train_flag(
        "With --images: also train modules that only images reach, such as the vision tower; by "
        "default they are frozen."
    )
    gradient_checkpointing: bool = _train_flag(
        "Gradient checkpointing: recompute activations in the backward pass instead of storing "
        "them.",
        names=("--checkpointing",),
    )
    master_weights: bool = _train_flag(
        "Keep trained weights, gradients and optimizer states in float32, and compute under "
        "autocast in the plan's dtype."
    )
    micro_batches: int | None = _train(
        "N", "Micro-batches per step (gradient accumulation). By default 1.", min=1
    )
    schedule: str | None = _train(
        "NAME",
        "Pipeline schedule: sequential (the default, one micro-batch after another), gpipe (all "
        "forward, then all backward) or 1f1b (one forward, one backward).",
        values=SCHEDULES,
    )

    rows: str | None = _train(
        "KIND",
        "Attention mask of the batch: padded (the default, a padding mask), unpadded (none, as "
        "duoka tune pads) or packed (several samples per row).",
        values=ROWS,
    )

    def read(self) -> Training | None:
        """Return the training to plan; None without --train, for a plan for generation."""
        names = all_but(TrainingOptions, "train")
        options = self.given_options(*names)
        if self.train is None and options:
            raise UsageError(
                f"{', '.join(options)} {'are' if len(options) > 1 else 'is'} for training, and "
                "the plan is for generation",
                hint="add --train lora or --train full",
            )
        if self.train is None:
            return None
        if self.train == "full":
            adapters = "lora_rank", "lora_alpha", "lora_dropout", "lora_target"
            hint = "omit it, or use --train lora"
            self.refuse(*adapters, beside="--train full, which has no adapters", hint=hint)
        values = {name: value for name in names if is_given(value := getattr(self, name))}
        targets = tuple(values.pop("lora_target", ()))
        return Training(
            method=choose("method", self.train, METHODS), lora_targets=targets, **values
        )
