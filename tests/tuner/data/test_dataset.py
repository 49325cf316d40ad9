from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from duoka import TuneSettings
from duoka.errors import FormatError, UsageError
from duoka.models.text.prompts import ChatFormat
from duoka.tuner.data import BadRow, Dataset, read_dataset

ARRAYS = ("ids", "is_trained", "ends", "file_numbers", "lines")


def chat_row(question: str, answer: str, **more: Any) -> dict[str, Any]:
    said = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer, **more},
    ]
    return {"messages": said}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_samples_lie_one_behind_the_other(tmp_path: Path, chat: ChatFormat) -> None:
    first = write(tmp_path / "a.jsonl", chat_row("a", "bc"), {"text": "defghi"})
    (tmp_path / "b.txt").write_text("jk")
    data = read_dataset([first, tmp_path / "b.txt"], chat, seq_length=7)
    assert len(data) == 3
    assert data.lengths.tolist() == [7, 7, 3]
    assert data.trained_tokens.tolist() == [3, 6, 2], "nothing is before a sample's first token"
    assert [data.place(at) for at in range(3)] == [
        f"{first}:1",
        f"{first}:2",
        f"{tmp_path}/b.txt:1",
    ]
    ids, is_trained = data.tokens(0)
    assert chat.tokenizer.decode(ids[is_trained]) == "bc<|end|>"
    assert data.bad_rows == ()


def test_bad_rows(tmp_path: Path, chat: ChatFormat) -> None:
    good = chat_row("a", "b")
    long = chat_row("a", "b" * 50)
    path = write(
        tmp_path / "a.jsonl", good, long, 3, {"a": 1}, chat_row("a", "b", weight=0), {"text": "e"}
    )
    with pytest.raises(UsageError, match=r"3 of 6 rows are invalid\n  .*:3: "):
        read_dataset([path], chat, seq_length=20)
    with pytest.raises(UsageError) as refused:
        read_dataset([path], chat, TuneSettings(long="refuse"), seq_length=20)
    assert str(refused.value) == "\n".join([
        "4 of 6 rows are invalid",
        f"  {path}:2: it has at least 55 tokens; the sequence length is 20",
        f"  {path}:3: the line contains a JSON number; expected an object",
        f"  {path}:4: its keys are a; supported: messages, conversations, a question and its "
        "answer (instruction and output, query and response, …), prompt and completion, or text; "
        "--columns names other keys",
        f"  {path}:5: it has no tokens to train on",
    ])  # fmt: skip
    assert "--skip-bad" in str(refused.value.hint)
    data = read_dataset([path], chat, settings=TuneSettings(skip_bad=True), seq_length=20)
    assert data.lines.tolist() == [1, 6], "of a bad row nothing is left"
    assert [row.line for row in data.bad_rows] == [2, 3, 4, 5]
    assert [row.kind for row in data.bad_rows] == [
        *("too long", "unreadable", "of an unknown form", "without trained tokens"),
    ]
    assert data.bad_rows[0] == BadRow(
        file=str(path),
        line=2,
        reason="it has at least 55 tokens; the sequence length is 20",
        kind="too long",
    )
    alone = read_dataset([write(tmp_path / "b.jsonl", good, {"text": "e"})], chat, seq_length=20)
    for name in ("ids", "is_trained", "ends"):
        assert np.array_equal(getattr(data, name), getattr(alone, name))


def test_many_bad_rows_are_counted(tmp_path: Path, chat: ChatFormat) -> None:
    path = write(tmp_path / "a.jsonl", {"x" * 5000: 1}, *[{}] * 11)
    with pytest.raises(UsageError, match="12 of 12 rows are invalid") as refused:
        read_dataset([path], chat, seq_length=20)
    assert str(refused.value).count("its keys are none") == 9
    assert max(map(len, str(refused.value).splitlines())) < 1000, "reasons are short"
    assert str(refused.value).endswith("… and 2 more")
    with pytest.raises(UsageError, match=r"no samples in .*: 12 of 12 rows"):
        read_dataset([path], chat, settings=TuneSettings(skip_bad=True), seq_length=20)


