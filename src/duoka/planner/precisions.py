"""Precisions: the same request with weights of each precision, and for training, side by side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from duoka.base.progress import say
from duoka.checkpoint.checkpoint import Checkpoint
from duoka.errors import DuokaError
from duoka.forecast.workload import Training, Workload

from .modes import attempt
from .plan import Plan
from .request import PlanProblem
from .resolve import Find, workload_for
from .room import cache_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """What weights of one precision take, and their plan; None where it doesn't fit.

    `trouble` says why a model can't have its weights so.
    """

    name: str
    weight_bytes: int = 0
    plan: Plan | None = None
    trouble: str = ""

    @property
    def cache_tokens(self) -> int:
        """About how many tokens the cache has room for."""
        return 0 if self.plan is None else cache_tokens(self.plan.forecast, self.plan.workload)

    def to_dict(self) -> dict[str, Any]:
        """The form that `json.dumps` takes."""
        stages = () if self.plan is None else self.plan.forecast.devices
        return {
            "weights": self.name,
            "weight_bytes": self.weight_bytes,
            "fits": self.plan is not None,
            "trouble": self.trouble,
            "devices": [asdict(stage) for stage in stages],
            "cache_tokens": self.cache_tokens,
        }


def precisions(checkpoint: Checkpoint, problem: PlanProblem, find: Find) -> Iterator[Precision]:
    """Each precision on its own, in the order of its bits; those of training last."""
    half: Literal["float16", "bfloat16"] = (
        "float16" if checkpoint.default_dtype == "float16" else "bfloat16"
    )
    full_bytes = 0
    for name, workload, least_share in _workloads(problem.workload, half):
        if full_bytes * least_share > problem.fleet.budget_bytes:
            yield Precision(name=name)  # known without the seconds of a trace
            continue
        try:
            workload = workload_for(checkpoint, workload)
            profile = find(workload)
            say(f"planning {name}")
            full_bytes = full_bytes or profile.weight_bytes
            plan = attempt(profile, replace(problem, workload=workload))
            yield Precision(name=name, weight_bytes=profile.weight_bytes, plan=plan)
        except DuokaError as error:
            yield Precision(name=name, trouble=str(error))


def _workloads(
    workload: Workload, half: Literal["float16", "bfloat16"]
) -> Iterator[tuple[str, Workload, float]]:
    """Each precision's name, its workload, and what it takes at least of the weights in 32 bit."""
    plain = replace(workload, dtype=half)
    yield "float32", replace(workload, dtype="float32"), 1
    yield half, plain, 1 / 2
    yield "int8", replace(plain, quantize="int8"), 1 / 4
    yield "int4", replace(plain, quantize="int4"), 1 / 8
    yield "nf4", replace(plain, quantize="nf4"), 1 / 8
    lora = learning(plain, Training(method="lora"))
    yield "training LoRA", lora, 1 / 2
    yield "training LoRA on nf4", replace(lora, quantize="nf4"), 1 / 8
    # With a gradient and AdamW's two numbers for each weight.
    yield "training all", learning(plain, Training(method="full")), 2


def learning(workload: Workload, training: Training) -> Workload:
    """Training on sequences as long as the workload's context."""
    return Workload(
        batch=workload.batch,
        prompt_tokens=workload.context_tokens,
        new_tokens=0,
        dtype=workload.dtype,
        gpu_generation=workload.gpu_generation,
        training=training,
    )
