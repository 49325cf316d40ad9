"""The scheduler beside a memory of tokens in the place of keys and values, in any order."""

from __future__ import annotations

import logging
import os
import random
from collections import deque

import pytest
from sequences import sequence_of

from duoka.engine.request import Completion, SamplingParams, TokenChoice
from duoka.engine.scheduler import Scheduler
from duoka.engine.sequence import Event, Sequence
from duoka.forecast.forecast import Forecast
from duoka.forecast.serving import Capacity
from duoka.forecast.serving_speed import ServingSpeed, StepSeconds
from duoka.runtime.call.chunk import Chunk

REQUESTS = int(os.environ.get("DUOKA_FUZZ_EXAMPLES", "300"))
CAPACITY = Capacity(sequences=6, context_tokens=64, pages=24, page_tokens=4, step_tokens=24)


ENDS: dict[int, list[Event]] = {}
"""What has been told of each sequence, by its number."""


def request(rng: random.Random, common: list[int]) -> Sequence:
    prompt = [rng.randrange(1000) for _ in range(rng.randrange(1, 30))]
    if rng.random() < 0.3:
        prompt = common[: rng.randrange(1, len(common))] + prompt[:8]
    new_tokens = rng.randrange(1, 30)
    events: list[Event] = []
    stop_ids = range(rng.choice([0, 0, 100]))
    sequence = sequence_of(prompt, new_tokens, on_event=events.append, stop_ids=stop_ids)
    ENDS[sequence.number] = events
    return sequence


