"""The rules of CUDA's caching allocator, one by one; `test_device_memory` has any history."""

from __future__ import annotations

import pytest

import duoka
from duoka.errors import CheckpointError, UsageError
from duoka.forecast.allocator import (
    CachingAllocator,
    OutOfCapacity,
    refuse_options,
    rounded_bytes,
    segment_bytes,
)

KIB = 2**10
MIB = 2**20


@pytest.mark.parametrize(
    ("requested", "rounded"), [(1, 512), (512, 512), (513, 1024), (MIB, MIB), (MIB + 1, MIB + 512)]
)
def test_requests_are_rounded_to_512_bytes(requested: int, rounded: int) -> None:
    assert rounded_bytes(requested) == rounded


@pytest.mark.parametrize(
    ("rounded", "segment"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB),
        (100 * MIB, 100 * MIB),
    ],
)
def test_segments_come_in_three_sizes(rounded: int, segment: int) -> None:
    assert segment_bytes(rounded) == segment
    allocator = CachingAllocator()
    allocator.malloc(rounded)
    assert allocator.reserved_bytes == segment
    assert allocator.allocated_bytes == rounded


def test_small_requests_share_a_segment() -> None:
    allocator = CachingAllocator()
    for _ in range(4):
        allocator.malloc(512 * KIB)
    assert allocator.reserved_bytes == 2 * MIB
    allocator.malloc(1)
    assert allocator.reserved_bytes == 4 * MIB


def test_small_and_large_requests_never_share() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(5 * MIB))
    allocator.malloc(1)
    assert allocator.reserved_bytes == 22 * MIB


def test_the_smallest_free_block_that_fits_is_taken() -> None:
    allocator = CachingAllocator()
    wide = allocator.malloc(40 * MIB)
    narrow = allocator.malloc(30 * MIB)
    allocator.free(wide)
    allocator.free(narrow)
    assert allocator.malloc(30 * MIB).address == narrow.address
    assert allocator.reserved_bytes == 70 * MIB


def test_a_large_block_is_split_only_when_more_than_a_mebibyte_remains() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(20 * MIB))
    whole = allocator.malloc(19 * MIB)
    assert whole.size == 20 * MIB
    assert allocator.allocated_bytes == 20 * MIB
    allocator.free(whole)
    part = allocator.malloc(19 * MIB - 512)
    assert part.size == 19 * MIB - 512


def test_neighbours_merge_when_freed() -> None:
    allocator = CachingAllocator()
    parts = [allocator.malloc(5 * MIB) for _ in range(4)]
    assert allocator.reserved_bytes == 20 * MIB
    for place in (1, 3, 0, 2):
        allocator.free(parts[place])
    allocator.malloc(20 * MIB)
    assert allocator.reserved_bytes == 20 * MIB


def test_wholly_free_segments_are_given_back_when_the_device_is_full() -> None:
    allocator = CachingAllocator(64 * MIB)
    first = allocator.malloc(32 * MIB)
    allocator.malloc(20 * MIB)
    allocator.free(first)
    allocator.malloc(40 * MIB)
    assert allocator.reserved_bytes == 60 * MIB
    assert allocator.max_reserved_bytes == 60 * MIB


def test_past_the_capacity_a_request_is_refused_with_its_numbers() -> None:
    allocator = CachingAllocator(64 * MIB)
    allocator.malloc(30 * MIB)
    with pytest.raises(OutOfCapacity) as refused:
        allocator.malloc(40 * MIB)
    assert refused.value.requested_bytes == 40 * MIB
    assert refused.value.capacity_bytes == 64 * MIB
    assert refused.value.allocated_bytes == refused.value.reserved_bytes == 30 * MIB
    assert allocator.allocated_bytes == 30 * MIB


def test_capacity_is_judged_on_reserved_bytes() -> None:
    allocator = CachingAllocator(3 * MIB)
    allocator.malloc(MIB)
    allocator.malloc(MIB)
    with pytest.raises(OutOfCapacity):
        allocator.malloc(1)


def test_peaks_start_again_from_what_is_in_use() -> None:
    allocator = CachingAllocator()
    kept = allocator.malloc(MIB)
    allocator.free(allocator.malloc(50 * MIB))
    allocator.empty_cache()
    allocator.reset_peak()
    assert allocator.max_allocated_bytes == kept.size == MIB
    assert allocator.max_reserved_bytes == allocator.reserved_bytes == 2 * MIB


def test_expandable_segments_grow_by_pages() -> None:
    allocator = CachingAllocator(expandable=True)
    allocator.malloc(1)
    assert allocator.reserved_bytes == 2 * MIB
    wide = allocator.malloc(30 * MIB)
    assert allocator.reserved_bytes == 42 * MIB
    allocator.malloc(15 * MIB)  # 10 are free at the end, and a page is added
    assert allocator.reserved_bytes == 62 * MIB
    assert allocator.allocated_bytes == 45 * MIB + 512
    allocator.free(wide)
    assert allocator.malloc(30 * MIB - 512).size == 30 * MIB - 512  # any rest is split off
    assert allocator.malloc(1).size == 512


def test_what_can_still_expand_is_taken_last() -> None:
    allocator = CachingAllocator(expandable=True)
    wide = allocator.malloc(30 * MIB)
    allocator.malloc(5 * MIB)  # 5 are free behind it
    allocator.free(wide)
    assert allocator.malloc(4 * MIB).address == wide.address


def test_free_pages_are_unmapped_when_the_device_is_full() -> None:
    allocator = CachingAllocator(100 * MIB, expandable=True)
    first, second = allocator.malloc(50 * MIB), allocator.malloc(10 * MIB)
    allocator.free(first)
    last = allocator.malloc(55 * MIB)  # 40 of the first 50 are unmapped, and 60 mapped at the end
    assert allocator.is_pressed
    assert last.address == second.address + second.size
    assert allocator.reserved_bytes == allocator.max_reserved_bytes == 80 * MIB
    with pytest.raises(OutOfCapacity):
        allocator.malloc(31 * MIB)
    assert allocator.malloc(10 * MIB).address == first.address + 40 * MIB
    allocator.free(last)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 20 * MIB


def test_segments_that_are_wholly_unmapped_are_dropped() -> None:
    allocator = CachingAllocator(100 * MIB, expandable=True)
    allocator.free(allocator.malloc(50 * MIB))
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0
    assert not allocator.large.segments


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
@pytest.mark.parametrize(
    "option", ["max_split_size_mb:128", "roundup_power2_divisions:4", "backend:cudaMallocAsync"]
)
def test_options_that_change_the_rules(
    monkeypatch: pytest.MonkeyPatch, variable: str, option: str
) -> None:
    monkeypatch.setenv(variable, "expandable_segments:True,backend:native")
    refuse_options()
    monkeypatch.setenv(variable, f"expandable_segments:True, {option}")
    with pytest.raises(UsageError, match=option):
        refuse_options()
    with pytest.raises(CheckpointError):  # it is another machine's environment that will count
        duoka.plan("nowhere", "2xRTX4090")
