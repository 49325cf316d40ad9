"""GLM-4V's published numbers on one, two and three virtual GPUs; batches its own code got wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from closeness import close
from safetensors.torch import load_file
from torch import Tensor

import duoka

BUDGETS = {1: "virtual:1GiB", 2: "virtual:2x1GiB", 3: "virtual:3x1GiB"}
PICTURES = {"images": 1, "image_size": (112, 112)}
PAD = 1001


@pytest.fixture(params=BUDGETS)
def model(request: pytest.FixtureRequest, shared_data: Path) -> Any:
    """The reference model on so many virtual GPUs."""
    workload = duoka.Workload(prompt_tokens=64, new_tokens=12, dtype="float32", **PICTURES)
    directory = shared_data / "reference" / "glm-4v-9b-tiny"
    plan = duoka.plan(directory, BUDGETS[request.param], workload, use_all=True)
    assert len(plan.devices) == request.param
    return duoka.load(plan)


@pytest.fixture
def expected(shared_data: Path, model: Any) -> dict[str, Tensor]:
    """What the original code computes, on the model's first GPU."""
    values = load_file(shared_data / "reference" / "glm-4v-9b-tiny" / "reference.safetensors")
    return {name: value.to(model.device) for name, value in values.items()}


@torch.no_grad()
def test_the_published_numbers(model: Any, expected: dict[str, Tensor]) -> None:
    assert close(model(expected["input_ids"]).logits, expected["logits"])
    pixels, ids = expected["image.pixels"], expected["image.input_ids"]
    features = model.model.vision(pixels.to(model.model.vision.boi.device))
    assert close(features, expected["image.features"])
    assert close(model(ids, images=pixels).logits, expected["image.logits"])
    told = model.generate(ids[:1], images=pixels[:1], max_new_tokens=12, do_sample=False)
    assert told[:, : ids.shape[1]].equal(ids[:1])
    assert told[:, ids.shape[1] :].equal(expected["image.greedy_new_ids"])


@torch.no_grad()
def test_prompts_that_are_written_out(model: Any, expected: dict[str, Tensor]) -> None:
    """A token for each of a picture's, and decoding by hand: positions follow the pictures."""
    pixels = expected["image.pixels"][:1]
    prompt = model.config.image_tokens.write_out(expected["image.input_ids"][:1])
    outputs = model(**prompt, pixel_values=pixels, use_cache=True)
    assert close(outputs.logits, expected["image.logits"][:1])
    said = []
    for _ in range(12):
        said.append(int(outputs.logits[0, -1].argmax()))
        cache = outputs.past_key_values
        outputs = model(
            torch.tensor([said[-1:]], device=model.device), past_key_values=cache, use_cache=True
        )
    assert said == expected["image.greedy_new_ids"][0].tolist()


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_text_and_pictures_in_a_batch(model: Any, expected: dict[str, Tensor], side: str) -> None:
    ids, text = expected["image.input_ids"][:1], torch.tensor([[5, 6, 7, 8]], device=model.device)
    padding = torch.full((1, ids.shape[1] - text.shape[1]), PAD, device=model.device)
    parts = (padding, text) if side == "left" else (text, padding)
    row = torch.cat(parts, dim=1)
    mask = torch.cat(((row != PAD).long(), torch.ones_like(ids)))
    logits = model(
        torch.cat((row, ids)), attention_mask=mask, pixel_values=expected["image.pixels"][:1]
    ).logits
    alone = model(text).logits[0]
    where = slice(-4, None) if side == "left" else slice(4)
    assert close(logits[0, where], alone)
    assert close(logits[1], expected["image.logits"][0])


def test_losses_of_a_padded_batch(model: Any, expected: dict[str, Tensor]) -> None:
    """Each row as it would be alone, pictures' own tokens without a loss; the tower learns."""
    pixels, ids = expected["image.pixels"], expected["image.input_ids"]
    padding = torch.full((1, 3), PAD, device=model.device)
    short, long = (
        ids[:1],
        torch.cat((ids[1:], torch.tensor([[60, 61, 62]], device=model.device)), dim=1),
    )
    batch = torch.cat((torch.cat((short, padding), dim=1), long))
    mask = (batch != PAD).long()
    labels = batch.masked_fill(mask == 0, -100)
    together = model(batch, attention_mask=mask, labels=labels, pixel_values=pixels).loss
    losses = [
        model(row, labels=row, pixel_values=picture[None]).loss
        for row, picture in zip((short, long), pixels, strict=True)
    ]
    # A row's loss is the mean over its labels, but for the first one and that of the patches.
    counts = torch.tensor([row.shape[1] - 2.0 for row in (short, long)], device=model.device)
    assert close(together, (torch.stack(losses) * counts).sum() / counts.sum())
    other = model(short, labels=short, pixel_values=pixels[1:]).loss
    assert abs(float((other - losses[0]).detach())) > 1e-4
    together.backward()
    first = model.model.vision.transformer.layers[0].mlp.fc1.weight
    assert first.grad is not None
    assert float(first.grad.abs().sum()) > 0


@torch.no_grad()
def test_a_map_that_keeps_the_marks_around_a_picture_elsewhere(shared_data: Path) -> None:
    """accelerate's maps put them where the text's last layers are."""
    directory = shared_data / "reference" / "glm-4v-9b-tiny"
    device_map = {"": "cuda:0", "model.vision.boi": "cuda:1", "model.vision.eoi": "cuda:1"}
    workload = duoka.Workload(prompt_tokens=64, new_tokens=12, dtype="float32", **PICTURES)
    report = duoka.check(directory, device_map, workload=workload, images=[(112, 112)])
    assert not report.faults
    assert report.stop is None
