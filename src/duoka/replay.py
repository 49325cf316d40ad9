"""Replay: the tapes of a stage, run through the allocator's model at one workload.

This is the one function that the planner optimises, the forecast reports and the virtual run is
held against.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from .allocator import SMALL_REQUEST_BYTES, OutOfCapacity, rounded_bytes, segment_bytes
from .memory import Held, new_memory, sizes_of
from .playing import DROP, KEEP, MALLOC, RELEASE, RELEASE_FAR, Event, Part
from .profile import (
    Key,
    Kind,
    Phase,
    Profile,
    Ref,
    Rule,
    Rules,
    Tape,
    buffer_bytes,
    evaluate,
    evaluate_all,
    monomials,
    rules_of,
)
from .workload import Workload, refuse_short

T = TypeVar("T")

# Decode steps are alike but for their length. Where all of them would be more events than these,
# only the first and last ones and those where a cache outgrows its segment are replayed whole: what
# is allocated is the same but for what a cache's block has left unsplit, up to 1 MiB, and what is
# reserved differs by a segment at most where a token takes up to 4 KiB of a cache's block. Where it
# takes more (large batches), which blocks are free for whom changes with every token: the steps in
# between are replayed as well, without what comes from small segments.
_MOST_EVENTS = 200_000
_SMALL_GROWTH_BYTES = 4096
_MOST_STEPS_BETWEEN = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBytes:
    """Peaks of one stage on one device, in bytes.

    `weights`, `kv_cache`, `activations`, `gradients` and `optimizer` add up to `allocated`, at
    the moment of its peak; `reserved` is the peak of what the allocator takes from the device.
    `requested` is the most that tensors ask for at a time, rounded, which is the same on any
    device; a block that is hardly larger than what was asked for isn't split and counts whole in
    `allocated`. It was `pressed` where cached memory had to be given back; where not, more of it
    makes no difference.
    """

    weights: int
    kv_cache: int
    activations: int
    allocated: int
    reserved: int
    requested: int
    gradients: int = 0
    optimizer: int = 0
    pressed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One call of the model: its phase, sizes and regime.

    With `large_at_tokens`, only what comes from large segments in a context of so many tokens is
    replayed, and caches.
    """

    phase: Phase
    query: int
    keys: int
    regime: int
    values: tuple[int, ...]
    large_at_tokens: int = 0


class Run(Protocol):
    """One replay of a stage."""

    num_begun: int
    """How many steps have been begun."""

    def run(self) -> StageBytes:
        """Replay it; `OutOfCapacity` where it doesn't fit."""


