"""Suggestions: alternatives where nothing fits, each planned by the ordinary search.

The suggestions that cost least quality come first: fewer tokens, smaller prefill chunks, a smaller
batch, a cache and weights of fewer bits, weights in the host's memory, another GPU. Two changes are
combined only where one alone doesn't fit. Each suggestion carries the arguments of the command line
that ask for it, and the numbers of the plan that they make.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal

from duoka.base.units import format_bytes
from duoka.errors import DuokaError, WayOut
from duoka.forecast.profile import Profile
from duoka.forecast.workload import DTYPE_BYTES, Training, Workload

from .command_line import change
from .gpu_upgrades import upgrades
from .limits import fleet_for
from .plan import Plan
from .request import PlanProblem, PlanRequest
from .solve import is_conceivable, solve

ProfileFor = Callable[[Workload], Profile | None]
"""The profile for a workload; None where there is none."""
Text = str | Callable[[Plan], str]

_BITS = {"int8": 8, "int4": 4, "nf4": 4}
_USUAL_RANK = Training().lora_rank
_QUALITY = "some accuracy: `duoka bench --quality FILE{}` measures it on your text"
_RECOMPUTED = ", and activations that are computed again"
# In place of AdamW: the optimizer, its text, and its cost.
_SMALLER_OPTIMIZERS = (
    ("adamw8bit", "AdamW with states in 8 bit", "a little of what AdamW remembers"),
    ("adafactor", "Adafactor instead of AdamW", "some of what AdamW learns"),
)


class SuggestionSearch:
    """The search for alternatives to a problem without a plan.

    For a workload that the model doesn't support `profile_for` raises an error; without it the one
    profile is all there is. The suggestions change the `request`, by default the problem's.
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

    def run(self) -> Iterator[WayOut]:
        """Yield the suggestions, cheapest for quality first."""
        problem = self._problem
        if self._workload.training is None:
            shorter = list(self._shorten())
            yield from shorter
            if self._workload.prefill_chunk_tokens != "auto":
                cost = "nothing but a little time before the first token"
                auto = self._change(prefill_chunk_tokens="auto")
                yield from self._try("chunk", _chunk_text, auto, loses=cost)
            yield from self._shrink_batch("a batch", problem)
            yield from self._quantize(shorten=not shorter)
            yield from self._offload()
        else:
            yield from self._train_otherwise(self._workload.training)
            yield from self._shorten()
        if problem.device_map is not None:
            yield from self._drop_map()
        else:
            for upgrade in upgrades(problem, self._plan):
                yield self._suggestion("gpu", upgrade.text, upgrade.plan)

    # ── fewer tokens, fewer bits, other memory ──

    def _shorten(self) -> Iterator[WayOut]:
        problem = self._problem
        if problem.largest == "context" or problem.device_map is not None:
            return  # the shortest context was tried; with a map, no size is searched
        batch = 1 if problem.largest == "batch" else self._workload.batch
        yield from self._try("context", _context_text, self._change(batch=batch), largest="context")

    def _shrink_batch(self, name: str, problem: PlanProblem) -> Iterator[WayOut]:
        if problem.largest is None and problem.device_map is None and self._workload.batch > 1:
            yield from self._try(
                "batch", lambda plan: f"{name} of {plan.workload.batch}", problem, largest="batch"
            )

    def _quantize(self, *, shorten: bool) -> Iterator[WayOut]:
        """Quantize the cache, the weights, or both; with `shorten` take fewer tokens as well."""
        cache = "paged-int8" if self._workload.is_paged else "int8"
        with_cache: dict[str, Any] = {} if self._workload.has_int8_cache else {"cache": cache}
        if with_cache:
            problems = self._rechunked(self._change(**with_cache))
            yield from self._try("cache", self._cache_text, *problems)
        for scheme in _smaller_schemes(self._workload):
            smaller, both = (
                self._change(quantize=scheme),
                self._change(quantize=scheme, **with_cache),
            )
            problems = [*self._rechunked(smaller), *self._rechunked(both)]
            if shorten and smaller.largest is None and smaller.device_map is None:
                problems.append(replace(smaller, largest="context"))
            yield from self._try(scheme, self._weights_text, *dict.fromkeys(problems))

    def _rechunked(self, problem: PlanProblem) -> list[PlanProblem]:
        """Return the problem; then with any prefill chunk, if a certain size was asked for."""
        if problem.workload.prefill_chunk_tokens == "auto":
            return [problem]
        workload = replace(problem.workload, prefill_chunk_tokens="auto")
        return [problem, replace(problem, workload=workload)]

    def _offload(self) -> Iterator[WayOut]:
        problem = self._problem
        if problem.constraints.offload or problem.device_map or problem.largest:
            return  # a search for the largest size takes minutes here
        constraints = replace(problem.constraints, offload=True)
        try:
            fleet = fleet_for(problem.fleet, None, offload=True)
        except DuokaError:
            return  # the memory of the host is unknown
        offloading = replace(problem, fleet=fleet, constraints=constraints)
        yield from self._try("offload", _offload_text, offloading, loses="speed")

    def _drop_map(self) -> Iterator[WayOut]:
        """Suggest duoka's own plan instead of the map, or alternatives without the map."""
        problem = replace(self._problem, device_map=None)
        suggestions = [*self._try("map", _own_plan_text, problem)]
        if not suggestions:
            search = SuggestionSearch(self._profile, problem, self._profile_for, self._request)
            suggestions = [
                replace(way, text=f"{way.text}, with duoka's own plan instead of the map")
                for way in search.run()
            ]
        for way in suggestions:
            yield replace(way, without=(*way.without, "--device-map"))

    # ── training ──

    def _train_otherwise(self, training: Training) -> Iterator[WayOut]:
        recomputing = replace(training, gradient_checkpointing=True)
        ways = list(self._shrink_batch("a micro-batch", self._problem))
        if recomputing != training:
            text = "activations that are computed again in the backward pass"
            ways += self._learn("checkpointing", text, recomputing, "about a third of the speed")
        if not ways and recomputing != training:
            name = "activations computed again, and a micro-batch"
            ways += self._shrink_batch(name, self._change(training=recomputing))
        yield from ways
        yield from self._train_with_less(training, single_change=bool(ways))
        if training.method == "lora":
            yield from self._quantize_base(training, single_change=bool(ways))
            return
        lora = replace(training, method="lora", master_weights=False)
        text = "low-rank adapters (LoRA) instead of all weights"
        adapted = list(self._learn("lora", text, lora, "what adapters can't learn"))
        yield from adapted or self._quantize_base(lora, single_change=False)

    def _train_with_less(self, training: Training, *, single_change: bool) -> Iterator[WayOut]:
        """Shrink the optimizer's states and the adapters."""
        if training.optimizer == "adamw":
            for name, text, cost in _SMALLER_OPTIMIZERS:
                smaller: Any = {"optimizer": name}
                ways = [
                    *self._learn(
                        "optimizer",
                        text,
                        replace(training, **smaller),
                        cost,
                        single_change=single_change,
                    )
                ]
                yield from ways
                if ways:
                    break
        if training.method == "lora" and training.lora_rank > _USUAL_RANK:
            lower = replace(training, lora_rank=_USUAL_RANK)
            text = f"adapters of rank {_USUAL_RANK} instead of {training.lora_rank}"
            yield from self._learn(
                "rank", text, lower, "what larger ones learn", single_change=single_change
            )

    def _learn(
        self, kind: str, text: str, training: Training, cost: str, *, single_change: bool = False
    ) -> Iterator[WayOut]:
        """Train in another way; unless `single_change`, recompute activations too if needed."""
        again = "" if training.gradient_checkpointing else _RECOMPUTED

        def describe(plan: Plan) -> str:
            return text + again * self._recomputes(plan)

        problems = self._recomputed(training, single_change=single_change)
        yield from self._try(kind, describe, *problems, loses=cost)

    def _quantize_base(self, lora: Training, *, single_change: bool) -> Iterator[WayOut]:
        """Train adapters beside quantized weights."""
        for scheme in _smaller_schemes(self._workload):
            problems = self._recomputed(lora, single_change=single_change, quantize=scheme)
            yield from self._try(scheme, self._weights_text, *problems)

    def _recomputed(
        self, training: Training, *, single_change: bool, **changes: Any
    ) -> Iterator[PlanProblem]:
        """Yield the problem of a training; unless `single_change`, also recomputing activations."""
        yield self._change(training=training, **changes)
        if not single_change and not training.gradient_checkpointing:
            yield self._change(training=replace(training, gradient_checkpointing=True), **changes)

    # ── asking the planner ──

    def _change(self, **changes: Any) -> PlanProblem:
        """Change the workload of the problem."""
        return replace(self._problem, workload=replace(self._workload, **changes))

    def _try(
        self,
        kind: str,
        text: Text,
        *problems: PlanProblem,
        largest: Literal["context", "batch"] | None = None,
        loses: str = "",
    ) -> Iterator[WayOut]:
        """Yield a suggestion for the first problem with a plan."""
        for problem in problems:
            plan = self._plan(replace(problem, largest=largest) if largest else problem)
            if plan is not None:
                yield self._suggestion(kind, text, plan, loses=loses)
                return

    def _plan(self, problem: PlanProblem) -> Plan | None:
        """Plan; return None if nothing fits, or the model or the GPUs don't support the problem."""
        # From cheap to expensive: the bits of the weights, lower bounds (whose profile may have to
        # be traced), the search with its replays.
        if self._outweighs(problem):
            return None
        try:
            profile = self._profile_for(problem.workload)
            if profile is None or not is_conceivable(profile, problem):
                return None
            return solve(profile, problem) or None
        except DuokaError:
            return None

    def _outweighs(self, problem: PlanProblem) -> bool:
        """Return True if the weights alone exceed the budgets of all devices together.

        This needs no profile of their own: no weight gets smaller than the bits of its scheme. It
        saves the trace of a model that can't fit anyway.
        """
        trained = self._workload.training
        if trained is not None and trained.master_weights and trained.method == "full":
            return False  # its weights are in 32 bit, and others needn't be
        if problem.constraints.offload or problem.device_map is not None:
            return False
        bits = _BITS.get(self._workload.quantize, 8 * DTYPE_BYTES.get(self._profile.dtype, 8))
        least_bits = min(bits, _BITS.get(problem.workload.quantize, bits))
        budget_bytes = sum(device.budget_bytes for device in problem.fleet.devices)
        return self._profile.weight_bytes * least_bits > budget_bytes * bits

    def _own_profile(self, workload: Workload) -> Profile | None:
        return self._profile if workload.conditions == self._profile.conditions else None

    # ── describing a plan ──

    def _recomputes(self, plan: Plan) -> bool:
        """Return True if the plan recomputes activations and the request doesn't."""
        training, requested = plan.workload.training, self._workload.training
        if training is None or requested is None:
            return False
        return training.gradient_checkpointing and not requested.gradient_checkpointing

    def _cache_text(self, plan: Plan) -> str:
        return f"the KV cache in 8 bit{self._chunk_note(plan)}"

    def _weights_text(self, plan: Plan) -> str:
        """Describe quantized weights, and whatever else had to change beside them."""
        workload, requested = plan.workload, self._workload
        weights = sum(stage.weight_bytes for stage in plan.forecast.devices)
        text = (
            f"weights in {_BITS[workload.quantize]} bit ({workload.quantize}): "
            f"{format_bytes(weights)} instead of {format_bytes(self._profile.weight_bytes)}"
        )
        if workload.training is not None and requested.training is not None:
            is_new = workload.training.method != requested.training.method
            text += ", with low-rank adapters (LoRA) to train" if is_new else ""
            text += _RECOMPUTED if self._recomputes(plan) else ""
        if plan.request.largest != self._problem.largest:
            text += f", and {_context_text(plan)}"
        text += ", and the KV cache in 8 bit" if workload.cache != requested.cache else ""
        return text + self._chunk_note(plan)

    def _chunk_note(self, plan: Plan) -> str:
        """Mention a prefill chunk other than asked for."""
        chunk = self._workload.prefill_chunk_tokens
        if chunk in ("auto", plan.workload.prefill_chunk_tokens):
            return ""
        return f", and {_chunk_text(plan)}"

    def _suggestion(self, kind: str, text: Text, plan: Plan, *, loses: str = "") -> WayOut:
        """Return a suggestion with the numbers of its plan and the options to ask again."""
        workload, largest = plan.workload, self._problem.largest
        text = text if isinstance(text, str) else text(plan)
        if largest is not None and plan.request.largest == largest:
            text += f"; then {_size_text(plan, largest)}"
        if kind == "cache" or kind in _BITS:
            options = f" --quantize {kind}" if kind in _BITS else ""
            options += " --cache int8" if workload.cache != self._workload.cache else ""
            loses = _QUALITY.format(options)
        chunk = workload.prefill_chunk_tokens
        added_words, without = change(self._request, self._requested(plan))
        return WayOut(
            kind=kind,
            text=text,
            loses=loses,
            options=added_words,
            without=without,
            context_tokens=workload.context_tokens,
            batch=workload.batch,
            prefill_chunk_tokens=chunk if isinstance(chunk, int) else None,
            num_gpus=len(plan.devices),
            free_bytes=min(stage.free_bytes for stage in plan.forecast.devices),
        )

    def _requested(self, plan: Plan) -> PlanRequest:
        """Return the request for a plan, with numbers in place of a largest size."""
        original, changed = self._request, plan.request
        workload = changed.workload
        if changed.largest != original.largest:
            changed, workload = replace(changed, largest=None), plan.workload
        chunk: int | Literal["auto"] | None = "auto"
        if original.workload.prefill_chunk_tokens != "auto":
            chunk = plan.workload.prefill_chunk_tokens
        workload = replace(workload, dtype=original.workload.dtype, prefill_chunk_tokens=chunk)
        return replace(changed, workload=workload, trust_remote_code=original.trust_remote_code)


def _smaller_schemes(workload: Workload) -> tuple[Literal["int8", "int4", "nf4"], ...]:
    """Return the schemes with fewer bits than the weights have, the most bits first."""
    lowest: Literal["int4", "nf4"] = "int4" if workload.training is None else "nf4"
    if workload.quantize == "none":
        return ("int8", lowest)
    return (lowest,) if workload.quantize == "int8" else ()


def _size_text(plan: Plan, largest: str) -> str:
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


def _offload_text(plan: Plan) -> str:
    seconds = plan.forecast.copy_seconds
    time = f", about {seconds:.2g} s" if seconds else ", which takes as long as the link needs"
    return (
        f"{format_bytes(plan.forecast.host_bytes)} of weights in the CPU's memory, which go "
        f"over PCIe for each token{time}"
    )


def _own_plan_text(plan: Plan) -> str:
    sizes = ", ".join(
        f"{stage.device} {format_bytes(stage.requested_bytes)} of "
        f"{format_bytes(stage.budget_bytes)}"
        for stage in plan.forecast.devices
    )
    return f"duoka's own plan instead of the map: {sizes}"
