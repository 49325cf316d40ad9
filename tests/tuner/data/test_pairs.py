from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzzing import damaged, fuzz, told_of
from hypothesis import given
from hypothesis import strategies as st
from tuning import TEMPLATE

from duoka import TuneSettings
from duoka.errors import UsageError
from duoka.models.text.messages import ChatMessage
from duoka.models.text.prompts import ChatFormat
from duoka.tuner.data import Batches, Dataset, read_dataset
from duoka.tuner.data.pairs import pair_samples, read_pair
from duoka.tuner.data.rows import Chat, PromptCompletion, rename_columns

USER = {"role": "user", "content": "q"}
GOOD, BAD = ({"role": "assistant", "content": content} for content in ("good", "bad"))
SYSTEM, MORE = {"role": "system", "content": "s"}, {"role": "user", "content": "more"}
SHAREGPT = [{"from": "human", "value": "q"}]
DPO = TuneSettings(dpo=True)


def conversations(*messages: dict[str, str]) -> list[Chat]:
    """The two conversations that begin with these messages, of which the answer is trained."""
    return [
        Chat(
            messages=tuple(ChatMessage(**message) for message in (*messages, answer)),  # type: ignore[arg-type]
            unweighted=frozenset(range(len(messages))),
        )
        for answer in (GOOD, BAD)
    ]


