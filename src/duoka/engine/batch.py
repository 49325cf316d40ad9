"""Generate answers to the prompts of a file into another file; resume an interrupted run.

Both files are JSON Lines. A line of the prompt file is a string, or an object with "prompt" or
"messages", and optionally an "id" and sampling parameters. A line of the answer file has the
prompt's number, its id, and the answer, and is written when the answer is complete. A run that is
repeated skips the prompts with an answer; an incomplete last line of a killed run is removed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from duoka.base.files import why
from duoka.base.serialization import parse_json_object
from duoka.errors import DuokaError, MachineError, UsageError
from duoka.models.text.messages import ChatMessage

from .grammar import Grammar
from .request import Completion, SamplingParams

_PENALTIES = ("repetition", "presence", "frequency")
_NUMBERS = ("temperature", "top_p", "min_p", *(f"{kind}_penalty" for kind in _PENALTIES))
_INTEGERS = ("top_k", "max_new_tokens", "min_new_tokens", "seed")
_PARAMS = sorted((*_NUMBERS, *_INTEGERS, "stop", "response_format"))
_KEYS = ("prompt", "messages", "id", *_PARAMS)
_MAX_SHOWN = 10


@dataclass(frozen=True, slots=True)
class BatchPrompt:
    """A prompt of a file.

    `number` counts the file's prompts from 0; `name` is the "id" of its line, or None if it has
    none; `params` are the sampling parameters of its line, as they stand in the file.
    """

    number: int
    name: str | int | None
    messages: tuple[ChatMessage, ...]
    params: Mapping[str, Any] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """A hash of name, messages and parameters, to detect a changed prompt file."""
        chat = [(m.role, m.content) for m in self.messages]
        content = [self.name, chat, *([self.params] if self.params else [])]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]

    def sampling(self, params: SamplingParams) -> SamplingParams:
        """Return the prompt's sampling parameters, with those of the run as defaults."""
        values = {**self.params}
        if "response_format" in values:
            values["grammar"] = Grammar.from_response_format(values.pop("response_format"))
        stop = tuple(values.pop("stop", params.stop))
        return replace(params, **values, stop=stop)


def read_prompts(path: Path, system: str | None = None) -> list[BatchPrompt]:
    """Read the prompts of a file; `system` becomes the first message of each.

    Raises
    ------
    UsageError
        If the file can't be read or has no prompts; or with a list of the invalid lines and the
        reason for each.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise UsageError(
            f"the prompts {path} can't be read: {why(error)}", hint="give a JSON Lines file"
        ) from error
    prompts: list[BatchPrompt] = []
    problems: list[str] = []
    system_chat = [ChatMessage(role="system", content=system)] if system else []
    for line, text in enumerate(lines, 1):
        if text.strip():
            try:
                name, messages, params = _parse_line(text)
                prompt = BatchPrompt(len(prompts), name, (*system_chat, *messages), params)
                prompt.sampling(SamplingParams())  # raises if a value is out of range
                prompts.append(prompt)
            except DuokaError as error:
                problems.append(f"{path}:{line}: {error}")
    if problems:
        problem_lines = [f"{len(problems)} lines are invalid", *problems[:_MAX_SHOWN]]
        if len(problems) > _MAX_SHOWN:
            problem_lines.append(f"and {len(problems) - _MAX_SHOWN} more")
        raise UsageError(
            "\n".join(problem_lines),
            hint='each line is {"prompt": "…"}, or {"messages": [{"role": "user", "content": '
            '"…"}]}',
        )
    if not prompts:
        raise UsageError(f"{path} has no prompts")
    return prompts


def _parse_line(text: str) -> tuple[str | int | None, list[ChatMessage], dict[str, Any]]:
    """Parse a line; return the prompt's id (None without one), messages and sampling parameters."""
    row = None
    with suppress(ValueError):  # `parse_json_object` below reports invalid JSON
        row = {"prompt": json.loads(text)} if text.lstrip().startswith('"') else None
    row = row or parse_json_object(text, "the line")
    unknown = sorted(row.keys() - {*_KEYS})
    if unknown:
        raise UsageError(f"{unknown[0]!r} is unknown; supported: {', '.join(_KEYS)}")
    if ("prompt" in row) == ("messages" in row):
        raise UsageError("it needs either a prompt or messages")
    name = row.get("id")
    if name is not None and (isinstance(name, bool) or not isinstance(name, str | int)):
        raise UsageError("its id is neither a string nor a number")
    params = {key: row[key] for key in _PARAMS if key in row}
    _check_types(params)
    messages = row.get("messages", [{"role": "user", "content": row.get("prompt")}])
    if not isinstance(messages, list) or not messages:
        raise UsageError("its messages are not a non-empty list")
    return name, [_parse_message(message) for message in messages], params


