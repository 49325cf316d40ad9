"""Blank images as arguments of a model's `forward`: of the right shapes and number of tokens.

Transformers' image processor for the model makes the pixels, with settings from the checkpoint or
the model's configuration. The number of tokens of an image is found by running the model's own
code. No tokenizer is needed: the text of a prompt consists of arbitrary token ids.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import image_processing_auto, processing_auto

from duoka import virtual
from duoka.errors import ModelError
from duoka.forecast.workload import Conditions
from duoka.models.from_checkpoint import IMAGES_CONFIG
from duoka.models.text.image_prompts import image_settings
from duoka.planner.placement import Placement

from .dispatch.dispatch import without_data
from .dispatch.place_tensors import TensorSnapshot, place

Size = tuple[int, int]
"""Width and height in pixels."""

_PIXELS = ("pixel_values", "flattened_patches", "images")
_IMAGE_TOKENS = ("image_token_id", "image_token_index", "video_token_index")
_BEGIN = (
    *("vision_start_token_id", "image_start_token_id", "boi_token_id", "boi_token_index"),
    "image_bos_token_id",
)
_END = ("vision_end_token_id", "image_end_token_id", "eoi_token_id", "eoi_token_index")
# Both modules import these tables from another one, so type checkers don't see them as exported.
_PROCESSORS: dict[str, str] = processing_auto.PROCESSOR_MAPPING_NAMES  # type: ignore[attr-defined]
_IMAGE_PROCESSORS: dict[str, dict[str, str]] = image_processing_auto.IMAGE_PROCESSOR_MAPPING_NAMES  # type: ignore[attr-defined]
_TEXT_ID = 5
_QUESTION_TOKENS = 8
# The errors of transformers' processors and image towers for unsuitable settings.
_UNFIT = (
    *(ArithmeticError, AttributeError, ImportError, LookupError, RuntimeError, TypeError),
    *(ValueError, virtual.UnknownValueError),  # from code that reads pixels
)
_HINT = "pass the inputs explicitly: duoka.check or duoka.plan(model, …, inputs={...})"


def prompts_for(model: Any, conditions: Conditions) -> ImagePrompts | None:
    """Make prompts with a workload's images; return None for a workload without images."""
    if conditions.image_size is None:
        return None
    height, width = conditions.image_size
    # A copy, because the model may be on its devices already.
    copied: Any = without_data(model)
    return ImagePrompts(copied, [(width, height)] * conditions.images)


