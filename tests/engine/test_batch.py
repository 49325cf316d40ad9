"""Files of prompts: what their lines say of sampling, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from duoka.engine import Completion, Grammar, SamplingParams
from duoka.engine.batch import AnswerFile, BatchPrompt, read_prompts
from duoka.errors import UsageError
from duoka.models.text.messages import ChatMessage

DEFAULTS = SamplingParams(temperature=0.5, top_k=7)


def read(path: Path, *rows: Any) -> list[BatchPrompt]:
    texts = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(texts), encoding="utf-8")
    return read_prompts(path)


def test_a_line_has_parameters_of_its_own(tmp_path: Path) -> None:
    params = {
        "temperature": 1, "top_p": 0.9, "min_p": 0.1, "top_k": 3, "repetition_penalty": 1.1,
        "presence_penalty": -1, "frequency_penalty": 0.5, "seed": 4, "max_new_tokens": 5,
        "min_new_tokens": 2,
    }  # fmt: skip
    first, second, third = read(
        tmp_path / "prompts.jsonl",
        {"prompt": "a", **params, "stop": ["x", "y"]},
        {"messages": [{"role": "user", "content": "b"}], "temperature": 0},
        '"c"',
    )
    assert first.sampling(DEFAULTS) == SamplingParams(**params, stop=("x", "y"))
    assert second.sampling(DEFAULTS) == SamplingParams(temperature=0, top_k=7)
    assert third.sampling(DEFAULTS) == DEFAULTS


def test_a_line_has_a_grammar(tmp_path: Path) -> None:
    form = {"type": "regex", "regex": "[0-9]+"}
    first, second = read(
        tmp_path / "prompts.jsonl",
        {"prompt": "a", "response_format": form},
        {"prompt": "b", "response_format": {"type": "text"}},
    )
    assert first.sampling(DEFAULTS).grammar == Grammar.regex("[0-9]+")
    assert second.sampling(DEFAULTS) == DEFAULTS
    with pytest.raises(UsageError, match=r":2: the regex '\(' can't be compiled"):
        read(
            tmp_path / "prompts.jsonl",
            '"a"',
            {"prompt": "b", "response_format": {"type": "regex", "regex": "("}},
        )


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"heat": 1}, "'heat' is unknown; supported: prompt, messages, id, frequency_penalty"),
        ({"temperature": "hot"}, "its temperature is not a 64-bit number"),
        ({"temperature": True}, "its temperature is not a 64-bit number"),
        ({"temperature": 10**400}, "its temperature is not a 64-bit number"),
        ({"temperature": -1}, "temperature is -1; it must be at least 0"),
        ({"top_k": 1.5}, "its top_k is not a 64-bit integer"),
        ({"max_new_tokens": None}, "its max_new_tokens is not a 64-bit integer"),
        ({"stop": "x"}, "its stop is not a list of strings"),
        ({"stop": [""]}, "stop is ('',); a stop string can't be empty"),
        ({"response_format": {"type": "xml"}}, "response_format is {'type': 'xml'}"),
    ],
)
def test_what_a_line_may_not_say(params: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refusal:
        read(tmp_path / "prompts.jsonl", '"a"', {"prompt": "b", **params})
    assert f"prompts.jsonl:2: {message}" in str(refusal.value)


def test_answers_belong_to_what_was_asked(tmp_path: Path) -> None:
    file, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    completion = Completion(text="b", tokens=(), prompt_tokens=1, shared_tokens=0, finish="stop")
    (prompt,) = read(file, {"prompt": "a", "temperature": 1})
    with AnswerFile(out, [prompt]) as answers:
        answers.add(prompt, completion)
    with AnswerFile(out, read(file, {"temperature": 1, "prompt": "a"})) as answers:
        assert answers.answered == {0}
    for row in ({"prompt": "a", "temperature": 2}, {"prompt": "a"}):
        with pytest.raises(UsageError, match="something other than answers to these prompts"):
            AnswerFile(out, read(file, row))
    # Files of answers from before lines had parameters still belong to their prompts.
    assert (
        BatchPrompt(0, None, (ChatMessage(role="user", content="a"),)).digest == "4988f1bcad8f9b7d"
    )
