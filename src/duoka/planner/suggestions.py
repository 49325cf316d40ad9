"""Suggestions: what would fit where nothing does, each found by the search that would plan it.

The ways that cost least quality come first: fewer tokens, smaller pieces of the prompt, a smaller
batch, a cache and weights of fewer bits, weights in the host's memory, another GPU. Two are taken
together only where one alone won't do. Each carries the arguments of the command line that ask for
it, and the numbers of the plan that this makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal

from duoka.base.units import format_bytes
from duoka.errors import DuokaError, WayOut
from duoka.forecast.profile import Profile
from duoka.forecast.workload import DTYPE_BYTES, Optimizer, Training, Workload

from .command_line import change
from .gpu_upgrades import upgrades
from .limits import fleet_for
from .modes import attempt, conceivable
from .plan import Plan
from .request import PlanProblem, PlanRequest

ProfileFor = Callable[[Workload], Profile | None]
"""The profile for a workload; None where there is none."""

_CACHE = " --cache int8"
_BITS = {"int8": 8, "int4": 4, "nf4": 4}
_USUAL_RANK = Training().lora_rank
_QUALITY = "some accuracy: `duoka bench --quality FILE{}` measures it on your text"


class WaysOut:
    """The search for ways out of one problem that has no plan.

    For a workload that the model can't do `profile_for` raises an error; without it the one profile
    is all there is. The ways change the `request`, by default the problem's.
    """

    def __init__(
        self,
        profile: Profile,
        problem: PlanProblem,
        profile_for: ProfileFor | None = None,
        request: PlanRequest | None = None,
    ) -> None:
        self._profile = profile
        self._problem = problem
        self._request = request or problem.request
        self._workload = problem.workload
        self._profile_for = profile_for or self._own_profile

    def search(self) -> Iterator[WayOut]:
        """The ways, cheapest for quality first."""
        if self._workload.training is None:
            context = list(self._context())
            yield from context
            yield from self._chunk()
            yield from self._batch("a batch", self._workload)
            yield from self._fewer_bits(shorten=not context)
            yield from self._offload()
        else:
            yield from self._trained_otherwise()
            yield from self._context()
        if self._problem.device_map is not None:
            yield from self._without_map()
        else:
            for upgrade in upgrades(self._problem, self._conceivable, self._plan):
                yield self._way("gpu", upgrade.text, upgrade.plan)

    # ── fewer tokens, smaller pieces ──

    def _context(self) -> Iterator[WayOut]:
        problem = self._problem
        if problem.largest == "context" or problem.device_map is not None:
            return  # the shortest was tried; with a map, nothing is looked for
        batch = 1 if problem.largest == "batch" else self._workload.batch
        plan = self._plan(
            replace(problem, largest="context", workload=replace(self._workload, batch=batch))
        )
        if plan is not None:
            yield self._way("context", _context_text(plan), plan)

    def _chunk(self) -> Iterator[WayOut]:
        if self._workload.prefill_chunk_tokens == "auto":
            return
        plan = self._plan(self._of(replace(self._workload, prefill_chunk_tokens="auto")))
        if plan is not None:
            loses = "nothing but a little time before the first token"
            yield self._way("chunk", _chunk_text(plan), plan, loses=loses)

    def _batch(self, what: str, workload: Workload) -> Iterator[WayOut]:
        problem = self._problem
        if problem.largest is not None or problem.device_map is not None:
            return
        if self._workload.batch > 1:
            plan = self._plan(replace(self._of(workload), largest="batch"))
            if plan is not None:
                yield self._way("batch", f"{what} of {plan.workload.batch}", plan)

    # ── fewer bits ──

    def _fewer_bits(self, *, shorten: bool) -> Iterator[WayOut]:
        """In a cache, in weights, in both; of fewer tokens too, where fewer alone won't do."""
        keeps_cache = self._workload.has_int8_cache
        if not keeps_cache:
            plan = self._plan_or_chunked(self._of(_in_int8(self._workload)))
            if plan is not None:
                text = f"the KV cache in 8 bit{self._pieces(plan)}"
                yield self._way("cache", text, plan, loses=_QUALITY.format(_CACHE))
        for scheme in _smaller(self._workload):
            workload = replace(self._workload, quantize=scheme)
            smaller = both = self._of(workload)
            if not keeps_cache:
                both = self._of(_in_int8(workload))
            for problem in dict.fromkeys((smaller, both)):
                plan = self._plan_or_chunked(problem)
                if plan is not None:
                    yield self._quantized(scheme, plan)
                    break
            else:
                if shorten and smaller.largest is None and smaller.device_map is None:
                    plan = self._plan(replace(smaller, largest="context"))
                    if plan is not None:
                        yield self._quantized(scheme, plan, f", and {_context_text(plan)}")

    def _quantized(self, scheme: str, plan: Plan, more: str = "") -> WayOut:
        weights = sum(stage.weight_bytes for stage in plan.forecast.devices)
        cache = "" if plan.workload.cache == self._workload.cache else _CACHE
        if cache:
            more += ", and the KV cache in 8 bit"
        text = (
            f"weights in {_BITS[scheme]} bit ({scheme}): {format_bytes(weights)} "
            f"instead of {format_bytes(self._profile.weight_bytes)}{more}{self._pieces(plan)}"
        )
        return self._way(scheme, text, plan, loses=_QUALITY.format(f" --quantize {scheme}{cache}"))

    # ── what training may do without ──

    def _trained_otherwise(self) -> Iterator[WayOut]:
        training = self._workload.training
        assert training is not None
        again = replace(training, gradient_checkpointing=True)
        ways = list(self._batch("a micro-batch", self._workload))
        if again != training:
            text = "activations that are computed again in the backward pass"
            ways += self._learning("checkpointing", text, again, "about a third of the speed")
        if not ways and again != training:
            workload = replace(self._workload, training=again)
            ways += self._batch("activations computed again, and a micro-batch", workload)
        yield from ways
        yield from self._trained_with_less(training, alone=bool(ways))
        if training.method == "lora":
            yield from self._beside_quantized(training, alone=bool(ways))
            return
        lora = replace(training, method="lora", master_weights=False)
        text = "low-rank adapters (LoRA) instead of all weights"
        adapted = list(self._learning("lora", text, lora, "what adapters can't learn"))
        yield from adapted or self._beside_quantized(lora, alone=False)

    def _trained_with_less(self, training: Training, *, alone: bool) -> Iterator[WayOut]:
        """Smaller states of the optimizer, and smaller adapters."""
        if training.optimizer == "adamw":
            less: tuple[tuple[Optimizer, str, str], ...] = (
                ("adamw8bit", "AdamW with states in 8 bit", "a little of what AdamW remembers"),
                ("adafactor", "Adafactor instead of AdamW", "some of what AdamW learns"),
            )
            for name, text, loses in less:
                other = replace(training, optimizer=name)
                if ways := list(self._learning("optimizer", text, other, loses, alone=alone)):
                    yield from ways
                    break
        if training.method == "lora" and training.lora_rank > _USUAL_RANK:
            smaller = replace(training, lora_rank=_USUAL_RANK)
            text = f"adapters of rank {_USUAL_RANK} instead of {training.lora_rank}"
            yield from self._learning("rank", text, smaller, "what larger ones learn", alone=alone)

    def _learning(
        self, kind: str, text: str, training: Training, loses: str, *, alone: bool = False
    ) -> Iterator[WayOut]:
        """Training in another way; where that won't do, and unless `alone`, checkpointed too."""
        plan, more = self._plan_or_again(replace(self._workload, training=training), alone=alone)
        if plan is not None:
            yield self._way(kind, text + more, plan, loses=loses)

    def _beside_quantized(self, lora: Training, *, alone: bool) -> Iterator[WayOut]:
        adapters = (
            "" if lora == self._workload.training else ", with low-rank adapters (LoRA) to train"
        )
        for scheme in _smaller(self._workload):
            workload = replace(self._workload, training=lora, quantize=scheme)
            plan, more = self._plan_or_again(workload, alone=alone)
            if plan is not None:
                yield self._quantized(scheme, plan, adapters + more)

    def _plan_or_again(self, workload: Workload, *, alone: bool) -> tuple[Plan | None, str]:
        """The plan; unless `alone`, one with activations computed again, which the text says."""
        training, plan = workload.training, self._plan(self._of(workload))
        if plan is not None or alone or training is None or training.gradient_checkpointing:
            return plan, ""
        training = replace(training, gradient_checkpointing=True)
        plan = self._plan(self._of(replace(workload, training=training)))
        return plan, ", and activations that are computed again"

    # ── other memory ──

    def _offload(self) -> Iterator[WayOut]:
        problem = self._problem
        if problem.constraints.offload or problem.device_map is not None:
            return
        if problem.largest is not None:
            return  # a size that is sought takes minutes here
        constraints = replace(problem.constraints, offload=True)
        try:
            fleet = fleet_for(problem.fleet, None, offload=True)
        except DuokaError:
            return  # how much memory the host has isn't known
        plan = self._plan(replace(problem, fleet=fleet, constraints=constraints))
        if plan is None:
            return
        seconds = plan.forecast.copy_seconds
        took = f", about {seconds:.2g} s" if seconds else ", which takes as long as the link needs"
        text = (
            f"{format_bytes(plan.forecast.host_bytes)} of weights in the CPU's memory, which go "
            f"over PCIe for each token{took}"
        )
        yield self._way("offload", text, plan, loses="speed")

    def _without_map(self) -> Iterator[WayOut]:
        problem = replace(self._problem, device_map=None)
        plan = self._plan(problem)
        if plan is not None:
            sizes = ", ".join(
                f"{stage.device} {format_bytes(stage.requested_bytes)} of "
                f"{format_bytes(stage.budget_bytes)}"
                for stage in plan.forecast.devices
            )
            text = f"duoka's own plan instead of the map: {sizes}"
            yield replace(self._way("map", text, plan), without=("--device-map",))
            return
        for way in WaysOut(self._profile, problem, self._profile_for, self._request).search():
            text = f"{way.text}, with duoka's own plan instead of the map"
            yield replace(way, text=text, without=(*way.without, "--device-map"))

    # ── asking the planner ──

    def _of(self, workload: Workload) -> PlanProblem:
        """The problem about another workload."""
        return replace(self._problem, workload=workload)

    def _plan_or_chunked(self, problem: PlanProblem) -> Plan | None:
        """The plan; with another chunk of the prompt where the one that was asked for won't do."""
        plan = self._plan(problem)
        if plan is None and problem.workload.prefill_chunk_tokens != "auto":
            workload = replace(problem.workload, prefill_chunk_tokens="auto")
            plan = self._plan(replace(problem, workload=workload))
        return plan

    def _plan(self, problem: PlanProblem) -> Plan | None:
        """The plan; none where that can't be asked of this model or these GPUs."""
        try:
            profile = self._profile_of(problem)
            return None if profile is None else attempt(profile, problem)
        except DuokaError:
            return None

    def _conceivable(self, problem: PlanProblem) -> bool:
        try:
            return self._profile_of(problem) is not None
        except DuokaError:
            return False

    def _profile_of(self, problem: PlanProblem) -> Profile | None:
        """The profile for a problem; none where its bounds leave no plan possible."""
        if self._outweighs(problem):
            return None
        profile = self._profile_for(problem.workload)
        return profile if profile is not None and conceivable(profile, problem) else None

    def _outweighs(self, problem: PlanProblem) -> bool:
        """Whether the weights alone are too many bytes for all devices together.

        That is known without a profile of their own: no weight gets smaller than the bits of its
        scheme. It saves the trace of a model that can't fit anyway.
        """
        workload = problem.workload
        trained = self._workload.training
        if trained is not None and trained.master_weights and trained.method == "full":
            return False  # its weights are in 32 bit, and others needn't be
        if problem.constraints.offload or problem.device_map is not None:
            return False
        bits = _BITS.get(self._workload.quantize, 8 * DTYPE_BYTES.get(self._profile.dtype, 8))
        least_bits = min(bits, _BITS.get(workload.quantize, bits))
        budget_bytes = sum(device.budget_bytes for device in problem.fleet.devices)
        return self._profile.weight_bytes * least_bits > budget_bytes * bits

    def _own_profile(self, workload: Workload) -> Profile | None:
        same = workload.conditions == self._profile.conditions
        return self._profile if same else None

    def _pieces(self, plan: Plan) -> str:
        """What is to be said of a chunk that wasn't asked for."""
        chunk = self._workload.prefill_chunk_tokens
        if chunk in ("auto", plan.workload.prefill_chunk_tokens):
            return ""
        return f", and {_chunk_text(plan)}"

    def _way(self, kind: str, text: str, plan: Plan, *, loses: str = "") -> WayOut:
        """A way with the numbers of its plan, and what its command line has to say."""
        workload, largest = plan.workload, self._problem.largest
        if largest is not None and plan.request.largest == largest:
            text += f"; then {_size(plan, largest)}"
        chunk = workload.prefill_chunk_tokens
        options, without = change(self._request, self._requested(plan))
        return WayOut(
            kind=kind,
            text=text,
            loses=loses,
            options=options,
            without=without,
            context_tokens=workload.context_tokens,
            batch=workload.batch,
            prefill_chunk_tokens=chunk if isinstance(chunk, int) else None,
            num_gpus=len(plan.devices),
            free_bytes=min(stage.free_bytes for stage in plan.forecast.devices),
        )

    def _requested(self, plan: Plan) -> PlanRequest:
        """What asks for a way's plan: numbers instead of the largest, where this asks for it."""
        original, changed = self._request, plan.request
        workload = changed.workload
        if changed.largest != original.largest:
            changed, workload = replace(changed, largest=None), plan.workload
        chunk: int | Literal["auto"] | None = "auto"
        if original.workload.prefill_chunk_tokens != "auto":
            chunk = plan.workload.prefill_chunk_tokens
        workload = replace(workload, dtype=original.workload.dtype, prefill_chunk_tokens=chunk)
        return replace(changed, workload=workload, trust_remote_code=original.trust_remote_code)


def _smaller(workload: Workload) -> tuple[Literal["int8", "int4", "nf4"], ...]:
    """What weights may still become, the most bits first."""
    least: Literal["int4", "nf4"] = "int4" if workload.training is None else "nf4"
    if workload.quantize == "none":
        return ("int8", least)
    return (least,) if workload.quantize == "int8" else ()


def _in_int8(workload: Workload) -> Workload:
    """The workload with a cache of 8 bit, in pages if it has them."""
    return replace(workload, cache="paged-int8" if workload.is_paged else "int8")


def _size(plan: Plan, largest: str) -> str:
    if largest == "batch":
        return f"the largest batch is {plan.workload.batch}"
    return f"the longest context is {plan.workload.context_tokens} tokens"


def _chunk_text(plan: Plan) -> str:
    chunk = plan.workload.prefill_chunk_tokens
    return (
        "the whole prompt at once" if chunk is None else f"the prompt in pieces of {chunk} tokens"
    )


def _context_text(plan: Plan) -> str:
    workload = plan.workload
    if workload.training is not None:
        return f"sequences of {workload.prompt_tokens} tokens"
    return f"a context of {workload.context_tokens} tokens, {workload.new_tokens} of them new"
