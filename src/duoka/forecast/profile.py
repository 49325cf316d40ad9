"""Profile: the blocks of a model in execution order, with their costs.

A profile holds rules, not one measurement. For every kind of block it keeps an *allocation trace*:
the allocations and frees of a step, in order, with each size a polynomial in the batch, the query
tokens and the key tokens of the step. Replaying the traces through the allocator's model forecasts
any batch, prompt, chunk and number of new tokens without running the model again.

Traces hold for a *regime*: a phase and a range of sizes in which the model's code takes the same
path. This module knows nothing of devices or of torch.
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
from .serving import padded
from .tensor_names import NamedTensor, Outline, OutlineBlock
from .workload import Conditions, loss_chunk_tokens

Phase = Literal[
    "encode", "prefill", "extend", "decode", "release", "forward", "backward", "accumulate",
    "start", "serve",
]  # fmt: skip
"""The phase of a step. In generation: encode images, prefill, a later prompt chunk ("extend"),
decode, and release image features after the prompt. In training: the forward pass of a micro-batch,
the backward pass of the first micro-batch, and that of later ones, which accumulate gradients. Over
a paged cache: the first step, which allocates the cache, and any other step ("serve")."""
IMAGE_PHASES: tuple[Phase, ...] = ("encode", "release")
TRAINING_PHASES: tuple[Phase, ...] = ("forward", "backward", "accumulate")

# Fused attention copies a mask whose row length isn't a multiple of this number of elements.
ALIGNED_TOKENS = 8
# The number of device buffers for streamed weights: one computes while the next is filled.
NUM_BUFFERS = 2

# Monomials of rules: batch b, query tokens q, key tokens k (past and query together), and p, which
# is k rounded up to a multiple of `ALIGNED_TOKENS`.
MONOMIALS = ("1", "q", "k", "qk", "qq", "b", "bq", "bk", "bqk", "bqq", "p", "qp", "bp", "bqp")
# Monomials in training: sequence length q, p as above, q rounded up to the rows that fused
# attention keeps (r) and to the blocks (s) and tiles (t) in which it accumulates gradients; and for
# all sequences together, the tokens per chunk of the loss (c) and the number of chunks (n).
_OF_SEQUENCE = ("1", "q", "qq", "p", "qp", "r", "s", "t")
TRAINING_MONOMIALS = (*_OF_SEQUENCE, *("b" + name.replace("1", "") for name in _OF_SEQUENCE))
TRAINING_MONOMIALS += ("c", "n")
_ATTENTION_ROWS = (32, 64, 128)
Rule = tuple[float, ...]
"""Coefficients of `MONOMIALS` (in training of `TRAINING_MONOMIALS`, over a paged cache of
`serving.SERVING_MONOMIALS`), in bytes or FLOPs; trailing zeros may be left out."""
Rules: TypeAlias = npt.NDArray[np.float64]
"""[rules, monomials]: several rules as a matrix."""


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
    return (*plain, *(batch * value for value in plain), chunk, -(-batch * tokens // chunk))


def _aligned(tokens: int, multiple: int = ALIGNED_TOKENS) -> int:
    """Round up to a multiple."""
    return -(-tokens // multiple) * multiple


def buffer_bytes(streamed_bytes: Sequence[int]) -> tuple[int, ...]:
    """Return the size of each device buffer for streamed weights, given each block's bytes.

    Blocks use the buffers in turn: one computes while the next is filled.
    """
    return tuple(
        max(streamed_bytes[number::NUM_BUFFERS])
        for number in range(min(NUM_BUFFERS, len(streamed_bytes)))
    )


def evaluate(rule: Rule, values: Sequence[int]) -> int:
    """Return a rule's value for these values of its monomials, rounded to the nearest integer."""
    return round(sum(c * v for c, v in zip(rule, values, strict=False) if c))


def rules_of(rules: Sequence[Rule]) -> Rules:
    """Return rules as a matrix for `evaluate_all`, padded with zeros."""
    longest = max(map(len, rules), default=0)
    padded = [[*rule, *[0.0] * (longest - len(rule))] for rule in rules]
    return np.array(padded, np.float64).reshape(len(rules), longest)


