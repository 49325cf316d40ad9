"""Made-up profiles, planned whole and by brute force, for `optimality.py`.

What a stage needs is asked of a replay of its own for each stage, with every step, and so is
whether it fits; nothing that duoka's costs remember or bound is used.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from duoka.forecast.costs import Costs
from duoka.forecast.profile import (
    MONOMIALS,
    AllocationTrace,
    BlockKind,
    Phase,
    Profile,
    ProfileBlock,
    Read,
    Ref,
    Regime,
    Rule,
)
from duoka.forecast.replay import Replay
from duoka.forecast.workload import Workload
from duoka.hardware.device import Device
from duoka.hardware.fleet import Fleet
from duoka.planner.request import PlanProblem
from duoka.planner.solve import solve

KIB = 2**10
MIB = 2**20
PHASES: tuple[Phase, ...] = ("prefill", "extend", "decode")
CHUNKS = (None, 8192, 4096, 2048, 1024, 512)
EVERYWHERE = (0, 2**40)


@dataclass(frozen=True)
class Planned:
    """How one case came out."""

    fits: bool
    num_gpus: int
    in_chunks: bool
    difference: str


def rule(**coefficients: float) -> Rule:
    return tuple(float(coefficients.get(name, 0.0)) for name in MONOMIALS)


@dataclass(frozen=True)
class Pattern:
    """What blocks of one kind cost: bytes of weights; and bytes, FLOPs and traffic per token."""

    weight: int
    cache: int
    work: int
    scores: int
    flops: float
    traffic: float

    @classmethod
    def draw(cls, rng: random.Random) -> Pattern:
        return cls(
            weight=rng.randint(1, 48) * MIB // 2,
            cache=rng.choice((0, 512, 4 * KIB, 16 * KIB)),
            work=rng.choice((KIB, 8 * KIB, 32 * KIB)),
            scores=rng.choice((0, 0, 4)),
            flops=rng.choice((1e3, 1e6)),
            traffic=rng.choice((10.0, 1e5)),
        )

    def trace(self, phase: Phase, *, first: bool, last: bool) -> AllocationTrace:
        """A result, something to work with, and a cache made anew."""
        keeps = bool(self.cache)
        sizes = [rule(bq=4 * KIB), rule(bq=self.work, bqk=self.scores)]
        sizes += [rule(bk=self.cache)] if keeps else []
        given = Ref(origin="input", index=0) if first else Ref(origin="earlier", index=0, back=1)
        events: list[Ref | None] = [None] * len(sizes)
        events.append(Ref(origin="own", index=1))
        events += [Ref(origin="kept", index=0)] if keeps and phase != "prefill" else []
        events += [] if first else [given]
        events += [Ref(origin="own", index=0)] if last else []
        return AllocationTrace(
            sizes=tuple(sizes),
            events=tuple(events),
            retained=(2,) if keeps else (),
            reads=() if first else (Read(ref=given, size=rule(bq=4 * KIB)),),
            flops=rule(bq=self.flops),
            moved_bytes=rule(bq=self.traffic),
        )


def draw_profile(rng: random.Random) -> Profile:
    """Two to six blocks of up to three patterns; sometimes the last is tied to the first."""
    num = rng.randint(2, 6)
    patterns = [Pattern.draw(rng) for _ in range(rng.randint(1, 3))]
    tied = num > 2 and rng.random() < 0.2
    kinds: dict[BlockKind, int] = {}
    blocks = []
    for index in range(num):
        pattern, is_tied = rng.choice(patterns), tied and index == num - 1
        traces = [
            pattern.trace(phase, first=index == 0, last=index == num - 1)
            for phase in PHASES
            for _ in (False, True)
        ]
        kind = BlockKind(weight_bytes=() if is_tied else (pattern.weight,), traces=tuple(traces))
        number = kinds.setdefault(kind, len(kinds))
        root = 0 if is_tied else None
        blocks.append(ProfileBlock(modules=(f"block.{index}",), kind=number, tied_to=root))
    regimes = tuple(
        Regime(phase=phase, is_batched=pads, query=EVERYWHERE, past=EVERYWHERE, keys=EVERYWHERE)
        for phase in PHASES
        for pads in (False, True)
    )
    return Profile(
        fingerprint="drawn",
        model="Drawn",
        dtype="bfloat16",
        blocks=tuple(blocks),
        kinds=tuple(kinds),
        regimes=regimes,
        tensor_names=((),) * num,
    )


def draw_question(rng: random.Random, profile: Profile) -> PlanProblem:
    """One to three GPUs that are about as large as they have to be."""
    workload = Workload(
        batch=rng.choice((1, 1, 3)),
        prompt_tokens=rng.choice((100, 700, 1500)),
        new_tokens=rng.choice((1, 3)),
        dtype="bfloat16",
        prefill_chunk_tokens=rng.choice(("auto", "auto", "auto", None, 300)),
    )
    whole = replace(workload, prefill_chunk_tokens=None)
    peaks = Replay(profile, whole).run(range(len(profile.blocks)))
    assert peaks is not None, "nothing limits this run"
    share = [rng.uniform(0.3, 1.1) for _ in range(rng.randint(1, 3))]
    speeds = rng.choice(((None,), (1e9,), (1e9, 3e9)))
    devices = tuple(
        Device(
            name=f"vgpu:{index}",
            budget_bytes=int(peaks.reserved_bytes * rng.choice(share)),
            memory_bytes_per_second=speed,
            flops_per_second=speed and 1e3 * speed,
        )
        for index, speed in enumerate(rng.choices(speeds, k=rng.randint(1, 3)))
    )
    known = ("headroom", "latency", "throughput") if speeds[0] else ("headroom",)
    num_free = sum(block.tied_to is None for block in profile.blocks)
    return PlanProblem(
        fleet=Fleet(devices=devices),
        workload=workload,
        objective=rng.choice(known),
        use_all=rng.random() < 0.2 and len(devices) <= num_free,
    )


class Brute:
    """All placements at one chunk, with what a fresh replay says of each stage."""

    def __init__(
        self, profile: Profile, workload: Workload, problem: PlanProblem, *, leave_room: bool
    ) -> None:
        self.profile, self.problem, self.leave_room = profile, problem, leave_room
        self.chain = [index for index, block in enumerate(profile.blocks) if block.tied_to is None]
        self.costs = Costs(profile, workload)
        self.full = Replay(profile, workload)

    def needed(self, start: int, stop: int, budget: int) -> int | None:
        blocks = self.chain[start:stop]
        roots = [block.tied_to for block in self.profile.blocks]
        blocks += [index for index, root in enumerate(roots) if root is not None and start == 0]
        peaks = self.full.run(blocks, budget)
        room = max(budget * 3 // 100, min(512 * MIB, budget // 8)) if self.leave_room else 0
        if peaks is None or peaks.reserved_bytes + room > budget:
            return None
        return peaks.requested_bytes

    def placements(self) -> Iterator[tuple[int, float]]:
        """How many GPUs each placement uses, and its value: the larger the better."""
        devices, num = self.problem.fleet.devices, len(self.chain)
        fewest = len(devices) if self.problem.use_all else 1
        for count in range(fewest, len(devices) + 1):
            for cuts in itertools.combinations(range(1, num), count - 1):
                edges = (0, *cuts, num)
                for order in itertools.permutations(devices, count):
                    stages = list(zip(edges, edges[1:], order, strict=False))
                    needs = [self.needed(a, b, device.budget_bytes) for a, b, device in stages]
                    if None not in needs:
                        yield count, self._value(stages, [need or 0 for need in needs])

    def _value(self, stages: Sequence[tuple[int, int, Device]], needs: Sequence[int]) -> float:
        if self.problem.objective == "headroom":
            pairs = zip(stages, needs, strict=True)
            return float(min(device.budget_bytes - need for (_, _, device), need in pairs))
        times = []
        for start, stop, device in stages:
            table = self.costs.seconds(device)
            assert table is not None, "the speeds are known"
            times.append(float(table[start, stop]))
        return -sum(times) if self.problem.objective == "latency" else -max(times)

    def best(self) -> tuple[int, float] | None:
        found = list(self.placements())
        if not found:
            return None
        count = min(number for number, _ in found)
        return count, max(value for number, value in found if number == count)


def chunks_of(workload: Workload) -> list[Workload]:
    if workload.prefill_chunk_tokens != "auto":
        return [workload]
    return [
        replace(workload, prefill_chunk_tokens=chunk)
        for chunk in CHUNKS
        if chunk is None or chunk < workload.prompt_tokens
    ]


def expected_of(profile: Profile, problem: PlanProblem) -> tuple[int, float] | None:
    """The fewest GPUs over all chunks, in the largest chunk that does with them.

    With room and large chunks if there is such a placement, else with room, else without.
    """
    every = chunks_of(problem.workload)
    chunks = [workload.prefill_chunk_tokens for workload in every]
    large = [
        workload
        for workload, chunk in zip(every, chunks, strict=True)
        if not isinstance(chunk, int) or chunk >= 2048
    ]
    for workloads, leave_room in ((large, True), (every, True), (every, False)):
        expected: tuple[int, float] | None = None
        for workload in workloads:
            best = Brute(profile, workload, problem, leave_room=leave_room).best()
            if best is not None and (expected is None or best[0] < expected[0]):
                expected = best
        if expected is not None:
            return expected
    return None


def planned_case(rng: random.Random) -> Planned:
    """One case, planned and by brute force."""
    profile = draw_profile(rng)
    problem = draw_question(rng, profile)
    expected = expected_of(profile, problem)
    plan = solve(profile, problem) or None
    got = None
    if plan is not None:
        told = plan.value if problem.objective == "headroom" else -plan.value
        got = (len(plan.devices), told)
    same = (
        got == expected
        if got is None or expected is None
        else got[0] == expected[0] and abs(got[1] - expected[1]) <= 1e-9 * abs(expected[1])
    )
    return Planned(
        fits=expected is not None,
        num_gpus=0 if expected is None else expected[0],
        in_chunks=plan is not None and plan.workload.prefill_chunk_tokens is not None,
        difference="" if same else f"{problem.objective}: {got} instead of {expected}",
    )
