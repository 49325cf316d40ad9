"""Profile: the blocks of a model in execution order, with their costs.

A profile holds rules, not one measurement. For every kind of block it keeps an *allocation trace*:
the allocations and frees of a step, in order, each size a polynomial in the batch, the query tokens
and the key tokens of the step. Replaying the traces through the allocator's model answers any
batch, prompt, chunk and number of new tokens without running the model again.

Traces hold for a *regime*: a phase of generation and a range of sizes in which the model's code
does the same things. It knows nothing of devices or of torch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from duoka.errors import ModelError, UsageError

from .allocator import END_OF_ADDRESSES, rounded_bytes
from .flash_splits import FlashShape
from .optimizer_memory import TrainedTensor
from .tensor_names import NamedTensor, Outline, OutlineBlock
from .workload import Conditions, loss_chunk_tokens

Phase = Literal[
    "encode", "prefill", "extend", "decode", "release", "forward", "backward", "accumulate",
    "start", "serve",
]  # fmt: skip
"""Of generation: images are encoded before the prompt, and their features end after it. And of a
training step: the forward pass of a micro-batch, the backward pass of the first one, and that of
later ones, whose gradients are added to what is there. And over a paged cache: the first step,
which makes it, and any other."""
IMAGE_PHASES: tuple[Phase, ...] = ("encode", "release")
TRAINING_PHASES: tuple[Phase, ...] = ("forward", "backward", "accumulate")

# Fused attention copies a mask whose rows don't begin on a multiple of so many elements.
ALIGNED_TOKENS = 8
# Weights that stream have so many places on their device: one that is used, one that is filled.
NUM_BUFFERS = 2

# What a size may depend on: batch b, query tokens q, key tokens k (past and query together), and p,
# which is k rounded up to a multiple of `ALIGNED_TOKENS`.
MONOMIALS = ("1", "q", "k", "qk", "qq", "b", "bq", "bk", "bqk", "bqq", "p", "qp", "bp", "bqp")
# The same in training: sequence length q, p as above, and q rounded up to the rows that fused
# attention keeps (r), to the blocks (s) and to the tiles (t) that it adds gradients up in; and of
# all sequences together the tokens of which the loss is computed at once (c), and how often (n).
_OF_SEQUENCE = ("1", "q", "qq", "p", "qp", "r", "s", "t")
TRAINING_MONOMIALS = (*_OF_SEQUENCE, *("b" + name.replace("1", "") for name in _OF_SEQUENCE))
TRAINING_MONOMIALS += ("c", "n")
_ATTENTION_ROWS = (32, 64, 128)
Rule = tuple[float, ...]
"""Coefficients of `MONOMIALS` (in training of `TRAINING_MONOMIALS`, over a paged cache of
`serving.SERVING_MONOMIALS`), in bytes or FLOPs; trailing zeros may be left out."""
Rules: TypeAlias = npt.NDArray[np.float64]
"""[rules, monomials]: several of them."""


def monomials(batch: int, query: int, keys: int) -> tuple[int, ...]:
    """Return the values of `MONOMIALS` at a step's sizes."""
    plain = (1, query, keys, query * keys, query * query)
    padded = (_aligned(keys), query * _aligned(keys))
    return tuple(
        value
        for group in (plain, padded)
        for value in (*group, *(batch * value for value in group))
    )


