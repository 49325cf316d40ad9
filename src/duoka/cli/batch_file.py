"""``duoka generate --file``: answer all prompts of a file concurrently, into another file."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from duoka.base.progress import heard_by, say_import
from duoka.base.units import format_count, format_seconds
from duoka.errors import DuokaError

from . import planning
from .options import AnswerOptions, ModelOptions, PlanOptions
from .terminal import note, stderr

if TYPE_CHECKING:
    from duoka.engine import Engine
    from duoka.engine.batch import AnswerFile, BatchPrompt

# Default maximum of concurrent requests: with a paged KV cache, which fills the free memory, and
# in a fixed batch, which reserves the memory of the whole context for each request.
_MAX_PAGED_REQUESTS = 64
_MAX_BATCH = 16


def answer_file(
    path: Path, out: Path, model: ModelOptions, options: PlanOptions, answering: AnswerOptions
) -> None:
    """Answer the prompts of file `path` that have no answer in file `out` yet."""
    sampling = answering.sampling()
    say_import("torch")
    from duoka.engine import Engine, SamplingParams
    from duoka.engine.batch import AnswerFile, read_prompts, unanswered

    prompts = read_prompts(path, answering.system)
    requests, batch = (min(most, len(prompts)) for most in (_MAX_PAGED_REQUESTS, _MAX_BATCH))
    plan, checkpoint, why_not = planning.find_plan_for_requests(
        model, options, requests=requests, batch=batch
    )
    if why_not:
        note(
            f"Fixed batches instead of continuous batching: {why_not} "
            f"({format_count(plan.workload.batch, 'prompt')} at a time)"
        )
    plan, opened, reader = planning.open_model(plan, checkpoint)
    for prompt in prompts:  # before loading; a token has at least one byte
        text = prompt.messages[-1].content
        if len(text.encode()) > plan.workload.prompt_tokens:
            reader.check([reader.plain(text)])
    params = SamplingParams.recommended(opened.checkpoint.generation_config, **sampling)
    with AnswerFile(out, prompts) as answers:
        todo = list(unanswered(prompts, answers))
        note(
            f"{format_count(len(prompts) - len(todo), 'prompt')} of {len(prompts)} already answered"
        )
        if todo:
            with heard_by(note):
                engine = Engine(
                    plan,
                    max_new_tokens=options.most_new_tokens,
                    warm_up="largest",
                    adapter=answering.adapter,
                    opened=opened,
                )
            with engine:
                failed = _answer(engine, todo, answers, params)
            if failed:
                note(f"{failed} of {format_count(len(todo), 'prompt')} have no answer")
                raise typer.Exit(1)


def _answer(engine: Engine, prompts: list[BatchPrompt], answers: AnswerFile, params: Any) -> int:
    """Answer prompts, and write each answer when it is complete; return the number of failures."""
    begin, tokens, failed = time.monotonic(), 0, 0
    busy_before = engine.busy_seconds()
    requests = ((prompt, prompt.messages) for prompt in prompts)

    def format_speed(seconds: float) -> str:
        """Format the tokens per second, and the busy share of each GPU."""
        shares = ", ".join(
            f"{device} {(total - busy_before[device]) / seconds:.0%}"
            for device, total in engine.busy_seconds().items()
        )
        return f"{tokens / seconds:,.0f} tokens/s{f'; busy: {shares}' if shares else ''}"

    with _progress_bar(len(prompts)) as advance:
        for prompt, outcome in engine.as_completed(requests, lambda key: key.sampling(params)):
            if isinstance(outcome, Exception):
                if not isinstance(outcome, DuokaError) or engine.failure is outcome:
                    raise outcome
                failed += 1
                name = prompt.number if prompt.name is None else prompt.name
                note(f"prompt {name} has no answer: {outcome}")
            else:
                answers.add(prompt, outcome)
                tokens += len(outcome.tokens)
            advance(format_speed(time.monotonic() - begin))
    seconds = time.monotonic() - begin
    note(
        f"{format_count(len(prompts) - failed, 'answer')} with {tokens:,} tokens in "
        f"{format_seconds(seconds)}: {format_speed(seconds)}"
    )
    return failed


@contextmanager
def _progress_bar(total: int) -> Iterator[Callable[[str], None]]:
    """Show a progress bar on a terminal; yield a function that advances it with a description."""
    counts = TextColumn("answering"), BarColumn(), MofNCompleteColumn()
    speeds = TextColumn("{task.description}"), TimeRemainingColumn()
    with Progress(*counts, *speeds, console=stderr(), disable=not stderr().is_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda text: bar.update(task, advance=1, description=text)
