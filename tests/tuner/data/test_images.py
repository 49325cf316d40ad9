"""Pictures in rows: as other trainers write them, and as they are kept."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from image_checkpoints import write_family, write_glm4v
from PIL import Image

from duoka import Checkpoint, TuneSettings
from duoka.errors import TrainingError, UsageError
from duoka.models.from_checkpoint import chat_format_of, tokenizer_of
from duoka.models.text.chatglm_tokenizer import ChatGLMTokenizer
from duoka.models.text.image_prompts import SquareImages
from duoka.models.text.messages import ChatMessage
from duoka.models.text.prompts import ChatFormat
from duoka.tuner.data import Batches, Dataset, image_size, open_image, read_dataset
from duoka.tuner.data.images import read_data_image
from duoka.tuner.data.rows import Chat, PromptCompletion, read_row

SIZES = {"red": (60, 56), "blue": (40, 70)}
ANSWER = {"role": "assistant", "content": "y"}


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    (tmp_path / "photos").mkdir()
    for colour, size in SIZES.items():
        Image.new("RGB", size, colour).save(tmp_path / f"photos/{colour}.png")
    return tmp_path / "photos"


@pytest.fixture(scope="session")
def glm4v(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    return chat_of(write_glm4v(tmp_path_factory.mktemp("glm-4v")))


def chat_of(directory: Path) -> ChatFormat:
    checkpoint = Checkpoint.open(directory)
    return chat_format_of(checkpoint, tokenizer_of(checkpoint, ChatGLMTokenizer))


@pytest.fixture
def read(glm4v: ChatFormat, photos: Path) -> Callable[..., Dataset]:
    def read(*rows: dict[str, Any], chat: ChatFormat = glm4v, **settings: Any) -> Dataset:
        path = photos.parent / "rows.jsonl"
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return read_dataset([path], chat, TuneSettings(**settings), seq_length=128)

    return read


def content(colour: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", SIZES[colour], colour).save(file, "PNG")
    return file.getvalue()


def data_url(colour: str) -> str:
    return f"data:image/png;base64,{base64.b64encode(content(colour)).decode()}"


def user(text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": text, **more}


def parts(*names: str, **image: Any) -> list[dict[str, Any]]:
    return [
        {"type": "image", **image} if name == "image" else {"type": "text", "text": name}
        for name in names
    ]


R, B = "photos/red.png", "photos/blue.png"
FORMS: dict[str, tuple[dict[str, Any], list[tuple[str, list[str]]]]] = {
    "ms-swift": (
        {"messages": [user("<image>a"), ANSWER], "images": [R]},
        [("a", [R])],
    ),
    "a placeholder for each of two": (
        {"messages": [user("<image>\n<image>a"), ANSWER, user("b<image>"), ANSWER],
         "images": [R, B, R]},
        [("a", [R, B]), ("b", [R])],
    ),
    "none: before the first question": (
        {"messages": [{"role": "system", "content": "s"}, user("a"), ANSWER, user("b"), ANSWER],
         "images": [R, B]},
        [("a", [R, B]), ("b", [])],
    ),
    "one, under another key": (
        {"query": "<image>a", "response": "y", "image": R},
        [("a", [R])],
    ),
    "in the history": (
        {"query": "b", "response": "y", "history": [["<image>a", "y"]], "images": [R]},
        [("a", [R]), ("b", [])],
    ),
    "LLaMA-Factory, v1": (
        {"messages": [user([{"type": "image_url", "value": R}, {"type": "text", "value": "a"}]),
                      ANSWER]},
        [("a", [R])],
    ),
    "LLaVA": (
        {"id": "7", "image": R, "conversations": [
            {"from": "human", "value": "<image>\na"}, {"from": "gpt", "value": "y"}]},
        [("a", [R])],
    ),
    "LLaVA, the picture behind": (
        {"image": R, "conversations": [
            {"from": "human", "value": "a\n<image>"}, {"from": "gpt", "value": "y"}]},
        [("a", [R])],
    ),
    "LLaMA-Factory's Alpaca": (
        {"instruction": "<image>a", "input": "", "output": "y", "images": [R]},
        [("a", [R])],
    ),
    "of GLM-4's demo": (
        {"messages": [user("a", image=R), ANSWER, user("b"), ANSWER]},
        [("a", [R]), ("b", [])],
    ),
    "OpenAI": (
        {"messages": [user([
            {"type": "text", "text": "a"},
            {"type": "image_url", "image_url": {"url": R, "detail": "low"}}]), ANSWER]},
        [("a", [R])],
    ),
    "Qwen": ({"messages": [user(parts("image", "a", image=f"file://{R}")), ANSWER]}, [("a", [R])]),
    "parts without pictures, as in Hugging Face's": (
        {"messages": [user(parts("image", "a", "image")), ANSWER], "images": [R, B]},
        [("a", [R, B])],
    ),
    "a chat as JSON, in a table": (
        {"messages": json.dumps([user("<image>a"), ANSWER]), "images": [R]},
        [("a", [R])],
    ),
    "text alone": ({"messages": [user("a"), ANSWER], "images": None}, [("a", [])]),
    "no key for pictures: text": ({"messages": [user("<image>a"), ANSWER]}, [("<image>a", [])]),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_forms(name: str) -> None:
    row, expected = FORMS[name]
    opened: list[str] = []

    def open_named(value: Any) -> Image.Image:
        while isinstance(value, dict):
            value = value.get("url") or value["image"]
        opened.append(value.removeprefix("file://"))
        return Image.new("RGB", (1, 1 + len(opened)))

    chat = read_row(row, open_named)
    assert isinstance(chat, Chat)
    questions = [message for message in chat.messages if message.role == "user"]
    seen = [
        (message.content, [opened[image.height - 2] for image in message.images])
        for message in questions
    ]
    assert seen == expected


BAD: dict[str, dict[str, Any]] = {
    "the questions have 2 <image> placeholders, and the row 1 image": {
        "messages": [user("<image><image>a"), ANSWER], "images": [R]},
    "the questions have 1 <image> placeholder, and the row 2 images": {
        "messages": [user("<image>a"), ANSWER], "images": [R, B]},
    "the questions have 1 <image> placeholder, and the row 0 images": {
        "messages": [user(parts("image", "a")), ANSWER]},
    "both the row and its messages have images": {
        "messages": [user("a", image=R), ANSWER], "images": [R]},
    "photos/green.png' can't be read: No such file": {
        "messages": [user("a"), ANSWER], "images": ["photos/green.png"]},
    "can't be read: it is not a supported image": {
        "messages": [user("a"), ANSWER], "images": ["rows.jsonl"]},
    "training downloads none": {"messages": [user("a"), ANSWER], "images": ["https://x/a.png"]},
    "an image is not base64": {
        "messages": [user("a"), ANSWER], "images": ["data:image/png;base64,§"]},
    "an image is of type int": {"messages": [user("a"), ANSWER], "image": 7},
    "images aren't supported here": {"text": "a", "image": R},
    "'video' isn't supported": {"messages": [user("a"), ANSWER], "video": "a.mp4"},
}  # fmt: skip


@pytest.mark.parametrize("reason", BAD)
def test_bad_rows(reason: str, read: Callable[..., Dataset]) -> None:
    good = {"messages": [user("a"), ANSWER]}
    with pytest.raises(UsageError) as refused:
        read(BAD[reason], good)
    assert "rows.jsonl:1: " in str(refused.value)
    assert reason in str(refused.value)
    dataset = read(BAD[reason], good, skip_bad=True)
    assert (len(dataset), dataset.images) == (1, ())


def test_models_without_pictures_refuse_them(
    chat: ChatFormat, read: Callable[..., Dataset]
) -> None:
    with pytest.raises(UsageError, match="'images' isn't supported: training uses text only"):
        read({"messages": [user("a"), ANSWER], "images": [R]}, chat=chat)


@pytest.mark.parametrize(
    "form",
    ["file", "file beside the program", "url", "bytes", "feature", "feature of a file"],
)
def test_what_is_kept_of_a_picture(
    form: str, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(photos)
    directory = photos / "elsewhere" if form == "file beside the program" else photos
    value: Any = {
        "file": "red.png",
        "file beside the program": "red.png",
        "url": {"url": data_url("red")},
        "bytes": content("red"),
        "feature": {"bytes": content("red"), "path": "elsewhere.png"},
        "feature of a file": {"bytes": None, "path": str(photos / "red.png")},
    }[form]
    reference, image = read_data_image(value, directory)
    assert image_size(reference) == image.size == SIZES["red"]
    assert open_image(reference).tobytes() == image.tobytes()
    Image.new("RGB", (1, 1)).save(photos / "red.png")
    if "file" in form:
        with pytest.raises(TrainingError, match="has changed since the run began"):
            open_image(reference)
    else:
        assert open_image(memoryview(reference)).size == SIZES["red"]


def test_samples_have_the_tokens_of_their_pictures(
    read: Callable[..., Dataset], glm4v: ChatFormat, tmp_path: Path
) -> None:
    """Expanded and never trained; the pictures of a micro-batch are those of its rows, in order."""
    dataset = read(
        {"messages": [user("<image><image>a"), ANSWER], "images": [R, B]},
        {"messages": [user("a"), ANSWER]},
        {"messages": [user("b"), ANSWER], "images": [B]},
    )
    first, second = (dataset.tokens(at) for at in (0, 1))
    assert isinstance(glm4v.images, SquareImages)
    begin = glm4v.images.ids[0]
    expected = second[0].tolist()
    place = expected.index(97)  # "a"
    expected[place:place] = glm4v.images.ids * 2
    assert first[0].tolist() == expected
    assert not first[1][first[0] == begin].any()
    assert first[1].sum() == second[1].sum()
    assert [[image_size(it) for it in images] for images in dataset.images] == [
        [SIZES["red"], SIZES["blue"]], [], [SIZES["blue"]],
    ]  # fmt: skip
    dataset.save(tmp_path / "samples")
    loaded = Dataset.load(tmp_path / "samples")
    assert loaded.images == dataset.images
    assert loaded.fingerprint == dataset.fingerprint
    (micro_batch,) = Batches(loaded, batch=3, micro_batch=3, shuffle=False)[0].micro_batches
    assert sorted(image_size(it) for it in micro_batch.images) == sorted(
        SIZES[it] for it in ("red", "blue", "blue")
    )
    trained, evaluated = loaded.split(0.4, 0)
    assert sorted(map(len, trained.images + evaluated.images)) == [0, 1, 2]


def test_other_pictures_are_another_run(read: Callable[..., Dataset], photos: Path) -> None:
    row = {"messages": [user("a"), ANSWER], "images": [R]}
    before = read(row).fingerprint
    assert read(row).fingerprint == before
    Image.new("RGB", SIZES["red"], "green").save(photos / "red.png")
    assert read(row).fingerprint != before


def test_a_long_chat_keeps_the_pictures_of_its_turns(read: Callable[..., Dataset]) -> None:
    turns = [it for text in ("<image>a", "<image>b", "<image>c") for it in (user(text), ANSWER)]
    row = {"messages": turns * 4, "images": [R, B, R] * 4}
    first, last = read(row), read(row, train_on="last")
    sizes = [[image_size(it) for it in dataset.images[0]] for dataset in (first, last)]
    whole = [SIZES[it] for it in ("red", "blue", "red")] * 4
    number = len(sizes[0])
    assert 1 < number == len(sizes[1]) < len(whole)
    assert sizes == [whole[:number], whole[-number:]]


def test_pictures_in_a_table(glm4v: ChatFormat, photos: Path) -> None:
    """Hugging Face's feature; another column by its name; and rows without a picture."""
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table(
        {
            "ask": ["<image>a", "b"],
            "say": ["y", "y"],
            "photo": pa.array([[{"bytes": content("red"), "path": None}], None], pa.list_(image)),
        }
    )
    pq.write_table(table, photos / "rows.parquet")
    columns = {"prompt": "ask", "response": "say", "images": "photo"}
    settings = TuneSettings(columns=columns)
    dataset = read_dataset([photos / "rows.parquet"], glm4v, settings, seq_length=64)
    assert list(map(len, dataset.images)) == [1, 0]
    assert open_image(dataset.images[0][0]).size == SIZES["red"]


