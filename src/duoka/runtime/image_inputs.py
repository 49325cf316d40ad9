"""Images as a model's `forward` takes them: right in shape and number, without content.

Transformers' own image processor for the model makes the pixels, set up by the model's
configuration, and the model's own code says how many tokens an image takes. No tokenizer is needed,
so none of a prompt's words are real ones.
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
    "vision_start_token_id",
    "image_start_token_id",
    "boi_token_id",
    "boi_token_index",
    "image_bos_token_id",
)
_END = ("vision_end_token_id", "image_end_token_id", "eoi_token_id", "eoi_token_index")
# Both tables come from another module there, which makes them no export for a type checker.
_PROCESSORS: dict[str, str] = processing_auto.PROCESSOR_MAPPING_NAMES  # type: ignore[attr-defined]
_IMAGE_PROCESSORS: dict[str, dict[str, str]] = image_processing_auto.IMAGE_PROCESSOR_MAPPING_NAMES  # type: ignore[attr-defined]
_TEXT_ID = 5
_QUESTION_TOKENS = 8
_UNFIT = (
    ArithmeticError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
    virtual.UnknownValueError,  # of code that reads pixels
)
"""What transformers' processors and a model's tower raise for settings that don't suit them."""
_HINT = "pass inputs yourself: duoka.check or duoka.plan(model, …, inputs={...})"


def prompts_for(model: Any, conditions: Conditions) -> ImagePrompts | None:
    """The prompts with the images that a workload has; None where it has none."""
    if conditions.image_size is None:
        return None
    height, width = conditions.image_size
    return ImagePrompts(model, [(width, height)] * conditions.images)


