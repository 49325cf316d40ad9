"""``duoka generate``: answers to given prompts, one or a batch."""

from __future__ import annotations

import json as json_format
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import duoka
from duoka.base.files import why
from duoka.errors import UsageError

from . import options, planning
from .terminal import answer

if TYPE_CHECKING:
    from duoka.runtime import Answer, Generator, Sampling


def generate(
    model: options.Model = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            "--prompt",
            "-p",
            metavar="TEXT",
            help='A question; several make a batch. "-" reads one from the standard input.',
            show_default=False,
        ),
    ] = None,
    prompt_file: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="A file whose text is a question.", show_default=False),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text, instead of answering a question.")
    ] = False,
    gpus: options.Gpus = None,
    context: options.Context = None,
    new_tokens: options.NewTokens = None,
    batch: options.Batch = None,
    dtype: options.Dtype = None,
    prefill_chunk: options.PrefillChunk = None,
    cache: options.Cache = None,
    quantize: options.Quantize = None,
    objective: options.Objective = None,
    use_all: options.UseAll = False,
    strategy: options.Strategy = None,
    pin: options.Pin = None,
    uncut: options.Uncut = None,
    reserve: options.Reserve = None,
    offload: options.Offload = False,
    device_map: options.DeviceMapFile = None,
    plan_file: options.PlanFile = None,
    replan: options.Replan = False,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    seed: options.Seed = None,
    system: options.System = None,
    json: Annotated[bool, typer.Option("--json", help="Print the answers as JSON.")] = False,
    cache_weights: options.CacheWeights = False,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    debug: options.Debug = False,
) -> None:
    """Load a model and answer. Only the answers go to the standard output.

    [bold]duoka generate[/] ./chatglm3-6b --prompt "What is NVLink?" --gpus "virtual:2x8GiB"

    [bold]duoka generate[/] ./chatglm3-6b -p "你好" -p "Hello" --json

    cat question.txt | [bold]duoka generate[/] ./chatglm3-6b --prompt - --temperature 0.8
    """
    options.refuse_damaged(system or "")
    questions = _questions(prompt or [], prompt_file or [])
    chosen = planning.chosen(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    if batch is None and plan_file is None:
        batch = len(questions)
    wishes = planning.Wishes.of(locals())
    asked = planning.Asked(revision=revision, trust_remote_code=trust_remote_code, to_run=True)
    made = planning.make_plan(model, plan_file, wishes, replan=replan, asked=asked)
    generator = planning.load_generator(
        made, trust_remote_code=trust_remote_code, cache_weights=cache_weights
    )
    sampling = planning.sampling(made, chosen)
    prompts = [_prompt(generator, question, raw=raw, system=system) for question in questions]
    if json:
        answers = _answer(generator, prompts, sampling)
        typer.echo(_json(made, questions, answers))
    elif len(prompts) == 1:
        _stream(generator, prompts[0], sampling)
    else:
        texts = [answer.text for answer in _answer(generator, prompts, sampling)]
        answer("\n\n".join(texts) + "\n")


def _questions(prompts: Sequence[str], files: Sequence[Path]) -> list[str]:
    """All texts, in the order of their kinds; the standard input when there is no other."""
    if not prompts and not files and not sys.stdin.isatty():
        prompts = ["-"]
    texts = [options.read_stdin() if text == "-" else text for text in prompts]
    for file in files:
        try:
            texts.append(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(
                f"the prompt file {file} can't be read: {why(error)}",
                hint="name a text file in UTF-8",
            ) from error
    for text in texts:
        options.refuse_damaged(text)
    if not texts:
        raise UsageError("no prompt was given", hint='--prompt "…", --prompt-file FILE, or a pipe')
    if not all(text.strip() for text in texts):
        raise UsageError("a prompt is empty", hint="write a question")
    return texts


def _prompt(generator: Generator, text: str, *, raw: bool, system: str | None) -> list[int]:
    if raw:
        return generator.plain(text)
    return generator.prompt(text.strip(), system=system)


def _answer(
    generator: Generator, prompts: Sequence[Sequence[int]], sampling: Sampling
) -> list[Answer]:
    size = generator.workload.batch
    return [
        answer
        for start in range(0, len(prompts), size)
        for answer in generator.answer(prompts[start : start + size], sampling)
    ]


def _stream(generator: Generator, prompt: Sequence[int], sampling: Sampling) -> None:
    with generator.stream(prompt, sampling) as pieces:
        said = False
        for piece in pieces:
            shown = piece if said else piece.lstrip()
            said = said or bool(shown)
            answer(shown)
    answer("\n")


def _json(plan: duoka.Plan, questions: Sequence[str], answers: Sequence[Answer]) -> str:
    told = [
        {"prompt": question, **asdict(answer)}
        for question, answer in zip(questions, answers, strict=True)
    ]
    content = {"model": plan.model, "devices": plan.devices, "answers": told}
    return json_format.dumps(content, ensure_ascii=False, indent=1)