def test_no_rows(tmp_path: Path, chat: ChatFormat) -> None:
    path = write(tmp_path / "a.jsonl")
    with pytest.raises(UsageError, match=r"no samples in .*a\.jsonl$"):
        read_dataset([path], chat, seq_length=20)
    with pytest.raises(UsageError, match="at least 2"):
        read_dataset([path], chat, seq_length=1)
    (tmp_path / "b.txt").write_bytes(b"abc\n\xff")
    with pytest.raises(UsageError, match=r"b\.txt:1: it is not UTF-8 text: byte"):
        read_dataset([tmp_path / "b.txt"], chat, seq_length=2)


def test_which_answers_are_learnt(tmp_path: Path, chat: ChatFormat) -> None:
    messages = chat_row("a", "b")["messages"] + chat_row("c", "d")["messages"]
    path = write(tmp_path / "a.jsonl", {"messages": messages})
    learnt = {
        which: read_dataset([path], chat, settings=TuneSettings(train_on=which), seq_length=20)
        for which in ("all", "last")
    }
    assert learnt["all"].trained_tokens.tolist() == [4]
    assert learnt["last"].trained_tokens.tolist() == [2]
    assert learnt["all"].fingerprint != learnt["last"].fingerprint


def test_saved_samples_are_mapped_into_memory(tmp_path: Path, chat: ChatFormat) -> None:
    data = read_dataset(
        [write(tmp_path / "a.jsonl", chat_row("你", "好"), {"text": "x y"})], chat, seq_length=40
    )
    path = tmp_path / "samples.safetensors"
    data.save(path)
    loaded = Dataset.load(path)
    for name in ARRAYS:
        saved = getattr(data, name)
        assert np.array_equal(getattr(loaded, name), saved)
        assert getattr(loaded, name).dtype == saved.dtype
    assert loaded.fingerprint == data.fingerprint
    assert (loaded.files, loaded.seq_length) == (data.files, 40)
    if (maps := Path("/proc/self/maps")).exists():
        assert str(path) in maps.read_text(), "mapped, not read"


def test_what_isnt_samples_is_refused(tmp_path: Path, make_dataset: Any) -> None:
    path = tmp_path / "samples.safetensors"
    with pytest.raises(FormatError, match="can't be read, or has no samples: No such file"):
        Dataset.load(path)
    make_dataset([5, 9]).save(path)
    whole = path.read_bytes()
    for damaged in (b"", b"{}", whole[:-8], whole.replace(b"about", b"other")):
        path.write_bytes(damaged)
        with pytest.raises(FormatError, match="can't be read, or has no samples"):
            Dataset.load(path)


