"""``duoka chat``: a conversation in the terminal."""

from __future__ import annotations

import select
import sys
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from duoka.errors import UsageError
from duoka.planner.out_of_memory import OutOfMemory

from . import errors, planning, signals
from .groups import all_but, with_groups
from .images import ImageOptions, is_address, with_images
from .options import AnswerOptions, ModelOptions, PlanOptions, read_stdin, refuse_damaged
from .terminal import answer_stream, stderr

if TYPE_CHECKING:
    from duoka.engine.conversation import Conversation

_HELP = """\
/image FILE  add an image to the next question
/clear       clear the conversation
/exit        quit (or Ctrl-D)
/help        show this
Lines that are pasted together are one question.
Ctrl-C stops a generation."""
# The next line of a paste arrives within this time.
_PASTE_WAIT_SECONDS = 0.05
_IMAGE = "/image"
_PlanWithImages = Annotated[
    PlanOptions, all_but(PlanOptions, "max_context", "max_batch", "replicas", "adapter")
]


@with_groups
def chat(
    pictures: ImageOptions, options: _PlanWithImages, answering: AnswerOptions, model: ModelOptions
) -> None:
    """Chat with a model. Ctrl-C stops a generation; /help lists the commands.

    [bold]duoka chat[/] ./chatglm3-6b --gpus "24GiB,12GiB"

    [bold]duoka chat[/] ./glm-4-9b-chat --gpus "virtual:2x12GiB" --context 8K --temperature 0.8

    [bold]duoka chat[/] --plan chatglm3.plan --system "Answer in one sentence."

    [bold]duoka chat[/] ./glm-4v-9b --image cat.jpg --gpus "2x24GiB"
    """
    sampling = answering.sampling()
    images = pictures.read()
    planned = planning.find_plan_to_answer(model, with_images(options, images))
    plan, opened, reader = planning.open_model(*planned)
    from duoka.engine import SamplingParams
    from duoka.engine.conversation import Conversation
    from duoka.engine.timing import measured

    params = SamplingParams.recommended(opened.checkpoint.generation_config, **sampling)
    system = planning.usable_system(reader, answering.system)
    reader.check_images(images)
    if system is not None:
        reader.check([reader.prompt("", system=system)])
    with planning.load_engine(plan, opened, options, answering.adapter) as engine:
        conversation = Conversation(engine, reader, params, system=system)
        conversation.show(*images)
        _converse(conversation)
    planning.tell_measured(plan, measured(conversation.answers, engine.peaks()))


def _converse(conversation: Conversation) -> None:
    """Answer lines until the end of the input or /exit; on a terminal Ctrl-C stops an answer."""
    is_person = sys.stdin.isatty() and sys.stdout.isatty()
    if is_person:
        with suppress(ImportError):
            import readline  # importing it gives input() line editing

            readline.parse_and_bind("set enable-bracketed-paste on")
        stderr().print("/help shows the commands, /exit quits")
    goes_on = True
    while goes_on:
        try:
            line = _read_prompted() if is_person else _read()
            goes_on = _handle(conversation, line, is_stoppable=is_person)
        except KeyboardInterrupt:
            if not is_person:
                raise
            stderr().print("\n/exit quits")
            signals.forget()  # only now: earlier, a second Ctrl-C would end the program


def _handle(conversation: Conversation, line: str | None, *, is_stoppable: bool = False) -> bool:
    """Answer a question or run a command; return False to end the conversation.

    `line` is None at the end of the input. If `is_stoppable`, Ctrl-C stops the answer.
    """
    if line is None or line == "/exit":
        return False
    if line == "/clear":
        conversation.clear()
        stderr().print("forgotten")
    elif line == "/help":
        stderr().print(_HELP)
    elif line == _IMAGE or line.startswith(f"{_IMAGE} "):
        _add_image(conversation, line.removeprefix(_IMAGE).strip())
    elif line.startswith("/") and line[1:].isalpha():
        stderr().print(f"{line} is not a command; /help lists the commands", markup=False)
    elif line:
        try:
            _answer(conversation, line)
        except KeyboardInterrupt:
            if not is_stoppable:
                raise
            signals.forget()
            sys.stdout.write("\n")
            stderr().print("stopped")
    return True


def _add_image(conversation: Conversation, name: str) -> None:
    """Add an image file to the next question; print an error if that fails."""
    from duoka.base.images import read_image

    try:
        if not name:
            raise UsageError(f"{_IMAGE} needs a file", hint=f"write {_IMAGE} cat.jpg")
        if is_address(name):
            raise UsageError(
                f"{_IMAGE} reads files, and {name!r} is a URL",
                hint="download the image and give the file, or use --image on the command line",
            )
        image = read_image(Path(name))
        conversation.show(image)
    except UsageError as error:
        errors.print_error(error)
        return
    text = f"{name}, {image.width}x{image.height}: added to your next question"
    stderr().print(text, markup=False)


def _read_prompted() -> str | None:
    """Read a typed line or all lines of a paste; None at the end of the input."""
    try:
        lines = [input("> ")]
    except EOFError:
        sys.stdout.write("\n")
        return None
    with suppress(EOFError):
        while select.select([sys.stdin], [], [], _PASTE_WAIT_SECONDS)[0]:
            lines.append(input())
    return "\n".join(lines).strip()


def _read() -> str | None:
    """Read a line from a file or pipe; None at its end."""
    line = read_stdin(line=True)
    return line.strip() if line else None


def _answer(conversation: Conversation, question: str) -> None:
    """Answer a question on the standard output, and report messages dropped from the context."""
    forgotten = conversation.num_forgotten
    try:
        refuse_damaged(question)
        with closing(conversation.ask(question)) as pieces:
            answer_stream(pieces, "reading the question")
    except UsageError as error:
        # For example the question is too long: the conversation continues.
        errors.print_error(error)
        return
    except OutOfMemory as error:  # a shorter question may still fit
        errors.report(error, debug=False, arguments=sys.argv[1:])
        return
    if conversation.num_forgotten > forgotten:
        rounds = conversation.num_forgotten - forgotten
        text = f"(context full: the oldest {rounds} round(s) were dropped)"
        stderr().print(text)