class ImagePrompts:
    """Prompts with certain images, of any batch and length; as arguments of `forward`.

    The model is on the CPU or on meta, not yet spread, and is left as it was; afterwards it may go
    anywhere. `sizes` are width and height in pixels of each image of a prompt; `least_tokens` is
    the length of the shortest prompt that holds the images.
    """

    def __init__(self, model: PreTrainedModel, sizes: Sequence[Size]) -> None:
        self._model = model
        self._sizes = list(sizes)
        self._pictures: dict[int, dict[str, Tensor]] = {}
        self._accepted = frozenset(inspect.signature(model.forward).parameters)
        if not self._accepted.intersection(_PIXELS) or not sizes:
            raise ModelError(f"{type(model).__name__} takes no images", hint="leave the images out")
        with self._guessing():
            self._counts = [_num_tokens(model, size) for size in sizes]
            self.least_tokens = self._build(1, 0)["input_ids"].shape[1]

    def inputs(
        self, batch: int, prompt_tokens: int, device: torch.device | str = "cpu"
    ) -> dict[str, Tensor]:
        """The arguments of `forward` for one batch; prompts are longer if the images need more."""
        return {
            **self.pictures(batch, device),
            **self.text(batch, prompt_tokens, device),
        }

    def pictures(self, batch: int, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """What the image processor makes of one batch's images."""
        with self._guessing():
            return self._accepted_on(device, self._processed(batch))

    def text(
        self, batch: int, prompt_tokens: int, device: torch.device | str = "cpu"
    ) -> dict[str, Tensor]:
        """The ids of one batch, and what says where the images are."""
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
        prompt = _Prompt(self._model.config, self._counts, self._processed(batch))
        return prompt.arguments(batch, prompt_tokens)

    @contextmanager
    def _guessing(self) -> Iterator[None]:
        """Say that this family isn't known where what was guessed of its settings fails."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise  # which is a RuntimeError, and says nothing of the guess
        except _UNFIT as error:
            sizes = ", ".join(f"{width}x{height}" for width, height in self._sizes)
            raise ModelError(
                f"duoka doesn't know how {type(self._model).__name__} takes images of "
                f"{sizes}: {type(error).__name__}: {error}",
                hint=_HINT,
            ) from error


# ── pixels ──


def _pictures(model: PreTrainedModel, sizes: Sequence[Sequence[Size]]) -> dict[str, Tensor]:
    """What the image processor makes of black images, one list of sizes for each prompt."""
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
    """The family's image processor, with the settings that are stated or its configuration names.

    `stated` is what a checkpoint says of it.
    """
    processor_class = _processor_class(config)
    if processor_class is None:
        raise ModelError(
            f"transformers has no image processor for {config.model_type!r} that runs here",
            hint=f"install pillow, or torchvision built for this torch; or {_HINT}",
        )
    stated = {name: value for name, value in stated.items() if name not in _NO_SETTINGS}
    processor = processor_class(**{**dict(_settings(processor_class(), config)), **stated})
    whole = getattr(transformers, _PROCESSORS.get(config.model_type, ""), None)
    for name, value in image_settings(whole).items():
        if name in _OF_TILES and name not in stated:
            setattr(processor, name, value)
    return processor


def _processor_class(config: Any) -> Any:
    """The class for the model, or for one that shares its processor, or for its tower's format."""
    class_name = _PROCESSORS.get(config.model_type)
    alike = [kind for kind, name in _PROCESSORS.items() if class_name and name == class_name]
    tower = _vision(config)
    kinds = [config.model_type, *alike, tower.model_type]
    if hasattr(tower, "temporal_patch_size"):
        kinds.append("qwen2_vl")  # patches in a row, and a grid for each image
    elif _side(config) is not None:
        kinds.append("clip")  # one square of the tower's size
    classes = (getattr(transformers, name, None) for kind in kinds for name in _named(kind))
    return next(
        # Where its libraries aren't there, transformers leaves a stand-in.
        (it for it in classes if it is not None and not getattr(it, "is_dummy", False)),
        None,
    )


def _named(model_type: str) -> list[str]:
    backends = _IMAGE_PROCESSORS.get(model_type) or {}
    return [backends[name] for name in ("pil", "torchvision") if backends.get(name)]


def _vision(config: Any) -> Any:
    """The configuration of the tower."""
    for name in ("vision_config", "encoder"):
        part = getattr(config, name, None)
        if isinstance(part, dict):  # in configurations that come with a model
            return PreTrainedConfig(**part)
        if part is not None:
            return _vision(part)
    return config


def _settings(processor: Any, config: Any) -> Iterator[tuple[str, Any]]:
    """What the configuration says under a default processor's names, and the image's size."""
    parts = (_vision(config), config)
    for name in dir(processor):
        default = getattr(processor, name)
        stated = _first(parts, (_RENAMED.get(name, name),))
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
_PIXEL_COUNT = 4096
"""A longest edge above this is a number of pixels."""


def _side(config: Any) -> int | None:
    stated = _first((_vision(config), config), ("image_size",))
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


def _first(parts: Sequence[Any], names: Sequence[str]) -> Any:
    values = (getattr(part, name, None) for part in parts for name in names)
    return next((value for value in values if value is not None), None)


# ── tokens ──


def _num_tokens(model: PreTrainedModel, size: Size) -> int:
    """The tokens of the prompt that one image takes the place of; 0 where it takes none."""
    stated = _first((model.config,), ("num_query_tokens", "latent_query_num"))
    if stated is not None:
        return int(stated)
    pictures = _pictures(model, [[size]])
    owner = _owner(model)
    if owner is None:
        marks = _first((model.config,), (*_IMAGE_TOKENS, *_BEGIN))
        return 0 if marks is None else 1
    names = inspect.signature(owner.get_image_features).parameters
    snapshot = TensorSnapshot(model)
    # One virtual GPU: model code that mixes devices is for the check itself to find.
    device = virtual.virtual_device(0)
    with virtual.unnamed_gpus([None], data="meta"), torch.no_grad():
        try:
            place(model, Placement(entries=(("", str(device)),)))
            inputs = {key: value.to(device) for key, value in pictures.items() if key in names}
            return sum(part.numel() // part.shape[-1] for part in _features(owner, inputs))
        finally:
            snapshot.restore()


def _owner(model: PreTrainedModel) -> Any:
    """The innermost part that makes image features: the outer ones only pass arguments on."""
    parts = (getattr(model, "model", None), getattr(model, model.base_model_prefix, None), model)
    return next((part for part in parts if hasattr(part, "get_image_features")), None)


def _features(owner: Any, pictures: Mapping[str, Tensor]) -> list[Tensor]:
    features = owner.get_image_features(**pictures)
    features = getattr(features, "pooler_output", features)
    return [features] if isinstance(features, Tensor) else list(features)


def _image_id(config: Any) -> int | None:
    stated = _first((config,), _IMAGE_TOKENS)
    words = getattr(config, "vocabulary_map", None) or {}
    return stated if isinstance(stated, int) else words.get("<image>")


class _Prompt:
    """The text around the images, and what says where they are."""

    def __init__(self, config: Any, counts: Sequence[int], pictures: Mapping[str, Tensor]) -> None:
        self.config = config
        self.counts = counts
        self.pictures = pictures

    def arguments(self, batch: int, prompt_tokens: int) -> dict[str, Tensor]:
        """`input_ids` [batch, tokens], and what families want beside them."""
        ids, places = self._ids(prompt_tokens)
        ids, places = ids.repeat(batch, 1), places.repeat(batch, 1)
        arguments = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "mm_token_type_ids": places.int(),
            "token_type_ids": places.long(),
            "image_embeds_position_mask": places,
            "qformer_input_ids": torch.full((batch * len(self.counts), _QUESTION_TOKENS), _TEXT_ID),
        }
        if "aspect_ratio_mask" in self.pictures:
            num_tiles = self.pictures["aspect_ratio_mask"].shape[-1]
            shape = (*ids.shape, len(self.counts), num_tiles)
            arguments["cross_attention_mask"] = torch.ones(shape, dtype=torch.long)
        if getattr(self.config, "is_encoder_decoder", False):
            arguments["decoder_input_ids"] = ids[:, :1].clone()
        return arguments

    def _ids(self, prompt_tokens: int) -> tuple[Tensor, Tensor]:
        """Ids, and where the images are: [tokens] each."""
        begin, end = (_first((self.config,), names) for names in (_BEGIN, _END))
        text, image = self._text_id(), _image_id(self.config)
        if begin == image:  # which is one of those that are counted, as the end is
            begin = end = None
        ids: list[tuple[int, bool]] = []
        for count in self.counts:
            for token, repeats in ((begin, 1), (text if image is None else image, count), (end, 1)):
                is_image = token is not begin and token is not end
                ids += [(token, is_image)] * repeats if isinstance(token, int) else []
        before = [(text, False)] * max(1, prompt_tokens - len(ids) - _QUESTION_TOKENS)
        ids = [*before, *ids, *([(text, False)] * _QUESTION_TOKENS)]
        return torch.tensor([token for token, _ in ids]), torch.tensor([place for _, place in ids])

    def _text_id(self) -> int:
        """A token that means nothing to the model."""
        named = {name: value for name, value in vars(self.config).items() if "token" in name}
        return next(number for number in range(_TEXT_ID, 1000) if number not in named.values())
