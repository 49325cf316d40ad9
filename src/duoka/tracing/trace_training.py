"""From a model to its profile for training.

Micro-batches are run whole, forward and backward, at several sizes, and twice each: where gradients
are there already, new ones are added to them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from duoka.errors import ModelError
from duoka.forecast.flash_splits import FlashShape
from duoka.forecast.optimizer_memory import TrainedTensor
from duoka.forecast.profile import ALIGNED_TOKENS, TRAINING_PHASES, BlockKind, Profile, Regime
from duoka.forecast.tensor_names import NamedTensor
from duoka.forecast.workload import Training, Workload
from duoka.models import base_name
from duoka.models.chunked_loss import whole_logits
from duoka.models.trainable import WITHOUT_CHECKPOINTING
from duoka.runtime.call.learner import Learner
from duoka.runtime.prepare_training import prepare_for_training

from .assemble import (
    CALLER,
    ENDLESS,
    EVERYWHERE,
    RegimeTapes,
    TraceSpec,
    as_profile,
    weights_and_ties,
)
from .blocks import ModuleGroup, find_groups
from .fit import RecordedStep, Unlike, fit
from .published_names import name_tensors
from .record_training import ReturningTrainingRecorder, TrainingRecorder
from .trace import FAILURES, Irregular, ranges, running, whole

# Rules are made from sequences up to this length, counted from the start of a range.
_PROBED_TOKENS = 2**11
_NUM_PROBES = 4
_PROBED_BATCHES = (2, 3)
# How many tokens past a multiple of 128 each probe is: all different, none aligned.
_ODD = (1, 43, 86, 59)
_TILE = 128


def trace_training(model: nn.Module, spec: TraceSpec, workload: Workload) -> Profile:
    """Train a model without data, and record what it costs."""
    named = name_tensors(model, spec.published)
    with running(model):
        tracer = _Tracer(model, spec, workload)
        with whole(model, spec) as device:
            tracer.start(device)
            try:
                regimes = list(tracer.rules())
            except (Unlike, *FAILURES) as error:
                raise Irregular(f"{type(model).__name__}: {error}") from error
            return tracer.profile(regimes, named)


def profile_training(
    build: Callable[[], nn.Module], spec: TraceSpec, workload: Workload
) -> tuple[Profile, bool]:
    """A profile for every workload where rules hold, which the second result says, or for one."""
    model = build()
    if workload.dtype == "auto":
        first = next(p for p in model.parameters() if p.is_floating_point())
        workload = workload.resolved(dtype=str(first.dtype).removeprefix("torch."))
    try:
        return trace_training(model, spec, workload), True
    except Irregular:
        return trace_training_workload(build(), spec, workload), False


def trace_training_workload(model: nn.Module, spec: TraceSpec, workload: Workload) -> Profile:
    """Run micro-batches of one workload, and record what just these cost."""
    named = name_tensors(model, spec.published)
    with running(model):
        tracer = _Tracer(model, spec, workload)
        with whole(model, spec) as device:
            tracer.start(device)
            batch, tokens = workload.batch, workload.prompt_tokens
            samples = tracer.record([(batch, tokens)])
            regimes = tracer.fitted(batch > 1, (tokens, tokens + 1), samples)
            return tracer.profile(regimes, named)


class _Tracer:
    """Records micro-batches and fits regimes to them."""

    skip = True
    """Run blocks that are alike once."""

    def __init__(self, model: nn.Module, spec: TraceSpec, workload: Workload) -> None:
        assert workload.training is not None, "the workload is to train"
        self.workload = workload
        self.prompts = prepare_for_training(model, workload)
        self.least_tokens = 0 if self.prompts is None else self.prompts.least_tokens
        self.model: Any = model
        self.spec = spec
        self.training: Training = workload.training
        self.groups: list[ModuleGroup] = []
        self.trained: dict[str, list[TrainedTensor]] = {}
        self.shapes: list[FlashShape] = []
        self.needs_movers = False

    def start(self, device: torch.device) -> None:
        """Find the blocks, with the model on its device."""
        self.device = device
        self.model.eval()
        learner = self._learner(1, max(8, self.least_tokens))
        with whole_logits(self.model):
            # What a tower makes is moved to the text's embeddings, and is spliced into them there.
            sees = self.prompts is not None
            look = partial(find_groups, self.model, learner.look)
            self.groups = look(hears_moves=sees, joins_work=not sees)
            returns = any(group.returns_to is not None for group in self.groups)
            self.groups = look() if sees and not returns else self.groups
            self._recorder = ReturningTrainingRecorder if returns else TrainingRecorder
            joined = find_groups(self.model, learner.forward, hears_moves=True, joins_work=False)
        _, ties = weights_and_ties(self.model, self.groups)
        if len(joined) == 1 and len(self.groups) - 1 not in ties:
            self.groups = joined  # the loss meets labels that nobody brings to the logits
        self.model.train()
        if self.training.gradient_checkpointing:
            self.groups = _joined(self.model, self.groups)
        self.groups = [*self.groups, CALLER]

    def rules(self) -> Iterator[RegimeTapes]:
        """Regimes for every micro-batch."""
        longest = self.spec.max_context_tokens or ENDLESS
        for many in (False, True):
            for start, stop in ranges(self.model.config, longest, has_images=bool(self.prompts)):
                yield from self._cell(many, start, stop, longest)

    def _cell(self, many: bool, start: int, stop: int, longest: int) -> Iterator[RegimeTapes]:
        """The regimes of one range, for one sequence or several."""
        first = max(start, self.least_tokens)
        high = min(stop, longest + 1, first + _PROBED_TOKENS)
        lengths = list(_lengths(first, high))
        batches = _PROBED_BATCHES if many else (1,)
        sizes = [(batch, length) for batch in batches for length in lengths]
        aligned = [
            (batch, -(-length // ALIGNED_TOKENS) * ALIGNED_TOKENS) for batch, length in sizes
        ]
        odd, probe = self.record(sizes), self.record(aligned[:1])
        try:
            yield from self.fitted(many, (start, stop), [*odd, *probe])
            return
        except Unlike:
            probe += self.record(aligned[1:])
        yield from self.fitted(many, (start, stop), odd, aligned=False)
        yield from self.fitted(many, (start, stop), probe, aligned=True)

    def fitted(
        self,
        many: bool,
        keys: tuple[int, int],
        samples: Sequence[RecordedStep],
        *,
        aligned: bool | None = None,
    ) -> list[RegimeTapes]:
        """The regimes of all phases, where their tapes are one."""
        regimes = []
        for phase in TRAINING_PHASES:
            chosen = [sample for sample in samples if sample.phase == phase]
            tapes, carried = fit(chosen, self.shapes)
            regime = Regime(
                phase=phase,
                many=many,
                query=keys,
                past=EVERYWHERE,
                keys=keys,
                aligned=aligned,
                carried=carried,
            )
            regimes.append((regime, tapes))
        return regimes

    def record(self, sizes: Sequence[tuple[int, int]]) -> list[RecordedStep]:
        """Micro-batches of these batches and lengths."""
        samples: list[RecordedStep] = []
        with self._recorder(self.model, self.groups, skip=self.skip) as recorder:
            for batch, length in sizes:
                learner = self._learner(batch, length)
                recorder.forget()
                first = recorder.record_training(learner.forward)
                if samples and not first.forward.is_like(samples[0].recorded):
                    raise Unlike("the model's code loops over the tokens")
                if self.training.gradient_checkpointing and not recorder.computes_again:
                    raise ModelError(
                        f"{type(self.model).__name__} computes nothing again in its backward pass, "
                        "though its gradient checkpointing is on",
                        hint=WITHOUT_CHECKPOINTING,
                    )
                again = recorder.record_training(learner.forward)
                recorded = (first.forward, first.backward, again.backward)
                samples += [
                    RecordedStep(phase, batch, length, length, taken)
                    for phase, taken in zip(TRAINING_PHASES, recorded, strict=True)
                ]
                self._note_trained(first.forward.like)
                learner.drop_gradients()
            self.needs_movers |= recorder.needs_movers
        return samples

    def profile(self, regimes: Sequence[RegimeTapes], named: Sequence[NamedTensor]) -> Profile:
        """The profile, in the names that the model had before adapters were put into it."""
        groups = [
            replace(group, names=tuple(dict.fromkeys(map(base_name, group.names))))
            for group in self.groups
        ]
        profile = as_profile(self.model, groups, self.spec, regimes, named)
        kinds: dict[BlockKind, int] = {}
        blocks = []
        for block, group in zip(profile.blocks, groups, strict=True):
            trained = [item for owner in group.owners for item in self.trained.get(owner, ())]
            kind = replace(profile.kinds[block.kind], trained=tuple(trained))
            # A backward pass needs weights again that would have streamed away by then.
            number = kinds.setdefault(kind, len(kinds))
            blocks.append(replace(block, kind=number, streams=False))
        return replace(
            profile,
            blocks=tuple(blocks),
            kinds=tuple(kinds),
            dtype=self.workload.dtype,
            least_prompt_tokens=self.least_tokens,
            flash_shapes=tuple(self.shapes),
            needs_movers=self.needs_movers,
        )

    def _learner(self, batch: int, length: int) -> Learner:
        workload = replace(self.workload, batch=batch, prompt_tokens=length)
        return Learner(self.model, workload, self.device, self.prompts)

    def _note_trained(self, like: Sequence[int]) -> None:
        """Note what got gradients; blocks that were left out, as those that they are like."""
        met: set[int] = set()
        for name, module in self.model.named_modules():
            parameters = [p for p in module.parameters(recurse=False) if id(p) not in met]
            met |= {id(parameter) for parameter in parameters}
            self.trained[name] = [
                TrainedTensor(shape=tuple(p.shape), item_bytes=p.itemsize)
                for p in parameters
                if p.grad is not None
            ]
        for block, first in enumerate(like):
            pairs = zip(self.groups[block].owners, self.groups[first].owners, strict=True)
            self.trained |= {owner: self.trained[model] for owner, model in pairs}


def _joined(model: nn.Module, groups: Sequence[ModuleGroup]) -> list[ModuleGroup]:
    """The blocks, with those together that the backward pass computes again together.

    Where it does so on two devices, what is moved between them is moved again, and kept until
    all of it has been computed: no tape says that.
    """
    # Older code checkpoints its layers from outside of them.
    kinds = {*(getattr(model, "_no_split_modules", None) or ())}
    layers = [
        name
        for name, module in model.named_modules()
        if (isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing)
        or type(module).__name__ in kinds
    ]
    # A layer that shares a block with what is around it stays as it is.
    whole_ones = [
        name for name in layers if not any(0 < _share(group, name) < 1 for group in groups)
    ]

    def layer_of(group: ModuleGroup) -> str | None:
        return next((name for name in whole_ones if _share(group, name) == 1), None)

    joined: list[ModuleGroup] = []
    for layer, neighbours in itertools.groupby(groups, layer_of):
        members = list(neighbours)
        if layer is None or len(members) == 1:
            joined += members
            continue
        owners = tuple(owner for group in members for owner in group.owners)
        joined.append(ModuleGroup(names=(layer,), owners=owners))
    return joined


def _share(group: ModuleGroup, name: str) -> float:
    """The part of a block's owners that a module contains."""
    inside = [owner == name or owner.startswith(f"{name}.") for owner in group.owners]
    return sum(inside) / max(len(inside), 1)


def _lengths(start: int, stop: int) -> Iterator[int]:
    """Lengths of sequences in a range, none aligned where there is room for that."""
    width = max((stop - start) // _NUM_PROBES, 1)
    for place, odd in enumerate(_ODD):
        first = start + place * width
        tiled = -(-(first + 1) // _TILE) * _TILE + odd
        yield tiled if tiled < stop else min(first + 1 + place, stop - 1)
