"""Pages: as many as every GPU has room for, and cut so that all of them fill together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import tuning

import duoka
from duoka.api.plan import find_or_trace
from duoka.errors import InfeasibleError, UsageError
from duoka.forecast.costs import Costs
from duoka.forecast.profile import Profile
from duoka.forecast.replay_serving import ServingReplay
from duoka.forecast.serving import least_pages
from duoka.planner.page_count import with_pages
from duoka.planner.planner import with_chunks
from duoka.planner.room import room_bytes

WORK = duoka.Workload(
    cache="paged", batch=4, prompt_tokens=100, new_tokens=28, dtype="float32",
    prefill_chunk_tokens=32,
)  # fmt: skip
MIB = 2**20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tuning.write_model("llama", tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def profile(model: Path) -> Profile:
    return find_or_trace(duoka.Checkpoint.open(model), WORK)


def usable(budget: int) -> int:
    return budget - room_bytes(budget)


def cuts(costs: Costs, budgets: list[int]) -> Iterator[int]:
    """Pages of every cut into as many stages as there are budgets, or one, in every order."""
    num = costs.num_blocks
    for budget in budgets:
        yield pages_of(costs, [(0, num, budget)])
    for cut in range(1, num):
        for first, second in (budgets, budgets[::-1]):
            yield pages_of(costs, [(0, cut, first), (cut, num, second)])


def pages_of(costs: Costs, stages: list[tuple[int, int, int]]) -> int:
    runs = [(costs.blocks_of(start, stop), budget) for start, stop, budget in stages]
    least = least_pages(WORK)
    replay = ServingReplay(costs.profile, replace(WORK, pages=least))
    peaks = [replay.run(blocks) for blocks, _ in runs]
    for peak, (_, budget) in zip(peaks, runs, strict=True):
        if peak is None or peak.reserved_bytes > usable(budget):
            return 0
    workload, _ = with_pages(costs.profile, WORK, runs, usable)
    assert workload.pages is not None
    return workload.pages


@pytest.mark.parametrize("sizes", [(80, 33), (40, 40)])
def test_no_cut_has_room_for_more_pages(
    model: Path, profile: Profile, sizes: tuple[int, int]
) -> None:
    fleet = ",".join(f"{size}MiB" for size in sizes)
    plan = duoka.plan(model, f"virtual:{fleet}", WORK)
    assert plan.objective == "pages"
    assert plan.value == plan.workload.pages <= plan.bound
    best = max(cuts(Costs(profile, WORK), [size * MIB for size in sizes]))
    # The search knows what tensors take, not what segments make of it.
    assert plan.value >= 0.9 * best
    for stage in plan.forecast.devices:
        assert stage.reserved_bytes <= usable(stage.budget_bytes)


@pytest.mark.parametrize("budget", [60 * MIB, 95 * MIB, 101 * MIB, 170 * MIB])
def test_no_greater_number_fits(profile: Profile, budget: int) -> None:
    # Eight tensors: those of less than 10 MiB share segments of 20 MiB, larger ones have their own.
    blocks = range(len(profile.blocks))
    workload, _ = with_pages(profile, WORK, [(blocks, budget)], lambda size: size)
    assert workload.pages is not None
    for pages in range(workload.pages + 1, workload.pages * 2, workload.pages // 30):
        peaks = ServingReplay(profile, replace(WORK, pages=pages)).run(blocks)
        assert peaks is not None
        assert peaks.reserved_bytes > budget, pages


@pytest.mark.slow
def test_pages_of_8_bit_are_more(model: Path) -> None:
    plan = duoka.plan(model, "virtual:64MiB", WORK)
    small = duoka.plan(model, "virtual:64MiB", replace(WORK, cache="paged-int8"))
    assert small.workload.pages is not None
    assert plan.workload.pages is not None
    # Heads of 8 numbers in 32 bit become 8 bytes and a scale of 4; what else there is stays.
    assert 0.95 * 32 / 12 < small.workload.pages / plan.workload.pages < 1.02 * 32 / 12


def test_pages_fill_the_gpus_of_a_map(model: Path) -> None:
    own = duoka.plan(model, "virtual:2x64MiB", WORK)
    again = duoka.plan(model, "virtual:2x64MiB", WORK, device_map=own.device_map)
    assert again.objective == "given"
    assert again.workload == own.workload
    assert again.forecast == own.forecast
    unequal = {"model.layers.3": 1, "model.norm": 1, "lm_head": 1, "": 0}
    plan = duoka.plan(model, "virtual:2x64MiB", WORK, device_map=unequal)
    assert plan.workload.pages is not None
    assert own.workload.pages is not None
    assert WORK.context_tokens / 16 < plan.workload.pages < own.workload.pages
    for stage in plan.forecast.devices:
        assert stage.reserved_bytes <= usable(stage.budget_bytes)
    assert plan.value == min(stage.free_bytes for stage in plan.forecast.devices)


@pytest.mark.slow
def test_the_largest_batch_is_there_at_once(model: Path, profile: Profile) -> None:
    budget = 28 * MIB
    plan = duoka.plan(model, "virtual:28MiB", WORK, largest="batch")
    number, pages = plan.workload.batch, plan.workload.pages
    assert pages == number * least_pages(WORK)

    def needed(batch: int) -> int:
        work = replace(WORK, batch=batch, pages=batch * least_pages(WORK))
        peaks = ServingReplay(profile, work).run(range(len(profile.blocks)))
        assert peaks is not None
        return peaks.reserved_bytes

    fitting = [batch for batch in range(1, 2 * number) if needed(batch) <= budget]
    assert number == max(fitting) > WORK.batch
    assert plan.forecast.serving_speeds == ()  # virtual GPUs have none
    with pytest.raises(
        UsageError, match="the objective pages maximizes the number of pages, which is fixed here"
    ):
        duoka.plan(model, "virtual:28MiB", WORK, largest="batch", objective="pages")


def test_the_longest_context_is_that_of_one_request(model: Path) -> None:
    plan = duoka.plan(model, "virtual:22MiB", WORK, largest="context")
    assert plan.workload.pages is not None
    assert plan.workload.pages >= least_pages(plan.workload)
    assert plan.workload.batch == WORK.batch


def test_cards_fill_together(model: Path) -> None:
    plan = duoka.plan(model, "virtual:64MiB,64MiB", WORK)
    assert len(plan.devices) == 2
    one = duoka.plan(model, "virtual:64MiB", WORK)
    assert plan.workload.pages is not None
    assert one.workload.pages is not None
    assert plan.workload.pages > 1.5 * one.workload.pages
    more = replace(plan.workload, pages=plan.workload.pages * 3 // 2)
    with pytest.raises(InfeasibleError, match="does not fit"):
        duoka.plan(model, "virtual:64MiB,64MiB", more, suggest=False)


def test_steps_shrink_where_large_ones_do_not_fit() -> None:
    chunks = [
        work.prefill_chunk_tokens
        for work in with_chunks(replace(WORK, prefill_chunk_tokens="auto"))
    ]
    assert chunks == [128]
    large = replace(WORK, prompt_tokens=4000, prefill_chunk_tokens="auto")
    assert [work.prefill_chunk_tokens for work in with_chunks(large)] == [2048, 1024, 512]


@pytest.mark.slow
def test_pages_are_an_objective_of_paged_caches_alone(model: Path) -> None:
    with pytest.raises(UsageError, match="the objective pages needs a paged KV cache"):
        duoka.plan(model, "virtual:64MiB", replace(WORK, cache="dynamic"), objective="pages")
    with pytest.raises(UsageError, match="pages is 7"):
        replace(WORK, cache="dynamic", pages=7)


@pytest.mark.parametrize("budget", [26 * MIB, 41 * MIB, 92 * MIB])
def test_as_many_pages_as_fit_though_more_of_them_may_reserve_less(
    profile: Profile, budget: int
) -> None:
    blocks = range(len(profile.blocks))

    def fits(pages: int) -> bool:
        peaks = ServingReplay(profile, replace(WORK, pages=pages)).run(blocks)
        assert peaks is not None
        return peaks.reserved_bytes <= usable(budget)

    workload, _ = with_pages(profile, WORK, [(blocks, budget)], usable)
    assert workload.pages is not None
    assert fits(workload.pages)
    assert not any(map(fits, range(workload.pages + 1, workload.pages + 60)))
    assert not any(map(fits, range(workload.pages + 60, 2 * workload.pages, 97)))
