"""Workloads: batch, context and cache of inference, or a batch to train on."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, SupportsIndex, get_args

from duoka.base.text import choose
from duoka.base.units import format_count
from duoka.errors import UsageError
from duoka.hardware.gpu_generation import GpuGeneration

Dtype = Literal["auto", "float32", "float16", "bfloat16"]
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
Cache = Literal["dynamic", "int8", "paged", "paged-int8"]
Quantization = Literal["none", "int8", "int4", "nf4", "auto"]
AUTO_QUANTIZATIONS: tuple[Quantization, ...] = ("none", "int8", "int4")
"""What "auto" stands for: the first that fits."""
TRAINED_QUANTIZATIONS: tuple[Quantization, ...] = ("none", "int8", "nf4")
"""The same of frozen weights beside adapters."""
Logits = Literal["last", "all"]
Method = Literal["lora", "full"]
Optimizer = Literal["adamw", "adamw8bit", "adafactor", "sgd"]
Schedule = Literal["sequential", "gpipe", "1f1b"]
Rows = Literal["padded", "unpadded", "packed"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
CACHES: tuple[Cache, ...] = get_args(Cache)
BATCH_CACHES: tuple[Cache, ...] = ("dynamic", "int8")
"""Those of a batch, whose sequences begin and end together."""
PAGED_CACHES: tuple[Cache, ...] = ("paged", "paged-int8")
"""Those of requests that come and go."""
QUANTIZATIONS: tuple[Quantization, ...] = get_args(Quantization)
OPTIMIZERS: tuple[Optimizer, ...] = get_args(Optimizer)
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
ROWS: tuple[Rows, ...] = get_args(Rows)
METHODS: tuple[Method, ...] = get_args(Method)
QUANTIZED: tuple[Quantization, ...] = ("int8", "int4", "nf4")
"""What weights can become."""
_DTYPE_WORDS = {"fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16"}
# What `load_in_8bit` and `load_in_4bit` of transformers make, by duoka's names of it.
_QUANTIZATION_WORDS = {"8bit": "int8", "4bit": "nf4"}

# Far above what can be run; with more, bytes would no longer fit 64-bit integers.
MOST_BATCH = 2**16
MOST_TOKENS = 2**24
MOST_BATCH_TOKENS = 2**30
# Matrix products of fewer rows are slower; of more, what logits take grows: 2 GB here for 151,552
# columns.
_LOSS_CHUNK_TOKENS = 2**10


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The training of a model.

    Parameters
    ----------
    method : {"lora", "full"}
        Low-rank adapters beside frozen weights (peft), or every parameter.
    optimizer : {"adamw", "adamw8bit", "adafactor", "sgd"}
        torch's, and AdamW with states in 8 bit, bitsandbytes'.
    lora_rank : int
    lora_alpha : int, optional
        What adapters add is multiplied by this and divided by the rank; None is twice the rank.
    lora_dropout : float
        How much of what comes to an adapter is dropped, from 0 to below 1.
    lora_targets : tuple of str
        Names of the modules that get adapters, as peft's ``target_modules``; empty for every
        linear layer but the head ("all-linear").
    gradient_checkpointing : bool
        Compute a layer's activations again in the backward pass instead of keeping them.
    master_weights : bool
        Keep what is trained, its gradients and the optimizer's states in float32, and compute
        under autocast in the workload's dtype.
    micro_batches : int
        Passes whose gradients are added up before the optimizer's step.
    schedule : {"sequential", "gpipe", "1f1b"}
        One micro-batch after another, or several in flight: all of them (GPipe), or as many as
        there are stages from here to the end (one forward, one backward).
    rows : {"padded", "unpadded", "packed"}
        What a model is told of the rows of a micro-batch: several rows with a mask over padding;
        nothing, as on the right a causal model needs no mask; or positions that begin again with
        each of the samples in a row, which then are kept apart by a mask.

    Raises
    ------
    UsageError
        If a number isn't positive and whole, is out of range, or a name is unknown.
    """

    method: Method = "lora"
    optimizer: Optimizer = "adamw"
    lora_rank: int = 8
    lora_alpha: int | None = None
    lora_dropout: float = 0.0
    lora_targets: tuple[str, ...] = ()
    gradient_checkpointing: bool = False
    master_weights: bool = False
    micro_batches: int = 1
    schedule: Schedule = "sequential"
    rows: Rows = "padded"

    def __post_init__(self) -> None:
        for name in ("lora_rank", "micro_batches", "lora_alpha"):
            if getattr(self, name) is not None:
                _make_whole(self, name, 1)
        if not isinstance(self.lora_dropout, (int, float)) or not 0 <= self.lora_dropout < 1:
            raise UsageError(
                f"lora_dropout is {self.lora_dropout!r}; it must be at least 0 and below 1",
                hint="usual values are 0.05 and 0.1",
            )
        if isinstance(self.lora_targets, str):
            raise UsageError(
                f"lora_targets is {self.lora_targets!r}; it must be a tuple of names",
                hint=f"write ({self.lora_targets!r},)",
            )
        choose("method", self.method, METHODS)
        choose("optimizer", self.optimizer, OPTIMIZERS)
        choose("schedule", self.schedule, SCHEDULES)
        choose("rows", self.rows, ROWS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """The part of a workload that decides on code paths, beyond sizes.

    A profile holds for one of these, and for any batch, context, chunk, optimizer and number of
    micro-batches; with images for one chunk.
    """

    cache: Cache = "dynamic"
    quantize: Quantization = "none"
    images: int = 0
    image_size: tuple[int, int] | None = None
    vision_batch: int | None = None
    image_chunk_tokens: int | None = None
    logits: Logits = "last"
    before_ampere: bool = False
    training: Training | None = None

    @property
    def is_paged(self) -> bool:
        """True for a paged cache."""
        return self.cache in PAGED_CACHES

    def passes(self, batch: int) -> tuple[int, ...]:
        """Return the number of images of each encoding pass of a batch, in order."""
        return image_passes(self.images * batch, self.vision_batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Inference over a batch of prompts, or training on a batch of sequences.

    Parameters
    ----------
    batch : int
        Prompts that run together. More than one is forecast with padding, that is with an
        attention mask, because prompts differ in length.
    prompt_tokens, new_tokens : int
        Tokens of each prompt, and tokens generated after it; in training those of a sequence, and
        none.
    dtype : {"auto", "float32", "float16", "bfloat16"}
        Type of the weights; "auto" is the checkpoint's own. "fp32", "fp16" and "bf16" will do.
    prefill_chunk_tokens : int, None or "auto"
        Prompt tokens that run in one step: a number, None for the whole prompt, or "auto" for
        the whole prompt where it fits and the largest chunk that fits where it doesn't.
    cache : {"dynamic", "int8", "paged", "paged-int8"}
        The KV cache: growing with each token, as `generate` makes it; growing in 8 bit; or in pages
        that requests have while they last (`Engine`), which can be of 8 bit too. With pages the
        batch is how many requests are answered at a time at most, and the chunk how many tokens of
        all of them a step takes.
    quantize : {"none", "int8", "int4", "nf4", "auto"}
        What the weights of linear layers become while they are loaded; "auto" is the first of
        "none", "int8", "int4" that fits. A checkpoint that is quantized already says "none".
        bitsandbytes' words "8bit" and "4bit" are "int8" and "nf4".
    images : int
        Images in each prompt. Their tokens are part of `prompt_tokens`.
    image_size : tuple of int
        Height and width of each image in pixels, before the model's own preprocessing.
    vision_batch : int, None or "auto"
        Images that the vision tower encodes at a time: a number, None for all of the batch's, or
        "auto" for all where they fit and the most that fit where they don't.
    logits : {"last", "all"}
        Of which positions of a prompt logits are made: of the last one, to go on from, or of all,
        to score a text.
    pages : int, optional
        Of a paged cache; by default as many as fit.
    gpu_generation : GpuGeneration
        That of the GPUs; planning puts the fleet's here.
    training : Training, optional
        Train on a batch of sequences instead of generating.

    Raises
    ------
    UsageError
        If a number isn't positive and whole or a name is unknown.

    Examples
    --------
    >>> Workload(prompt_tokens=1000, new_tokens=24).context_tokens
    1024
    """

    batch: int = 1
    prompt_tokens: int = 2048
    new_tokens: int = 256
    dtype: Dtype = "auto"
    prefill_chunk_tokens: int | None | Literal["auto"] = "auto"
    cache: Cache = "dynamic"
    quantize: Quantization = "none"
    images: int = 0
    image_size: tuple[int, int] = (1024, 1024)
    vision_batch: int | None | Literal["auto"] = "auto"
    logits: Logits = "last"
    pages: int | None = None
    gpu_generation: GpuGeneration = field(default_factory=GpuGeneration)
    training: Training | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "prompt_tokens"):
            _make_whole(self, name, 1)
        _make_whole(self, "new_tokens", 1 if self.training is None else 0)
        _make_whole(self, "images", 0)
        if not isinstance(self.gpu_generation, GpuGeneration):
            raise UsageError(f"gpu_generation is {self.gpu_generation!r}", hint="omit it")
        self._make_size()
        object.__setattr__(self, "dtype", read_dtype(self.dtype))
        object.__setattr__(self, "quantize", read_quantization(self.quantize))
        if self.training is not None and self.new_tokens:
            raise UsageError(
                f"new_tokens is {self.new_tokens}; training doesn't generate tokens",
                hint="give the sequence's length as prompt_tokens, and new_tokens=0",
            )
        if self.training is not None:
            self._refuse_in_training()
        self._refuse_too_many()
        self._make_parts()
        choose("cache", self.cache, CACHES)
        self._make_pages()
        choose("logits", self.logits, get_args(Logits))

    def _make_pages(self) -> None:
        if self.is_paged and self.images:
            raise UsageError(
                f"images is {self.images}, which the paged KV cache doesn't support",
                hint="plan for a fixed batch: omit --serve",
            )
        if self.pages is None:
            return
        _make_whole(self, "pages", 1)
        if not self.is_paged:
            raise UsageError(
                f"the cache is {self.cache}, and pages is {self.pages}",
                hint="pages need a paged KV cache (--serve)",
            )

    def _make_size(self) -> None:
        try:
            size = tuple(whole_number("image_size", pixels, 1) for pixels in self.image_size)
        except TypeError:  # nothing that can be gone through
            size = ()
        if len(size) != 2:
            raise UsageError(
                f"image_size is {self.image_size!r}; it must be two numbers",
                hint="give height and width in pixels, such as (1024, 768)",
            )
        object.__setattr__(self, "image_size", size)

    def _make_parts(self) -> None:
        for name in ("prefill_chunk_tokens", "vision_batch"):
            number = getattr(self, name)
            if isinstance(number, str) and number != "auto":
                raise UsageError(f"{name} is {number!r}", hint='give a number, None or "auto"')
            if number is None or number == "auto":
                continue
            _make_whole(self, name, 1)
            if number > MOST_TOKENS:
                raise UsageError(
                    f"{name} is {number}; it must be at most {MOST_TOKENS}",
                    hint="omit it to use the largest number that fits",
                )

    def _refuse_in_training(self) -> None:
        is_packed = self.training is not None and self.training.rows == "packed"
        for name, got, plain in (
            ("cache", self.cache, "dynamic"),
            ("vision_batch", self.vision_batch or "auto", "auto"),
            ("images on packed rows", self.images if is_packed else 0, 0),
        ):
            if got != plain:
                raise UsageError(
                    f"{name} is {got!r}, which is not supported in training",
                    hint=f"omit {name}, or plan for generation",
                )
        if self.quantize == "int4":
            raise UsageError(
                "quantize is 'int4', whose kernels have no backward",
                hint="use nf4, which needs as little memory: quantize='nf4' (--quantize nf4)",
            )
        if self.quantize != "none" and self.training is not None and self.training.method == "full":
            raise UsageError(
                f"quantize is {self.quantize!r}, and quantized weights are frozen",
                hint="train adapters on them: method='lora' (--train lora)",
            )
        if isinstance(self.prefill_chunk_tokens, int):
            raise UsageError(
                f"training sequences can't be split into chunks of {self.prefill_chunk_tokens} "
                "tokens",
                hint="omit the prefill chunk",
            )

    def _refuse_too_many(self) -> None:
        for name, got, most in (
            ("batch", self.batch, MOST_BATCH),
            ("the context", self.context_tokens, MOST_TOKENS),
            ("batch times context", self.batch * self.context_tokens, MOST_BATCH_TOKENS),
        ):
            if got > most:
                raise UsageError(
                    f"{name} is {got}; the limit is {most}",
                    hint="plan a smaller workload",
                )

    @property
    def context_tokens(self) -> int:
        """Tokens of a sequence at the end: prompt and generated."""
        return self.prompt_tokens + self.new_tokens

    @property
    def is_paged(self) -> bool:
        """True for requests over a paged cache, with continuous batching."""
        return self.cache in PAGED_CACHES

    @property
    def has_int8_cache(self) -> bool:
        """True for keys and values in 8 bit."""
        return self.cache in ("int8", "paged-int8")

    @property
    def conditions(self) -> Conditions:
        """The conditions of a profile for this workload."""
        training = self.training
        if training is not None:
            # Whatever is dropped, there is a mask; nothing depends on how much it is.
            dropout = 0.5 if training.lora_dropout else 0.0
            training = replace(
                training,
                optimizer="adamw",
                micro_batches=1,
                schedule="sequential",
                lora_alpha=None,
                lora_dropout=dropout,
            )
        return Conditions(
            cache=self.cache,
            quantize=self.quantize,
            images=self.images,
            image_size=self.image_size if self.images else None,
            vision_batch=_number(self.vision_batch) if self.images else None,
            image_chunk_tokens=_number(self.prefill_chunk_tokens) if self.images else None,
            logits=self.logits,
            before_ampere=self.gpu_generation.before_ampere,
            training=training,
        )

    def resolved(self, *, dtype: str) -> Workload:
        """Return the workload with "auto" replaced by the checkpoint's dtype."""
        return replace(self, dtype=choose("dtype", dtype, DTYPES)) if self.dtype == "auto" else self

    def passes(self) -> tuple[int, ...]:
        """Return the number of images of each encoding pass, in order.

        Examples
        --------
        >>> Workload(images=5, vision_batch=2).passes()
        (2, 2, 1)
        """
        return self.conditions.passes(self.batch)

    def chunks(self) -> tuple[tuple[int, int], ...]:
        """Return prefill steps as (query tokens, past tokens), in order.

        Examples
        --------
        >>> Workload(prompt_tokens=10, prefill_chunk_tokens=4).chunks()
        ((4, 0), (4, 4), (2, 8))
        """
        size = self.prefill_chunk_tokens
        assert size != "auto", "resolve the chunk first"
        step = self.prompt_tokens if size is None else size
        return tuple(
            (min(step, self.prompt_tokens - past), past)
            for past in range(0, self.prompt_tokens, step)
        )


def image_passes(images: int, vision_batch: int | None) -> tuple[int, ...]:
    """Return the number of images of each encoding pass; a single pass without a limit."""
    size = vision_batch or max(images, 1)
    return tuple(min(size, images - done) for done in range(0, images, size))


def _number(value: int | str | None) -> int | None:
    """Return a number, or None for all at once, also while nothing is decided."""
    return value if isinstance(value, int) else None


def read_dtype(word: str) -> Dtype:
    """Return the dtype of a word: torch's name, or a short name."""
    return choose("dtype", _DTYPE_WORDS.get(str(word).lower(), word), DTYPES)


def read_quantization(word: str, known: Sequence[Quantization] = QUANTIZATIONS) -> Quantization:
    """Return the quantization of a word, duoka's or bitsandbytes'."""
    bare = str(word).strip().lower().replace("-", "").removeprefix("load_in_")
    return choose("quantize", _QUANTIZATION_WORDS.get(bare, word), known)


def refuse_short(workload: Workload, least_tokens: int) -> None:
    """Refuse a prompt too short for its images."""
    if workload.images and workload.prompt_tokens < least_tokens:
        height, width = workload.image_size
        raise UsageError(
            f"{format_count(workload.images, 'image')} of {width}x{height} and a question need "
            f"{least_tokens} tokens; the prompt has {workload.prompt_tokens}",
            hint=f"use a context of at least {least_tokens + workload.new_tokens} tokens, or "
            "smaller images",
        )


def with_quantization(workload: Workload) -> tuple[Workload, ...]:
    """Return the workloads to try for its quantization, in order."""
    if workload.quantize != "auto":
        return (workload,)
    forms = AUTO_QUANTIZATIONS if workload.training is None else TRAINED_QUANTIZATIONS
    return tuple(replace(workload, quantize=form) for form in forms)


def _make_whole(data: Workload | Training, name: str, least: int) -> None:
    """Check a field for a whole number, and keep Python's own int."""
    object.__setattr__(data, name, whole_number(name, getattr(data, name), least))


def whole_number(name: str, value: Any, least: int) -> int:
    """Return a value as int; raise UsageError for no whole number, or below the least."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise UsageError(
            f"{name} is {value!r}; it must be an integer",
            hint=f"use a number of at least {least}, or omit it",
        )
    number = operator.index(value)
    if number < least:
        raise UsageError(
            f"{name} is {number}; it must be at least {least}",
            hint=f"use a number of at least {least}, or omit it",
        )
    return number


def loss_chunk_tokens(num_tokens: int) -> int:
    """Return the tokens of each chunk in which training computes logits and loss.

    Examples
    --------
    >>> [loss_chunk_tokens(number) for number in (5, 1024, 1025, 8192)]
    [5, 1024, 513, 1024]
    """
    num_chunks = -(-num_tokens // _LOSS_CHUNK_TOKENS)
    return -(-num_tokens // max(num_chunks, 1))
