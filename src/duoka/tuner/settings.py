"""Settings of a fine-tuning run, and its workload for the planner."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Literal, get_args

from duoka.base.text import choose
from duoka.checkpoint.adapters import native_targets
from duoka.checkpoint.checkpoint import Checkpoint
from duoka.errors import UsageError
from duoka.forecast.workload import (
    Dtype,
    Optimizer,
    Quantization,
    Schedule,
    Training,
    Workload,
    read_dtype,
    read_quantization,
    whole_number,
)
from duoka.models.lora import LoraAdapter

from .learning_rate import Decay, rate_factor

TuneMethod = Literal["lora", "qlora", "full"]
TrainOn = Literal["all", "last"]
KeyNames = Literal["original", "native"]
_SEQ_LENGTH = 2048
_RATES: dict[TuneMethod, float] = {"lora": 1e-4, "qlora": 1e-4, "full": 1e-5}
_WARMUP_SHARE = 0.03
_LARGEST_SEED = 2**32 - 1  # on the processor torch has no more bits of it
# The minimum of each number, and the numbers that may be None.
_LEAST = {
    **dict.fromkeys(("seq_length", "batch", "micro_batch", "epochs", "steps", "keep"), 1),
    **dict.fromkeys(("lora_rank", "lora_alpha"), 1),
    **dict.fromkeys(("warmup", "save_every", "eval_every", "seed"), 0),
}
_OPTIONAL = ("seq_length", "steps", "warmup", "lora_alpha")
_CHOICES = {"method": TuneMethod, "train_on": TrainOn, "lr_schedule": Decay, "names": KeyNames}


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneSettings:
    """How a model is fine-tuned.

    Parameters
    ----------
    eval_data : tuple of str
        Files or directories that the loss is measured on.
    train_on : {"all", "last"}
        Which of the assistant's answers in a conversation are learnt.
    seq_length : int, optional
        The most tokens of a sequence; by default those of the longest sample, at most 2048 or the
        model's limit, and with packing as many as that.
    packing : bool
        Several samples in one sequence, none of which attends to another.
    skip_bad : bool
        Leave rows out that can't be used, instead of refusing all.
    method : {"lora", "qlora", "full"}
        Adapters on frozen weights, on weights in 4 bit, or every parameter.
    batch, micro_batch : int
        Sequences that a step is made of, and sequences that run at once.
    epochs, steps : int
        How often each sample comes; or how many steps there are.
    lr : float, optional
        The highest learning rate; by default 1e-4, with the method "full" 1e-5.
    lr_schedule : {"cosine", "linear", "constant"}
        What follows it.
    warmup : int, optional
        Steps that lead up to it; by default 3 % of all.
    optimizer : {"adamw", "adamw8bit", "adafactor", "sgd"}
    weight_decay, max_grad_norm : float
        Of matrices; and what the norm of all gradients is clipped to, 0 for not at all.
    lora_rank, lora_alpha, lora_dropout, lora_target
        Of the adapters, as for `Training`.
    dtype, quantize : str
        Of the weights, as for `Workload`; `quantize` is "nf4" with the method "qlora".
    checkpointing : bool
        Compute activations again in the backward pass.
    schedule : {"1f1b", "gpipe", "sequential"}
        How stages take turns.
    seed : int
        Of the samples' order, of adapters' first values and of dropout.
    save_every, eval_every : int
        Steps from one checkpoint or evaluation to the next; 0 for at the end alone.
    keep : int
        Checkpoints that stay.
    merge : bool
        Write a whole checkpoint in the end, instead of an adapter.
    names : {"original", "native"}
        Tensors' names in the result: the published ones, or those of transformers' class.

    Raises
    ------
    UsageError
        If a number makes no sense or a name is unknown.
    """

    eval_data: tuple[str, ...] = ()
    train_on: TrainOn = "all"
    seq_length: int | None = None
    packing: bool = False
    skip_bad: bool = False
    method: TuneMethod = "lora"
    batch: int = 8
    micro_batch: int = 1
    epochs: int = 1
    steps: int | None = None
    lr: float | None = None
    lr_schedule: Decay = "cosine"
    warmup: int | None = None
    optimizer: Optimizer = "adamw"
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    lora_rank: int = 8
    lora_alpha: int | None = None
    lora_dropout: float = 0.0
    lora_target: tuple[str, ...] = ()
    dtype: Dtype = "auto"
    quantize: Quantization = "none"
    checkpointing: bool = False
    schedule: Schedule = "1f1b"
    seed: int = 0
    save_every: int = 0
    eval_every: int = 0
    keep: int = 2
    merge: bool = False
    names: KeyNames = "original"

    def __post_init__(self) -> None:
        plain: dict[str, Any] = {
            "dtype": read_dtype(self.dtype),
            "quantize": read_quantization(self.quantize),
            "eval_data": _texts("eval_data", self.eval_data),
            "lora_target": _texts("lora_target", self.lora_target),
        }
        for name, minimum in _LEAST.items():
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                plain[name] = whole_number(name, value, minimum)
        for name, value in plain.items():
            object.__setattr__(self, name, value)
        for name, choices in _CHOICES.items():
            choose(name, getattr(self, name), get_args(choices))
        self._refuse_rates()
        if self.batch % self.micro_batch:
            raise UsageError(
                f"a batch of {self.batch} is not divisible into micro-batches of "
                f"{self.micro_batch}",
                hint=f"use a multiple of {self.micro_batch}",
            )
        if self.seed > _LARGEST_SEED:
            raise UsageError(
                f"seed is {self.seed}; it must be at most {_LARGEST_SEED}",
                hint="use a smaller number",
            )
        self._training(self.lora_target)  # refuses invalid values

    def _refuse_rates(self) -> None:
        rates = {name: getattr(self, name) for name in ("lr", "weight_decay", "max_grad_norm")}
        rates["lr"] = self.learning_rate
        for name, rate in rates.items():
            is_number = isinstance(rate, int | float) and not isinstance(rate, bool)
            if not is_number or not 0 <= rate < inf or (name == "lr" and not rate):
                raise UsageError(
                    f"{name} is {rate}; it must be a positive number",
                    hint="leave it out for the default",
                )
        if self.optimizer == "sgd" and self.weight_decay:
            raise UsageError(
                f"weight_decay is {self.weight_decay}, and duoka's SGD doesn't support it",
                hint="omit it, or use adamw",
            )

    @property
    def learning_rate(self) -> float:
        """The highest learning rate."""
        return _RATES[self.method] if self.lr is None else self.lr

    def rate_at(self, step: int, num_steps: int) -> float:
        """Return the learning rate of a step, from 0."""
        warmup_steps = self.warmup_steps(num_steps)
        return self.learning_rate * rate_factor(step, num_steps, warmup_steps, self.lr_schedule)

    def starting_from(self, adapter: LoraAdapter) -> TuneSettings:
        """Return the settings with the rank, scale and modules of an adapter."""
        if self.method == "full":
            raise UsageError(
                "an adapter to start from can't be combined with full training",
                hint="merge it into a checkpoint (duoka tune --merge), then train that",
            )
        settings = adapter.training_settings
        return replace(
            self,
            lora_rank=settings["lora_rank"],
            lora_alpha=settings["lora_alpha"],
            lora_target=settings["lora_targets"],
        )

    def warmup_steps(self, num_steps: int) -> int:
        """Return the steps of the warm-up."""
        steps = round(_WARMUP_SHARE * num_steps)
        return steps if self.warmup is None else min(self.warmup, num_steps)

    def workload(self, checkpoint: Checkpoint) -> Workload:
        """Return the workload of a step for the planner, on a single copy of the model."""
        limit = checkpoint.max_context_tokens
        if self.seq_length is not None and limit is not None and self.seq_length > limit:
            raise UsageError(
                f"a sequence of {self.seq_length} tokens is beyond the model's {limit}",
                hint=f"--context {limit} at most",
            )
        is_qlora = self.method == "qlora" and self.quantize == "none"
        return Workload(
            batch=self.micro_batch,
            prompt_tokens=self.seq_length or min(_SEQ_LENGTH, limit or _SEQ_LENGTH),
            new_tokens=0,
            dtype=self.dtype,
            prefill_chunk_tokens=None,
            quantize="nf4" if is_qlora else self.quantize,
            training=self._training(native_targets(checkpoint, self.lora_target)),
        )

    def _training(self, lora_targets: tuple[str, ...]) -> Training:
        return Training(
            method="full" if self.method == "full" else "lora",
            optimizer=self.optimizer,
            lora_rank=self.lora_rank,
            lora_alpha=self.lora_alpha,
            lora_dropout=self.lora_dropout,
            lora_targets=lora_targets,
            gradient_checkpointing=self.checkpointing,
            # Adapters, or all weights, and the optimizer's states in 32 bit.
            master_weights=True,
            micro_batches=self.batch // self.micro_batch,
            schedule=self.schedule,
            rows="packed" if self.packing else "unpadded",
        )


def _texts(name: str, value: Any) -> tuple[str, ...]:
    """Return several texts or paths as texts; refuse a single one."""
    if isinstance(value, str | os.PathLike):
        raise UsageError(
            f"{name} is {str(value)!r}; it must be a tuple of strings",
            hint=f"write ({str(value)!r},)",
        )
    return tuple(os.fspath(text) for text in value)
