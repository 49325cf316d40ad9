"""Allocation programs: a pass over a stage, compiled to byte code of allocations and frees.

A prompt in chunks and an answer are thousands of steps, but of few kinds: which tensor is freed
when is the same in all steps of a regime with as many caches; only sizes differ. So a pass is
compiled once for each such kind, to instructions over virtual registers, and a step runs that code
on a device's memory, in compiled C, with the sizes of that step.

A register holds one block of memory, and is written once. An instruction is a register, the index
of a size (or FREE), and whether the block counts as cache. A layer whose KV cache is in register
0 becomes::

    event of its trace            instruction           registers in use
    (a pass begins)                                      0
    alloc   the longer cache      1 <- sizes[0] cache    0 1
    alloc   the scores            2 <- sizes[1]          0 1 2
    free    the old cache         free 0 cache           1 2
    free    the scores            free 2                 1

What is in use at the end is the live-out set: caches or gradients, which are the first registers of
the next pass, and what a forward pass has saved for its backward pass.

It knows nothing of the allocator, and of time.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .alloc_events import AllocEvents
from .device_memory import FREE, sizes_of
from .profile import Key, Rule, evaluate


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProgram:
    """The byte code of a pass over a stage, without its sizes.

    Its sizes are those of `examples`, a block of each kind, one after the other, then those of
    `copied`, tensors from other devices. Afterwards each block has `num_kept` caches or gradients,
    and `saved` is there besides; `live_out` are the registers of both. `takes_workspace` if the
    first matrix product took cuBLAS's workspace.
    """

    code: bytes
    examples: tuple[int, ...]
    copied: tuple[Rule, ...]
    num_kept: tuple[int, ...]
    saved: tuple[Key, ...]
    live_out: tuple[int, ...]
    takes_workspace: bool

    def sizes(self, events: AllocEvents, step: int) -> bytes:
        """Return the sizes of the program in a step."""
        values = events.steps[step].values
        copied = sizes_of([evaluate(rule, values) for rule in self.copied])
        return b"".join([*(events.packed_sizes(block, step) for block in self.examples), copied])


class StageCompiler:
    """Compiles a pass over a stage.

    It is given how many caches or gradients each of the stage's blocks has, in order, and the keys
    of what else is `alive`. With `device_of`, the device of each of the model's blocks, copies that
    come by way of a third device count. With `workspace_bytes` the first matrix product takes so
    much for good. `alive` maps what there is besides caches to registers.
    """

    def __init__(
        self,
        events: AllocEvents,
        step: int,
        num_kept: Mapping[int, int],
        *,
        alive: Sequence[Key] = (),
        device_of: Sequence[str] | None = None,
        workspace_bytes: int = 0,
    ) -> None:
        self.events, self.step, self.device_of = events, step, device_of
        self._workspace_bytes, self._takes_workspace = workspace_bytes, False
        self.blocks, self._num_kept = num_kept.keys(), num_kept
        self._num_inputs = sum(num_kept.values())
        # The first registers are the pass's inputs, in the order in which `StageRun.run_pass` hands
        # them over. Blocks 4 and 5 with two caches each, and (before a backward pass) allocation 7
        # of block 4, saved by the forward pass:
        #
        #   register      0  1       2  3       4               5 ...
        #   holds         block 4    block 5    alive[4, 7]     written by this pass
        registers = itertools.count()
        self._caches = {
            block: list(itertools.islice(registers, number)) for block, number in num_kept.items()
        }
        self.alive = {key: next(registers) for key in alive}
        self._num_registers = next(registers)
        self._code = array("q")
        # Copies by way of third devices: they live as long as their source.
        self._detour_copies: dict[Key, dict[tuple[str, ...], int]] = {}
        self._copied: list[Rule] = []
        # Sizes are those of one example block for each kind, and then those of copies. With a kind
        # of 3 allocations and one of 2: sizes[0:3], sizes[3:5], and copies from sizes[5] on.
        kinds = events.profile.blocks
        self._examples = {kinds[block].kind: block for block in self.blocks}
        numbers = (len(events.trace(block, step).sizes) for block in self._examples.values())
        *firsts, self._num_sizes = itertools.accumulate(numbers, initial=0)
        self._first_sizes = dict(zip(self._examples, firsts, strict=True))

    def run(self, order: range) -> None:
        """Compile blocks in this order; blocks of other stages contribute their frees."""
        alive: dict[Key, int] | None = None
        while order:
            block, order = order[0], order[1:]
            # A block of another stage allocates nothing here. But tensors die in its turn, and with
            # each of them the copy on this stage: movers keep a copy as long as its source.
            if block not in self.blocks:
                alive = None
                for ref in self.events.foreign_frees(block, self.step):
                    self.release(self.events.key_of(block, ref, self.step))
                continue
            alive_before = len(self._code), self._num_registers, len(self._copied), len(self.alive)
            self._copy_inputs(block)
            self._run_block(block)
            # With as many live tensors as before, and no copies, the block may be one of a period.
            is_steady = (
                alive_before[2:] == (len(self._copied), len(self.alive)) and not self._detour_copies
            )
            if is_steady and alive is not None:
                order = order[self._repeat(block, order, alive, *alive_before[:2]) :]
            alive = dict(self.alive) if is_steady else None

    def _repeat(
        self, block: int, order: range, alive_before: dict[Key, int], start: int, register: int
    ) -> int:
        """Repeat the code of a block for the equal blocks behind it, and return their number.

        The code of `block` begins at `start`, and writes registers from `register` on. If the set
        of live tensors repeats with a period of one block, the next block of this kind finds what
        this one found: by induction its code is the same, with registers further on. Of 40 layers::

            before layer 2     alive {(1, 5): r9}     code  r10 r11 r12, free r9
            before layer 3     alive {(2, 5): r12}          r13 r14 r15, free r12
            layers 3 ... 38    by 3 registers more each, and caches by as many as a layer has

        A tensor may also stay alive as it is (a mask), if it is from further back than blocks of
        this kind refer to by distance.
        """
        profile, trace = self.events.profile, self.events.trace(block, self.step)
        num_kept, written = self._num_kept[block], self._num_registers - register
        refs = [*filter(None, trace.events), *(read.ref for read in trace.reads)]
        reach = block - max((ref.back for ref in refs), default=0)
        if not (order and order[0] == block + 1 and self.blocks >= {*range(reach, block)}):
            return 0
        carried = dict(profile.regimes[self.events.steps[self.step].regime].carried)
        own_kind = (profile.blocks[block].kind, num_kept, False)
        kinds = ((profile.blocks[at].kind, self._num_kept.get(at), at in carried) for at in order)
        number = next((count for count, kind in enumerate(kinds) if kind != own_kind), len(order))
        alive: dict[Key, int] = {}
        for (key, old), (later, new) in zip(alive_before.items(), self.alive.items(), strict=True):
            if (later, new) == ((key[0] + 1, key[1]), old + written):
                alive[later[0] + number, later[1]] = new + number * written
            elif (later, new) == (key, old) and key[0] <= reach:
                alive[key] = old
            else:
                return 0
        self.alive, self._num_registers = alive, self._num_registers + number * written
        # The code of all repeated blocks at once: [blocks, instructions, 3]. Registers of inputs,
        # which are caches, move by as many as a block has, all others by as many as it writes. With
        # two caches and three written registers, from one layer to the next:
        #
        #   (12, size 4, no cache)   becomes   (15, size 4, no cache)
        #   ( 5, FREE, cache)        becomes   ( 7, FREE, cache)
        #
        code = np.array(self._code[start:]).reshape(-1, 3)
        further = np.where(code[:, :1] < self._num_inputs, num_kept, written) * [1, 0, 0]
        times = np.arange(1, number + 1)[:, None, None]
        self._code.frombytes((times * further + code).view(np.uint8).data)
        caches = np.array(self._caches[block], np.int64)
        shift = np.where(caches < self._num_inputs, num_kept, written)
        for count, index in enumerate(order[:number], 1):
            self._caches[index] = (caches + count * shift).tolist()
        return number

    def release(self, key: Key) -> None:
        """Free an allocation and its copies, if present."""
        slot = self.alive.pop(key, None)
        if slot is not None:
            self._code.extend((slot, FREE, False))
        if self._detour_copies:
            for copy in self._detour_copies.pop(key, {}).values():
                self._code.extend((copy, FREE, False))

    def release_all(self) -> None:
        """Free everything but caches."""
        for key in [*self.alive, *self._detour_copies]:
            self.release(key)

    def program(self) -> StageProgram:
        """Return the compiled program."""
        # The live-out set in the order of the next pass's inputs: caches by block, then what a
        # forward pass has saved. Any other pass has freed the rest (`release_all`).
        caches = self._caches.values()
        return StageProgram(
            code=self._code.tobytes(),
            examples=tuple(self._examples.values()),
            copied=tuple(self._copied),
            num_kept=tuple(map(len, caches)),
            saved=tuple(self.alive),
            takes_workspace=self._takes_workspace,
            live_out=(*itertools.chain(*caches), *self.alive.values()),
        )

    def _run_block(self, block: int) -> None:
        events, trace = self.events, self.events.trace(block, self.step)
        # `number` counts the block's allocations through both passes of a micro-batch, as keys do;
        # `size` is the index of the next size of this pass.
        number = events.first_number(block, self.step)
        size = self._first_sizes[events.profile.blocks[block].kind]
        retained = frozenset(trace.retained)
        caches: list[int | None] = [*self._caches[block]]
        new_caches: list[int] = []
        for position, ref in enumerate(trace.events):
            if position == trace.matmul_at:
                self._take_workspace()
            if ref is None:
                register = self._allocate(size, is_cached=number in retained)
                if number in retained:
                    new_caches.append(register)
                else:
                    self.alive[block, number] = register
                number, size = number + 1, size + 1
            elif ref.origin == "kept":
                slot = caches[ref.index]
                assert slot is not None, "a cache entry is dropped twice"
                caches[ref.index] = None
                self._code.extend((slot, FREE, True))
            else:
                self.release(events.key_of(block, ref, self.step))
        if trace.matmul_at == len(trace.events):
            self._take_workspace()
        self._caches[block] = [slot for slot in caches if slot is not None] + new_caches

    def _take_workspace(self) -> None:
        if self._workspace_bytes and not self._takes_workspace:
            self._allocate_copy((float(self._workspace_bytes),))
            self._takes_workspace = True

    def _allocate(self, size: int, *, is_cached: bool = False) -> int:
        """Allocate by the index of a size, and return the register."""
        register = self._num_registers
        self._num_registers += 1
        self._code.extend((register, size, is_cached))
        return register

    def _copy_inputs(self, block: int) -> None:
        for key, size, detour in self._read_from_elsewhere(block):
            # Movers find a copy again by the tensor object that it was made of. A mask that comes
            # straight from cuda:2, and by way of cuda:0, is two objects: there are two copies.
            if detour:
                copies = self._detour_copies.setdefault(key, {})
                if detour not in copies:
                    copies[detour] = self._allocate_copy(size)
            elif key not in self.alive:
                self.alive[key] = self._allocate_copy(size)

    def _allocate_copy(self, size: Rule) -> int:
        self._copied.append(size)
        return self._allocate(self._num_sizes + len(self._copied) - 1)

    def _read_from_elsewhere(self, block: int) -> list[tuple[Key, Rule, tuple[str, ...]]]:
        """Return the reads of a block from other devices: key, size, and devices on the way."""
        reads = self.events.trace(block, self.step).reads
        keys = [self.events.key_of(block, read.ref, self.step) for read in reads]
        return [
            (key, read.size, detour)
            for read, key in zip(reads, keys, strict=True)
            if (detour := self._detour(block, key[0])) or max(key[0], 0) not in self.blocks
        ]

    # Example: block 0 on cuda:2 makes a mask; a decoder module begins with block 2 on cuda:0, and
    # contains block 5 on cuda:1. The mask is an argument of the decoder, so dispatch brings it to
    # the decoder's first block, and from there to block 5:
    #
    #   path      cuda:2 (maker)   cuda:0 (block 2)      then cuda:1 (block 5)
    #   detour                     cuda:0                the copy on cuda:1 comes by way of cuda:0
    def _detour(self, block: int, maker: int) -> tuple[str, ...]:
        """Return the devices on the way of a tensor from its maker to a block."""
        starts = self.events.profile.blocks[block].inside
        if not starts or self.device_of is None:
            return ()
        at = self.device_of
        # A tensor from before a container was given to it, and has gone to where it begins.
        path = [
            at[max(maker, 0)],
            *(at[start] for start in starts if start > maker),
        ]
        # Devices in a row count once, and the last ones are where the block is.
        hops = [device for device, _ in itertools.groupby(path)]
        while hops and hops[-1] == at[block]:
            hops.pop()
        return tuple(hops[1:])
