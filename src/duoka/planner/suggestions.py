"""Suggestions: changes that make a workload fit, each proved by a plan of the ordinary search.

The order is by cost in quality: fewer tokens, smaller prefill chunks, a smaller batch, a cache and
weights in fewer bits, weights in CPU memory, another GPU. Two changes are combined only if one
alone doesn't fit. Each suggestion has the command-line options to request it, and the numbers of
the plan for these options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from duoka.base.units import format_bytes
from duoka.errors import DuokaError, WayOut
from duoka.forecast.profile import Profile
from duoka.forecast.workload import DTYPE_BYTES, Training, Workload
from duoka.hardware.host import host_device

from .command_line import change
from .gpu_upgrades import upgrades
from .limits import fleet_for, host_of
from .plan import Plan
from .request import Largest, PlanProblem, PlanRequest
from .solve import is_conceivable, solve

ProfileFor = Callable[[Workload], Profile | None]
"""A function that returns the profile for a workload; None if it can't provide one."""

_BITS = {"int8": 8, "int4": 4, "nf4": 4}
_USUAL_RANK = Training().lora_rank
_QUALITY = "some accuracy (`duoka bench --quality FILE{}` measures it)"
_WEIGHTS = "{bits}-bit weights ({scheme}): {weights} instead of {unquantized}", _QUALITY
_MOST_HOST_BYTES = 2**42
_HOST_STEP_BYTES = 8 * 2**30  # a suggested size of host memory is a multiple of it
# For each kind of change: the text, with placeholders for numbers of the plan, and the loss.
_KNOBS = {
    "context": ("{context}", ""),
    "chunk": ("{chunk}", "slightly more time to the first token"),
    "batch": ("a batch of {batch}", ""),
    "pages": ("a paged KV cache, as in generate and chat", ""),
    "cache": ("an 8-bit KV cache", _QUALITY),
    **dict.fromkeys(_BITS, _WEIGHTS),
    "offload": (
        "{host} of weights offloaded to CPU memory, copied over PCIe for each token{time}",
        "speed",
    ),
    "experts": ("{host_experts} of experts in host memory{weights_in}{token_time}", "speed"),
    "map": ("duoka's plan instead of the map: {devices}", ""),
    "micro-batch": ("a micro-batch of {batch}", ""),
    "checkpointed-batch": ("gradient checkpointing and a micro-batch of {batch}", ""),
    "checkpointing": ("gradient checkpointing", "about a third of the speed"),
    "adamw8bit": ("AdamW with 8-bit states", "slightly less accurate optimizer states"),
    "adafactor": ("Adafactor instead of AdamW", "less accurate optimizer states"),
    "rank": ("LoRA rank {rank} instead of {requested_rank}", "less capacity"),
    "lora": ("LoRA instead of full training", "less capacity than full training"),
}
# Kinds of changes that have another name in a suggestion's `kind`.
_KINDS = {
    "micro-batch": "batch", "checkpointed-batch": "batch",
    "adamw8bit": "optimizer", "adafactor": "optimizer",
}  # fmt: skip


