"""Images as a model's `forward` takes them: right in shape and number, without content.

Transformers' own image processor for the model makes the pixels, set up by the model's
configuration, and the model's own code tells the number of tokens of an image. No tokenizer is
needed: the words of a prompt are made up.
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
# Both tables come from another module there, which makes them no export for a type checker.
_PROCESSORS: dict[str, str] = processing_auto.PROCESSOR_MAPPING_NAMES  # type: ignore[attr-defined]
_IMAGE_PROCESSORS: dict[str, dict[str, str]] = image_processing_auto.IMAGE_PROCESSOR_MAPPING_NAMES  # type: ignore[attr-defined]
_TEXT_ID = 5
_QUESTION_TOKENS = 8
# All that transformers' processors and a model's tower raise for settings that don't suit them.
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
    return ImagePrompts(model, [(width, height)] * conditions.images)


class ImagePrompts:
    """Prompts with images, of any batch and length, as arguments of `forward`.

    `least_tokens` is the length of the shortest prompt that holds the images.

    Parameters
    ----------
    model : PreTrainedModel
        On the CPU or on meta, before it is spread; it stays as it is, and may go anywhere
        afterwards.
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
        """Make the arguments of a batch; prompts are longer where the images need more tokens."""
        return {**self.pictures(batch, device), **self.text(batch, prompt_tokens, device)}

    def pictures(self, batch: int, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """Return the image processor's outputs for a batch."""
        with self._guessing():
            return self._accepted_on(device, self._processed(batch))

    def text(
        self, batch: int, prompt_tokens: int, device: torch.device | str = "cpu"
    ) -> dict[str, Tensor]:
        """Return the ids of a batch, with the masks of image tokens that families read."""
        with self._guessing():
            return self._accepted_on(device, self._build(batch, prompt_tokens))

    def _accepted_on(
        self, device: torch.device | str, inputs: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        return {key: value.to(device) for key, value in inputs.items() if key in self._accepted}

    def _processed(self, batch: int) -> dict[str, Tensor]:
        if batch not in self._pictures:
            pictures = _pictures(self._model, [self._sizes] * batch)
            if "images" in self._accepted:  # as the published code of GLM-4V calls them
                pictures["images"] = pictures["pixel_values"]
            self._pictures[batch] = pictures
        return self._pictures[batch]

    def _build(self, batch: int, prompt_tokens: int) -> dict[str, Tensor]:
        """Make `input_ids` [batch, tokens], and the arguments that families have beside them."""
        config, pictures = self._model.config, self._processed(batch)
        ids, is_image = _ids(config, self._counts, prompt_tokens)
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
        """Turn errors of guessed settings into the error that the family isn't known."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise  # a RuntimeError, and no fault of the guess
        except _UNFIT as error:
            sizes = ", ".join(f"{width}x{height}" for width, height in self._sizes)
            raise ModelError(
                f"the image inputs of {type(self._model).__name__} for images of {sizes} are "
                f"unknown: {type(error).__name__}: {error}",
                hint=_HINT,
            ) from error


# ── pixels ──


def _pictures(model: PreTrainedModel, sizes: Sequence[Sequence[Size]]) -> dict[str, Tensor]:
    """Process black images; `sizes` has a list for each prompt."""
    processor = _processor(model.config, vars(model).get(IMAGES_CONFIG, {}))
    images = [[np.zeros((height, width, 3), np.uint8) for width, height in row] for row in sizes]
    try:
        batch = processor(images=images, return_tensors="pt")
    except (ValueError, TypeError, AttributeError):  # some take one flat list
        batch = processor(images=[image for row in images for image in row], return_tensors="pt")
    return {
        key: value.to(model.dtype) if value.is_floating_point() else value
        for key, value in batch.items()
        if isinstance(value, Tensor)
    }


def _processor(config: Any, stated: Mapping[str, Any]) -> Any:
    """Make the family's image processor, with the settings of its checkpoint or configuration.

    `stated` are the checkpoint's settings.
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
    """Find the class for the model, for a relative with the same processor, or for its tower."""
    class_name = _PROCESSORS.get(config.model_type)
    relatives = [kind for kind, name in _PROCESSORS.items() if class_name and name == class_name]
    tower = _vision(config)
    kinds = [config.model_type, *relatives, tower.model_type]
    if hasattr(tower, "temporal_patch_size"):
        kinds.append("qwen2_vl")  # patches in a row, and a grid for each image
    elif _side(config) is not None:
        kinds.append("clip")  # one square of the tower's size
    for kind in kinds:
        backends = _IMAGE_PROCESSORS.get(kind) or {}
        for name in ("pil", "torchvision"):
            processor_class = getattr(transformers, backends.get(name) or "", None)
            # Where its libraries are missing, transformers has a dummy.
            if processor_class is not None and not getattr(processor_class, "is_dummy", False):
                return processor_class
    return None


def _vision(config: Any) -> Any:
    """Return the configuration of the vision tower."""
    for name in ("vision_config", "encoder"):
        part = getattr(config, name, None)
        if isinstance(part, dict):  # in configurations that come with a model
            return PreTrainedConfig(**part)
        if part is not None:
            return _vision(part)
    return config


def _settings(processor: Any, config: Any) -> Iterator[tuple[str, Any]]:
    """Yield the configuration's settings under a processor's names."""
    parts = (_vision(config), config)
    for name in dir(processor):
        default = getattr(processor, name)
        stated = _first_stated(parts, (_RENAMED.get(name, name),))
        if name.startswith("_") or callable(default) or stated is None:
            continue
        if name in _FROM_CONFIG or type(stated) is type(default):
            yield name, stated
    side = _side(config)
    if side is not None:
        yield from _sized(processor, side)


_FROM_CONFIG = frozenset({"patch_size", "temporal_patch_size", "merge_size", "max_image_tiles"})
_NO_SETTINGS = frozenset(
    {"auto_map", "feature_extractor_type", "image_processor_type", "processor_class"}
)
_OF_TILES = frozenset({"crop_to_patches", "min_patches", "max_patches"})
_RENAMED = {"merge_size": "spatial_merge_size", "max_image_tiles": "max_num_tiles"}
_PIXEL_COUNT = 4096  # a longest edge above this is a number of pixels


def _side(config: Any) -> int | None:
    stated = _first_stated((_vision(config), config), ("image_size",))
    if isinstance(stated, (list, tuple)):
        stated = stated[0]
    return stated if isinstance(stated, int) else None


def _sized(processor: Any, side: int) -> Iterator[tuple[str, Any]]:
    for name in ("size", "crop_size", "max_image_size"):
        default = getattr(processor, name, None)
        if default is None or isinstance(default, int):
            continue
        edges = {edge: length for edge, length in dict(default).items() if length is not None}
        if edges and all(length < _PIXEL_COUNT for length in edges.values()):
            yield name, dict.fromkeys(edges, side)


def _first_stated(parts: Sequence[Any], names: Sequence[str]) -> Any:
    values = (getattr(part, name, None) for part in parts for name in names)
    return next((value for value in values if value is not None), None)


# ── tokens ──


def _num_tokens(model: PreTrainedModel, size: Size) -> int:
    """Return the number of prompt tokens of an image; 0 without tokens."""
    # The model's own code tells, whatever the family does with resolutions, tiles and merging: the
    # features of one image of this size are computed without data on a virtual GPU, and there are
    # as many tokens as rows of features. Families with a fixed number of queries state it.
    stated = _first_stated((model.config,), ("num_query_tokens", "latent_query_num"))
    if stated is not None:
        return int(stated)
    pictures = _pictures(model, [[size]])
    owner = _owner(model)
    if owner is None:
        marks = _first_stated((model.config,), (*_IMAGE_TOKENS, *_BEGIN))
        return 0 if marks is None else 1
    names = inspect.signature(owner.get_image_features).parameters
    snapshot = TensorSnapshot(model)
    # A single virtual GPU: the check itself finds model code that mixes devices.
    device = virtual.virtual_device(0)
    with virtual.unnamed_gpus([None], data="meta"), torch.no_grad():
        try:
            place(model, Placement(entries=(("", str(device)),)))
            inputs = {key: value.to(device) for key, value in pictures.items() if key in names}
            return sum(part.numel() // part.shape[-1] for part in _features(owner, inputs))
        finally:
            snapshot.restore()


def _owner(model: PreTrainedModel) -> Any:
    """Return the innermost part with image features; outer parts pass arguments on."""
    parts = (getattr(model, "model", None), getattr(model, model.base_model_prefix, None), model)
    return next((part for part in parts if hasattr(part, "get_image_features")), None)


def _features(owner: Any, pictures: Mapping[str, Tensor]) -> list[Tensor]:
    features = owner.get_image_features(**pictures)
    features = getattr(features, "pooler_output", features)
    return [features] if isinstance(features, Tensor) else list(features)


def _image_id(config: Any) -> int | None:
    stated = _first_stated((config,), _IMAGE_TOKENS)
    words = getattr(config, "vocabulary_map", None) or {}
    return stated if isinstance(stated, int) else words.get("<image>")


def _ids(config: Any, counts: Sequence[int], prompt_tokens: int) -> tuple[Tensor, Tensor]:
    """Return the ids of a prompt, and a mask of its image tokens: [tokens] each.

    With two images of 3 tokens, and b, e as begin and end of an image:

        text … text  b i i i e  b i i i e  question
    """
    begin, end = (_first_stated((config,), names) for names in (_BEGIN, _END))
    # A token that means nothing to the model.
    special = [value for name, value in vars(config).items() if "token" in name]
    text, image = next(n for n in range(_TEXT_ID, 1000) if n not in special), _image_id(config)
    if begin == image:  # it is counted as an image token, as the end is
        begin = end = None
    images: list[tuple[int, bool]] = []
    for count in counts:
        for token, repeats in ((begin, 1), (text if image is None else image, count), (end, 1)):
            is_image = token is not begin and token is not end
            images += [(token, is_image)] * repeats if isinstance(token, int) else []
    num_text = max(1, prompt_tokens - len(images) - _QUESTION_TOKENS)
    tokens = [*[(text, False)] * num_text, *images, *[(text, False)] * _QUESTION_TOKENS]
    return torch.tensor([token for token, _ in tokens]), torch.tensor([mask for _, mask in tokens])
