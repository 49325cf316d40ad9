"""Options shared by commands, and functions that parse their values."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from duoka.base.files import reading
from duoka.checkpoint.sampling_params import Sampling
from duoka.errors import UsageError
from duoka.forecast.workload import CACHES, DTYPES, QUANTIZATIONS
from duoka.planner.constraints import EXPERTS, HOST_EXPERTS, STRATEGIES
from duoka.planner.search import OBJECTIVES

from .groups import OptionGroup, all_but, argument, flag, option

_TOKENS_PATTERN = re.compile(r"([1-9][0-9]{0,9})([kKmM]?)", re.ASCII)
_PIXELS_PATTERN = re.compile(r"([1-9][0-9]{0,5})[xX×]([1-9][0-9]{0,5})", re.ASCII)
_FACTORS = {"": 1, "K": 1024, "M": 1024 * 1024}

IMAGE_SIZE = "1024x1024"
PLANNING = "What to plan for"
_plan = partial(option, panel=PLANNING)
_plan_flag = partial(flag, panel=PLANNING)
_answer = partial(option, panel="How to answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions(OptionGroup):
    """Options that name the model and allow its own code to run."""

    model: str | None = argument(
        "MODEL",
        "Directory of a checkpoint (config.json, weights), a config.json to plan for, or a model "
        'on the Hub ("org/name" or "org/name@revision") or ModelScope ("modelscope:org/name").',
    )
    revision: str | None = option(
        "NAME",
        'Branch, tag or commit of a model on the Hub or ModelScope. By default "main" or "master".',
    )
    trust_remote_code: bool = flag(
        "Run the checkpoint's own model and tokenizer code. It has all your permissions."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions(OptionGroup):
    """Planning options, as strings from the command line; None if not given."""

    gpus: str | None = _plan(
        "GPUS",
        'GPUs of this machine as nvidia-smi numbers them ("2,3") or by UUID, cards '
        '("2xRTX4090+1xRTX3090"), budgets ("24GiB,12GiB"), or virtual ones ("virtual:2x24GiB"). '
        "By default all GPUs visible to this process, with their free memory.",
    )
    context: str | None = _plan(
        "TOKENS",
        "Total tokens of a sequence, prompt and generated: 8192 or 8K. By default 4K (2K with "
        "--train), or the model's limit if that is lower; 512 for duoka bench --quality.",
    )
    new_tokens: str | None = _plan(
        "TOKENS",
        "Generated tokens: reserved in the context, and the maximum per answer. By default 512 "
        "(at most a quarter of the context) are reserved, and an answer may use the rest of the "
        "context.",
    )
    batch: int | None = _plan(
        "N",
        "Batch size: prompts that run together. By default 1, or the number of prompts given. "
        "With --train sequences per optimizer step, by default 8.",
    )
    serve: bool = _plan_flag(
        "Plan for continuous batching over a paged KV cache that fills the free memory, as "
        "duoka.Engine and duoka serve run."
    )
    sequences: int | None = _plan(
        "N",
        "With --serve and in duoka bench: maximum number of concurrent requests. By default 16.",
    )
    dtype: str | None = _plan(
        "DTYPE",
        "float32, float16 (fp16), bfloat16 (bf16) or auto (the default): the checkpoint's own.",
        values=DTYPES,
    )
    prefill_chunk: str | None = _plan(
        "TOKENS",
        'Prefill chunk size in tokens: a number, "none" (whole prompt) or "auto" (the default: '
        "the whole prompt if it fits, otherwise the largest chunk that fits).",
        values=("none", "auto"),
    )
    cache: str | None = _plan(
        "KIND",
        "KV cache: dynamic (the default of plan, grows with each token), int8 (half the memory of "
        "16 bit), paged (the default of generate and chat, if the model supports it: pages for "
        "--batch full contexts) or paged-int8. With --serve, int8 means 8-bit pages.",
        values=CACHES,
    )
    adapter: list[str] | None = _plan(
        "[NAME=]DIR",
        "LoRA adapter that requests choose by NAME as their model, with --serve and in duoka "
        "serve; repeatable. duoka serve merges a DIR without a name into the weights.",
    )
    no_graphs: bool = _plan_flag(
        "Run decode steps without CUDA graphs. They need some memory, and are used with a paged KV "
        "cache where FlashAttention reads the pages, or of latents."
    )
    quantize: str | None = _plan(
        "KIND",
        "Quantization of linear weights during loading: none (the default), int8, int4, nf4, or "
        "auto (the first of none, int8 and int4 that fits). 8bit and 4bit mean int8 and nf4, as "
        "in bitsandbytes.",
        values=QUANTIZATIONS,
    )
    images: int | None = _plan(
        "N", "Images per prompt; their tokens count toward --context. By default none."
    )
    image_size: str | None = _plan(
        "WIDTHxHEIGHT", "Size of each image in pixels. By default 1024x1024."
    )
    vision_batch: str | None = _plan(
        "N",
        'Images encoded at once: a number, "none" (all) or "auto" (the default: all if they fit, '
        "otherwise the largest number that fits).",
        values=("none", "auto"),
    )
    objective: str | None = _plan(
        "NAME",
        "Objective: headroom, latency, throughput, pages (with --serve) or auto (the default).",
        values=OBJECTIVES,
    )
    use_all: bool = _plan_flag("Use every GPU instead of the fewest that fit.")
    strategy: str | None = _plan(
        "NAME",
        "auto (the default: the fewest GPUs that fit, optimal for the objective), balanced "
        "(every GPU, equal shares) or sequential (fill each GPU in the order given before the "
        "next).",
        values=STRATEGIES,
    )
    pin: list[str] | None = _plan(
        "NAME=GPU", 'Place a module or tensor on a GPU: "lm_head=cuda:1". Repeatable.'
    )
    reserve: list[str] | None = _plan(
        "GPU=SIZE", 'Memory to leave free on a GPU: "cuda:0=2GiB". Repeatable.'
    )
    offload: bool = _plan_flag(
        "If nothing else fits, offload as few weights as possible to CPU memory; they are copied "
        "to a GPU for each token, which is slow."
    )
    experts: str | None = _plan(
        "PLACE",
        'Where the experts of a mixture of experts are: "auto" (the default) keeps the experts of '
        "as few layers as possible in host memory if the GPUs can't hold them and the size of "
        'host memory is known; "host" keeps all there, "gpu" none.',
        values=EXPERTS,
    )
    host_experts: str | None = _plan(
        "WAY",
        'How experts in host memory are used: "compute" lets the CPU compute them, "fetch" copies '
        'those that a token needs to its GPU, which keeps those used last; "auto" (the default) '
        "fetches if the GPUs read host memory faster than the CPU.",
        values=HOST_EXPERTS,
    )
    expert_cache: str | None = _plan(
        "SIZE",
        "With --host-experts fetch: memory per GPU, on average, for the experts that it keeps, or "
        '"auto" (the default: as many as fit, with --serve in half of the memory left).',
        values=("auto",),
    )
    host_memory: str | None = _plan(
        "SIZE[,RATE]",
        "Host memory for experts and offloaded weights, and optionally its bandwidth: "
        '"64GiB,60GB/s". By default the memory available on this machine; unknown for declared '
        "GPUs.",
    )
    max_context: bool = _plan_flag("Plan for the longest context that fits, instead of --context.")
    max_batch: bool = _plan_flag(
        "Plan for the largest batch that fits, instead of --batch; with --serve for the largest "
        "number of concurrent requests of --context tokens, with --train for the largest "
        "micro-batch."
    )
    replicas: str | None = _plan(
        "N", 'Number of data-parallel replicas, each on its own GPUs; "auto" for as many as fit.'
    )
    device_map: str | None = _plan(
        "FILE",
        "Place the modules as in a JSON device map, by names of the model or of its checkpoint; "
        "auto, balanced and sequential are accepted as strategies.",
    )
    plan_file: Path | None = _plan(
        "FILE", "Use a saved plan instead of making one.", names=("--plan",)
    )
    replan: bool = _plan_flag(
        "Make the plan of --plan again for the current checkpoint and GPUs, and save it there."
    )

    @property
    def most_new_tokens(self) -> int | None:
        """Maximum tokens of an answer (--new-tokens); None if not given."""
        return None if self.new_tokens is None else parse_tokens(self.new_tokens)


RunnablePlan = Annotated[
    PlanOptions,
    all_but(
        PlanOptions,
        *("images", "image_size", "max_context", "max_batch", "replicas", "serve", "sequences"),
        "adapter",
    ),
]
"""Options of `PlanOptions` for commands that run the planned model in one batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions(OptionGroup):
    """Options of generation: sampling, system prompt and adapter."""

    temperature: float | None = _answer(
        "NUMBER",
        "Sampling temperature; 0 is greedy decoding. By default the checkpoint's recommended "
        "value.",
    )
    top_p: float | None = _answer(
        "NUMBER",
        "Nucleus sampling: sample from the most likely tokens with this total probability.",
    )
    top_k: int | None = _answer("N", "Sample from this many most likely tokens; 0 for no limit.")
    seed: int | None = _answer("N", "Random seed; the same seed gives the same answer.")
    system: str | None = _answer("TEXT", "System prompt.")
    adapter: str | None = _answer(
        "DIR", "A LoRA adapter (from duoka tune or peft) to merge into the weights."
    )

    def sampling(self) -> dict[str, Any]:
        """Return the given sampling parameters by name; UsageError for values out of range."""
        refuse_damaged(self.system or "")
        values: dict[str, Any] = {
            name: number
            for name in ("temperature", "top_p", "top_k", "seed")
            if (number := getattr(self, name)) is not None
        }
        Sampling(**values)
        return values


