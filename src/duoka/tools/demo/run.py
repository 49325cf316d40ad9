"""Plan, prove, load and ask the demo's model, and measure its memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from duoka.api.load import load
from duoka.api.plan import plan as make_plan
from duoka.checkpoint.checkpoint import Checkpoint
from duoka.errors import DuokaError, InfeasibleError
from duoka.forecast.workload import Workload
from duoka.hardware.fleet import Fleet
from duoka.planner.plan import Plan
from duoka.planner.request import PlanProblem
from duoka.planner.solve import find_plan
from duoka.report.measured import Measured
from duoka.runtime import devices
from duoka.runtime.prompt_reader import PromptReader
from duoka.tracing.get_profile import profile_checkpoint

from .checkpoint import make_checkpoint
from .training import load_pairs

FLEET = "virtual:2x6MiB"
WORKLOAD = Workload(prompt_tokens=96, new_tokens=48, prefill_chunk_tokens=None)

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoAnswer:
    """A question, the model's answer, and the expected answer."""

    question: str
    answer: str
    expected: str

    @property
    def is_right(self) -> bool:
        """True if the answer equals the expected answer."""
        return self.answer == self.expected


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """Results of the demo.

    `measured` has the memory peaks over loading, one generation of the planned length, and the
    questions. `one_gpu` is the planner's message that a single GPU is too small.
    """

    plan: Plan
    answers: tuple[DemoAnswer, ...]
    measured: Measured
    one_gpu: str

    @property
    def is_right(self) -> bool:
        """True if all answers are right."""
        return all(answer.is_right for answer in self.answers)


def run_demo(directory: Path, *, report: Report = lambda text: None) -> Demo:
    """Train the model, plan it for two virtual GPUs, prove, load, ask the questions and measure."""
    report("training a small ChatGLM3 on questions about several GPUs")
    make_checkpoint(
        directory, report=lambda step, loss: report(f"training step {step}, loss {loss:.3f}")
    )
    report("planning")
    plan = make_plan(directory, _fleet(), WORKLOAD)
    one_gpu = _refusal_on_one_gpu(plan, directory)
    report("proving the plan and loading")
    devices.materialise(plan.fleet)
    for device in plan.devices:
        devices.reset_peaks(device)
    model: Any = load(plan)
    report("answering")
    # All planned tokens, so that the memory reaches the forecast.
    shape = (WORKLOAD.batch, WORKLOAD.prompt_tokens)
    ids = torch.ones(shape, dtype=torch.long, device=model.device)
    model.generate(ids, max_new_tokens=WORKLOAD.new_tokens, eos_token_id=None, do_sample=False)
    answers = _generate_answers(model, PromptReader.open(Checkpoint.open(directory), plan.workload))
    return Demo(
        plan=plan,
        answers=answers,
        measured=Measured(
            devices=tuple(filter(None, map(devices.peak_bytes, plan.devices))),
            context_tokens=WORKLOAD.context_tokens,
        ),
        one_gpu=one_gpu,
    )


def _fleet() -> Fleet:
    """Return the virtual GPUs without cuBLAS's workspace, which is larger than they are."""
    fleet = Fleet.parse(FLEET)
    return replace(fleet, devices=tuple(replace(gpu, workspace_bytes=0) for gpu in fleet.devices))


def _refusal_on_one_gpu(plan: Plan, directory: Path) -> str:
    """Plan for one of the two GPUs, and return the error's text, without alternatives."""
    profile = profile_checkpoint(Checkpoint.open(directory), WORKLOAD)
    single = Fleet(devices=plan.fleet.devices[:1])
    try:
        find_plan(profile, PlanProblem(fleet=single, workload=plan.workload))
    except InfeasibleError as error:
        return str(error)
    raise DuokaError("the demo model fits on one of its GPUs, so the demo shows nothing")


def _generate_answers(model: Any, reader: PromptReader) -> tuple[DemoAnswer, ...]:
    """Answer the demo's questions with transformers' `generate`."""
    answers = []
    for pair in load_pairs():
        if pair.ask:
            ids = torch.tensor([reader.prompt(pair.question)], device=model.device)
            (row,) = model.generate(
                ids,
                max_new_tokens=WORKLOAD.new_tokens,
                eos_token_id=list(reader.chat.stop_ids),
                do_sample=False,
            )
            new = reader.tokenizer.decode(row[ids.shape[1] :], skip_special_tokens=True)
            text = str(new).strip()
            answers.append(DemoAnswer(question=pair.question, answer=text, expected=pair.answer))
    return tuple(answers)
