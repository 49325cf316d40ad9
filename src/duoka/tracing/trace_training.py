"""Tracing training: rules for any micro-batch, or only the micro-batches of a workload.

Each micro-batch runs forward and backward at several sizes, and twice at each size: the second
backward pass accumulates into the gradients of the first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from duoka.errors import ModelError
from duoka.forecast.optimizer_memory import TrainedTensor
from duoka.forecast.profile import ALIGNED_TOKENS, TRAINING_PHASES, BlockKind, Profile, Regime
from duoka.forecast.workload import Training, Workload
from duoka.models import base_name
from duoka.models.chunked_loss import whole_logits
from duoka.models.trainable import WITHOUT_CHECKPOINTING
from duoka.runtime.call.learner import Learner
from duoka.runtime.prepare_training import prepare_for_training

from .assemble import RegimeTraces, TraceSpec, weights_and_ties
from .blocks import ModuleGroup, find_blocks_in, find_groups, name_modules
from .fit import RecordedStep, Unlike
from .tracer import LOOKED_AT_TOKENS, PROBED_TOKENS, Irregular, Tracer, running

_NUM_PROBES = 4
_PROBED_BATCHES = (2, 3)
# The number of tokens of each probe past a multiple of 128: all different, none aligned.
_ODD = (1, 43, 86, 59)
_TILE = 128


def profile_training(
    build: Callable[[], nn.Module], spec: TraceSpec, workload: Workload, *, batched: bool = True
) -> tuple[Profile, bool]:
    """Return a profile for all workloads and True; without rules, for this workload and False."""
    model = build()
    if workload.dtype == "auto":
        parameter = next(p for p in model.parameters() if p.is_floating_point())
        workload = workload.resolved(dtype=str(parameter.dtype).removeprefix("torch."))
    try:
        return trace_training(model, spec, workload, batched=batched), True
    except Irregular:
        return trace_training_workload(build(), spec, workload), False


def trace_training(
    model: nn.Module, spec: TraceSpec, workload: Workload, *, batched: bool = True
) -> Profile:
    """Record the training of a model, and return rules for all micro-batches.

    Without `batched` the rules hold for micro-batches of a single sequence only.
    """
    tracer = TrainingTracer(model, spec, workload)
    return tracer.trace(partial(tracer.rules, batched=batched), tracer.irregular)


def trace_training_workload(model: nn.Module, spec: TraceSpec, workload: Workload) -> Profile:
    """Record the micro-batches of a workload, and return a profile for this workload alone."""
    tracer = TrainingTracer(model, spec, workload)
    return tracer.trace(tracer.points)


class TrainingTracer(Tracer):
    """Records forward and backward passes of micro-batches."""

    def __init__(self, model: nn.Module, spec: TraceSpec, workload: Workload) -> None:
        assert workload.training is not None, "the workload is to train"
        super().__init__(model, spec)
        self.workload = workload
        self.training: Training = workload.training
        with running(model):
            self.prompts = prepare_for_training(model, workload)
        self.least_tokens = 0 if self.prompts is None else self.prompts.least_tokens
        self.trained: dict[str, list[TrainedTensor]] = {}

    def start(self) -> None:
        """Find the blocks, and join blocks that checkpointing recomputes together."""
        self.model.eval()
        learner = self._learner(1, max(LOOKED_AT_TOKENS, self.least_tokens))
        with whole_logits(self.model):
            groups = self.find_blocks(learner.look)
            if self.training.rows == "unpadded":  # those of `duoka tune`
                groups = _join_moved(self.model, groups)
            joined = find_groups(self.model, learner.forward, hears_moves=True, fuses_glue=False)
        _, ties = weights_and_ties(self.model, groups)
        if len(joined) == 1 and len(groups) - 1 not in ties:
            groups = joined  # labels are not moved to the logits: loss needs one device
        self.model.train()
        if self.training.gradient_checkpointing:
            groups = _join_recomputed(self.model, groups)
        self.observe(groups)

    def rules(self, *, batched: bool) -> Iterator[RegimeTraces]:
        """Yield regimes for micro-batches of every size."""
        for is_batched in (False, True) if batched else (False,):
            for start, stop in self.ranges():
                yield from self._trace_range(is_batched, start, stop)

    def points(self) -> list[RegimeTraces]:
        """Return regimes for micro-batches of the workload's size."""
        batch, tokens = self.workload.batch, self.workload.prompt_tokens
        samples = self._record([(batch, tokens)])
        regimes = _regimes(batch > 1, (tokens, tokens + 1))
        return [self.fit(regime, samples) for regime in regimes]

    def _trace_range(self, is_batched: bool, start: int, stop: int) -> Iterator[RegimeTraces]:
        """Yield the regimes of a range of lengths, for one sequence or several."""
        low = max(start, self.least_tokens)
        high = min(stop, self.longest + 1, low + PROBED_TOKENS)
        lengths = list(_probe_lengths(low, high))
        batches = _PROBED_BATCHES if is_batched else (1,)
        sizes = [(batch, length) for batch in batches for length in lengths]
        aligned = [
            (batch, -(-length // ALIGNED_TOKENS) * ALIGNED_TOKENS) for batch, length in sizes
        ]
        samples = [*self._record(sizes), *self._record(aligned[:1])]

        def complete() -> None:
            samples.extend(self._record(aligned[1:]))

        yield from self.split(_regimes(is_batched, (start, stop)), samples, complete)

    def _record(self, sizes: Sequence[tuple[int, int]]) -> list[RecordedStep]:
        """Record two micro-batches of each (batch, length); return samples of three phases each."""
        samples: list[RecordedStep] = []
        with self.recorder as recorder:
            for batch, length in sizes:
                learner = self._learner(batch, length)
                recorder.forget()
                first_run = recorder.record_training(learner.forward)
                if samples and not first_run.forward.is_like(samples[0].recorded):
                    raise Unlike("the model's code loops over the tokens")
                if self.training.gradient_checkpointing and not recorder.recomputes:
                    raise ModelError(
                        f"{type(self.model).__name__} recomputes nothing in its backward pass, "
                        "although gradient checkpointing is enabled",
                        hint=WITHOUT_CHECKPOINTING,
                    )
                second_run = recorder.record_training(learner.forward)
                passes = first_run.forward, first_run.backward, second_run.backward
                samples += [
                    RecordedStep(phase, batch, length, length, recorded)
                    for phase, recorded in zip(TRAINING_PHASES, passes, strict=True)
                ]
                self._note_trained(first_run.forward.model_blocks)
                learner.drop_gradients()
        return samples

    def profile(self, regimes: Sequence[RegimeTraces]) -> Profile:
        """Return the profile, with module names as in the model without adapters."""
        self.groups = [
            replace(group, names=tuple(dict.fromkeys(map(base_name, group.names))))
            for group in self.groups
        ]
        profile = super().profile(regimes)
        kinds: dict[BlockKind, int] = {}
        blocks = []
        for block, group in zip(profile.blocks, self.groups, strict=True):
            trained = [item for owner in group.owners for item in self.trained.get(owner, ())]
            kind = replace(profile.kinds[block.kind], trained=tuple(trained))
            # No weights are streamed in training: the backward pass needs them again.
            number = kinds.setdefault(kind, len(kinds))
            blocks.append(replace(block, kind=number, streams=False))
        return replace(profile, blocks=tuple(blocks), kinds=tuple(kinds), dtype=self.workload.dtype)

    def _learner(self, batch: int, length: int) -> Learner:
        """Return a learner of micro-batches of these sizes."""
        workload = replace(self.workload, batch=batch, prompt_tokens=length)
        return Learner(self.model, workload, self.device, self.prompts)

    def _note_trained(self, model_blocks: Sequence[int]) -> None:
        """Note the parameters with gradients; for a stubbed block, those of its model block."""
        seen_parameters: set[int] = set()
        for name, module in self.model.named_modules():
            parameters = [
                p for p in module.parameters(recurse=False) if id(p) not in seen_parameters
            ]
            seen_parameters |= {id(parameter) for parameter in parameters}
            self.trained[name] = [
                TrainedTensor(shape=tuple(p.shape), item_bytes=p.itemsize)
                for p in parameters
                if p.grad is not None
            ]
        for block, model_block in enumerate(model_blocks):
            pairs = zip(self.groups[block].owners, self.groups[model_block].owners, strict=True)
            self.trained |= {owner: self.trained[model] for owner, model in pairs}


def _regimes(is_batched: bool, keys: tuple[int, int]) -> list[Regime]:
    """Return the regimes of all phases in a range of lengths."""
    return [
        Regime(phase=phase, is_batched=is_batched, query=keys, keys=keys)
        for phase in TRAINING_PHASES
    ]


def _join_recomputed(model: nn.Module, groups: Sequence[ModuleGroup]) -> list[ModuleGroup]:
    """Join blocks that are recomputed together in the backward pass.

    If one checkpointed layer were on two devices, recomputation would copy the tensors between them
    again and keep the copies until the whole layer is recomputed, which no trace contains.
    """
    # Older code checkpoints its layers from the outside: they are known by class name alone.
    kinds = {*(getattr(model, "_no_split_modules", None) or ())}
    layers = [
        name
        for name, module in model.named_modules()
        if (isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing)
        or type(module).__name__ in kinds
    ]
    # A layer is skipped if some block is partly inside and partly outside of the layer.
    whole_layers = [
        name for name in layers if not any(0 < _share_inside(group, name) < 1 for group in groups)
    ]

    def layer_of(group: ModuleGroup) -> str | None:
        return next((name for name in whole_layers if _share_inside(group, name) == 1), None)

    joined: list[ModuleGroup] = []
    for layer, neighbours in itertools.groupby(groups, layer_of):
        members = list(neighbours)
        if layer is None or len(members) == 1:
            joined += members
            continue
        owners = tuple(owner for group in members for owner in group.owners)
        joined.append(ModuleGroup(names=(layer,), owners=owners))
    return joined


# Model code inserts image features into the text embeddings, and moves them for it. Pipeline stages
# send only what enters a block, so one stage computes both: with an embedding in front of the tower
# all of the tower, with one behind the tower the end of the tower.
def _join_moved(model: nn.Module, groups: Sequence[ModuleGroup]) -> list[ModuleGroup]:
    """Join the blocks between which model code moves tensors, and that of the text embeddings."""
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    embeddings = {name for name, module in model.named_modules() if module is embedding}
    moves = [(at, group.returns_to) for at, group in enumerate(groups)]
    joined = [at for move in moves if move[1] is not None for at in move if at is not None]
    if not joined:
        return [*groups]
    joined += [at for at, group in enumerate(groups) if embeddings.intersection(group.owners)]
    start, stop = min(joined), max(joined) + 1
    whole = [owner for group in groups[start:stop] for owner in group.owners]
    blocks = [whole, *([*group.owners] for group in (*groups[:start], *groups[stop:]))]
    names = name_modules(model, 0, whole, find_blocks_in(blocks))
    return [*groups[:start], ModuleGroup(names=names, owners=tuple(whole)), *groups[stop:]]


def _share_inside(group: ModuleGroup, name: str) -> float:
    """Return the fraction of a block's owners inside a module."""
    is_inside = [owner == name or owner.startswith(f"{name}.") for owner in group.owners]
    return sum(is_inside) / max(len(is_inside), 1)


def _probe_lengths(start: int, stop: int) -> Iterator[int]:
    """Yield the sequence lengths to probe in a range, unaligned where possible."""
    # From 0 to 2048: 129, 683, 1238 and 1723, which are 128, 640, 1152 and 1664 plus `_ODD`.
    width = max((stop - start) // _NUM_PROBES, 1)
    for place, odd in enumerate(_ODD):
        low = start + place * width
        tiled = -(-(low + 1) // _TILE) * _TILE + odd
        yield tiled if tiled < stop else min(low + 1 + place, stop - 1)
