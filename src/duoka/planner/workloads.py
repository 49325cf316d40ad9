"""Workloads: what a model decides of what it is asked to do."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from duoka.checkpoint.checkpoint import Checkpoint
from duoka.checkpoint.quantized import method_of
from duoka.errors import UsageError
from duoka.forecast.workload import Dtype, Workload

from .planner import Question, check_context


def workload_for(checkpoint: Checkpoint, workload: Workload) -> Workload:
    """The workload with what the checkpoint decides: its dtype, and whether it reads in chunks."""
    check_context(workload, checkpoint.max_context_tokens, checkpoint.name)
    workload = _unquantized(checkpoint, workload)
    workload = whole_prompt(
        workload, is_encoder=bool(checkpoint.config.get("is_encoder_decoder", False))
    )
    return workload.resolved(dtype=cast(Dtype, checkpoint.default_dtype or "float32"))


def _unquantized(checkpoint: Checkpoint, workload: Workload) -> Workload:
    """The workload of a checkpoint that is quantized already: nothing is left to quantize."""
    method = method_of(checkpoint.config)
    if method is None:
        return workload
    if workload.quantize not in ("none", "auto"):
        raise UsageError(
            f"{checkpoint.name} is quantized already ({method.name}); it can't become "
            f"{workload.quantize}",
            hint="leave quantize out, or take the 16-bit checkpoint",
        )
    own = checkpoint.default_dtype or "float32"
    if workload.dtype not in ("auto", own):
        raise UsageError(
            f"{checkpoint.name} is quantized already ({method.name}) for {own}; it can't compute "
            f"in {workload.dtype}",
            hint="leave the dtype out, or take the 16-bit checkpoint",
        )
    return replace(workload, quantize="none")


def refuse_offload(checkpoint: Checkpoint, question: Question) -> None:
    """Refuse to keep weights on the host that packages load where they compute."""
    method = method_of(checkpoint.config)
    if method is not None and question.constraints.offload:
        raise UsageError(
            f"{checkpoint.name} is quantized already ({method.name}); such weights can't lie in "
            "the host's memory",
            hint="leave out the offload, or take the 16-bit checkpoint",
        )


def whole_prompt(workload: Workload, *, is_encoder: bool) -> Workload:
    """The workload without chunks for an encoder, which can't read its prompt in such.

    Nor can a prompt with images: transformers refuses to cut it.
    """
    if not is_encoder and not workload.images:
        return workload
    if isinstance(workload.prefill_chunk_tokens, int):
        what = (
            "an encoder can't read its prompt" if is_encoder else "a prompt with images can't run"
        )
        raise UsageError(
            f"{what} in chunks of {workload.prefill_chunk_tokens}",
            hint="leave the chunk out",
        )
    return replace(workload, prefill_chunk_tokens=None)
