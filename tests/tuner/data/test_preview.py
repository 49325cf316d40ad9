from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

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
    data = read_dataset([path], chat, seq_length=400, skip_bad=True)
    shown = printed(data, chat, 2)
    first, *rest = shown.splitlines()
    assert first == ("3 samples, 320 tokens, of which 305 (95%) are trained; the longest has 301")
    assert rest[:2] == [
        "7 rows skipped:",
        f"  {path}:4: its keys are none; supported: messages, conversations, instruction and "
        "output, prompt and completion, or text",
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
