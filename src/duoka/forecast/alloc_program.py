"""Allocation programs: a pass over a stage, compiled to byte code of allocations and frees.

Chunked prefill and decoding take thousands of steps, but of few kinds: all steps of one regime with
the same number of cache tensors allocate and free in the same order; only sizes differ. So a pass
is compiled once per kind, to instructions over virtual registers, and each step runs this code on a
device's memory (in C where compiled) with its own sizes.

A register holds one block of memory, and is written once. An instruction is a register, the index
of a size (or FREE), and a flag for cache memory. A layer whose KV cache is in register 0 becomes::

    event of its trace            instruction           registers in use
    (a pass begins)                                      0
    alloc   the longer cache      1 <- sizes[0] cache    0 1
    alloc   the scores            2 <- sizes[1]          0 1 2
    free    the old cache         free 0 cache           1 2
    free    the scores            free 2                 1

The registers in use at the end are the live-out set: caches or gradients, which are the first
registers of the next pass, and activations that a forward pass has saved for its backward pass.

This module knows nothing of the allocator or of time.
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

    Its sizes are the allocation sizes of `examples` (one block of each kind, in order), then those
    of `copied`, tensors copied from other devices. After the pass each block has `num_kept` cache
    or gradient tensors, and the allocations `saved` for a backward pass are live too; `live_out`
    are the registers of both. `takes_workspace` is True if the pass allocates cuBLAS's workspace.
    """

    code: bytes
    examples: tuple[int, ...]
    copied: tuple[Rule, ...]
    num_kept: tuple[int, ...]
    saved: tuple[Key, ...]
    live_out: tuple[int, ...]
    takes_workspace: bool

    def sizes(self, events: AllocEvents, step: int) -> bytes:
        """Return the packed sizes of the program's allocations in a step."""
        values = events.steps[step].values
        copied = sizes_of([evaluate(rule, values) for rule in self.copied])
        return b"".join([*(events.packed_sizes(block, step) for block in self.examples), copied])


