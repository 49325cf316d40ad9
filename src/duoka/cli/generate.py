"""``duoka generate``: answer given prompts, alone or in a batch."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

import duoka
from duoka.base.files import why
from duoka.errors import UsageError

from . import planning
from .batch_file import answer_file
from .groups import flag, option, with_groups
from .images import ImageOptions, with_images
from .options import (
    AnswerOptions,
    ModelOptions,
    RunnablePlan,
    given_options,
    read_stdin,
    refuse_beside,
    refuse_damaged,
)
from .terminal import answer, answer_stream, working

if TYPE_CHECKING:
    from PIL.Image import Image

    from duoka.engine import Completion, Engine, SamplingParams
    from duoka.report.measured import Measured
    from duoka.runtime.prompt_reader import PromptReader


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """The prompts, and the form of the output."""

    prompt: list[str] | None = option(
        "TEXT",
        'A question; several make a batch. "-" reads one from the standard input.',
        names=("--prompt", "-p"),
    )
    prompt_file: list[Path] | None = option("FILE", "A file whose text is a question.")
    file: Path | None = option(
        "FILE", "JSON lines with prompts, which are answered many at a time into --out."
    )
    out: Path | None = option(
        "FILE", "Where the answers to --file go; a run goes on after those that are there."
    )
    raw: bool = flag("--raw", "Continue the text, instead of answering a question.")
    json: bool = flag("--json", "Print the answers as JSON.")

    def questions(self) -> list[str]:
        """Read all texts, in the order of their kinds; the standard input without any other."""
        prompts, files = self.prompt or [], self.prompt_file or []
        if not prompts and not files and not sys.stdin.isatty():
            prompts = ["-"]
        texts = [read_stdin() if text == "-" else text for text in prompts]
        for file in files:
            try:
                texts.append(file.read_text(encoding="utf-8"))
            except (OSError, UnicodeDecodeError) as error:
                raise UsageError(
                    f"the prompt file {file} can't be read: {why(error)}",
                    hint="name a text file in UTF-8",
                ) from error
        for text in texts:
            refuse_damaged(text)
        if not texts:
            raise UsageError(
                "no prompt was given", hint='--prompt "…", --prompt-file FILE, or a pipe'
            )
        if not all(text.strip() for text in texts):
            raise UsageError("a prompt is empty", hint="write a question")
        return texts


@with_groups
def generate(
    prompts: PromptOptions,
    pictures: ImageOptions,
    options: RunnablePlan,
    answering: AnswerOptions,
    model: ModelOptions,
) -> None:
    """Load a model and answer. Only the answers go to the standard output.

    [bold]duoka generate[/] ./chatglm3-6b --prompt "What is NVLink?" --gpus "virtual:2x8GiB"

    [bold]duoka generate[/] ./chatglm3-6b -p "你好" -p "Hello" --json

    [bold]duoka generate[/] ./glm-4v-9b --image cat.jpg -p "What is this?" --gpus "2x24GiB"

    [bold]duoka generate[/] ./chatglm3-6b --file prompts.jsonl --out answers.jsonl --gpus 2x8GiB

    cat question.txt | [bold]duoka generate[/] ./chatglm3-6b --prompt - --temperature 0.8
    """
    if prompts.file is not None or prompts.out is not None:
        file, out = _files(prompts, pictures)
        answer_file(file, out, model, options, answering)
        return
    if not model.model and options.plan_file is None:
        planning.open_checkpoint(model)  # which refuses it, before a question is read
    sampling = answering.sampling()
    questions = prompts.questions()
    if options.batch is None and options.plan_file is None:
        options = replace(options, batch=len(questions))
    images = pictures.read()
    if images and prompts.raw:
        raise UsageError(
            "--raw continues a text, in which --image has no place", hint="leave one of them out"
        )
    plan, opened, reader = planning.plan_to_run(model, with_images(options, images))
    from duoka.engine import SamplingParams
    from duoka.engine.timing import measured

    params = SamplingParams.recommended(opened.checkpoint.generation_config, **sampling)
    reader.check_images(images)
    tokens = _tokens(reader, questions, None if prompts.raw else answering, images)
    for ids in tokens:
        reader.check([ids])
    with planning.load_engine(plan, opened, options, answering.adapter) as engine:
        if len(tokens) == 1 and not prompts.json:
            answers = [_stream(engine, tokens[0], params, is_raw=prompts.raw)]
        else:
            with working("answering"):
                answers = engine.generate(tokens, params)
    if not prompts.raw:
        answers = [replace(reply, text=reply.text.strip()) for reply in answers]
    if prompts.json:
        typer.echo(_json(plan, questions, answers, measured(answers, engine.peaks())))
        return
    if len(answers) > 1:
        answer("\n\n".join(reply.text for reply in answers) + "\n")
    planning.tell_measured(plan, measured(answers, engine.peaks()))


def _tokens(
    reader: PromptReader,
    questions: Sequence[str],
    answering: AnswerOptions | None,
    images: Sequence[Image],
) -> list[list[int]]:
    """Make the prompt of each question; without `answering` continue each text."""
    if answering is None:
        return [reader.plain(text) for text in questions]
    usable = planning.usable_system(reader, answering.system)
    return [reader.prompt(text.strip(), system=usable, images=images) for text in questions]


def _files(prompts: PromptOptions, pictures: ImageOptions) -> tuple[Path, Path]:
    """Return the files of prompts and answers; UsageError for other prompts beside them."""
    if prompts.file is None or prompts.out is None:
        raise UsageError(
            "--file and --out belong together: the prompts, and where their answers go",
            hint="--file prompts.jsonl --out answers.jsonl",
        )
    beside = given_options(prompts, "prompt", "prompt_file", "raw", "json")
    refuse_beside([*beside, *given_options(pictures, "image")], "--file", "leave either out")
    return prompts.file, prompts.out


def _stream(
    engine: Engine, prompt: Sequence[int], params: SamplingParams, *, is_raw: bool
) -> Completion:
    """Show an answer during generation; a continued text keeps its leading white space."""
    from duoka.engine.conversation import strip_start

    stream = engine.submit(prompt, params)
    answer_stream(iter(stream) if is_raw else strip_start(stream), "reading the prompt")
    return stream.result()


def _json(
    plan: duoka.Plan, questions: Sequence[str], answers: Sequence[Completion], took: Measured
) -> str:
    answered = [
        {
            "prompt": question,
            "text": answer.text,
            "prompt_tokens": answer.prompt_tokens,
            "new_tokens": len(answer.tokens),
            "finish": answer.finish,
        }
        for question, answer in zip(questions, answers, strict=True)
    ]
    content = {
        "model": plan.model,
        "devices": plan.devices,
        "answers": answered,
        "measured": took.to_dict(plan.forecast),
    }
    return json.dumps(content, ensure_ascii=False, indent=1)
