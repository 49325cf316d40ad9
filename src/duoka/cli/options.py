"""Options shared by commands, and the readers of their values."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from duoka.base.files import why
from duoka.base.text import choose
from duoka.checkpoint.sampling_params import Sampling
from duoka.errors import UsageError
from duoka.forecast.workload import BATCH_CACHES, DTYPES, QUANTIZATIONS
from duoka.planner.constraints import STRATEGIES
from duoka.planner.plan_profile import CONVENTIONS, Convention
from duoka.planner.search import OBJECTIVES

from .groups import OptionGroup, all_but, argument, flag, option

_TOKENS = re.compile(r"([1-9][0-9]{0,9})([kKmM]?)", re.ASCII)
_PIXELS = re.compile(r"([1-9][0-9]{0,5})[xX×]([1-9][0-9]{0,5})", re.ASCII)
_FACTORS = {"": 1, "K": 1024, "M": 1024 * 1024}

IMAGE_SIZE = "1024x1024"
PLANNING = "What to plan for"
_plan = partial(option, panel=PLANNING)
_plan_flag = partial(flag, panel=PLANNING)
_answer = partial(option, panel="How to answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions(OptionGroup):
    """The model, and its permissions."""

    model: str | None = argument(
        "MODEL",
        "Directory of a checkpoint (config.json, weights), a config.json to plan for, or a model "
        'on the Hub, as "org/name" or "org/name@revision".',
    )
    revision: str | None = option(
        "NAME", 'Branch, tag or commit of a model on the Hub. By default "main".'
    )
    trust_remote_code: bool = flag(
        "Run the model's and tokenizer's code from the checkpoint. It can do whatever you can."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions(OptionGroup):
    """The demands on a plan, as written; None if not given."""

    gpus: str | None = _plan(
        "GPUS",
        'GPUs of this machine as nvidia-smi numbers them ("2,3") or by UUID, cards '
        '("2xRTX4090+1xRTX3090"), budgets ("24GiB,12GiB"), or virtual ones ("virtual:2x24GiB"). '
        "By default all that this process may use, with their free memory.",
    )
    context: str | None = _plan(
        "TOKENS",
        "Tokens of a sequence in all, prompt and answer: 8192 or 8K. By default 4K, or the "
        "model's limit if that is lower; of duoka bench --quality 512.",
    )
    new_tokens: str | None = _plan(
        "TOKENS",
        "How many of them are kept for an answer, and the most that one has. By default 512, at "
        "most a quarter, are kept, and an answer may take the rest of the context.",
    )
    batch: int | None = _plan(
        "N", "Prompts that run together. By default 1, or as many as are given."
    )
    serve: bool = _plan_flag(
        "Plan for requests that come and go, over a cache in pages that fills what is free: so "
        "duoka.Engine answers them."
    )
    sequences: int | None = _plan(
        "N",
        "With --serve, and of duoka bench: requests that are answered at once, at most. By "
        "default 16.",
    )
    dtype: str | None = _plan(
        "DTYPE",
        "float32, float16 (fp16), bfloat16 (bf16) or auto (the default): the checkpoint's own.",
        values=DTYPES,
    )
    prefill_chunk: str | None = _plan(
        "TOKENS",
        'Prompt tokens that run at once: a number, "none" (all) or "auto" (the default: all if it '
        "fits, or else the largest chunk that does).",
        values=("none", "auto"),
    )
    cache: str | None = _plan(
        "KIND",
        "The KV cache: dynamic (the default) grows with each token, int8 grows and takes half the "
        "memory of 16 bit. Pages (--serve) can be int8, too.",
        values=BATCH_CACHES,
    )
    quantize: str | None = _plan(
        "KIND",
        "What the weights of linear layers become while they are loaded: none (the default), "
        "int8, int4, nf4, or auto: the first of none, int8 and int4 that fits. 8bit and 4bit are "
        "bitsandbytes' words for int8 and nf4.",
        values=QUANTIZATIONS,
    )
    images: int | None = _plan(
        "N", "Images in each prompt; their tokens are part of it. By default none."
    )
    image_size: str | None = _plan(
        "WIDTHxHEIGHT", "Size of each image in pixels. By default 1024x1024."
    )
    vision_batch: str | None = _plan(
        "N",
        'Images that are encoded at once: a number, "none" (all) or "auto" (the default: all if '
        "they fit, or else the most that do).",
        values=("none", "auto"),
    )
    objective: str | None = _plan(
        "NAME",
        "headroom, latency, throughput, pages (of --serve) or auto (the default).",
        values=OBJECTIVES,
    )
    use_all: bool = _plan_flag("Use every GPU, instead of as few as hold the workload.")
    strategy: str | None = _plan(
        "NAME",
        "auto (the default: as few GPUs as needed, by the objective), balanced (every GPU, "
        "equally full) or sequential (in the order given, each filled before the next).",
        values=STRATEGIES,
    )
    pin: list[str] | None = _plan(
        "NAME=GPU", 'Put a module or tensor on a GPU: "lm_head=cuda:1". Repeatable.'
    )
    reserve: list[str] | None = _plan(
        "GPU=SIZE", 'Leave so much of a GPU free: "cuda:0=2GiB". Repeatable.'
    )
    offload: bool = _plan_flag(
        "Where nothing else fits, keep weights in the CPU's memory, as few as can be; they are "
        "copied to a GPU for each token, which is slow."
    )
    max_context: bool = _plan_flag("Plan for the longest context that fits, instead of --context.")
    max_batch: bool = _plan_flag(
        "Plan for the largest batch that fits, instead of --batch; with --serve for as many "
        "requests of --context tokens."
    )
    replicas: str | None = _plan(
        "N", 'Plan so many copies of the model, each on GPUs of its own; "auto" for as many as fit.'
    )
    device_map: str | None = _plan(
        "FILE",
        "Put the modules where a JSON file says, in the names of the model or its checkpoint; or "
        "transformers' words auto, balanced and sequential, which are strategies.",
    )
    plan_file: Path | None = _plan(
        "FILE", "Take a plan that was saved, instead of making one.", names=("--plan",)
    )
    replan: bool = _plan_flag(
        "Make the plan of --plan again, for the checkpoint and the GPUs as they are now, and save "
        "it there."
    )

    @property
    def most_new_tokens(self) -> int | None:
        """The tokens of an answer, if given."""
        return None if self.new_tokens is None else parse_tokens(self.new_tokens)


RunnablePlan = Annotated[
    PlanOptions,
    all_but(
        PlanOptions,
        *("images", "image_size", "max_context", "max_batch", "replicas", "serve", "sequences"),
    ),
]
"""What `PlanOptions` says of a plan for a model that is run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions(OptionGroup):
    """The parameters of answers."""

    temperature: float | None = _answer(
        "NUMBER",
        "0 takes the likeliest token each time. By default what the checkpoint recommends.",
    )
    top_p: float | None = _answer(
        "NUMBER", "Choose among the likeliest tokens that have this much probability together."
    )
    top_k: int | None = _answer("N", "Choose among this many tokens; 0 for no limit.")
    seed: int | None = _answer("N", "The same seed gives the same answer.")
    system: str | None = _answer("TEXT", "What the model is told before the first question.")
    adapter: str | None = _answer(
        "DIR", "A LoRA adapter, of duoka tune or of peft, that is added to the weights."
    )

    def sampling(self) -> dict[str, Any]:
        """Return the given sampling parameters; refuse senseless values."""
        refuse_damaged(self.system or "")
        values: dict[str, Any] = {
            name: number
            for name in ("temperature", "top_p", "top_k", "seed")
            if (number := getattr(self, name)) is not None
        }
        Sampling(**values)
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class NamesOption(OptionGroup):
    """The convention of names in device maps."""

    names: str | None = option(
        "WHOSE",
        "Whose names device maps are written in: the model's, as duoka and transformers have it "
        "(model, the default), or those of its checkpoint, as the code that comes with it has them "
        "(checkpoint).",
        values=CONVENTIONS,
    )

    @property
    def convention(self) -> Convention:
        """The convention; refused if unknown."""
        return choose("names", self.names or "model", CONVENTIONS)


