"""Training for tests: made-up profiles that are easy to reckon with, and traced small models."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tiny
import torch
from transformers import PreTrainedModel

from duoka import Placement, Workload, models, virtual
from duoka.forecast.optimizer_memory import TrainedTensor
from duoka.forecast.profile import (
    TRAINING_MONOMIALS,
    TRAINING_PHASES,
    AllocationTrace,
    BlockKind,
    Profile,
    ProfileBlock,
    Read,
    Ref,
    Regime,
    Rule,
)
from duoka.forecast.replay_training import in_flight, replay_of
from duoka.forecast.stage_bytes import StageBytes
from duoka.forecast.tensor_names import NamedTensor
from duoka.forecast.workload import Conditions, Quantization, Training
from duoka.models.quantization import quantize_model
from duoka.runtime.call.learner import Learner
from duoka.runtime.dispatch.dispatch import dispatch
from duoka.tracing import TraceSpec, profile_training


def load(tokens: int, batch: int = 1, **training: Any) -> Workload:
    """A workload that trains."""
    return Workload(
        batch=batch,
        prompt_tokens=tokens,
        new_tokens=0,
        dtype="bfloat16",
        prefill_chunk_tokens=None,
        training=Training(**training),
    )


@dataclass(frozen=True)
class Layer:
    """A made-up block: bytes of its weight, and of a token's result and saved activation."""

    weight: int
    result: int
    saved: int


def made_up(layers: Sequence[Layer]) -> Profile:
    """Blocks that give each other a result, save an activation, and learn their weight."""
    kinds = []
    for number, layer in enumerate(layers):
        is_first, is_last = number == 0, number == len(layers) - 1
        given = 0 if is_first else layers[number - 1].result
        kinds.append(_kind(layer, given, is_first=is_first, is_last=is_last))
    return Profile(
        fingerprint="made up",
        model="MadeUp",
        dtype="bfloat16",
        blocks=tuple(
            ProfileBlock(modules=(f"b{number}",), kind=number) for number in range(len(layers))
        ),
        kinds=tuple(kinds),
        regimes=tuple(
            Regime(phase=phase, is_batched=pads)
            for pads in (False, True)
            for phase in TRAINING_PHASES
        ),
        conditions=Conditions(training=Training(method="full")),
        tensor_names=tuple(
            (NamedTensor(name=f"b{number}.weight", num_bytes=layer.weight),)
            for number, layer in enumerate(layers)
        ),
    )


def _rule(name: str, value: int) -> Rule:
    place = TRAINING_MONOMIALS.index(name)
    return (0.0,) * place + (float(value),)


_SAVED, _RESULT, _GRADIENT, _BACK = range(4)


def _kind(layer: Layer, given: int, *, is_first: bool, is_last: bool) -> BlockKind:
    before = Ref(origin="earlier", index=_RESULT, back=1)
    after = Ref(origin="earlier", index=_BACK, back=-1)
    forward = AllocationTrace(
        sizes=(_rule("bq", layer.saved), _rule("bq", layer.result)),
        events=(None, None),
        reads=() if is_first else (Read(ref=before, size=_rule("bq", given)),),
    )
    ends = [Ref(origin="own", index=_SAVED)]
    ends.append(Ref(origin="own", index=_RESULT) if is_last else after)
    ends += [Ref(origin="own", index=_BACK)] if is_first else [before]
    sizes = (_rule("1", layer.weight), _rule("bq", given))
    reads = () if is_last else (Read(ref=after, size=_rule("bq", layer.result)),)
    backward = AllocationTrace(
        sizes=sizes, events=(None, None, *ends), retained=(_GRADIENT,), reads=reads
    )
    # A gradient that is added to one that is there ends at once.
    added = (None, Ref(origin="own", index=_GRADIENT), None, *ends)
    accumulate = AllocationTrace(sizes=sizes, events=added, reads=reads)
    return BlockKind(
        weight_bytes=(layer.weight,),
        traces=(forward, backward, accumulate) * 2,
        trained=(TrainedTensor(shape=(1, layer.weight // 2), item_bytes=2),),
    )


def build_model(name: str, quantize: Quantization = "none", **changes: Any) -> PreTrainedModel:
    """A small model without data."""
    model = models.build({**tiny.CONFIGS[name], **changes}, dtype=torch.bfloat16)
    if quantize in ("int8", "int4", "nf4"):
        quantize_model(model, quantize, trains=True)
    return model


@functools.cache
def traced(name: str, conditions: Conditions) -> Profile:
    """The profile of a small model in training; it holds for every size."""
    workload = Workload(
        new_tokens=0,
        dtype="bfloat16",
        quantize=conditions.quantize,
        training=conditions.training,
    )
    build = functools.partial(build_model, name, conditions.quantize)
    spec = TraceSpec(fingerprint=name, conditions=conditions)

    def trace() -> Profile:
        profile, is_regular = profile_training(build, spec, workload)
        assert is_regular
        return profile

    return tiny.shared_profile(spec, trace)


def stages_of(profile: Profile, cuts: Sequence[int]) -> list[list[int]]:
    """The blocks of each stage, by where stages begin; tied ones with their partner."""
    edges = [0, *cuts, len(profile.blocks)]
    place = [0] * len(profile.blocks)
    for number, block in enumerate(profile.blocks):
        own = next(stage for stage in range(len(edges) - 1) if number < edges[stage + 1])
        place[number] = own if block.tied_to is None else place[block.tied_to]
    return [
        [block for block, at in enumerate(place) if at == stage] for stage in range(len(edges) - 1)
    ]


def forecast(profile: Profile, workload: Workload, cuts: Sequence[int]) -> list[StageBytes]:
    """What each stage is forecast to need, without a limit."""
    stages = stages_of(profile, cuts)
    found = []
    for stage, blocks in enumerate(stages):
        peaks = replay_of(profile, workload, place=len(stages) - stage).run(blocks)
        assert peaks is not None
        found.append(peaks)
    return found


def measure(
    name: str, profile: Profile, workload: Workload, cuts: Sequence[int], *, steps: int = 2
) -> list[tuple[int, int]]:
    """Allocated and reserved peaks of each stage, trained on virtual GPUs without data."""
    stages, training = stages_of(profile, cuts), workload.training
    assert training is not None
    found: dict[int, tuple[int, int]] = {}
    flying = [in_flight(training, len(stages) - stage) for stage in range(len(stages))]
    entries = tuple(
        (module, f"vgpu:{stage}")
        for stage, blocks in enumerate(stages)
        for block in blocks
        for module in profile.blocks[block].modules
    )
    for limit in sorted(set(flying)):
        model = build_model(name, workload.quantize)
        models.make_trainable(model, training, torch.bfloat16)
        with virtual.gpus([None] * len(stages), data="meta") as world:
            dispatch(model, Placement(entries=entries), empty=True)
            Learner(model, workload, torch.device("vgpu:0")).run(in_flight=limit, steps=steps)
            for stage in [each for each, number in enumerate(flying) if number == limit]:
                allocated = world.max_memory_allocated(stage)
                found[stage] = allocated, world.max_memory_reserved(stage)
    return [found[stage] for stage in range(len(stages))]
