"""GLM-4V: its published numbers over virtual GPUs, and batches that its own code gets wrong."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from closeness import close
from safetensors.torch import load_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

import duoka
from duoka import virtual
from duoka.errors import UsageError
from duoka.models import build, chatglm
from duoka.models.cache_argument import CACHE
from duoka.models.eva_clip import EvaClipConfig
from duoka.models.glm4v import GLM4VForConditionalGeneration

pytestmark = pytest.mark.usefixtures("single_sequences")

BUDGETS = {1: "virtual:1GiB", 2: "virtual:2x1GiB", 3: "virtual:3x1GiB"}
PICTURES = {"images": 1, "image_size": (112, 112)}
PAD = 1001

TOWER = {
    "hidden_size": 8,
    "num_hidden_layers": 5,
    "num_heads": 2,
    "intermediate_size": 12,
    "patch_size": 4,
    "image_size": 16,
    "num_positions": 17,
}
BEGIN, END, COUNT = 60, 61, 6
GREEDY = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
ENCODES_AHEAD = hasattr(GLM4VForConditionalGeneration, "_supports_mm_encoder_outputs")


def small(**changes: Any) -> Any:
    """A model with random weights: several heads in a group, a tower deeper than the text."""
    config = {
        "model_type": "chatglm",
        "padded_vocab_size": 64,
        "hidden_size": 24,
        "ffn_hidden_size": 20,
        "num_layers": 2,
        "num_attention_heads": 6,
        "multi_query_group_num": 2,
        "kv_channels": 4,
        "layernorm_epsilon": 1.5625e-7,
        "add_qkv_bias": True,
        "seq_length": 128,
        "boi_token_id": BEGIN,
        "eoi_token_id": END,
        "eos_token_id": [62],
        "pad_token_id": 62,
        "vision_config": TOWER,
    }
    model: Any = build({**config, **changes}).to_empty(device="cpu").float().eval()
    torch.manual_seed(3)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=0.2 if parameter.dim() == 1 else 0, std=0.4)
    return model


@pytest.fixture(scope="module")
def whole() -> Any:
    """A small model on the CPU."""
    return small()


def prompts() -> tuple[Tensor, Tensor, Tensor]:
    """Two pictures, none, and one: ids and mask padded on the left, and pixels."""
    picture = [BEGIN, 62, END]
    rows = [[1, *picture, 2, *picture, 3], [4, 5, 6], [*picture, 7, 8]]
    ids = torch.tensor([[62] * (9 - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (9 - len(row)) + [1] * len(row) for row in rows])
    pixels = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(4))
    return ids, mask, pixels


def alone() -> Iterator[tuple[slice, dict[str, Tensor]]]:
    """Where each prompt's tokens are when it is written out beside the others; it by itself."""
    ids, mask, pixels = prompts()
    for row, pictures in enumerate((pixels[:2], None, pixels[2:])):
        prompt = {"input_ids": ids[row : row + 1, mask[row] == 1]}
        length = prompt["input_ids"].shape[1]
        if pictures is not None:
            prompt["pixel_values"] = pictures
            length += len(pictures) * (COUNT - 3)
        yield slice(-length, None), prompt


@torch.no_grad()
def test_each_prompt_of_a_batch_as_it_is_alone(whole: Any) -> None:
    ids, mask, pixels = prompts()
    logits = whole(ids, attention_mask=mask, pixel_values=pixels).logits
    assert logits.shape[1] == 3 + 2 * COUNT
    for row, (columns, prompt) in enumerate(alone()):
        assert close(logits[row : row + 1, columns], whole(**prompt).logits)
    other = whole(ids, attention_mask=mask, images=pixels.flip(0)).logits
    assert close(other[1], logits[1])
    assert not close(other[0, -1], logits[0, -1], 0.01)


@torch.no_grad()
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 3, "num_return_sequences": 2},
        {"use_cache": False},
        {"cache_implementation": "static"},
        *({"prefill_chunk_size": size} for size in (1, 4, 7, 50) if ENCODES_AHEAD),
    ],
)
def test_generated_as_alone(whole: Any, options: dict[str, Any]) -> None:
    """Whatever way transformers goes, positions count each picture's patches once."""
    ids, mask, pixels = prompts()
    both = whole.generate(ids, attention_mask=mask, pixel_values=pixels, **GREEDY, **options)
    copies = options.get("num_return_sequences", 1)
    searched = {key: value for key, value in options.items() if "beams" in key or "return" in key}
    for row, (_, prompt) in enumerate(alone()):
        answer = whole.generate(**prompt, **GREEDY, **searched)[:, prompt["input_ids"].shape[1] :]
        assert both[row * copies : (row + 1) * copies, ids.shape[1] :].equal(answer)
    # By hand and from scratch, the best token after the other, for the first prompt.
    if not searched:
        (_, prompt), *_ = alone()
        grown = prompt["input_ids"]
        for _ in range(GREEDY["max_new_tokens"]):
            best = whole(grown, pixel_values=pixels[:2], use_cache=False).logits[:, -1:].argmax(-1)
            grown = torch.cat((grown, best), dim=1)
        assert both[:1, ids.shape[1] :].equal(grown[:, prompt["input_ids"].shape[1] :])


