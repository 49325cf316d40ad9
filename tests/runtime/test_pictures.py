"""Answers about pictures: as transformers' own `generate` gives them, alone and in batches."""

from __future__ import annotations

from pathlib import Path

import pytest
from image_checkpoints import write_family, write_glm4v
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from duoka import models
from duoka.checkpoint.checkpoint import Checkpoint
from duoka.errors import UsageError
from duoka.forecast.workload import Workload
from duoka.runtime import Conversation, Generator, PromptReader, Sampling

PICTURES = [
    Image.effect_noise((56, 56), 99).convert("RGB"),
    Image.new("RGB", (56, 56), "red"),
]
GREEDY = Sampling(temperature=0, max_new_tokens=8)


def generator(directory: Path, images: int = 2) -> Generator:
    """Of a model on the CPU, which no plan was made for."""
    config = models.resolve(Checkpoint.open(directory).config)[0]
    model = AutoModelForImageTextToText.from_pretrained(directory, config=config).eval()
    workload = Workload(
        batch=2,
        prompt_tokens=96,
        new_tokens=8,
        images=images,
        image_size=(56, 56),
        prefill_chunk_tokens=None,
        vision_batch=1,
    )
    return Generator.of(model, Checkpoint.open(directory), workload)


@pytest.fixture(scope="module")
def glm4v(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_glm4v(tmp_path_factory.mktemp("glm-4v"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["llava", "gemma3"])  # whose processors need no torchvision
def test_answers_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    answering = generator(write_family(name, tmp_path))
    parts = [{"type": "image", "image": PICTURES[0]}, {"type": "text", "text": "What?"}]
    inputs = AutoProcessor.from_pretrained(tmp_path).apply_chat_template(
        [{"role": "user", "content": parts}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    rows = answering.model.generate(**inputs, do_sample=False, max_new_tokens=8, pad_token_id=0)
    answer = rows[0, inputs["input_ids"].shape[1] :]
    (told,) = answering.answer([answering.prompt("What?", images=PICTURES[:1])], GREEDY)
    assert told.text == answering.tokenizer.decode(answer, skip_special_tokens=True).strip()
    assert told.prompt_tokens == inputs["input_ids"].shape[1]


def test_a_batch_answers_each_prompt_as_alone(glm4v: Path) -> None:
    answering = generator(glm4v)
    for other in (answering.prompt("What is it?", images=PICTURES), answering.prompt("Hello.")):
        prompts = [answering.prompt("?", images=PICTURES[:1]), other]
        alone = tuple(answering.answer([prompt], GREEDY)[0] for prompt in prompts)
        assert answering.answer(prompts, GREEDY) == alone
    answers = [answering.answer([answering.prompt("?", images=[it])], GREEDY) for it in PICTURES]
    assert answers[0] != answers[1]


def test_a_conversation_about_pictures(glm4v: Path) -> None:
    conversation = Conversation(generator(glm4v), GREEDY)
    conversation.show(PICTURES[0])
    for question in ("What?", "And now?"):
        list(conversation.ask(question))
    assert [len(message.images) for message in conversation.messages] == [1, 0, 0, 0]
    conversation.show(*PICTURES)
    list(conversation.ask("And these?"))  # whose pictures are all that were planned
    assert conversation.num_forgotten == 1
    assert [len(message.images) for message in conversation.messages] == [0, 0, 2, 0]
    conversation.show(PICTURES[0])
    with pytest.raises(UsageError, match="3 images in a prompt; the plan has memory for 2"):
        conversation.show(*PICTURES)
    conversation.clear()
    list(conversation.ask("What?"))
    assert [len(message.images) for message in conversation.messages] == [0, 0]


def test_a_model_without_eyes(glm4v: Path, tiny: Path) -> None:
    answering = generator(glm4v, images=0)
    prompt = answering.prompt("What?", images=PICTURES)
    with pytest.raises(UsageError, match="2 images in a prompt; the plan has memory for 0"):
        answering.answer([prompt])
    with pytest.raises(UsageError, match="the plan has memory for 0"):
        Conversation(answering).show(PICTURES[0])
    reader = PromptReader.open(Checkpoint.open(tiny), Workload(images=1))
    with pytest.raises(UsageError, match="takes no images"):
        reader.check_images(PICTURES[:1])
    with pytest.raises(UsageError, match="takes no images"):
        reader.prompt("What?", images=PICTURES)
