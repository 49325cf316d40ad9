"""Whether a workload fits a machine at all: an exhaustive search of its own, for `planner.py`.

It shares nothing with duoka's search. Tried is every cut of a model into stages, on every subset
and in every order of the machine's GPUs, for every chunk in which the prompt may run, with four
savings: GPUs of equal budgets are one; what couldn't be completed once from a block on, with the
same GPUs left, isn't tried again; nor is a first part whose rest can't be placed even if nothing
but weights and the full cache counted; and a stage whose lower bound is over the budget isn't
replayed. `Audit` checks the last, and that replays remembered for stages that look alike are
right, on a sample. A stage fits when every step of it has been replayed.

How many bytes a stage needs is asked of `forecast.Costs`, whose answers are held against virtual
GPUs elsewhere (`forecast.py`, and `planner.py --measure`).
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from duoka.forecast.costs import Costs
from duoka.forecast.profile import Profile
from duoka.forecast.replay import Replay
from duoka.forecast.workload import Workload

Stages = tuple[tuple[int, int, int], ...]
"""Start, stop and the budget of the GPU, for each stage."""

Likeness = tuple[tuple[int, ...], int]

_ENDLESS = 1 << 60

CHUNKS = (512, 1024, 2048, 4096, 8192, None)


def chunked(workload: Workload) -> Iterator[Workload]:
    """The workload with its prompt in each of the chunks, the smallest first, then whole."""
    for chunk in CHUNKS:
        if chunk is None or chunk < workload.prompt_tokens:
            yield replace(workload, prefill_chunk_tokens=chunk)


class Referee:
    """One workload in one chunk: which placements fit which machines."""

    def __init__(self, profile: Profile, workload: Workload) -> None:
        self.costs = Costs(profile, workload)
        self.profile, self.workload = profile, workload
        self.num_blocks = self.costs.num_blocks
        self.floor = list(accumulate(self._held(), initial=0))
        self._fits: dict[Likeness, bool] = {}
        self._bounds = self.costs.lower_bound_bytes.tolist()
        self._replay = Replay(profile, workload)

    def fewest(self, budgets: Sequence[int], most: int) -> Stages | None:
        """A placement on as few of the GPUs as can be, and not on more than `most`."""
        for count in range(1, min(most, self.num_blocks) + 1):
            if sum(sorted(budgets)[-count:]) < self.floor[-1]:
                continue
            found = _Attempt(self, budgets, count).place(0)
            if found is not None:
                return found
        return None

    def any(self, budgets: Sequence[int]) -> Stages | None:
        """A placement on however many of the GPUs."""
        return _Attempt(self, budgets, len(budgets)).place(0)

    def may_fit(self, budgets: Sequence[int]) -> bool:
        """Whether weights and the full cache, without anything else, can be placed."""
        return not _Attempt(self, budgets, len(budgets)).is_hopeless(0, ())

    def fits(self, start: int, stop: int, budget: int) -> bool:
        """Whether a stage fits a GPU of that budget."""
        key = (self._likeness(start, stop), budget)
        if key not in self._fits:
            self._fits[key] = self._bounds[start][stop] <= budget and (
                self._replay.run(self.costs.blocks_of(start, stop), budget) is not None
            )
        return self._fits[key]

    def _likeness(self, start: int, stop: int) -> tuple[int, ...]:
        """Equal for stages of equal blocks, with equal ones before and after them."""
        blocks = self.costs.blocks_of(start, stop)
        around = (blocks[0] - 1, *blocks, blocks[-1] + 1)
        kinds = self.profile.blocks
        return tuple(kinds[at].kind if 0 <= at < len(kinds) else -1 for at in around)

    def _held(self) -> Iterator[int]:
        """What each block of the chain holds at the end of the last step: weights and cache."""
        replay = Replay(self.profile, self.workload, brief=True)
        for index in range(self.num_blocks):
            blocks = self.costs.blocks_of(index, index + 1)
            kinds = [self.profile.kinds[self.profile.blocks[block].kind] for block in blocks]
            cache = sum(_cache_at_the_end(replay, block) for block in blocks)
            yield cache + sum(sum(kind.weight_bytes) for kind in kinds)


def _cache_at_the_end(replay: Replay, block: int) -> int:
    slots: list[int] = []
    for step in range(len(replay.steps)):
        trace, sizes = replay.trace(block, step), replay.sizes(block, step)
        dropped = {ref.index for ref in trace.events if ref is not None and ref.origin == "kept"}
        slots = [size for index, size in enumerate(slots) if index not in dropped]
        slots += [sizes[index] for index in trace.retained]
    return sum(slots)


class _Attempt:
    """Placements on at most so many GPUs."""

    def __init__(self, referee: Referee, budgets: Sequence[int], count: int) -> None:
        self.referee = referee
        self.kinds = sorted(set(budgets))
        self.all = Counter(budgets)
        self.count = count
        self.hopeless: set[tuple[int, tuple[int, ...]]] = set()
        self._starts: dict[tuple[tuple[int, ...], int], int] = {}

    def place(self, start: int, used: tuple[int, ...] = ()) -> Stages | None:
        """The stages from block `start` on, when the GPUs `used` (sorted budgets) are taken."""
        if start == self.referee.num_blocks:
            return ()
        if len(used) == self.count or (start, used) in self.hopeless:
            return None
        for budget in reversed(self.kinds):
            if self.all[budget] == used.count(budget):
                continue
            taken = tuple(sorted((*used, budget)))
            for stop in range(self.referee.num_blocks, start, -1):
                if self.is_hopeless(stop, taken) or not self.referee.fits(start, stop, budget):
                    continue
                rest = self.place(stop, taken)
                if rest is not None:
                    return ((start, stop, budget), *rest)
        self.hopeless.add((start, used))
        return None

    def is_hopeless(self, start: int, used: tuple[int, ...]) -> bool:
        """Whether the blocks from `start` on are known not to fit the GPUs that are left."""
        if (start, used) not in self.hopeless:
            left = sorted((self.all - Counter(used)).elements())
            most = self.count - len(used)
            if start < self._least_start(tuple(left), most):
                self.hopeless.add((start, used))
        return (start, used) in self.hopeless

    def _least_start(self, left: tuple[int, ...], most: int) -> int:
        """From where on at most `most` of these GPUs could hold all, by weights and cache."""
        key = (left, most)
        if key not in self._starts:
            num, floor = self.referee.num_blocks, self.referee.floor
            least = num
            for index, budget in enumerate(left if most else ()):
                if index and left[index - 1] == budget:
                    continue
                behind = self._least_start((*left[:index], *left[index + 1 :]), most - 1)
                least = min(least, bisect_left(floor, floor[behind] - budget))
            self._starts[key] = least
        return self._starts[key]


@dataclass
class Verdict:
    """The fewest GPUs on which a workload fits, in which chunk; none where it fits nowhere."""

    stages: Stages | None = None
    referee: Referee | None = None

    @property
    def num_gpus(self) -> int | None:
        return None if self.stages is None else len(self.stages)


class Bench:
    """The referees of one workload, kept for the machines that it is tried on."""

    def __init__(self, profile: Profile, workload: Workload) -> None:
        self.referees = [Referee(profile, each) for each in chunked(workload)]

    def judge(self, budgets: Sequence[int]) -> Verdict:
        """Search all chunks for the fewest GPUs."""
        best = Verdict()
        for referee in self.referees:
            most = len(budgets) if best.stages is None else len(best.stages) - 1
            found = referee.fewest(budgets, most)
            if found is not None:
                best = Verdict(stages=found, referee=referee)
        return best

    def any(self, budgets: Sequence[int]) -> bool:
        """Whether there is a placement on however many GPUs."""
        return any(referee.any(budgets) is not None for referee in self.referees)


@dataclass
class Audit:
    """Checks of the savings, on stages drawn at random."""

    seed: int
    drawn: int = 0
    bounds_too_high: int = 0
    memory_of_alikes_wrong: int = 0
    verdict_wrong: int = 0
    told: list[str] = field(default_factory=list)

    def draw(self, referee: Referee, budgets: Sequence[int], times: int) -> None:
        """Replay some stages afresh, step by step, those near a budget above all."""
        rng = random.Random(f"{self.seed} {referee.profile.fingerprint} {referee.workload}")
        for _ in range(times):
            self.drawn += 1
            self._check(referee, *_near(referee, rng.choice(list(budgets)), rng))

    def _check(self, referee: Referee, start: int, stop: int, budget: int) -> None:
        blocks = referee.costs.blocks_of(start, stop)
        afresh = Replay(referee.profile, referee.workload)
        peaks = afresh.run(blocks)
        assert peaks is not None, "nothing limits this run"
        bound = int(referee.costs.lower_bound_bytes[start, stop])
        told = referee.costs.requested_bytes(start, stop, _ENDLESS)
        fits = referee.fits(start, stop, budget)
        place = f"{referee.profile.model} {referee.workload} [{start}, {stop}) on {budget}"
        if bound > peaks.requested_bytes:
            self.bounds_too_high += 1
            self.told.append(f"bound {bound} > {peaks.requested_bytes}: {place}")
        if told != peaks.requested_bytes:
            self.memory_of_alikes_wrong += 1
            self.told.append(f"remembered {told}, replayed {peaks.requested_bytes}: {place}")
        if fits != (afresh.run(blocks, budget) is not None):
            self.verdict_wrong += 1
            self.told.append(f"judged {fits}, which it is not: {place}")


def _near(referee: Referee, budget: int, rng: random.Random) -> tuple[int, int, int]:
    """A stage that is about as long as a budget allows."""
    start = rng.randrange(referee.num_blocks)
    bounds = referee.costs.lower_bound_bytes[start]
    stops = range(start + 1, referee.num_blocks + 1)
    last = max((stop for stop in stops if bounds[stop] <= budget), default=start + 1)
    return start, max(start + 1, last - rng.randrange(3)), budget