def evaluate_all(rules: Rules, values: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Evaluate all rules at once, each value at most `END_OF_ADDRESSES`.

    `values` are the monomials of one step, [monomials], or of several steps, [monomials, steps].
    """
    present = np.asarray(values)[: rules.shape[1]]
    exact = np.rint(rules[:, : len(present)] @ present)
    return np.asarray(np.minimum(exact, END_OF_ADDRESSES), np.int64)


ENDLESS = 2**40
"""A number of tokens larger than in any step, for open ranges."""
Key = tuple[int, int]
"""An allocation: its block, and its number in the block's trace. A number n below 0 means
allocation -1 - n of an earlier step. Block -1 stands for the model's inputs."""


# The trace of block 5, a decoder layer behind another one, in a decode step:
#
#   alloc 0                        queries
#   alloc 1, retained              the longer KV cache
#   free  kept 0                   the cache of the step before
#   alloc 2                        the layer's output
#   free  own 0                    queries
#   free  earlier 2, back 1        allocation 2 of block 4: the hidden states
#   read  earlier 2, back 1        the hidden states, copied if block 4 is on another device
#   read  carried 0                a mask made by block 0
#
# References are relative to the block, so equal layers have equal traces: one `BlockKind`.
@dataclass(frozen=True, slots=True, kw_only=True)
class Ref:
    """A reference from a block's trace to an allocation.

    `origin` is "own": made by this block in this step; "earlier": made in this step by the block
    `back` blocks before (after, if negative: a gradient); "kept": made by this block in an earlier
    step (KV cache); "carried": made in this step by a distant block (masks, position embeddings);
    or "input": an input of the model or, with `back`, made in an earlier step by another block
    (image features). `index` is the number of the allocation in its maker's trace, the slot of a
    "kept" cache, or the index into `Regime.carried`.
    """

    origin: Literal["own", "earlier", "kept", "carried", "input"]
    index: int
    back: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """A tensor argument of a block, which is copied if it is on another device."""

    ref: Ref
    size: Rule


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationTrace:
    """The events of a step in a kind of block.

    `sizes` are the bytes of each allocation, in order, before rounding. In `events`, None stands
    for the next allocation and a Ref for a free. `retained` are the numbers of allocations that
    outlive the step (KV cache, gradients). `reads` are the tensor arguments. `live_through` are
    indices of reads that are passed not to the block itself but to a container that begins with it,
    for a later block: this block's backward pass doesn't need them. `matmul_at` is the number of
    events before the first matrix product, which allocates cuBLAS's workspace; None without one.
    `sampling_at` is the number of events before tokens are sampled, which no CUDA graph contains.
    `moved_bytes` are the bytes read and written by operations, `launches` the kernels started.
    `host_bytes` are the bytes of experts' weights that the host reads, `host_flops` its FLOPs; if
    these are 0, the GPU fetches the weights.
    """

    sizes: tuple[Rule, ...]
    events: tuple[Ref | None, ...]
    retained: tuple[int, ...] = ()
    reads: tuple[Read, ...] = ()
    live_through: tuple[int, ...] = ()
    matmul_at: int | None = None
    sampling_at: int | None = None
    flops: Rule = ()
    moved_bytes: Rule = ()
    launches: Rule = ()
    host_bytes: Rule = ()
    host_flops: Rule = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """The phase and the half-open ranges of sizes for which a set of traces holds.

    `is_batched` means several sequences, with padding. `query`, `past` and `keys` are the ranges of
    the tokens of the step, of the tokens before it, and of both together. `aligned` is True if keys
    must be a multiple of `ALIGNED_TOKENS`, False if they must not, None if the traces hold for
    both. `carried` are the allocations used by distant blocks, as (block, number in its trace).
    """

    phase: Phase
    is_batched: bool = False
    query: tuple[int, int] = (0, ENDLESS)
    past: tuple[int, int] = (0, ENDLESS)
    keys: tuple[int, int] = (0, ENDLESS)
    aligned: bool | None = None
    carried: tuple[tuple[int, int], ...] = ()

    def holds(self, phase: Phase, *, batch: int, query: int, keys: int) -> bool:
        """Return True if the traces of this regime hold for a step of these sizes."""
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

    `weight_bytes` are the bytes of each parameter and buffer, in the model's order; a tied tensor
    counts only in the first block that has it. `traces` has one trace for each of the profile's
    regimes. If the weights are offloaded to the host (`Profile.offloading`), `weight_bytes` is
    empty, and `streamed_bytes` are their bytes on the device during a call. In training, `trained`
    has each parameter with a gradient. `expert_bytes` are those of experts that stay on the host.
    """

    weight_bytes: tuple[int, ...]
    traces: tuple[AllocationTrace, ...]
    streamed_bytes: int = 0
    expert_bytes: int = 0
    trained: tuple[TrainedTensor, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileBlock:
    """A group of modules that is placed on one device as a whole.

    The `modules` are disjoint and hold all parameters and buffers of the block. A block without
    modules is work of the caller or of model code between modules. `kind` is an index into
    `Profile.kinds`. The block must have the device of the earlier block `tied_to`, which shares a
    parameter with it or whose device its work needs; None if there is no such block. `inside` are
    the first blocks of the containers of this block, outermost first: arguments of a container go
    to the device of its first block. A block `streams` if its tensors are used only within calls of
    its modules, so that its weights may be copied to the device for each call. `experts` are the
    modules inside whose weights can stay in host memory.
    """

    modules: tuple[str, ...]
    kind: int
    tied_to: int | None = None
    inside: tuple[int, ...] = ()
    streams: bool = False
    experts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The description of a model from which plans are made.

    `blocks` are in execution order. `fingerprint` identifies the checkpoint or model object,
    `model` is the class name, for display, and `dtype` the dtype of the weights.
    `max_context_tokens` is the longest context of the model, or None if unknown. `tensor_names` are
    the names by block, or None if not recorded. `conditions` are those of the trace: workloads
    under other conditions are refused (`refuse_other`), and so are prompts shorter than
    `least_prompt_tokens`, too short for their images. `notes` are sentences for the user, which
    plans repeat. Rules may have a further coefficient for each of the `flash_shapes`, after those
    of all monomials. `needs_movers` is True if model code passes tensors created on the host to
    blocks, `reads_images_in_chunks` if a prompt with images can be prefilled in chunks.
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
        """Return the block at the end of a chain of ties; the block itself if it isn't tied."""
        while (partner := self.blocks[block].tied_to) is not None:
            block = partner
        return block

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters and buffers, tied tensors counted once."""
        return sum(sum(self.kinds[block.kind].weight_bytes) for block in self.blocks)

    def values(
        self, monomials: tuple[int, ...], batch: int, query: int, keys: int
    ) -> tuple[int, ...]:
        """Return the arguments of rules: a step's monomials, then `part_rows` of `flash_shapes`."""
        if not self.flash_shapes:
            return monomials
        absent = (0,) * (len(MONOMIALS) - len(monomials))
        parts = (shape.part_rows(batch, query, keys) for shape in self.flash_shapes)
        return (*monomials, *absent, *parts)

    @property
    def outline(self) -> Outline:
        """The names of all tensors, to check device maps.

        Raises ModelError if the profile has no `tensor_names`.
        """
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
        """Return the streamed bytes of each given block with weights on the host."""
        kinds = (self.kinds[self.blocks[block].kind] for block in blocks)
        return [kind.streamed_bytes for kind in kinds if kind.streamed_bytes]

    def offloading(self, blocks: Collection[int]) -> Profile:
        """Return the profile with the weights of the given blocks on the host.

        Each of these blocks must stream and consist of one module.
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

    @property
    def expert_bytes(self) -> int:
        """Bytes of experts whose weights stay in host memory."""
        return sum(self.kinds[block.kind].expert_bytes for block in self.blocks)

    @property
    def host_experts(self) -> tuple[str, ...]:
        """The modules of experts whose weights stay in host memory, in execution order."""
        on_host = [block for block in self.blocks if self.kinds[block.kind].expert_bytes]
        return tuple(name for block in on_host for name in block.experts)

    def key_of(self, block: int, ref: Ref, regime: int) -> Key:
        """Return the key of the allocation that a reference in a block's trace means."""
        if ref.origin == "own":
            return block, ref.index
        if ref.origin == "earlier":
            return block - ref.back, ref.index
        if ref.origin == "carried":
            return self.regimes[regime].carried[ref.index]
        if ref.back:
            return block - ref.back, -1 - ref.index  # an allocation of an earlier step
        return -1, ref.index

    @property
    def graph_tokens(self) -> int | None:
        """The most tokens of a decode step that can be a CUDA graph; None without a limit.

        In larger steps the host waits for the routing of experts that are quantized or fetched.
        """
        serving = [regime.query for regime in self.regimes if regime.phase == "serve"]
        has_experts = any(block.experts for block in self.blocks)
        waits = self.conditions.quantize != "none" or self.conditions.host_experts
        if not (serving and has_experts and waits):
            return None
        tokens = serving[-1][0] - 1
        if cache_bytes := self.conditions.expert_cache_bytes:
            # A step of more tokens may choose more experts than the cache holds.
            layer_bytes = max(kind.expert_bytes for kind in self.kinds)
            tokens = max(1, min(tokens, tokens * cache_bytes // layer_bytes))
        while padded(tokens) > tokens:  # a step of 9 tokens computes 10
            tokens -= 1
        return tokens

    @property
    def encodes_images(self) -> bool:
        """True if images are encoded in separate steps before the prompt."""
        return any(regime.phase == "encode" for regime in self.regimes)

    @property
    def is_of_steps(self) -> bool:
        """True if the profile holds only for the recorded steps, without rules for others."""
        return all(regime.query[1] - regime.query[0] == 1 for regime in self.regimes)

    def answers(self, batch: int) -> bool:
        """Return True if there are rules for this batch (a single sequence or several)."""
        if self.conditions.is_paged:
            return True
        return any(regime.is_batched == (batch > 1) for regime in self.regimes)

    def refuse_other(self, conditions: Conditions) -> None:
        """Raise UsageError if these conditions differ from those of the profile."""
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

        Raises UsageError if no regime holds for the step, such as a step beyond all ranges.
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