def training_monomials(batch: int, tokens: int) -> tuple[int, ...]:
    """Return the values of `TRAINING_MONOMIALS` at a micro-batch's sizes."""
    padded = _aligned(tokens)
    rows = tuple(_aligned(tokens, multiple) for multiple in _ATTENTION_ROWS)
    plain = (1, tokens, tokens * tokens, padded, tokens * padded, *rows)
    chunk = loss_chunk_tokens(batch * tokens)
    return (
        *plain,
        *(batch * value for value in plain),
        chunk,
        -(-batch * tokens // chunk),
    )


def _aligned(tokens: int, multiple: int = ALIGNED_TOKENS) -> int:
    return -(-tokens // multiple) * multiple


def buffer_bytes(streamed_bytes: Sequence[int]) -> tuple[int, ...]:
    """Return the buffers for streamed weights: one computes while the next is filled."""
    return tuple(
        max(streamed_bytes[number::NUM_BUFFERS])
        for number in range(min(NUM_BUFFERS, len(streamed_bytes)))
    )


def evaluate(rule: Rule, values: Sequence[int]) -> int:
    """Return a rule's value at `monomials(…)`, rounded to the nearest integer."""
    return round(sum(c * v for c, v in zip(rule, values, strict=False) if c))


def rules_of(rules: Sequence[Rule]) -> Rules:
    """Return rules as a matrix, for `evaluate_all`."""
    longest = max(map(len, rules), default=0)
    padded = [[*rule, *[0.0] * (longest - len(rule))] for rule in rules]
    return np.array(padded, np.float64).reshape(len(rules), longest)


def evaluate_all(rules: Rules, values: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Evaluate all rules at once, each clipped to `END_OF_ADDRESSES`.

    The values are those of one step, or of several steps: [monomials, steps].
    """
    present = np.asarray(values)[: rules.shape[1]]
    exact = np.rint(rules[:, : len(present)] @ present)
    return np.asarray(np.minimum(exact, END_OF_ADDRESSES), np.int64)


ENDLESS = 2**40
"""More tokens than any step has."""
Key = tuple[int, int]
"""A block and the number of an allocation in its trace, or -1 - that in an earlier step's; block -1
stands for the model's inputs."""


# The trace of block 5, a decoder layer behind another one, in a decode step:
#
#   alloc 0                        queries
#   alloc 1, retained              the longer KV cache
#   free  kept 0                   the cache of the step before
#   alloc 2                        the layer's output
#   free  own 0                    queries
#   free  earlier 2, back 1        allocation 2 of block 4: the hidden states
#   read  earlier 2, back 1        the same, copied where block 4 is on another device
#   read  carried 0                a mask that block 0 has made
#
# References are relative to the block, so equal layers have equal traces: one `BlockKind`.
@dataclass(frozen=True, slots=True, kw_only=True)
class Ref:
    """An allocation, seen from a block.

    The origin is "own", made by this block in this step; "earlier", by the one `back` blocks
    before; "kept", by this block in an earlier step (a KV cache); "carried", by any block in this
    step and used far from it (masks, position embeddings; `index` is into `Regime.carried`); or
    "input", given by the caller or, with `back`, kept by an earlier step of another block (features
    of images). `index` is the number of the allocation in the trace of the block that made it, of
    the slot of a cache, or of the model's input.
    """

    origin: Literal["own", "earlier", "kept", "carried", "input"]
    index: int
    back: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """A tensor argument of a block, copied from another device if necessary."""

    ref: Ref
    size: Rule


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationTrace:
    """The events of a step in a kind of block.

    `sizes` are the bytes of each allocation, in order, before rounding. Of the `events`, None is
    the next allocation and a Ref is a free. `retained` allocations outlive the step (the KV cache).
    `reads` come in as arguments; those of them that are `live_through` are not given to the block
    itself but to a module that begins with it, for a later block: no backward pass of this block
    needs them. After `matmul_at` of the events comes the first matrix product of cuBLAS's,
    which takes the workspace. `moved_bytes` are those that operations read and write, and
    `launches` counts operations that start a kernel.
    """

    sizes: tuple[Rule, ...]
    events: tuple[Ref | None, ...]
    retained: tuple[int, ...] = ()
    reads: tuple[Read, ...] = ()
    live_through: tuple[int, ...] = ()
    matmul_at: int | None = None
    flops: Rule = ()
    moved_bytes: Rule = ()
    launches: Rule = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """The phase and the ranges of a set of traces; all ranges are half-open.

    `is_batched` is several sequences, with padding. The ranges are those of the tokens that come
    in, that came before, and of both. `aligned` says whether the keys that are attended to are a
    multiple of `ALIGNED_TOKENS`, where that makes a difference. `carried` are the allocations that
    are used far from where they are made: block, number in its trace.
    """

    phase: Phase
    is_batched: bool = False
    query: tuple[int, int] = (0, ENDLESS)
    past: tuple[int, int] = (0, ENDLESS)
    keys: tuple[int, int] = (0, ENDLESS)
    aligned: bool | None = None
    carried: tuple[tuple[int, int], ...] = ()

    def holds(self, phase: Phase, *, batch: int, query: int, keys: int) -> bool:
        """Return True if the traces of this regime describe such a step."""
        return (
            self.phase == phase
            and self.is_batched == (batch > 1)
            and self.query[0] <= query < self.query[1]
            and self.past[0] <= keys - query < self.past[1]
            and self.keys[0] <= keys < self.keys[1]
            and self.aligned in (None, keys % ALIGNED_TOKENS == 0)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockKind:
    """The costs of a kind of block.

    `weight_bytes` has each parameter and buffer, in the model's order; tied ones only where they
    are met first. There is one trace for each of the profile's regimes. `streamed_bytes` is what
    the weights take on a device for the time of a call, where they stay on the host otherwise
    (`Profile.offloading`); `weight_bytes` is empty then. In training, `trained` has each
    parameter that gets a gradient.
    """

    weight_bytes: tuple[int, ...]
    traces: tuple[AllocationTrace, ...]
    streamed_bytes: int = 0
    trained: tuple[TrainedTensor, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileBlock:
    """Modules to keep whole on a device.

    The names of its `modules` are disjoint, and hold all its parameters and buffers; without any,
    the block is what the caller does with a step's outputs. `kind` is an index into
    `Profile.kinds`. It must have the device of the earlier block that it is `tied_to`: they share a
    parameter. `inside` are the first blocks of modules that contain this block and others, the
    outermost first: what is given to such a module goes to the device of its first block. A block
    `streams` if its tensors are used within calls of its modules only, so that they may come for a
    call and go after it.
    """

    modules: tuple[str, ...]
    kind: int
    tied_to: int | None = None
    inside: tuple[int, ...] = ()
    streams: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Everything about a model for planning.

    Blocks are in execution order. The fingerprint is the checkpoint's or model's, `model` the
    class's name, for people, and `dtype` the type of the weights. `max_context_tokens` is what the
    model was made for, `conditions` what it was run under: other workloads are refused
    (`refuse_other`), and so are prompts shorter than `least_prompt_tokens`, which hold no images.
    `notes` are sentences that a person should know who plans with it; plans repeat them. Rules may
    have a coefficient for each of the `flash_shapes` as well, behind those of all monomials.
    `needs_movers` says that model code gives blocks what it made on the host, and
    `reads_images_in_chunks` that it can read some of a prompt with images at a time.
    `empty_modules` are the names of modules without tensors.
    """

    fingerprint: str
    model: str
    dtype: str
    blocks: tuple[ProfileBlock, ...]
    kinds: tuple[BlockKind, ...]
    regimes: tuple[Regime, ...]
    max_context_tokens: int | None = None
    tensor_names: tuple[tuple[NamedTensor, ...], ...] | None = None
    conditions: Conditions = field(default_factory=Conditions)
    least_prompt_tokens: int = 0
    notes: tuple[str, ...] = ()
    flash_shapes: tuple[FlashShape, ...] = ()
    needs_movers: bool = False
    reads_images_in_chunks: bool = False
    empty_modules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.blocks:
            raise ModelError("the model has no parameters")
        assert self.tensor_names is None or len(self.tensor_names) == len(self.blocks)
        assert all(len(kind.traces) == len(self.regimes) for kind in self.kinds)

    def root_of(self, block: int) -> int:
        """Return the block at the end of a chain of ties, or the block itself."""
        while (partner := self.blocks[block].tied_to) is not None:
            block = partner
        return block

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters and buffers, ties counted once."""
        return sum(sum(self.kinds[block.kind].weight_bytes) for block in self.blocks)

    def values(
        self, monomials: tuple[int, ...], batch: int, query: int, keys: int
    ) -> tuple[int, ...]:
        """Return the arguments of rules: the monomials of a step, and parts of flash attention."""
        if not self.flash_shapes:
            return monomials
        absent = (0,) * (len(MONOMIALS) - len(monomials))
        parts = (shape.part_rows(batch, query, keys) for shape in self.flash_shapes)
        return (*monomials, *absent, *parts)

    @property
    def outline(self) -> Outline:
        """The names of all tensors, to check device maps; ModelError without any."""
        if self.tensor_names is None:
            raise ModelError(f"the profile of {self.model} holds no names of tensors")
        return Outline(
            blocks=tuple(
                OutlineBlock(modules=block.modules, tensors=tensors, tied_to=block.tied_to)
                for block, tensors in zip(self.blocks, self.tensor_names, strict=True)
            ),
            model=self.model,
            fingerprint=self.fingerprint,
            empty_modules=self.empty_modules,
        )

    @property
    def offloaded(self) -> tuple[str, ...]:
        """The modules whose weights stay on the host."""
        return tuple(
            module
            for block in self.blocks
            if self.kinds[block.kind].streamed_bytes
            for module in block.modules
        )

    def streamed_bytes(self, blocks: Sequence[int]) -> list[int]:
        """Return the bytes of streamed weights of some blocks."""
        kinds = (self.kinds[self.blocks[block].kind] for block in blocks)
        return [kind.streamed_bytes for kind in kinds if kind.streamed_bytes]

    def offloading(self, blocks: Collection[int]) -> Profile:
        """Return the profile with the weights of some blocks on the host.

        They are blocks that stream, of one module each.
        """
        offloaded_blocks = frozenset(blocks)
        kinds = dict.fromkeys(self.kinds)
        number = {kind: index for index, kind in enumerate(kinds)}
        changed = []
        for index, block in enumerate(self.blocks):
            kind = self.kinds[block.kind]
            if index in offloaded_blocks:
                assert block.streams, "its weights are used outside of its forward"
                assert len(block.modules) == 1, "its weights are not adjacent"
                streamed = sum(map(rounded_bytes, kind.weight_bytes))
                kind = replace(kind, weight_bytes=(), streamed_bytes=streamed)
            changed.append(replace(block, kind=number.setdefault(kind, len(number))))
        return replace(self, blocks=tuple(changed), kinds=tuple(number))

    def key_of(self, block: int, ref: Ref, regime: int) -> Key:
        """Return the key of the allocation behind a reference in a block's trace."""
        if ref.origin == "own":
            return block, ref.index
        if ref.origin == "earlier":
            return block - ref.back, ref.index
        if ref.origin == "carried":
            return self.regimes[regime].carried[ref.index]
        if ref.back:
            return block - ref.back, -1 - ref.index  # no allocation of this step
        return -1, ref.index

    @property
    def encodes_images(self) -> bool:
        """True if images are encoded in steps of their own."""
        return any(regime.phase == "encode" for regime in self.regimes)

    @property
    def is_of_steps(self) -> bool:
        """True for a profile of certain steps, without rules for others."""
        return all(regime.query[1] - regime.query[0] == 1 for regime in self.regimes)

    def answers(self, batch: int) -> bool:
        """Return True if there are rules for so many sequences, a single or several."""
        if self.conditions.is_paged:
            return True
        return any(regime.is_batched == (batch > 1) for regime in self.regimes)

    def refuse_other(self, conditions: Conditions) -> None:
        """Raise UsageError for a workload under other conditions than the profile was made for."""
        differ = [
            f"{part.name} {getattr(conditions, part.name)} (not {value})"
            for part in fields(conditions)
            if (value := getattr(self.conditions, part.name)) != getattr(conditions, part.name)
        ]
        if differ:
            raise UsageError(
                f"the profile of {self.model} doesn't cover {', '.join(differ)}",
                hint="trace the model under these conditions",
            )

    def regime_of(self, phase: Phase, *, batch: int, query: int, keys: int) -> int:
        """Return the index of the regime of a step.

        UsageError is raised for a step that is larger than any that the profile knows.
        """
        for index, regime in enumerate(self.regimes):
            if regime.holds(phase, batch=batch, query=query, keys=keys):
                return index
        longest = max(regime.keys[1] for regime in self.regimes) - 1
        raise UsageError(
            f"a {phase} step of {query} tokens over {keys}, batch {batch}, is not in the profile "
            f"of {self.model}, which ends at {longest} tokens",
            hint="ask for a shorter context",
        )
