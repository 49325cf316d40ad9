"""Pictures from files and from the web, in answers and in chats."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from image_checkpoints import FAMILIES, write_family, write_glm4v
from PIL import Image

from duoka.base import images as reading

from .conftest import Program

GPUS = ("--gpus", "virtual:3x64MiB", "--use-all", "--context", "128", "--new-tokens", "8")
ASKED = ("-p", "What is this?")


@pytest.fixture(scope="module")
def glm4v(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_glm4v(tmp_path_factory.mktemp("glm-4v"))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pictures")
    Image.effect_noise((60, 56), 99).save(directory / "noise.png")
    Image.new("RGB", (60, 56), "red").save(directory / "red.png")
    (directory / "text.txt").write_text("What is NVLink?")
    return directory


class Handler(BaseHTTPRequestHandler):
    """The web, and its misbehaviour: what a path says is sent."""

    def do_GET(self) -> None:
        kind = self.path.strip("/")
        self.send_response(404 if kind == "absent" else 200)
        self.end_headers()
        if kind == "page":
            self.wfile.write(b"<!doctype html>Please log in")
        elif kind == "huge":
            self.wfile.write(bytes(5000))
        elif kind != "absent":
            file = io.BytesIO()
            Image.new("RGB", (60, 56), "red").save(file, "PNG")
            self.wfile.write(file.getvalue())

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def web() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_a_chat_about_pictures(
    glm4v: Path, pictures: Path, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the published format to answers over three GPUs; a bad picture doesn't end it."""
    monkeypatch.chdir(pictures)
    said = (
        "What is this?\n/image red.png\nAnd this?\n/image absent.png\n/image text.txt\n/image\n"
        "/image red.png\n/image noise.png\n/clear\nWhat is this?\n"
    )
    done = program("chat", glm4v, *GPUS, "--image", "noise.png", stdin=said)
    assert done.returncode == 0
    assert "on vgpu:0, vgpu:1, vgpu:2" in done.stderr
    assert "red.png, 60x56: added to your next question" in done.stderr
    assert "the oldest 1 round(s) were dropped" in done.stderr  # planned for one picture
    assert "'absent.png' can't be read: No such file" in done.stderr
    assert "'text.txt' can't be read: it is not a supported image" in done.stderr
    assert "/image needs a file" in done.stderr
    assert "2 images in a prompt; the plan has memory for 1" in done.stderr
    answers = [
        program("generate", glm4v, *GPUS, "--image", name, *ASKED).stdout
        for name in ("noise.png", "red.png")
    ]
    assert answers[0] != answers[1]
    assert done.stdout.startswith(answers[0])


@pytest.mark.slow
def test_text_alone(glm4v: Path, pictures: Path, program: Program) -> None:
    said = f"What is this?\n/image {pictures / 'red.png'}\n"
    done = program("chat", glm4v, *GPUS, stdin=said)
    assert done.stdout == program("generate", glm4v, *GPUS, *ASKED).stdout
    assert "1 image in a prompt; the plan has memory for 0" in done.stderr


@pytest.mark.slow
def test_pictures_for_each_of_a_batch(glm4v: Path, pictures: Path, program: Program) -> None:
    shown = ("--image", pictures / "noise.png", "--image", pictures / "red.png")
    other = ("-p", "Which is red, and why?")
    both = program("generate", glm4v, *GPUS, *shown, *ASKED, *other).stdout
    alone = [program("generate", glm4v, *GPUS, *shown, *asked).stdout for asked in (ASKED, other)]
    assert [text.strip() for text in both.split("\n\n")] == [text.strip() for text in alone]


