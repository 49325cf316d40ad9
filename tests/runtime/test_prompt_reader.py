from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_frame
from PIL import Image

import duoka
from duoka.errors import UsageError
from duoka.runtime.prompt_reader import PromptReader, refuse_beyond
from duoka.tools.demo.checkpoint import CONFIG


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> PromptReader:
    """Planned for 3 prompts of 64 tokens and 32 new ones."""
    directory: Path = tmp_path_factory.mktemp("model")
    write_frame(directory, CONFIG)
    workload = duoka.Workload(batch=3, prompt_tokens=64, new_tokens=32, images=1)
    return PromptReader.open(duoka.Checkpoint.open(directory), workload)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[5] * 65], r"the prompt has 65 tokens; .* for 64"),
        ([[5], []], "empty"),
    ],
)
def test_limits_of_the_plan_are_kept(reader: PromptReader, prompts: Any, message: str) -> None:
    reader.check([[5] * 64])
    with pytest.raises(UsageError, match=message):
        reader.check(prompts)


def test_plain_text_is_continued_as_it_is(reader: PromptReader) -> None:
    ids = reader.plain("<|user|> hi")
    assert reader.chat.stop_ids[1] not in ids
    assert reader.tokenizer.decode(ids, skip_special_tokens=True).strip() == "<|user|> hi"


def test_a_model_without_eyes_is_shown_nothing(reader: PromptReader) -> None:
    picture = Image.new("RGB", (56, 56), "red")
    with pytest.raises(UsageError, match="takes no images"):
        reader.check_images([picture])
    with pytest.raises(UsageError, match="takes no images"):
        reader.prompt("What?", images=[picture])


def test_tokens_beyond_the_embedding_are_refused() -> None:
    refuse_beyond([1, 63], 64)
    for token in (64, -1):
        with pytest.raises(
            UsageError, match=f"token {token} is invalid; the token ids of this model are 0 to 63"
        ):
            refuse_beyond([1, token], 64)
    with pytest.raises(
        UsageError, match="token -1 is invalid; the token ids of this model are from 0 on"
    ):
        refuse_beyond([-1], None)