class StageCompiler:
    """Compiles a pass over a stage.

    `num_kept` has the number of cache or gradient tensors of each of the stage's blocks, in order,
    and the argument `alive` the keys of further live allocations: activations saved for a backward
    pass. With `device_of` (the device of every block of the model), copies that come by way of a
    third device count too. Before the first matrix product, `workspace_bytes` are allocated and
    never freed. The attribute `alive` maps keys of live allocations other than caches to registers.
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
        # The first registers are the inputs of the pass, in the order in which `StageRun.run_pass`
        # passes them. Blocks 4 and 5 with two cache tensors each, and (for a backward pass)
        # allocation 7 of block 4, saved by the forward pass:
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
        # Registers of copies by way of third devices, freed together with their source.
        self._detour_copies: dict[Key, dict[tuple[str, ...], int]] = {}
        self._copied: list[Rule] = []
        # Sizes are those of one example block per kind, then those of copies. If one kind makes 3
        # allocations and another 2, they are sizes[0:3] and sizes[3:5], and copies begin at 5.
        kinds = events.profile.blocks
        self._examples = {kinds[block].kind: block for block in self.blocks}
        numbers = (len(events.trace(block, step).sizes) for block in self._examples.values())
        *firsts, self._num_sizes = itertools.accumulate(numbers, initial=0)
        self._first_sizes = dict(zip(self._examples, firsts, strict=True))

    def run(self, order: range) -> None:
        """Compile blocks in this order; blocks of other stages only contribute frees."""
        alive: dict[Key, int] | None = None
        while order:
            block, order = order[0], order[1:]
            # A block of another stage allocates nothing here. But it may free a tensor copied to
            # this stage: dispatch keeps a copy as long as its source.
            if block not in self.blocks:
                alive = None
                for ref in self.events.foreign_frees(block, self.step):
                    self.release(self.events.key_of(block, ref, self.step))
                continue
            counts = len(self._code), self._num_registers, len(self._copied), len(self.alive)
            self._copy_inputs(block)
            self._compile_block(block)
            # If the numbers of live tensors and copies are unchanged, the code may repeat.
            is_steady = (
                counts[2:] == (len(self._copied), len(self.alive)) and not self._detour_copies
            )
            if is_steady and alive is not None:
                order = order[self._repeat(block, order, alive, *counts[:2]) :]
            alive = dict(self.alive) if is_steady else None

    def _repeat(
        self, block: int, order: range, alive_before: dict[Key, int], start: int, register: int
    ) -> int:
        """Repeat the code of a block for the following blocks of its kind; return their number.

        The code of `block` begins at `start`, and writes registers from `register` on. If the set
        of live tensors repeats with a period of one block, the next block of this kind starts from
        the same set: by induction its code is the same, with higher registers. Of 40 layers::

            before layer 2     alive {(1, 5): r9}     code  r10 r11 r12, free r9
            before layer 3     alive {(2, 5): r12}          r13 r14 r15, free r12
            layers 3 ... 38    each adds 3 to registers, and to cache inputs the caches per layer

        A tensor such as a mask may also stay live unchanged, if its maker is further back than the
        relative references (`back`) of later blocks of this kind reach. Returns 0 if some live
        tensor does neither, or if no block of this kind follows.
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
        # which are caches, increase by the caches per block, all others by the registers written
        # per block. With two caches and three written registers, from one layer to the next:
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
        """Free an allocation of this key and its copies, if live."""
        register = self.alive.pop(key, None)
        if register is not None:
            self._code.extend((register, FREE, False))
        if self._detour_copies:
            for copy in self._detour_copies.pop(key, {}).values():
                self._code.extend((copy, FREE, False))

    def release_all(self) -> None:
        """Free all live allocations and copies except caches."""
        for key in [*self.alive, *self._detour_copies]:
            self.release(key)

    def program(self) -> StageProgram:
        """Return the compiled program."""
        # The live-out set in the order of the next pass's inputs: caches by block, then activations
        # saved by a forward pass. Any other pass has freed all but caches (`release_all`).
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

    def _compile_block(self, block: int) -> None:
        """Compile the events of a block's trace."""
        events, trace = self.events, self.events.trace(block, self.step)
        # `number` is the next allocation's number in its key, which counts through both passes of a
        # micro-batch; `size` is the index of its size in this pass.
        number = events.first_number(block, self.step)
        size = self._first_sizes[events.profile.blocks[block].kind]
        retained = frozenset(trace.retained)
        caches: list[int | None] = [*self._caches[block]]
        new_caches: list[int] = []
        end = trace.sampling_at if events.steps[self.step].is_graph else None
        for position, ref in enumerate(trace.events[:end]):
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
        """Allocate cuBLAS's workspace, unless this pass already has."""
        if self._workspace_bytes and not self._takes_workspace:
            self._allocate_copy((float(self._workspace_bytes),))
            self._takes_workspace = True

    def _allocate(self, size: int, *, is_cached: bool = False) -> int:
        """Emit an allocation of the size at this index, and return its register."""
        register = self._num_registers
        self._num_registers += 1
        self._code.extend((register, size, is_cached))
        return register

    def _copy_inputs(self, block: int) -> None:
        """Allocate copies of the block's inputs from other devices, unless there is a copy."""
        for key, size, detour in self._read_from_elsewhere(block):
            # Dispatch reuses a copy only for the same source object. A mask that comes from cuda:2
            # directly and also by way of cuda:0 is two source objects, so there are two copies.
            if detour:
                copies = self._detour_copies.setdefault(key, {})
                if detour not in copies:
                    copies[detour] = self._allocate_copy(size)
            elif key not in self.alive:
                self.alive[key] = self._allocate_copy(size)

    def _allocate_copy(self, size: Rule) -> int:
        """Emit an allocation with a size of its own rule, and return its register."""
        self._copied.append(size)
        return self._allocate(self._num_sizes + len(self._copied) - 1)

    def _read_from_elsewhere(self, block: int) -> list[tuple[Key, Rule, tuple[str, ...]]]:
        """Return the reads copied from other devices: key, size, and devices on the way."""
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
        """Return the devices between a tensor's maker and a block; empty for a direct copy."""
        starts = self.events.profile.blocks[block].inside
        if not starts or self.device_of is None:
            return ()
        device_of = self.device_of
        # A tensor made before a container is an argument of the container: dispatch first copies
        # the tensor to the container's first block.
        path = [device_of[max(maker, 0)], *(device_of[start] for start in starts if start > maker)]
        # Repeated devices count once; the block's own device at the end is no detour.
        hops = [device for device, _ in itertools.groupby(path)]
        while hops and hops[-1] == device_of[block]:
            hops.pop()
        return tuple(hops[1:])