class Replay:
    """A profile at one workload.

    Parameters
    ----------
    profile : Profile
    workload : Workload
        With its prefill chunk resolved.
    brief : bool
        Leave out steps between the first and the last ones of a phase: for bounds and for seconds.
        Otherwise every step counts that changes what PyTorch's allocator holds.

    Raises
    ------
    UsageError
        If the workload is larger than what the profile knows, or under other conditions.
    """

    def __init__(self, profile: Profile, workload: Workload, *, brief: bool = False) -> None:
        profile.refuse_other(workload.conditions)
        refuse_short(workload, profile.least_prompt_tokens)
        self.profile = profile
        self.workload = workload
        self.brief = brief
        self._sizes: dict[tuple[int, int], list[int]] = {}
        self._rules: dict[int, Rules] = {}  # by the tape, which the profile keeps
        self._packed: dict[tuple[int, int], bytes] = {}
        self._events: dict[tuple[int, int, int], list[Event]] = {}
        self._parts: dict[tuple[int, int, int], Part] = {}
        self._foreign_frees: dict[tuple[int, int], tuple[Ref, ...]] = {}
        self._large_ones: dict[tuple[int, int], frozenset[int]] = {}
        self.steps = self._schedule()
        # The steps of the last run that didn't fit, up to the one where it ended.
        self.refusing: tuple[Step, ...] = ()

    def tape(self, block: int, step: int) -> Tape:
        """The tape of a block in one of `steps`."""
        return self._kind(block).tapes[self.steps[step].regime]

    def sizes(self, block: int, step: int) -> list[int]:
        """Bytes of each allocation that a block makes in one of `steps`."""
        key = (self.profile.blocks[block].kind, step)
        if key not in self._sizes:
            tape = self.tape(block, step)
            if id(tape) not in self._rules:
                self._rules[id(tape)] = rules_of(tape.sizes)
            self._sizes[key] = evaluate_all(self._rules[id(tape)], self.steps[step].values)
        return self._sizes[key]

    def events(self, block: int, step: int) -> list[Event]:
        """What a block does in one of `steps`."""
        now = self.steps[step]
        key = (self.profile.blocks[block].kind, now.regime, now.large_at_tokens)
        if key not in self._events:
            compiled = self._compile_large if now.large_at_tokens else self._compile
            self._events[key] = list(compiled(block, step))
        return self._events[key]

    def part(self, block: int, step: int) -> tuple[Part, bytes]:
        """The same, and the sizes that go with it, made ready for being played."""
        kind, now = self.profile.blocks[block].kind, self.steps[step]
        if (kind, step) not in self._packed:
            self._packed[kind, step] = sizes_of(self.sizes(block, step))
        key = (kind, now.regime, now.large_at_tokens)
        if key not in self._parts:
            self._parts[key] = Part(self.events(block, step))
        return self._parts[key], self._packed[kind, step]

    def run(
        self,
        blocks: Sequence[int],
        capacity_bytes: int | None = None,
        *,
        device_of: Sequence[str] | None = None,
    ) -> StageBytes | None:
        """The peaks of a stage; None where it doesn't fit its capacity.

        Parameters
        ----------
        blocks : sequence of int
            The stage's blocks in execution order.
        capacity_bytes : int, optional
            The device's budget. When it is reached, cached segments are given back, as CUDA does.
        device_of : sequence of str, optional
            The device of every block. It matters where the stage isn't contiguous: what a module
            is given may reach a part of it by way of the device of the module's first part. In
            training it makes no difference.
        """
        run = self._stage_run(blocks, capacity_bytes, device_of)
        try:
            return run.run()
        except OutOfCapacity:
            self.refusing = tuple(self.steps[: run.num_begun])
            return None

    def _stage_run(
        self, blocks: Sequence[int], capacity: int | None, device_of: Sequence[str] | None
    ) -> Run:
        return _StageRun(self, blocks, capacity, device_of)

    def foreign_frees(self, block: int, step: int) -> tuple[Ref, ...]:
        """The frees in a block's tape that end what other blocks made."""
        key = (self.profile.blocks[block].kind, self.steps[step].regime)
        if key not in self._foreign_frees:
            self._foreign_frees[key] = tuple(
                ref
                for ref in self.tape(block, step).events
                if ref is not None and ref.origin in ("earlier", "carried", "input")
            )
        return self._foreign_frees[key]

    def key_of(self, block: int, ref: Ref, step: int) -> Key:
        """Whose allocation a reference in a block's tape means."""
        return self.profile.key_of(block, ref, self.steps[step].regime)

    def _compile(self, block: int, step: int) -> Iterator[Event]:
        tape = self.tape(block, step)
        kept = frozenset(tape.kept)
        count = 0
        for ref in tape.events:
            if ref is None:
                yield KEEP if count in kept else MALLOC, count, count
                count += 1
            elif ref.origin == "kept":
                yield DROP, ref.index, 0
            elif ref.origin in ("own", "earlier"):
                yield RELEASE, ref.back, ref.index
            else:
                yield RELEASE_FAR, *self.key_of(block, ref, step)

    def _compile_large(self, block: int, step: int) -> Iterator[Event]:
        tape, now = self.tape(block, step), self.steps[step]
        large = self._large(block, now.regime)
        kept = frozenset(tape.kept)
        count = 0
        for ref in tape.events:
            if ref is None:
                if count in large:
                    yield KEEP if count in kept else MALLOC, count, count
                count += 1
            elif ref.origin == "kept":
                yield DROP, ref.index, 0
            elif ref.origin == "own":
                if ref.index in large:
                    yield RELEASE, 0, ref.index
            elif ref.origin == "earlier":
                if ref.index in self._large(block - ref.back, now.regime):
                    yield RELEASE, ref.back, ref.index
            else:
                yield RELEASE_FAR, *self.key_of(block, ref, step)

    def _large(self, block: int, regime: int) -> frozenset[int]:
        """The allocations that come from large segments at the end of the context, and caches."""
        key = (self.profile.blocks[block].kind, regime)
        if key not in self._large_ones:
            tape = self._kind(block).tapes[regime]
            last = self._values(1, self.workload.context_tokens)
            self._large_ones[key] = frozenset(tape.kept).union(
                index
                for index, rule in enumerate(tape.sizes)
                if evaluate(rule, last) > SMALL_REQUEST_BYTES
            )
        return self._large_ones[key]

    def _kind(self, block: int) -> Kind:
        return self.profile.kinds[self.profile.blocks[block].kind]

    def _step(self, phase: Phase, query: int, keys: int) -> Step:
        batch = self.workload.batch
        return Step(
            phase=phase,
            query=query,
            keys=keys,
            regime=self.profile.regime_of(
                phase, batch=batch, query=query, keys=keys, context=self.workload.static_tokens
            ),
            values=self._values(query, keys),
        )

    def _values(self, query: int, keys: int) -> tuple[int, ...]:
        return monomials(self.workload.batch, query, keys, self.workload.static_tokens)

    def step_over(self, query: int, past: int) -> Step:
        """A step of so many tokens after so many others."""
        # A one-token step after others is what decoding does.
        phase: Phase = "prefill" if not past else "extend" if query > 1 else "decode"
        query = max(query, 2) if phase == "prefill" else query
        return self._step(phase, query, past + query)

    def _schedule(self) -> list[Step]:
        chunks = self.workload.chunks()
        steps = [self.step_over(*chunk) for chunk in (_ends(chunks) if self.brief else chunks)]
        keys = range(self.workload.prompt_tokens + 1, self.workload.context_tokens)
        chosen, between = self._decode_lengths(keys)
        last = self.workload.context_tokens
        return steps + [
            replace(
                self._step("decode", 1, length), large_at_tokens=0 if length in chosen else last
            )
            for length in sorted({*chosen, *between})
        ]

    def _decode_lengths(self, keys: range) -> tuple[Collection[int], Sequence[int]]:
        """The lengths of the decode steps to replay, whole and in part."""
        if self.brief:
            return _ends(keys), ()
        if not keys or len(keys) * self._num_events(keys[-1]) <= _MOST_EVENTS:
            return keys, ()
        chosen = {*_ends(keys)}
        rules = {
            tape.sizes[index]
            for kind in self.profile.kinds
            for regime, tape in zip(self.profile.regimes, kind.tapes, strict=True)
            if regime.phase == "decode" and regime.many == (self.workload.batch > 1)
            for index in tape.kept
        }
        growth = 0
        for rule in rules:
            sizes = [rounded_bytes(evaluate(rule, self._values(1, length))) for length in keys]
            growth = max(growth, (sizes[-1] - sizes[0]) // len(sizes))
            classes = [segment_bytes(size) for size in sizes]
            chosen.update(
                length
                for length, before, after in zip(keys[1:], classes, classes[1:], strict=False)
                if before != after
            )
        between = keys[:: -(-len(keys) // _MOST_STEPS_BETWEEN)]
        return chosen, between if growth > _SMALL_GROWTH_BYTES else ()

    def _num_events(self, keys: int) -> int:
        """How many allocations and frees one decode step has, in all blocks."""
        regime = self._step("decode", 1, keys).regime
        return sum(
            len(self.profile.kinds[block.kind].tapes[regime].events)
            for block in self.profile.blocks
        )


class _StageRun:
    """One replay: the device and what is alive on it."""

    def __init__(
        self,
        replay: Replay,
        blocks: Sequence[int],
        capacity: int | None,
        device_of: Sequence[str] | None = None,
    ) -> None:
        self.replay = replay
        self.device_of = device_of
        self.blocks = frozenset(blocks)
        self.memory = new_memory(capacity)
        self.kept: dict[int, list[Held]] = {block: [] for block in blocks}
        self.num_begun = 0
        self.alive: dict[Key, Held] = {}
        # Copies of copies: they live as long as what they were made from.
        self.detoured: dict[Key, dict[tuple[str, ...], Held]] = {}
        self._comings: dict[tuple[int, int], list[tuple[Key, Rule, tuple[str, ...]]]] = {}

    def run(self) -> StageBytes:
        profile, memory = self.replay.profile, self.memory
        for block in sorted(self.blocks):
            for size in profile.kinds[profile.blocks[block].kind].weight_bytes:
                memory.hold(size)
        for size in buffer_bytes(profile.streamed_bytes(sorted(self.blocks))):
            memory.hold(size)
        weights = memory.allocated
        for step in range(len(self.replay.steps)):
            self.num_begun = step + 1
            self._run_step(step)
        return StageBytes(
            weights=weights,
            kv_cache=memory.cached_at_peak,
            activations=memory.peak - weights - memory.cached_at_peak,
            allocated=memory.peak,
            reserved=memory.max_reserved,
            requested=memory.requested_peak,
            pressed=memory.is_pressed,
        )

    def _run_step(self, step: int) -> None:
        replay = self.replay
        for block in range(min(self.blocks), max(self.blocks) + 1):
            if block in self.blocks:
                self._move_in(block, step)
                self._run_block(block, step)
            elif self.alive or self.detoured:
                for ref in replay.foreign_frees(block, step):
                    self._release(replay.key_of(block, ref, step))
        # Blocks behind the last one free what is theirs; nothing is allocated in between.
        for key in [*self.alive, *self.detoured]:
            self._release(key)

    def _run_block(self, block: int, step: int) -> None:
        if self.detoured:
            self._run_events(block, step)
            return
        part, sizes = self.replay.part(block, step)
        kept = self.kept[block]
        self.kept[block] = part.play(self.memory, sizes, block, self.alive, kept)

    def _run_events(self, block: int, step: int) -> None:
        """The same one by one, where what is freed may have been copied further."""
        memory, sizes = self.memory, self.replay.sizes(block, step)
        slots: list[Held | None] = list(self.kept[block])
        born: list[Held] = []
        for code, number, other in self.replay.events(block, step):
            if code == MALLOC:
                self.alive[block, number] = memory.hold(sizes[other])
            elif code == RELEASE:
                self._release((block - number, other))
            elif code == KEEP:
                born.append(memory.hold(sizes[other], cached=True))
            elif code == DROP:
                dropped = slots[number]
                assert dropped is not None, "a cache entry is dropped twice"
                slots[number] = None
                memory.release(dropped, cached=True)
            else:
                self._release((number, other))
        self.kept[block] = [slot for slot in slots if slot is not None] + born

    def _move_in(self, block: int, step: int) -> None:
        now = self.replay.steps[step]
        if now.large_at_tokens:
            return  # one token of each sequence
        for key, size, detour in self._coming(block, step):
            if detour:
                copies = self.detoured.setdefault(key, {})
                if detour not in copies:
                    copies[detour] = self.memory.hold(evaluate(size, now.values))
            elif key not in self.alive:
                self.alive[key] = self.memory.hold(evaluate(size, now.values))

    def _coming(self, block: int, step: int) -> list[tuple[Key, Rule, tuple[str, ...]]]:
        """What a block reads that isn't made on its device, and the devices that it comes over."""
        regime = self.replay.steps[step].regime
        if (block, regime) not in self._comings:
            reads = self.replay.tape(block, step).reads
            keys = [self.replay.key_of(block, read.ref, step) for read in reads]
            self._comings[block, regime] = [
                (key, read.size, detour)
                for read, key in zip(reads, keys, strict=True)
                if (detour := self._detour(block, key[0])) or not self._is_here(key[0])
            ]
        return self._comings[block, regime]

    def _is_here(self, maker: int) -> bool:
        return maker in self.blocks or (maker == -1 and 0 in self.blocks)

    def _detour(self, block: int, maker: int) -> tuple[str, ...]:
        """The devices over which something comes to a block from its maker."""
        inside = self.replay.profile.blocks[block].inside
        if not inside or self.device_of is None:
            return ()
        at = self.device_of
        # What was made before a module began was given to it, and has gone to where it begins.
        path = [at[max(maker, 0)], *(at[first] for first in inside if first > maker)]
        hops = [device for device, _ in itertools.groupby(path)]
        while hops and hops[-1] == at[block]:
            hops.pop()
        return tuple(hops[1:])

    def _release(self, key: Key) -> None:
        held = self.alive.pop(key, None)
        if held is not None:
            self.memory.release(held)
        for copy in self.detoured.pop(key, {}).values():
            self.memory.release(copy)


def _ends(items: Sequence[T]) -> Sequence[T]:
    """The first two and the last two."""
    return items if len(items) <= 4 else [*items[:2], *items[-2:]]
