from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from fuzzing import fuzz, told_of
from hypothesis import given
from hypothesis import strategies as st

from duoka.errors import UsageError
from duoka.tuner.data import files
from duoka.tuner.data.files import DataRow, data_files, read_rows, split_weight
from duoka.tuner.data.rows import Document


def rows_of(path: Path, content: bytes | str) -> list[DataRow]:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return list(read_rows(path))


def test_lines(tmp_path: Path) -> None:
    content = b'\xef\xbb\xbf{"text": "a"}\r\n\r\n  \n{"text": "b\\u0000"}'
    rows = rows_of(tmp_path / "a.jsonl", content)
    assert rows == [DataRow(1, {"text": "a"}), DataRow(4, {"text": "b\0"})]
    assert rows_of(tmp_path / "b.json", content) == rows, "lines under the other name"
    assert rows_of(tmp_path / "c.jsonl", "") == []


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "not valid JSON"),
        (b"[1]", "a JSON list; expected an object"),
        (b"null", "a JSON null"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"a": 1' + b"0" * 5000 + b"}", "digits"),
        (b'{"a": "caf\xe9"}', "not UTF-8 text: byte 10 is 0xe9"),
    ],
)
def test_hostile_lines(tmp_path: Path, line: bytes, reason: str) -> None:
    good = b'{"text": "a"}'
    rows = rows_of(tmp_path / "a.jsonl", b"\n".join([good, line, good]))
    assert [row.line for row in rows] == [1, 2, 3]
    assert [bool(row.problem) for row in rows] == [False, True, False]
    assert reason in rows[1].problem
    assert len(rows[1].problem) < 300


def test_a_line_that_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_MOST_LINE_BYTES", 20)
    rows = rows_of(tmp_path / "a.jsonl", '{"text": "a"}\n' + "x" * 50 + '\n{"text": "b"}\n')
    assert [row.line for row in rows] == [1, 2, 3]
    assert "more than 20 bytes" in rows[1].problem
    assert rows[2].value == {"text": "b"}


def test_lists(tmp_path: Path) -> None:
    rows = rows_of(tmp_path / "a.json", '\ufeff[\n{"a": 1},\n{\n"a": 2}, {"a": 3}\n]\n')
    assert rows == [DataRow(1, {"a": 1}), DataRow(2, {"a": 2}), DataRow(3, {"a": 3})]
    assert rows_of(tmp_path / "b.json", "[]") == []
    for broken in ('[{"a": 1}, {"a": ]', '[{"a": 1}', '[{"a": 1}, ' + "[" * 100_000):
        with pytest.raises(UsageError, match=r"c.json can't be read: "):
            rows_of(tmp_path / "c.json", broken)
    assert rows_of(tmp_path / "d.json", '[3, {"a": 1}]')[0].problem == "the item is not an object"


def test_csv(tmp_path: Path) -> None:
    content = '\ufeffprompt,completion\r\n1,NA\r\n\r\n"a\nb","say ""c"""\r\n1,2,3\r\nx,\r\n'
    rows = rows_of(tmp_path / "a.csv", content)
    assert rows[0] == DataRow(2, {"prompt": "1", "completion": "NA"}), "no number, not nothing"
    assert rows[1] == DataRow(4, {"prompt": "a\nb", "completion": 'say "c"'})
    assert (rows[2].line, rows[2].problem) == (6, "it has 3 fields; the first line has 2")
    assert rows[3] == DataRow(7, {"prompt": "x", "completion": ""})
    for damaged in ('text\na\n"b', "text\na\n" + "b" * 200_000, b"text\na\n\xff\n"):
        rows = rows_of(tmp_path / "b.csv", damaged)
        assert "the table can't be read from here on" in rows[-1].problem