@pytest.mark.slow
def test_the_published_tokenizer(
    shared_data: Path, pictures: Path, program: Program, tmp_path: Path
) -> None:
    tokenizer = shared_data / "tokenizers" / "glm-4-9b-chat" / "tokenizer.model"
    directory = write_glm4v(tmp_path / "glm-4v-9b", tokenizer)
    done = program(
        "chat", directory, *GPUS, "--image", pictures / "red.png", stdin="图里有什么？\n"
    )
    assert done.returncode == 0
    assert len(done.stdout) > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_other_families(name: str, pictures: Path, program: Program, tmp_path: Path) -> None:
    directory = write_family(name, tmp_path)
    shown = ("--image", pictures / "noise.png", "--context", "256", "--new-tokens", "8")
    spread = program(
        "generate", directory, *shown, "--gpus", "virtual:2x64MiB", "--use-all", *ASKED
    )
    assert spread.returncode == 0
    one = ("--gpus", "virtual:64MiB")
    whole = program("generate", directory, *shown, *one, *ASKED)
    assert spread.stdout == whole.stdout
    said = f"What?\n/image {pictures / 'red.png'}\nAnd this?\n"
    done = program(
        "chat", directory, *shown, "--images", "2", "--gpus", "virtual:64MiB", stdin=said
    )
    assert (done.returncode, done.stdout.count("\n") >= 2) == (0, True)
    assert "error" not in done.stderr


def test_a_picture_from_the_web(glm4v: Path, pictures: Path, program: Program, web: str) -> None:
    fetched = program("generate", glm4v, *GPUS, "--image", f"{web}/red.png", *ASKED)
    read = program("generate", glm4v, *GPUS, "--image", pictures / "red.png", *ASKED)
    assert fetched.stdout == read.stdout != ""
    said = f"/image {web}/red.png\n"  # nothing that is written in a chat is fetched
    done = program("chat", glm4v, *GPUS, "--image", pictures / "red.png", stdin=said)
    assert "red.png' is a URL" in done.stderr


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("page", "can't be read: it is not a supported image"),
        ("absent", "can't be fetched: the server answers with status 404"),
        ("huge", "can't be fetched: it has more than 3.91 KiB"),
    ],
)
def test_what_the_web_sends_instead(
    path: str, reason: str, program: Program, web: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "MOST_BYTES", 4000)
    done = program("generate", "x", "--image", f"{web}/{path}", *ASKED)
    assert (done.returncode, done.stdout) == (2, "")
    assert reason in done.stderr
    assert "Traceback" not in done.stderr


def test_training_with_images_is_planned_and_checked_alike(program: Program, glm4v: Path) -> None:
    asked = (glm4v, "--train", "lora", "--gpus", "virtual:2x64MiB", "--context", "128")
    asked = (*asked, "--images", "1", "--image-size", "56x56")
    planned = program("plan", *asked, "--use-all")
    assert planned.returncode == 0, planned.stderr
    told = "LoRA training, rank 8 · 1 x 128 tokens · 1 image of 56x56"
    assert told in planned.stdout
    checked = program("check", *asked)
    assert checked.returncode == 0, checked.stdout
    assert told in checked.stdout
    assert "note:" not in checked.stdout
    refused = program("plan", *asked, "--images", "1", "--vision-batch", "1")
    assert refused.returncode == 2
    assert "vision_batch is 1, which is not supported in training" in refused.stderr


@pytest.mark.slow
def test_the_tower_is_trained_if_asked(program: Program, glm4v: Path) -> None:
    asked = (glm4v, "--train", "lora", "--gpus", "virtual:2x64MiB", "--context", "128")
    asked = (*asked, "--images", "1", "--image-size", "56x56")
    gradients = []
    for tower in ((), ("--train-vision",)):
        checked = program("check", *asked, *tower)
        assert checked.returncode == 0, checked.stdout
        planned = json.loads(program("plan", *asked, *tower, "--json").stdout)
        gradients.append(sum(it["gradient_bytes"] for it in planned["forecast"]["devices"]))
    assert gradients[0] < gradients[1]
    without = program("plan", *asked[:-4], "--train-vision")
    assert without.returncode == 2
    assert "train_vision is for images" in without.stderr
