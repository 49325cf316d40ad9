"""What a token of context takes in the KV cache, layer by layer."""

from __future__ import annotations

from duoka.forecast.profile import Profile, evaluate, monomials
from duoka.forecast.tensor_names import layer_of
from duoka.planner.plan import Plan

from .stages import Pipeline


def layer_token_bytes(plan: Plan, profile: Profile | None, pipeline: Pipeline) -> list[int] | None:
    """Bytes of one sequence's cache in each layer, for a token of the plan's context.

    None where they aren't known: without a profile, for training, and where the cache isn't the
    plain one that grows token by token.
    """
    workload = plan.workload
    if profile is None or workload.training is not None or workload.cache != "dynamic":
        return None
    tokens = workload.context_tokens
    values = monomials(1, 1, tokens)
    steps = [
        index
        for index, regime in enumerate(profile.regimes)
        if regime.holds("decode", batch=1, query=1, keys=tokens)
    ]
    if not steps:
        return None
    found = [0] * pipeline.num_layers
    for block in profile.blocks:
        tape = profile.kinds[block.kind].tapes[steps[0]]
        kept = sum(evaluate(tape.sizes[number], values) for number in tape.retained)
        at = layer_of(block.modules[0]) if block.modules else None
        if at is not None and at[0] == pipeline.layers:
            found[at[1]] += kept
    return [-(-size // tokens) for size in found]
