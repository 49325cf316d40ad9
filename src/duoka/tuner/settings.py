"""Settings of a fine-tuning run, and its workload for the planner."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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
from duoka.planner.command_line import DEFAULT_BATCH
from duoka.planner.constraints import Experts

from .learning_rate import Decay, rate_factor

TuneMethod = Literal["lora", "qlora", "full"]
TrainOn = Literal["all", "last"]
LongChats = Literal["truncate", "refuse"]
_CONTEXT = ("system", "history", "tools", "images", "chosen", "rejected")  # may be named alone
COLUMNS = ("prompt", "query", "response", "messages", "text", *_CONTEXT)
"""Roles of columns."""
TRACKERS = ("tensorboard", "wandb", "swanlab")
_SEQ_LENGTH = 2048
_IMAGE_SIZE = 1024, 1024  # the default of workloads, which is without effect for text
_RATES = {"lora": 1e-4, "qlora": 1e-4, "full": 1e-5, "dpo": 5e-6}
_WARMUP_SHARE = 0.03
_NUM_INTERVALS = 10  # by default a run has as many checkpoints and evaluations
# The minimum of each integer setting; those in `_OPTIONAL` may be None.
_MINIMA = {
    **dict.fromkeys(("seq_length", "batch", "micro_batch", "epochs", "steps", "keep"), 1),
    **dict.fromkeys(("lora_rank", "lora_alpha", "early_stopping", "max_samples"), 1),
    **dict.fromkeys(("images", "warmup", "save_every", "eval_every", "seed"), 0),
}
_OPTIONAL = (
    *("seq_length", "steps", "warmup", "lora_alpha"),
    *("save_every", "eval_every", "early_stopping", "max_samples"),
)
_SHARE = re.compile(r"(\d+(?:\.\d+)?)%", re.ASCII)
_CHOICES = {
    "method": TuneMethod, "train_on": TrainOn, "lr_schedule": Decay, "experts": Experts,
    "long": LongChats,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneSettings:
    """Settings of a fine-tuning run.

    Parameters
    ----------
    eval_data : tuple of str
        Files or directories with samples on which the loss is evaluated; or a share of the training
        data to set aside for it, as ("5%",).
    eval_prompts : tuple of str
        Files with prompts that the model answers at each evaluation: rows like those of the data,
        with or without answers, or text files with a prompt in each line.
    train_on : {"all", "last"}
        Train on all of the assistant's answers in a conversation, or on the last one.
    columns : mapping of str to str
        Names of the data's columns by their roles "prompt", "query" (a text after the prompt, or in
        place of it), "response", "system", "history", "tools", "images", "messages", "text",
        "chosen" and "rejected".
    max_samples : int, optional
        Maximum number of samples for training: the first of each file, of all files as many.
    long : {"truncate", "refuse"}
        Conversations longer than `seq_length`: drop the turns that don't fit, and skip rows of
        which nothing fits; or refuse them.
    seq_length : int, optional
        Maximum tokens of a sequence. The default is the length of the longest sample, at most 2048
        or the model's limit; with packing, it is that maximum itself.
    packing : bool
        Put several samples into one sequence; samples don't attend to one another.
    images : int
        Number of images in a sequence; set from the data.
    image_size : tuple of int, optional
        Height and width of the largest image; set from the data.
    skip_bad : bool
        Skip unusable rows instead of refusing the data.
    method : {"lora", "qlora", "full"}
        Train adapters on frozen weights, adapters on frozen 4-bit weights, or every parameter.
    dpo : bool
        Train on preferences: on pairs of a chosen and a rejected answer, with the sigmoid loss of
        direct preference optimization. The reference model is the model without the adapters.
    dpo_beta : float
        Scale of the rewards of DPO; a larger one keeps the model closer to the reference model.
    batch : int
        Number of sequences in an optimizer step; with `dpo` of pairs.
    micro_batch : int
        Number of sequences in a forward pass; with `dpo` of pairs.
    epochs : int
        Number of passes over the data.
    steps : int, optional
        Number of optimizer steps, which replaces `epochs`.
    lr : float, optional
        The maximum learning rate; by default 1e-4, with the method "full" 1e-5, with `dpo` 5e-6.
    lr_schedule : {"cosine", "linear", "constant", "cosine_with_restarts", "polynomial", \
"inverse_sqrt"}
        Schedule of the learning rate after the warm-up, as in `transformers.get_scheduler`.
    warmup : int, optional
        Number of warm-up steps; by default 3 % of all steps.
    optimizer : {"adamw", "adamw8bit", "adafactor", "sgd"}
        AdamW, Adafactor and SGD of torch; "adamw8bit" is bitsandbytes' AdamW with 8-bit states.
    weight_decay : float
        Weight decay of matrices.
    max_grad_norm : float
        Norm to which the gradients of all parameters together are clipped; 0 disables clipping.
    lora_rank : int
        Rank of the adapters.
    lora_alpha : int, optional
        Adapter outputs are scaled by this number divided by the rank; None is twice the rank.
    rslora : bool
        Divide `lora_alpha` by the square root of the rank instead (rsLoRA).
    lora_dropout : float
        Dropout probability of adapter inputs, from 0 to below 1.
    lora_target : tuple of str
        Names of the modules that get adapters, as in peft's ``target_modules``; empty for every
        linear layer except the head.
    train_vision : bool
        Also train modules that only images reach, such as a vision tower; by default they are
        frozen.
    dtype : {"auto", "float32", "float16", "bfloat16"}
        Dtype of the weights; "auto" is that of the checkpoint.
    quantize : str
        Quantization of the weights, as for `Workload`; the method "qlora" quantizes to "nf4" unless
        `quantize` says otherwise.
    checkpointing : bool
        Recompute activations in the backward pass (gradient checkpointing).
    experts : {"auto", "gpu", "host"}
        Where the frozen experts of a mixture of experts are; "auto" keeps them in host memory if
        the GPUs can't hold them.
    host_memory : str, optional
        Host memory for experts; by default the memory available on this machine.
    schedule : {"1f1b", "gpipe", "sequential"}
        Pipeline schedule of the stages.
    seed : int
        Seed for the order of samples, the initial values of adapters, and dropout.
    save_every : int, optional
        Steps between checkpoints; 0 for only one at the end. By default a tenth of the run, or 15
        minutes after the last one if that is sooner.
    eval_every : int, optional
        Steps between evaluations; 0 for only one at the end. By default a tenth of the run.
    keep : int
        Number of newest checkpoints to keep, beside the one with the best evaluation loss.
    early_stopping : int, optional
        Number of evaluations in a row without a better loss after which the run ends; its result is
        then that of the best evaluation.
    report_to : tuple of {"tensorboard", "wandb", "swanlab"}
        Where metrics are written beside ``metrics.jsonl``; by default TensorBoard if it is
        installed.
    merge : bool
        Write a merged checkpoint at the end instead of an adapter.

    Raises
    ------
    UsageError
        If a number is out of range or a name is unknown.
    """

    eval_data: tuple[str, ...] = ()
    eval_prompts: tuple[str, ...] = ()
    train_on: TrainOn = "all"
    columns: Mapping[str, str] = field(default_factory=dict)
    max_samples: int | None = None
    long: LongChats = "truncate"
    seq_length: int | None = None
    packing: bool = False
    images: int = 0
    image_size: tuple[int, int] | None = None
    skip_bad: bool = False
    method: TuneMethod = "lora"
    dpo: bool = False
    dpo_beta: float = 0.1
    batch: int = DEFAULT_BATCH
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
    rslora: bool = False
    lora_dropout: float = 0.0
    lora_target: tuple[str, ...] = ()
    train_vision: bool = False
    dtype: Dtype = "auto"
    quantize: Quantization = "none"
    checkpointing: bool = False
    experts: Experts = "auto"
    host_memory: str | None = None
    schedule: Schedule = "1f1b"
    seed: int = 0
    save_every: int | None = None
    eval_every: int | None = None
    keep: int = 2
    early_stopping: int | None = None
    report_to: tuple[str, ...] = ()
    merge: bool = False

    def __post_init__(self) -> None:
        plain: dict[str, Any] = {
            "dtype": read_dtype(self.dtype),
            "quantize": read_quantization(self.quantize),
            "eval_data": _texts("eval_data", self.eval_data),
            "eval_prompts": _texts("eval_prompts", self.eval_prompts),
            "lora_target": _texts("lora_target", self.lora_target),
            "report_to": _texts("report_to", self.report_to),
            "columns": _columns(self.columns),
        }
        for name, minimum in _MINIMA.items():
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                plain[name] = whole_number(name, value, minimum)
        for name, value in plain.items():
            object.__setattr__(self, name, value)
        for name, choices in _CHOICES.items():
            choose(name, getattr(self, name), get_args(choices))
        for name in self.report_to:
            choose("report_to", name, TRACKERS)
        self._refuse_values()
        if self.dpo and (self.method == "full" or self.packing):
            problem = "DPO needs adapters (the reference is the model without them) and no packing"
            raise UsageError(problem, hint="use the method lora or qlora, without packing")
        if not self.dpo and self.columns.keys() & {"chosen", "rejected"}:
            raise UsageError("columns names answers of pairs, which are for DPO", hint="add --dpo")
        if self.batch % self.micro_batch:
            raise UsageError(
                f"a batch of {self.batch} is not divisible into micro-batches of "
                f"{self.micro_batch}",
                hint=f"use a multiple of {self.micro_batch}",
            )
        self._training(self.lora_target)  # refuses invalid values

    def _refuse_values(self) -> None:
        """Raise UsageError for evaluations without data, and for rates that aren't finite numbers.

        Rates must be positive or at least zero.
        """
        for name in ("eval-every", "eval-prompts", "early-stopping"):
            if not (self.eval_share or self.eval_data) and getattr(self, name.replace("-", "_")):
                raise UsageError(f"--{name} needs --eval", hint="--eval DATA, or --eval 5%")
        names = "lr", "weight_decay", "max_grad_norm", "dpo_beta"
        rates = {name: getattr(self, name) for name in names} | {"lr": self.learning_rate}
        for name, rate in rates.items():
            is_positive = name in ("lr", "dpo_beta")
            sign = "positive" if is_positive else "non-negative"
            is_number = isinstance(rate, int | float) and not isinstance(rate, bool)
            if not is_number or not 0 <= rate < inf or (is_positive and not rate):
                raise UsageError(
                    f"{name} is {rate}; it must be a {sign} number",
                    hint="leave it out for the default",
                )
        if self.optimizer == "sgd" and self.weight_decay:
            raise UsageError(
                f"weight_decay is {self.weight_decay}, and duoka's SGD doesn't support it",
                hint="omit it, or use adamw",
            )

    @property
    def eval_share(self) -> float | None:
        """The share of the training data that is set aside for evaluations; None for files."""
        shares = [_SHARE.fullmatch(text) for text in self.eval_data]
        if not any(shares):
            return None
        share = float(shares[0][1]) / 100 if shares[0] is not None else 0.0
        if len(shares) > 1 or not 0 < share < 1:
            raise UsageError(
                f"the evaluation data is {', '.join(self.eval_data)}; it must be one share between "
                "0% and 100%, or files",
                hint="for example 5%",
            )
        return share

    def interval(self, every: int | None, num_steps: int) -> int:
        """Return the steps between checkpoints or evaluations for a setting; 0 for none."""
        return -(-num_steps // _NUM_INTERVALS) if every is None else every

    @property
    def learning_rate(self) -> float:
        """The maximum learning rate, with the method's default."""
        return _RATES["dpo" if self.dpo else self.method] if self.lr is None else self.lr

    def rate_at(self, step: int, num_steps: int) -> float:
        """Return the learning rate of a step; steps count from 0."""
        warmup_steps = self.warmup_steps(num_steps)
        return self.learning_rate * rate_factor(step, num_steps, warmup_steps, self.lr_schedule)

    def starting_from(self, adapter: LoraAdapter) -> TuneSettings:
        """Return these settings with the rank, scale and modules of an adapter to start from."""
        if self.method == "full" or self.dpo:
            other = "DPO, which compares with the model without it" if self.dpo else "full training"
            raise UsageError(
                f"an adapter to start from can't be combined with {other}",
                hint="train the checkpoint that `duoka merge MODEL ADAPTER --out DIR` writes",
            )
        settings = adapter.training_settings
        return replace(
            self,
            rslora=False,
            lora_rank=settings["lora_rank"],
            lora_alpha=settings["lora_alpha"],
            lora_target=settings["lora_targets"],
        )

    def warmup_steps(self, num_steps: int) -> int:
        """Return the number of warm-up steps."""
        steps = round(_WARMUP_SHARE * num_steps)
        return steps if self.warmup is None else min(self.warmup, num_steps)

    def workload(self, checkpoint: Checkpoint) -> Workload:
        """Return the workload of a step for the planner, with a single replica."""
        limit = checkpoint.max_context_tokens
        if self.seq_length is not None and limit is not None and self.seq_length > limit:
            raise UsageError(
                f"a sequence of {self.seq_length} tokens is beyond the model's {limit}",
                hint=f"--context {limit} at most",
            )
        is_qlora = self.method == "qlora" and self.quantize == "none"
        return Workload(
            batch=self.micro_batch * (2 if self.dpo else 1),
            prompt_tokens=self.seq_length or min(_SEQ_LENGTH, limit or _SEQ_LENGTH),
            new_tokens=0,
            dtype=self.dtype,
            prefill_chunk_tokens=None,
            quantize="nf4" if is_qlora else self.quantize,
            images=self.images,
            image_size=self.image_size or _IMAGE_SIZE,
            training=self._training(native_targets(checkpoint, self.lora_target)),
        )

    def _training(self, lora_targets: tuple[str, ...]) -> Training:
        """Return the training part of the workload; `Training` refuses invalid values."""
        return Training(
            method="full" if self.method == "full" else "lora",
            optimizer=self.optimizer,
            lora_rank=self.lora_rank,
            lora_alpha=self.lora_alpha,
            rslora=self.rslora,
            lora_dropout=self.lora_dropout,
            lora_targets=lora_targets,
            gradient_checkpointing=self.checkpointing,
            train_vision=self.train_vision and self.images > 0,
            dpo=self.dpo,
            # Trained parameters and optimizer states are in float32.
            master_weights=True,
            micro_batches=self.batch // self.micro_batch,
            schedule=self.schedule,
            rows="packed" if self.packing else "unpadded",
        )


def _columns(columns: Mapping[str, str]) -> dict[str, str]:
    """Check the roles of columns: together they name one form of rows, or only its context."""
    for role in columns:
        choose("columns", role, COLUMNS)
    contents = {role.replace("query", "prompt") for role in columns if role not in _CONTEXT}
    whole = {"prompt"} if "chosen" in columns else {"prompt", "response"}
    if contents and contents not in (whole, {"messages"}, {"text"}):
        raise UsageError(
            f"columns names {', '.join(columns)}; it must name a prompt (or query) and a response "
            "(or chosen and rejected), or messages, or text",
            hint="for example prompt=question,response=answer",
        )
    return dict(columns)


def _texts(name: str, value: Any) -> tuple[str, ...]:
    """Convert a sequence of strings or paths to a tuple; refuse a single string or path."""
    if isinstance(value, str | os.PathLike):
        raise UsageError(
            f"{name} is {str(value)!r}; it must be a tuple of strings",
            hint=f"write ({str(value)!r},)",
        )
    return tuple(os.fspath(text) for text in value)
