"""The largest context and batch, against a scan of every one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import rehearsing
import tiny
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import MIB

from duoka import Workload
from duoka.errors import UsageError
from duoka.forecast.profile import Profile
from duoka.planner.constraints import Constraints
from duoka.planner.device_map import DeviceMap
from duoka.planner.max_workload import find_largest, sizes_to_try
from duoka.planner.request import Largest, PlanProblem
from duoka.planner.solve import find_plan, solve

LOAD = Workload(prompt_tokens=700, new_tokens=40, dtype="bfloat16")


def ask(*budgets_mib: float, largest: Largest = "context", load: Workload = LOAD) -> PlanProblem:
    return PlanProblem(fleet=tiny.fleet(*budgets_mib), workload=load, largest=largest)


def scan(profile: Profile, problem: PlanProblem) -> int | None:
    """The largest candidate that fits, by trying each of them from scratch."""
    best = None
    for number in sizes_to_try(profile, problem):
        load = problem.workload
        if problem.largest == "batch":
            load = replace(load, batch=number)
        else:
            load = replace(load, prompt_tokens=number - load.new_tokens)
        fresh = PlanProblem(
            fleet=problem.fleet,
            workload=load,
            constraints=problem.constraints,
            use_all=problem.use_all,
        )
        if solve(profile, fresh):
            best = number
    return best


def told(profile: Profile, problem: PlanProblem) -> int | None:
    plan = find_largest(profile, problem)
    if not plan:
        return None
    load = plan.workload
    return load.batch if problem.largest == "batch" else load.context_tokens


@pytest.mark.fuzz
@settings(max_examples=examples(4), deadline=None)
@given(
    budgets=st.lists(st.integers(60, 140), min_size=1, max_size=3),
    weights=st.lists(st.integers(5, 40), min_size=2, max_size=4),
    cache=st.sampled_from([2048, 20_000]),
    work=st.sampled_from([4096, 40_000]),
    strategy=st.sampled_from(["auto", "sequential"]),
)
def test_the_largest_context_is_that_of_a_scan(
    budgets: list[int], weights: list[int], cache: int, work: int, strategy: str
) -> None:
    profile = tiny.made_up(
        [w * MIB for w in weights], tiny.Costs(cache=cache, work=work), max_context_tokens=3000
    )
    problem = replace(
        ask(*budgets),
        constraints=Constraints(strategy=strategy),  # type: ignore[arg-type]
    )
    assert told(profile, problem) == scan(profile, problem)


@pytest.mark.slow
@pytest.mark.fuzz
@settings(max_examples=examples(3), deadline=None)
@given(
    budgets=st.lists(st.integers(60, 110), min_size=1, max_size=2),
    weights=st.lists(st.integers(5, 40), min_size=2, max_size=4),
    cache=st.sampled_from([4096, 20_000]),
)
def test_the_largest_batch_is_that_of_a_scan(
    budgets: list[int], weights: list[int], cache: int
) -> None:
    profile = tiny.made_up([w * MIB for w in weights], tiny.Costs(cache=cache))
    problem = ask(*budgets, largest="batch")
    found = told(profile, problem)
    above = (found or 0) + 1
    # Every larger one up to where weights and caches alone are too much.
    caches = cache * 740 * max(len(weights) - 2, 0) or 1024 * 700
    most = max(sum(budgets) * MIB // caches, above) + 1
    for number in range(above, most + 1):
        fresh = replace(problem.workload, batch=number)
        assert not solve(profile, PlanProblem(fleet=problem.fleet, workload=fresh))
    if found is not None:
        fits = replace(problem.workload, batch=found)
        assert solve(profile, PlanProblem(fleet=problem.fleet, workload=fits))


@pytest.mark.parametrize("schedule", ["sequential", "gpipe", "1f1b"])
# With the last one a bisection over whole searches missed the largest: they are not monotone.
@pytest.mark.parametrize("seed", [0, 1, 232])
def test_the_largest_batch_to_train_with_is_that_of_a_scan(seed: int, schedule: str) -> None:
    rng = random.Random(seed)
    made = [
        rehearsing.Layer(
            weight=rng.randint(1, 8) * MIB,
            result=rng.randint(1, 8) * MIB // 4,
            saved=rng.randint(1, 12) * MIB // 2,
        )
        for _ in range(rng.randint(2, 4))
    ]
    load = rehearsing.load(
        1, method="full", optimizer="sgd", micro_batches=rng.randint(2, 5), schedule=schedule
    )
    profile = rehearsing.made_up(made)
    budgets = [rng.choice((40, 60, 90, 120)) for _ in range(2)]
    problem = ask(*budgets, largest="batch", load=load)
    fits = [
        number
        # All that is saved of a micro-batch is somewhere at once.
        for number in range(1, sum(budgets) * MIB // sum(each.saved for each in made) + 1)
        if solve(profile, PlanProblem(fleet=problem.fleet, workload=replace(load, batch=number)))
    ]
    assert told(profile, problem) == max(fits, default=None)


LAYERS = tiny.made_up([60 * MIB, *[40 * MIB] * 4, 60 * MIB], tiny.Costs(cache=2048))


def test_the_plan_says_what_was_asked() -> None:
    plan = find_plan(LAYERS, ask(240, 200))
    assert plan.request.largest == "context"
    assert plan.workload.context_tokens % 64 == 0
    assert plan.workload.new_tokens == 40
    tokens = plan.workload.context_tokens
    reason = f"The longest context that fits is {tokens} tokens (in steps of 64): memory is"
    assert plan.why[0].text.startswith(reason)
    batch = find_plan(LAYERS, ask(240, 200, largest="batch"))
    assert batch.why[0].text.startswith(
        f"The largest batch of 740 tokens each is {batch.workload.batch}: memory"
    )
    more = replace(LOAD, prompt_tokens=plan.workload.prompt_tokens + 64)
    assert not solve(LAYERS, PlanProblem(fleet=tiny.fleet(240, 200), workload=more))


def test_the_models_limit_is_one_of_the_contexts() -> None:
    profile = replace(LAYERS, max_context_tokens=1000)
    plan = find_plan(profile, ask(2000))
    assert plan.workload.context_tokens == 1000
    assert plan.why[0].text == "The longest context is 1000 tokens, the limit of the model."


def test_what_a_profile_does_not_know_is_told() -> None:
    known = (0, 512)
    regimes = tuple(replace(each, keys=known) for each in LAYERS.regimes)
    with pytest.raises(UsageError, match="is not in the profile of MadeUp, which ends at 511"):
        find_plan(replace(LAYERS, regimes=regimes), ask(240, 200))


def test_contexts_are_finer_where_they_are_short() -> None:
    numbers = list(sizes_to_try(replace(LAYERS, max_context_tokens=20_000), ask(100)))
    assert numbers[:2] == [64, 128]
    assert numbers[255:258] == [16_384, 16_640, 16_896]
    assert numbers[-1] == 20_000


def questions() -> Iterator[tuple[PlanProblem, str]]:
    mapped = replace(ask(400), device_map=DeviceMap.of({"": "vgpu:0"}))
    yield mapped, "a device map"
    yield ask(400, load=replace(LOAD, new_tokens=9_000)), "leave no tokens for a prompt"


@pytest.mark.parametrize(("problem", "message"), list(questions()), ids=["map", "new"])
def test_what_makes_no_sense_is_refused(problem: PlanProblem, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        find_plan(replace(LAYERS, max_context_tokens=8_000), problem)