@pytest.mark.skipif(ENCODES_AHEAD, reason="transformers encodes pictures before the prompt")
def test_pictures_are_not_lost_in_chunks(whole: Any) -> None:
    ids, mask, pixels = prompts()
    with pytest.raises(UsageError, match="doesn't support chunked prefill with images"):
        whole.generate(ids, attention_mask=mask, images=pixels, prefill_chunk_size=4, **GREEDY)


@torch.no_grad()
@pytest.mark.parametrize("size", [1, 4, 9])
def test_pieces_of_a_prompt_without_positions(whole: Any, size: int) -> None:
    """The cache says how far into a picture a piece came, and what position is next."""
    (_, prompt), *_ = alone()
    ids = whole.config.image_tokens.write_out(prompt["input_ids"])["input_ids"]
    features = whole.get_image_features(prompt["pixel_values"])
    rows, outputs = features.pooler_output.flatten(0, 1), None
    for piece in ids.split(size, dim=1):
        few, rows = rows.tensor_split([int((piece == BEGIN).sum())])
        encoded = {"image": type(features)(pooler_output=[few])} if len(few) else None
        cache = None if outputs is None else outputs[CACHE]
        outputs = whole(piece, mm_encoder_outputs=encoded, past_key_values=cache, use_cache=True)
    assert outputs is not None
    assert close(outputs.logits[:, -1], whole(**prompt).logits[:, -1])


def test_the_tower_refuses_what_it_does_not_know(whole: Any) -> None:
    pixels = prompts()[2]
    with pytest.raises(TypeError, match="attention_mask"):
        whole.get_image_features(pixels, attention_mask=torch.ones(1))
    assert whole.get_image_features(pixels, return_dict=True).pooler_output.shape[0] == 3


@torch.no_grad()
def test_a_conversation_goes_on_over_its_cache(whole: Any) -> None:
    """With the new tokens alone, whose positions the cache knows, and with all of them."""
    (_, prompt), *_ = alone()
    first = whole.generate(**prompt, **GREEDY, return_dict_in_generate=True)
    said = first.sequences[:, prompt["input_ids"].shape[1] :]
    more = torch.tensor([[9, 10, 11]])
    grown = torch.cat((prompt["input_ids"], said, more), dim=1)
    expected = whole.generate(grown, pixel_values=prompt["pixel_values"], **GREEDY)[:, -5:]
    cache = first[CACHE]
    written = whole.config.image_tokens.write_out(grown)["input_ids"]
    rest = written[:, cache.get_seq_length() :]
    mask = torch.ones_like(written)
    again = copy.deepcopy(cache)
    for ids, past in ((rest, cache), (written, again)):
        answer = whole.generate(ids, attention_mask=mask, **{CACHE: past}, **GREEDY)
        assert answer[:, -5:].equal(expected)


@pytest.mark.parametrize("padding", ["left", "right"])
def test_losses_of_prompts_alone_and_together(whole: Any, padding: str) -> None:
    ids, mask, pixels = prompts()
    losses = [whole(**prompt, labels=prompt["input_ids"]).loss for _, prompt in alone()]
    # A loss is the mean over a prompt's labels but the first, and those of what is replaced.
    counts = torch.tensor([6.0, 2.0, 3.0])
    expected = (torch.stack(losses) * counts).sum() / counts.sum()
    if padding == "right":
        order = (mask == 0).long().argsort(dim=1, stable=True)
        ids, mask = ids.gather(1, order), mask.gather(1, order)
    # Nor has the first, if it comes behind padding.
    labels = ids.masked_fill((mask == 0) | (mask.cumsum(1) == 1), -100)
    arguments = {"attention_mask": mask, "labels": labels, "use_cache": False}
    assert close(whole(ids, pixel_values=pixels, **arguments).loss, expected)
    other = whole(ids, pixel_values=pixels.flip(0), **arguments).loss
    assert abs(float((other - expected).detach())) > 1e-3


def test_without_a_mask_or_a_cache(whole: Any) -> None:
    """As in training with checkpoints: repeated positions are no sign of packed sequences."""
    (_, prompt), *_ = alone()
    written = whole.config.image_tokens.write_out(prompt["input_ids"])["input_ids"]
    logits = whole(written, pixel_values=prompt["pixel_values"], use_cache=False).logits
    assert close(logits, whole(**prompt, use_cache=True).logits)


@pytest.mark.parametrize("frozen", ["vision", "layers"])
def test_gradients_reach_what_learns(frozen: str) -> None:
    model = small()
    getattr(model.model, frozen).requires_grad_(False)
    ids, mask, pixels = prompts()
    labels = ids.masked_fill(mask == 0, -100)
    model(ids, attention_mask=mask, labels=labels, pixel_values=pixels).loss.backward()
    for name, parameter in model.named_parameters():
        learns = f"model.{frozen}." not in name
        assert (parameter.grad is not None) == learns, name
        assert not learns or bool(parameter.grad.any()), name


