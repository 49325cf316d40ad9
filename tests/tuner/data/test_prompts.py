"""Prompts to answer in training: the prompt of any row, with or without its answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from duoka import TuneSettings
from duoka.errors import UsageError
from duoka.models.text.messages import ChatMessage
from duoka.models.text.prompts import ChatFormat
from duoka.tuner.data import Dataset, read_dataset

HI = {"role": "user", "content": "hi"}
HO = {"role": "assistant", "content": "ho!"}
SYSTEM = {"role": "system", "content": "be"}


def read(path: Path, chat: ChatFormat, seq_length: int = 200, **settings: Any) -> Dataset:
    return read_dataset(
        [path], chat, TuneSettings(**settings), seq_length=seq_length,
        is_training=False, has_prompts=True,
    )  # fmt: skip


def write(path: Path, *rows: Mapping[str, Any]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def prompts_of(data: Dataset, chat: ChatFormat) -> list[str]:
    """The prompts as the model reads them; each is followed by places for an answer."""
    texts = []
    for sample in range(len(data)):
        ids, is_answer = data.tokens(sample)
        start = int(is_answer.argmax())
        assert is_answer[start:].all()
        assert set(ids[start:].tolist()) == {chat.tokenizer.eos_token_id}
        texts.append(str(chat.tokenizer.decode(ids[:start])))
    return texts


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [HI]},
        {"messages": [HI, HO]},
        {"conversations": [{"from": "human", "value": "hi"}]},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho!"}]},
        {"conversation": [{"human": "hi"}]},
        {"conversation": [{"human": "hi", "assistant": "ho!"}]},
        {"messages": json.dumps([HI])},
        {"prompt": "hi"},
        {"prompt": [HI]},
        {"prompt": [HI], "completion": [HO]},
        {"prompt": "hi", "response": ""},
        {"query": "hi", "response": "ho!"},
        {"instruction": "hi"},
        {"instruction": "hi", "input": "", "output": ""},
        {"instruction": "hi", "response": "ho!"},
        {"content": "hi"},
        {"question": "hi", "answer": None},
    ],
)
def test_the_prompt_of_a_chat(row: dict[str, Any], tmp_path: Path, chat: ChatFormat) -> None:
    data = read(write(tmp_path / "a.jsonl", row), chat)
    assert prompts_of(data, chat) == ["<|user|>hi<|end|><|assistant|>"]
    assert data.prompts == ("hi",)
    assert data.trained_tokens.tolist() == [128]


def test_what_precedes_the_question(tmp_path: Path, chat: ChatFormat) -> None:
    more = {"role": "user", "content": "more"}
    path = write(
        tmp_path / "a.jsonl",
        {"messages": [SYSTEM, HI, HO, more, HO]},
        {"query": "more", "history": [["hi", "ho!"]], "system": "be"},
    )
    data = read(path, chat)
    turns = [ChatMessage(**turn) for turn in (SYSTEM, HI, HO, more)]
    expected = chat.tokenizer.decode(chat.prompt(turns))
    assert prompts_of(data, chat) == [expected] * 2
    assert data.prompts == ("more", "more")


def test_texts_are_continued(tmp_path: Path, chat: ChatFormat) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "hi", "completion": " ho"}, {"text": "hi"})
    assert prompts_of(read(path, chat), chat) == ["hi"] * 2


def test_lines_are_questions_and_columns_have_names(tmp_path: Path, chat: ChatFormat) -> None:
    lines = tmp_path / "a.txt"
    lines.write_text("hi\n\n  你好  \n")
    data = read(lines, chat, columns={"prompt": "q", "response": "a"}, max_samples=1)
    assert data.prompts == ("hi", "你好")
    assert data.place(1) == f"{lines}:3"
    named = write(tmp_path / "b.jsonl", {"q": "hi"})
    data = read(named, chat, columns={"prompt": "q", "response": "a"})
    assert prompts_of(data, chat) == ["<|user|>hi<|end|><|assistant|>"]


def test_answers_end_at_the_sequence_length(tmp_path: Path, chat: ChatFormat) -> None:
    row = {"messages": [HI, {**HO, "content": "ho" * 500}]}  # the answer doesn't count
    data = read(write(tmp_path / "a.jsonl", row), chat, seq_length=20)
    assert data.lengths.tolist() == [20]
    data.save(tmp_path / "saved")
    assert Dataset.load(tmp_path / "saved").prompts == ("hi",)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"messages": [{"role": "user", "content": "hi" * 50}]}, "the sequence length is 20"),
        ({"messages": []}, "its keys are none"),
        ({"messages": ["hi"]}, "it is not an object"),
        ({"messages": [SYSTEM]}, "isn't allowed after one of role 'system'"),
        ({"other": "hi"}, "its keys are other"),
    ],
)
def test_every_prompt_is_answered_or_refused(
    row: dict[str, Any], problem: str, tmp_path: Path, chat: ChatFormat
) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "hi"}, row)
    with pytest.raises(UsageError, match=problem) as refused:
        read(path, chat, seq_length=20, skip_bad=True)
    assert str(refused.value).startswith("1 of 2 rows are invalid")
    assert refused.value.hint == "fix or shorten them"
