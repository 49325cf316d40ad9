"""Images that are made to cost more than they should: each is refused, and the server lives."""

from __future__ import annotations

import asyncio
import base64
import functools
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from abuse import CHAT, children, exchange, message_of, resident_bytes, settled
from image_checkpoints import write_family
from PIL import Image
from served import Served, serving

from duoka import Checkpoint, Workload
from duoka.errors import UsageError
from duoka.runtime.prompt_reader import PromptReader
from duoka.serve.messages import Prompt
from duoka.serve.questions import QuestionReader
from duoka.serve.requests import ChatCompletionRequest


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def asked(*images: bytes) -> list[dict[str, Any]]:
    urls = [f"data:image/png;base64,{base64.b64encode(image).decode()}" for image in images]
    return asked_at(*urls)


def prompt_of(messages: list[dict[str, Any]]) -> Prompt:
    return ChatCompletionRequest.model_validate({"messages": messages}).to_prompt()


def asked_at(*urls: str) -> list[dict[str, Any]]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [{"type": "text", "text": "What?"}, *parts]}]


NOISE = encoded(Image.effect_noise((60, 56), 99).convert("RGB"))
FRAMES = [Image.new("P", (60, 56), number) for number in range(2)]


def plain(side: int) -> bytes:
    return encoded(Image.new("1", (side, side)))


# Encoded where they are asked for: some take a second.
CASES: dict[str, tuple[Callable[[], list[dict[str, Any]]], str]] = {
    "20,000 x 20,000 pixels": (lambda: asked(plain(20_000)), "67108864 pixels"),
    "truncated": (lambda: asked(NOISE[: len(NOISE) // 2]), "it is damaged"),
    "a page": (lambda: asked(b"<!doctype html><svg onload=alert(1)>"), "not a supported image"),
    "a program": (lambda: asked(b"\x7fELF" + bytes(100)), "not a supported image"),
    "PostScript": (lambda: asked(b"%!PS-Adobe-3.0 EPSF-3.0\n"), "not a supported image"),
    "JPEG 2000": (
        lambda: asked(encoded(Image.new("RGB", (60, 56)), "JPEG2000")),
        "not a supported image",
    ),
    "a huge URL that is none": (
        lambda: asked_at("data:image/png;base64," + "A" * 2**24),
        "not a supported image",
    ),
    "no image": (lambda: asked_at("data:text/html;base64,AAAA"), "in the request are"),
    "stop it with `serve shutdown -y`": (
        lambda: asked_at("http://127.0.0.1/"),
        "with --allow-image-urls",
    ),
    "in a file": (lambda: asked_at("file:///etc/passwd"), "in the request are"),
    "many large ones": (
        lambda: asked(*[plain(8000)] * 64),
        "memory for 1 image, and the request has more",
    ),
}


@functools.cache
def animation() -> list[dict[str, Any]]:
    """A question about an image of 3,000 frames."""
    frames = [FRAMES[number % 2] for number in range(3000)]
    return asked(encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family("llava", tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def questions(checkpoint: Path) -> QuestionReader:
    workload = Workload(images=1, image_size=(56, 60))
    return QuestionReader(PromptReader.open(Checkpoint.open(checkpoint), workload))


@pytest.mark.parametrize("name", CASES)
def test_each_is_refused(questions: QuestionReader, name: str) -> None:
    messages, reason = CASES[name]
    with pytest.raises(UsageError) as caught:
        questions.read(prompt_of(messages()))
    assert reason in f"{caught.value}; {caught.value.hint}"


def test_frames_that_follow_arent_read(questions: QuestionReader) -> None:
    first = asked(encoded(FRAMES[0], "GIF"))
    tokens = [questions.read(prompt_of(messages)).tokens for messages in (first, animation())]
    assert tokens[0] == tokens[1]


@pytest.fixture(scope="module")
def seeing(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of a model that sees."""
    log = tmp_path_factory.mktemp("seeing") / "log"
    options = ("--images", "1", "--image-size", "60x56", "--context", "128")
    with serving(checkpoint, log, *options, gpus=("--gpus", "virtual:1x256MiB")) as served:
        yield served


@pytest.mark.slow
def test_a_server_refuses_each_and_lives(seeing: Served) -> None:
    async def ask(messages: Any) -> tuple[int, bytes]:
        return await exchange(seeing.url, message_of(CHAT, {"messages": messages, "max_tokens": 2}))

    async def ask_all() -> list[tuple[int, bytes]]:
        large = asked(encoded(Image.new("RGBA", (6000, 6000))))
        several = [
            large,
            *(messages() for messages, _ in CASES.values()),
            large,
            large,
            animation(),
        ]
        return await asyncio.gather(*map(ask, several))

    (engine,) = children(seeing.process.pid)[:1]
    assert asyncio.run(ask(asked(NOISE)))[0] == 200
    before = resident_bytes(engine)
    first, *refused, _, _, animated = asyncio.run(ask_all())
    assert (first[0], animated[0]) == (200, 200)
    for (_, reason), (code, answer) in zip(CASES.values(), refused, strict=True):
        error = json.loads(answer[answer.index(b"{") :])["error"]
        assert (code, error["type"]) == (400, "invalid_request_error")
        assert reason in error["message"]
    assert settled(seeing.url)["engines"][0]["state"] == "ready"
    assert children(seeing.process.pid)[0] == engine
    # What one took stays with the allocator; several at a time would be more.
    assert resident_bytes(engine) < before + 2**30
    assert asyncio.run(ask(asked(NOISE)))[0] == 200
    assert "Traceback" not in seeing.log.read_text()
