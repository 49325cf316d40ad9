"""Rules from samples, on traces that are written by hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import tiny
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from duoka.forecast.flash_splits import FlashShape, PartBytes
from duoka.forecast.profile import MONOMIALS, AllocationTrace, Phase, Ref, evaluate, monomials
from duoka.tracing.fit import RecordedStep, Unlike, fit
from duoka.tracing.recorded import AllocId, RecordedPass, RecordedTrace

Size = Callable[[int, int, int], int]
"""Of batch, query tokens and key tokens."""

EXTENDS = [(8, 21), (24, 53), (16, 70), (8, 90), (40, 131), (24, 100), (16, 43)]
LENGTHS: dict[Phase, list[tuple[int, int]]] = {
    "prefill": [(q, q) for q in (9, 19, 36, 54, 77)],
    "extend": EXTENDS,
    "decode": [(1, k) for k in (17, 35, 52, 86)],
}


def samples(
    size: Size, phase: Phase, *, batches: tuple[int, ...] = (1,), flops: Size | None = None
) -> list[RecordedStep]:
    made = []
    for batch, (query, keys) in itertools.product(batches, LENGTHS[phase]):
        trace = RecordedTrace(sizes=[size(batch, query, keys)], events=[None, (0, 0, 0)])
        trace.flops = (flops or size)(batch, query, keys)
        made.append(
            RecordedStep(
                phase, batch, query, keys, RecordedPass(traces=[trace], model_blocks=[0], step=0)
            )
        )
    return made


def fitted(found: list[RecordedStep]) -> AllocationTrace:
    (trace,), _ = fit(found)
    return trace


coefficients = st.lists(st.integers(0, 10**6), min_size=5, max_size=5)


@settings(max_examples=examples(30))
@given(
    phase=st.sampled_from(["prefill", "extend", "decode"]),
    is_batched=st.booleans(),
    numbers=coefficients,
)
def test_a_rule_is_exact_far_beyond_its_samples(
    phase: Phase, is_batched: bool, numbers: list[int]
) -> None:
    one, q_, k_, qk, batched = numbers

    def size(b: int, q: int, k: int) -> int:
        alone = one + q_ * q + k_ * k + qk * q * k
        return alone + (batched * b * q * k + one * b if is_batched else 0)

    trace = fitted(samples(size, phase, batches=(2, 3) if is_batched else (1,)))
    for batch in (2, 7, 64) if is_batched else (1,):
        for query, keys in ((1000, 100_003), (1, 1_000_000), (4096, 4096)):
            query = {"prefill": keys, "extend": query, "decode": 1}[phase]
            found = evaluate(trace.sizes[0], monomials(batch, query, keys))
            # Coefficients are floats in a profile; what they give is exact below 2**53.
            expected = size(batch, query, keys)
            assert found == expected or expected > 2**53


def test_a_padded_mask_has_a_rule() -> None:
    def size(b: int, q: int, k: int) -> int:
        return 2 * b * q * (k + -k % 8) + 64

    for phase in LENGTHS:
        trace = fitted(samples(size, phase, batches=(2, 3)))
        query, keys = {"prefill": (997, 997), "extend": (64, 997), "decode": (1, 997)}[phase]
        assert evaluate(trace.sizes[0], monomials(5, query, keys)) == size(5, query, keys)


def test_the_mask_of_a_full_window_has_a_rule() -> None:
    trace = fitted(samples(lambda b, q, k: 2 * q * (511 + q), "extend"))
    assert evaluate(trace.sizes[0], monomials(1, 300, 9000)) == 2 * 300 * 811


@pytest.mark.parametrize("phase", ["prefill", "extend", "decode"])
@pytest.mark.parametrize(
    "size",
    [
        lambda b, q, k: min(k, 60) * 512,
        lambda b, q, k: k**3,
        lambda b, q, k: 1 << (k % 11),
        lambda b, q, k: q * k + (k in (36, 35, 70)),
    ],
    ids=["saturates", "cubic", "erratic", "one sample off"],
)
def test_what_is_no_polynomial_is_refused(phase: Phase, size: Size) -> None:
    with pytest.raises(Unlike, match="no polynomial"):
        fit(samples(size, phase))


def test_work_may_be_met_nearly_and_sizes_may_not() -> None:
    def mixed(b: int, q: int, k: int) -> int:
        return 10**6 * q * k + 3 * (k % 8)

    trace = fitted(samples(lambda b, q, k: 512, "extend", flops=mixed))
    estimate = evaluate(trace.flops, monomials(1, 64, 5000))
    assert estimate == pytest.approx(mixed(1, 64, 5000), rel=0.01)
    with pytest.raises(Unlike, match="size"):
        fit(samples(mixed, "extend"))
    with pytest.raises(Unlike, match="work"):
        fit(samples(lambda b, q, k: 512, "extend", flops=lambda b, q, k: k**4))


def test_one_call_has_constants() -> None:
    trace = RecordedTrace(sizes=[1000, 0], events=[None, None], flops=77)
    found = fitted(
        [RecordedStep("prefill", 1, 0, 0, RecordedPass(traces=[trace], model_blocks=[0], step=0))]
    )
    assert found.sizes == ((1000.0,), ())
    assert evaluate(found.flops, monomials(1, 5, 5)) == 77


def test_structure_must_agree() -> None:
    found = samples(lambda b, q, k: q, "prefill")
    found[2].recorded.traces[0].events.pop()
    with pytest.raises(Unlike, match="different things"):
        fit(found)
    found = samples(lambda b, q, k: q, "prefill")
    found[1].recorded.traces[0].retained = (0,)
    with pytest.raises(Unlike, match="different things"):
        fit(found)


def chain(number: int, *, like: list[int], cached: AllocId | None = None) -> RecordedPass:
    """Three blocks: the first makes something that the last frees, and each feeds the next."""
    first = RecordedTrace(sizes=[10, 20], events=[None, None])
    second = RecordedTrace(sizes=[30], events=[None, (number, 0, 1)], reads={(number, 0, 1): 20})
    third = RecordedTrace(
        sizes=[40],
        events=[None, (number, 1, 0), (number, 0, 0), (number, 2, 0)],
        reads={(number, 1, 0): 30, (number, 0, 0): 10},
    )
    if cached is not None:
        second.slots = {cached: 1}
        second.events.append(cached)
    return RecordedPass(traces=[first, second, third], model_blocks=like, step=number)


def test_references_say_where_from() -> None:
    cached = (3, 1, 7)
    sample = RecordedStep("decode", 1, 0, 0, chain(5, like=[0, 1, 2], cached=cached))
    (first, second, third), carried = fit([sample])
    assert carried == ((0, 0),)
    assert first.events == (None, None)
    assert second.events == (
        None,
        Ref(origin="earlier", index=1, back=1),
        Ref(origin="kept", index=1),
    )
    assert third.events == (
        None,
        Ref(origin="earlier", index=0, back=1),
        Ref(origin="carried", index=0),
        Ref(origin="own", index=0),
    )
    assert [read.ref.origin for read in third.reads] == ["earlier", "carried"]
    assert [evaluate(read.size, monomials(1, 1, 1)) for read in third.reads] == [30, 10]


def test_what_is_from_before_and_no_cache_is_the_callers() -> None:
    sample = RecordedStep("decode", 1, 0, 0, chain(5, like=[0, 1, 2], cached=(3, 1, 7)))
    sample.recorded.traces[1].slots = {}
    (_, second, _), _ = fit([sample])
    assert second.events[-1] == Ref(origin="input", index=0)


def test_blocks_that_are_alike_share_a_trace() -> None:
    passed = chain(0, like=[0, 1, 1])
    traces, _ = fit([RecordedStep("decode", 1, 0, 0, passed)])
    assert traces[2] is traces[1]


def test_samples_must_agree_on_what_is_alike() -> None:
    one = RecordedStep("prefill", 1, 9, 9, chain(0, like=[0, 1, 1]))
    other = RecordedStep("prefill", 1, 19, 19, chain(0, like=[0, 1, 2]))
    with pytest.raises(Unlike, match="alike"):
        fit([one, other])


def test_too_few_samples_are_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="check"):
        fit(samples(lambda b, q, k: q, "extend")[:4])


def test_names_of_monomials_are_known() -> None:
    assert len(set(MONOMIALS)) == len(MONOMIALS)


def test_parts_of_flash_attention_follow_the_prompt() -> None:
    shape, shapes = FlashShape(8, 4, 256), list[FlashShape]()

    def size(batch: int, query: int, keys: int) -> int:
        return PartBytes.of(shape, 4096, batch, query, keys)

    found = samples(size, "prefill", flops=lambda b, q, k: q)
    (trace,), _ = fit(found, shapes)
    assert shapes == [shape]
    assert trace.sizes == ((0.0,) * len(MONOMIALS) + (4096.0,),)


def test_parts_of_flash_attention_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [(q, q) for q in (96, 200, 301, 404, 555, 777, 1001)]
    monkeypatch.setitem(LENGTHS, "forward", lengths)
    shape, shapes = FlashShape(8, 4, 256), list[FlashShape]()
    found = samples(
        lambda b, q, k: PartBytes.of(shape, 4096, b, q, k), "forward", flops=lambda b, q, k: q
    )
    (trace,), _ = fit(found, shapes)
    profile = replace(tiny.regular("llama"), flash_shapes=tuple(shapes))
    for step in found:
        values = profile.values(step.monomials, step.batch, step.query, step.keys)
        assert max(1, evaluate(trace.sizes[0], values)) == step.recorded.traces[0].sizes[0]


def test_parts_of_a_tower_are_constant() -> None:
    shape, shapes = FlashShape(8, 8, 64), list[FlashShape]()
    found = samples(lambda b, q, k: PartBytes.of(shape, 256, 1, 577, 577), "prefill")
    (trace,), _ = fit(found, shapes)
    assert (shapes, trace.sizes) == ([], ((float(256 * shape.part_rows(1, 577, 577)),),))
