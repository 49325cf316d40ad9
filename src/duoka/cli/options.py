"""The options that several commands have, and how their values are read."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from duoka.base.files import why
from duoka.base.text import choose
from duoka.errors import UsageError
from duoka.forecast import workload

_TOKENS = re.compile(r"([1-9][0-9]{0,9})([kKmM]?)", re.ASCII)
_PIXELS = re.compile(r"([1-9][0-9]{0,5})[xX]([1-9][0-9]{0,5})", re.ASCII)
_FACTORS = {"": 1, "K": 1024, "M": 1024 * 1024}

_DTYPES = {"fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16"}

PLANNING = "What to plan for"
ANSWERING = "How to answer"


@dataclass(slots=True)
class State:
    """What holds for the whole run of the program."""

    debug: bool = False


def parse_tokens(text: str) -> int:
    """Read a number of tokens: "8192", "8K" or "1M" (K is 1024)."""
    match = _TOKENS.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"{text!r} is not a number of tokens", hint="write a number, as 8192, 8K or 1M"
        )
    return int(match[1]) * _FACTORS[match[2].upper()]


def parse_chunk(text: str) -> int | Literal["auto"] | None:
    """Read a prefill chunk: a number of tokens, "auto", or "none" for the whole prompt."""
    if text == "auto":
        return "auto"
    return None if text == "none" else parse_tokens(text)


def parse_image_size(text: str) -> tuple[int, int]:
    """Read width and height, as "1120x1120", into height and width."""
    match = _PIXELS.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"{text!r} is not the size of an image",
            hint="write width and height in pixels, as 1120x1120",
        )
    return int(match[2]), int(match[1])


def parse_dtype(text: str) -> workload.Dtype:
    """Read a type by torch's name of it, or a short one."""
    return choose("dtype", _DTYPES.get(text.lower(), text), workload.DTYPES)


def read_stdin(*, line: bool = False) -> str:
    """Read the standard input, or one line of it."""
    try:
        return sys.stdin.readline() if line else sys.stdin.read()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"the standard input can't be read: {why(error)}", hint="write it in UTF-8"
        ) from error