def _check_types(params: Mapping[str, Any]) -> None:
    """Raise UsageError for the first sampling parameter with a value of the wrong type."""
    for name, value in params.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_number = is_number and abs(value) < 2**63
        if name in _NUMBERS and not is_number:
            raise UsageError(f"its {name} is not a 64-bit number")
        if name in _INTEGERS and not (is_number and isinstance(value, int)):
            raise UsageError(f"its {name} is not a 64-bit integer")
        is_list = isinstance(value, list) and all(isinstance(text, str) for text in value)
        if name == "stop" and not is_list:
            raise UsageError("its stop is not a list of strings")


def _parse_message(value: Any) -> ChatMessage:
    """Check a message of a line, which must have exactly a role and a non-empty content."""
    if not isinstance(value, Mapping) or value.keys() != {"role", "content"}:
        raise UsageError("a message has only a role and a content")
    text = value["content"]
    if not isinstance(text, str) or not text.strip():
        raise UsageError("a prompt is not a non-empty string")
    return ChatMessage(role=value["role"], content=text)


class AnswerFile:
    """The file of the answers to a file's prompts, to which a run appends.

    Parameters
    ----------
    path : Path
        A new file, or the answer file of an earlier run with the same prompts.
    prompts : sequence of BatchPrompt

    Raises
    ------
    UsageError
        If the file contains something other than answers to these prompts.
    MachineError
        If the file can't be written.
    """

    def __init__(self, path: Path, prompts: Sequence[BatchPrompt]) -> None:
        self._path = path
        self.answered: set[int] = set()
        try:
            self._file = path.open("a+b")
        except OSError as error:
            raise self._make_write_error(error) from error
        try:
            self._resume(prompts)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> AnswerFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, prompt: BatchPrompt, completion: Completion) -> None:
        """Append an answer and flush the file to disk (fsync)."""
        content = {
            "number": prompt.number,
            **({} if prompt.name is None else {"id": prompt.name}),
            "answer": completion.text,
            "finish": completion.finish,
            "prompt_tokens": completion.prompt_tokens,
            "new_tokens": len(completion.tokens),
            "prompt_digest": prompt.digest,
        }
        try:
            self._file.write(f"{json.dumps(content, ensure_ascii=False)}\n".encode())
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._make_write_error(error) from error
        self.answered.add(prompt.number)

    def _resume(self, prompts: Sequence[BatchPrompt]) -> None:
        """Read which prompts an earlier run has answered, and cut off an incomplete last line."""
        numbers = {(prompt.number, prompt.digest): prompt.number for prompt in prompts}
        self._file.seek(0)
        end = 0
        for line in self._file:
            if not line.endswith(b"\n"):
                break  # incomplete: the earlier run was killed
            try:
                row = parse_json_object(line.decode(), "a line")
                self.answered.add(numbers[row["number"], row["prompt_digest"]])
            except (DuokaError, KeyError, TypeError, ValueError) as error:
                raise UsageError(
                    f"{self._path} contains something other than answers to these prompts",
                    hint="give a new file",
                ) from error
            end += len(line)
        self._file.truncate(end)

    def _make_write_error(self, error: OSError) -> MachineError:
        """Return the error for a failed write to the file."""
        return MachineError(
            f"the answers can't be written to {self._path}: {why(error)}",
            hint="the existing answers are kept; the same command continues after them",
        )


def unanswered(prompts: Sequence[BatchPrompt], answers: AnswerFile) -> Iterator[BatchPrompt]:
    """Yield the prompts without an answer in the file."""
    return (prompt for prompt in prompts if prompt.number not in answers.answered)