CHATS: dict[str, dict[str, Any]] = {
    "TRL": {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
    "TRL, in the answers": {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    # UltraFeedback
    "TRL, and the prompt beside them": {
        "prompt": "q", "messages": [USER, GOOD], "score_chosen": 8.5, "score_rejected": 2,
        "chosen": [USER, GOOD], "rejected": [USER, BAD],
    },
    "texts after messages": {"prompt": [USER], "chosen": "good", "rejected": "bad"},
    "messages after a text": {"prompt": "q", "chosen": GOOD, "rejected": [BAD]},
    "LLaMA-Factory": {
        "conversations": SHAREGPT,
        "chosen": {"from": "gpt", "value": "good"},
        "rejected": {"from": "gpt", "value": "bad"},
    },
    "LLaMA-Factory, in a text": {
        "conversations": json.dumps(SHAREGPT), "chosen": "good", "rejected": "bad"
    },
    "LLaMA-Factory, Alpaca": {"instruction": "q", "input": "", "chosen": "good", "rejected": "bad"},
    "Intel's Orca": {"question": "q", "system": "", "chosen": "good", "rejected": "bad"},
    "ms-swift": {"messages": [USER, GOOD], "rejected_response": "bad"},
    "ms-swift, messages": {"messages": [USER, GOOD], "rejected_messages": [USER, BAD]},
    "LLaMA-Factory, v1": {"chosen_messages": [USER, GOOD], "rejected_messages": [USER, BAD]},
    "ms-swift, a question": {"query": "q", "response": "good", "rejected_response": "bad"},
    "ChatGLM-6B": {"prompt": "q", "response": "good", "rejected": "bad"},
    "a table": {
        "instruction": "q", "chosen": "good", "rejected": "bad", "messages": None, "prompt": "",
        "rejected_response": None, "id": 7,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CHATS)
def test_chats(name: str) -> None:
    assert read_pair(CHATS[name]) == conversations(USER)


def test_context() -> None:
    row = {"messages": [USER, GOOD, MORE, GOOD], "system": "s", "rejected_response": "bad"}
    assert read_pair(row) == conversations(SYSTEM, USER, GOOD, MORE)
    row = {"instruction": "q", "input": "x", "chosen": "good", "rejected": "bad", "system": "s"}
    question = {"role": "user", "content": "q\nx"}
    assert read_pair({**row, "history": [["a", "b"]]}) == conversations(
        SYSTEM, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, question
    )


def test_texts() -> None:
    expected = [PromptCompletion("1+1 ", "= 2"), PromptCompletion("1+1 ", "is 3")]
    assert read_pair({"prompt": "1+1 ", "chosen": "= 2", "rejected": "is 3"}) == expected
    implicit = [PromptCompletion("1+1", " = 2"), PromptCompletion("1+1", " is 3")]
    assert read_pair({"chosen": "1+1 = 2", "rejected": "1+1 is 3"}) == implicit
    row = {"prompt": "1+1 ", "completion": "= 2", "rejected": "is 3"}
    assert read_pair(row) == expected


def test_answers_of_several_turns() -> None:
    """All of the answers that differ are trained, and no others."""
    row = {"chosen": [USER, GOOD, MORE, GOOD], "rejected": [USER, BAD, MORE, BAD]}
    for chat in read_pair(row):
        assert isinstance(chat, Chat)
        assert (len(chat.messages), chat.unweighted) == (4, {0})


REFUSED: dict[str, dict[str, Any]] = {
    "it has no pair of answers: chosen and rejected, or": {"messages": [USER, GOOD]},
    "it has no pair of answers: ": {"prompt": "q", "chosen": "good", "rejected": ""},
    "chosen and rejected are equal": {"prompt": "q", "chosen": "good", "rejected": "good"},
    "not two answers after common": {"chosen": [USER, GOOD], "rejected": [MORE, GOOD]},
    "are not two answers": {"chosen": [USER, GOOD], "rejected": [USER, GOOD, MORE, BAD]},
    "after common messages": {"chosen": [SYSTEM, USER, GOOD], "rejected": [SYSTEM, MORE, BAD]},
    "are not two texts": {"chosen": "good", "rejected": [USER, BAD]},
    "its keys are a; supported: ": {"a": 1, "rejected": "bad"},
    "'an answer' is not a list": {"messages": [USER], "chosen": 3, "rejected": 4},
    "message 2 is an empty answer": {"messages": [USER], "chosen": " ", "rejected": "bad"},
    "'label' is 7": {"prompt": "q", "chosen": "good", "rejected": "bad", "label": 7},
    "'images' isn't supported": {**CHATS["TRL"], "images": ["a.png"]},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_other_rows_are_refused(reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        read_pair(REFUSED[reason])


def test_named_columns() -> None:
    names = {"prompt": "ask", "chosen": "yes", "rejected": "no"}
    row = rename_columns({"ask": "q", "yes": "good", "no": "bad", "prompt": "other"}, names)
    assert read_pair(row) == conversations(USER)
    for columns in (names, {"chosen": "a", "rejected": "b"}, {"messages": "m", "rejected": "b"}):
        assert TuneSettings(dpo=True, columns=columns).columns == columns
    with pytest.raises(UsageError, match="which are for DPO"):
        TuneSettings(columns=names)
    with pytest.raises(UsageError, match="chosen, text"):
        TuneSettings(dpo=True, columns={"prompt": "a", "chosen": "b", "text": "c"})


def test_a_template_that_changes_earlier_answers(chat: ChatFormat) -> None:
    """Their answers would be two samples each."""
    good, bad = {**GOOD, "content": "x|good"}, {**BAD, "content": "x|bad"}
    row = {"chosen": [USER, good, MORE, GOOD], "rejected": [USER, bad, MORE, BAD]}
    assert len(pair_samples(row, chat, 90, "all")) == 2
    chat.tokenizer.chat_template = TEMPLATE.replace(
        "message.content", "(message.content if loop.last else message.content.split('|')[-1])"
    )
    with pytest.raises(UsageError, match="--train-on last"):
        pair_samples(row, chat, 90, "all")
    for sample, answer in zip(pair_samples(row, chat, 90, "last"), ("good", "bad"), strict=True):
        tokens = [number for number, learns in zip(*sample, strict=True) if learns]
        assert chat.tokenizer.decode(tokens) == f"{answer}<|end|>"


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def pair_row(number: int) -> dict[str, Any]:
    return {"prompt": f"{number}", "chosen": "y" * (number + 1), "rejected": "n"}


def test_pairs_stay_together(tmp_path: Path, chat: ChatFormat) -> None:
    """In files, in evaluations, in steps, and with weights."""
    paths = [
        write(tmp_path / f"{name}.jsonl", *map(pair_row, numbers))
        for name, numbers in (("a", range(4)), ("b", range(4, 9)))
    ]
    weighted = [f"{paths[0]}=2", str(paths[1])]
    data = read_dataset(weighted, chat, DPO, seq_length=20)
    assert (len(data), data.group_size) == (18, 2)
    data.save(tmp_path / "samples")
    data = Dataset.load(tmp_path / "samples")
    assert data.group_size == 2
    assert sorted(data.draw(0, 7)) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 5, 6, 7, 8]
    batches = Batches(data, batch=4, micro_batch=2, seed=7)
    assert (batches.num_rows, batches.steps_per_epoch) == (13, 4)
    seen = []
    for number in range(4):
        for micro_batch in batches[number].micro_batches:
            assert micro_batch.num_losses == len(micro_batch.rows) / 2 <= 2
            samples = [sample for row in micro_batch.rows for sample in row]
            assert all(np.diff(samples)[::2] == 1)
            assert len(set(micro_batch.places)) <= micro_batch.num_losses
            seen += samples[::2]
            longest = data.lengths[samples].max()
            assert micro_batch.tensors()["input_ids"].shape[1] >= longest
    assert sorted(seen) == sorted(2 * data.draw(0, 7))
    for number in (1, 3):
        some = read_dataset(paths, chat, TuneSettings(dpo=True, max_samples=number), seq_length=20)
        assert len(some) == 2 * number
    trained, evaluated = data.split(0.3, 0)
    assert (len(trained), len(evaluated)) == (12, 6)
    for part in (trained, evaluated):
        assert part.lines[::2].tolist() == part.lines[1::2].tolist()


def test_rows_that_are_too_long_or_equal(tmp_path: Path, chat: ChatFormat) -> None:
    """Of a bad pair nothing is left."""
    long, equal = {**pair_row(1), "rejected": "n" * 40}, {**pair_row(2), "rejected": "yyy"}
    path = write(tmp_path / "a.jsonl", pair_row(0), long, equal, pair_row(3))
    with pytest.raises(UsageError, match=r"1 of 4 rows are invalid\n.*:3: chosen and rej"):
        read_dataset([path], chat, DPO, seq_length=20)
    settings = TuneSettings(dpo=True, skip_bad=True)
    data = read_dataset([path], chat, settings, seq_length=20)
    assert data.lines.tolist() == [1, 1, 4, 4]
    assert [row.kind for row in data.bad_rows] == ["too long", "with equal answers"]


@fuzz()
@given(st.sampled_from([*CHATS.values()]).flatmap(damaged))
def test_damaged_rows_are_read_or_refused(row: Any) -> None:
    if isinstance(row, dict):
        try:
            assert len(read_pair(row)) == 2
        except UsageError as error:
            told_of(error, "", 1000)