# Each suggestion is the request with one property changed, and is yielded only if the planner finds
# a plan for it; its numbers are those of that plan. Some changes have a second try, with another
# change beside the first. Example: 8192 tokens of a 26 GiB model (16 bit) on one GPU of 20 GiB.
#
#   knob       tried in this order                                    result
#   context    the longest context that fits                          none: the weights don't fit
#   cache      an int8 cache                                          none
#   int8       int8 weights                                           a plan: suggested
#   int4       int4 weights                                           a plan: suggested
#   offload    as few weights in the host's memory as possible        a plan: suggested
#   gpu        one more card; a larger card; more of the same kind    the smallest of each
@dataclass(eq=False)
class SuggestionSearch:
    """The search for suggestions for a problem without a plan.

    `profile_for` returns the profile for a changed workload, and raises an error if the model
    doesn't support the workload. By default only changes that the given profile covers are tried.
    The options of suggestions are relative to `request`, by default the problem's.
    """

    profile: Profile
    problem: PlanProblem
    profile_for: ProfileFor | None = None
    request: PlanRequest | None = None

    def __post_init__(self) -> None:
        self._request = self.request or self.problem.request
        self._workload = self.problem.workload
        self._profile_for = self.profile_for or self._own_profile

    def run(self) -> Iterator[WayOut]:
        """Yield the suggestions, cheapest for quality first."""
        if self._workload.training is None:
            yield from self._change_generation()
        else:
            yield from self._change_training(self._workload.training)
            yield from self._shorten()
        if self.problem.device_map is not None:
            yield from self._drop_map()
        else:
            for upgrade in upgrades(self.problem, self._plan):
                yield self._suggestion("gpu", upgrade.plan, text=upgrade.text)

    # ── fewer tokens, fewer bits, other memory ──

    def _change_generation(self) -> Iterator[WayOut]:
        """Suggest fewer tokens, smaller chunks or batches, fewer bits, or offloaded weights."""
        # Each `_try` suggests the first of its problems with a plan: the change alone, then with
        # another chunk, then with a smaller cache. Quantized weights are combined with a shorter
        # context only if no context fits without them.
        has_own_cache = self._workload.images or self.problem.constraints.offload
        if self._workload.cache == "dynamic" and not has_own_cache:
            paged: dict[str, Any] = {"cache": "paged", "pages_for_batch": True}
            yield from self._try("pages", *self._with_any_chunk(**paged))
        shorter = list(self._shorten())
        yield from shorter
        if self._workload.prefill_chunk_tokens != "auto":
            yield from self._try("chunk", self._change(prefill_chunk_tokens="auto"))
        yield from self._shrink_batch("batch", self.problem)
        cache = "paged-int8" if self._workload.is_paged else "int8"
        with_cache: dict[str, Any] = {} if self._workload.has_int8_cache else {"cache": cache}
        if with_cache:
            yield from self._try("cache", *self._with_any_chunk(**with_cache))
        for scheme in self._smaller_schemes():
            problems = [
                *self._with_any_chunk(quantize=scheme),
                *self._with_any_chunk(quantize=scheme, **with_cache),
            ]
            if not shorter and problems[0].largest is None and problems[0].device_map is None:
                problems.append(replace(problems[0], largest="context"))
            yield from self._try(scheme, *dict.fromkeys(problems))
        yield from self._keep_experts_on_host()
        # `--serve` refuses offloaded weights: a suggestion must work when followed.
        if not self._workload.is_paged or self._workload.pages_for_batch:
            yield from self._offload()

    def _shorten(self) -> Iterator[WayOut]:
        """Suggest the longest context that fits."""
        problem = self.problem
        if problem.largest == "context" or problem.device_map is not None:
            return  # the shortest context was tried; with a map, no size is searched
        batch = 1 if problem.largest == "batch" else self._workload.batch
        yield from self._try("context", self._change(batch=batch), largest="context")

    def _shrink_batch(self, knob: str, problem: PlanProblem) -> Iterator[WayOut]:
        """Suggest the largest batch that fits, under the name `knob`; in training micro-batch."""
        workload, training = problem.workload, problem.workload.training
        if problem.largest is not None or problem.device_map is not None or workload.batch == 1:
            return
        if training is None:
            yield from self._try(knob, problem, largest="batch")
            return
        # An optimizer step has as many sequences as before.
        total = workload.batch * training.micro_batches
        step = 2 if training.dpo else 1
        smaller = [size for size in range(workload.batch - step, 0, -step) if total % size == 0]
        changes = [(size, replace(training, micro_batches=total // size)) for size in smaller]
        works = [replace(workload, batch=size, training=change) for size, change in changes]
        yield from self._try(knob, *(replace(problem, workload=work) for work in works))

    def _smaller_schemes(self) -> list[str]:
        """Return the schemes with fewer bits than the requested quantization, most bits first."""
        schemes = ["none", "int8", "int4" if self._workload.training is None else "nf4"]
        requested = self._workload.quantize
        return schemes[schemes.index(requested) + 1 :] if requested in schemes else []

    def _with_any_chunk(self, **changes: Any) -> list[PlanProblem]:
        """Return the changed problem; if it sets a prefill chunk, also one with an "auto" chunk."""
        problems = [self._change(**changes)]
        if self._workload.prefill_chunk_tokens != "auto":
            problems.append(self._change(prefill_chunk_tokens="auto", **changes))
        return problems

    def _keep_experts_on_host(self) -> Iterator[WayOut]:
        """Suggest host memory for experts, with the fewest bits, where its size is unknown."""
        problem, can_quantize = self.problem, "int4" in self._smaller_schemes()
        if host_of(problem) is not None or problem.device_map or problem.largest:
            return
        changed = self._change(quantize="int4") if can_quantize else problem
        plan = self._plan(replace(changed, host=host_device(_MOST_HOST_BYTES)))
        if plan is not None and plan.host_experts:
            size = -(-plan.forecast.expert_bytes // _HOST_STEP_BYTES) * _HOST_STEP_BYTES
            yield from self._try("experts", replace(changed, host=host_device(size)))

    def _offload(self) -> Iterator[WayOut]:
        """Suggest offloading as few weights to CPU memory as possible."""
        cache = self._workload.cache.removeprefix("paged-")
        problem = self._change(cache="dynamic" if cache == "paged" else cache)
        if problem.constraints.offload or problem.device_map or problem.largest:
            return  # a search for the largest size takes minutes here
        constraints = replace(problem.constraints, offload=True)
        try:
            fleet = fleet_for(problem.fleet, None, offload=True, host=problem.host)
        except DuokaError:
            return  # the size of the CPU memory is unknown
        yield from self._try("offload", replace(problem, fleet=fleet, constraints=constraints))

    def _drop_map(self) -> Iterator[WayOut]:
        """Suggest duoka's own plan instead of the device map, or other changes without the map."""
        problem = replace(self.problem, device_map=None)
        # If the planner has no plan without the map either, a separate search for suggestions
        # follows; each of its suggestions also leaves out the map.
        suggestions = [*self._try("map", problem)]
        if not suggestions:
            search = SuggestionSearch(self.profile, problem, self._profile_for, self._request)
            suggestions = [
                replace(way, text=f"{way.text}, with duoka's plan instead of the map")
                for way in search.run()
            ]
        for way in suggestions:
            yield replace(way, without=(*way.without, "--device-map"))

    # ── training ──

    def _change_training(self, training: Training) -> Iterator[WayOut]:
        """Suggest trainings that need less memory, as with smaller micro-batches or LoRA."""
        # In this order: smaller micro-batches, gradient checkpointing, both of them if neither is
        # enough; optimizers with smaller states; a smaller LoRA rank; LoRA instead of all weights;
        # quantized weights with LoRA. `single_change` is True if one of the first three fits: the
        # later changes, which cost accuracy, are then tried without gradient checkpointing.
        recomputing = replace(training, gradient_checkpointing=True)
        ways = list(self._shrink_batch("micro-batch", self.problem))
        if recomputing != training:
            ways += self._try("checkpointing", self._change(training=recomputing))
        if not ways and recomputing != training:
            ways += self._shrink_batch("checkpointed-batch", self._change(training=recomputing))
        yield from ways
        single_change = bool(ways)
        if training.optimizer == "adamw":
            smaller = self._train(
                "adamw8bit", replace(training, optimizer="adamw8bit"), single_change
            )
            yield from list(smaller) or self._train(
                "adafactor", replace(training, optimizer="adafactor"), single_change
            )
        if training.method == "lora" and training.lora_rank > _USUAL_RANK:
            yield from self._train("rank", replace(training, lora_rank=_USUAL_RANK), single_change)
        adapted: list[WayOut] = []
        if training.method != "lora":
            # From here on the training is LoRA, for which it is unknown if a single change fits.
            training, single_change = replace(training, method="lora"), False
            adapted = list(self._train("lora", training, single_change))
            yield from adapted
        for scheme in () if adapted else self._smaller_schemes():
            yield from self._train(scheme, training, single_change, quantize=scheme)

    def _train(
        self, knob: str, training: Training, single_change: bool, **changes: Any
    ) -> Iterator[WayOut]:
        """Suggest another training; unless `single_change`, with checkpointing if needed to fit."""
        problems = [self._change(training=training, **changes)]
        if not single_change and not training.gradient_checkpointing:
            recomputing = replace(training, gradient_checkpointing=True)
            problems.append(self._change(training=recomputing, **changes))
        yield from self._try(knob, *problems)

    # ── asking the planner ──

    def _change(self, **changes: Any) -> PlanProblem:
        """Return the problem with changed fields of its workload."""
        return replace(self.problem, workload=replace(self._workload, **changes))

    def _try(
        self, knob: str, *problems: PlanProblem, largest: Largest | None = None
    ) -> Iterator[WayOut]:
        """Yield a suggestion for the first of the problems that has a plan, or nothing.

        `largest` maximizes the context or the batch instead of taking the problem's.
        """
        for problem in problems:
            plan = self._plan(replace(problem, largest=largest) if largest else problem)
            if plan is not None:
                yield self._suggestion(knob, plan)
                return

    def _plan(self, problem: PlanProblem) -> Plan | None:
        """Plan; return None if nothing fits, or the model or the GPUs don't support the problem."""
        # From cheap to expensive: the bits of the weights, lower bounds (whose profile may have to
        # be traced), the search with its replays.
        if self._exceeds_budgets(problem):
            return None
        try:
            profile = self._profile_for(problem.workload)
            if profile is None:
                return None
            # The page size may change with the cache and the GPUs.
            work = replace(problem.workload, page_tokens=profile.conditions.page_tokens)
            problem = replace(problem, workload=work)
            if not is_conceivable(profile, problem):
                return None
            return solve(profile, problem) or None
        except DuokaError:
            return None

    def _exceeds_budgets(self, problem: PlanProblem) -> bool:
        """Return True if the weights alone exceed the budgets of all devices together.

        The bound needs no profile of the changed workload, because a weight takes at least the bits
        of its scheme. So a model that can't fit isn't traced.
        """
        # The profile has `bits` per weight; in the problem's scheme a weight has at least
        # `least_bits`. Example: 26 GiB in 16 bit on a budget of 8 GiB. int8: 26 x 8 > 8 x 16, ruled
        # out; int4: 26 x 4 <= 8 x 16, to be traced.
        trained = self._workload.training
        if trained is not None and trained.master_weights and trained.method == "full":
            return False  # the profile has 32-bit weights, which the changed problem may not have
        if problem.constraints.offload or problem.device_map is not None:
            return False
        if problem.constraints.experts != "gpu" and host_of(problem) is not None:
            return False
        bits = _BITS.get(self._workload.quantize, 8 * DTYPE_BYTES.get(self.profile.dtype, 8))
        least_bits = min(bits, _BITS.get(problem.workload.quantize, bits))
        return self.profile.weight_bytes * least_bits > problem.fleet.budget_bytes * bits

    def _own_profile(self, workload: Workload) -> Profile | None:
        return self.profile if workload.conditions == self.profile.conditions else None

    # ── describing a plan ──

    def _suggestion(self, knob: str, plan: Plan, *, text: str = "") -> WayOut:
        """Return the suggestion of a plan: its numbers, and the options that request it."""
        workload = plan.workload
        words, cost = _KNOBS.get(knob, (text, ""))
        options = f" --quantize {knob}" if knob in _BITS else ""
        is_rounded = workload.has_int8_cache and not self._workload.has_int8_cache
        options += " --cache int8" if is_rounded else ""
        chunk = workload.prefill_chunk_tokens
        added_words, without = change(self._request, self._requested(plan))
        return WayOut(
            kind=_KINDS.get(knob, knob),
            text=words.format_map(self._values(plan)) + self._describe_rest(knob, plan),
            loses=cost.format(options),
            options=added_words,
            without=without,
            context_tokens=workload.context_tokens,
            batch=workload.batch,
            prefill_chunk_tokens=chunk if isinstance(chunk, int) else None,
            num_gpus=len(plan.devices),
            free_bytes=min(stage.free_bytes for stage in plan.forecast.devices),
        )

    def _describe_rest(self, knob: str, plan: Plan) -> str:
        """Describe the changes besides that of the knob, and the largest size if requested."""
        workload, requested = plan.workload, self._workload
        text = ""
        if workload.training is not None and requested.training is not None:
            if knob != "lora" and workload.training.method != requested.training.method:
                text += ", trained with LoRA"
            if not knob.startswith("checkpoint") and (
                workload.training.gradient_checkpointing > requested.training.gradient_checkpointing
            ):
                text += ", with gradient checkpointing"
        largest = self.problem.largest
        if knob in _BITS and plan.request.largest != largest:
            text += f", and {_describe_context(workload)}"
        if knob != "cache" and workload.has_int8_cache and not requested.has_int8_cache:
            text += ", an 8-bit KV cache"
        if knob != "chunk" and requested.prefill_chunk_tokens not in (
            "auto",
            workload.prefill_chunk_tokens,
        ):
            text += f", and {_describe_chunk(workload)}"
        if largest == "batch" == plan.request.largest:
            text += f"; then the largest batch is {workload.batch}"
        if largest == "context" == plan.request.largest:
            text += f"; then the longest context is {workload.context_tokens} tokens"
        return text

    def _values(self, plan: Plan) -> dict[str, object]:
        """Return the values of the placeholders in the texts of `_KNOBS`."""
        workload, requested = plan.workload, self._workload.training or Training()
        stages, seconds = plan.forecast.devices, plan.forecast.copy_seconds
        return {
            "context": _describe_context(workload),
            "chunk": _describe_chunk(workload),
            "batch": workload.batch // (2 if requested.dpo else 1),
            "bits": _BITS.get(workload.quantize),
            "scheme": workload.quantize,
            "weights": format_bytes(sum(stage.weight_bytes for stage in stages)),
            "unquantized": format_bytes(self.profile.weight_bytes),
            "host": format_bytes(plan.forecast.host_bytes),
            "host_experts": format_bytes(plan.forecast.expert_bytes),
            "weights_in": "" if workload.quantize == "none" else f", {workload.quantize} weights",
            "token_time": _describe_speed(plan),
            "time": f", about {seconds:.2g} s" if seconds else ", limited by the link",
            "devices": ", ".join(
                f"{stage.device} {format_bytes(stage.requested_bytes)} of "
                f"{format_bytes(stage.budget_bytes)}"
                for stage in stages
            ),
            "rank": _USUAL_RANK,
            "requested_rank": requested.lora_rank,
        }

    def _requested(self, plan: Plan) -> PlanRequest:
        """Return the request for a suggested plan, with numbers instead of a size to maximize."""
        # Example: a request for the largest batch, with a plan for the longest context. The command
        # to paste gives both numbers of the plan, so that it needs no search. A dtype or a prefill
        # chunk that the request left "auto" stays "auto".
        original, changed = self._request, plan.request
        workload = changed.workload
        if changed.largest != original.largest:
            changed, workload = replace(changed, largest=None), plan.workload
        chunk: int | Literal["auto"] | None = "auto"
        if original.workload.prefill_chunk_tokens != "auto":
            chunk = plan.workload.prefill_chunk_tokens
        workload = replace(workload, dtype=original.workload.dtype, prefill_chunk_tokens=chunk)
        return replace(changed, workload=workload, trust_remote_code=original.trust_remote_code)


def _describe_speed(plan: Plan) -> str:
    """Describe the forecast speed of one request, if known."""
    seconds = plan.forecast.seconds and plan.forecast.seconds.token_seconds
    return f", about {1 / seconds:.2g} tokens/s" if seconds else ""


def _describe_chunk(workload: Workload) -> str:
    chunk = workload.prefill_chunk_tokens
    return "prefill in a single pass" if chunk is None else f"prefill in chunks of {chunk} tokens"


def _describe_context(workload: Workload) -> str:
    if workload.training is not None:
        return f"sequences of {workload.prompt_tokens} tokens"
    return f"a context of {workload.context_tokens} tokens, {workload.new_tokens} of them new"