def parse_tokens(text: str) -> int:
    """Read a number of tokens: "8192", "8K" or "1M" (K is 1024)."""
    match = _TOKENS.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"{text!r} is not a number of tokens", hint="write a number, as 8192, 8K or 1M"
        )
    return int(match[1]) * _FACTORS[match[2].upper()]


def parse_chunk(text: str) -> int | Literal["auto"] | None:
    """Read a chunk size: a number, "auto", or "none" for all."""
    if text == "auto":
        return "auto"
    return None if text == "none" else parse_tokens(text)


def parse_pixels(text: str) -> tuple[int, int]:
    """Read width and height, as "1120x560"."""
    match = _PIXELS.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"{text!r} is not the size of an image",
            hint="write width and height in pixels, as 1120x1120",
        )
    return int(match[1]), int(match[2])


def picture_size(text: str) -> tuple[int, int]:
    """Return width and height in pixels of a picture, by its size or file."""
    from duoka.base.images import read_image, refuse_size

    if _PIXELS.fullmatch(text.strip()):
        size = parse_pixels(text)
        refuse_size(*size)
        return size
    try:
        return read_image(Path(text)).size
    except UsageError as error:
        hint = "write its width and height in pixels, as 1120x1120, or name a file"
        raise UsageError(str(error), hint=hint) from error


def read_stdin(*, line: bool = False) -> str:
    """Read the standard input, or a line."""
    try:
        return sys.stdin.readline() if line else sys.stdin.read()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"the standard input can't be read: {why(error)}", hint="write it in UTF-8"
        ) from error


def refuse_damaged(text: str) -> None:
    """Refuse text with bytes outside of UTF-8, as from a shell."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{text[:60]!a} is no valid text: {error.reason}", hint="write it in UTF-8"
        ) from error