@pytest.mark.parametrize("family", ["llava", "qwen2_vl", "gemma3"])
def test_a_processors_tokens(family: str, read: Callable[..., Dataset], tmp_path: Path) -> None:
    """Those of a prompt, and the tensors of one picture after another are those of both."""
    chat = chat_of(write_family(family, tmp_path / family))
    dataset = read({"messages": [user("<image>a"), ANSWER], "images": [R]}, chat=chat)
    image = open_image(dataset.images[0][0])
    prompt = chat.prompt([ChatMessage(role="user", content="a", images=(image,))])
    ids, is_trained = dataset.tokens(0)
    assert ids[: len(prompt)].tolist() == [*prompt]
    assert not is_trained[: len(prompt)].any()
    assert chat.images is not None
    alone, both = chat.images.pictures([image]), chat.images.pictures([image, image])
    assert prompt.pictures.keys() <= alone.keys()  # type: ignore[attr-defined]
    for name, expected in prompt.pictures.items():  # type: ignore[attr-defined]
        value = alone[name]
        assert torch.equal(torch.cat([value, value]), both[name])
        assert torch.equal(value, expected)


def test_completions_have_no_pictures() -> None:
    row = {"prompt": "a", "completion": "b"}
    assert read_row(row, lambda value: value) == PromptCompletion("a", "b")
