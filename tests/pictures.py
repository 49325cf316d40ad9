"""Make the pictures of docs/tutorial.md: `python tests/pictures.py GLM_4_9B_CHAT DEMO_MODEL`.

The first directory holds the config of GLM-4-9B-chat, the second what `duoka demo --keep` writes.
The plan is made for the simulated machine `unequal`; a server on virtual GPUs is real. Needs a
Chromium, and fonts for Chinese. Stop other programs of duoka first: `duoka top` shows them, too.
"""

from __future__ import annotations

import io
import re
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from chromium import Chromium, executable, running_chromium
from doctoring import machine
from PIL import Image
from rich.console import Console
from rich.text import Text
from served import serving

from duoka.cli.main import run

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
GPUS = ("--gpus", "virtual:32MiB,24MiB", "--context", "128", "--sequences", "2")
QUESTIONS = {
    "page.png": ("en-US", "What is pipeline parallelism?", "What is NVLink?"),
    "page.zh-CN.png": ("zh-CN", "什么是流水线并行？", "显存不足怎么办？"),
}


def main(glm: str, demo: str) -> None:
    """Write all pictures."""
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, running_chromium(executable() or "") as browser:
        with pytest.MonkeyPatch.context() as patch:
            machine(patch, "unequal")
            show(browser, "plan.png", "plan", glm, "--context", "8K")
        log = Path(folder) / "log"
        with serving(Path(demo), log, gpus=GPUS) as server:
            for name, (language, *questions) in QUESTIONS.items():
                chat(browser, server.url, name, language, questions)
            show(browser, "top.png", "top", "--once")


def show(browser: Chromium, name: str, *arguments: str) -> None:
    """Draw what a command prints in a terminal."""
    with redirect_stdout(io.StringIO()) as out, pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORCE_COLOR", "1")
        patch.setenv("COLUMNS", "98")
        assert run(arguments) == 0
    terminal = Console(record=True, file=io.StringIO(), width=98)
    terminal.print(Text.from_ansi(out.getvalue().strip("\n")))
    drawn = terminal.export_svg(title="duoka " + " ".join(map(_shorten, arguments)))
    drawn = re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "terminal.html"
        file.write_text(f'<meta charset="utf-8"><body style="margin:0">{drawn}', encoding="utf-8")
        width, height = (float(size) for size in re.findall(r'viewBox="0 0 (\S+) (\S+)"', drawn)[0])
        with browser.page(file.as_uri(), width=int(width), height=int(height)) as page:
            page.picture(IMAGES / name)
    shrink(IMAGES / name)


def _shorten(argument: str) -> str:
    return f"./{Path(argument).name}" if "/" in argument else argument


def chat(browser: Chromium, url: str, name: str, language: str, questions: list[str]) -> None:
    """Ask on the chat page, wait for the answers, and draw it."""
    with browser.page(url, width=1200, height=720, language=language) as page:
        for number, question in enumerate(questions, start=1):
            page.ask(question)
            # The number of tokens comes with the end of an answer.
            metas = "[...document.querySelectorAll('.answer .meta')]"
            page.wait(f"{metas}.filter((meta) => /token/.test(meta.innerText)).length >= {number}")
        page.picture(IMAGES / name)
    shrink(IMAGES / name)


def shrink(path: Path) -> None:
    """Reduce a picture to 64 colours."""
    with Image.open(path) as picture:
        picture.convert("RGB").quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