def parse_tokens(text: str) -> int:
    """Parse a number of tokens: "8192", "8K" or "1M" (K is 1024)."""
    match = _TOKENS_PATTERN.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"{text!r} is not a number of tokens", hint="write a number such as 8192, 8K or 1M"
        )
    return int(match[1]) * _FACTORS[match[2].upper()]


def parse_chunk(text: str) -> int | Literal["auto"] | None:
    """Parse a chunk size: a number, "auto", or "none" (None: everything in one chunk)."""
    if text == "auto":
        return "auto"
    return None if text == "none" else parse_tokens(text)


def parse_pixels(text: str) -> tuple[int, int]:
    """Parse (width, height) in pixels, such as "1120x560"."""
    match = _PIXELS_PATTERN.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"{text!r} is not an image size",
            hint="write width and height in pixels, such as 1120x1120",
        )
    return int(match[1]), int(match[2])


def read_stdin(*, line: bool = False) -> str:
    """Read the whole standard input, or with `line` its next line ("" at the end)."""
    with reading("the standard input", hint="give text in UTF-8"):
        return sys.stdin.readline() if line else sys.stdin.read()


def refuse_damaged(text: str) -> None:
    """Raise UsageError if a text contains bytes that are not UTF-8, as a shell may pass them."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{text[:60]!a} is not valid text: {error.reason}", hint="use UTF-8"
        ) from error