@pytest.mark.parametrize(("share", "number"), [(0.05, 1), (0.25, 5), (0.5, 10), (0.99, 19)])
def test_a_share_of_the_rows_is_set_aside(share: float, number: int, make_dataset: Any) -> None:
    dataset = make_dataset([10] * 40)
    dataset = replace(dataset, lines=np.arange(40) // 2)  # two samples of each row
    dataset = replace(dataset, weights=(2.0,), num_dropped=(1,))
    trained, evaluated = dataset.split(share, seed=3)
    assert (trained.weights, trained.num_dropped) == ((2.0,), (1,))
    assert (evaluated.weights, evaluated.num_dropped) == ((), ()), "each sample once"
    assert len(evaluated) == 2 * number
    assert len(trained) == 40 - len(evaluated)
    assert not {*trained.lines} & {*evaluated.lines}
    for part in (trained, evaluated):
        for sample in range(len(part)):
            line = int(part.lines[sample])
            whole = [dataset.tokens(at)[0].tolist() for at in (2 * line, 2 * line + 1)]
            assert part.tokens(sample)[0].tolist() in whole
    assert [*dataset.split(share, seed=3)[1].lines] == [*evaluated.lines]
    assert {*dataset.split(share, seed=4)[1].lines} != {*evaluated.lines} or number == 19


def test_a_share_of_one_row_is_of_its_samples(make_dataset: Any) -> None:
    dataset = make_dataset([10] * 8)
    trained, evaluated = replace(dataset, lines=np.ones(8, np.int64)).split(0.25, seed=0)
    assert (len(trained), len(evaluated)) == (6, 2)
    with pytest.raises(UsageError, match=r"one sample, and 0\.25 of it can't be set aside"):
        make_dataset([10]).split(0.25, seed=0)


def test_long_conversations(tmp_path: Path, chat: ChatFormat) -> None:
    messages = [*chat_row("a", "b")["messages"], *chat_row("c", "d" * 50)["messages"]]
    path = write(tmp_path / "a.jsonl", {"messages": messages * 2}, chat_row("e", "f"))
    data = read_dataset([path], chat, seq_length=20)
    assert data.lengths.tolist() == [6, 6]
    assert data.num_dropped == (6,)
    refusing = TuneSettings(long="refuse")
    with pytest.raises(
        UsageError, match=r"a\.jsonl:1: it has at least 61 tokens; the sequence len"
    ):
        read_dataset([path], chat, refusing, seq_length=20)
    # Of these nothing fits.
    completion = {"prompt": "a" * 30, "completion": "b"}
    path = write(tmp_path / "b.jsonl", chat_row("e", "f" * 30), completion, chat_row("e", "f"))
    data = read_dataset([path], chat, seq_length=20)
    assert data.lengths.tolist() == [6]
    assert [(row.line, row.kind) for row in data.bad_rows] == [(1, "too long"), (2, "too long")]
    with pytest.raises(UsageError, match="2 of 3 rows are invalid"):
        read_dataset([path], chat, refusing, seq_length=20)
    (tmp_path / "c.jsonl").write_text(json.dumps(completion))
    with pytest.raises(UsageError, match=r"no samples in .*: 1 of 1 rows"):
        read_dataset([tmp_path / "c.jsonl"], chat, seq_length=20)


def test_named_columns(tmp_path: Path, chat: ChatFormat) -> None:
    path = write(tmp_path / "a.jsonl", {"ask": "a", "say": "b", "id": 3}, {"ask": "c", "say": "d"})
    named = TuneSettings(columns={"prompt": "ask", "response": "say"})
    data = read_dataset([path], chat, named, seq_length=20)
    plain = read_dataset(
        [write(tmp_path / "b.jsonl", chat_row("a", "b"), chat_row("c", "d"))], chat, seq_length=20
    )
    assert data.ids.tolist() == plain.ids.tolist()
    missing = TuneSettings(columns={"prompt": "ask", "response": "say", "system": "persona"})
    with pytest.raises(UsageError, match="no row has the column 'persona'") as refused:
        read_dataset([path], chat, missing, seq_length=20)
    assert refused.value.hint == "columns of the last row: ask, say"
    (tmp_path / "c.txt").write_text("text")
    with pytest.raises(UsageError, match="no row has the column") as refused:
        read_dataset([tmp_path / "c.txt"], chat, named, seq_length=20)
    assert refused.value.hint == "columns of the last row: none"
    # Rows for evaluation may have another form.
    rows = read_dataset([tmp_path / "b.jsonl"], chat, missing, seq_length=20, is_training=False)
    assert rows.ids.tolist() == plain.ids.tolist()


def test_weights_and_the_most_samples(tmp_path: Path, chat: ChatFormat) -> None:
    first = write(tmp_path / "a.jsonl", *[chat_row("a", str(at)) for at in range(6)], 3)
    second = write(tmp_path / "b.jsonl", *[chat_row("b", str(at)) for at in range(2)])
    (tmp_path / "c.txt").write_text("c" * 100)
    paths = [f"{first}=0.5", str(second), f"{tmp_path / 'c.txt'}=2"]
    most = TuneSettings(max_samples=9)
    data = read_dataset(paths, chat, most, seq_length=20)
    assert data.weights == (0.5, 1.0, 2.0)
    assert data.file_numbers.tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 2]
    assert data.lines.tolist() == [1, 2, 3, 1, 2, 1, 1, 1, 1], "the first of each file"
    assert len(data.draw(0, 0)) == 2 + 2 + 8
    data.save(tmp_path / "samples")
    assert Dataset.load(tmp_path / "samples").weights == data.weights
    with pytest.raises(UsageError, match=r"a\.jsonl:7"):
        read_dataset(paths, chat, seq_length=20)
    whole = read_dataset([second], chat, most, seq_length=20, is_training=False)
    assert (len(whole), whole.weights) == (2, ())
    with pytest.raises(UsageError, match=r"no training data at .*=2"):
        read_dataset([f"{second}=2"], chat, seq_length=20, is_training=False)
