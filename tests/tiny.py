"""Small models and made-up profiles, for the tests of planning.

A made-up profile has the shape of a language model (an embedding, layers with a cache, a head)
with sizes that are easy to reckon with, and costs no tracing.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from duoka import Fleet, Placement, Plan, Workload, models, virtual
from duoka.base.files import cache_directory, write_whole
from duoka.base.serialization import from_dict, to_dict
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
from duoka.forecast.tensor_names import NamedTensor
from duoka.forecast.workload import Conditions
from duoka.planner.planner import with_chunks
from duoka.runtime.call.stepper import Stepper
from duoka.runtime.dispatch.dispatch import dispatch
from duoka.runtime.image_inputs import prompts_for
from duoka.tracing import Irregular, TraceSpec, trace, trace_workload

MIB = 2**20
PHASES: tuple[Phase, ...] = ("prefill", "extend", "decode")

_SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 2048,
    "max_position_embeddings": 8192,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "glm": {
        **_SIZES,
        "model_type": "glm",
        "head_dim": 32,
        "attention_bias": True,
        "pad_token_id": 0,
    },
    "llama": {**_SIZES, "model_type": "llama"},
    "tied": {**_SIZES, "model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True},
    "window": {**_SIZES, "model_type": "mistral", "sliding_window": 512},
    "experts": {
        **_SIZES,
        "model_type": "mixtral",
        "intermediate_size": 384,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
    # Its residuals go in as arguments, so that its layers fall into several blocks.
    "bloom": {
        "model_type": "bloom",
        "hidden_size": 256,
        "n_layer": 4,
        "n_head": 8,
        "vocab_size": 1000,
    },
    "mamba2": {
        "model_type": "mamba2",
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_heads": 16,
        "head_dim": 32,
        "n_groups": 1,
        "state_size": 16,
        "vocab_size": 2048,
        "chunk_size": 64,
    },
}
CONFIGS |= {
    "latent": {
        **_SIZES,
        "model_type": "deepseek_v3",
        "num_key_value_heads": 8,
        "kv_lora_rank": 32,
        "q_lora_rank": None,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "first_k_dense_replace": 1,
    },
    "hybrid": {
        **_SIZES,
        "model_type": "bamba",
        "attn_layer_indices": [1, 3],
        "mamba_n_heads": 16,
        "mamba_d_head": 32,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
        "mamba_chunk_size": 64,
    },
    # Its layers fall into several blocks too, some of which are stood in for.
    "pair": {
        "model_type": "bart",
        "d_model": 256,
        "encoder_layers": 4,
        "decoder_layers": 4,
        "encoder_attention_heads": 8,
        "decoder_attention_heads": 8,
        "encoder_ffn_dim": 768,
        "decoder_ffn_dim": 768,
        "vocab_size": 2048,
        "max_position_embeddings": 2048,
    },
    "tower": {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "image_token_index": 2000,
        "text_config": {**_SIZES, "model_type": "llama"},
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "image_size": 112,
            "patch_size": 14,
        },
    },
}
IRREGULAR = frozenset({("mamba2", "dynamic"), ("hybrid", "dynamic"), ("pair", "dynamic")})


_PLAIN = Conditions()


@functools.cache
def regular(name: str, conditions: Conditions = _PLAIN) -> Profile:
    """The profile of a small model, for all workloads."""
    spec = TraceSpec(fingerprint=name, max_context_tokens=8192, conditions=conditions)
    return shared_profile(
        spec, lambda: trace(models.build(CONFIGS[name], dtype=torch.bfloat16), spec)
    )


def shared_profile(spec: TraceSpec, make: Callable[[], Profile]) -> Profile:
    """The profile that a worker of this test run has made of a model under these conditions."""
    name = hashlib.sha256(repr(spec).encode()).hexdigest()
    path = cache_directory() / "shared" / f"{name}.json"
    if path.exists():
        return from_dict(Profile, json.loads(path.read_text()))
    profile = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(to_dict(profile)))
    return profile


def profile_for(name: str, workload: Workload) -> Profile:
    """The profile of a small model, which is good at least for this workload."""
    if (name, workload.cache) not in IRREGULAR:
        return regular(name, workload.conditions)
    model = models.build(CONFIGS[name], dtype=torch.bfloat16)
    spec = TraceSpec(fingerprint=name, conditions=workload.conditions)
    return trace_workload(model, spec, list(with_chunks(workload)))


def is_irregular(name: str) -> bool:
    """Whether tracing finds no rules for a small model."""
    try:
        regular(name)
    except Irregular:
        return True
    return False


def measure(plan: Plan, config: dict[str, Any]) -> list[tuple[int, int]]:
    """Allocated and reserved peaks of every step of a plan, on its devices as virtual GPUs."""
    index = {name: f"vgpu:{number}" for number, name in enumerate(plan.devices)}
    budgets = [plan.fleet.device(name).budget_bytes for name in plan.devices]
    entries = tuple((module, index[name]) for module, name in plan.placement.entries)
    model = models.build(config, dtype=torch.bfloat16)
    prompts = prompts_for(model, plan.workload.conditions)
    with virtual.gpus(budgets, data="meta") as world, torch.no_grad():
        dispatch(model, Placement(entries=entries), empty=True)
        stepper = Stepper.of(model, plan.workload, torch.device("vgpu:0"), prompts)
        stepper.run(plan.workload, decode_steps=plan.workload.new_tokens - 1)
        return [
            (world.max_memory_allocated(number), world.max_memory_reserved(number))
            for number in range(len(budgets))
        ]


def rule(**coefficients: float) -> Rule:
    """A rule by the names of its monomials; the constant is called `one`."""
    named = {("1" if name == "one" else name): value for name, value in coefficients.items()}
    assert named.keys() <= set(MONOMIALS)
    return tuple(named.get(name, 0.0) for name in MONOMIALS)


@dataclass(frozen=True)
class Costs:
    """What the blocks of a made-up profile cost per token, in bytes; a cache of 0 is none."""

    cache: int = 0
    result: int = 1024
    work: int = 4096


def made_up(
    weights: Sequence[int],
    costs: Costs = Costs(),
    *,
    tied_to: Mapping[int, int] = MappingProxyType({}),
    max_context_tokens: int | None = None,
) -> Profile:
    """A profile whose blocks hold weights of so many bytes; blocks of equal weight are alike.

    A block makes something to work with, its cache anew, and its result; then it drops the work,
    the old cache and the result of the block before. The first and the last one have no cache.
    """
    kinds: dict[BlockKind, int] = {}
    blocks = []
    for index, size in enumerate(weights):
        traces = [_trace(index, len(weights), phase, costs) for phase in PHASES]
        kind = BlockKind(
            weight_bytes=() if index in tied_to else (size,),
            traces=tuple(trace for trace in traces for _ in (False, True)),
        )
        number = kinds.setdefault(kind, len(kinds))
        tied = tied_to.get(index)
        streams = tied is None and index not in tied_to.values()
        name = f"block.{index}"
        blocks.append(ProfileBlock(modules=(name,), kind=number, tied_to=tied, streams=streams))
    return Profile(
        fingerprint="made up",
        model="MadeUp",
        dtype="bfloat16",
        blocks=tuple(blocks),
        kinds=tuple(kinds),
        regimes=tuple(
            Regime(phase=phase, is_batched=pads) for phase in PHASES for pads in (False, True)
        ),
        max_context_tokens=max_context_tokens,
        tensor_names=tuple((name,) for name in _weight_names(weights, tied_to)),
    )


def _weight_names(weights: Sequence[int], tied_to: Mapping[int, int]) -> list[NamedTensor]:
    return [
        NamedTensor(
            name=f"block.{index}.weight",
            num_bytes=0 if index in tied_to else size,
            tied_to=f"block.{tied_to[index]}.weight" if index in tied_to else "",
        )
        for index, size in enumerate(weights)
    ]


def _trace(index: int, num_blocks: int, phase: Phase, costs: Costs) -> AllocationTrace:
    keeps = bool(costs.cache) and 0 < index < num_blocks - 1
    cache = [rule(bk=costs.cache)] if keeps else []
    sizes = [rule(bq=costs.work), *cache, rule(bq=costs.result)]
    events: list[Ref | None] = [None] * len(sizes)
    events.append(Ref(origin="own", index=0))
    if keeps and phase != "prefill":
        events.append(Ref(origin="kept", index=0))
    given = Ref(origin="input", index=0)
    if index > 0:
        given = Ref(origin="earlier", index=2 if costs.cache and index > 1 else 1, back=1)
        events.append(given)
    if index == num_blocks - 1:
        events.append(Ref(origin="own", index=len(sizes) - 1))
    return AllocationTrace(
        sizes=tuple(sizes),
        events=tuple(events),
        retained=(1,) if keeps else (),
        reads=(Read(ref=given, size=rule(bq=costs.result)),) if index > 0 else (),
        matmul_at=len(sizes) if keeps else None,
        flops=rule(bq=1000.0),
        moved_bytes=rule(bq=10.0),
    )


def fleet(*budgets_mib: float) -> Fleet:
    """Virtual GPUs of so many MiB."""
    text = ",".join(f"{round(budget * 1024)}KiB" for budget in budgets_mib)
    return Fleet.parse(f"virtual:{text}")
