"""Replay of serving: steps of every size over a paged cache, until reserved memory is stable.

For seconds, it also makes steps with the work of given requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .alloc_events import ForecastStep
from .allocator import OutOfCapacity
from .profile import Phase, Profile
from .replay import Replay, StageRun
from .serving import FIRST, Capacity, StepSize, serving_monomials
from .workload import Workload


class ServingReplay(Replay):
    """A profile at a workload with a paged cache, to replay its stages.

    With `brief` it has only the first step and the largest step. `engine` is the capacity of the
    engine that runs the workload, by default the workload's own.
    """

    def __init__(
        self,
        profile: Profile,
        workload: Workload,
        *,
        brief: bool = False,
        engine: Capacity | None = None,
    ) -> None:
        self.capacity = Capacity.of(workload)
        self._engine = engine or self.capacity
        super().__init__(profile, workload, brief=brief)

    def step_over(self, query: int, past: int) -> ForecastStep:
        """Return a prefill step over a chunk of one prompt, or a decode step over all sequences."""
        answering = query == 1 and past >= self.workload.prompt_tokens
        sequences = self.workload.batch if answering else 1
        size = StepSize(tokens=query * sequences, rows=query, logits=sequences)
        keys = (past + query) * sequences
        pairs = (past + (query + 1) // 2) * query * sequences
        is_graph = answering and size.tokens <= self._engine.most_graph_tokens
        if is_graph and self._engine.gathered_pages:
            keys = pairs = self._engine.attended_tokens * sequences
        return self._serve(size, keys, pairs=pairs, is_graph=is_graph)

    def prompt_steps(self) -> list[tuple[ForecastStep, float]]:
        """Return the prefill steps of the prompts of all sequences, one prompt after another."""
        steps = super().prompt_steps()
        return [(step, weight * self.workload.batch) for step, weight in steps]

    def _schedule(self) -> list[ForecastStep]:
        sizes = self.capacity.steps()
        first_step = self._serve(FIRST, is_first=True)
        if self.brief:
            return [first_step, self._serve(sizes[0])]
        graphs = [self._serve(size, is_graph=True) for size in self.capacity.graph_steps()]
        return [first_step, *map(self._serve, sizes), *graphs]

    def _serve(
        self,
        size: StepSize,
        gathered: int | None = None,
        *,
        pairs: int | None = None,
        is_first: bool = False,
        is_graph: bool = False,
    ) -> ForecastStep:
        """Return a step of this size; by default with the most gathered tokens (for memory)."""
        phase: Phase = "start" if is_first else "serve"
        gathered = self.capacity.attended_tokens if gathered is None else gathered
        values = serving_monomials(
            size,
            gathered=gathered,
            numbers=self.capacity.page_numbers,
            pages=self.capacity.pages,
            pairs=pairs,
        )
        tokens = size.tokens
        regime = self.profile.regime_of(phase, batch=1, query=tokens, keys=tokens)
        step = ForecastStep(phase=phase, query=tokens, keys=tokens, regime=regime, values=values)
        return replace(step, is_graph=is_graph)

    def passes(self, stage: StageRun) -> Iterator[None]:
        """Run the first step, then rounds of all step sizes until a round adds no segment.

        The docstring of `serving` explains why later steps then need no more memory.
        """
        # A fixed point: a new segment changes which free blocks later steps split, so the same
        # sizes may need another segment in the next round. After a round without a new segment,
        # steps in any order find the same segments.
        stage.run_pass(0)
        memory, reserved = stage.memory, -1
        numbers = range(1, len(self.steps))
        while reserved < memory.max_reserved:
            reserved = memory.max_reserved
            for step in numbers:
                if not self.steps[step].is_graph:
                    stage.run_pass(step)
            yield
        stage.record_graphs(step for step in numbers if self.steps[step].is_graph)
        yield
        if memory.is_pressed:  # a later step may need returned segments again
            raise OutOfCapacity(0, reserved, memory.allocated, reserved)