class ImagePrompts:
    """Makes prompts with images, of any batch size and length, as arguments of `forward`.

    `least_tokens` is the length of the shortest prompt that holds the images.

    Parameters
    ----------
    model : PreTrainedModel
        On the CPU or on meta, before it is placed on devices. The model isn't changed, and may be
        placed anywhere afterwards.
    sizes : sequence of tuple of int
        Width and height in pixels of each image of a prompt.
    """

    def __init__(self, model: PreTrainedModel, sizes: Sequence[Size]) -> None:
        self._model = model
        self._sizes = list(sizes)
        self._pictures: dict[int, dict[str, Tensor]] = {}
        self._accepted = frozenset(inspect.signature(model.forward).parameters)
        if not self._accepted.intersection(_PIXELS) or not sizes:
            raise ModelError(f"{type(model).__name__} takes no images", hint="omit the images")
        with self._guessing():
            self._counts = [_num_tokens(model, size) for size in sizes]
            self.least_tokens = self._build(1, 0)["input_ids"].shape[1]

    def inputs(
        self, batch: int, prompt_tokens: int, device: torch.device | str = "cpu"
    ) -> dict[str, Tensor]:
        """Make the arguments of a batch; prompts get longer if the images need more tokens."""
        return {**self.pictures(batch, device), **self.text(batch, prompt_tokens, device)}

    def pictures(self, batch: int, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """Return the image processor's outputs for a batch."""
        with self._guessing():
            return self._accepted_on(device, self._processed(batch))

    def text(
        self, batch: int, prompt_tokens: int, device: torch.device | str = "cpu"
    ) -> dict[str, Tensor]:
        """Return the token ids of a batch, with the masks and types that model families read."""
        with self._guessing():
            return self._accepted_on(device, self._build(batch, prompt_tokens))

    def _accepted_on(
        self, device: torch.device | str, inputs: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Move the inputs that the model's `forward` accepts to a device; drop the others."""
        return {key: value.to(device) for key, value in inputs.items() if key in self._accepted}

    def _processed(self, batch: int) -> dict[str, Tensor]:
        """Return the image processor's outputs for a batch, made once per batch size."""
        if batch not in self._pictures:
            pictures = _pictures(self._model, [self._sizes] * batch)
            if "images" in self._accepted:  # the name in the published code of GLM-4V
                pictures["images"] = pictures["pixel_values"]
            self._pictures[batch] = pictures
        return self._pictures[batch]

    def _build(self, batch: int, prompt_tokens: int) -> dict[str, Tensor]:
        """Make `input_ids` [batch, tokens], and further arguments of some model families."""
        config, pictures = self._model.config, self._processed(batch)
        ids, is_image = _prompt_ids(config, self._counts, prompt_tokens)
        ids, is_image = ids.repeat(batch, 1), is_image.repeat(batch, 1)
        num_images = len(self._counts)
        arguments = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "mm_token_type_ids": is_image.int(),
            "token_type_ids": is_image.long(),
            "image_embeds_position_mask": is_image,
            "qformer_input_ids": torch.full((batch * num_images, _QUESTION_TOKENS), _TEXT_ID),
        }
        if "aspect_ratio_mask" in pictures:
            shape = (*ids.shape, num_images, pictures["aspect_ratio_mask"].shape[-1])
            arguments["cross_attention_mask"] = torch.ones(shape, dtype=torch.long)
        if getattr(config, "is_encoder_decoder", False):
            arguments["decoder_input_ids"] = ids[:, :1].clone()
        return arguments

    @contextmanager
    def _guessing(self) -> Iterator[None]:
        """Turn errors of guessed image settings into ModelError: the image inputs are unknown."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise  # a RuntimeError, too, but not due to guessed settings
        except _UNFIT as error:
            sizes = ", ".join(f"{width}x{height}" for width, height in self._sizes)
            raise ModelError(
                f"the image inputs of {type(self._model).__name__} for images of {sizes} are "
                f"unknown: {type(error).__name__}: {error}",
                hint=_HINT,
            ) from error


# ── pixels ──


def _pictures(model: PreTrainedModel, sizes: Sequence[Sequence[Size]]) -> dict[str, Tensor]:
    """Run the image processor on black images; `sizes` has a list of sizes for each prompt."""
    processor = _processor(model.config, vars(model).get(IMAGES_CONFIG, {}))
    images = [[np.zeros((height, width, 3), np.uint8) for width, height in row] for row in sizes]
    try:
        batch = processor(images=images, return_tensors="pt")
    except (ValueError, TypeError, AttributeError):  # some processors take one flat list
        batch = processor(images=[image for row in images for image in row], return_tensors="pt")
    return {
        key: value.to(model.dtype) if value.is_floating_point() else value
        for key, value in batch.items()
        if isinstance(value, Tensor)
    }


def _processor(config: Any, stated: Mapping[str, Any]) -> Any:
    """Make the model's image processor.

    Settings of the checkpoint, `stated`, override those of the configuration, and these defaults.
    """
    processor_class = _processor_class(config)
    if processor_class is None:
        raise ModelError(
            f"no image processor of transformers for {config.model_type!r} runs here",
            hint=f"install pillow, or torchvision built for this torch; otherwise {_HINT}",
        )
    stated = {name: value for name, value in stated.items() if name not in _NO_SETTINGS}
    processor = processor_class(**{**dict(_settings(processor_class(), config)), **stated})
    processor_of_texts = getattr(transformers, _PROCESSORS.get(config.model_type, ""), None)
    for name, value in image_settings(processor_of_texts).items():
        if name in _OF_TILES and name not in stated:
            setattr(processor, name, value)
    return processor


def _processor_class(config: Any) -> Any:
    """Find the processor class by model type, a type with the same processor, or image tower.

    Return None if transformers has no such class that runs here.
    """
    class_name = _PROCESSORS.get(config.model_type)
    relatives = [kind for kind, name in _PROCESSORS.items() if class_name and name == class_name]
    tower = _vision_config(config)
    kinds = [config.model_type, *relatives, tower.model_type]
    if hasattr(tower, "temporal_patch_size"):
        kinds.append("qwen2_vl")  # patches in a row, and a grid for each image
    elif _image_side(config) is not None:
        kinds.append("clip")  # one square of the tower's size
    for kind in kinds:
        backends = _IMAGE_PROCESSORS.get(kind) or {}
        for name in ("pil", "torchvision"):
            processor_class = getattr(transformers, backends.get(name) or "", None)
            # If a class's libraries are missing, transformers has a dummy in its place.
            if processor_class is not None and not getattr(processor_class, "is_dummy", False):
                return processor_class
    return None


def _vision_config(config: Any) -> Any:
    """Return the configuration of the image tower, or the given one if there is none inside."""
    for name in ("vision_config", "encoder"):
        part = getattr(config, name, None)
        if isinstance(part, dict):  # in configuration classes that come with a checkpoint
            return PreTrainedConfig(**part)
        if part is not None:
            return _vision_config(part)
    return config


def _settings(processor: Any, config: Any) -> Iterator[tuple[str, Any]]:
    """Yield the settings of a processor that the model's configuration states, by name."""
    parts = (_vision_config(config), config)
    for name in dir(processor):
        default = getattr(processor, name)
        stated = _first_stated(parts, (_RENAMED.get(name, name),))
        if name.startswith("_") or callable(default) or stated is None:
            continue
        if name in _FROM_CONFIG or type(stated) is type(default):
            yield name, stated
    side = _image_side(config)
    if side is not None:
        yield from _size_settings(processor, side)


# Settings taken from the configuration whatever their type; entries of a checkpoint that aren't
# settings; settings of tiles; and names in the configuration that differ from the processor's.
_FROM_CONFIG = frozenset({"patch_size", "temporal_patch_size", "merge_size", "max_image_tiles"})
_NO_SETTINGS = frozenset(
    {"auto_map", "feature_extractor_type", "image_processor_type", "processor_class"}
)
_OF_TILES = frozenset({"crop_to_patches", "min_patches", "max_patches"})
_RENAMED = {"merge_size": "spatial_merge_size", "max_image_tiles": "max_num_tiles"}
_PIXEL_COUNT = 4096  # a longest edge above this is a number of pixels


def _image_side(config: Any) -> int | None:
    """Return the side in pixels of the images that the tower takes; None if not stated."""
    stated = _first_stated((_vision_config(config), config), ("image_size",))
    if isinstance(stated, (list, tuple)):
        stated = stated[0]
    return stated if isinstance(stated, int) else None


def _size_settings(processor: Any, side: int) -> Iterator[tuple[str, Any]]:
    """Yield a processor's settings of edge lengths, each edge with the tower's side."""
    for name in ("size", "crop_size", "max_image_size"):
        default = getattr(processor, name, None)
        if default is None or isinstance(default, int):
            continue
        edges = {edge: length for edge, length in dict(default).items() if length is not None}
        if edges and all(length < _PIXEL_COUNT for length in edges.values()):
            yield name, dict.fromkeys(edges, side)


def _first_stated(parts: Sequence[Any], names: Sequence[str]) -> Any:
    """Return the first attribute that isn't None, by part, then by name; None without any."""
    values = (getattr(part, name, None) for part in parts for name in names)
    return next((value for value in values if value is not None), None)


# ── tokens ──


def _num_tokens(model: PreTrainedModel, size: Size) -> int:
    """Return the number of prompt tokens of an image; 0 for families without image tokens."""
    # Some families state a fixed number. For others the model's own code is run, which accounts for
    # resolutions, tiles and merging: an image of this size has as many tokens as its features have
    # rows, computed without data on a virtual GPU.
    stated = _first_stated((model.config,), ("num_query_tokens", "latent_query_num"))
    if stated is not None:
        return int(stated)
    pictures = _pictures(model, [[size]])
    owner = _feature_owner(model)
    if owner is None:
        marks = _first_stated((model.config,), (*_IMAGE_TOKENS, *_BEGIN))
        return 0 if marks is None else 1
    names = inspect.signature(owner.get_image_features).parameters
    snapshot = TensorSnapshot(model)
    # A single virtual GPU, as mixed devices in model code are for the check to find.
    device = virtual.virtual_device(0)
    with virtual.unnamed_gpus([None], data="meta"), torch.no_grad():
        try:
            place(model, Placement(entries=(("", str(device)),)))
            inputs = {key: value.to(device) for key, value in pictures.items() if key in names}
            return sum(part.numel() // part.shape[-1] for part in _features(owner, inputs))
        finally:
            snapshot.restore()


def _feature_owner(model: PreTrainedModel) -> Any:
    """Return the innermost part of the model that has `get_image_features`; None without one."""
    parts = (getattr(model, "model", None), getattr(model, model.base_model_prefix, None), model)
    return next((part for part in parts if hasattr(part, "get_image_features")), None)


def _features(owner: Any, pictures: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the image features of a part, as a list of tensors [..., hidden size]."""
    features = owner.get_image_features(**pictures)
    features = getattr(features, "pooler_output", features)
    return [features] if isinstance(features, Tensor) else list(features)


def image_token_id(config: Any) -> int | None:
    """Return the id of the image token; None if the configuration has none."""
    stated = _first_stated((config,), _IMAGE_TOKENS)
    words = getattr(config, "vocabulary_map", None) or {}
    return stated if isinstance(stated, int) else words.get("<image>")


def _prompt_ids(config: Any, counts: Sequence[int], prompt_tokens: int) -> tuple[Tensor, Tensor]:
    """Return the token ids of a prompt, and a mask of its image tokens: [tokens] each.

    `counts` has the number of tokens of each image. With two images of 3 tokens, and b, e as begin
    and end of an image:

        text … text  b i i i e  b i i i e  question
    """
    begin, end = (_first_stated((config,), names) for names in (_BEGIN, _END))
    # `text` becomes an id that isn't a special token of the configuration.
    special = [value for name, value in vars(config).items() if "token" in name]
    text = next(number for number in range(_TEXT_ID, 1000) if number not in special)
    image = image_token_id(config)
    if begin == image:  # then begin and end are counted among the image tokens
        begin = end = None
    images: list[tuple[int, bool]] = []
    for count in counts:
        for token, repeats in ((begin, 1), (text if image is None else image, count), (end, 1)):
            is_image = token is not begin and token is not end
            images += [(token, is_image)] * repeats if isinstance(token, int) else []
    num_text = max(1, prompt_tokens - len(images) - _QUESTION_TOKENS)
    tokens = [*[(text, False)] * num_text, *images, *[(text, False)] * _QUESTION_TOKENS]
    return torch.tensor([token for token, _ in tokens]), torch.tensor([mask for _, mask in tokens])
