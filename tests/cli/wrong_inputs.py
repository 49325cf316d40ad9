"""Wrong inputs to every command, and what the user sees of each.

The table in ``wrong_inputs.md`` has both; `test_wrong_inputs` compares the program with it, word by
word. ``python tests/cli/wrong_inputs.py`` prints the current table, and with ``--write`` writes it:
for a new input, add a row with its command, and run that.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import struct
import sys
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("wrong_inputs.md")
HEAD = "| command | exit code | message | hint |\n|---|---|---|---|\n"
_CELLS = re.compile(r"\| `(.+?)` \| (\d+) \| (.*) \| (.*) \|")
TINY = {"hidden_size": 64, "ffn_hidden_size": 96, "num_layers": 3}
TINY |= {"num_attention_heads": 4, "kv_channels": 16, "padded_vocab_size": 1536}


@dataclass(frozen=True, slots=True)
class Row:
    """A command, and what becomes of it: texts on one line, without their labels."""

    command: str
    code: int
    message: str
    hint: str


def rows() -> list[Row]:
    """What the page says."""
    found = [_CELLS.fullmatch(line) for line in PAGE.read_text(encoding="utf-8").splitlines()]
    return [
        Row(match[1], int(match[2]), _plain(match[3]), _plain(match[4]))
        for match in found
        if match is not None
    ]


def _plain(cell: str) -> str:
    return "" if cell == "–" else cell.replace("\\|", "|")


def look(command: str, stdin: str = "") -> tuple[Row, str, str]:
    """Run a command in this process; return what is told, and all that was printed."""
    from duoka.cli.main import run

    given = sys.stdin
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        sys.stdin = io.StringIO(stdin)
        try:
            code = run(shlex.split(command)[1:])
        finally:
            sys.stdin = given
    _, _, told = ("\n" + err.getvalue()).rpartition("\nerror: ")
    message, _, hint = told.partition("\nhint: ")
    row = Row(command, code, " ".join(message.split()), " ".join(hint.split()))
    return row, out.getvalue(), err.getvalue()


def prepare() -> None:
    """Write what the commands are given into the working directory, which holds ``tiny``."""
    tiny = json.loads(Path("tiny/config.json").read_text(encoding="utf-8"))
    Path("empty").mkdir()
    Path("text.txt").write_text("What is NVLink?\n", encoding="utf-8")
    Path("binary").write_bytes(b"\xff\xfe\x00")
    os.mkfifo("pipe")
    _model("no-weights", tiny)
    _model("no-json", "{")
    _model("a-list", [])
    _model("no-type", {})
    _model("unknown", {"model_type": "frobnicator", "architectures": ["Frobnicator"]})
    _model("own-code", {"model_type": "frob", "auto_map": {"AutoModelForCausalLM": "a.Frob"}})
    _model("quantized", {**tiny, "quantization_config": {"quant_method": "awq"}})
    _model("spelled", {**tiny, "quantization_config": {"quant_method": "spell"}})
    _model("text-size", {**tiny, "hidden_size": "64"})
    _model("no-heads", {**tiny, "num_attention_heads": 0})
    _model("huge", {**tiny, "num_layers": 10**9})
    _model("truncated", tiny, b"\x08")
    header = json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    _model("short", tiny, struct.pack("<Q", len(header)) + header)
    _model("long-header", tiny, struct.pack("<Q", 2**62) + b"{}")
    index = {"weight_map": {"lm_head.weight": "../../etc/passwd"}}
    _model("outside", tiny)
    Path("outside/model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copytree("tiny", "no-tokenizer")
    Path("no-tokenizer/tokenizer.model").unlink()
    shutil.copytree("tiny", "damaged-tokenizer")
    Path("damaged-tokenizer/tokenizer.model").write_bytes(b"\x0a")
    shutil.copytree("tiny", "other-tokenizer")
    Path("other-tokenizer/config.json").write_text(json.dumps({**tiny, "padded_vocab_size": 1000}))
    shutil.copytree("no-tokenizer", "own-tokenizer")
    stated = json.dumps({"auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}})
    Path("own-tokenizer/tokenizer_config.json").write_text(stated)
    Path("own-tokenizer/own.py").write_text("import some_package\n")
    Path("long.txt").write_text("What is NVLink? " * 99, encoding="utf-8")
    _write_pictures()
    _write_plans_and_maps()
    _write_tuning()


def _write_pictures() -> None:
    from PIL import Image

    Path("empty.png").touch()
    Image.new("RGB", (300, 1)).save("narrow.png")
    Image.effect_noise((99, 99), 50).save("truncated.png")
    content = Path("truncated.png").read_bytes()
    Path("truncated.png").write_bytes(content[: len(content) // 2])
    # The size that a PNG says it has stands at its beginning.
    sizes = struct.pack(">II", 50_000, 50_000)
    header = b"IHDR" + sizes + content[24:29]
    checksum = struct.pack(">I", zlib.crc32(header))
    Path("bomb.png").write_bytes(content[:12] + header + checksum + content[33:])
    Image.new("RGB", (30, 20)).save("cat.png")


def _write_plans_and_maps() -> None:
    made, _, err = look("duoka plan tiny --gpus virtual:64MiB --context 96 --save tiny.plan")
    assert made.code == 0, err
    for name, content in (
        ("other.plan", {}),
        ("newer.plan", {"format": "duoka.plan", "version": 99}),
        ("damaged.plan", {"format": "duoka.plan", "version": 9}),
        ("part.json", {"transformer.embedding": 0}),
        ("misspelt.json", {"": 0, "transformer.word_embeddings": 0}),
        ("elsewhere.json", {"": 7}),
        ("disk.json", {"": "disk"}),
        ("list.json", ["cuda:0"]),
    ):
        Path(name).write_text(json.dumps(content), encoding="utf-8")


def _write_tuning() -> None:
    chat = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Hello."}]
    row = json.dumps({"messages": chat})
    for name, content in (
        ("chats.jsonl", f"{row}\n"),
        ("prompts.jsonl", '{"prompt": "hi"}\n'),
        ("empty.jsonl", ""),
        ("broken.jsonl", f'{row}\n{{"messages": [\n{{"question": "Hello?"}}\n'),
        ("silent.jsonl", json.dumps({"messages": chat[:1]}) + "\n"),
        ("key.toml", "learning-rate = 1e-4\n"),
        ("type.toml", 'lr = "fast"\n'),
        ("broken.toml", "lr =\n"),
    ):
        Path(name).write_text(content, encoding="utf-8")
    Path("damaged-run").mkdir()
    Path("damaged-run/run.json").write_text("{", encoding="utf-8")


def _model(name: str, config: Any, weights: bytes | None = None) -> None:
    Path(name).mkdir()
    text = config if isinstance(config, str) else json.dumps(config)
    Path(name, "config.json").write_text(text, encoding="utf-8")
    if weights is not None:
        Path(name, "model.safetensors").write_bytes(weights)


def table(seen: list[Row]) -> str:
    """Rows in Markdown."""
    lines = []
    for row in seen:
        message, hint = (text.replace("|", "\\|") or "–" for text in (row.message, row.hint))
        lines.append(f"| `{row.command}` | {row.code} | {message} | {hint} |\n")
    return HEAD + "".join(lines)


@contextmanager
def _place() -> Iterator[None]:
    import torch

    from duoka.tools.demo.checkpoint import CONFIG, fresh_model, write_frame, write_weights

    config = {**CONFIG, **TINY}
    with tempfile.TemporaryDirectory() as name, chdir(name):
        write_frame(Path("tiny"), config)
        torch.manual_seed(3)
        write_weights(Path("tiny"), config, fresh_model(config))
        os.environ.update(DUOKA_CACHE=f"{name}/cache", COLUMNS="80", HF_HUB_OFFLINE="1")
        prepare()
        yield


def main() -> None:
    """Print the table, or write it."""
    page = PAGE.read_text(encoding="utf-8")
    with _place():
        new = table([look(row.command)[0] for row in rows()])
    if "--write" in sys.argv:
        start = page.index(HEAD)
        end = page.find("\n\n", start)
        PAGE.write_text(page[:start] + new.rstrip("\n") + (page[end:] if end > 0 else "\n"))
    else:
        sys.stdout.write(new)


if __name__ == "__main__":
    main()