def refuse_damaged(text: str) -> None:
    """Raise UsageError for text with bytes that are no characters, as a shell can pass them."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{text[:60]!a} is no valid text: {error.reason}", hint="write it in UTF-8"
        ) from error


Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="Directory of a checkpoint (config.json, weights), a config.json to plan for, or a "
        'model on the Hub, as "org/name" or "org/name@revision".',
        show_default=False,
    ),
]
Revision = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help='Branch, tag or commit of a model on the Hub. By default "main".',
        show_default=False,
    ),
]
Gpus = Annotated[
    str | None,
    typer.Option(
        metavar="GPUS",
        help='GPUs of this machine as nvidia-smi numbers them ("2,3") or by UUID, cards '
        '("2xRTX4090+1xRTX3090"), budgets ("24GiB,12GiB"), or virtual ones ("virtual:2x24GiB"). '
        "By default all that this process may use, with their free memory.",
        rich_help_panel=PLANNING,
        show_default=False,
    ),
]
Context = Annotated[
    str | None,
    typer.Option(
        metavar="TOKENS",
        help="Tokens of a sequence in all, prompt and answer: 8192 or 8K. "
        "By default 4K, or the model's limit if that is lower.",
        rich_help_panel=PLANNING,
        show_default=False,
    ),
]
NewTokens = Annotated[
    str | None,
    typer.Option(
        "--new-tokens",
        metavar="TOKENS",
        help="How many of them are for an answer. By default 512, at most a quarter.",
        rich_help_panel=PLANNING,
        show_default=False,
    ),
]
Batch = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Prompts that run together. By default 1, or as many as are given.",
        rich_help_panel=PLANNING,
        show_default=False,
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        metavar="DTYPE",
        help="float32, float16 (fp16), bfloat16 (bf16) or auto (the default): the "
        "checkpoint's own.",
        rich_help_panel=PLANNING,
        show_default=False,
    ),
]
PrefillChunk = Annotated[
    str | None,
    typer.Option(
        "--prefill-chunk",
        metavar="TOKENS",
        help='Prompt tokens that run at once: a number, "none" (all) or "auto" '
        "(the default: all if it fits, or else the largest chunk that does).",
        rich_help_panel=PLANNING,
        show_default=False,
    ),
]
Cache = Annotated[
    str | None,
    typer.Option(
        metavar="KIND",
        help="The KV cache: dynamic (the default) grows with each token, static is made for the "
        "whole context at once, int8 grows and takes half the memory of 16 bit.",
        rich_help_panel=PLANNING,
        show_default=False,
    ),
]
Quantize = Annotated[
    str | None,
    typer.Option(
        metavar="KIND",
        help="What the weights of linear layers become while they are loaded: none (the default), "
        "int8, int4, nf4, or auto: the first of none, int8 and int4 that fits.",
        rich_help_panel=PLANNING,
        show_default=False,
    ),
]
Images = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Images in each prompt; their tokens are part of it. By default none.",
        rich_help_panel=PLANNING,
        show_default=False,
    ),
]
ImageSize = Annotated[
    str | None,
    typer.Option(
        "--image-size",
        metavar="WIDTHxHEIGHT",
        help="Size of each image in pixels. By default 1024x1024.",
        rich_help_panel=PLANNING,
        show_default=False,
    ),
]
Objective = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="headroom, latency, throughput or auto (the default).",
        rich_help_panel=PLANNING,
        show_default=False,
    ),
]
UseAll = Annotated[
    bool,
    typer.Option(
        "--use-all",
        help="Use every GPU, instead of as few as hold the workload.",
        rich_help_panel=PLANNING,
    ),
]
Strategy = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="auto (the default: as few GPUs as needed, by the objective), balanced (every GPU, "
        "equally full) or sequential (in the order given, each filled before the next).",
        rich_help_panel=PLANNING,
        show_default=False,
    ),
]
Pin = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=GPU",
        help='Put a module or tensor on a GPU: "lm_head=cuda:1". Repeatable.',
        rich_help_panel=PLANNING,
        show_default=False,
    ),
]
Uncut = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help='Don\'t cut right before a module, "model.layers.12", or within a range, '
        '"model.layers.0-7". Repeatable.',
        rich_help_panel=PLANNING,
        show_default=False,
    ),
]
Reserve = Annotated[
    list[str] | None,
    typer.Option(
        metavar="GPU=SIZE",
        help='Leave so much of a GPU free: "cuda:0=2GiB". Repeatable.',
        rich_help_panel=PLANNING,
        show_default=False,
    ),
]
Offload = Annotated[
    bool,
    typer.Option(
        "--offload",
        help="Where nothing else fits, keep weights in the CPU's memory, as few as can be; they "
        "are copied to a GPU for each token, which is slow.",
        rich_help_panel=PLANNING,
    ),
]
MaxContext = Annotated[
    bool,
    typer.Option(
        "--max-context",
        help="Plan for the longest context that fits, instead of --context.",
        rich_help_panel=PLANNING,
    ),
]
MaxBatch = Annotated[
    bool,
    typer.Option(
        "--max-batch",
        help="Plan for the largest batch that fits, instead of --batch.",
        rich_help_panel=PLANNING,
    ),
]
Copies = Annotated[
    str | None,
    typer.Option(
        "--replicas",
        metavar="N",
        help='Plan so many copies of the model, each on GPUs of its own; "auto" for as many as '
        "fit.",
        rich_help_panel=PLANNING,
        show_default=False,
    ),
]
DeviceMapFile = Annotated[
    Path | None,
    typer.Option(
        "--device-map",
        metavar="FILE",
        help="Put the modules where a JSON file says, in the names of the model or its checkpoint.",
        rich_help_panel=PLANNING,
        show_default=False,
    ),
]
PlanFile = Annotated[
    Path | None,
    typer.Option(
        "--plan",
        metavar="FILE",
        help="Take a plan that was saved, instead of making one.",
        rich_help_panel=PLANNING,
        show_default=False,
    ),
]
Replan = Annotated[
    bool,
    typer.Option(
        "--replan",
        help="Make the plan of --plan again, for the checkpoint and the GPUs as they are now, and "
        "save it there.",
        rich_help_panel=PLANNING,
    ),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Run model code that comes with the checkpoint. It can do whatever you can.",
    ),
]


def _set_debug(context: typer.Context, wanted: bool) -> bool:
    if isinstance(context.obj, State):
        context.obj.debug |= wanted
    return wanted


Debug = Annotated[
    bool,
    typer.Option(
        "--debug",
        help="Show the traceback of every error.",
        callback=_set_debug,
        is_eager=True,  # so that it also holds for options that can't be read
    ),
]
CacheWeights = Annotated[
    bool,
    typer.Option(
        "--cache-weights",
        help="Keep stacked weights (a mixture's experts) in duoka's cache in the model's form, so "
        "that the next load is faster. It takes their size on the disk, and says where.",
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        help="0 takes the likeliest token each time. By default what the checkpoint recommends.",
        rich_help_panel=ANSWERING,
        show_default=False,
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(
        "--top-p",
        help="Choose among the likeliest tokens that have this much probability together.",
        rich_help_panel=ANSWERING,
        show_default=False,
    ),
]
TopK = Annotated[
    int | None,
    typer.Option(
        "--top-k",
        help="Choose among this many tokens; 0 for no limit.",
        rich_help_panel=ANSWERING,
        show_default=False,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        help="The same seed gives the same answer.", rich_help_panel=ANSWERING, show_default=False
    ),
]
System = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT",
        help="What the model is told before the first question.",
        rich_help_panel=ANSWERING,
        show_default=False,
    ),
]
