"""Training options of `duoka plan`, `duoka check` and `duoka tune`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from duoka.base.text import choose
from duoka.errors import UsageError
from duoka.forecast.workload import METHODS, OPTIMIZERS, SCHEDULES, Training
from duoka.planner.command_line import DEFAULT_BATCH

from .groups import OptionGroup, all_but, flag, is_given, option
from .options import PlanOptions

PANEL = "Training"
TRAIN_METHODS = "lora", "qlora", "full"
_train = partial(option, panel=PANEL)
_train_flag = partial(flag, panel=PANEL)


def complete_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the command line of `duoka check` with `--train full` for `--train` alone."""
    words = [*arguments]
    if next((word for word in words if not word.startswith("-")), "") == "check":
        for at in reversed(range(len(words))):
            following = words[at + 1] if at + 1 < len(words) else ""
            # A plain word that is no existing file (such as the MODEL) is meant as the method.
            is_method = following.isalnum() and not Path(following).exists()
            if words[at] == "--train" and not is_method:
                words.insert(at + 1, "full")
    return words


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions(OptionGroup):
    """Training options, as written on the command line; None if not given."""

    method: str | None = _train(
        "METHOD",
        "Train lora (adapters on frozen weights; the default of duoka tune), qlora (adapters on "
        "4-bit weights) or full (every parameter).",
        values=TRAIN_METHODS,
        names=("--train",),
    )
    data: list[str] | None = _train(
        "DATA",
        "With --train: training data, as for duoka tune; plan for its longest sample and its "
        "images. Repeatable.",
    )
    dpo: bool = _train_flag(
        "Train on preferences (DPO): pairs of a chosen and a rejected answer. The reference model "
        "is the model without adapters. --batch and --micro-batch count pairs."
    )
    micro_batch: int | None = _train(
        "N", "Sequences per micro-batch, of which --batch has several. By default 1.", min=1
    )
    packing: bool = _train_flag(
        "Pack several samples into a sequence; no sample attends to another."
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
    rslora: bool = _train_flag("Divide --lora-alpha by the square root of the rank (rsLoRA).")
    lora_dropout: float | None = _train("P", "LoRA dropout. By default 0.")
    lora_target: list[str] | None = _train(
        "NAME",
        "Modules that get adapters, by name suffix (q_proj; for ChatGLM checkpoints also "
        "query_key_value). Repeatable; by default every linear layer except the head.",
    )
    train_vision: bool = _train_flag(
        "Also train modules that only images reach, such as the vision tower; by default they are "
        "frozen."
    )
    checkpointing: bool = _train_flag(
        "Gradient checkpointing: recompute activations in the backward pass; less memory, slower."
    )
    schedule: str | None = _train(
        "NAME",
        "Pipeline schedule: 1f1b (the default: one forward, one backward), gpipe (all forward, "
        "then all backward) or sequential (one micro-batch after another).",
        values=SCHEDULES,
    )

    def refuse_adapters(self) -> None:
        """Refuse options of adapters beside full training, and packing beside DPO."""
        if self.dpo:
            self.refuse("packing", beside="--dpo, which trains on pairs", hint="omit one of them")
        if self.method == "full":
            adapters = "lora_rank", "lora_alpha", "rslora", "lora_dropout", "lora_target", "dpo"
            hint = "omit it, or use --train lora"
            self.refuse(*adapters, beside="--train full, which has no adapters", hint=hint)

    def read(self, options: PlanOptions) -> tuple[Training | None, PlanOptions]:
        """Return the training to plan, and the options of a plan for its micro-batches.

        The training is None without --train, for a plan for generation.
        """
        if self.method is None:
            options_of_training = self.given_options(*all_but(TrainingOptions, "method"))
            if options_of_training:
                verb = "are" if len(options_of_training) > 1 else "is"
                raise UsageError(
                    f"{', '.join(options_of_training)} {verb} for training, and the plan is for "
                    "generation",
                    hint="add --train lora or --train full",
                )
            return None, options
        self.refuse_adapters()
        method = choose("method", self.method, TRAIN_METHODS)
        if method == "qlora":
            options = replace(options, quantize=options.quantize or "nf4")
        names = "optimizer", "lora_rank", "lora_alpha", "rslora", "lora_dropout"
        training = Training(
            method=choose("method", method.removeprefix("q"), METHODS),
            lora_targets=tuple(self.lora_target or ()),
            train_vision=self.train_vision,
            gradient_checkpointing=self.checkpointing,
            master_weights=True,
            schedule=choose("schedule", self.schedule or "1f1b", SCHEDULES),
            rows="packed" if self.packing else "unpadded",
            dpo=self.dpo,
            **{name: value for name in names if is_given(value := getattr(self, name))},
        )
        if options.max_batch:  # one micro-batch, which is the batch to maximize
            self.refuse("micro_batch", "dpo", beside="--max-batch", hint="give only one of them")
            return training, options
        micro_batch = self.micro_batch or 1
        batch = options.batch or DEFAULT_BATCH
        if batch % micro_batch:
            raise UsageError(
                f"a batch of {batch} is not divisible into micro-batches of {micro_batch}",
                hint=f"use a multiple of {micro_batch}",
            )
        training = replace(training, micro_batches=batch // micro_batch)
        return training, replace(options, batch=2 * micro_batch if self.dpo else self.micro_batch)
