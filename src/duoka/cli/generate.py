"""``duoka generate``: answer prompts from options, files or a pipe."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import duoka
from duoka.base.files import reading
from duoka.errors import UsageError

from . import planning
from .batch_file import answer_file
from .groups import OptionGroup, flag, option, with_groups
from .images import ImageOptions, with_images
from .options import AnswerOptions, ModelOptions, RunnablePlan, read_stdin, refuse_damaged
from .terminal import answer, answer_stream, print_json, working

if TYPE_CHECKING:
    from duoka.engine import Completion, Engine, SamplingParams
    from duoka.report.measured import Measured


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions(OptionGroup):
    """Options for the prompts and the form of the output."""

    prompt: list[str] | None = option(
        "TEXT",
        'A prompt; repeat for a batch. "-" reads one from standard input.',
        names=("--prompt", "-p"),
    )
    prompt_file: list[Path] | None = option("FILE", "A file that contains a prompt.")
    file: Path | None = option(
        "FILE", "JSON lines with prompts, which run concurrently and are answered in --out."
    )
    out: Path | None = option(
        "FILE", "Output file for --file; a run continues after the answers it already contains."
    )
    raw: bool = flag("Continue the text without the chat template.")
    json: bool = flag("Print the answers as JSON.")

    def questions(self) -> list[str]:
        """Read the texts of --prompt, then of --prompt-file; without both, the standard input."""
        prompts, files = self.prompt or [], self.prompt_file or []
        if not prompts and not files and not sys.stdin.isatty():
            prompts = ["-"]
        texts = [read_stdin() if text == "-" else text for text in prompts]
        for file in files:
            with reading(f"the prompt file {file}", "give a UTF-8 text file"):
                texts.append(file.read_text(encoding="utf-8"))
        for text in texts:
            refuse_damaged(text)
        if not texts:
            raise UsageError(
                "no prompt was given", hint='--prompt "…", --prompt-file FILE, or a pipe'
            )
        if not all(text.strip() for text in texts):
            raise UsageError("a prompt is empty", hint="write a prompt")
        return texts


@with_groups
def generate(
    prompts: PromptOptions,
    pictures: ImageOptions,
    options: RunnablePlan,
    answering: AnswerOptions,
    model: ModelOptions,
) -> None:
    """Load a model and answer prompts. Standard output contains only the answers.

    [bold]duoka generate[/] ./chatglm3-6b --prompt "What is NVLink?" --gpus "virtual:2x8GiB"

    [bold]duoka generate[/] ./chatglm3-6b -p "你好" -p "Hello" --json

    [bold]duoka generate[/] ./glm-4v-9b --image cat.jpg -p "What is this?" --gpus "2x24GiB"

    [bold]duoka generate[/] ./chatglm3-6b --file prompts.jsonl --out answers.jsonl --gpus 2x8GiB

    cat question.txt | [bold]duoka generate[/] ./chatglm3-6b --prompt - --temperature 0.8
    """
    if prompts.file is not None or prompts.out is not None:
        file, out = _batch_files(prompts, pictures)
        answer_file(file, out, model, options, answering)
        return
    if not model.model and options.plan_file is None:
        planning.open_checkpoint(model)  # refuses the missing model, before stdin is read
    sampling = answering.sampling()
    questions = prompts.questions()
    if options.batch is None and options.plan_file is None:
        options = replace(options, batch=len(questions))
    if prompts.raw:
        beside = "--raw, which continues a text"
        pictures.refuse("image", beside=beside, hint="omit one of them")
    images = pictures.read()
    planned = planning.find_plan_to_answer(model, with_images(options, images))
    plan, opened, reader = planning.open_model(*planned)
    from duoka.engine import SamplingParams
    from duoka.engine.timing import measured

    params = SamplingParams.recommended(opened.checkpoint.generation_config, **sampling)
    reader.check_images(images)
    if prompts.raw:
        tokens = [reader.plain(text) for text in questions]
    else:
        system = planning.usable_system(reader, answering.system)
        tokens = [reader.prompt(text.strip(), system=system, images=images) for text in questions]
    for ids in tokens:
        reader.check([ids])
    with planning.load_engine(plan, opened, options, answering.adapter) as engine:
        answers = _generate_answers(engine, tokens, params, prompts)
    if prompts.json:
        _print_answers(plan, questions, answers, measured(answers, engine.peaks()))
        return
    if len(answers) > 1:
        answer("\n\n".join(reply.text for reply in answers) + "\n")
    planning.tell_measured(plan, measured(answers, engine.peaks()))


def _batch_files(prompts: PromptOptions, pictures: ImageOptions) -> tuple[Path, Path]:
    """Return --file and --out; UsageError if one is missing or other prompts are given."""
    if prompts.file is None or prompts.out is None:
        raise UsageError(
            "--file and --out must be given together",
            hint="--file prompts.jsonl --out answers.jsonl",
        )
    names = "prompt", "prompt_file", "raw", "json"
    prompts.refuse(*names, beside="--file", hint="omit one of them")
    pictures.refuse("image", beside="--file", hint="omit one of them")
    return prompts.file, prompts.out


def _generate_answers(
    engine: Engine, tokens: list[list[int]], params: SamplingParams, prompts: PromptOptions
) -> list[Completion]:
    """Answer all prompts; a single answer is printed during generation, unless as JSON.

    Leading and trailing white space is removed, except with --raw.
    """
    from duoka.engine.conversation import strip_start

    if len(tokens) == 1 and not prompts.json:
        stream = engine.submit(tokens[0], params)
        answer_stream(iter(stream) if prompts.raw else strip_start(stream), "reading the prompt")
        answers = [stream.result()]
    else:
        with working("answering"):
            answers = engine.generate(tokens, params)
    if prompts.raw:
        return answers
    return [replace(reply, text=reply.text.strip()) for reply in answers]


def _print_answers(
    plan: duoka.Plan, questions: Sequence[str], answers: Sequence[Completion], took: Measured
) -> None:
    """Print the answers with their prompts, token counts and measurements as JSON."""
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
    print_json(
        {
            "model": plan.model,
            "devices": plan.devices,
            "answers": answered,
            "measured": took.to_dict(plan.forecast),
        }
    )