class Memory:
    """Pages that hold tokens: what is read there is what was written there last."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._sampled: list[int] = []
        self.num_ahead = 0  # tokens of the step before

    def compute(self, chunks: list[Chunk]) -> list[TokenChoice | None]:
        """Compute a step, of which some tokens may be those sampled in the step before."""
        outcomes = [self._compute(chunk) for chunk in chunks]
        self._sampled = [outcome.token for outcome in outcomes if outcome is not None]
        return outcomes

    def _compute(self, chunk: Chunk) -> TokenChoice | None:
        """Store a chunk; the next token, made from all that are in the sequence's pages."""
        for place, token in enumerate(chunk.tokens, chunk.start):
            known = token if token >= 0 else self._sampled[-1 - token]
            self._slots[self._slot(chunk, place)] = known
            self.num_ahead += token < 0
        if chunk.row is None:
            return None
        return TokenChoice(
            token=next_token([self._slots[self._slot(chunk, at)] for at in range(chunk.end)])
        )

    def _slot(self, chunk: Chunk, place: int) -> int:
        size = CAPACITY.page_tokens
        return chunk.pages[place // size] * size + place % size


def next_token(tokens: list[int]) -> int:
    return hash(tuple(tokens)) % 1000


def expected(sequence: Sequence) -> list[int]:
    tokens = list(sequence.prompt)
    for _ in range(sequence.max_new_tokens):
        token = next_token(tokens)
        if token in sequence._stop_ids:
            break
        tokens.append(token)
    return tokens


def forecast_of(*gains: float, step_seconds: StepSeconds | None = None) -> Forecast:
    """A forecast in which 1, 2, … requests gain so much by groups."""
    speeds = (
        ServingSpeed(requests=number, tokens_per_second=gain, serial_tokens_per_second=1.0)
        for number, gain in enumerate(gains, 1)
    )
    return Forecast(devices=(), serving_speeds=tuple(speeds), step_seconds=step_seconds)


def play(
    rng: random.Random,
    num_steps: int,
    number: int,
    forecast: Forecast | None = None,
    *,
    runs_ahead: bool = False,
) -> Scheduler:
    """Many requests, of which some are cancelled and some fail; each ends as it should."""
    scheduler = Scheduler(CAPACITY, num_steps, forecast=forecast, runs_ahead=runs_ahead)
    memory = Memory()
    common = [rng.randrange(1000) for _ in range(20)]
    coming = [request(rng, common) for _ in range(number)]
    sequences = list(coming)
    failing = set(rng.sample(sequences, number // 20))
    numbers = {sequence.number for sequence in failing}
    flying: deque[tuple[list[Chunk], list[TokenChoice | None]]] = deque()
    while coming or scheduler.waiting or scheduler.running or flying:
        if coming and (rng.random() < 0.4 or not (scheduler.waiting or scheduler.running)):
            scheduler.add(coming.pop())
        if rng.random() < 0.02:
            rng.choice(sequences).is_cancelled = True
        num_preempted = scheduler.num_preempted
        oldest = next(iter(scheduler.running.values()), None)
        if len(flying) < num_steps + runs_ahead and (chunks := scheduler.next_step()):
            running = scheduler.running
            assert oldest is None or oldest.number in running or oldest.is_cancelled
            assert len(scheduler.running) <= CAPACITY.sequences
            assert sum(len(chunk.tokens) for chunk in chunks) <= CAPACITY.step_tokens
            decoding = [chunk for chunk in chunks if running[chunk.sequence].is_decoding]
            total = sum(sequence.is_decoding for sequence in running.values())
            if forecast is None and not runs_ahead:
                total += scheduler.num_preempted - num_preempted
                assert len(decoding) <= -(-total // num_steps)
            elif not runs_ahead:  # some may wait for a page
                assert len(decoding) in (0, total) or not scheduler.pool.num_free
            flying.append((chunks, memory.compute(chunks)))
        elif flying:
            chunks, outcomes = flying.popleft()
            for chunk, outcome in zip(chunks, outcomes, strict=True):
                is_bad = chunk.sequence in numbers and outcome is not None
                scheduler.computed(chunk, ValueError("bad") if is_bad else outcome)
    assert scheduler.pool.num_free == CAPACITY.pages
    assert not runs_ahead or memory.num_ahead > number
    for sequence in sequences:
        check_end(sequence, sequence in failing)
    return scheduler


def check_end(sequence: Sequence, is_failing: bool) -> None:
    """A sequence has ended once, and with what it should."""
    (event,) = ENDS.pop(sequence.number)
    if isinstance(event, ValueError):
        assert is_failing
        return
    assert isinstance(event, Completion)
    if event.finish in ("length", "stop"):
        assert not is_failing or not event.tokens
        assert sequence.tokens == expected(sequence)
    else:
        assert event.finish == "cancelled"
        assert sequence.is_cancelled
        assert sequence.tokens == expected(sequence)[: len(sequence.tokens)]


@pytest.mark.fuzz
@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_each_ends_as_it_should(num_steps: int) -> None:
    scheduler = play(random.Random(num_steps), num_steps, REQUESTS)
    assert scheduler.num_preempted > 0


def test_each_ends_as_it_should_if_steps_run_ahead() -> None:
    scheduler = play(random.Random(5), 1, REQUESTS, runs_ahead=True)
    assert scheduler.num_preempted > 0


def test_a_step_ahead_takes_the_tokens_of_the_step_in_flight() -> None:
    scheduler = Scheduler(ROOMY, runs_ahead=True)
    a, b, c = (sequence_of([number] * 5, new_tokens) for number, new_tokens in enumerate((9, 2, 1)))
    for sequence in (a, b, c):
        scheduler.add(sequence)
    first, second = scheduler.next_step(), scheduler.next_step()
    assert [(chunk.sequence, len(chunk.tokens)) for chunk in first] == [
        (a.number, 5), (b.number, 5), (c.number, 5)
    ]  # fmt: skip
    # The one token of c is in flight already.
    assert [(chunk.sequence, chunk.tokens, chunk.start) for chunk in second] == [
        (a.number, [-1], 5), (b.number, [-2], 5)
    ]  # fmt: skip
    assert [chunk.row.place for chunk in second] == [1, 1]
    for chunk in first:
        scheduler.computed(chunk, TokenChoice(token=7))
    (third,) = scheduler.next_step()
    assert (third.sequence, third.tokens, third.start, third.row.place) == (a.number, [-1], 6, 2)
    assert [*scheduler.running] == [a.number, b.number]


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_sequence_that_ends_meanwhile_leaves_its_page_behind(is_cancelled: bool) -> None:
    scheduler = Scheduler(ROOMY, runs_ahead=True)
    sequence = sequence_of([5] * 4, 9, stop_ids=[7])
    scheduler.add(sequence)
    (first,), (second,) = scheduler.next_step(), scheduler.next_step()
    assert len(second.pages) == 2
    sequence.is_cancelled = is_cancelled
    scheduler.computed(first, TokenChoice(token=7))
    assert scheduler.next_step() == []
    scheduler.computed(second, TokenChoice(token=8))
    assert scheduler.next_step() == []
    assert (sequence.tokens, scheduler.pool.num_free) == ([5] * 4, ROOMY.pages)


def test_no_step_runs_ahead_of_penalties() -> None:
    """The company would otherwise be in twice as many steps."""
    scheduler = Scheduler(ROOMY, runs_ahead=True)
    params = SamplingParams(presence_penalty=1.0, seed=0, max_new_tokens=3)
    plain, changed = sequence_of([1] * 5, 9), sequence_of([2] * 5, params=params)
    for sequence in (plain, changed):
        scheduler.add(sequence)
    for size in (5, 1, 1):
        chunks = scheduler.next_step()
        assert [len(chunk.tokens) for chunk in chunks] == [size, size]
        assert scheduler.next_step() == []
        for chunk in chunks:
            scheduler.computed(chunk, TokenChoice(token=3))
    assert [[chunk.tokens for chunk in scheduler.next_step()] for _ in range(2)] == [[[3]], [[-1]]]


def test_who_waits_for_a_page_is_not_passed_by_younger_ones() -> None:
    capacity = Capacity(sequences=3, context_tokens=16, pages=5, page_tokens=4, step_tokens=16)
    scheduler = Scheduler(capacity, runs_ahead=True)
    old, young = sequence_of([1] * 4, 12), sequence_of([2] * 7, 9)
    for sequence in (old, young):
        scheduler.add(sequence)
    flying: deque[list[Chunk]] = deque()
    while scheduler.waiting or scheduler.running or flying:
        is_ready = old.number in scheduler.running and (old.num_left == 1 or old.awaits_token)
        if len(flying) < 2 and (chunks := scheduler.next_step()):
            numbers = [chunk.sequence for chunk in chunks]
            assert not is_ready or old.number in numbers, "the young one passes by"
            flying.append(chunks)
        else:
            end_step(scheduler, flying.popleft())
    assert (old.is_preempted, young.is_preempted) == (False, True)
    assert (len(old.tokens), len(young.tokens)) == (16, 16)


def test_a_cancelled_sequence_is_not_retried(caplog: pytest.LogCaptureFixture) -> None:
    """A step ahead of it has failed, whose token isn't known: the sequence was cancelled before."""
    caplog.set_level(logging.INFO, "duoka.engine")
    scheduler = Scheduler(ROOMY, runs_ahead=True)
    a, b = sequence_of([1] * 5, 9), sequence_of([2] * 5, 9)
    for sequence in (a, b):
        scheduler.add(sequence)
    first, second = scheduler.next_step(), scheduler.next_step()
    a.is_cancelled = True
    for chunk in first:
        scheduler.computed(chunk, TokenChoice(token=7))
    assert [chunk.sequence for chunk in scheduler.next_step()] == [b.number]
    assert scheduler.schedule_again(second[:1]) == []
    (again,) = scheduler.schedule_again(second[1:])
    assert (again.sequence, again.tokens, again.start) == (b.number, [7], 5)
    scheduler.next_step()
    assert [*scheduler.running] == [b.number]
    assert caplog.messages == [f"request {a.number} is cancelled"]


def test_who_waits_for_a_page_is_not_passed_by_a_prompt() -> None:
    capacity = Capacity(sequences=2, context_tokens=64, pages=17, page_tokens=4, step_tokens=4)
    scheduler = Scheduler(capacity, runs_ahead=True)
    old, young = sequence_of([1] * 3, 12), sequence_of([2] * 60, 4)
    for sequence in (old, young):
        scheduler.add(sequence)
    flying = deque([scheduler.next_step()])
    while old.number in scheduler.running:
        if len(flying) < 2 and (chunks := scheduler.next_step()):
            is_ready = old.number in scheduler.running and old.num_left == 1
            assert not is_ready, "the young one passes by"
            flying.append(chunks)
        else:
            end_step(scheduler, flying.popleft())
    assert len(old.tokens) == 15


def test_one_group_answers_where_it_is_faster() -> None:
    play(random.Random(7), 3, REQUESTS // 3, forecast_of(0.9))


def test_groups_come_back_where_they_are_faster() -> None:
    scheduler = Scheduler(ROOMY, 2, forecast=forecast_of(1.0, 0.9, 0.9, 1.1))
    for sequence in (sequence_of([number]) for number in range(4)):
        scheduler.add(sequence)
    steps = [scheduler.next_step() for _ in range(3)]
    assert [len(chunks) for chunks in steps] == [2, 2, 0]
    next(iter(scheduler.running.values())).is_cancelled = True
    for chunk in (chunk for chunks in steps for chunk in chunks):
        scheduler.computed(chunk, TokenChoice(token=1))
    # Three that answer go together, and while they are on their way nobody else is.
    assert [len(scheduler.next_step()) for _ in range(2)] == [3, 0]


def test_chunks_last_equally_long_by_the_forecast() -> None:
    capacity = Capacity(
        sequences=2, context_tokens=4000, pages=1000, page_tokens=4, step_tokens=900
    )
    # A token costs as much again for each 1,000 tokens before it.
    seconds = StepSeconds(fixed_seconds=0.1, token_seconds=1e-3, pair_seconds=1e-6)
    scheduler = Scheduler(capacity, 2, forecast=forecast_of(step_seconds=seconds))
    scheduler.add(sequence_of(range(3600)))
    chunks = [chunk for _ in range(25) for chunk in scheduler.next_step()]
    sizes = [len(chunk.tokens) for chunk in chunks]
    assert sizes[0] == 600  # sqrt(0.1 × 3.6) seconds of tokens
    lasting = [len(chunk.tokens) * (1e-3 + 1e-6 * chunk.start) for chunk in chunks[:-1]]
    assert lasting == pytest.approx([0.6] * len(lasting), rel=0.01)
    assert sum(sizes) == 3600


def test_prompts_are_read_in_chunks_so_that_no_stage_waits() -> None:
    scheduler = Scheduler(
        Capacity(sequences=2, context_tokens=400, pages=100, page_tokens=4, step_tokens=300), 2
    )
    scheduler.add(request(random.Random(0), [1, 2]))
    scheduler.waiting[0].tokens[:] = scheduler.waiting[0].prompt[:] = range(200)
    first, second = scheduler.next_step(), scheduler.next_step()
    assert [(chunk.start, chunk.end) for chunk in (*first, *second)] == [(0, 50), (50, 100)]


def test_the_youngest_gives_way_and_is_recomputed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "duoka.engine")
    capacity = Capacity(sequences=3, context_tokens=16, pages=4, page_tokens=4, step_tokens=16)
    scheduler = Scheduler(capacity)
    old, young = (sequence_of([number] * 4, 12) for number in (1, 2))
    for sequence in (old, young):
        scheduler.add(sequence)
    sizes = []
    while scheduler.waiting or scheduler.running:
        sizes.append(step(scheduler))
        assert 0 <= scheduler.pool.num_free <= capacity.pages
    assert (scheduler.num_preempted, old.is_preempted, young.is_preempted) == (1, False, True)
    assert caplog.messages == [f"request {young.number} is preempted: no page is free"]
    # The old one is in each step until it ends; then the young one is read again, but for its
    # pages that are still there, which are not said to have been those of another.
    assert [old.number in size for size in sizes] == [True] * 12 + [False] * (len(sizes) - 12)
    assert (len(old.tokens), len(young.tokens)) == (16, 16)
    assert (old.shared_tokens, young.shared_tokens) == (0, 0)
    assert scheduler.pool.num_free == capacity.pages


# ── several answers to one prompt ──

ROOMY = Capacity(sequences=4, context_tokens=48, pages=48, page_tokens=4, step_tokens=16)


def end_step(scheduler: Scheduler, chunks: list[Chunk]) -> None:
    """Give each sequence of a step the token 1."""
    for chunk in chunks:
        scheduler.computed(chunk, None if chunk.row is None else TokenChoice(token=1))


def step(scheduler: Scheduler) -> dict[int, int]:
    """Run a step; the tokens of each sequence in it, by its number."""
    chunks = scheduler.next_step()
    end_step(scheduler, chunks)
    return {chunk.sequence: len(chunk.tokens) for chunk in chunks}


def test_answers_to_one_prompt_are_computed_from_one_on() -> None:
    scheduler = Scheduler(ROOMY)
    sequences = [sequence_of(range(30)) for _ in range(3)]
    for sequence in sequences:
        scheduler.add(sequence)
    first, second, third = (sequence.number for sequence in sequences)
    assert step(scheduler) == {first: 16}
    assert step(scheduler) == {first: 14}
    assert step(scheduler) == {first: 1, second: 2, third: 2}
    assert [sequence.shared_tokens for sequence in sequences] == [0, 28, 28]


def test_who_has_little_in_common_does_not_wait() -> None:
    scheduler = Scheduler(ROOMY)
    for prompt in (range(30), [*range(8), *range(50, 62)], [9, 8]):
        scheduler.add(sequence_of(prompt))
    scheduler.next_step()
    assert len(scheduler.running) == 3


def test_who_waited_begins_when_the_other_is_gone() -> None:
    scheduler = Scheduler(ROOMY)
    first, second = sequence_of(range(30)), sequence_of(range(30))
    scheduler.add(first)
    scheduler.add(second)
    step(scheduler)
    first.is_cancelled = True
    # The pages of who is gone stay as they are.
    assert step(scheduler) == {second.number: 14}