def test_saved_under_published_names_and_read_again(whole: Any, tmp_path: Path) -> None:
    whole.save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert "transformer.vision.boi" in names
    assert "transformer.vision.transformer.layers.4.attention.query_key_value.bias" in names
    assert "transformer.encoder.layers.1.self_attention.query_key_value.weight" in names
    again = GLM4VForConditionalGeneration.from_pretrained(tmp_path).eval()
    for _, prompt in alone():
        assert close(again(**prompt).logits, whole(**prompt).logits)


def test_names_and_shapes_as_published(shared_data: Path) -> None:
    config = json.loads((shared_data / "configs" / "glm-4-9b-chat.json").read_text())
    model = build({**config, "rope_ratio": 1, "vision_config": EvaClipConfig().to_dict()})
    built = revert_weight_conversion(model, model.state_dict())
    listed = json.loads((shared_data / "state_dicts" / "glm-4v-9b.json").read_text())["shapes"]
    del listed["transformer.rotary_pos_emb.inv_freq"]  # which follows from the configuration
    assert {name: list(tensor.shape) for name, tensor in built.items()} == listed


def test_text_is_that_of_glm_4() -> None:
    """Whatever its epsilon and base: no other generation has a tower."""
    config = small(layernorm_epsilon=1e-5, rope_ratio=500).config
    assert config.rope_parameters["rope_theta"] == 5e6
    assert not config.query_length_scaling
    config = small(layernorm_epsilon=1e-5, rope_ratio=16).config
    assert config.rope_parameters["rope_type"] == "default"


@torch.no_grad()
def test_pictures_that_the_prompts_have_no_place_for(whole: Any) -> None:
    ids, mask, pixels = prompts()
    with pytest.raises(UsageError, match="have 12 features, and the prompts 18 image tokens"):
        whole(ids, attention_mask=mask, pixel_values=pixels[:2])
    with pytest.raises(UsageError, match="need input_ids"):
        whole(inputs_embeds=torch.zeros(1, 9, 24), pixel_values=pixels)


@pytest.fixture(scope="module", params=BUDGETS)
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
    return published_values(shared_data, model)


def published_values(shared_data: Path, model: Any) -> dict[str, Tensor]:
    values = load_file(shared_data / "reference" / "glm-4v-9b-tiny" / "reference.safetensors")
    return {name: value.to(model.device) for name, value in values.items()}


@torch.no_grad()
def test_the_published_numbers(model: Any, expected: dict[str, Tensor]) -> None:
    assert_published(model, expected)


def assert_published(model: Any, expected: dict[str, Tensor]) -> None:
    assert close(model(expected["input_ids"]).logits, expected["logits"])
    pixels, ids = expected["image.pixels"], expected["image.input_ids"]
    features = model.get_image_features(pixels).pooler_output
    assert close(features, expected["image.features"])
    assert close(model(ids, images=pixels).logits, expected["image.logits"])
    answer = model.generate(ids[:1], images=pixels[:1], max_new_tokens=12, do_sample=False)
    assert answer[:, : ids.shape[1]].equal(ids[:1])
    assert answer[:, ids.shape[1] :].equal(expected["image.greedy_new_ids"])


PARTS = [
    ("vision.patch_embedding",),
    *((f"vision.transformer.layers.{number}",) for number in range(3)),
    ("vision.conv",),
    ("vision.linear_proj", "vision.boi", "vision.eoi"),
    ("embed_tokens", "rotary_emb"),
    *((f"layers.{number}",) for number in range(4)),
]
"""What may be on GPUs of its own, in the order in which it runs; the last part has the head."""
CUTS = [cuts for number in (1, 2) for cuts in itertools.combinations(range(1, len(PARTS)), number)]


@torch.no_grad()
@pytest.mark.parametrize(
    "cuts",
    [pytest.param(cuts, marks=() if cuts in {(3,), (2, 8)} else pytest.mark.slow) for cuts in CUTS],
    ids=str,
)
def test_every_cut(shared_data: Path, cuts: tuple[int, ...]) -> None:
    parts = [*PARTS[:-1], (*PARTS[-1], "norm")]
    places = {
        f"model.{name}": f"vgpu:{sum(cut <= number for cut in cuts)}"
        for number, part in enumerate(parts)
        for name in part
    }
    chatglm.register()
    directory = shared_data / "reference" / "glm-4v-9b-tiny"
    whole = GLM4VForConditionalGeneration.from_pretrained(directory, dtype=torch.float32).eval()
    with virtual.gpus([None] * (len(cuts) + 1)):
        model = duoka.dispatch(whole, {**places, "lm_head": f"vgpu:{len(cuts)}"})
        assert_published(model, published_values(shared_data, model))


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
        cache = outputs[CACHE]
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
