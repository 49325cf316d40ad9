"""Quality: the cost of quantization, as a model's perplexity on a text.

The text is read in overlapping windows. Each window scores the tokens that earlier windows have not
scored, with at least the overlap as context. Models are loaded as for generation, one after
another; each is freed before the next is loaded.
"""

from __future__ import annotations

import gc
import inspect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from duoka.api.load import load
from duoka.api.plan import plan as make_plan
from duoka.base.files import read_text, reading
from duoka.base.progress import say
from duoka.base.text import choose
from duoka.checkpoint.checkpoint import Checkpoint
from duoka.errors import MachineError, UsageError
from duoka.forecast.workload import QUANTIZED, Dtype, Quantization, Workload
from duoka.hardware.fleet import Fleet
from duoka.models.from_checkpoint import tokenizer_of

CONTEXT_TOKENS = 512
MOST_TOKENS = 8192
_MAX_FILE_BYTES = 64 * 2**20
_MIN_TOKENS = 16
_ROWS = 64  # rows of logits converted to float32 at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Windows of a text; each begins half a window after the previous one.

    `context_tokens` is the length of a window; the text is cut after `most_tokens`.
    """

    context_tokens: int = CONTEXT_TOKENS
    most_tokens: int = MOST_TOKENS

    def __post_init__(self) -> None:
        if self.context_tokens < 2:
            raise UsageError(
                f"a context of {self.context_tokens} tokens leaves no context before the scored "
                "tokens",
                hint=f"a usual value is {CONTEXT_TOKENS}",
            )

    @property
    def stride_tokens(self) -> int:
        """Distance between the starts of two consecutive windows."""
        return self.context_tokens // 2

    # Each token is scored once, with at least half a window before it (except in the first window):
    #
    #   tokens    0 1 2 3 4 5 6         context 4, stride 2
    #   window 1  s s s s               scores 0–3
    #   window 2      . . s s           scores 4, 5 after 2, 3
    #   window 3          . . s         scores 6 after 4, 5
    def cut(self, num_tokens: int) -> Iterator[tuple[int, int, int]]:
        """Yield (start, first token to score, end) of each window.

        Examples
        --------
        >>> list(Windows(context_tokens=4).cut(7))
        [(0, 0, 4), (2, 4, 6), (4, 6, 7)]
        """
        scored = 0
        for start in range(0, num_tokens, self.stride_tokens):
            stop = min(start + self.context_tokens, num_tokens)
            yield start, scored, stop
            scored = stop
            if stop == num_tokens:
                return


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Perplexity of a model in one weight format.

    `weights` is the dtype or the quantization. `weight_bytes` are the bytes on all devices,
    including scales and padding.
    """

    weights: str
    weight_bytes: int
    perplexity: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Perplexities of a model on a text; the first score is that of the unquantized model."""

    model: str
    file: str
    scored_tokens: int
    windows: Windows
    scores: tuple[Score, ...]


def measure_quality(
    checkpoint: Checkpoint,
    file: Path,
    fleet: Fleet,
    *,
    dtype: Dtype = "auto",
    forms: Sequence[Quantization] = ("int8", "int4"),
    windows: Windows | None = None,
) -> Quality:
    """Measure a model's perplexity on a text, unquantized and quantized.

    Parameters
    ----------
    checkpoint : Checkpoint
        With weights and a tokenizer.
    file : Path
        A text in UTF-8.
    fleet : Fleet
    dtype : {"auto", "float32", "float16", "bfloat16"}
        The type of the unquantized weights.
    forms : sequence of {"int8", "int4", "nf4"}
        The quantizations to measure.
    windows : Windows, optional
        Windows of the text; by default `windows_for`.

    Raises
    ------
    UsageError
        If the text can't be read or is too short, or a quantization is unknown.
    InfeasibleError
        If the model does not fit on the fleet in one of the formats.
    MachineError
        If there is not enough memory for the logits.
    """
    for form in forms:
        choose("quantize", form, QUANTIZED)
    windows = windows or windows_for(checkpoint)
    with reading(file, "give a UTF-8 text file"):  # before the weights are downloaded
        text = read_text(file, most_bytes=_MAX_FILE_BYTES)
    checkpoint = checkpoint.fetch()
    prefix, ids = _tokenize(checkpoint, text, file, windows)
    scores = []
    cases: list[Quantization] = ["none", *forms]
    for form in dict.fromkeys(cases):
        workload = Workload(
            prompt_tokens=windows.context_tokens - 1,
            new_tokens=1,
            dtype=dtype,
            logits="all",
            quantize=form,
        )
        label = "unquantized" if form == "none" else form
        say(f"{label}: planning and loading")
        plan = make_plan(checkpoint, fleet, workload)
        model = load(plan, trust_remote_code=checkpoint.trust_remote_code)
        say(f"{label}: reading the text")
        perplexity = _perplexity(model, prefix, ids, windows)
        del model
        gc.collect()
        name = plan.workload.dtype if form == "none" else form
        weight_bytes = sum(device.weight_bytes for device in plan.forecast.devices)
        scores.append(Score(weights=name, weight_bytes=weight_bytes, perplexity=perplexity))
    return Quality(
        model=checkpoint.name,
        file=str(file),
        scored_tokens=len(ids) - (not prefix),
        windows=windows,
        scores=tuple(scores),
    )


def windows_for(checkpoint: Checkpoint) -> Windows:
    """Return windows of `CONTEXT_TOKENS`, or of the model's context if that is shorter."""
    limit = checkpoint.max_context_tokens
    return Windows(context_tokens=CONTEXT_TOKENS if limit is None else min(limit, CONTEXT_TOKENS))


