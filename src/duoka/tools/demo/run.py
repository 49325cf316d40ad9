"""Plan, prove, load and ask the demo's model, and measure what it took."""

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

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoAnswer:
    """What the model was asked, what it said, and what it should say."""

    question: str
    answer: str
    expected: str

    @property
    def is_right(self) -> bool:
        """Whether it said just that."""
        return self.answer == self.expected


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """What the demo did.

    `measured` are the peaks over loading, one prompt and answer of the planned lengths, and the
    questions; `one_gpu` says why one of the GPUs alone doesn't do.
    """

    plan: Plan
    answers: tuple[DemoAnswer, ...]
    measured: Measured
    one_gpu: str

    @property
    def is_right(self) -> bool:
        """Whether every answer is."""
        return all(answer.is_right for answer in self.answers)


def run_demo(directory: Path, *, tell: Tell = lambda text: None) -> Demo:
    """Make the model, plan it on two virtual GPUs, prove, load, ask, measure."""
    tell("training a small ChatGLM3 on questions about several GPUs")
    make_checkpoint(
        directory, report=lambda step, loss: tell(f"training step {step}, loss {loss:.3f}")
    )
    tell("planning")
    plan = make_plan(directory, _fleet(), WORKLOAD)
    one_gpu = _refusal(plan, directory)
    tell("proving the plan, and loading")
    devices.materialise(plan.fleet)
    for device in plan.devices:
        devices.reset_peaks(device)
    model = load(plan)
    tell("answering")
    _fill(model)
    answers = _ask(model, PromptReader.open(Checkpoint.open(directory), plan.workload))
    return Demo(
        plan=plan,
        answers=answers,
        measured=Measured(
            devices=tuple(filter(None, map(devices.peak_bytes, plan.devices))),
            # One answer was as long as planned, whatever the questions are.
            context_tokens=WORKLOAD.context_tokens,
        ),
        one_gpu=one_gpu,
    )


def _fleet() -> Fleet:
    """GPUs so small that cuBLAS's workspace has no room there: without it."""
    fleet = Fleet.parse(FLEET)
    return replace(fleet, devices=tuple(replace(gpu, workspace_bytes=0) for gpu in fleet.devices))


def _refusal(plan: Plan, directory: Path) -> str:
    """Plan for one of the two GPUs, which must fail; what would fit instead isn't looked for."""
    profile = profile_checkpoint(Checkpoint.open(directory), WORKLOAD)
    single = Fleet(devices=plan.fleet.devices[:1])
    try:
        find_plan(profile, PlanProblem(fleet=single, workload=plan.workload))
    except InfeasibleError as error:
        return str(error)
    raise DuokaError("the demo's model fits one of its GPUs, so it shows nothing")


def _fill(model: Any) -> None:
    """One answer at the planned lengths, for memory to be measured at what was forecast."""
    shape = (WORKLOAD.batch, WORKLOAD.prompt_tokens)
    ids = torch.ones(shape, dtype=torch.long, device=model.device)
    model.generate(ids, max_new_tokens=WORKLOAD.new_tokens, eos_token_id=None, do_sample=False)


def _ask(model: Any, reader: PromptReader) -> tuple[DemoAnswer, ...]:
    """The answers by transformers' own `generate`."""
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
