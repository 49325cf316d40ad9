"""What models are given of images: by hand, and by the files of each family's processor."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from image_checkpoints import FAMILIES, write_family, write_glm4v
from PIL import Image

from duoka.checkpoint.checkpoint import Checkpoint
from duoka.errors import CheckpointError, UsageError
from duoka.forecast.workload import Workload
from duoka.models.text.image_prompts import ImagePrompt, joined_pictures, padded_rows
from duoka.models.text.messages import ChatMessage
from duoka.runtime.prompt_reader import PromptReader

PICTURE = Image.effect_noise((56, 56), 50).convert("RGB")
OTHER = Image.new("RGB", (56, 56), "red")


@pytest.fixture(scope="session")
def glm4v(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_glm4v(tmp_path_factory.mktemp("glm-4v"))


def reader(directory: Path) -> PromptReader:
    workload = Workload(prompt_tokens=256, images=2, image_size=(56, 56))
    return PromptReader.open(Checkpoint.open(directory), workload)


def said(text: str, *images: Image.Image) -> ChatMessage:
    return ChatMessage(role="user", content=text, images=images)


@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_by_a_familys_processor(name: str, tmp_path: Path) -> None:
    prompts = reader(write_family(name, tmp_path))
    answered = ChatMessage(role="assistant", content="A cat.")
    prompt = prompts.chat.prompt([said("What?", PICTURE), answered, said("And it?", OTHER)])
    assert isinstance(prompt, ImagePrompt)
    picture = FAMILIES[name].written_out
    text = f"user:{picture}What?\nassistant:A cat.\nuser:{picture}And it?\nassistant:"
    assert prompt == prompts.tokenizer.encode(text, split_special_tokens=False)
    pixels = prompt.pictures["pixel_values"].chunk(2)
    assert not pixels[0].equal(pixels[1])
    # Text alone is written as ever, whatever form the template asks for.
    text = "user:What?\nassistant:"
    assert prompts.prompt("What?") == prompts.tokenizer.encode(text)
    token = FAMILIES[name].tokens[0]
    with pytest.raises(UsageError, match="special token"):
        prompts.prompt(f"What is {token}?", images=[PICTURE])
    assert prompts.tokenizer.convert_tokens_to_ids(token) not in prompts.prompt(f"What is {token}?")


def test_prompts_of_glm4v(glm4v: Path) -> None:
    prompts = reader(glm4v)
    prompt = prompts.prompt("<|user|>", images=[PICTURE])
    start, sop, user, assistant, begin = (256 + number for number in (2, 4, 7, 8, 10))
    text = list(b"<|user|>")
    assert prompt == [start, sop, user, ord("\n"), *[begin] * 6, *text, assistant]
    assert isinstance(prompt, ImagePrompt)
    mean = torch.tensor([0.48145466, 0.4578275, 0.40821073])[:, None, None]
    deviation = torch.tensor([0.26862954, 0.26130258, 0.27577711])[:, None, None]
    pixels = torch.tensor(np.array(PICTURE)).permute(2, 0, 1) / 255
    torch.testing.assert_close(prompt.pictures["pixel_values"], ((pixels - mean) / deviation)[None])
    wide = prompts.prompt("What?", images=[OTHER.resize((200, 30)), OTHER])
    assert isinstance(wide, ImagePrompt)
    assert wide.pictures["pixel_values"].shape == (2, 3, 56, 56)
    assert wide.count(begin) == 12


def test_a_batch(glm4v: Path) -> None:
    prompts = reader(glm4v)
    batch = [prompts.prompt("?", images=[PICTURE]), prompts.prompt("What?", images=[OTHER] * 2)]
    pixels = joined_pictures(batch, torch.bfloat16)["pixel_values"]
    assert (pixels.shape, pixels.dtype) == ((3, 3, 56, 56), torch.bfloat16)
    assert padded_rows(batch) == {}
    ones = {length: torch.ones(1, length, dtype=torch.long) for length in (2, 3)}
    rows = [ImagePrompt([5] * length, 1, {}, {"types": row}) for length, row in ones.items()]
    assert padded_rows([*rows, [1, 2, 3, 4]])["types"].tolist() == [
        [0, 0, 1, 1],
        [0, 1, 1, 1],
        [0, 0, 0, 0],
    ]


def test_what_was_not_planned_is_refused(glm4v: Path, tmp_path: Path) -> None:
    prompts = reader(glm4v)
    prompts.check_images([])
    prompts.check_images([OTHER.resize((999, 300)), OTHER])  # which all become one size
    with pytest.raises(UsageError, match="3 images in a prompt; the plan has memory for 2"):
        prompts.check_images([OTHER] * 3)
    prompts = reader(write_family("qwen2_vl", tmp_path))
    with pytest.raises(UsageError, match="image of 99x300; the plan has memory for images of 56x5"):
        prompts.check_images([OTHER.resize((99, 300))])


def test_damaged_settings(tmp_path: Path) -> None:
    directory = write_family("llava", tmp_path)
    prompts = reader(directory)
    (directory / "preprocessor_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="no image processor could be loaded"):
        prompts.prompt("What?", images=[OTHER])
    for name in ("preprocessor_config.json", "processor_config.json"):
        (directory / name).unlink()
    with pytest.raises(CheckpointError, match="has no image processor configuration"):
        prompts.prompt("What?", images=[OTHER])


def test_a_template_in_a_file_of_its_own(tmp_path: Path) -> None:
    """As transformers' processors wrote it once."""
    directory = write_family("llava", tmp_path)
    expected = reader(directory).prompt("What?", images=[OTHER])
    template = directory / "chat_template.jinja"
    (directory / "chat_template.json").write_text(
        json.dumps({"chat_template": template.read_text()})
    )
    template.unlink()
    assert reader(directory).prompt("What?", images=[OTHER]) == expected


def test_tokens_of_text_that_are_added_have_rows() -> None:
    rows = {"token_type_ids": torch.tensor([[0, 1, 1]]), "boxes": torch.ones(1, 3, 2)}
    prompt = ImagePrompt([5, 6, 7], 1, {}, rows)
    prompt.extend([8, 9])
    assert prompt == [5, 6, 7, 8, 9]
    assert prompt.rows["token_type_ids"].tolist() == [[0, 1, 1, 0, 0]]
    assert prompt.rows["boxes"].shape == (1, 5, 2)
    assert not prompt.rows["boxes"][:, 3:].any()