def _tokenize(
    checkpoint: Checkpoint, text: str, file: Path, windows: Windows
) -> tuple[list[int], list[int]]:
    """Return the tokens that the tokenizer puts before every text, and the tokens of the text."""
    tokenizer = tokenizer_of(checkpoint)
    prefix: list[int] = tokenizer.encode("")
    ids: list[int] = tokenizer.encode(text, split_special_tokens=True)[len(prefix) :]
    ids = ids[: windows.most_tokens]
    if len(ids) < _MIN_TOKENS:
        raise UsageError(
            f"{file} has {len(ids)} tokens; at least {_MIN_TOKENS} are needed",
            hint="use a longer text, similar to the model's inputs",
        )
    return prefix, ids


@torch.inference_mode()
def _perplexity(
    model: PreTrainedModel, prefix: Sequence[int], ids: Sequence[int], windows: Windows
) -> float:
    """Compute the perplexity of a text.

    Each window gets the prefix (such as a BOS token). Without a prefix nothing precedes the first
    token, which is then not scored.
    """
    text_windows = replace(windows, context_tokens=windows.context_tokens - len(prefix))
    device = next(model.get_input_embeddings().parameters()).device
    total, count = 0.0, 0
    for start, scored, stop in text_windows.cut(len(ids)):
        window = torch.tensor([[*prefix, *ids[start:stop]]], device=device)  # [1, tokens]
        num_scored = stop - scored if scored or prefix else stop - 1
        try:
            logits = _last_logits(model, window, num_scored + 1)
        except torch.OutOfMemoryError as error:
            raise MachineError(
                f"not enough memory for the logits of {num_scored} tokens: {error}",
                hint="use smaller windows (--context), or more GPUs",
            ) from error
        targets = window[0, -num_scored:].to(logits.device)
        for rows, words in zip(logits[:-1].split(_ROWS), targets.split(_ROWS), strict=True):
            total += float(F.cross_entropy(rows.float(), words, reduction="sum"))
        count += num_scored
    return math.exp(total / count)


def _last_logits(model: PreTrainedModel, window: Tensor, count: int) -> Tensor:
    """Compute the logits [count, vocabulary] of the last tokens of a window.

    A model that accepts `logits_to_keep` computes no other logits.
    """
    accepted = inspect.signature(model.forward).parameters
    limit = {"logits_to_keep": count} if "logits_to_keep" in accepted else {}
    logits: Tensor = model(input_ids=window, use_cache=False, **limit).logits[0, -count:]
    return logits
