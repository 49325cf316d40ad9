from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from duoka import TuneSettings
from duoka.models.text.prompts import ChatFormat
from duoka.tuner.data import Dataset, read_dataset, render_preview


def printed(data: Dataset, chat: ChatFormat, number: int) -> str:
    console = Console(file=io.StringIO(), width=300)
    console.print(render_preview(data, chat.tokenizer, number))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_samples_and_what_is_trained(tmp_path: Path, chat: ChatFormat) -> None:
    path = tmp_path / "a.jsonl"
    said = [{"role": "user", "content": "a\x1b[31m [b]"}, {"role": "assistant", "content": "yes"}]
    rows = [{"messages": said}, {"text": "x" * 300}, {"text": "y"}]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows) + "{}\n" * 7)
    data = read_dataset([path], chat, settings=TuneSettings(skip_bad=True), seq_length=400)
    shown = printed(data, chat, 2)
    first, *rest = shown.splitlines()
    assert first == ("3 samples, 320 tokens, of which 305 (95%) are trained; the longest has 301")
    assert rest[:2] == [
        "7 rows skipped (7 of an unknown form)",
        f"  {path}:4: its keys are none; supported: messages, conversations, a question and its "
        "answer (instruction and output, query and response, …), prompt and completion, or text; "
        "--columns names other keys",
    ]
    assert rest[6:] == [
        "  … and 2 more",
        "",
        f"{path}:1  17 tokens, 4 trained",
        "<|user|>a\\x1b[31m [b]<|end|><|assistant|>⟦yes<|end|>⟧",
        "",
        f"{path}:2  301 tokens, 300 trained",
        "x⟦" + "x" * 199 + "⟧ …",
    ]
    assert "\x1b" not in shown
    assert f"{path}:3" in printed(data, chat, 9)


def test_pairs(tmp_path: Path, chat: ChatFormat) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"instruction": "a", "chosen": "yes", "rejected": "no"}\n' * 2)
    data = read_dataset([f"{path}=2"], chat, TuneSettings(dpo=True), seq_length=40)
    lines = printed(data, chat, 1).splitlines()
    assert lines == [
        "2 pairs, 30 tokens, of which 14 (47%) are trained; the longest has 8",
        "4 pairs per epoch by the weights of the files",
        "",
        f"{path}:1  8 tokens, 4 trained, chosen",
        "<|user|>a<|end|><|assistant|>⟦yes<|end|>⟧",
        "",
        f"{path}:1  7 tokens, 3 trained, rejected",
        "<|user|>a<|end|><|assistant|>⟦no<|end|>⟧",
    ]


def test_skipped_and_truncated_rows_are_counted_by_kind(tmp_path: Path, chat: ChatFormat) -> None:
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    long = {"messages": [said[0], {"role": "assistant", "content": "b" * 30}]}
    rows = [{"messages": said * 9}, {"messages": said * 3}, {"messages": said * 5}, long, long, {}]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows) + "{\n")
    settings = TuneSettings(skip_bad=True)
    lines = printed(read_dataset([f"{path}=2"], chat, settings, seq_length=18), chat, 0)
    assert lines.splitlines()[1:3] == [
        "6 samples per epoch by the weights of the files",
        "4 rows skipped (2 too long, 1 of an unknown form, 1 unreadable); 2 conversations "
        "truncated (16 messages dropped)",
    ]
    path.write_text(json.dumps(rows[0]))
    lines = printed(read_dataset([path], chat, settings, seq_length=18), chat, 0)
    assert lines.splitlines()[1:] == ["1 conversation truncated (12 messages dropped)"]