def test_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    said = [{"role": "user", "content": "你好"}]
    parquet.write_table(pyarrow.table({"messages": [said, said], "text": [None, None]}), path)
    monkeypatch.setattr(files, "_ROWS_AT_A_TIME", 1)
    value = {"messages": said, "text": None}
    assert list(read_rows(path)) == [DataRow(1, value), DataRow(2, value)]
    content = path.read_bytes()
    for damaged in (b"", b"PAR1", content[:-5], b"PAR1" + bytes(40) + content[44:]):
        rows = rows_of(path, damaged)
        assert "the table can't be read from here on" in rows[-1].problem
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError, match="needs pyarrow") as refused:
        list(read_rows(path))
    assert "pip install" in str(refused.value.hint)


def test_texts_come_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_PIECE_CHARACTERS", 5)
    (row,) = rows_of(tmp_path / "a.md", b"\xef\xbb\xbfab\r\ncdefg\nh")
    assert isinstance(row.value, Document)
    assert list(row.value.pieces) == ["ab\ncdefg\n", "h"]


def test_directories(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    for name in ("b.jsonl", "a.csv", "inner/c.json", "README.md", "notes", "logo.png"):
        (tmp_path / name).touch()
    found = data_files([tmp_path, tmp_path / "README.md"])
    assert [file.relative_to(tmp_path).as_posix() for file in found] == [
        *("a.csv", "b.jsonl", "inner/c.json", "README.md"),
    ]
    for name in ("b.jsonl", "a.csv", "inner/c.json"):
        (tmp_path / name).unlink()
    assert data_files([tmp_path]) == [tmp_path / "README.md"]
    (tmp_path / "README.md").unlink()
    for path in (tmp_path, tmp_path / "nothing.jsonl", tmp_path / "logo.png"):
        with pytest.raises(UsageError, match=path.name) as refused:
            data_files([path])
        assert ".jsonl" in str(refused.value.hint)


@pytest.mark.parametrize(
    ("path", "name", "weight"),
    [
        ("a.jsonl", "a.jsonl", 1),
        ("a.jsonl=2", "a.jsonl", 2),
        ("data=0.5", "data", 0.5),
        ("b=2.jsonl=.25", "b=2.jsonl", 0.25),
        ("b=2", "b=2", 1),
        ("a.jsonl=two", "a.jsonl=two", 1),
        ("a.jsonl=1.2.3", "a.jsonl=1.2.3", 1),
        ("a.jsonl=2.", "a.jsonl", 2),
    ],
)
def test_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, name: str, weight: float
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("b=2").touch()
    assert split_weight(path) == (Path(name), weight)


@pytest.mark.parametrize("weight", ["0", "-1", "1001", "0.0001"])
def test_weights_out_of_range(weight: str) -> None:
    with pytest.raises(
        UsageError, match=f"the weight of a.jsonl is {weight}; it must be from"
    ) as e:
        split_weight(f"a.jsonl={weight}")
    assert "a.jsonl=0.5" in str(e.value.hint)


def test_what_is_no_file(tmp_path: Path) -> None:
    fifo = tmp_path / "a.jsonl"
    os.mkfifo(fifo)
    with pytest.raises(UsageError, match=r"a\.jsonl can't be read"):
        list(read_rows(fifo))


_SNIPPETS: list[bytes] = [
    *(b'{"text": "a"}', b"{", b"[", b"]", b",", b'"', b"\n", b"\r", b"\0", b"\xff", b"text"),
    *(b"\xef\xbb\xbf", b"1e999", b"\\ud800", b"PAR1", b'{"messages": []}'),
]


@fuzz()
@given(
    suffix=st.sampled_from([".jsonl", ".json", ".csv"]),
    content=st.lists(st.sampled_from(_SNIPPETS) | st.binary(max_size=4), max_size=20),
)
def test_any_bytes(suffix: str, content: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        try:
            rows = rows_of(Path(directory) / f"a{suffix}", b"".join(content))
        except UsageError as error:
            told_of(error, directory, 300)  # a list is read as a whole
            return
    value: Any
    for line, value, problem in rows:
        assert line >= 1
        assert isinstance(value, dict)
        assert len(problem) < 1000
