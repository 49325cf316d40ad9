"""Workloads: batch, context and cache of inference, or a batch to train on."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, SupportsIndex, get_args

from duoka.base.serialization import OMIT_DEFAULT
from duoka.base.text import choose
from duoka.checkpoint.adapters import check_adapters
from duoka.errors import UsageError
from duoka.hardware.gpu_generation import GpuGeneration

ALL_EXPERTS = ("*",)  # `Workload.host_experts` for the experts of all layers
Dtype = Literal["auto", "float32", "float16", "bfloat16"]
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
Cache = Literal["dynamic", "int8", "paged", "paged-int8"]
Quantization = Literal["none", "int8", "int4", "nf4", "auto"]
AUTO_QUANTIZATIONS: tuple[Quantization, ...] = ("none", "int8", "int4")
"""The quantizations tried for "auto", in order: the first that fits is used."""
TRAINED_QUANTIZATIONS: tuple[Quantization, ...] = ("none", "int8", "nf4")
"""The quantizations tried for "auto" in training, whose frozen weights are beside adapters."""
Logits = Literal["last", "all"]
Method = Literal["lora", "full"]
Optimizer = Literal["adamw", "adamw8bit", "adafactor", "sgd"]
Schedule = Literal["sequential", "gpipe", "1f1b"]
Rows = Literal["padded", "unpadded", "packed"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
CACHES: tuple[Cache, ...] = get_args(Cache)
PAGED_CACHES: tuple[Cache, ...] = ("paged", "paged-int8")
"""Caches of continuous batching, whose requests arrive and finish at any time."""
QUANTIZATIONS: tuple[Quantization, ...] = get_args(Quantization)
OPTIMIZERS: tuple[Optimizer, ...] = get_args(Optimizer)
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
ROWS: tuple[Rows, ...] = get_args(Rows)
METHODS: tuple[Method, ...] = get_args(Method)
QUANTIZED: tuple[Quantization, ...] = ("int8", "int4", "nf4")
_DTYPE_WORDS = {"fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16"}
# transformers' `load_in_8bit` and `load_in_4bit`.
_QUANTIZATION_WORDS = {"8bit": "int8", "4bit": "nf4"}

# Far larger than any real workload; beyond these, bytes might not fit 64-bit integers.
PAGE_TOKENS, LATENT_PAGE_TOKENS, BLOCK_TABLE_PAGE_TOKENS = _PAGE_SIZES = 16, 32, 256
"""The page sizes in tokens, each for one kind of attention: over gathered keys, over gathered
latents (MLA), and FlashAttention, whose block tables need pages of a multiple of 256 tokens."""
MOST_BATCH = 2**16
MOST_TOKENS = 2**24
MOST_BATCH_TOKENS = 2**30
# Smaller chunks are slower. Logits of 151,552 columns and their loss take about 2 GB.
_LOSS_CHUNK_TOKENS = 2**10


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Settings of training a model.

    Parameters
    ----------
    method : {"lora", "full"}
        Low-rank adapters beside frozen weights (peft), or every parameter.
    optimizer : {"adamw", "adamw8bit", "adafactor", "sgd"}
        AdamW, Adafactor and SGD of torch; "adamw8bit" is bitsandbytes' AdamW with 8-bit states.
    lora_rank : int
        Rank of the adapters.
    lora_alpha : int, optional
        Adapter outputs are scaled by this number divided by the rank; None is twice the rank.
    rslora : bool
        Divide `lora_alpha` by the square root of the rank instead (rsLoRA).
    lora_dropout : float
        Dropout probability of adapter inputs, from 0 to below 1.
    lora_targets : tuple of str
        Names of the modules that get adapters, as in peft's ``target_modules``; empty for every
        linear layer except the head ("all-linear").
    gradient_checkpointing : bool
        Recompute a layer's activations in the backward pass instead of keeping them.
    master_weights : bool
        Keep trained parameters, gradients and optimizer states in float32; compute under autocast.
    micro_batches : int
        Micro-batches whose gradients are accumulated before the optimizer's step.
    schedule : {"sequential", "gpipe", "1f1b"}
        Micro-batches in flight at a stage: one, all, or one for each stage from this to the last.
    train_vision : bool
        Also train modules that only images reach, such as a vision tower; else they are frozen.
    dpo : bool
        Train on preferences (DPO): on pairs of sequences, which a batch has one after the other.
        The time of the reference model's forward passes is counted.
    rows : {"padded", "unpadded", "packed"}
        "padded": a mask covers the padding. "unpadded": no mask, which a causal model doesn't need.
        "packed": several samples per row, separated by a mask.

    Raises
    ------
    UsageError
        If a number isn't positive and whole, is out of range, or a name is unknown.
    """

    method: Method = "lora"
    optimizer: Optimizer = "adamw"
    lora_rank: int = 8
    lora_alpha: int | None = None
    rslora: bool = False
    lora_dropout: float = 0.0
    lora_targets: tuple[str, ...] = ()
    gradient_checkpointing: bool = False
    master_weights: bool = False
    micro_batches: int = 1
    schedule: Schedule = "sequential"
    train_vision: bool = field(default=False, metadata=OMIT_DEFAULT)
    dpo: bool = field(default=False, metadata=OMIT_DEFAULT)
    rows: Rows = "padded"

    def __post_init__(self) -> None:
        for name in ("lora_rank", "micro_batches", "lora_alpha"):
            if getattr(self, name) is not None:
                _check_whole(self, name, 1)
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
    """The part of a workload that changes code paths rather than sizes.

    A profile holds for one set of conditions, and for any batch, context, prefill chunk, optimizer
    and number of micro-batches. With images, the prefill chunk is a condition too.
    """

    cache: Cache = "dynamic"
    quantize: Quantization = "none"
    images: int = 0
    image_size: tuple[int, int] | None = None
    vision_batch: int | None = None
    image_chunk_tokens: int | None = None
    logits: Logits = "last"
    before_ampere: bool = False
    page_tokens: int = PAGE_TOKENS
    training: Training | None = None
    host_experts: bool = False
    expert_cache_bytes: int = 0
    adapters: tuple[str, ...] = field(default=(), metadata=OMIT_DEFAULT)

    @property
    def is_paged(self) -> bool:
        """True if the KV cache is paged."""
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
        Sequences that run together. Several prompts are forecast with padding and a mask.
    prompt_tokens : int
        Tokens of each prompt or trained sequence.
    new_tokens : int
        Generated tokens of each sequence; 0 in training.
    dtype : {"auto", "float32", "float16", "bfloat16"}
        Dtype of the weights, also as "fp32" and so on; "auto" is that of the checkpoint.
    prefill_chunk_tokens : int, None or "auto"
        Prompt tokens that run in one step. None is the whole prompt, "auto" as many as fit.
    cache : {"dynamic", "int8", "paged", "paged-int8"}
        The KV cache: "dynamic" grows with each token, as in `generate`, "int8" too, in 8 bit;
        "paged" has pages, which requests hold while they run (`Engine`), "paged-int8" 8-bit pages.
        With pages, `batch` is the most running requests, `prefill_chunk_tokens` a step's tokens.
    quantize : {"none", "int8", "int4", "nf4", "auto"}
        Quantization of the weights of linear layers while loading; "auto" is the first of "none",
        "int8", "int4" that fits ("nf4" instead of "int4" in training). Use "none" for a checkpoint
        that is quantized already. "8bit" and "4bit" of bitsandbytes mean "int8" and "nf4".
    images : int
        Images in each prompt. Their tokens are part of `prompt_tokens`.
    image_size : tuple of int
        Height and width of each image in pixels, before the model's own preprocessing.
    vision_batch : int, None or "auto"
        Images that the vision tower encodes at a time: a number, None for all of the batch, or
        "auto" for all if they fit, otherwise the largest number that fits.
    logits : {"last", "all"}
        Prompt positions with logits: the last one, to generate from, or all, to score a text.
    pages : int, optional
        Pages of a paged cache; by default as many as fit.
    pages_for_batch : bool
        True to set `pages` to those of `batch` full contexts, as `duoka generate` and `chat` do.
    page_tokens : {16, 32, 256}
        Tokens of a page; planning sets it unless `pages` are given. FlashAttention reads pages of
        256 tokens in place; other attention gathers pages of 16 tokens, or 32 of latents (MLA).
    cuda_graphs : bool or int
        Replay FlashAttention's decode steps as CUDA graphs; an int is the most tokens of a step.
    gpu_generation : GpuGeneration
        Generation of the GPUs; planning sets it to that of the fleet.
    training : Training, optional
        Settings of training on a batch of sequences; None for inference.
    host_experts : tuple of str
        Names of modules of experts in host memory, set by planning; or `ALL_EXPERTS`.
    expert_cache_bytes : int
        Size of the GPU's cache for each of them, if GPUs fetch; 0 if the CPU computes.
    adapters : tuple of (str, str)
        Name and directory of each LoRA adapter that requests over a paged cache may choose.
    adapter_digests : tuple of str
        Hash of the shapes of each adapter, set by planning.

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
    pages_for_batch: bool = False
    page_tokens: int = PAGE_TOKENS
    cuda_graphs: bool | int = True
    gpu_generation: GpuGeneration = field(default_factory=GpuGeneration)
    training: Training | None = None
    host_experts: tuple[str, ...] = field(default=(), metadata=OMIT_DEFAULT)
    expert_cache_bytes: int = field(default=0, metadata=OMIT_DEFAULT)
    adapters: tuple[tuple[str, str], ...] = field(default=(), metadata=OMIT_DEFAULT)
    adapter_digests: tuple[str, ...] = field(default=(), metadata=OMIT_DEFAULT)

    def __post_init__(self) -> None:
        for name in ("batch", "prompt_tokens"):
            _check_whole(self, name, 1)
        _check_whole(self, "new_tokens", 1 if self.training is None else 0)
        _check_whole(self, "images", 0)
        self._check_image_size()
        object.__setattr__(self, "dtype", read_dtype(self.dtype))
        object.__setattr__(self, "quantize", read_quantization(self.quantize))
        if self.training is not None:
            self._refuse_in_training()
        self._refuse_too_many()
        self._check_parts()
        choose("cache", self.cache, CACHES)
        if self.cache != "paged":  # also of a workload whose cache has been changed
            object.__setattr__(self, "page_tokens", PAGE_TOKENS)
        self._check_pages()
        check_adapters(self.adapters, self.cache, is_paged=self.is_paged)
        choose("logits", self.logits, get_args(Logits))

    def _check_pages(self) -> None:
        """Check `pages`, and refuse images over a paged cache."""
        if self.is_paged and self.images:
            raise UsageError(
                f"images is {self.images}, which the paged KV cache doesn't support",
                hint="omit --serve and --cache",
            )
        if self.page_tokens not in _PAGE_SIZES:
            raise UsageError(f"page_tokens is {self.page_tokens!r}", hint="omit it")
        if self.pages_for_batch:  # also after a change of the batch, the context or the cache
            pages = self.batch * -(-self.context_tokens // self.page_tokens)
            object.__setattr__(self, "pages", pages if self.is_paged else None)
            object.__setattr__(self, "pages_for_batch", self.is_paged)
        if self.pages is None:
            return
        _check_whole(self, "pages", 1)
        if not self.is_paged:
            raise UsageError(
                f"the cache is {self.cache}, and pages is {self.pages}",
                hint="pages need a paged KV cache (--serve)",
            )

    def _check_image_size(self) -> None:
        """Check `image_size`, and store it as a tuple of two ints."""
        try:
            size = tuple(whole_number("image_size", pixels, 1) for pixels in self.image_size)
        except TypeError:  # not iterable
            size = ()
        if len(size) != 2:
            raise UsageError(
                f"image_size is {self.image_size!r}; it must be two numbers",
                hint="give height and width in pixels, such as (1024, 768)",
            )
        object.__setattr__(self, "image_size", size)

    def _check_parts(self) -> None:
        """Check the prefill chunk and the vision batch: a number, None or "auto"."""
        for name in ("prefill_chunk_tokens", "vision_batch"):
            number = getattr(self, name)
            if isinstance(number, str) and number != "auto":
                raise UsageError(f"{name} is {number!r}", hint='give a number, None or "auto"')
            if number is None or number == "auto":
                continue
            _check_whole(self, name, 1)
            if number > MOST_TOKENS:
                raise UsageError(
                    f"{name} is {number}; it must be at most {MOST_TOKENS}",
                    hint="omit it to use the largest number that fits",
                )

    def _refuse_in_training(self) -> None:
        """Raise UsageError for settings that training doesn't support."""
        if self.new_tokens:
            raise UsageError(
                f"new_tokens is {self.new_tokens}; training doesn't generate tokens",
                hint="give the sequence's length as prompt_tokens, and new_tokens=0",
            )
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
        if self.training is not None and self.training.train_vision and not self.images:
            hint = "omit it (--train-vision), or train with images (--images N)"
            raise UsageError("train_vision is for images, and the sequences have none", hint=hint)
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
        """Raise UsageError for a batch or context beyond the limits."""
        for name, got, most in (
            ("batch", self.batch, MOST_BATCH),
            ("the context", self.context_tokens, MOST_TOKENS),
            ("batch times context", self.batch * self.context_tokens, MOST_BATCH_TOKENS),
        ):
            if got > most:
                text = f"{name} is {got}; the limit is {most}"
                raise UsageError(text, hint="plan a smaller workload")

    @property
    def context_tokens(self) -> int:
        """Tokens of a sequence at its end: prompt and generated tokens."""
        return self.prompt_tokens + self.new_tokens

    @property
    def is_paged(self) -> bool:
        """True if requests run over a paged cache, with continuous batching."""
        return self.cache in PAGED_CACHES

    @property
    def has_int8_cache(self) -> bool:
        """True if keys and values are stored in 8 bit."""
        return self.cache in ("int8", "paged-int8")

    @property
    def conditions(self) -> Conditions:
        """The conditions of a profile for this workload."""
        training = self.training
        if training is not None:
            # Any dropout probability above 0 allocates the same mask.
            dropout = 0.5 if training.lora_dropout else 0.0
            training = replace(training, optimizer="adamw", micro_batches=1, schedule="sequential")
            training = replace(training, lora_alpha=None, rslora=False, dpo=False)
            training = replace(training, lora_dropout=dropout)
        return Conditions(
            cache=self.cache,
            quantize=self.quantize,
            images=self.images,
            image_size=self.image_size if self.images else None,
            vision_batch=_read_number(self.vision_batch) if self.images else None,
            image_chunk_tokens=_read_number(self.prefill_chunk_tokens) if self.images else None,
            logits=self.logits,
            before_ampere=self.gpu_generation.before_ampere,
            page_tokens=self.page_tokens,
            training=training,
            host_experts=bool(self.host_experts),
            expert_cache_bytes=self.expert_cache_bytes if self.host_experts else 0,
            adapters=self.adapter_digests,
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
    """Return the number of images of each encoding pass; a single pass without `vision_batch`."""
    size = vision_batch or max(images, 1)
    return tuple(min(size, images - done) for done in range(0, images, size))


def _read_number(value: int | str | None) -> int | None:
    """Return a number as it is; None for None and for "auto"."""
    return value if isinstance(value, int) else None


def read_dtype(word: str) -> Dtype:
    """Return the dtype named by a word: torch's name or a short name such as "fp16"."""
    return choose("dtype", _DTYPE_WORDS.get(str(word).lower(), word), DTYPES)


def read_quantization(word: str, known: Sequence[Quantization] = QUANTIZATIONS) -> Quantization:
    """Return the quantization named by a word of duoka or bitsandbytes."""
    bare = str(word).strip().lower().replace("-", "").removeprefix("load_in_")
    return choose("quantize", _QUANTIZATION_WORDS.get(bare, word), known)


def with_quantization(workload: Workload) -> tuple[Workload, ...]:
    """Return the workload with each quantization to try, in order; "auto" stands for several."""
    if workload.quantize != "auto":
        return (workload,)
    forms = AUTO_QUANTIZATIONS if workload.training is None else TRAINED_QUANTIZATIONS
    return tuple(replace(workload, quantize=form) for form in forms)


def _check_whole(data: Workload | Training, name: str, least: int) -> None:
    """Check that a field is a whole number of at least `least`, and store it as an int."""
    object.__setattr__(data, name, whole_number(name, getattr(data, name), least))


def whole_number(name: str, value: Any, least: int) -> int:
    """Return a value as an int; raise UsageError if not an integer, or less than `least`."""
    is_integer = isinstance(value, SupportsIndex) and not isinstance(value, bool)
    if not is_integer or operator.index(value) < least:
        condition = f"at least {least}" if is_integer else "an integer"
        raise UsageError(
            f"{name} is {value!r}; it must be {condition}",
            hint=f"use a number of at least {least}, or omit it",
        )
    return operator.index(value)


def loss_chunk_tokens(num_tokens: int) -> int:
    """Return the most tokens of a chunk of the loss, in which training computes logits.

    Examples
    --------
    >>> [loss_chunk_tokens(number) for number in (5, 1024, 1025, 8192)]
    [5, 1024, 513, 1024]
    """
    num_chunks = -(-num_tokens // _LOSS_CHUNK_TOKENS)
    return -(-num_tokens // max(num_chunks, 1))
