"""``duoka generate --file``: every prompt of a file answered, many at a time, into another file."""

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

# At most so many are on their way at a time, where nobody says how many: over pages, of which there
# are as many as fit, and as a batch, for which memory is kept whole.
_MOST_REQUESTS = 64
_MOST_AT_ONCE = 16


def answer_file(
    path: Path, out: Path, model: ModelOptions, options: PlanOptions, answering: AnswerOptions
) -> None:
    """Answer the prompts of a file that have no answer yet."""
    sampling = answering.sampling()
    say_import("torch")
    from duoka.engine import Engine, SamplingParams
    from duoka.engine.batch import AnswerFile, read_prompts, unanswered

    prompts = read_prompts(path, answering.system)
    requests, batch = (min(most, len(prompts)) for most in (_MOST_REQUESTS, _MOST_AT_ONCE))
    plan, checkpoint, why_not = planning.find_plan_for_requests(
        model, options, requests=requests, batch=batch
    )
    if why_not:
        note(
            f"Fixed batches instead of continuous batching: {why_not} "
            f"({format_count(plan.workload.batch, 'prompt')} at a time)"
        )
    plan, opened, reader = planning.open_model(plan, checkpoint)
    for prompt in prompts:  # before anything is loaded; a token has a byte at least
        text = prompt.messages[-1].content
        if len(text.encode()) > plan.workload.prompt_tokens:
            reader.check([reader.plain(text)])
    params = SamplingParams.recommended(opened.checkpoint.generation_config, **sampling)
    with AnswerFile(out, prompts) as answers:
        left = list(unanswered(prompts, answers))
        note(
            f"{format_count(len(prompts) - len(left), 'prompt')} of {len(prompts)} already answered"
        )
        if left:
            with heard_by(note):
                engine = Engine(
                    plan,
                    max_new_tokens=options.most_new_tokens,
                    warm_up="largest",
                    adapter=answering.adapter,
                    opened=opened,
                )
            with engine:
                failed = _answer(engine, left, answers, params)
            if failed:
                note(f"{failed} of {format_count(len(left), 'prompt')} have no answer")
                raise typer.Exit(1)


def _answer(engine: Engine, prompts: list[BatchPrompt], answers: AnswerFile, params: Any) -> int:
    """Answer prompts, and write each answer at its end; return the number of failures."""
    begin, tokens, failed = time.monotonic(), 0, 0
    busy_before = engine.busy_seconds()
    requests = ((prompt, prompt.messages) for prompt in prompts)

    def format_speed(seconds: float) -> str:
        """Format the tokens per second, and the share of the time in which each GPU computed."""
        shares = ", ".join(
            f"{device} {(total - busy_before[device]) / seconds:.0%}"
            for device, total in engine.busy_seconds().items()
        )
        return f"{tokens / seconds:,.0f} tokens/s{f'; busy: {shares}' if shares else ''}"

    with _bar(len(prompts)) as advance:
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
def _bar(total: int) -> Iterator[Callable[[str], None]]:
    """A progress bar on a terminal; elsewhere nothing."""
    counts = TextColumn("answering"), BarColumn(), MofNCompleteColumn()
    speeds = TextColumn("{task.description}"), TimeRemainingColumn()
    with Progress(*counts, *speeds, console=stderr(), disable=not stderr().is_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda text: bar.update(task, advance=1, description=text)
