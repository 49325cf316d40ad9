"""Attention on virtual GPUs takes, at its peak, the memory that it takes on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cuda_rig.both_devices import on_both
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention as attend

from duoka.hardware.gpu_generation import GpuGeneration

HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
HEADS = 8
Peak = Callable[[str, Any], int]


def peak(
    dtype: torch.dtype,
    *,
    batch: int = 1,
    queries: int = 256,
    keys: int = 1024,
    key_heads: int = HEADS,
    head: int = 64,
    mask: str = "",
    trains: bool = False,
    by_tokens: bool = True,
    **options: Any,
) -> Peak:
    """A program: attention, and its backward; what it adds to the memory at most."""

    def made(device: str, heads: int, tokens: int) -> torch.Tensor:
        shape = (batch, tokens, heads, head) if by_tokens else (batch, heads, tokens, head)
        made = torch.empty(shape, dtype=dtype, device=device)
        return (made.transpose(1, 2) if by_tokens else made).requires_grad_(trains)

    def run(kind: str, memory: Any) -> int:
        device = f"{kind}:0"
        query, key = made(device, HEADS, queries), made(device, key_heads, keys)
        value = made(device, key_heads, keys)
        if mask:
            rows = 1 if mask == "row" else queries
            shown = torch.bool if mask != "additive" else dtype
            options["attn_mask"] = torch.empty(batch, 1, rows, keys, dtype=shown, device=device)
        memory.reset_peak_memory_stats(0)
        before: int = memory.memory_allocated(0)
        out = attend(query, key, value, **options)
        if trains:
            out.backward(torch.empty_like(out))
        added: int = memory.max_memory_allocated(0) - before
        return added

    return run


def cases() -> dict[str, Peak]:
    found = {}
    for dtype in (HALF, FULL):
        for mask in ("boolean", "row", "additive"):
            found[f"{dtype} {mask}"] = peak(dtype, mask=mask)
            found[f"{dtype} {mask} unaligned"] = peak(dtype, mask=mask, keys=1001)
        found |= {
            f"{dtype} chunk": peak(dtype, mask="boolean", queries=512, keys=4096),
            f"{dtype} decode": peak(dtype, mask="boolean", queries=1, keys=1001, batch=3),
            f"{dtype} head 80": peak(dtype, mask="boolean", head=80),
            f"{dtype} head 256": peak(dtype, mask="boolean", head=256),
            f"{dtype} grouped": peak(dtype, mask="boolean", key_heads=2, enable_gqa=True),
            f"{dtype} trained": peak(dtype, mask="boolean", trains=True),
            f"{dtype} trained unaligned": peak(
                dtype, mask="boolean", queries=1001, keys=1001, trains=True
            ),
            f"{dtype} trained head 80": peak(dtype, mask="boolean", head=80, trains=True),
            f"{dtype} trained by heads": peak(dtype, mask="boolean", trains=True, by_tokens=False),
            f"{dtype} trained grouped": peak(
                dtype, mask="boolean", key_heads=2, enable_gqa=True, trains=True
            ),
        }
    found["float32 causal"] = peak(FULL, queries=1024, is_causal=True)
    found["float32 causal trained"] = peak(FULL, queries=1024, is_causal=True, trains=True)
    return found


FLASH = {
    f"{dtype} {name}": run
    for dtype in (HALF, BRAIN)
    for name, run in {
        "causal": peak(dtype, queries=1024, is_causal=True),
        "causal grouped": peak(dtype, queries=1024, is_causal=True, key_heads=2, enable_gqa=True),
        "causal trained": peak(dtype, queries=1024, is_causal=True, trains=True),
        "causal trained by heads": peak(
            dtype, queries=1024, is_causal=True, trains=True, by_tokens=False
        ),
        "causal trained grouped": peak(
            dtype, queries=1024, is_causal=True, key_heads=2, enable_gqa=True, trains=True
        ),
        "padded heads": peak(dtype, queries=1024, head=13, trains=True),
        "boolean": peak(dtype, mask="boolean", keys=1001),
    }.items()
}


def assert_equal(programs: dict[str, Peak], generation: GpuGeneration | None = None) -> None:
    def run(kind: str, memory: Any) -> dict[str, int]:
        return {name: program(kind, memory) for name, program in programs.items()}

    found, expected = on_both(run, generation)
    assert found == expected


@pytest.mark.cuda_rig(gpus="24GiB", capability="7.5")
def test_on_turing() -> None:
    assert_equal(cases() | FLASH, GpuGeneration(0, before_ampere=True))


@pytest.mark.parametrize(
    "capability",
    [
        pytest.param(each, marks=pytest.mark.cuda_rig(gpus="24GiB", capability=each))
        for each in ("8.0", "8.6", "8.9", "9.0", "12.0")
    ],
)
def test_from_ampere_on(capability: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")  # cuDNN's own isn't on the rig
    programs = cases() | FLASH
    if capability not in ("8.6", "8.9"):
        # Here kernels differ: by a block on 8.0 and 9.0; on 12.0 it takes 9 MiB more.
        programs = {name: run for name, run in programs.items() if "trained head 80" not in name}
    assert_equal(programs)


def over_pages(dtype: torch.dtype, *, tokens: int, sequences: int, head: int, window: int) -> Peak:
    """A program: attention over pages by block tables; what it adds to the memory at most."""

    def run(kind: str, memory: Any) -> int:
        device = f"{kind}:0"
        query = torch.empty(tokens, HEADS, head, dtype=dtype, device=device)
        pages = torch.empty(9, 256, 2, head, dtype=dtype, device=device)
        offsets, used = (
            torch.zeros(sequences + extra, dtype=torch.int32, device=device) for extra in (1, 0)
        )
        tables = torch.zeros(sequences, 4, dtype=torch.int32, device=device)
        memory.reset_peak_memory_stats(0)
        before: int = memory.memory_allocated(0)
        out = varlen_attn(
            query, pages, pages, offsets, offsets, tokens, 1024, window_size=(window, 0),
            enable_gqa=True, seqused_k=used, block_table=tables, num_splits=1,
        )  # fmt: skip
        assert isinstance(out, torch.Tensor)
        assert out.shape == query.shape
        added: int = memory.max_memory_allocated(0) - before
        return added

    return run


@pytest.mark.parametrize(
    "capability",
    [
        pytest.param(each, marks=pytest.mark.cuda_rig(gpus="24GiB", capability=each))
        for each in ("8.0", "8.6", "8.9", "9.0", "12.0")
    ],
)
def test_over_pages(capability: str) -> None:
    assert_equal(
        {
            f"{dtype} {tokens} {sequences} {head} {window}": over_pages(
                dtype, tokens=tokens, sequences=sequences, head=head, window=window
            )
            for dtype in (HALF, BRAIN)
            for tokens, sequences in ((1, 1), (7, 5), (64, 64), (1000, 3))
            for head in (64, 104, 128, 256)
            for window in (-1, 99)
        }
    )


@pytest.mark.cuda_rig(gpus="24GiB", capability="8.6")
def test_few_queries_are_split() -> None:
    """Beside the parts there are a block or two of the kernel's random state."""

    def run(kind: str, memory: Any) -> dict[tuple[int, ...], int]:
        prompts = [(8, tokens, tokens) for tokens in range(40, 1400, 97)]
        decodes = [(heads, 1, keys) for heads in (1, 2, 8) for keys in range(40, 9000, 911)]
        return {
            (head, *case): peak(
                BRAIN,
                queries=case[1],
                keys=case[2],
                key_heads=case[0],
                head=head,
                enable_gqa=case[0] < HEADS,
            )(kind, memory)
            for head in (64, 128, 256)
            for case in (*prompts, *decodes)
        }

    found, expected = on_both(run)
    assert max(found.values()) > 2**25
    for case, counted in expected.items():
        assert abs(found[case] - counted) <= 2048, case


@pytest.mark.cuda_rig(gpus="24GiB", capability="8.6")
def test_large_heads_are_split_about_as_on_ampere() -> None:
    for head in (128, 256):
        found, expected = on_both(
            peak(HALF, mask="boolean", queries=2048, keys=2048, head=head, trains=True)
        )
        assert expected <= found < 1.05 * expected
