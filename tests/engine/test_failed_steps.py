"""Steps that fail while another is in flight: each request ends as it should, and no page is lost.

The engine's own steps over an executor that stores tokens in the place of keys and values.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from typing import Any

import pytest
import torch
from sequences import sequence_of

from duoka.engine.engine import Engine
from duoka.engine.executor import Result
from duoka.engine.request import Completion, SamplingParams, TokenChoice
from duoka.engine.scheduler import Scheduler
from duoka.engine.sequence import Event, Sequence
from duoka.forecast.serving import Capacity
from duoka.runtime.call.chunk import Chunk

SIZE = 4


def next_token(tokens: list[int]) -> int:
    return sum(place * token for place, token in enumerate(tokens, 1)) * 2654435761 // 128 % 1000


class FailingExecutor:
    """Computes a step when it is submitted; some steps fail, with or without a trace in the pages.

    A step that fails leaves the tokens of the step before it for the next one.
    """

    num_steps, runs_ahead = 1, True

    def __init__(self, rng: random.Random, poisoned: dict[int, int]) -> None:
        self._rng, self._poisoned = rng, poisoned
        self._slots: dict[tuple[int, int], int] = {}
        self._sampled = [0] * 64
        self.results: deque[Result] = deque()
        self.num_failed = 0

    def submit(self, chunks: list[Chunk]) -> None:
        is_bad = any(chunk.end > self._poisoned.get(chunk.sequence, 99) for chunk in chunks)
        is_bad |= self._rng.random() < 0.05
        if not is_bad or self._rng.random() < 0.5:
            for chunk in chunks:
                for place, token in enumerate(chunk.tokens, chunk.start):
                    known = token if token >= 0 else self._sampled[-1 - token]
                    self._slots[self._slot(chunk, place)] = known
        if is_bad:
            self.num_failed += 1
            kind = self._rng.choice([torch.OutOfMemoryError, ValueError])
            self.results.append(kind("it fails"))
            return
        outcomes = [
            None if chunk.row is None else TokenChoice(token=next_token(self._read(chunk)))
            for chunk in chunks
        ]
        tokens = [outcome.token for outcome in outcomes if outcome is not None]
        self._sampled[: len(tokens)] = tokens
        self.results.append(outcomes)

    def _read(self, chunk: Chunk) -> list[int]:
        return [self._slots.get(self._slot(chunk, place), -7) for place in range(chunk.end)]

    def _slot(self, chunk: Chunk, place: int) -> tuple[int, int]:
        return chunk.pages[place // SIZE], place % SIZE


def engine_of(executor: FailingExecutor, scheduler: Scheduler, monkeypatch: Any) -> Engine:
    """Make an engine without a thread and a model."""
    engine = Engine.__new__(Engine)
    engine._executor, engine._scheduler = executor, scheduler  # type: ignore[assignment]
    engine._steps, engine._failed, engine._lock = deque(), deque(), threading.RLock()
    monkeypatch.setattr(engine, "_explain_outcome", lambda outcome, chunk: outcome)
    return engine


def requests(rng: random.Random, events: dict[int, list[Event]]) -> list[Sequence]:
    common = [rng.randrange(1000) for _ in range(16)]
    sequences = []
    for _ in range(30):
        prompt = [rng.randrange(1000) for _ in range(rng.randrange(1, 30))]
        if rng.random() < 0.3:
            prompt = common[: rng.randrange(1, 16)] + prompt[:8]
        params = SamplingParams(
            seed=0,
            max_new_tokens=rng.randrange(1, min(18, 48 - len(prompt))),
            presence_penalty=rng.choice([0.0] * 9 + [1.0]),
        )
        told: list[Event] = []
        stop_ids = range(rng.choice([0, 0, 100]))
        sequences.append(
            sequence_of(prompt, params=params, on_event=told.append, stop_ids=stop_ids)
        )
        events[sequences[-1].number] = told
    return sequences


@pytest.mark.parametrize("seed", range(40))
def test_each_ends_as_it_should(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, events = random.Random(seed), dict[int, list[Event]]()
    pages = rng.choice([12, 16, 30])
    capacity = Capacity(
        sequences=rng.choice([1, 2, 4, 6]), context_tokens=48, pages=pages, page_tokens=SIZE,
        step_tokens=rng.choice([8, 16, 64]),
    )  # fmt: skip
    sequences = requests(rng, events)
    poisoned = {each.number: rng.randrange(1, 40) for each in sequences if rng.random() < 0.1}
    executor = FailingExecutor(rng, poisoned)
    scheduler = Scheduler(capacity, runs_ahead=True)
    engine = engine_of(executor, scheduler, monkeypatch)
    coming = list(sequences)
    while coming or scheduler.waiting or scheduler.running or engine._steps:
        if coming and rng.random() < 0.3:
            scheduler.add(coming.pop(0))
        for act in (engine._submit_steps, lambda: engine._take_result(take(executor))):
            if rng.random() < 0.03:
                rng.choice(sequences).is_cancelled = True
            act()
    assert executor.num_failed > 0
    assert scheduler.pool.num_free == pages
    for sequence in sequences:
        check_end(sequence, events[sequence.number], sequence.number in poisoned)


def take(executor: FailingExecutor) -> Result | None:
    return executor.results.popleft() if executor.results else None


def check_end(sequence: Sequence, told: list[Event], is_poisoned: bool) -> None:
    (end,) = told
    tokens, finish = list(sequence.prompt), "length"
    for _ in range(sequence.max_new_tokens):
        token = next_token(tokens)
        if token in sequence._stop_ids:
            finish = "stop"
            break
        tokens.append(token)
    if isinstance(end, Completion) and end.finish != "cancelled":
        assert (sequence.tokens, end.finish) == (tokens, finish)
    else:
        assert sequence.tokens == tokens[: len(sequence.tokens)]
        assert isinstance(end, Completion | ValueError | torch.OutOfMemoryError) or is_poisoned
