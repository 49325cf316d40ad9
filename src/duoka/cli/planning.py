"""From the options of a command to a plan, and from a plan to a loaded model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duoka
from duoka.base.text import choose
from duoka.checkpoint.sampling_params import Sampling
from duoka.errors import CheckpointError, UsageError
from duoka.forecast.workload import CACHES, QUANTIZATIONS, Training
from duoka.planner.constraints import Constraints
from duoka.planner.device_map import DeviceMap
from duoka.planner.from_device_map import OBJECTIVE as GIVEN
from duoka.planner.limits import fleet_for, given_back, usable
from duoka.planner.replicas import Replicas
from duoka.planner.request import Largest, PlanProblem
from duoka.planner.resolve import answer_checkpoint
from duoka.planner.search import OBJECTIVES

from . import outputs
from . import replicas as copies
from .constraint_options import read_constraints
from .options import parse_chunk, parse_dtype, parse_image_size, parse_tokens
from .profiles import finding
from .terminal import progress_bars, stderr

if TYPE_CHECKING:
    from duoka.runtime import Generator

_CONTEXT_TOKENS = 4096
_NEW_TOKENS = 512
_NEW_SHARE = 4
ALL_GPUS = "all"
_OPTION = {
    "new_tokens": "--new-tokens",
    "prefill_chunk": "--prefill-chunk",
    "use_all": "--use-all",
    "device_map": "--device-map",
    "image_size": "--image-size",
    "max_context": "--max-context",
    "max_batch": "--max-batch",
    "training": "--train",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What a person said about planning; None where nothing was said."""

    gpus: str | None = None
    context: str | None = None
    new_tokens: str | None = None
    batch: int | None = None
    dtype: str | None = None
    prefill_chunk: str | None = None
    objective: str | None = None
    use_all: bool = False
    device_map: Path | None = None
    cache: str | None = None
    quantize: str | None = None
    images: int | None = None
    image_size: str | None = None
    strategy: str | None = None
    pin: Sequence[str] | None = None
    uncut: Sequence[str] | None = None
    reserve: Sequence[str] | None = None
    offload: bool = False
    training: Training | None = None
    max_context: bool = False
    max_batch: bool = False
    replicas: str | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any], **others: Any) -> Wishes:
        """Take the options of a command, by their names, and others."""
        names = {field.name for field in fields(cls)} & options.keys()
        return cls(**{name: options[name] for name in names - others.keys()}, **others)

    @property
    def largest(self) -> Largest | None:
        """What is to be as large as fits."""
        for wanted, size, option in (
            (self.max_context, self.context, "context"),
            (self.max_batch, self.batch, "batch"),
        ):
            if wanted and size is not None:
                raise UsageError(
                    f"--{option} says how large it is, and --max-{option} asks for that",
                    hint="give one of the two",
                )
        if self.max_context and self.max_batch:
            raise UsageError(
                "--max-context and --max-batch: the more of one, the less of the other",
                hint="give one of them, and a number for the other",
            )
        return "context" if self.max_context else "batch" if self.max_batch else None

    @property
    def constraints(self) -> Constraints:
        """What was demanded of the placement."""
        return read_constraints(
            self.strategy,
            self.pin or (),
            self.uncut or (),
            self.reserve or (),
            offload=self.offload,
        )

    def refuse_any(self, *, replan: bool = False) -> None:
        """Raise UsageError if anything was said: a saved plan has decided it all."""
        said = [
            _OPTION.get(field.name, f"--{field.name}")
            for field in fields(self)
            if getattr(self, field.name) not in (None, False, [])
        ]
        if said:
            raise UsageError(
                f"{', '.join(said)} can't be given with --plan: the plan has decided that",
                hint="leave out --plan to make a new one"
                if not replan
                else "--replan asks again what the plan was made for; to ask for something else, "
                "leave out --plan and --replan",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Which checkpoint a person means, besides its name, what it may do, and what for."""

    revision: str | None
    trust_remote_code: bool
    to_run: bool = False


def make_plan(
    model: str | None,
    plan_file: Path | None,
    wishes: Wishes,
    *,
    replan: bool,
    asked: Asked,
) -> duoka.Plan:
    """Take the saved plan, or make one."""
    if model is None and asked.revision is not None:
        raise UsageError(
            "--revision is for a model on the Hub, and no model was given",
            hint="name the model; a plan keeps its own revision",
        )
    if plan_file is not None:
        wishes.refuse_any(replan=replan)
        saved = duoka.Plan.load(plan_file)
        if model is None and not replan and not asked.trust_remote_code:
            return saved  # to look at it, neither the checkpoint nor the GPUs need be here
        checkpoint = open_checkpoint(model or saved.source, asked)
        return _replan(saved, checkpoint, plan_file) if replan else _reuse(saved, checkpoint)
    if replan:
        raise UsageError("--replan is for a saved plan", hint="name it with --plan FILE")
    return _answer(*_asked(model, wishes, asked))


def make_copies(
    model: str | None, plan_file: Path | None, wishes: Wishes, *, asked: Asked
) -> Replicas:
    """Make the plans of several copies of a model."""
    assert wishes.replicas is not None, "they were asked for"
    if plan_file is not None:
        wishes.refuse_any()
    number = copies.read_number(wishes.replicas)
    return copies.make_copies(*_asked(model, wishes, asked), number)


def _asked(model: str | None, wishes: Wishes, asked: Asked) -> tuple[duoka.Checkpoint, PlanProblem]:
    """The model that a person means, and what is asked of it."""
    largest, constraints = wishes.largest, wishes.constraints
    device_map = None if wishes.device_map is None else DeviceMap.load(wishes.device_map)
    checkpoint = open_checkpoint(model, asked)
    gpus = ALL_GPUS if wishes.gpus is None else wishes.gpus
    problem = PlanProblem(
        fleet=usable(fleet_for(read_fleet(gpus), device_map, offload=wishes.offload), constraints),
        workload=workload_for(checkpoint, wishes),
        objective=choose("the objective", wishes.objective or "auto", OBJECTIVES),
        use_all=wishes.use_all,
        gpus=gpus,
        device_map=device_map,
        constraints=constraints,
        largest=largest,
    )
    return checkpoint, problem


def load_generator(plan: duoka.Plan, *, trust_remote_code: bool, cache_weights: bool) -> Generator:
    """Prove and load a plan, with a progress bar."""
    plan = plan.here()  # a GPU that is gone is told at once, before torch is imported
    from duoka.runtime import Generator
    from duoka.runtime.load import Keeping

    console = stderr()

    def tell(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    console.print(f"{plan.model} on {', '.join(plan.devices)}", markup=False)
    with progress_bars() as bar:
        model: Any = duoka.load(
            plan,
            progress=bar("loading"),
            download_progress=bar("downloading"),
            trust_remote_code=trust_remote_code,
            keeping=Keeping(wanted=cache_weights, notify=tell),
        )
    return Generator.of(model, duoka.Checkpoint.open(plan.source), plan.workload)


def chosen(**values: float | None) -> dict[str, Any]:
    """What a person chose of how tokens are chosen; refused here if it makes no sense."""
    given: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
    Sampling(**given)
    return given


def sampling(plan: duoka.Plan, chosen: dict[str, Any]) -> Sampling:
    """How tokens are chosen: as the person said, else as the checkpoint recommends."""
    return Sampling.recommended(duoka.Checkpoint.open(plan.source).generation_config, **chosen)


def open_checkpoint(model: str | None, asked: Asked) -> duoka.Checkpoint:
    """The checkpoint that a person means; what of its code may run is shown."""
    if not model:
        raise UsageError(
            "no model was given", hint="name the directory of a checkpoint, or a --plan"
        )
    checkpoint = duoka.Checkpoint.open(
        model, revision=asked.revision, trust_remote_code=asked.trust_remote_code
    )
    if asked.to_run and not checkpoint.has_weights:
        raise CheckpointError(
            f"{checkpoint.source} has no weights to load",
            hint="plan for a directory that holds the weight files",
        )
    _show_code(checkpoint)
    return checkpoint


def _show_code(checkpoint: duoka.Checkpoint) -> None:
    """Say what may run, before it does; a plan made with it holds for this code alone."""
    if not checkpoint.remote_code:
        return
    console = stderr()
    console.print(f"code that comes with {checkpoint.source} may run:", markup=False)
    for name, sha256 in checkpoint.remote_code:
        console.print(f"  {name}  sha256 {sha256}", markup=False, soft_wrap=True)


def _answer(checkpoint: duoka.Checkpoint, problem: PlanProblem) -> duoka.Plan:
    with finding(checkpoint) as find:
        return answer_checkpoint(checkpoint, problem, find)


def _reuse(plan: duoka.Plan, checkpoint: duoka.Checkpoint) -> duoka.Plan:
    plan.refuse_other(checkpoint.fingerprint, checkpoint.source)
    return replace(plan, source=checkpoint.source)


def _replan(plan: duoka.Plan, checkpoint: duoka.Checkpoint, file: Path) -> duoka.Plan:
    """Ask again what was asked for a plan, and save the answer in its place."""
    asked = plan.request
    device_map = DeviceMap.of(plan.device_map) if plan.objective == GIVEN else None
    problem = PlanProblem(
        fleet=usable(
            fleet_for(_fleet_again(plan), device_map, offload=asked.constraints.offload),
            asked.constraints,
        ),
        workload=asked.workload,
        objective=asked.objective,
        use_all=asked.use_all,
        gpus=asked.gpus,
        device_map=device_map,
        constraints=asked.constraints,
        largest=asked.largest,
    )
    made = _answer(checkpoint, problem)
    save(made, file)
    return made


def save(plan: duoka.Plan, file: Path) -> None:
    """Keep a plan in a file, and say so."""
    outputs.write(file, plan.lasting().to_json() + "\n", "the plan")


def save_device_map(device_map: Mapping[str, int | str], file: Path) -> None:
    """Keep a device map in a file, and say so."""
    text = json.dumps(dict(device_map), indent=1, ensure_ascii=False)
    outputs.write(file, text + "\n", "the device map")


def save_page(plan: duoka.Plan, file: Path) -> None:
    """Keep a plan as a page, with why it is so where the cache has the model's profile."""
    from duoka.report.html import render_page

    explanation = None
    try:
        explanation = duoka.explain(plan)
    except UsageError as error:
        stderr().print(f"the page says no reasons: {error}", markup=False, soft_wrap=True)
    outputs.write(file, render_page(plan, explanation), "the page")


def read_fleet(gpus: str) -> duoka.Fleet:
    """The GPUs that were asked for."""
    return duoka.Fleet.detect() if gpus == ALL_GPUS else duoka.Fleet.parse(gpus)


def _fleet_again(plan: duoka.Plan) -> duoka.Fleet:
    """The GPUs that were asked for, as they are now; no others than those."""
    if plan.request.gpus:
        return read_fleet(plan.request.gpus)
    uuids = [device.uuid for device in plan.fleet.devices if device.uuid]
    return duoka.Fleet.detect(",".join(uuids)) if uuids else given_back(plan)


def workload_for(checkpoint: duoka.Checkpoint, wishes: Wishes) -> duoka.Workload:
    """What the model will be asked to do, as far as a person said it."""
    limit = checkpoint.max_context_tokens
    context = _CONTEXT_TOKENS if limit is None else min(_CONTEXT_TOKENS, limit)
    if wishes.context is not None:
        context = parse_tokens(wishes.context)
    new = max(min(_NEW_TOKENS, context // _NEW_SHARE), 1)
    if wishes.training is not None:
        if wishes.new_tokens is not None:
            raise UsageError(
                "--new-tokens is for answers, and training has none",
                hint="--context is the length of a sequence",
            )
        new = 0
    if wishes.new_tokens is not None:
        new = parse_tokens(wishes.new_tokens)
    if wishes.max_context:
        context = max(context, new + 1)  # which is looked for
    if new >= context:
        raise UsageError(
            f"{new} new tokens leave no room for a prompt in a context of {context}",
            hint="--context counts the prompt and the answer together",
        )
    return duoka.Workload(
        batch=1 if wishes.batch is None else wishes.batch,
        prompt_tokens=context - new,
        new_tokens=new,
        dtype=parse_dtype(wishes.dtype or "auto"),
        prefill_chunk_tokens=parse_chunk(wishes.prefill_chunk or "auto"),
        cache=choose("cache", wishes.cache or "dynamic", CACHES),
        quantize=choose("quantize", wishes.quantize or "none", QUANTIZATIONS),
        images=wishes.images or 0,
        training=wishes.training,
        **_image_size(wishes),
    )


def _image_size(wishes: Wishes) -> dict[str, Any]:
    if wishes.image_size is None:
        return {}
    if not wishes.images:
        raise UsageError("--image-size is for images, and there are none", hint="say --images N")
    return {"image_size": parse_image_size(wishes.image_size)}
